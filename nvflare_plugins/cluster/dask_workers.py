"""Workers of a Dask cluster: found, checked, and held by name of address, with no way around them.

One actor for each worker, made without arguments, and a line to it (``line``): what is private goes there directly and
never through the scheduler as the argument of a task, where logs and dashboards would show it. Actors are kept in
memory only, and Dask neither moves nor repeats them.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Sequence
from pickle import UnpicklingError
from types import TracebackType
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.cluster.dask_line import DaskDesk, open_line
from nvflare_plugins.cluster.losses import lost
from nvflare_plugins.cluster.probe import check_worker, describe_worker
from nvflare_plugins.cluster.reach import load_certificates, why_not
from nvflare_plugins.cluster.workers import TRIAL, LinkedWorkers, WorkerSilent, begin, collect
from nvflare_plugins.data_sets.cluster_declaration import Cluster, is_on_loopback
from nvflare_plugins.failures import WorkerLost

_log = logging.getLogger(__name__)
_LOST = (OSError, RuntimeError, ValueError, UnpicklingError)
"""What a connection to a worker raises when it ends, a connection that the system gives up (TimeoutError) included."""
_STATE_S = 5.0  # how long a worker that did not answer in time is asked for which other it waits
FIND_S = 30.0
"""How long a site waits for its scheduler to answer, and for so many workers to be there. Units: seconds."""
NEEDS_EXTRA = (
    "the policy names a cluster, and Dask is not installed. Policy keys: cluster, data_sets.<name>.cluster. Remedy: "
    "install the extra `cluster` (pip install 'veilboost[cluster]') at this site and at its workers, or leave the key "
    "out."
)


class DaskWorkers(LinkedWorkers):
    """Workers behind a Dask scheduler; made by ``open_workers``."""

    def __init__(self, client: Any, links: list[_WorkerLink]) -> None:
        super().__init__(links, links if len(links) > 1 else ())
        self._client, self._lines = client, links

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            _close(self._client, self._lines)


class _WorkerLink:
    """The line to the desk of one worker, and the actor that is it."""

    def __init__(
        self,
        client: Any,
        number: int,
        address: str,
        pid: object,
        deadline_s: float,
        find_s: float,
        context: ssl.SSLContext | None,
    ) -> None:
        self._client, self._number, self._address, self._pid = client, number, address, pid
        self._deadline_s, self._find_s = deadline_s, find_s
        self._until = time.monotonic() + find_s
        self._asking, self._is_open, self._is_over = threading.Lock(), False, False
        try:
            self._actor = _place_desk(client, address)  # there as long as somebody holds it here
            self._line = open_line(client, address, self._actor, find_s, self._look)
            self._is_open = True
        except _LOST as error:
            _log.error("worker %d is not reached: %s", number, type(error).__name__)
            raise WorkerLost(
                f"worker {number} of this site's cluster cannot be reached: it {why_not(address, context)}. Remedy: "
                "see that this machine reaches it at the address that it tells the scheduler."
            ) from None

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        """Call a function of the desk; wait until it is done, the worker or the scheduler gone, or time is up."""
        with self._asking:
            self._until = time.monotonic() + self._deadline_s
            self._look()
            try:
                self._line.send((function, args))
                answer: tuple[str, Any, str] = self._line.receive()
            except _LOST as error:
                if self._is_over:
                    raise WorkerLost("the work on this site's cluster has ended") from None
                _log.error("worker %d is lost: %s", self._number, type(error).__name__)
                raise WorkerLost(lost(self._client, self._number, self._address, self._pid)) from None
            except BaseException:
                self._line.hang_up()  # what comes next would be the rest of this answer
                raise
            return answer

    def close(self) -> None:
        """Let the worker find that nobody asks any more."""
        self._is_over = True
        self._line.hang_up()
        with self._asking:
            self._line.close()

    def _look(self) -> None:
        if self._client.status != "running":
            raise WorkerLost(
                f"the scheduler of this site's cluster was lost while worker {self._number} worked; its log says why"
            )
        if time.monotonic() > self._until:
            if not self._is_open:
                raise WorkerLost(
                    f"worker {self._number} of this site's cluster did not answer within {self._find_s:g} s"
                )
            raise WorkerSilent.of(self._number, self._deadline_s)

    def meet(self, desks: Sequence[tuple[str, str]]) -> None:
        """Tell the desk where the others are. Args: see ``dask_peers``."""
        try:
            self._actor.meet(self._number, list(desks)).result(FIND_S)
        except _LOST:
            raise WorkerLost(
                f"worker {self._number} of this site's cluster was lost; its log, or its machine's, says why"
            ) from None

    @property
    def key(self) -> str:
        """Return Dask's name of the desk."""
        return str(self._actor.key)

    def end_exchange(self, exchange: int) -> None:
        with contextlib.suppress(Exception):  # what is lost waits for nobody
            self._actor.end_exchange(exchange)

    def waits_for(self) -> int | None:
        with contextlib.suppress(Exception):
            other = self._actor.waits_for().result(_STATE_S)
            return other if isinstance(other, int) else None
        return None


