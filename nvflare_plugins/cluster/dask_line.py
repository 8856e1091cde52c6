"""How a line comes about: a connection between the ports that Dask has, under its TLS, taken over by both ends.

So there is no other port to open, and no other certificate. The site has the actor on a worker wait under a name that
nobody can guess; then it connects to the worker as any client of Dask's, says the name, and from then on neither end's
event loop has the socket.

Dask keeps what handles a message as long as the worker lives. So one function handles all lines, and knows who waits as
long as the actor is there: neither an actor nor what it held stays after its job.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from nvflare_plugins.cluster.dask_peers import dask_peers
from nvflare_plugins.cluster.desk import Desk
from nvflare_plugins.cluster.line import Line, serve
from nvflare_plugins.cluster.peers import Parcel

_OP = "veilboost_line"
_waiting: WeakValueDictionary[str, Desk] = WeakValueDictionary()
"""Of this worker, by the names of their lines."""


class DaskDesk(Desk):
    """A desk as an actor of Dask's, to which a line leads."""

    def meet(self, number: int, desks: list[tuple[str, str]]) -> None:
        """Let parts exchange values with those on the site's other workers. Args: see ``dask_peers``."""
        self.join(dask_peers(number, desks))

    async def deliver(self, parcel: Parcel) -> None:
        """Take what another worker's part sends, whatever this one's does: Dask's event loop runs it."""
        if self.peers is not None:
            self.peers.deliver(parcel)

    async def end_exchange(self, exchange: int) -> None:
        """Let the part wait no longer for other workers in this exchange and those before it."""
        if self.peers is not None:
            self.peers.end(exchange)

    async def waits_for(self) -> int | None:
        """Return the worker for which the part waits; None where it waits for none."""
        return None if self.peers is None else self.peers.waits_for()

    def await_line(self, name: str) -> None:
        """Have this worker hand the connection over that says a name, once."""
        from distributed import get_worker

        _waiting[name] = self
        get_worker().handlers[_OP] = _hand_over


def _hand_over(comm: Any, line: str = "") -> None:
    desk = _waiting.pop(line, None)
    if desk is None:
        comm.abort()
        return
    threading.Thread(target=serve, args=(_taken(comm), desk), daemon=True, name=_OP).start()


def open_line(client: Any, address: str, actor: Any, find_s: float, look: Callable[[], None]) -> Line:
    """Return the site's end of a line to a worker.

    Args:
        actor: the worker's ``DaskDesk``.
        find_s: how long the worker has for it.
        look: see ``Line``.

    Raises:
        OSError, TimeoutError: there is no way to the worker, or no answer.
    """
    name = secrets.token_hex(16)
    actor.await_line(name).result(find_s)

    async def say_name() -> socket.socket:
        from distributed.comm.core import connect

        comm = await connect(address, timeout=find_s, **client.connection_args)
        await comm.write({"op": _OP, "line": name, "reply": False})
        # Nothing comes back before the worker has the name, and the event loop has not run since it was sent.
        return _taken(comm)

    end: socket.socket = client.sync(say_name, callback_timeout=find_s)
    line = Line(end, look)
    line.await_ready()
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
