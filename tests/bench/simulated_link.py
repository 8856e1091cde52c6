"""Seconds that a job's counted frames would take on a link: on paper, nothing is delayed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvflare_plugins.wire.channel import Transport

BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes of one exchange, in which every site sends a frame to the server and gets one back, by site."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


class Traffic:
    """Counts the frames of all sites; each takes part in every exchange, in the same order."""

    def __init__(self) -> None:
        self._sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._lock = threading.Lock()

    def of(self, site: str, transport: Transport) -> Transport:
        """Return a transport that counts."""
        return _Counting(transport, site, self)

    def note(self, site: str, sent: int, received: int) -> None:
        """Take note of a site's next exchange."""
        with self._lock:
            self._sizes[site].append((sent, received))

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges in order. Raises: ValueError: sites took part in different numbers of them."""
        rows = zip(*self._sizes.values(), strict=True)
        return [Exchange(tuple(s for s, _ in row), tuple(r for _, r in row)) for row in rows]


class _Counting:
    def __init__(self, transport: Transport, site: str, traffic: Traffic) -> None:
        self._transport, self._site, self._traffic = transport, site, traffic

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        answer = self._transport.exchange(frame, timeout_s)
        self._traffic.note(self._site, len(frame), len(answer))
        return answer

    def abort(self, reason: str) -> None:
        self._transport.abort(reason)


@dataclass(frozen=True, slots=True)
class Link:
    """A line of every process, the server's too, with a latency from process to process.

    A frame is whole at the server before it goes on, so that an exchange is two latencies, the bytes of all sites into
    the server's line, and what comes back out of it; that is never less than the busiest site's own line takes.
    """

    latency_s: float
    mbit_per_s: float

    def seconds(self, exchanges: Sequence[Exchange]) -> float:
        """Return what all exchanges take, one after the other."""
        through = sum(sum(exchange.sent) + sum(exchange.received) for exchange in exchanges)
        return 2 * self.latency_s * len(exchanges) + through / (self.mbit_per_s * BYTES_PER_MBIT)


def totals(exchanges: Sequence[Exchange]) -> Mapping[str, int]:
    """Return the number of exchanges and the bytes into and out of the server."""
    return {
        "exchanges": len(exchanges),
        "bytes_to_server": sum(sum(exchange.sent) for exchange in exchanges),
        "bytes_from_server": sum(sum(exchange.received) for exchange in exchanges),
    }
