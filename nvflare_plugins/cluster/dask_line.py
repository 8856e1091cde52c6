"""How a line comes about: a connection to the port that a worker has of Dask, under its TLS, taken over by both ends.

So there is no other port to open, and no other certificate. The site has a worker run one function of this package by
its name, ``stand_by``, connects to it as any client of Dask's, names a desk, and from then on Dask has the socket no
more. A desk is there as long as the site's line to it. Beside that line are others to the same desk, which it answers
while its part is at work: one of the site's, and one of each worker that sends it something.

Security: over a line go plain values alone (``line``). Neither the site nor, from another worker, a worker loads code
    that comes over it. But Dask's own port stays open: whoever has the cluster's certificates, or without them is on
    this machine, may run any code at a worker.
"""

from __future__ import annotations

import pickle
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from nvflare_plugins.cluster.dask_messages import DaskConnection, NoAnswer
from nvflare_plugins.cluster.desk import DONE, Desk
from nvflare_plugins.cluster.line import Line, serve
from nvflare_plugins.cluster.peers import ALL, Parcel, Peers
from nvflare_plugins.cluster.probe import describe_worker

SITE, BESIDE, WORKER = "site", "beside", "worker"
REACH_S = 30.0
"""How long one worker tries to reach another. Units: seconds."""
_OP = "veilboost_line"
_FUNCTIONS = {
    SITE: ("describe", "meet", "begin", "call", "end"),
    BESIDE: ("end_exchange", "waits_for"),
    WORKER: ("deliver",),
}
"""What whoever is at the other end of a line may ask of a desk."""
_desks: WeakValueDictionary[str, DaskDesk] = WeakValueDictionary()
"""Of this worker, by their names."""

Told = tuple[str, Any, str]


class DaskDesk(Desk):
    """A desk at a worker of Dask's."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker, self._senders = worker, _Senders(worker.connection_args.get("ssl_context"))

    def describe(self) -> Told:
        """Say what is installed here (``probe``)."""
        return self._told(lambda: describe_worker(self._worker))

    def meet(self, number: int, desks: Sequence[tuple[str, str]]) -> Told:
        """Let parts exchange values with those on the site's other workers.

        Args:
            desks: of all workers in order, this one too: the worker's address, and the name of its desk.
        """
        senders = self._senders
        return self._told(lambda: self.join(Peers(number, lambda to, parcel: senders.send(desks[to], parcel))))

    def deliver(self, parcel: Parcel) -> Told:
        """Take what another worker's part sends, whatever this one's does."""
        return self._told(lambda: None if self.peers is None else self.peers.deliver(parcel))

    def end_exchange(self, exchange: int) -> Told:
        """Let the part wait no longer for other workers in this exchange and those before it."""
        return self._told(lambda: None if self.peers is None else self.peers.end(exchange))

    def waits_for(self) -> Told:
        """Return the worker for which the part waits; None where it waits for none."""
        return self._told(lambda: None if self.peers is None else self.peers.waits_for())

    def leave(self, by: str) -> None:
        """Have a line's end take effect. Args: by: who was at its other end."""
        if by == BESIDE:
            self.end_exchange(ALL)
        elif by == SITE:
            self.end()
            self._senders.close()


class _Senders:
    """A worker's lines to others, each with a thread that sends one parcel after the other."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lines: dict[str, Line] = {}

    def send(self, desk: tuple[str, str], parcel: Parcel) -> Future[Any]:
        """Begin to send. Raises (from the future): OSError, ValueError, UnpicklingError: the desk is not reached."""
        address, name = desk
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=_OP)
        return self._threads[name].submit(self._deliver, address, name, parcel)

    def _deliver(self, address: str, name: str, parcel: Parcel) -> None:
        if name not in self._lines:
            with DaskConnection(address, self._context, time.monotonic() + REACH_S) as connection:
                self._lines[name] = open_line(connection, name, WORKER)
        self._lines[name].send(("deliver", (parcel,)))
        if self._lines[name].receive() != (DONE, None, ""):
            raise OSError("another worker does not take it")

    def close(self) -> None:
        """Hang up; who sends finds it."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for line in tuple(self._lines.values()):
            line.hang_up()


def stand_by(dask_worker: Any) -> None:
    """Have a worker hand connections over whose other end names a desk. Runs at the worker, on Dask's event loop."""

    def hand_over(comm: Any, desk: str = "", by: str = "") -> None:
        found = _desks.get(desk)
        if found is None and by == SITE:
            found = _desks[desk] = DaskDesk(dask_worker)
        if found is None or by not in _FUNCTIONS:
            comm.abort()
            return
        leave = found.leave
        args = (_taken(comm), found, _FUNCTIONS[by], lambda: leave(by))
        threading.Thread(target=serve, args=args, daemon=True, name=_OP).start()

    dask_worker.handlers[_OP] = hand_over


def have_stand_by(connection: DaskConnection) -> None:
    """Have the worker at the other end run ``stand_by``. Raises: NoAnswer: with its words of why it cannot."""
    answer = connection.ask("run", function=pickle.dumps(stand_by), wait=True)
    if not isinstance(answer, dict) or answer.get("status") != "OK":
        words = str(answer.get("exception_text", "")) if isinstance(answer, dict) else ""
        name = words.partition("(")[0][:60]
        raise NoAnswer(name if name.isidentifier() else "another answer")


def open_line(connection: DaskConnection, desk: str, by: str, look: Callable[[], None] = lambda: None) -> Line:
    """Make a line of a connection to a worker that stands by.

    Args:
        desk: its name, new to the worker if ``by`` is SITE.
        by: who this end is.
        look: see ``Line``.

    Raises:
        OSError: there is no such desk, or no answer.
    """
    connection.say({"op": _OP, "desk": desk, "by": by, "reply": False})
    line = Line(connection.take(), look)
    try:
        line.await_ready()
    except BaseException:
        line.close()
        raise
    return line


def _taken(comm: Any) -> socket.socket:
    """Take the socket of a connection of Dask's, which is closed without it."""
    stream = comm.stream
    if stream.writing():
        comm.abort()
        raise OSError("the connection is in use")
    end: socket.socket = stream.socket
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Who stands still while a lot is on its way to it has the deadline; Dask would give up after half a minute.
        # A machine that is gone is still found by the probes of an idle connection.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    stream.io_loop.remove_handler(end)
    stream.socket = socket.socket()
    comm.abort()
    return end
