"""What a party pays for its buckets, what it keeps so that it pays once, and the plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import PrivacyCost
from dp_components.bucket_ldp import (
    Feature,
    needs_counts,
    paid_edges,
    public_edges,
    release_buckets,
    release_cell_counts,
    wrong_bucket_rate,
)
from dp_components.events import ComposedEvent, Event, LaplaceEvent, LocalRandomisedResponseEvent, Release
from dp_components.split_candidates.candidates import Candidates, FeatureBounds
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.payment import JobLedger
from nvflare_plugins.attempt.plan import (
    BETWEEN_ROWS,
    ExpectedLoss,
    Fit,
    Plan,
    PlanRequest,
    advise,
    expected_loss,
    shown_lines,
    warnings,
)
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.base.files import write_private
from nvflare_plugins.base.formatting import human_bytes
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob, Description, Unit
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock
from nvflare_plugins.kinds.vertical.model import list_of_names
from nvflare_plugins.pages.run_record import ReportSection

# What a passive party's buckets cost, and the two releases that are paid for.


LEAST_EPSILON_PER_VALUE = 0.1
"""Below, a bucket says next to nothing: with 16 buckets it is kept in 6.9 % of cases, where a guess has 6.25 %."""
_DOWN = 1 - 2.0**-40  # so that m shares of epsilon do not add up to more than epsilon


def bucket_epsilon(job: BucketJob, n_features: int, edges_epsilon: float) -> float:
    """Return the epsilon of one value's randomised response.

    Args:
        edges_epsilon: what the party pays for edges.

    Raises:
        ConfigurationError: a row's epsilon is too small for so many features.
    """
    whole = job.epsilon - edges_epsilon
    per_value = whole * _DOWN if job.protected is Unit.VALUE else whole / n_features * _DOWN
    if per_value < LEAST_EPSILON_PER_VALUE:
        raise ConfigurationError(
            f"epsilon {whole:g} for a {job.unit} leaves {per_value:.2g} for each of {n_features} features: buckets "
            "would be sent almost at random. Name fewer features in the description, or ask for more epsilon."
        )
    return per_value


def plan_of(job: BucketJob, features: Sequence[Feature]) -> Event:
    """Return what all of a party's releases cost, for its ledger."""
    relation = job.protected.relation
    paid = edges_epsilon_of(job, features)
    response = LocalRandomisedResponseEvent(bucket_epsilon(job, len(features), paid), len(features), relation)
    if not _pays_for_edges(job, features):
        return response
    return ComposedEvent((LaplaceEvent(paid, relation), response))


def edges_epsilon_of(job: BucketJob, features: Sequence[Feature]) -> float:
    """Return what a party of these features keeps for edges: nothing by default, where none needs counts."""
    if job.edges_epsilon is None and not any(needs_counts(feature, job.n_buckets) for feature in features):
        return 0.0
    return job.most_for_edges


