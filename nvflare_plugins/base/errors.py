"""Errors of jobs and policies beside those of ``he_processors.errors``, and what may be said of an error to others.

What is said in ``he_processors.errors`` of messages holds here: why, and what helps, without data, paths or the words
of libraries.
"""

from __future__ import annotations

import errno
import os
from enum import Enum

from he_processors.errors import CapacityExceeded, ConfigurationError, VeilBoostError

_FULL = "the disk is full, or the quota of it used up: make room there"
_DENIED = "a file or folder may not be used: let the user that runs FLARE own the workspace and read the data"
_FILES = "too many files are open: raise the limit of open files (ulimit -n) for the user that runs FLARE"
_MEMORY = "there is not enough memory: give the process more of it, or the job fewer rows, bins or levels"
_GONE = "a file or folder that is needed is not there: look at the paths in the policy and at the workspace"
_DEVICE = "the disk reports errors: look at its health before anything else"

_REASONS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "a file would grow beyond its limit: raise the limit of file sizes (ulimit -f)",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: "the file system is read-only: mount it for writing, or put the workspace elsewhere",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: "the system gives no more threads or processes: raise the limit (ulimit -u, or the container's)",
    errno.ENOENT: _GONE,
    errno.ENOTDIR: _GONE,
    errno.EIO: _DEVICE,
    errno.ESTALE: "a network file system lost a file: mount it again",
}
ROWS_TEXT = (
    "a row-dependent check failed at this site; the reason is in that site's own log and goes nowhere else. Remedy: "
    "correct its data, or the job's lists, objective or columns. Policy key: share_data_errors (shares such reasons, "
    "but never those of differentially private jobs)."
)
REGISTRY_TEXT = (
    "the site's registry of earlier runs does not allow this one over its rows; which run it clashes with is in that "
    "site's own log. Policy keys: consents.recompute_with_changes, consents.second_quantile_search, share_data_errors. "
    "Remedy: use the same sites, rows, lists, parameters and bins as before, or ask the site to consent."
)
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSES = frozenset({*DISK_IS_FULL, errno.ENFILE, errno.ESTALE})


class PolicyRefusal(VeilBoostError):
    """A site's own policy forbids what the job asks for: change the job, or ask that site."""


class JobAborted(VeilBoostError):
    """The job was ended from outside: by an operator, a peer's failure or a deadline."""


class DataRefusal(ConfigurationError):
    """Rows of this site decided that the job ends.

    Attributes:
        reason: for this site's own log; it names columns, but holds no value.

    Privacy: the text of the error is the same for all reasons (``public``), so that handing it on tells nothing more.
    """

    def __init__(self, reason: str, public: str = ROWS_TEXT) -> None:
        super().__init__(public)
        self.reason = reason


class WorkerFailure(VeilBoostError):
    """A worker of a site's own cluster, or its scheduler, is lost, does not answer, or failed: see that site's log.

    Privacy: the text travels to the other parties; it numbers workers, whose addresses stand in the site's log alone.
    """


class WorkerLost(WorkerFailure):
    """A worker or the scheduler is gone or silent, and may be there again: a job that waits for lost sites waits."""


class HeldElsewhere(ConfigurationError):
    """Another process of this site holds what the job needs: a job that waits for lost sites tries again."""


class Decider(Enum):
    """Whose doing it was, as this site sees it, that too few rows of all sites together carry weight.

    OWN_ROWS: this site's own policy wants more, and more rows here would have been enough. DEMAND: another site's
    policy, or the rows that the job draws, ask for more than this site's policy does. OTHERS: the other sites' rows
    alone.
    """

    OWN_ROWS = "own rows"
    DEMAND = "demand"
    OTHERS = "others"


class TooFewRows(PolicyRefusal):
    """Too few rows of all sites together carry weight: all sites find this alike, before any tree.

    Attributes:
        decided_by: for this site's own count of refusals; the text is the same whoever it was.
    """

    def __init__(self, text: str, decided_by: Decider) -> None:
        super().__init__(text)
        self.decided_by = decided_by


def time_mends(error: BaseException) -> bool:
    """Return whether what ended an attempt at this site may be over soon, so that a job that waits tries again.

    What is not listed is final. A refusal that could not be noted stays one: to ask again is to be answered twice.
    """
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, (DataRefusal, CapacityExceeded, PolicyRefusal)):
            return False
        before = before.__cause__ or before.__context__
    return any(
        isinstance(one, (WorkerLost, HeldElsewhere)) or (isinstance(one, OSError) and one.errno in _PASSES)
        for one in (error, error.__cause__)
    )


def machine_failure(error: BaseException) -> str | None:
    """Return what a machine lacks and what helps, if that is what the error says; None if it says something else."""
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return _REASONS[errno.EAGAIN]
    if not isinstance(error, OSError) or error.errno is None:
        return None
    name = errno.errorcode.get(error.errno, str(error.errno))
    return f"{_REASONS.get(error.errno, os.strerror(error.errno))} ({name})"


def reason_of(error: BaseException) -> str:
    """Return why something ended. Our own messages hold no data; those of others might, and are not quoted."""
    if isinstance(error, CapacityExceeded):  # the value is one of this site's rows, or made of them
        return ROWS_TEXT
    if isinstance(error, VeilBoostError):
        return str(error)
    known = machine_failure(error)
    if known is not None:
        return known
    if not isinstance(error, Exception):
        return f"the process was ended from outside ({type(error).__name__})"
    return f"unexpected {type(error).__name__}"
