"""Rows in shards: one object for each, at a worker or in this process, and conversations with all of them."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.base.errors import JobAborted, WorkerFailure, reason_of
from nvflare_plugins.data.declaration import EXTERNAL, DataSet
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.wire.envelope import Phase, TrainingStep
from nvflare_plugins.workers.dask_workers import open_workers
from nvflare_plugins.workers.worker_connection import WorkerPart
from nvflare_plugins.workers.workers import Work, Workers, begin, collect

# The work over one shard, in a thread of its own, as whoever leads it sees it: it asks, and waits for the reply.
#
# XGBoost's calls block and belong to one thread, while a worker answers calls that come and go. So the work has its
# thread, and calls only hand over replies and fetch what the work says next.


PATIENCE_S = 86_400.0
"""How long a work waits for a reply: its leader may wait for other sites. Without a leader it ends at once."""
ASKS, ENDS, TELLS = "asks", "ends", "tells"
READS, BINS = "reads its rows", "bins its rows"
"""What a shard may say that it does."""
_log = logging.getLogger(__name__)

Ask = Callable[..., Any]
"""Asks the leader, by a word and plain values; returns its reply. Raises: JobAborted, where the leader has stopped.

``TELLS``, words and two numbers are for the site's own log: how far it is. They wait for no reply.
"""

AskingWork = Callable[[Ask], Any]
"""What is done over a shard; returns plain values. Privacy: it says of rows only what it asks with."""


_NO_MORE = object()
"""In the place of a reply: the work is to end."""


class Conversation(WorkerPart):
    """One work under way, which its leader steps through."""

    def __init__(self, work: AskingWork):
        """Start the work."""
        self._start(work)

    def _start(self, work: AskingWork) -> None:
        """Start a work, also in the place of one that has ended; it must not know the conversation."""
        self._said: queue.SimpleQueue[tuple[str, Any] | VeilBoostError] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A thread that hangs in XGBoost must not keep the process from ending, nor an idle one the conversation.
        arguments = (work, self._said, self._replies)
        threading.Thread(target=_run, args=arguments, daemon=True, name="veilboost_shard").start()

    def __del__(self) -> None:
        self.end()

    def listen(self) -> tuple[str, Any]:
        """Return what the work says next.

        Returns:
            ASKS and what it asks, a word and values; TELLS and how far it is; or ENDS and its result.

        Raises:
            VeilBoostError: what ended the work.
        """
        said = self._said.get()
        if isinstance(said, VeilBoostError):
            raise said
        return said

    def reply(self, content: Any) -> tuple[str, Any]:
        """Give the reply that the work waits for, and return what it says next."""
        self._replies.put(content)
        return self.listen()

    def end(self) -> None:
        """Let the work end at what it asks next."""
        self._replies.put(_NO_MORE)


def _run(
    work: AskingWork, said: queue.SimpleQueue[tuple[str, Any] | VeilBoostError], replies: queue.SimpleQueue[Any]
) -> None:
    def ask(*question: Any) -> Any:
        if question[0] == TELLS:
            said.put((TELLS, question[1:]))
            return None
        said.put((ASKS, question))
        try:
            reply = replies.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise JobAborted("nobody leads the shards any more") from None
        if reply is _NO_MORE:
            raise JobAborted("the work on the shards of this site has ended")
        return reply

    try:
        said.put((ENDS, work(ask)))
    except VeilBoostError as error:
        said.put(error)
    except Exception as error:  # the edge of a thread: its leader waits for word
        _log.exception("the work over a shard failed")
        said.put(JobAborted(reason_of(error)))


# Where the shards of a data set are, as the site's policy says.


def shards_of(policy: SitePolicy, data_set: str) -> int:
    """Return into how many shards a training cuts the rows of a data set; 1 without a cluster."""
    cluster = policy.cluster_for(data_set)
    return 1 if cluster is None else cluster.workers


def check_one_cluster(policy: SitePolicy, data_set: str, eval_set: str | None) -> None:
    """Refuse to give evaluation rows to workers that the policy does not name for them.

    Raises:
        ConfigurationError: both sets name a cluster, and not the same.
    """
    ours, theirs = policy.cluster_for(data_set), None if eval_set is None else policy.cluster_for(eval_set)
    if ours is not None and theirs is not None and ours.scheduler != theirs.scheduler:
        raise ConfigurationError(
            f"the workers that train on data set {data_set!r} hold the evaluation rows too, and the policy names "
            f"another cluster for data set {eval_set!r}. Policy keys: data_sets.{eval_set}.cluster, "
            f"data_sets.{data_set}.cluster. Remedy: name the same in both, or evaluate on another data set."
        )


def reads_in_passes(policy: SitePolicy, data_set: str, specs: Iterable[DataSet]) -> bool:
    """Tell whether the site's process may do without holding rows: it trains alone, or has workers that read.

    Args:
        data_set: on whose cluster the job trains.
        specs: all that it reads.

    Raises:
        ConfigurationError: the policy wants rows read in passes which nobody would read, or bins in files at workers.
    """
    cluster = policy.cluster_for(data_set)
    if cluster is None:
        return True
    for spec in specs:
        if spec.in_passes and not cluster.workers_read:
            raise ConfigurationError(
                f"data set {spec.name!r} is read in passes, and workers of a cluster are given rows that the site's "
                f"process holds. Policy keys: cluster.workers_read, data_sets.{spec.name}.memory. Remedy: have workers "
                'read the files themselves (true), where they reach them, or let the process hold all rows ("whole").'
            )
        if spec.memory == EXTERNAL:
            raise ConfigurationError(
                f"data set {spec.name!r} keeps bins in files, and workers of a cluster hold theirs. "
                f'Policy key: data_sets.{spec.name}.memory. Remedy: say that they may ("passes").'
            )
    return cluster.workers_read


@contextmanager
def workers_of(policy: SitePolicy, data_set: str) -> Iterator[Workers | None]:
    """Open the workers that a policy names for a data set; None where its rows stay in this process.

    Raises:
        ConfigurationError: they are not usable, see ``open_workers``.
    """
    cluster = policy.cluster_for(data_set)
    if cluster is None:
        yield None
        return
    with open_workers(cluster) as workers:
        yield workers


# Leading the works over all shards of a site in step: all ask alike, one answer is made, each gets its reply.


_GRACE_S = 5.0

Answer = Callable[[str, list[tuple[Any, ...]]], Sequence[Any]]
"""Gets the word with which all shards ask, and the values of each in the order of the shards; returns their replies."""


def lead(workers: Workers, path: str, arguments: Sequence[tuple[Any, ...]], answer: Answer) -> list[Any]:
    """Have every worker hold a ``Conversation``, and answer what all of them ask.

    Args:
        path: of the subclass, see ``Workers.begin``.
        arguments: of each worker's, plain values.

    Returns:
        The result of each shard's work, in the order of the workers.

    Raises:
        WorkerFailure: a worker is lost, or its work failed; the text has its number.
        ProtocolError: the shards are not in step.
        VeilBoostError: what ``answer`` raised.
    """
    begin(workers, path, arguments)
    return lead_on(workers, answer)


def lead_on(workers: Workers, answer: Answer) -> list[Any]:
    """Answer what the works ask that workers hold a ``Conversation`` of already; see ``lead``."""
    numbers = range(len(workers))
    try:
        said = _heard(workers, "listen", [()] * len(workers))
        while any(state != ENDS for state, _ in said):
            words = {str(question[0]) if state == ASKS else ENDS for state, question in said}
            if len(words) != 1:
                raise ProtocolError("the shards of this site are not in step")
            replies = answer(words.pop(), [question[1:] for _, question in said])
            said = _heard(workers, "reply", [(one,) for one in replies])
        return [result for _, result in said]
    except BaseException:  # whatever it was, no shard is left waiting for a reply
        wait([workers.call(number, "end") for number in numbers], _GRACE_S)  # all together: there may be a thousand
        raise


def _heard(workers: Workers, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    """Call a method of every worker's conversation; return what each says, in order, but for how far it is."""
    said = _called(workers, method, dict(enumerate(arguments)))
    while telling := [number for number, (state, _) in said.items() if state == TELLS]:
        for number in telling:
            _note(workers.work[number], said[number][1])
        said |= _called(workers, "listen", dict.fromkeys(telling, ()))
    for work in workers.work:
        work.told = None
    return list(said.values())


