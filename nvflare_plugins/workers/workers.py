"""The one interface to a party's workers, a twin of it in the party's own process, and what jobs make of both."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.base.formatting import counted, human_bytes
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.workers import worker_connection

# The one interface to a party's workers, and a twin of it in the party's own process.
#
#     with open_workers(policy.cluster_for("credit")) as workers:   # dask_workers.py; checked before it returns
#         rows = shard_rows(n_rows, len(workers))                  # one range for each worker, none empty
#         begin(workers, f"{__name__}:SumShard", [(codes[:, one],) for one in rows])
#         partial = collect([workers.call(number, "sum_bins", ...) for number in range(len(workers))])  # in order
#
# A worker holds one ``WorkerPart`` (``worker_connection``) of the installed package. It is made by its name and called
# by the name of its methods; arguments and values are plain (``require_plain``) and go from the party's process to the
# worker and back, past the scheduler. Calls of one worker are done one after the other, in order; different workers
# work side by side. The first loss ends everything: every later call raises it again, and a party goes on from its last
# checkpoint.
#
# Security: a party's workers are that party: they see the rows of their shards, what is sealed to the party, opened,
# and the secret keys that a part is explicitly given. The other parties and the server learn neither that there are
# workers nor how many, but for what time tells.


TRIAL = "nvflare_plugins.workers.worker_connection:Trial"
HELD = "held"
"""What a worker's own rows are counted under, in ``Work.rows``."""
_OWN_WORDS_S = 3.0


