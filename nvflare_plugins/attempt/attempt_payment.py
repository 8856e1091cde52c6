"""What a job of several attempts pays at one site: each release once, whichever attempt makes it.

The whole plan is reserved before anything is released, each release charged before it leaves; what a failed attempt has
not used is free again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.events import Event, Release
from he_processors.errors import JobAborted, PolicyRefusal, ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.attempt.payment import JobLedger, submit_anew
from nvflare_plugins.failures import DataRefusal

HISTORY_BYTES = 8 + 32 + 32
_ROWS = "; rows "
_log = logging.getLogger(__name__)


class AttemptPayment:
    """Pays for the releases of one job at one site, over all its attempts.

    A job holds its plan only while it runs: whoever begins jobs and breaks them off would otherwise take a data set's
    budget at no cost to himself. What it has released before it was interrupted stays charged, and its replies stay in
    the ledger: the same queries get them again, at no charge, in a new attempt, if the budget then still has room for
    the rest. If the process dies, the next private job on the data set settles what it had reserved.

    A replay is free only while all sites replay. So the sites compare what they would replay before anything is
    released (``history``, ``begin``), and a site then answers nothing else in its place. They may differ by the last
    query alone: its charge comes before its sum leaves the site, so that the sum over the sites was never complete
    where one of them, with all that its ledger ever wrote, had not charged it. Nor does a site replay anything among
    other sites: sums over several choices of sites would show each one's part.
    """

    def __init__(
        self,
        context: SiteContext,
        ledger: JobLedger,
        data_set: str,
        plan: Event | Iterable[Event],
        rows: bytes,
        *,
        may_replay: bool,
        is_kept: bool,
        job_id: str | None = None,
    ):
        """Reserve the cost of the whole plan, if two accountants agree on it.

        Args:
            rows: hash of the rows; it stays in this site's own ledger.
            may_replay: what was released outlives the attempt.
            is_kept: so does what was reserved, even if not all sites come so far: the job waits for lost sites.
            job_id: under which the ledger knows the job; None for its own.

        Raises:
            PolicyRefusal: the data set has no budget or not so much left, or the job has ended before.
            DataRefusal: rows or sites are not those with which it was begun.
        """
        self._job_id, self._ledger = job_id or context.job_id, ledger
        begun = "\n".join((self._job_id, *sorted(context.sites)))
        self._rows = hashlib.sha256(rows + begun.encode()).hexdigest()[:32]
        self._may_resume, self._is_kept, self._n_paid, self._n_begun = may_replay, is_kept, 0, 0
        self._was_known = ledger.is_known
        if self._was_known and not may_replay:
            ledger.close()
            text = (
                f"job {self._job_id} was begun before, and its server's noise is gone: submit it anew, to be charged "
                "anew"
            )
            raise PolicyRefusal(submit_anew(text, self._job_id))
        self.quote = ledger.reserve(plan, may_replay)
        self._replays = ledger.replies()
        if any(query.partition(_ROWS)[2] != self._rows for query in self._replays):
            self.abandon()
            text = (
                f"the rows of data set {data_set!r} at {context.site}, or the sites of the job, are not those on "
                f"which job {self._job_id} was begun: it cannot be resumed. Submit it anew, to be charged anew"
            )
            raise DataRefusal(submit_anew(text, self._job_id))

    def history(self) -> bytes:
        """Return what the other sites must know to see that all replay the same: number and hashes of the queries.

        Privacy: a query names the round, and a hash of noisy sums that all sites have got.
        """
        queries = [query.partition(_ROWS)[0] for query in self._replays]
        return b"".join([len(queries).to_bytes(8, "little"), _digest(queries), _digest(queries[:-1])])

    def begin(self, histories: Sequence[bytes]) -> None:
        """Go on once every site has reserved its plan and would replay the same: now something may be released.

        Args:
            histories: ``history`` of every site.

        Raises:
            PolicyRefusal: some sites would replay what others draw afresh.
            ProtocolError: a peer's history is not one.
        """
        if any(len(history) != HISTORY_BYTES for history in histories):
            raise ProtocolError("a site's account of what it would replay has another size than it should")
        longest = max(histories, key=_length)
        for history in histories:
            is_same = history == longest
            lacks_last = _length(history) == _length(longest) - 1 and history[8:40] == longest[40:]
            if not is_same and not lacks_last:
                raise PolicyRefusal(
                    f"the sites' ledgers hold different releases of job {self._job_id}: some would be drawn afresh at "
                    "one site and replayed, unpaid, at others. Nothing was released. Submit the job anew, to be "
                    "charged anew"
                )
        self._is_kept, self._n_begun = True, _length(longest)

    @property
    def was_begun(self) -> bool:
        """Whether any site says that it paid before this attempt for what this site has paid for last."""
        return self._n_paid <= self._n_begun

    def pay(self, query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
        """Return a release, or the reply that the same query got before; it was charged durably before this returns.

        Raises:
            PolicyRefusal: the ledger refuses.
            JobAborted: it cannot be written, or holds another query in this place.
        """
        query = f"{query}{_ROWS}{self._rows}"
        if self._n_paid < len(self._replays) and query != self._replays[self._n_paid]:
            raise JobAborted(
                f"job {self._job_id} now asks for something else than before it was interrupted, as after a change of "
                "software: nothing was sent. Submit it anew, to be charged anew"
            )
        self._n_paid += 1
        return self._ledger.pay(query, make)

    def spent(self) -> float:
        """Return epsilon, at the job's delta, of all that this job has released at this site."""
        return self._ledger.spent()

    def complete(self) -> None:
        """End a job that went well: what it has not used is free again, the cached replies are deleted."""
        self._ledger.close()

    def abandon(self) -> None:
        """End an attempt that failed: free what was not released, keep the replies of a job that may be resumed."""
        if not self._was_known and not (self._is_kept and self._may_resume):
            self._ledger.close()
        elif self._ledger.interrupt():
            _log.warning(
                "job %s was interrupted: what it has released stays charged, the rest of its budget is free again. "
                "Let it go on, or delete its replies with `veilboost ledger --close`",
                self._job_id,
            )


def _digest(queries: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(queries).encode()).digest()


def _length(history: bytes) -> int:
    return int.from_bytes(history[:8], "little")
