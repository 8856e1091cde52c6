"""Sites with open sessions over one aggregator in one process, for conversations between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.kinds.vertical.conversation import ConversationEnd, FlowControl, Requester, Responder
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from tests.support.federation import DirectTransport, run_in_threads
from tests.support.sessions import BINDING, KIND, Policy

TIMEOUT_S = 60.0


@dataclass
class Site:
    channel: Channel
    session: Session
    transport: DirectTransport


def converse(
    tasks: list[Callable[[Site], object]], seen: list[tuple[str, bytes]] | None = None, **hooks: Any
) -> list[object]:
    """Run one task per site, each in a thread with an open session; return results or errors, by rank.

    An error of one site ends the attempt for all, as FLARE's controller does it.

    Args: hooks: of ``run_in_threads``.
    """
    sites = [f"site-{i + 1}" for i in range(len(tasks))]
    attempt = os.urandom(16)

    def take_part(name: str, transport: DirectTransport) -> object:
        channel = Channel(name, sites, "job", attempt, transport, TIMEOUT_S)
        session = open_session(channel, Identity.unsigned(name), Policy(unsigned_sessions=True), KIND, BINDING)
        return tasks[sites.index(name)](Site(channel, session, transport))

    outcomes = run_in_threads(Aggregator(sites, attempt, 0.0), sites, take_part, frames=seen, **hooks)
    return [outcomes[site] for site in sites]


PATIENCE_S = 60  # of the tests: what fails fails at once, and a busy machine fails nothing
PACE = FlowControl(frame_bytes=1 << 16, flush_bytes=1 << 12, queue_bytes=1 << 18, message_bytes=1 << 22, patience_s=0.2)


def end_of(site: Site, pace: FlowControl = PACE, purpose: str = "test") -> ConversationEnd:
    return ConversationEnd(site.channel, site.session, purpose, pace, site.transport.abort)


def asking(site: Site, turns: list | None = None, **options) -> Requester:
    return Requester(end_of(site, options.pop("pace", PACE)), (turns if turns is not None else []).append)


def ask_once(site: Site, read: Callable[[bytes], Any] = bytes) -> Any:
    """Ask the next site one question, and return its answer."""
    with asking(site) as talk:
        return talk.ask(1, b"x", read).result(PATIENCE_S)


def answering(answer, turns: list | None = None, pace: FlowControl = PACE, purpose: str = "test"):
    def task(site: Site):
        on_turn = (turns if turns is not None else []).append
        return Responder(end_of(site, pace, purpose), 0, answer, on_turn).run()

    return task


def shout(question: bytes) -> bytes:
    return question.upper()