@dataclass(slots=True)
class Work:
    """What one worker has done so far, and does. Written by the thread that asks it, read by any.

    Attributes:
        calls, bytes_to, bytes_from: that have been answered; bytes there and back.
        bytes_to_others: to the site's other workers.
        rows: that it has been given, or has encrypted or blinded, by such a word.
        told: of a call that goes on: what it does in words, and how many of how many rows it has come to.
    """

    calls: int = 0
    bytes_to: int = 0
    bytes_from: int = 0
    bytes_to_others: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    told: tuple[str, int, int] | None = None
    _clock: tuple[float, str, float] = (0.0, "", 0.0)  # seconds of what is done, what goes on, since when: one value

    @property
    def seconds(self) -> float:
        """Return how long it took to answer, in seconds of the site's clock."""
        return self._clock[0]

    @property
    def asked(self) -> str:
        """Return the method whose answer is waited for; "" where none is."""
        return self._clock[1]

    def seconds_until(self, now: float) -> float:
        """Return ``seconds``, with those of what goes on. Args: now: of ``time.perf_counter``."""
        done, asked, since = self._clock
        return done + max(now - since, 0.0) if asked else done

    @contextmanager
    def busy(self, method: str) -> Iterator[None]:
        """Count the time of a block."""
        done, since = self._clock[0], time.perf_counter()
        self._clock = (done, method, since)
        try:
            yield
        finally:
            self._clock = (done + time.perf_counter() - since, "", 0.0)

    def exchanged(self, n_bytes: int, waited_s: float) -> None:
        """Take note of what an answered call has sent to other workers, and how long it was not busy but waited."""
        done, asked, since = self._clock
        self.bytes_to_others += n_bytes
        self._clock = (max(done - waited_s, 0.0), asked, since)

    def counting(self, done: str, n_rows: int) -> Callable[[Future[Any]], None]:
        """Return what counts rows once a call is answered. Args: done: what has been done to them."""

        def count(future: Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                self.rows[done] = self.rows.get(done, 0) + n_rows

        return count


class HostLink(Protocol):
    """The way to the part host of one worker."""

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        """Call a function of ``PartHost``. Raises: WorkerFailure."""


class PeerLink(Protocol):
    """The way to a part host while its part is at work."""

    def end_exchange(self, exchange: int) -> None:
        """Have it wait no longer for other workers (``PartHost.end_exchange``); return at once."""

    def waits_for(self) -> int | None:
        """Return the worker for which it waits; None where it waits for none, or does not answer."""


class WorkerSilent(WorkerLost):
    """A worker did not answer in time. As any error of ours it is made of its words, to which others may be added."""

    deadline_s = 0.0

    @classmethod
    def of(cls, worker: int, deadline_s: float) -> Self:
        """Say it of a worker."""
        silent = cls(
            f"worker {worker} of this site's cluster did not answer within {deadline_s:g} s (policy key: "
            "cluster.deadline_s)"
        )
        silent.deadline_s = deadline_s
        return silent


class Workers:
    """A party's workers, numbered from 0, behind links: a thread for each asks it one thing after another.

    A context manager: leaving it lets all go.

    Attributes:
        work: what each has done.
    """

    def __init__(self, links: Sequence[HostLink], peers: Sequence[PeerLink] = ()) -> None:
        """Args: peers: the same hosts, where they can exchange values."""
        self._links, self._peers = links, peers
        self._exchanges = itertools.count(1)
        self._has_failed = threading.Event()
        self._refusal: VeilBoostError | None = None  # that ended an exchange
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"veilboost_worker_{number}") for number in range(len(links))
        ]
        self._failure: WorkerFailure | None = None
        self.work = tuple(Work() for _ in links)

    def __len__(self) -> int:
        return len(self._links)

    def begin(self, worker: int, path: str, *args: Any) -> Future[Any]:
        """Have a worker make a ``WorkerPart``, in the place of the one before.

        Args:
            path: "nvflare_plugins.module:Class".
            args: plain values.

        Raises (from the future, as ``call``):
            WorkerFailure: a worker or the scheduler is lost, or did not answer in time; the text has its number.
            VeilBoostError: what the part itself raised.
        """
        return self._threads[worker].submit(self._ask, worker, "begin", path, args)

    def call(self, worker: int, method: str, *args: Any) -> Future[Any]:
        """Have a worker call a method of its part; see ``begin``."""
        return self._threads[worker].submit(self._ask, worker, "call", method, args)

    def together(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """Have all workers call a method in which their parts exchange values (``peers``), one such call at a time.

        Args:
            args: of each worker's; the number of the exchange comes before them.
        """
        exchange = next(self._exchanges)
        return [
            self._threads[worker].submit(self._ask, worker, "call", method, (exchange, *own), exchange=exchange)
            for worker, own in enumerate(args)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._failure is None:
            for number, thread in enumerate(self._threads):
                thread.submit(self._ask, number, "end")
        else:
            self._fail(WorkerFailure("the work on this site's cluster has ended"))
        for thread in self._threads:
            thread.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def _fail(self, failure: WorkerFailure) -> WorkerFailure:
        """Take note of the first failure, which ends everything, and return it: nobody waits for others any longer."""
        self._failure = self._failure or failure
        self._has_failed.set()
        self._end_exchanges(worker_connection.ALL)
        return self._failure

    def _end_exchanges(self, exchange: int) -> None:
        for peer in self._peers:
            peer.end_exchange(exchange)

    def _ask(self, worker: int, function: str, *args: Any, exchange: int | None = None) -> Any:
        if self._failure is not None:
            raise self._failure
        n_bytes, done = worker_connection.require_plain(args), self.work[worker]
        try:
            with done.busy(str(args[0]) if function == "call" else function):
                state, value, words = self._links[worker].ask(function, *args)
        except WorkerSilent as silent:
            raise self._fail(WorkerSilent.of(self._awaited_by(worker), silent.deadline_s)) from None
        except WorkerFailure as failure:
            raise self._fail(failure) from None
        done.calls, done.bytes_to = done.calls + 1, done.bytes_to + n_bytes
        try:
            done.bytes_from += worker_connection.require_plain(value)
        except (TypeError, RecursionError):
            raise self._fail(
                WorkerFailure(f"worker {worker} of this site's cluster answered with more than plain values")
            ) from None
        if state == worker_connection.DONE:
            return value
        raise self._failure_of(worker, state, value, words, exchange)

    def _failure_of(self, worker: int, state: str, value: object, words: str, exchange: int | None) -> Exception:
        """Return what a worker's answer says went wrong, and end the work, or the exchange that others wait for."""
        if state == worker_connection.FAILED:
            return self._fail(WorkerFailure(f"worker {worker} of this site's cluster failed: {words}"))
        if state == worker_connection.LOST:
            self._has_failed.wait(_OWN_WORDS_S)  # the lost worker's own link says more
            other = value if type(value) is int else "?"
            return self._fail(
                WorkerLost(
                    f"worker {other} of this site's cluster was lost, or worker {worker} does not reach it; its log, "
                    "or its machine's, says why"
                )
            )
        if state == worker_connection.OVER:
            return self._failure or self._refusal or WorkerFailure("the work on this site's cluster has ended")
        refusal = worker_connection.error_of(str(value), words)
        if exchange is not None:  # the others would wait for what this one does not send
            self._refusal = refusal
            self._end_exchanges(exchange)
        return refusal

    def _awaited_by(self, worker: int) -> int:
        """Return the worker for which one waits that does not answer, or for which that one waits, and so on."""
        for _ in self._peers:
            other = self._peers[worker].waits_for()
            if other is None or not 0 <= other < len(self._peers):
                break
            worker = other
        return worker


def collect(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all, or for the first that fails; return their values in order.

    Raises:
        VeilBoostError: of the first in order that has failed by then.
    """
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done() and future.exception() is not None:
            future.result()
    return [future.result() for future in futures]


def begin(workers: Workers, path: str, args: Sequence[tuple[Any, ...]]) -> None:
    """Have every worker make a part of the same class. Args: args: of each worker's."""
    collect([workers.begin(number, path, *own) for number, own in enumerate(args)])


def note_rows(workers: Workers, runs: Sequence[slice]) -> None:
    """Take note of the rows that each worker holds from now on, in place of others."""
    for work, run in zip(workers.work, runs, strict=True):
        work.rows[HELD] = run.stop - run.start


def shard_rows(n_rows: int, n_workers: int) -> tuple[slice, ...]:
    """Divide rows among workers: ranges in order, whose lengths differ by one at most.

    Raises:
        ConfigurationError: some worker would have none.
    """
    if n_rows < n_workers:
        raise ConfigurationError(
            f"the policy asks for {n_workers} workers, and there are fewer rows: worker 0 would have none. Policy key: "
            "cluster.workers. Remedy: lower it."
        )
    ends = [n_rows * number // n_workers for number in range(n_workers + 1)]
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(ends))


# What a kind of job makes of the cluster that a policy names.


def shards_line(n_rows: int, n_workers: int) -> str:
    """Return, for this site's own log, how its rows are divided."""
    return f"{counted(n_workers, 'worker')} of this site's cluster, each with {n_rows // n_workers:,} rows or one more"


def work_section(work: Sequence[Work]) -> ReportSection:
    """Return what each worker has done, for this site's own report."""
    longest = max((one.seconds for one in work), default=0.0)
    rows = [
        (
            str(number),
            "; ".join(f"{n:,} {done}" for done, n in one.rows.items()),
            str(one.calls),
            f"{one.seconds:.1f}",
            f"{100 * one.seconds / longest:.0f} %" if longest else "",
            human_bytes(one.bytes_to),
            human_bytes(one.bytes_from),
            human_bytes(one.bytes_to_others) if one.bytes_to_others else "",
        )
        for number, one in enumerate(work)
    ]
    columns = ("worker", "rows", "calls", "seconds busy", "of the slowest", "to it", "from it", "to others")
    return ReportSection("Workers", columns=columns, rows=tuple(rows))


def _left_aside(data_set: str, why: str) -> str:
    return f"The cluster that the policy names for data set {data_set!r} was not used: {why}."


def not_used(policy: SitePolicy, data_sets: Iterable[str | None]) -> tuple[str, ...]:
    """Return, for this site's log and report, that a job leaves a cluster aside which the policy names for its rows."""
    named = {name for name in data_sets if name is not None and policy.cluster_for(name) is not None}
    return tuple(_left_aside(name, "jobs of this kind run in the site's own process") for name in sorted(named))


def evaluated_elsewhere(policy: SitePolicy, data_set: str, eval_set: str | None) -> tuple[str, ...]:
    """Return, for this site's report, that a cluster is left aside which the policy names for evaluation rows alone."""
    theirs = None if eval_set is None else policy.cluster_for(eval_set)
    ours = policy.cluster_for(data_set)
    if eval_set is None or theirs is None or (ours is not None and ours.scheduler == theirs.scheduler):
        return ()
    return (_left_aside(eval_set, f"a training has that of the rows on which it trains, data set {data_set!r}"),)


def in_own_process(policy: SitePolicy, data_set: str, what: str) -> tuple[str, ...]:
    """Return, for this site's report, that a training leaves a cluster aside. Args: what: has to; "" if nothing."""
    if not what or policy.cluster_for(data_set) is None:
        return ()
    return (_left_aside(data_set, f"{what} runs in the site's own process"),)