class BucketPayment:
    """A passive party's releases of one job. Opening it reserves their whole price in the ledger."""

    def __init__(self, job: BucketJob, attempt: SiteAttempt, features: Sequence[Feature], ids: bytes) -> None:
        """Reserve.

        Args:
            ids: the rows' identifiers, in order; a hash of them and the values stays in this party's own ledger.

        Raises:
            PolicyRefusal: the data set has no budget, or not so much left.
        """
        self._job, self._features, self._ids = job, list(features), ids
        place, relation = attempt.context, job.protected.relation
        self._ledger = JobLedger(place.policy, job.data_set, place.job_id, relation, attempt.evidence)
        self._ledger.reserve(plan_of(job, features))

    def release(self, columns: NDArray[np.float32]) -> tuple[Candidates, NDArray[np.uint8]]:
        """Return the edges, which stay at the party, and the randomised buckets, which leave it once.

        Shapes:  columns: float32[n_features, n_rows]; result: uint8[n_features, n_rows].
        Privacy: both are charged before this returns. What returns was written to the ledger: a retry gets it again,
            for the same rows only.
        """
        job, relation = self._job, self._job.protected.relation
        paid = edges_epsilon_of(job, self._features)
        rows = hashlib.sha256(self._ids + np.ascontiguousarray(columns).tobytes()).hexdigest()[:32]
        edges = public_edges(self._features, job.n_buckets)
        if _pays_for_edges(job, self._features):
            counts = self._ledger.pay(
                f"rows per public cell; rows {rows}",
                lambda: release_cell_counts(columns, self._features, job.n_buckets, paid, relation),
            )
            edges = paid_edges(counts, paid, self._features, job.n_buckets, relation)
        epsilon = bucket_epsilon(job, len(self._features), paid)

        def make() -> Release:
            released = release_buckets(columns, edges, epsilon, relation)
            return Release(_packed(released.value), released.event)

        return edges, _unpacked(self._ledger.pay(f"randomised buckets; rows {rows}", make), columns.shape)

    def section(self, edges: Candidates, aliases: Sequence[str]) -> ReportSection:
        """Say what was spent, and for what, in this party's report."""
        job, n = self._job, len(self._features)
        of_value = bucket_epsilon(job, n, edges_epsilon_of(job, self._features))
        unit = f"A whole row is protected, with epsilon {job.epsilon:g} over its {n} features."
        if job.protected is Unit.VALUE:
            unit = (
                f"Every value of a row is protected by itself, with epsilon {job.epsilon:g}. A whole row with its {n} "
                f"features is protected with {n * job.epsilon:g} only: this is no record-level privacy."
            )
        outside = (
            "The labels are not protected by this, nor where the model splits. Prediction uses true values; rows whose "
            "buckets were sent are refused there."
        )
        rows = tuple(
            (alias, str(count + 1), f"{100 * wrong_bucket_rate(count + 1, of_value):.1f} %")
            for alias, count in zip(aliases, edges.counts, strict=True)
        )
        return ReportSection("Privacy", (unit, outside), ("feature", "buckets", "values sent in a wrong bucket"), rows)

    def close(self) -> None:
        """End the job in the ledger: what it has not used becomes free again."""
        self._ledger.close()


def _pays_for_edges(job: BucketJob, features: Sequence[Feature]) -> bool:
    return job.most_for_edges > 0 and any(needs_counts(feature, job.n_buckets) for feature in features)


