"""Sites with open sessions over one aggregator in one process, for conversations between them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from tests.support.federation import DirectTransport, Tamper, expire_for_the_dead
from tests.support.sessions import BINDING, Policy

TIMEOUT_S = 60.0


@dataclass
class Site:
    channel: Channel
    session: Session
    transport: DirectTransport


def converse(
    tasks: list[Callable[[Site], object]],
    tamper: Mapping[str, Tamper] | None = None,
    tamper_reply: Mapping[str, Tamper] | None = None,
    seen: list | None = None,
) -> list[object]:
    """Run one task per site, each in a thread with an open session; return results or errors, by rank.

    An error of one site ends the attempt for all, as FLARE's controller does it.
    """
    sites = [f"site-{i + 1}" for i in range(len(tasks))]
    attempt = os.urandom(16)
    aggregator = Aggregator(sites, attempt, 0.0)
    results: list[object] = [None] * len(tasks)
    done, transports = threading.Event(), {}

    def run(rank: int) -> None:
        site = sites[rank]
        transport = DirectTransport(
            aggregator, site, (tamper or {}).get(site), (tamper_reply or {}).get(site), frames=seen
        )
        transports[site] = transport
        try:
            channel = Channel(site, sites, "job", attempt, transport, TIMEOUT_S)
            session = open_session(channel, Identity.unsigned(site), Policy(unsigned_sessions=True), BINDING)
            results[rank] = tasks[rank](Site(channel, session, transport))
        except Exception as error:  # the test looks at it
            results[rank] = error
            if not transport.died:
                aggregator.abort(f"{site}: {error}")
        finally:
            transport.ended = True

    watch = [aggregator, transports, len(sites), done]
    threading.Thread(target=expire_for_the_dead, args=watch, daemon=True).start()
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S + 10)
        if thread.is_alive():
            raise AssertionError("a site hangs")
    done.set()
    return results
