"""What an alignment job says, and what it leaves at a site.

Where the data lie, and which column names the rows, each site's own policy says.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import JobDocument, SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.checks import expect
from nvflare_plugins.base.declared import Name, Seconds, Words, document
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.base.files import write_durably
from nvflare_plugins.data.identity import load_ids
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.forgetting import Forgetting
from nvflare_plugins.site.memory.store import read_arrays

PROFILE = "psi"  # the one way in which this job protects ids; the evidence names it


@document
class AlignmentJob(JobDocument):
    """One alignment of one or more data sets between all sites of the job."""

    KIND: ClassVar[str] = "alignment"
    profile: ClassVar[str] = PROFILE
    tracking: ClassVar[bool] = False

    data_sets: Annotated[list[Name], Len(1), Words("a list of names of data sets, at least one")]
    """Names in every site's policy, such as those of the training and the evaluation set; each is aligned on its own.
    """
    deadline_s: Seconds = 0.0
    """Longest time that an exchange may wait for the slowest site; 0 derives it. However large a set is, a site works
    for a few seconds between two exchanges, and reads its files before the first.
    """

    def __post_init__(self) -> None:
        expect("data_sets names a data set twice", len(set(self.data_sets)) == len(self.data_sets))


# What an alignment leaves at a site: which of its rows are common, in the order that all parties share. No ids.


FILE = "alignment.npz"
_FORMAT = "veilboost-alignment-1"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The common rows of one data set.

    Shapes: positions: int64[n_common], all different: row of this site's table for each common row, in the order of
        the canonical ids, which is the same at all parties.

    Attributes:
        n_rows: rows of this site's table.
        fingerprint: keyed hash of the table's ids in their order; the key is the site's own.
        proof: HMAC of the common ids in order; the same at all parties of the job, and no other party can test it.
    """

    data_set: str
    positions: NDArray[np.int64]
    n_rows: int
    fingerprint: str
    proof: bytes

    @property
    def n_common(self) -> int:
        """Number of common rows."""
        return self.positions.size

    def take(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the common rows of a column or matrix, in the common order.

        Shapes: values: [n_rows, ...]; result: [n_common, ...].

        Raises:
            ConfigurationError: it has another number of rows than the table that was aligned.
        """
        self.check_length(len(values))
        return values[self.positions]

    def check_length(self, n_rows: int) -> None:
        """Look whether a table has as many rows as the one that was aligned. Raises: DataRefusal."""
        if n_rows != self.n_rows:
            raise DataRefusal(f"data set {self.data_set!r} has another number of rows than when it was aligned")


def save_alignments(
    folder: Path, job_id: str, site: str, sites: Sequence[str], alignments: Sequence[Alignment]
) -> Path:
    """Write the alignments of one job into its run folder, for this site's user only. Returns the path."""
    header = {
        "format": _FORMAT,
        "job_id": job_id,
        "site": site,
        "sites": list(sites),
        "data_sets": [
            {"name": a.data_set, "n_rows": a.n_rows, "fingerprint": a.fingerprint, "proof": a.proof.hex()}
            for a in alignments
        ],
    }
    content = io.BytesIO()
    arrays: dict[str, Any] = {f"positions_{number}": a.positions for number, a in enumerate(alignments)}
    np.savez(content, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)
    return write_durably(folder / FILE, content.getvalue(), mode=0o600)


def load_alignment(context: SiteContext, job_id: str, data_set: str) -> Alignment:
    """Return what an earlier job found for a data set, after checking that it still holds.

    The ids of the data set are read again and must be the same, in the same order. That all parties hold results of one
    and the same alignment shows only when they compare: ``align.confirm``.

    Raises:
        ConfigurationError: there is no such alignment, it is damaged, or sites or rows are not those of then.
        PolicyRefusal: this site has no such data set.
    """
    found = _read(RunFolder(context.runs, job_id).path / FILE, context, job_id).get(data_set)
    if found is None:
        raise ConfigurationError(f"job {job_id} did not align a data set {data_set!r}")
    ids = load_ids(context.policy.data_set(data_set))
    Forgetting(context.policy).refuse(ids, context.policy.data_set(data_set))
    if AlignmentRegistry.open(context.policy).fingerprint(ids) != found.fingerprint or len(ids) != found.n_rows:
        raise DataRefusal(
            f"the rows of data set {data_set!r} are not those that job {job_id} aligned: restore them, or "
            "align anew, which the registry allows once a day under consents.scoring"
        )
    return found


def _read(path: Path, context: SiteContext, job_id: str) -> Mapping[str, Alignment]:
    try:
        stored = read_arrays(path)
        header = json.loads(stored["header"].tobytes())
        found = {
            facts["name"]: Alignment(
                facts["name"],
                _checked(stored[f"positions_{number}"], facts["n_rows"]),
                facts["n_rows"],
                facts["fingerprint"],
                bytes.fromhex(facts["proof"]),
            )
            for number, facts in enumerate(header["data_sets"])
        }
        is_ours = (header["format"], header["job_id"], header["site"]) == (_FORMAT, job_id, context.site)
        sites = tuple(header["sites"])
    except FileNotFoundError:
        raise ConfigurationError(f"{context.site} has no alignment of a job {job_id}") from None
    except _DAMAGED:
        raise ConfigurationError(f"the alignment that {context.site} keeps of job {job_id} cannot be read") from None
    if not is_ours:
        raise ConfigurationError(f"the alignment kept under job {job_id} is of another job or site")
    if sites != context.sites:
        raise ConfigurationError(f"job {job_id} aligned the rows of other sites than this job has")
    return found


def _checked(positions: NDArray[Any], n_rows: int) -> NDArray[np.int64]:
    """Return positions that are all different rows of the table. Raises: ValueError."""
    if positions.dtype != np.int64 or positions.ndim != 1 or np.unique(positions).size != positions.size:
        raise ValueError("not positions")
    if positions.size and not 0 <= positions.min() <= positions.max() < n_rows:
        raise ValueError("positions outside the table")
    return positions