def _note(work: Work, told: Any) -> None:
    match told:
        case (str(does), int(n_rows), int(of)) if does in (READS, BINS):
            work.told = (does, n_rows, of)
        case _:
            raise ProtocolError("a shard of this site says how far it is in a form that is not known")


def _called(workers: Workers, method: str, arguments: dict[int, tuple[Any, ...]]) -> dict[int, tuple[str, Any]]:
    futures = {number: workers.call(number, method, *own) for number, own in arguments.items()}
    try:
        return dict(zip(futures, collect(list(futures.values())), strict=True))
    except WorkerFailure:
        raise
    except VeilBoostError as error:
        number = next(n for n, one in futures.items() if one.done() and one.exception() is error)
        raise WorkerFailure(f"worker {number} of this site's cluster: {error}") from None


# What every work over a shard has in common: it plays its site's part, and all shards end with one model.


@dataclass(slots=True)
class ShardPlace:
    """The place of a site among the sites, without a way to them; see ``SiteProgress``."""

    rank: int
    world: int
    moment: TrainingStep = field(default_factory=lambda: TrainingStep(Phase.SETUP))
    network_seconds: float = 0.0


def said_of_model(number: int, model: bytes) -> tuple[bytes, bytes | None]:
    """Return what a shard says of its model: SHA-256, and from the first shard, 0, the model too."""
    return hashlib.sha256(model).digest(), None if number else model


