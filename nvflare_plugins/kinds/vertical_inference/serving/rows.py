"""Which rows a job that stays answers for, and which it was asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.files import sync_folder, write_durably
from nvflare_plugins.kinds.alignment.result import load_alignment
from nvflare_plugins.kinds.vertical.job import ALIGN_FIRST
from nvflare_plugins.kinds.vertical.model_files import Part
from nvflare_plugins.kinds.vertical.terms import rows_content
from nvflare_plugins.kinds.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.kinds.vertical_inference.rows import Rows, UnreadRows, load_rows
from nvflare_plugins.kinds.vertical_inference.run import Run

# Which rows a job that stays answers for: those of a standing alignment, which may be refreshed while it stays.


STATE_FILE = "serving.json"
ALIGNMENT_FILE = "alignment.npz"


def load_own(job: InferenceJob, context: SiteContext, part: Part) -> Rows | UnreadRows:
    """Load this site's columns of the job's data set, as the policy says. Raises: as ``load_rows``; PolicyRefusal."""
    data_set = context.policy.data_set_for(str(job.data_set), job.profile)
    held_by = "a job that stays answers at once for any row" if job.action == Action.SERVE.value else None
    return load_rows(data_set, part.columns, part.categories, job.unknown_category_is_missing, held_by)


def alignment_in_use(run: Run) -> str | None:
    """Return the alignment that an attempt begins with, the active party's word for all.

    A first attempt takes the job's; a later one what the attempt before it used last, since rows may have been
    refreshed, and ``first`` was done already.
    """
    job, context = run.job, run.context
    if context.number == 1 or job.alignment is None:
        return job.alignment
    told = run.attempt.gather_sealed("alignment in use", noted_alignment(context, job.alignment).encode())
    return told[run.active_rank].decode("ascii", "replace")


def note_alignment(context: SiteContext, alignment: str) -> None:
    """Keep which alignment is in use, for a further attempt of this job."""
    folder = RunFolder(context.runs, context.job_id).path
    write_durably(folder / STATE_FILE, json.dumps({"alignment": alignment}).encode(), mode=0o600)


def noted_alignment(context: SiteContext, declared: str) -> str:
    """Return the alignment that this site has used last in this job. Args: declared: what the job says."""
    folder = RunFolder(context.runs, context.job_id).path
    try:
        return str(json.loads((folder / STATE_FILE).read_bytes())["alignment"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        has_own = declared == ALIGN_FIRST and (folder / ALIGNMENT_FILE).is_file()
        return context.job_id if has_own else declared


def refreshed(run: Run, part: Part, alignment: str, number: int) -> tuple[Rows | None, str]:
    """Take the rows of a newer alignment at all parties, or at none.

    Args:
        number: of the refreshment in this attempt, from 1.

    Returns:
        The rows; or nothing, and why, by names of parties alone: each one's own log says more.
    """
    attempt, context = run.attempt, run.context
    rows, content = None, b""
    try:
        found = load_alignment(context, alignment, str(run.job.data_set))
        rows = load_own(run.job, context, part).aligned(found).part(None)
        content = json.dumps([found.data_set, found.n_common, found.proof.hex()]).encode() + rows_content(rows.ids)
    except (ConfigurationError, PolicyRefusal) as error:
        attempt.progress.say(f"alignment {alignment} is not taken: {getattr(error, 'reason', error)}")
    attempt.evidence.round(number)  # durable from here on; the heads travel with the next exchange
    attempt.heads.mark()
    purpose = f"rows of refreshment {number}"
    rank = attempt.channel.rank
    told = attempt.gather_sealed(purpose, attempt.proof(rank, purpose, content) if content else b"")
    unable = [site for site, proof in zip(context.sites, told, strict=True) if not proof]
    if unable:
        return None, f"{', '.join(unable)} cannot take it, as the log there says; the rows before it stay in use"
    if rows is None or any(proof != attempt.proof(r, purpose, content) for r, proof in enumerate(told)):
        return None, "the parties hold results of different alignments under that id; the rows before it stay in use"
    note_alignment(context, alignment)
    attempt.progress.say(f"the rows of alignment {alignment} are in use")
    return rows, ""


# Which rows a job that stays was asked for at this site, over all its attempts: a file in the run's folder.
#
# ``vertical.predictions_per_job`` bounds the different rows of one job. A row is noted durably before anything about it
# is answered, so that a job which is interrupted, and goes on in a further attempt, goes on counting.
#
# Privacy: purely local, mode 0600. Rows are keyed hashes of 8 bytes, one after the other; the key stays in the site's
# memory.


ASKED_FILE = "asked_rows"
_SIZE = 8


class AskedRows:
    """The rows of one job. Not safe for concurrent use."""

    def __init__(self, path: Path, key: bytes, most: int) -> None:
        """Read what earlier attempts have noted; what a crash has torn was never answered for, and goes.

        Args:
            key: names rows; of this site alone.
            most: different rows that one job may ask for.

        Raises:
            OSError: the file cannot be read or made.
        """
        self._path, self._key, self._most = path, key, most
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            self._n_bytes = len(content) // _SIZE * _SIZE
            os.ftruncate(descriptor, self._n_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)
        self._rows = set(np.frombuffer(content[: self._n_bytes], dtype="<u8").tolist())

    def __len__(self) -> int:
        return len(self._rows)

    def new(self, names: Sequence[str], alignment: str = "") -> list[int] | None:
        """Return the rows that are new to the job, as ``note`` takes them; None if it would have too many with them.

        Args:
            names: what names the rows at this site.
            alignment: where names are positions, that of which alignment.
        """
        found = {self._hash(alignment, name) for name in names} - self._rows
        return None if len(self._rows) + len(found) > self._most else sorted(found)

    def note(self, rows: Sequence[int]) -> None:
        """Note rows, durably: all, or none if it raises. Raises: OSError."""
        if not rows:
            return
        content = np.array(rows, dtype="<u8").tobytes()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], self._n_bytes + written)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._n_bytes += len(content)
        self._rows.update(rows)

    def _hash(self, alignment: str, name: str) -> int:
        parts = (alignment.encode(), name.encode())
        digest = hashlib.blake2b(digest_size=_SIZE, key=self._key, person=b"asked row")
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return int.from_bytes(digest.digest(), "little")
