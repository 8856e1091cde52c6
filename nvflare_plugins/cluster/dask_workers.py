"""Workers of a Dask cluster: found, checked, and held by name of address, with no way around them.

One actor for each worker, made without arguments; what is private goes to it directly and never through the scheduler
as the argument of a task, where logs and dashboards would show it. Actors are kept in memory only, and Dask neither
moves nor repeats them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from types import TracebackType
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.cluster.desk import Desk
from nvflare_plugins.cluster.probe import check_worker, describe_worker
from nvflare_plugins.cluster.workers import TRIAL, LinkedWorkers, begin, collect
from nvflare_plugins.data_sets.cluster_declaration import Cluster, ClusterSecurity, is_on_loopback
from nvflare_plugins.failures import WorkerLost

_log = logging.getLogger(__name__)
FIND_S = 30.0
"""How long a site waits for its scheduler to answer, and for so many workers to be there. Units: seconds."""
_LOOK_S = 0.5  # how often a waiting site looks whether the scheduler is still there
NEEDS_EXTRA = (
    "the policy names a cluster, and Dask is not installed. Policy keys: cluster, data_sets.<name>.cluster. Remedy: "
    "install the extra `cluster` (pip install 'veilboost[cluster]') at this site and at its workers, or leave the key "
    "out."
)


class DaskWorkers(LinkedWorkers):
    """Workers behind a Dask scheduler; made by ``open_workers``."""

    def __init__(self, client: Any, links: list[_ActorLink]) -> None:
        super().__init__(links)
        self._client = client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            _close(self._client)


class _ActorLink:
    """The desk of one worker, as an actor of Dask's."""

    def __init__(self, client: Any, number: int, actor: Any, deadline_s: float) -> None:
        self._client, self._number, self._actor, self._deadline_s = client, number, actor, deadline_s

    def ask(self, function: str, *args: Any) -> tuple[str, Any, str]:
        """Call a function of the desk; wait until it is done, the worker or the scheduler gone, or time is up."""
        started = time.monotonic()
        try:
            future = getattr(self._actor, function)(*args)
            while True:
                if self._client.status != "running":
                    raise WorkerLost(
                        f"the scheduler of this site's cluster was lost while worker {self._number} worked; its log "
                        "says why"
                    )
                with contextlib.suppress(TimeoutError):
                    answer: tuple[str, Any, str] = future.result(_LOOK_S)
                    return answer
                if time.monotonic() - started > self._deadline_s:
                    raise WorkerLost(
                        f"worker {self._number} of this site's cluster did not answer within {self._deadline_s:g} s "
                        "(policy key: cluster.deadline_s)"
                    )
        except (OSError, RuntimeError, ValueError) as error:  # what Dask says where an actor's worker has gone
            _log.error("worker %d is lost: %s", self._number, type(error).__name__)
            raise WorkerLost(
                f"worker {self._number} of this site's cluster was lost; its log, or its machine's, says why"
            ) from None


def open_workers(cluster: Cluster, find_s: float = FIND_S) -> DaskWorkers:
    """Connect to a site's cluster, and check its workers before anything private reaches one.

    Args:
        find_s: how long the scheduler and so many workers are waited for.

    Raises:
        ConfigurationError: Dask is not installed; certificates, scheduler or workers are not usable, and why.
        WorkerFailure: a worker was lost meanwhile.
    """
    client = _connect(cluster, find_s)
    try:
        addresses = _find(client, cluster, find_s)
        for number, address in enumerate(addresses):  # below errors, which FLARE hands on to the server
            _log.info("worker %d of %d is %s", number, len(addresses), address)
        _check(client, addresses, find_s)
        links = [
            _ActorLink(client, number, _place_desk(client, address), cluster.deadline_s)
            for number, address in enumerate(addresses)
        ]
        workers = DaskWorkers(client, links)
        begin(workers, TRIAL, [()] * len(workers))
        collect([workers.call(number, "echo", b"") for number in range(len(workers))])
        return workers
    except TimeoutError:
        _close(client)
        raise WorkerLost(
            f"the workers of this site's cluster did not answer within {FIND_S:g} s. Remedy: see that this machine "
            "reaches them at the addresses that they tell the scheduler."
        ) from None
    except BaseException:
        _close(client)
        raise


def _connect(cluster: Cluster, find_s: float) -> Any:
    try:
        from distributed import Client
        from distributed.security import Security
    except ImportError:
        raise ConfigurationError(NEEDS_EXTRA) from None
    security = None
    if cluster.security is not None:
        _check_files(cluster.security)
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
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"the scheduler that the policy names cannot be reached ({type(error).__name__}). Policy key: "
            "cluster.scheduler. Remedy: start it, or correct address and certificates."
        ) from None


def _check_files(security: ClusterSecurity) -> None:
    for name in ("ca", "cert", "key"):
        try:
            mode = os.stat(getattr(security, name)).st_mode
        except OSError as error:
            raise ConfigurationError(
                f"cluster.security.{name} cannot be read ({type(error).__name__}): correct the path in the policy"
            ) from None
        if name == "key" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigurationError("cluster.security.key may be read by others than its owner: chmod 600")


def _find(client: Any, cluster: Cluster, find_s: float) -> list[str]:
    """Return the addresses of the workers that take part, in the order of Dask's names and addresses."""
    try:
        client.wait_for_workers(cluster.workers, timeout=find_s)
    except TimeoutError:
        found = len(client.scheduler_info(n_workers=-1)["workers"])
        raise ConfigurationError(
            f"the policy asks for {cluster.workers} workers, and the scheduler has {found}. Policy key: "
            "cluster.workers. Remedy: start more of them, or lower the number."
        ) from None
    known = client.scheduler_info(n_workers=-1)["workers"]
    chosen = sorted(known, key=lambda address: (str(known[address].get("name", "")), address))[: cluster.workers]
    for number, address in enumerate(chosen):  # the scheduler says where they are: it may be anywhere
        if cluster.security is None and not is_on_loopback(address):
            raise ConfigurationError(
                f"worker {number} of this site's cluster is not on this machine's loopback, and without TLS private "
                "values would go to it in clear. Remedy: start workers with --host 127.0.0.1, or the cluster with "
                "certificates (tls://). Policy keys: cluster.scheduler, cluster.security."
            )
    return chosen


def _check(client: Any, addresses: list[str], find_s: float) -> None:
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
            raise WorkerLost(f"worker {number} of this site's cluster was lost; its log, or its machine's, says why")
        if not isinstance(found, dict):
            raise ConfigurationError(
                f"worker {number} of this site's cluster cannot say what is installed there "
                f"({type(found).__name__}). Remedy: install there what this site has, with the extra `cluster`."
            )
        check_worker(number, found)


def _place_desk(client: Any, address: str) -> Any:
    with client.as_current():  # an actor belongs to the client that is current when it is made
        future = client.submit(Desk, actor=True, workers=[address], allow_other_workers=False, retries=0, pure=False)
        return future.result(timeout=FIND_S)


def _close(client: Any) -> None:
    with contextlib.suppress(Exception):  # what is lost needs no closing
        client.close(timeout=2)
