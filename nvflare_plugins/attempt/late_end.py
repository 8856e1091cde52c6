"""The end of a part that lacked only its record when its process died, or its disk was full: all sites had the result.

Between the last exchange and the closed evidence a site only writes. What it had not written then is written here, by
the next process or once there is room. Scores, times and traffic are gone with the process; the report says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from dp_components.errors import PrivacyError
from dp_components.ledger import Ledger, ledger_files
from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import Job, JobResult, SiteContext
from nvflare_plugins.attempt.payment import spending_of
from nvflare_plugins.attempt.run_folder import MODEL, RunFolder
from nvflare_plugins.attempt.session import versions
from nvflare_plugins.attempt.site_attempt import now, settings_of
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.reader import PARTIAL_SUFFIX, Log, all_have_written, end_torn, read_log
from nvflare_plugins.pages.report import keep_report
from nvflare_plugins.pages.run_record import FILE_NAME, RunRecord
from nvflare_plugins.site.memory.registry import Registry

ENDED_LATE = (
    "The process of this job died, or its disk was full, when all sites had their result: result and evidence are "
    "whole. Scores, times and traffic were lost with it."
)


def end_late(job: Job, context: SiteContext, kept: Iterable[str]) -> JobResult | None:
    """End this site's part in an attempt whose result all sites had; None if the attempt had not come so far.

    Args:
        kept: files and folders of the run that are for further attempts only.

    Raises:
        OSError: something cannot be written; call it again once it can.
        VeilBoostError: the site's memory cannot be used.
    """
    folder, policy = RunFolder(context.runs, context.job_id), context.policy
    log = _ended_log(folder.evidence / export_name(context.site), context)
    if log is None:
        return None
    Registry.open(policy).complete_job(context.job_id)
    for ledger in ledger_files(policy.ledgers):
        try:
            Ledger(ledger, policy.ledger_heads).close_job(context.job_id)
        except PrivacyError:
            continue  # it knows no such job, or one that is closed
    if not (folder.path / FILE_NAME).exists():
        keep_report(_record(job, context, log, folder), folder.path)
    folder.drop_checkpoints()
    for name in kept:
        shutil.rmtree(folder.path / name, ignore_errors=True)
        (folder.path / name).unlink(missing_ok=True)
    said = {"note": ENDED_LATE, **({"n_rounds": len(log.rounds)} if log.rounds else {})}
    return JobResult(log.models[-1]["hmac"], ENDED_LATE, said)


def _ended_log(path: Path, context: SiteContext) -> Log | None:
    """Return this site's log of the attempt, which is ended now if need be; None unless all sites had their result."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        if partial.exists() and all_have_written(partial):
            end_torn(partial, context.identity.sign if context.identity.is_signed else None)
        log = read_log(path)
    except (ProtocolError, FileNotFoundError):
        return None
    is_well = log.completed and not log.unfinished and log.models
    return log if is_well and log.attempt == context.attempt.hex() else None


def _record(job: Job, context: SiteContext, log: Log, folder: RunFolder) -> RunRecord:
    policy = context.policy
    return RunRecord(
        job_id=context.job_id,
        attempt=context.attempt.hex(),
        site=context.site,
        sites=context.sites,
        profile=log.profile,
        signed=log.session is not None and log.session["signed"] is True,
        params=dict(getattr(job, "params", {})),
        settings=settings_of(job),
        versions=versions(),
        model=MODEL if (folder.path / MODEL).is_file() else None,
        evidence=str(log.path.relative_to(folder.path)),
        title=f"A job of kind {job.KIND}",
        started=log.times["open"].isoformat(timespec="seconds"),
        finished=now(),
        policy_hash=policy.fingerprint(),
        notes=(ENDED_LATE,),
        statement=policy.statement([]),
        spending=spending_of(policy, policy.data_sets),
        name=context.name,
    )
