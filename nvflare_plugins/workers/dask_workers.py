"""Workers of a Dask cluster: found, checked, held by name of address, and tried without a job."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pickle import UnpicklingError
from types import TracebackType
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import WorkerFailure, WorkerLost
from nvflare_plugins.data.declaration import Cluster, is_on_loopback, is_under_tls
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.workers import dask_connection
from nvflare_plugins.workers.worker_connection import DONE, WorkerLine, check_worker
from nvflare_plugins.workers.workers import TRIAL, Workers, WorkerSilent, begin, collect

# Workers of a Dask cluster: found, checked, and held by name of address, with no way around them.
#
# The site's process has no client of Dask's (``DaskConnection``). It asks the scheduler where the workers are, and has
# a line to a part host at each (``open_line``): what is private goes there directly and never through the scheduler,
# where logs and dashboards would show it. A part host is nothing that Dask knows of, so that Dask neither moves nor
# repeats it.


_log = logging.getLogger(__name__)
_LOST = (OSError, RuntimeError, ValueError, UnpicklingError)
"""What a connection to a worker raises when it ends, a connection that the system gives up (TimeoutError) included."""
_STATE_S = 5.0  # how long a worker that did not answer in time is asked for which other it waits
_AGAIN_S = 0.1
FIND_S = 30.0
"""How long a site waits for its scheduler to answer, and for so many workers to be there. Units: seconds."""
NEEDS_EXTRA = (
    "the policy names a cluster, and Dask is not installed. Policy keys: cluster, data_sets.<name>.cluster. Remedy: "
    "install the extra `cluster` (pip install 'veilboost[cluster]') at this site and at its workers, or leave the key "
    "out."
)


class DaskWorkers(Workers):
    """Workers behind a Dask scheduler; made by ``open_workers``."""

    def __init__(self, links: list[_WorkerLink]) -> None:
        super().__init__(links, links if len(links) > 1 else ())
        self._lines = links

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            _close(self._lines)


class _WorkerLink:
    """The line to the part host of one worker, which has said that it is as this site asks, and one beside it."""

    def __init__(
        self, cluster: Cluster, context: ssl.SSLContext | None, number: int, address: str, find_s: float
    ) -> None:
        self._cluster, self._context, self._find_s = cluster, context, find_s
        self._number, self.address, self.host = number, address, secrets.token_hex(16)
        self._until = time.monotonic() + find_s
        self._asking, self._is_open, self._is_over = threading.Lock(), False, False
        self._beside: _Beside | None = None
        self._pid: object = None
        try:
            with self._connected() as connection:
                dask_connection.have_stand_by(connection)
                self._line = dask_connection.open_line(connection, self.host, dask_connection.SITE, self._look)
        except dask_connection.NoAnswer as answer:
            raise ConfigurationError(
                f"worker {number} of this site's cluster cannot say what is installed there ({answer}). Remedy: "
                "install there what this site has, with the extra `cluster`."
            ) from None
        except TimeoutError:
            raise self._late() from None
        except _LOST as error:
            _log.error("worker %d is not reached: %s", number, type(error).__name__)
            why = dask_connection.why_not(address, context)
            raise WorkerLost(
                f"worker {number} of this site's cluster cannot be reached: it {why}. Remedy: "
                "see that this machine reaches it at the address that it tells the scheduler."
            ) from None
        try:
            self._check()
        except BaseException:
            self.close()
            raise
        self._is_open = True

    def _connected(self) -> dask_connection.DaskConnection:
        return dask_connection.DaskConnection(self.address, self._context, time.monotonic() + self._find_s)

    def _late(self) -> WorkerLost:
        return WorkerLost(f"worker {self._number} of this site's cluster did not answer within {self._find_s:g} s")

    def _check(self) -> None:
        state, found, _ = self._told("describe")
        if state != DONE or not isinstance(found, dict):
            raise ConfigurationError(
                f"worker {self._number} of this site's cluster cannot say what is installed there "
                f"({type(found).__name__}). Remedy: install there what this site has, with the extra `cluster`."
            )
        check_worker(self._number, found)
        self._pid = found.get("pid")

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        """Call a function of the part host; wait until it is done, the worker gone, or time is up."""
        with self._asking:
            self._until = time.monotonic() + self._cluster.deadline_s
            return self._told(function, *args)

    def _told(self, function: str, *args: Any) -> tuple[str, Any, str]:
        try:
            self._look()
            self._line.send((function, args))
            match self._line.receive():
                case (str(state), value, str(words)):
                    return state, value, words
            raise UnpicklingError("no answer of a part host")
        except _LOST as error:
            if self._is_over:
                raise WorkerLost("the work on this site's cluster has ended") from None
            _log.error("worker %d is lost: %s", self._number, type(error).__name__)
            raise WorkerLost(
                dask_connection.lost(self._cluster.scheduler, self._context, self._number, self.address, self._pid)
            ) from None
        except BaseException:
            self._line.hang_up()  # what comes next would be the rest of this answer
            raise

    def close(self) -> None:
        """Let the worker find that nobody asks any more."""
        self._is_over = True
        if self._beside is not None:
            self._beside.line.close()
        self._line.hang_up()
        with self._asking:
            self._line.close()

    def _look(self) -> None:
        if time.monotonic() > self._until:
            raise WorkerSilent.of(self._number, self._cluster.deadline_s) if self._is_open else self._late()

    def meet(self, hosts: Sequence[tuple[str, str]]) -> None:
        """Tell the part host where the others are, and make the line beside. Args: see ``DaskPartHost.meet``."""
        state, _, _ = self.ask("meet", self._number, list(hosts))
        try:
            if state != DONE:
                raise OSError("the part host does not meet others")
            with self._connected() as connection:
                self._beside = _Beside(connection, self.host)
        except _LOST:
            raise WorkerLost(
                f"worker {self._number} of this site's cluster was lost; its log, or its machine's, says why"
            ) from None

    def end_exchange(self, exchange: int) -> None:
        if self._beside is not None:
            with contextlib.suppress(*_LOST):  # what is lost waits for nobody
                self._beside.say("end_exchange", exchange)

    def waits_for(self) -> int | None:
        if self._beside is not None:
            with contextlib.suppress(*_LOST):
                match self._beside.ask("waits_for"):
                    case (state, int(other), _) if state == DONE:
                        return other
        return None


class _Beside:
    """A line to a part host that it answers while its part is at work. Each question has its answer, read or not."""

    def __init__(self, connection: dask_connection.DaskConnection, host: str) -> None:
        self._asking, self._due, self._until = threading.Lock(), 0, time.monotonic() + _STATE_S
        self.line: WorkerLine = dask_connection.open_line(connection, host, dask_connection.BESIDE, self._look)

    def say(self, function: str, *args: Any) -> None:
        with self._asking:
            self._until = time.monotonic() + _STATE_S
            self.line.send((function, args))
            self._due += 1

    def ask(self, function: str) -> Any:
        self.say(function)
        with self._asking:
            answer = None
            while self._due:
                answer = self.line.receive()
                self._due -= 1
            return answer

    def _look(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError


def open_workers(cluster: Cluster, find_s: float = FIND_S) -> DaskWorkers:
    """Connect to a site's cluster, and check its workers before anything private reaches one.

    Args:
        find_s: how long the scheduler and so many workers are waited for.

    Raises:
        ConfigurationError: Dask is not installed; certificates, scheduler or workers are not usable, and why.
        WorkerFailure: a worker was lost meanwhile.
    """
    if importlib.util.find_spec("distributed") is None:
        raise ConfigurationError(NEEDS_EXTRA)
    context = None if cluster.security is None else dask_connection.load_certificates(cluster.security)[0]
    addresses = _choose(_find(cluster, context, find_s), cluster)
    for number, address in enumerate(addresses):  # below errors, which FLARE hands on to the server
        _log.info("worker %d of %d is %s", number, len(addresses), address)
    links = _linked(cluster, context, addresses, find_s)
    try:
        if len(links) > 1:
            hosts = [(link.address, link.host) for link in links]
            for link in links:
                link.meet(hosts)
        workers = DaskWorkers(links)
        begin(workers, TRIAL, [()] * len(workers))
        collect([workers.call(number, "echo", b"") for number in range(len(workers))])
        return workers
    except BaseException:
        _close(links)
        raise


def _find(cluster: Cluster, context: ssl.SSLContext | None, find_s: float) -> dict[str, Any]:
    """Return the workers that run, by address, as soon as there are enough.

    One that has just come, or is full, is known to the scheduler and does not run.
    """
    until, n_found = time.monotonic() + find_s, None
    while True:
        try:
            with dask_connection.DaskConnection(cluster.scheduler, context, until) as connection:
                while True:
                    found = _running(connection.ask("identity"))
                    if len(found) >= cluster.workers:
                        return found
                    n_found = len(found)
                    time.sleep(_AGAIN_S)
        except (OSError, ValueError) as error:
            may_come = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
            if may_come and time.monotonic() + _AGAIN_S < until:
                time.sleep(_AGAIN_S)
                continue
        if n_found is not None:
            raise ConfigurationError(
                f"the policy asks for {cluster.workers} workers, and the scheduler has {n_found} that run. Policy "
                "key: cluster.workers. Remedy: start more of them, look at the logs of the others, or lower the number."
            )
        why = dask_connection.why_not(cluster.scheduler, context)
        raise ConfigurationError(
            f"the scheduler that the policy names cannot be reached: it {why}. "
            "Policy keys: cluster.scheduler, cluster.security. Remedy: start it, or correct address and certificates."
        )


def _running(answer: Any) -> dict[str, Any]:
    """Return the workers that take work, of what a scheduler says of itself. Raises: NoAnswer: it is something else."""
    known = answer.get("workers") if isinstance(answer, dict) else None
    if not isinstance(known, dict) or not all(
        isinstance(address, str) and isinstance(one, dict) for address, one in known.items()
    ):
        raise dask_connection.NoAnswer("no scheduler")
    return {address: one for address, one in known.items() if one.get("status", "running") == "running"}


def _choose(known: dict[str, Any], cluster: Cluster) -> list[str]:
    """Return the addresses of the workers that take part, in the order of Dask's names and addresses."""
    chosen = sorted(known, key=lambda address: (str(known[address].get("name", "")), address))[: cluster.workers]
    for number, address in enumerate(chosen):  # the scheduler says where they are: it may be anywhere
        if cluster.security is None and not is_on_loopback(address):
            raise ConfigurationError(
                f"worker {number} of this site's cluster is not on this machine's loopback, and without TLS private "
                "values would go to it in clear. Remedy: start workers with --host 127.0.0.1, or the cluster with "
                "certificates (tls://). Policy keys: cluster.scheduler, cluster.security."
            )
        if cluster.security is not None and not is_under_tls(address):
            raise ConfigurationError(
                f"worker {number} of this site's cluster is not reached by tls://. Remedy: start workers with the "
                "certificates and without another --protocol."
            )
    return chosen


