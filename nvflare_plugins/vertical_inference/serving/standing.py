"""Which rows a job that stays answers for: those of a standing alignment, which may be refreshed while it stays."""

from __future__ import annotations

import json

from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.alignment.result import load_alignment
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.run_folder import RunFolder
from nvflare_plugins.files import write_durably
from nvflare_plugins.vertical.job import ALIGN_FIRST
from nvflare_plugins.vertical.model.model_files import Part
from nvflare_plugins.vertical.protocol.terms import rows_content
from nvflare_plugins.vertical_inference.job import Action, InferenceJob
from nvflare_plugins.vertical_inference.rows import Rows, UnreadRows, load_rows
from nvflare_plugins.vertical_inference.run import Run

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