def one_model(said: Sequence[tuple[Any, ...]]) -> bytes:
    """Return the model of all shards. Args: said: by each, see ``said_of_model``.

    Raises:
        ProtocolError: they do not have the same.
    """
    digest, model = said[0][:2]
    if not isinstance(model, bytes) or any(one[0] != digest for one in said):
        raise ProtocolError("the shards of this site have trained different models; none is used")
    return model


def runs_of(n_rows: int, n_shards: int) -> list[slice]:
    """Cut rows into runs of like length, in order, some of them empty where there are few rows."""
    ends = [n_rows * number // n_shards for number in range(n_shards + 1)]
    return [slice(ends[number], ends[number + 1]) for number in range(n_shards)]


# Shards that read their rows themselves: what they have read is compared with what the site's own process reads.
#
# read      digest              of the values that it has read     reply: nothing


READ = "read"
_TELL_S = 2.0  # between two words on how far a shard is


def telling(ask: Ask, of: int) -> Callable[[int], None]:
    """Return what a shard calls with the rows of each block that it reads: it says now and then how far it is.

    Args:
        of: rows that it reads in all.
    """
    read, last = 0, time.monotonic()

    def note(n_rows: int) -> None:
        nonlocal read, last
        read += n_rows
        if time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            ask(TELLS, READS, read, of)

    return note


@contextmanager
def comparing(answer: Answer, digests: Callable[[Callable[[int], None]], list[bytes]]) -> Iterator[Answer]:
    """Answer ``READ`` besides.

    Args:
        answer: to all else.
        digests: reads the rows of all shards here, while they read them there; what it is given it calls as it reads,
            which raises once nobody waits for the end: a process would not end before its pass.

    Raises (from the answer):
        WorkerFailure: a shard has read something else; the text has its number.
        VeilBoostError: what ``digests`` raised.
    """
    reader, is_over = ThreadPoolExecutor(1, thread_name_prefix="veilboost_reader"), threading.Event()

    def go_on(n_rows: int = 0) -> None:
        if is_over.is_set():
            raise WorkerFailure("the work on this site's cluster has ended")

    here = reader.submit(digests, go_on)

    def answered(word: str, asked: list[tuple[Any, ...]]) -> Any:
        if word != READ:
            return answer(word, asked)
        for number, ((found,), expected) in enumerate(zip(asked, here.result(), strict=True)):
            if found != expected:
                raise WorkerFailure(
                    f"worker {number} of this site's cluster reads other rows than the site's own process. Policy "
                    "keys: data_sets.<name>.path, cluster.workers_read. Remedy: have it reach the same files."
                )
        return [None] * len(asked)

    try:
        yield answered
    finally:
        is_over.set()
        reader.shutdown(wait=False)  # who has lost a worker does not wait for the end of a pass
