"""Evidence of a job that went on without lost sites: what its attempts must say alike, and whose log may be missing.

An attempt without sites of the attempts before it names them in its session's record (``SITES_FACT``), which every site
of that attempt signs. It need not name those of attempts that ended when only keys and terms were sealed: for its sites
the job begins with it. A site that never came back hands in no log of the attempts that it took part in. That is
no fault where the attempt that completed the job says so; it hides no record of any other party.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from nvflare_plugins.evidence.reader import Log, Message
from nvflare_plugins.wire.catalogue import Kind

SITES_FACT = "without_sites"
"""The fact of a session that names the lost sites."""

_TERMS = frozenset(kind.name for kind in (Kind.GROUP_KEY, Kind.AGREEMENT, Kind.HE_SECRET))

Attempts = Mapping[tuple[str, str], Sequence[Log]]
"""The logs of each attempt, by job and attempt."""


def named(sites: Iterable[str]) -> dict[str, str]:
    """Return the fact that an attempt goes on without sites; none where it goes on without none."""
    text = ", ".join(sites)
    return {SITES_FACT: text} if text else {}


def lost_of(logs: Iterable[Log]) -> frozenset[str]:
    """Return the sites that an attempt says it went on without."""
    facts = (log.session["protection"].get(SITES_FACT) for log in logs if log.session is not None)
    return frozenset(site for fact in facts if isinstance(fact, str) for site in fact.split(", "))


def excused(attempts: Attempts, job_id: str) -> frozenset[str]:
    """Return the sites that may hand in no log of an attempt of a job that was not completed."""
    return frozenset().union(
        *(lost_of(logs) for (of_job, _), logs in attempts.items() if of_job == job_id and _is_completed(logs))
    )


def contradictions(attempts: Attempts) -> Iterator[str]:
    """Yield what attempts of one job say of their sites that cannot be together, one sentence each."""
    for (job_id, attempt), logs in sorted(attempts.items()):
        sites, lost = _sites_of(logs), lost_of(logs)
        if sites & lost:
            yield f"job {job_id}, attempt {attempt} says that it went on without a site of its own"
        if not _is_completed(logs) or not sites:
            continue
        if len({log.session["protection"].get(SITES_FACT) for log in logs if log.session is not None}) > 1:
            yield f"job {job_id}, attempt {attempt}: its sites do not say alike without whom it went on"
        for (other_job, other), others in sorted(attempts.items()):
            if other_job == job_id and _sites_of(others) - sites - lost and _has_begun(others):
                yield (
                    f"job {job_id}, attempt {attempt} does not say that it went on without "
                    f"{', '.join(sorted(_sites_of(others) - sites - lost))}, of attempt {other}"
                )
        known = frozenset().union(*(_sites_of(others) for (of_job, _), others in attempts.items() if of_job == job_id))
        if len(attempts) > 1 and lost - known:
            yield f"job {job_id}, attempt {attempt} says that it went on without sites that no attempt had"


def ended_early(attempts: Attempts, job_id: str, attempt: str) -> bool:
    """Return whether an attempt ended before anything of rows was sent, and another attempt completed its job.

    Logs of such an attempt may be missing: sites may die before they have any. Whoever hides one could as well hide the
    whole attempt; what it could tell of rows is nothing.
    """
    is_completed = any(of == job_id and one != attempt and _is_completed(logs) for (of, one), logs in attempts.items())
    return is_completed and not _has_begun(attempts[job_id, attempt])


def _has_begun(logs: Iterable[Log]) -> bool:
    return any(log.parts or any(map(_tells_of_rows, log.messages)) for log in logs)


def _tells_of_rows(message: Message) -> bool:
    """Whether a message is more than keys and terms: trees and conversations are sealed too, between their parties."""
    return message.private and (message.codec != "SEALED" or message.kind not in _TERMS)


def _sites_of(logs: Iterable[Log]) -> frozenset[str]:
    return frozenset(site for log in logs if log.session is not None for site in log.session["sites"])


def _is_completed(logs: Sequence[Log]) -> bool:
    return bool(logs) and all(log.completed for log in logs)
