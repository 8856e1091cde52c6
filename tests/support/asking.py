"""A conversation that is quick to give up, for tests: the side that asks, and the one that answers."""

from __future__ import annotations

from nvflare_plugins.kinds.vertical.conversation import ConversationEnd, FlowControl, Requester, Responder
from tests.support.conversations import Site

PATIENCE_S = 60  # of the tests: what fails fails at once, and a busy machine fails nothing
PACE = FlowControl(frame_bytes=1 << 16, flush_bytes=1 << 12, queue_bytes=1 << 18, message_bytes=1 << 22, patience_s=0.2)


def end_of(site: Site, pace: FlowControl = PACE, purpose: str = "test") -> ConversationEnd:
    return ConversationEnd(site.channel, site.session, purpose, pace, site.transport.abort)


def asking(site: Site, turns: list | None = None, **options) -> Requester:
    return Requester(end_of(site, options.pop("pace", PACE)), (turns if turns is not None else []).append)


def answering(answer, turns: list | None = None, pace: FlowControl = PACE, purpose: str = "test"):
    def task(site: Site):
        on_turn = (turns if turns is not None else []).append
        return Responder(end_of(site, pace, purpose), 0, answer, on_turn).run()

    return task


def shout(question: bytes) -> bytes:
    return question.upper()