def open_workers(cluster: Cluster, find_s: float = FIND_S) -> DaskWorkers:
    """Connect to a site's cluster, and check its workers before anything private reaches one.

    Args:
        find_s: how long the scheduler and so many workers are waited for.

    Raises:
        ConfigurationError: Dask is not installed; certificates, scheduler or workers are not usable, and why.
        WorkerFailure: a worker was lost meanwhile.
    """
    context = None if cluster.security is None else load_certificates(cluster.security)[0]
    client = _connect(cluster, context, find_s)
    links: list[_WorkerLink] = []
    try:
        addresses = _find(client, cluster, find_s)
        for number, address in enumerate(addresses):  # below errors, which FLARE hands on to the server
            _log.info("worker %d of %d is %s", number, len(addresses), address)
        pids = _check(client, addresses, find_s)
        for number, (address, pid) in enumerate(zip(addresses, pids, strict=True)):
            links.append(_WorkerLink(client, number, address, pid, cluster.deadline_s, find_s, context))
        if len(links) > 1:
            desks = [(address, link.key) for address, link in zip(addresses, links, strict=True)]
            for link in links:
                link.meet(desks)
        workers = DaskWorkers(client, links)
        begin(workers, TRIAL, [()] * len(workers))
        collect([workers.call(number, "echo", b"") for number in range(len(workers))])
        return workers
    except BaseException:
        _close(client, links)
        raise


def _connect(cluster: Cluster, context: ssl.SSLContext | None, find_s: float) -> Any:
    try:
        from distributed import Client
        from distributed.security import Security
    except ImportError:
        raise ConfigurationError(NEEDS_EXTRA) from None
    security = None
    if cluster.security is not None:
        security = Security(
            tls_ca_file=str(cluster.security.ca),
            tls_client_cert=str(cluster.security.cert),
            tls_client_key=str(cluster.security.key),
            require_encryption=True,
        )
    try:
        return Client(
            cluster.scheduler,
            security=security,
            timeout=find_s,
            set_as_default=False,
            direct_to_workers=True,
            name="veilboost",
        )
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError):
        raise ConfigurationError(
            f"the scheduler that the policy names cannot be reached: it {why_not(cluster.scheduler, context)}. "
            "Policy keys: cluster.scheduler, cluster.security. Remedy: start it, or correct address and certificates."
        ) from None


def _find(client: Any, cluster: Cluster, find_s: float) -> list[str]:
    """Return the addresses of the workers that take part, in the order of Dask's names and addresses."""
    try:
        client.wait_for_workers(cluster.workers, timeout=find_s)
    except TimeoutError:
        found = len(_running(client))
        raise ConfigurationError(
            f"the policy asks for {cluster.workers} workers, and the scheduler has {found} that run. Policy "
            "key: cluster.workers. Remedy: start more of them, look at the logs of the others, or lower the number."
        ) from None
    known = _running(client)
    chosen = sorted(known, key=lambda address: (str(known[address].get("name", "")), address))[: cluster.workers]
    for number, address in enumerate(chosen):  # the scheduler says where they are: it may be anywhere
        if cluster.security is None and not is_on_loopback(address):
            raise ConfigurationError(
                f"worker {number} of this site's cluster is not on this machine's loopback, and without TLS private "
                "values would go to it in clear. Remedy: start workers with --host 127.0.0.1, or the cluster with "
                "certificates (tls://). Policy keys: cluster.scheduler, cluster.security."
            )
        if cluster.security is not None and not address.startswith("tls://"):
            raise ConfigurationError(
                f"worker {number} of this site's cluster is not reached by tls://. Remedy: start workers with the "
                "certificates and without another --protocol."
            )
    return chosen


def _running(client: Any) -> dict[str, Any]:
    """Return the workers that take work; one that has just come, or is full, is known to the scheduler and does not."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    return {address: one for address, one in known.items() if one.get("status", "running") == "running"}


def _check(client: Any, addresses: list[str], find_s: float) -> list[object]:
    """Look at all workers. Returns: the ids of their processes."""
    answers: dict[str, Any] = {}

    def ask(address: str) -> None:
        with contextlib.suppress(Exception):  # whoever gave no answer is named below
            answers.update(client.run(describe_worker, workers=[address], on_error="return"))

    # Dask waits for these answers without end: threads that nobody has to wait for.
    asking = [threading.Thread(target=ask, args=(address,), daemon=True) for address in addresses]
    for thread in asking:
        thread.start()
    until = time.monotonic() + find_s
    for number, (thread, address) in enumerate(zip(asking, addresses, strict=True)):
        thread.join(max(until - time.monotonic(), 0.0))
        if thread.is_alive():
            raise WorkerLost(f"worker {number} of this site's cluster did not answer within {find_s:g} s")
        found = answers.get(address)
        if isinstance(found, OSError):  # the scheduler has not noticed yet that it is gone
            raise WorkerLost(
                f"worker {number} of this site's cluster was lost, or its scheduler does not reach it at the address "
                "that it told: its log, its machine's, or a firewall between them says why"
            )
        if not isinstance(found, dict):
            raise ConfigurationError(
                f"worker {number} of this site's cluster cannot say what is installed there "
                f"({type(found).__name__}). Remedy: install there what this site has, with the extra `cluster`."
            )
        check_worker(number, found)
    return [answers[address].get("pid") for address in addresses]


def _place_desk(client: Any, address: str) -> Any:
    with client.as_current():  # an actor belongs to the client that is current when it is made
        future = client.submit(
            DaskDesk, actor=True, workers=[address], allow_other_workers=False, retries=0, pure=False
        )
        return future.result(timeout=FIND_S)


def _close(client: Any, links: Sequence[_WorkerLink]) -> None:
    with contextlib.suppress(Exception):  # what is lost needs no closing
        client.close(timeout=2)
    for link in links:
        link.close()
