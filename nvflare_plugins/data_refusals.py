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

* What all sites find alike from the sum of their counts (``TooFewRows``) is one bit over the rows of all of them, and is
  counted at each.

The count is kept in one file of mode 0600 in the registry's folder, by names of data sets: no row, no reason.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from he_processors.errors import CapacityExceeded, ConfigurationError, PolicyRefusal, VeilBoostError
from nvflare_plugins.failures import DataRefusal, TooFewRows, machine_failure
from nvflare_plugins.files import write_private
from nvflare_plugins.site_policy import SitePolicy, is_private

FILE_NAME = "data_refusals.json"
MONTH_S = 31 * 24 * 3600
_VERSION = 1
_log = logging.getLogger(__name__)


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
        # No error line: FLARE's default sends those to the server.
        _log.warning("why this site refused, for this site only: %s", reason)
        if policy.share_data_errors and not is_private(profile):
            raise ConfigurationError(reason) from None
        if isinstance(error, DataRefusal):
            raise
        raise DataRefusal(reason) from None
    except TooFewRows:  # any column may be named as the weight, and nothing else remembers such a job
        count.note(names)
        raise
    except VeilBoostError:
        raise
    except Exception as error:  # a defect that some rows bring out answers a question as well
        if machine_failure(error) is None:
            count.note(names)
            if is_private(profile):  # its type would be an answer too
                reason = f"unexpected {type(error).__name__}: a defect of VeilBoost or of its set-up, please report it"
                _log.warning("why this site refused, for this site only: %s", reason)
                raise DataRefusal(reason) from error
        raise


class RefusalCount:
    """How often jobs were refused because of the rows of each data set of a site, within a month."""

    def __init__(self, policy: SitePolicy, clock: Callable[[], float] = time.time) -> None:
        self._site, self._limit = policy.site, policy.data_refusals_per_month
        self._path = policy.registry / FILE_NAME
        self._clock = clock

    def check(self, data_sets: Iterable[str]) -> None:
        """Refuse if a data set has refused too often lately.

        Raises:
            PolicyRefusal: it has; the text depends on nothing but the name.
            ConfigurationError: the file is damaged.
        """
        if not self._path.exists():
            return
        with self._locked() as refusals:
            for name in data_sets:
                if len(refusals.get(name, ())) >= self._limit:
                    raise PolicyRefusal(
                        f"{self._site} has refused {self._limit} jobs within a month because of the rows of data set "
                        f"{name!r}: none may look at them for now. Policy key: data_refusals_per_month. Remedy: ask "
                        f"{self._site} to read its log, and to start the count anew with `veilboost registry DIR "
                        f"--site {self._site} --reset-refusals {name}`."
                    )

    def note(self, data_sets: Iterable[str]) -> None:
        """Count one refusal of each data set, durably; before anyone is told of it."""
        with self._locked() as refusals:
            for name in data_sets:
                refusals[name] = [*refusals.get(name, ()), self._clock()][-self._limit :]
            self._write(refusals)

    def reset(self, data_set: str) -> None:
        """Start the count of a data set anew."""
        with self._locked() as refusals:
            refusals.pop(data_set, None)
            self._write(refusals)

    def counts(self) -> dict[str, int]:
        """Return the refusals of the last month by data set."""
        if not self._path.exists():
            return {}
        with self._locked() as refusals:
            return {name: len(times) for name, times in sorted(refusals.items())}

    @contextmanager
    def _locked(self) -> Iterator[dict[str, list[float]]]:
        """Hold the lock; yield the times of the last month's refusals (those of the future too) by data set."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            oldest = self._clock() - MONTH_S
            recent = {name: [t for t in times if t > oldest] for name, times in self._read().items()}
            yield {name: times for name, times in recent.items() if times}
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, list[float]]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document["version"] != _VERSION:
                raise ValueError("unknown version")
            return {str(name): [float(t) for t in times] for name, times in document["refusals"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{self._site}: {FILE_NAME} in the registry's folder is damaged: restore it, or delete it, which "
                "forgets how often jobs were refused because of rows"
            ) from None

    def _write(self, refusals: dict[str, list[float]]) -> None:
        document = {"version": _VERSION, "refusals": refusals}
        write_private(self._path, (json.dumps(document, indent=1) + "\n").encode())
