"""The work over one shard, in a thread of its own, as whoever leads it sees it: it asks, and waits for the reply.

XGBoost's calls block and belong to one thread, while a worker answers calls that come and go. So the work has its
thread, and calls only hand over replies and fetch what the work says next.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from he_processors.errors import JobAborted, VeilBoostError
from nvflare_plugins.cluster.desk import WorkerPart
from nvflare_plugins.failures import reason_of

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

Work = Callable[[Ask], Any]
"""What is done over a shard; returns plain values. Privacy: it says of rows only what it asks with."""


class Conversation(WorkerPart):
    """One work under way, which its leader steps through."""

    def __init__(self, work: Work):
        """Start the work."""
        self._start(work)

    def _start(self, work: Work) -> None:
        """Start a work, also in the place of one that has ended; it must not know the conversation."""
        self._said: queue.SimpleQueue[tuple[str, Any] | VeilBoostError] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
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
        self._replies.put(_Reply(content))
        return self.listen()

    def end(self) -> None:
        """Let the work end at what it asks next."""
        self._replies.put(_Reply(stops=True))


class _Reply:
    def __init__(self, content: Any = None, stops: bool = False):
        self.content, self.stops = content, stops


def _run(
    work: Work, said: queue.SimpleQueue[tuple[str, Any] | VeilBoostError], replies: queue.SimpleQueue[_Reply]
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
        if reply.stops:
            raise JobAborted("the work on the shards of this site has ended")
        return reply.content

    try:
        said.put((ENDS, work(ask)))
    except VeilBoostError as error:
        said.put(error)
    except Exception as error:  # the edge of a thread: its leader waits for word
        _log.exception("the work over a shard failed")
        said.put(JobAborted(reason_of(error)))
