"""Values that workers hand to one another, and the plain values that may travel at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

# What may go to a worker and come back: plain values, so that no object of ours, and no secret in one, is pickled.


_SINGLE = (type(None), bool, int, float, str, bytes)
_NUMBERS = "biuf"


def require_plain(value: Any) -> int:
    """Return about how many bytes a value takes on the way.

    Args:
        value: None, a bool, a number, a text, bytes, an array of numbers; lists, tuples and dictionaries of these.

    Raises:
        TypeError: something else; the message names the type alone.
    """
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray or value.dtype.kind not in _NUMBERS:
            raise TypeError(f"an array of {value.dtype} does not go to a worker")
        return int(value.nbytes)
    if type(value) in (bytes, str):
        return len(value)
    if type(value) in _SINGLE:
        return 8
    if type(value) in (list, tuple):
        return sum(map(require_plain, value))
    if type(value) is dict:
        return sum(require_plain(key) + require_plain(one) for key, one in value.items())
    raise TypeError(f"a {type(value).__name__} does not go to a worker")


# Values that a party's workers hand to one another while all of them do one call.
#
# Sums of all workers are added in a tree, and divided on the way (``reduce_scatter``): a group of workers is halved,
# each half gets what the other has of its share, and so on, so that each worker ends with the whole sums of its own
# share after as many steps as the number of workers can be halved. What a worker sends is less than what it holds.
#
# Security: values go straight from worker to worker, under the cluster's own certificates (or over this machine's
# loopback), and are plain values of one party: a worker loads no code that comes with them.


ALL = 1 << 62
"""More than any exchange's number."""
_LOOK_S = 0.5

Parcel = tuple[int, int, int, Any]
"""Number of the exchange and of its step, sender, value."""


class PeerLost(Exception):
    """Another worker cannot be reached."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ExchangeOver(Exception):
    """The site has ended the exchange."""


class Peers:
    """The other workers, as one of them has them. ``deliver``, ``end`` and ``waits_for`` come from other threads.

    Args:
        number: of this worker.
        send: begins to send a parcel to a worker; its future fails where that one cannot be reached.

    Attributes:
        sent_bytes, waited_s: to other workers, and for them, so far.
    """

    def __init__(self, number: int, send: Callable[[int, Parcel], Future[Any]]) -> None:
        self.number, self._send = number, send
        self._changed = threading.Condition()
        self._parcels: dict[tuple[int, int, int], Any] = {}
        self._over = 0
        self._awaited: int | None = None
        self._under_way: list[tuple[int, Future[Any]]] = []
        self.sent_bytes, self.waited_s = 0, 0.0

    def deliver(self, parcel: Parcel) -> None:
        """Take what another worker sends."""
        exchange, step, sender, value = parcel
        with self._changed:
            if exchange > self._over:
                self._parcels[exchange, step, sender] = value
                self._changed.notify_all()

    def end(self, exchange: int) -> None:
        """End this exchange and those before it, for whoever waits and whoever comes to wait."""
        with self._changed:
            self._over = max(self._over, exchange)
            self._parcels = {key: value for key, value in self._parcels.items() if key[0] > self._over}
            self._changed.notify_all()

    def waits_for(self) -> int | None:
        """Return the worker whose parcel is waited for; None where none is."""
        return self._awaited

    def send(self, to: int, exchange: int, step: int, value: Any) -> None:
        """Begin to send a plain value."""
        self.sent_bytes += require_plain(value)
        self._under_way.append((to, self._send(to, (exchange, step, self.number, value))))

    def receive(self, sender: int, exchange: int, step: int) -> Any:
        """Wait for a value. Raises: PeerLost, ExchangeOver."""
        since = time.perf_counter()
        try:
            with self._changed:
                self._awaited = sender
                while (exchange, step, sender) not in self._parcels:
                    self._go_on(exchange)
                    self._changed.wait(_LOOK_S)
                return self._parcels.pop((exchange, step, sender))
        finally:
            self._awaited = None
            self.waited_s += time.perf_counter() - since

    def settle(self, exchange: int) -> None:
        """Wait until all that was sent has arrived. Raises: PeerLost, ExchangeOver."""
        while self._under_way:
            self._go_on(exchange)
            to, future = self._under_way[0]
            self._awaited = to
            wait([future], _LOOK_S)
            self._awaited = None
            if future.done() and future.exception() is None:
                self._under_way.pop(0)

    def _go_on(self, exchange: int) -> None:
        if exchange <= self._over:
            self._under_way.clear()
            raise ExchangeOver
        for to, future in self._under_way:
            if future.done() and future.exception() is not None:
                self._under_way.clear()
                raise PeerLost(to)


def reduce_scatter(
    peers: Peers,
    exchange: int,
    bounds: Sequence[int],
    sums: Any,
    part: Callable[[Any, slice], Any],
    add: Callable[[Any, slice, list[Any]], Any],
) -> Any:
    """Add the sums of all workers; return this one's share of them, None where it has no share.

    Args:
        exchange: its number, the same at all workers, and higher than those before.
        bounds: worker w ends with the sums from bounds[w] to bounds[w + 1].
        sums: of this worker, of all slots.
        part: makes a plain value of a slice of sums.
        add: returns a slice of sums with such values added.

    Raises:
        PeerLost: another worker cannot be reached.
        ExchangeOver: the site has ended the exchange.
    """
    low, high, step = 0, len(bounds) - 1, 0
    while high - low > 1:
        middle = (low + high) // 2
        mine, theirs = (low, middle), (middle, high)
        if peers.number >= middle:
            mine, theirs = theirs, mine
        first, place, n_theirs = bounds[low], peers.number - mine[0], theirs[1] - theirs[0]
        given = slice(bounds[theirs[0]] - first, bounds[theirs[1]] - first)
        if given.start < given.stop:
            peers.send(theirs[0] + min(place, n_theirs - 1), exchange, step, part(sums, given))
        kept = slice(bounds[mine[0]] - first, bounds[mine[1]] - first)
        if kept.start == kept.stop:
            sums = None
            break
        last = mine[1] - mine[0] - 1  # a half may have one worker more: its last one sends to the other's last, too
        senders = [theirs[0] + one for one in range(n_theirs) if min(one, last) == place]
        sums = add(sums, kept, [peers.receive(sender, exchange, step) for sender in senders])
        (low, high), step = mine, step + 1
    peers.settle(exchange)
    return sums