def _linked(
    cluster: Cluster, context: ssl.SSLContext | None, addresses: Sequence[str], find_s: float
) -> list[_WorkerLink]:
    """Return the links to all workers; close those that there are where one cannot be."""
    with ThreadPoolExecutor(len(addresses)) as threads:
        made = [
            threads.submit(_WorkerLink, cluster, context, number, address, find_s)
            for number, address in enumerate(addresses)
        ]
    failed = [one for one in made if one.exception() is not None]
    if failed:
        _close([one.result() for one in made if one.exception() is None])
    for one in failed:
        one.result()
    return [one.result() for one in made]


def _close(links: Sequence[_WorkerLink]) -> None:
    for link in links:
        link.close()


# Whether a job could use the clusters that a site's policy names, asked without a job.


_SOON = timedelta(days=30)


def cluster_gaps(policy: SitePolicy) -> Iterator[str]:
    """Yield why a job could not use a cluster, one clause for each, or soon could not.

    Connects to each as a job does: its workers are looked at, and get a few bytes, and no row.
    """
    clusters = (policy.cluster, *(data_set.cluster for data_set in policy.data_sets.values()))
    for cluster in dict.fromkeys(one for one in clusters if one is not None):
        try:
            with open_workers(cluster):
                end = None if cluster.security is None else dask_connection.load_certificates(cluster.security)[1]
        except (ConfigurationError, WorkerFailure) as error:
            yield str(error)
            continue
        if end is not None and end - datetime.now(UTC) < _SOON:
            yield f"this site's certificate towards its cluster ends on {end:%Y-%m-%d}: have a new one signed"
