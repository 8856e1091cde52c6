"""Refusals that depend on a site's rows: what others may read of them, and how many a data set gives a month.

A job that asks for the wrong thing on purpose (a weight column of zeros, a list that lacks one label) learns from "yes"
or "no" whether one row is there. So a check that looked at rows says nothing to others but that it failed:

* ``DataRefusal`` is raised wherever rows decide. Its text is one and the same for all of them; the reason goes into the
  site's own log. Whatever takes the text of an error (evidence, the server, other sites) takes that one.
* The site's policy may share reasons (``share_data_errors``), but never those of differentially private jobs. These
  repair what they can, row by row, instead of refusing (``data.load_table``).
* That a job failed is one bit all the same. ``RefusalCount`` gives out so many of them per data set and month
  (``data_refusals_per_month``); then jobs are refused before anything looks at the rows, which answers nothing. Jobs
  that run at the same time may exceed that by their number. A local command starts the count anew, so that no submitter
  can lock a site for good.

* What all sites find alike from the sum of their counts (``TooFewRows``) is one bit over the rows of all of them. A
  site counts it among the others where its own policy asks for so many rows. Where another site's policy or the job's
  sample asks for more than that, it has a count of its own, and a full one stops such jobs alone: whoever asks for ten
  million rows would otherwise stop all jobs of all sites. Where this site's rows could not have changed it, it is not
  counted.

The site's memory keeps the times of refusals by names of data sets: no row, no reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from he_processors.errors import CapacityExceeded, ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import DataRefusal, Decider, PolicyRefusal, TooFewRows, machine_failure
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import is_private

MONTH_S = 31 * 24 * 3600
_log = logging.getLogger(__name__)


class Question(Enum):
    """What a refusal answered; each has a count of its own.

    ROWS: what a job asks of a site's rows under that site's own policy. DEMAND: whether there are as many rows as
    somebody else asks for.
    """

    ROWS = "refusals"
    DEMAND = "demands"


@contextmanager
def reading_rows(policy: SitePolicy, profile: str, data_sets: Iterable[str | None]) -> Iterator[None]:
    """Do a job's part that looks at rows of data sets: the way for every kind of job.

    Args:
        profile: of the job.
        data_sets: all that the job names at this site; None and unknown names are left to others.

    Raises:
        PolicyRefusal: a data set has refused too often lately; raised before the rows are looked at.
        ConfigurationError: a ``DataRefusal`` with its reason, where the policy shares reasons.
    """
    names = sorted({name for name in data_sets if name is not None and name in policy.data_sets})
    count = RefusalCount(policy)
    count.check(names)
    try:
        yield
    except (DataRefusal, CapacityExceeded) as error:
        reason = error.reason if isinstance(error, DataRefusal) else f"{type(error).__name__}: {error}"
        count.note(names)
        _tell(policy, profile, reason)
        if isinstance(error, DataRefusal):
            raise
        raise DataRefusal(reason) from None
    except TooFewRows as error:  # any column may be named as the weight, and nothing else remembers such a job
        if error.decided_by is not Decider.OTHERS:
            count.note(names, Question.ROWS if error.decided_by is Decider.OWN_ROWS else Question.DEMAND)
        raise
    except VeilBoostError:
        raise
    except Exception as error:  # a defect that some rows bring out answers a question as well
        if machine_failure(error) is None:
            count.note(names)
            _hide_defect(profile, error)
        raise


def _tell(policy: SitePolicy, profile: str, reason: str) -> None:
    """Say in this site's log why it refuses. Raises: ConfigurationError, where the policy shares reasons."""
    # No error line: FLARE's default sends those to the server.
    _log.warning(
        "why this site refused, for this site only (`veilboost check` finds what is wrong with data): %s", reason
    )
    if policy.share_data_errors and not is_private(profile):
        raise ConfigurationError(reason) from None


def _hide_defect(profile: str, error: Exception) -> None:
    """Raise a refusal in place of a defect, if the job is private: the defect's type would be an answer too."""
    if is_private(profile):
        reason = f"unexpected {type(error).__name__}: a defect of VeilBoost or of its set-up, please report it"
        _log.warning("why this site refused, for this site only: %s", reason)
        raise DataRefusal(reason) from error


class RefusalCount:
    """How often jobs were refused because of the rows of each data set of a site, within a month."""

    def __init__(self, policy: SitePolicy, clock: Callable[[], float] = time.time) -> None:
        self._site, self._limit = policy.site, policy.data_refusals_per_month
        self._memory, self._clock = Memory.open(policy), clock

    def check(self, data_sets: Iterable[str], question: Question = Question.ROWS) -> None:
        """Refuse if a data set has refused too often lately.

        Raises:
            PolicyRefusal: it has; the text depends on nothing but the name.
            ConfigurationError: the site's memory is damaged.
        """
        counts = self.counts(question)
        for name in sorted(data_sets):
            if counts.get(name, 0) >= self._limit:
                raise PolicyRefusal(self._exhausted(name, question))

    def _exhausted(self, name: str, question: Question) -> str:
        anew = f"start the count anew with `veilboost registry DIR --site {self._site} --reset-refusals {name}`."
        if question is Question.ROWS:
            return (
                f"{self._site} has refused {self._limit} jobs within a month because of the rows of data set {name!r}: "
                f"none may look at them for now. Policy key: data_refusals_per_month. Remedy: ask {self._site} to read "
                f"its log, and to {anew}"
            )
        return (
            f"{self._site} has refused {self._limit} jobs within a month that asked for more rows of data set {name!r} "
            "than its own policy does: none of these may look at them for now. Policy keys: min_effective_rows, "
            "data_refusals_per_month. Remedy: bring subsample nearer to one half or leave it out, ask the other sites "
            f"to lower min_effective_rows, or ask {self._site} to raise its own, or to {anew}"
        )

    def note(self, data_sets: Iterable[str], question: Question = Question.ROWS) -> None:
        """Count one refusal of each data set, durably; before anyone is told of it."""
        with self._memory.transaction() as db:
            db.execute("DELETE FROM refusals WHERE at <= ?", (self._clock() - MONTH_S,))
            for name in data_sets:
                key = (question.value, name)
                db.execute("INSERT INTO refusals VALUES (?, ?, ?)", (*key, self._clock()))
                db.execute(
                    "DELETE FROM refusals WHERE (question, data_set) = (?, ?) AND rowid NOT IN (SELECT rowid FROM "
                    "refusals WHERE (question, data_set) = (?, ?) ORDER BY rowid DESC LIMIT ?)",
                    (*key, *key, self._limit),
                )

    def reset(self, data_set: str) -> None:
        """Start the count of a data set anew."""
        with self._memory.transaction() as db:
            db.execute("DELETE FROM refusals WHERE data_set = ?", (data_set,))

    def counts(self, question: Question = Question.ROWS) -> dict[str, int]:
        """Return the refusals of the last month by data set."""
        with self._memory.reading() as db:
            counts = "SELECT data_set, COUNT(*) FROM refusals WHERE question = ? AND at > ? GROUP BY data_set"
            return dict(sorted(db.execute(counts, (question.value, self._clock() - MONTH_S))))