def _packed(buckets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Put eight buckets into one of the ledger's integers. Shapes: buckets: int64[n_rows, n_features]."""
    flat = np.ascontiguousarray(buckets.T.astype(np.uint8)).ravel()
    return np.pad(flat, (0, -flat.size % 8)).view("<i8").astype(np.int64)


def _unpacked(packed: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return packed.astype("<i8").view(np.uint8)[: shape[0] * shape[1]].reshape(shape)


# What the parties keep of a job's buckets, so that another job trains on them again (``buckets_from``).
#
# The active party keeps the randomised buckets that it received, in the folder of that run: they were paid for, and all
# that it computes from them is post-processing. Each passive party keeps the ends of its buckets, by which it turns
# splits at buckets into splits at true values. Files are of mode 0600; an input folder may hold a copy of one, as
# ``JOB.SITE.buckets``, where the folder of the run is gone.
#
# magic, length of the header u32, header (JSON), then at the active party a block for each passive one
#
# Whoever removes the files, removes nothing but the possibility.


FILE_NAME = "kept.buckets"
_MAGIC, _LENGTH_BYTES, _MOST_HEADER = b"VLBK1", 4, 1 << 26
_TERMS = ("data_set", "active", "alignment", "epsilon", "unit", "edges_epsilon", "n_buckets")
"""What two jobs on the same buckets must say alike: whose they are, and what was paid for them."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KeptBuckets:
    """What the active party received: the parties, the aliases of their features, and their buckets."""

    sites: tuple[str, ...]
    aliases: tuple[tuple[str, ...], ...]
    blocks: tuple[BucketBlock, ...]

    def write(self, folder: Path, job: BucketJob, ids: bytes) -> None:
        """Keep them in a run's folder. Args: ids: the rows' identifiers in order, of which a hash is kept."""
        blocks = [block.to_bytes() for block in self.blocks]
        parties = [
            [site, list(aliases), len(block)]
            for site, aliases, block in zip(self.sites, self.aliases, blocks, strict=True)
        ]
        n_rows = self.blocks[0].ids.shape[1]
        header = {"terms": terms_of(job), "rows": _digest(ids), "n_rows": n_rows, "parties": parties}
        _write(folder, header, b"".join(blocks))

    @classmethod
    def read(cls, job: BucketJob, context: SiteContext, ids: bytes) -> KeptBuckets:
        """Read what an earlier job's run has left, for the same rows in the same order.

        Raises:
            ConfigurationError: nothing was kept, it is damaged, or of other terms; a ``DataRefusal``: of other rows.
        """
        header, content = _read(job, context)
        try:
            parties = [(str(site), list_of_names(aliases), int(size)) for site, aliases, size in header["parties"]]
            n_rows, ends = int(header["n_rows"]), np.cumsum([size for *_, size in parties]).tolist()
            if not parties or min(size for *_, size in parties) < 0 or ends[-1] != len(content):
                raise ValueError("sizes")
            starts = [0, *ends[:-1]]
            blocks = [
                BucketBlock.from_bytes(content[start:end], n_rows, len(aliases))
                for start, end, (_, aliases, _) in zip(starts, ends, parties, strict=True)
            ]
            same_rows = header["rows"] == _digest(ids)
        except (ValueError, TypeError, KeyError, OverflowError, ProtocolError):
            raise _damaged(job) from None
        if not same_rows:
            raise DataRefusal(
                f"data set {job.data_set!r} holds other rows, or the same in another order, than job "
                f"{job.buckets_from} trained on: buckets belong to its rows. Train on the same file and alignment"
            )
        return cls(tuple(site for site, *_ in parties), tuple(aliases for _, aliases, _ in parties), tuple(blocks))


@dataclass(frozen=True, slots=True, repr=False)
class KeptEdges:
    """What a passive party keeps: its features, their aliases, and the ends of their buckets."""

    names: tuple[str, ...]
    aliases: tuple[str, ...]
    edges: Candidates

    def write(self, folder: Path, job: BucketJob) -> None:
        """Keep them in a run's folder."""
        edges = [cuts.astype(np.float64).tolist() for cuts in self.edges.of_feature]
        _write(folder, {"terms": terms_of(job), "names": self.names, "aliases": self.aliases, "edges": edges}, b"")

    @classmethod
    def read(cls, job: BucketJob, context: SiteContext) -> KeptEdges:
        """Read what an earlier job's run has left. Raises: ConfigurationError, as ``KeptBuckets.read``."""
        header, content = _read(job, context)
        try:
            names, aliases = list_of_names(header["names"]), list_of_names(header["aliases"])
            edges = Candidates(tuple(np.array(cuts, dtype=np.float32) for cuts in header["edges"]))
            if content or not len(names) == len(aliases) == len(edges.of_feature):
                raise ValueError("sizes")
        except (ValueError, TypeError, KeyError, OverflowError):
            raise _damaged(job) from None
        return cls(names, aliases, edges)


def terms_of(job: BucketJob) -> dict[str, Any]:
    """Return what two jobs on the same buckets must say alike."""
    return {name: getattr(job, name) for name in _TERMS}


def _write(folder: Path, header: dict[str, Any], content: bytes) -> None:
    text = json.dumps(header).encode()
    write_private(folder / FILE_NAME, _MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text + content)


def _read(job: BucketJob, context: SiteContext) -> tuple[dict[str, Any], bytes]:
    """Return header and content, of the job's terms."""
    name = str(job.buckets_from)
    copies = (context.runs / name / FILE_NAME, context.policy.inputs / f"{name}.{context.site}.buckets")
    path = next((copy for copy in copies if copy.is_file() and not copy.is_symlink()), None)
    if path is None:
        raise ConfigurationError(
            f"{context.site} has kept no buckets of job {name}, neither in its runs nor as "
            f"{name}.{context.site}.buckets in its input folder: name a FederBoost job that came as far as its buckets "
            "here, from version 0.7.0 on"
        )
    try:
        data = path.read_bytes()
        start = len(_MAGIC) + _LENGTH_BYTES
        length = int.from_bytes(data[len(_MAGIC) : start], "little")
        if data[: len(_MAGIC)] != _MAGIC or length > min(_MOST_HEADER, len(data) - start):
            raise ValueError("header")
        header = json.loads(data[start : start + length])
        terms = dict(header["terms"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(job) from None
    different = [name for name, value in terms_of(job).items() if terms.get(name) != value]
    if different:
        raise ConfigurationError(
            f"{', '.join(different)} differ from job {name}, whose buckets this job takes: give the same as there"
        )
    return header, data[start + length :]


def _damaged(job: BucketJob) -> ConfigurationError:
    return ConfigurationError(f"what was kept of the buckets of job {job.buckets_from} is damaged: run that job anew")


def _digest(ids: bytes) -> str:
    return hashlib.sha256(ids).hexdigest()


BUCKETS = Fit(0.401, 0.362, (0.01, 106.0), 0.86)
"""FederBoost, all columns randomised."""


EQUAL_WIDTHS = "public: as described, or equal widths between bounds"


def plan(request: PlanRequest, job: BucketJob) -> Plan:
    """Return what one passive party of a FederBoost job spends and sends; --features counts its columns.

    Raises:
        ConfigurationError: no number of features, or too many for epsilon.
    """
    if job.buckets_from is not None:
        paid = f"job {job.buckets_from} has paid for the buckets: this one sends none and is charged nothing"
        return Plan({"epsilon": 0.0, "bytes_sent": 0}, shown_lines({"privacy": paid}))
    if request.features is None or request.features < 1:
        raise ConfigurationError("give --features, the columns of a passive party: its noise depends on their number")
    policy = request.policy  # of a passive party, whose own description is looked at
    described = None if policy is None else Description.read(policy.input_file(job.description))
    for_edges = job.most_for_edges if described is None else edges_epsilon_of(job, described.features)
    per_value = bucket_epsilon(job, request.features, for_edges)
    of_row = job.epsilon if job.protected is Unit.ROW else job.epsilon * request.features
    wrong = wrong_bucket_rate(job.n_buckets, per_value)
    sent = None if request.rows is None else request.rows * request.features
    kept = (1 - wrong * job.n_buckets / (job.n_buckets - 1)) ** 2 if job.n_buckets > 1 else 1.0
    words = f"counts over randomised buckets tell as much as {100 * kept:.3g} % of the rows sent in clear"
    advice = advise(
        request,
        job.data_set,
        PrivacyCost(pure_epsilon=of_row),
        PrivacyCost(pure_epsilon=job.epsilon).for_person,
        noise=({"rows_that_count": kept}, words),
        expected=of_buckets(kept),
        warned=[*warnings(of_row, 0.0, request.rows, _bounds(described)), *_of_equal_widths(job, described)],
        guessed=BETWEEN_ROWS,
    )
    figures = {"epsilon": job.epsilon, "unit": job.unit, "epsilon_of_a_value": per_value, "epsilon_of_a_row": of_row}
    figures |= {"epsilon_of_edges": for_edges, "wrong_bucket_rate": wrong, "bytes_sent": sent, **advice.figures}
    shown = {
        "privacy": f"epsilon {job.epsilon:g} for a {job.unit}: {per_value:.3g} for each value, {of_row:.3g} for a row "
        f"of {request.features} features",
        "edges": f"epsilon {for_edges:g} of it pays for buckets of about equal counts" if for_edges else EQUAL_WIDTHS,
        "noise": f"{100 * wrong:.1f} % of the values are sent in a wrong one of {job.n_buckets} buckets",
    }
    if sent is not None:
        shown["sent once"] = f"{human_bytes(sent)} by a passive party with {request.rows:,} rows"
    return Plan(figures, shown_lines({**shown, **advice.shown}))


def _bounds(described: Description | None) -> dict[str, tuple[float, float]]:
    if described is None:
        return {}
    pairs = zip(described.names, described.features, strict=True)
    return {name: (of.low, of.high) for name, of in pairs if isinstance(of, FeatureBounds)}


def _of_equal_widths(job: BucketJob, described: Description | None) -> list[str]:
    """Warn of public edges, unless the party is known to describe no feature by its bounds."""
    if job.most_for_edges > 0 or (described is not None and not _bounds(described)):
        return []
    return [
        "edges_epsilon is 0: equal widths put nearly all rows of a column with a long tail into one bucket. On "
        "Give-Me-Some-Credit that took the AUC from .851 to .797. Leave edges_epsilon out, which pays a tenth of "
        "epsilon, or describe such columns by edges"
    ]


def of_buckets(kept: float) -> ExpectedLoss:
    """Return the expected loss of randomised buckets. Args: kept: share of rows that counts over them are worth."""
    more = (
        "as if all columns were buckets; own columns of the active party lose nothing, and columns of which equal "
        "widths put nearly all rows into one bucket lose nearly all"
    )
    expected = expected_loss(BUCKETS, buckets_over_signal(kept))
    return expected if expected.seldom is None else replace(expected, text=f"{expected.text}; {more}")


def buckets_over_signal(kept: float) -> float:
    """Return x of randomised buckets."""
    return 1 / kept - 1
