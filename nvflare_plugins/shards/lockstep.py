"""Leading the works over all shards of a site in step: all ask alike, one answer is made, each gets its reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.cluster.workers import Work, Workers, begin, collect
from nvflare_plugins.failures import WorkerFailure
from nvflare_plugins.shards.conversation import ASKS, BINS, ENDS, READS, TELLS

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
