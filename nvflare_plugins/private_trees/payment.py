"""A site's ledger in one job: the whole plan is reserved before anything is released, each release charged before it
leaves."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dp_components.errors import PrivacyError
from dp_components.events import Event, Release
from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import ConfigurationError, JobAborted, PolicyRefusal
from nvflare_plugins.place import Place
from nvflare_plugins.privacy_ledger import event_text, open_ledger
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.job_plan import JobPlan
from nvflare_plugins.private_trees.training import STATE
from nvflare_plugins.wire.evidence import EvidenceLog

_log = logging.getLogger(__name__)


class Payment:
    """Pays for the releases of one job at one site.

    What an interrupted job has released stays in the ledger while the job is open there. Under distributed noise the
    same queries get the same replies again, noise included, at no charge, in a new attempt or in a job that resumes
    it. Under a trusted aggregator they must not: the noise was the server's and is gone, and fresh noise on the same
    sums is a further release. There the job ends with its attempt.
    """

    def __init__(
        self, job: PrivateTreesJob, place: Place, plan: JobPlan, rows: bytes, evidence: EvidenceLog | None = None
    ):
        """Reserve the cost of the whole plan, if two accountants agree on it.

        Args:
            rows: hash of the rows; it stays in this site's own ledger.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, or a person has more rows at this site than
                the job protects.
            ConfigurationError: there is no such job to resume.
        """
        self._ledger, _ = open_ledger(place.policy, job.data_set, NeighbouringRelation.ADD_OR_REMOVE_ROW)
        self._plan, self._rows, self._evidence = plan, rows, evidence
        self._job_id = job.resume_from or place.job_id
        self._may_resume = not plan.training.trust.is_trusted_aggregator
        self._texts: dict[int, str] = {}
        self._has_begun = False
        _check_person(job, place)
        self._was_known = self._is_known()
        if job.resume_from is not None and not self._was_known:
            raise ConfigurationError(f"the ledger of {place.site} knows no job {job.resume_from} to resume")
        if self._was_known and not self._may_resume:
            self.end()
            raise PolicyRefusal(
                f"job {self._job_id} was begun before, and its server's noise is gone: submit it anew, to be charged "
                "anew"
            )
        try:
            self.quote = self._ledger.open_job(self._job_id, plan.events())
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None

    def begin(self) -> None:
        """Note that every site has reserved its plan: from now on something may be released."""
        self._has_begun = True

    def pay(self, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        """Return a release, or the reply that the same query got before; it was charged durably before this returns.

        Raises:
            PolicyRefusal: the ledger refuses; JobAborted, if it cannot be written.
        """
        drawn: list[Event] = []

        def draw() -> Release:
            release = make()
            drawn.append(release.event)
            return release

        what, _, state = query.partition(STATE)
        depends = hashlib.sha256(self._rows + state.encode()).hexdigest()[:32]
        try:
            value = self._ledger.release(self._job_id, f"{what}{STATE}{depends}", draw)
            spent = self._ledger.job_spent(self._job_id)
        except PrivacyError as error:
            raise PolicyRefusal(str(error)) from None
        except OSError as error:
            raise JobAborted(
                f"the privacy ledger cannot be written ({type(error).__name__}): nothing was sent"
            ) from None
        if self._evidence is not None:
            text = event_text(drawn) if drawn else "replayed: paid for before, no charge"
            delta = self._plan.job.delta
            self._evidence.spend(what, text, spent.epsilon(delta), delta)
        return value

    def spent(self) -> float:
        """Return epsilon, at the job's delta, of all that this job has released at this site."""
        return self._ledger.job_spent(self._job_id).epsilon(self._plan.job.delta)

    def complete(self) -> None:
        """End a job that went well: what it has not used is free again, the cached replies are deleted."""
        self.end()

    def abandon(self) -> None:
        """End an attempt that failed: free what was reserved, unless the job may be resumed."""
        if self._was_known or (self._has_begun and self._may_resume):
            _log.warning(
                "job %s stays open in the ledger: resume it, or free its reservation with `veilboost ledger --close`",
                self._job_id,
            )
            return
        self.end()

    def end(self) -> None:
        """Close the job in the ledger."""
        try:
            self._ledger.close_job(self._job_id)
        except PrivacyError:
            _log.info("job %s is closed in the ledger already", self._job_id)

    def _is_known(self) -> bool:
        try:
            self._ledger.job_spent(self._job_id)
        except PrivacyError:
            return False
        return True


def _check_person(job: PrivateTreesJob, place: Place) -> None:
    budget = place.policy.data_set(job.data_set).privacy
    if budget is not None and budget.rows_per_person > job.rows_per_person:
        raise PolicyRefusal(
            f"at {place.site} one person has up to {budget.rows_per_person} rows, and the job's epsilon is meant for "
            f"{job.rows_per_person}: such a person would be protected less than it says. Policy key: "
            f"data_sets.{job.data_set}.privacy.rows_per_person. Remedy: rows_per_person={budget.rows_per_person} in "
            "the job, which raises the noise"
        )
