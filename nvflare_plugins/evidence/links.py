"""Attempts of a job that are not shown: each log names its own party's log of the attempt before.

A log that is named must be there, whole up to where it is named and unchanged: the later log is signed, so that whoever
hands over evidence cannot leave out an attempt without leaving out all later logs of the sites that took part in it. A
party without such a log says so; that is nobody's fault (its disk may be new), but a reader should know.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvflare_plugins.evidence.format import Earlier
from nvflare_plugins.evidence.gone_on import Attempts
from nvflare_plugins.evidence.reader import Log


def left_out(attempts: Attempts) -> Iterator[str]:
    """Yield the attempts that logs name and that are missing, changed or out of order, one sentence each."""
    for (job_id, attempt), logs in sorted(attempts.items()):
        for log in sorted(logs, key=lambda log: log.site):
            if log.earlier is None:
                continue
            before = _named(attempts, log, log.earlier)
            here = f"job {job_id}, attempt {attempt} (number {log.number})"
            if before is None:
                yield (
                    f"{here} follows an attempt that is left out: the log of {log.site} of attempt "
                    f"{log.earlier.attempt} is not here. Hand in the folders evidence_before_attempt_N too"
                )
            elif bytes.fromhex(log.earlier.digest) not in before.digests:
                yield (
                    f"{here} follows another log of {log.site} of attempt {log.earlier.attempt} than the one here: "
                    "one was rewritten or cut"
                )
            elif before.number >= log.number:
                yield f"{here} of {log.site} follows attempt {before.attempt}, whose number is {before.number}"
    yield from _numbered_alike(attempts)


def not_shown(attempts: Attempts) -> Iterator[str]:
    """Yield what attempts before others the logs do not show, without a fault that evidence could tell."""
    for (job_id, attempt), logs in sorted(attempts.items()):
        for log in sorted(logs, key=lambda log: log.site):
            here = f"job {job_id}, attempt {attempt} (number {log.number})"
            if log.number > 1 and log.earlier is None:
                yield f"{here}: {log.site} says that it has no log of one before: it took part in none, or lost it"
            before = None if log.earlier is None else _named(attempts, log, log.earlier)
            if (
                before is not None
                and log.earlier is not None
                and bytes.fromhex(log.earlier.digest) in before.digests[:-1]
            ):
                yield f"{here}: {log.site} has less of its log of attempt {before.attempt} than is here"


def _numbered_alike(attempts: Attempts) -> Iterator[str]:
    """Yield attempts of one job that have one number."""
    seen: dict[tuple[str, int], str] = {}
    for (job_id, attempt), logs in sorted(attempts.items()):
        for number in sorted({log.number for log in logs}):
            other = seen.setdefault((job_id, number), attempt)
            if other != attempt:
                yield f"job {job_id}: attempts {other} and {attempt} both have number {number}"


def _named(attempts: Attempts, log: Log, earlier: Earlier) -> Log | None:
    """Return the log that another one names as that of the attempt before."""
    found = (one for one in attempts.get((log.job_id, earlier.attempt), ()) if one.site == log.site)
    return next(found, None)
