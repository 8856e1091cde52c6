"""A line between a site's process and one worker: a socket of their own, one question and one answer at a time.

Dask's own messages are copied, wrapped and read by an event loop at both ends, which for a message of a histogram cost
as much time as adding it up. Here long bytes and arrays go from where they lie to where they will lie, past everything
but the kernel (and TLS, where the cluster has it); one thread at each end sends, waits and receives.

A message is the length of its form, the form, and the long values in the order in which the form names them. The form
is a pickle that can hold nothing but plain values: whoever reads it loads no code.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from nvflare_plugins.cluster.desk import Desk

LOOK_S = 0.5
"""How often one who waits looks whether it is still worth it. Units: seconds."""
_READY = b"R"
_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 16
_LEAST_APART = 4096
_NUMBERS = "biuf"
_NO_FORM = (ArithmeticError, AttributeError, EOFError, LookupError, SyntaxError, TypeError, ValueError)
"""What a form that is none raises besides, in pickle and numpy."""


class Line:
    """One end. Not safe for concurrent use, but for ``hang_up``."""

    def __init__(self, end: socket.socket, look: Callable[[], None] = lambda: None) -> None:
        """Take a connected socket.

        Args:
            look: called while nothing moves, every ``LOOK_S``; what it raises ends the waiting.
        """
        end.settimeout(LOOK_S)
        self._end, self._look = end, look
        self._incoming = io.BufferedReader(_Incoming(end, look), _BUFFER_BYTES)

    def send(self, content: Any) -> None:
        """Send plain values (``plain_values``). Raises: OSError: the other end is gone."""
        form = io.BytesIO()
        form.write(bytes(_LENGTH.size))
        writer = _Writer(form)
        writer.dump(content)
        view = form.getbuffer()
        _LENGTH.pack_into(view, 0, len(view) - _LENGTH.size)
        for one in (view, *writer.apart):
            self._push(one)

    def receive(self) -> Any:
        """Return what the other end has sent. Raises: OSError: it is gone; UnpicklingError: it sent something else."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        try:
            return _Reader(self._exactly(length), self._exactly, self._exactly_into).load()
        except _NO_FORM:
            raise pickle.UnpicklingError("no form of plain values") from None

    def say_ready(self) -> None:
        """Tell the other end that this one listens."""
        self._push(memoryview(_READY))

    def await_ready(self) -> None:
        """Wait until the other end listens."""
        self._exactly(len(_READY))

    def hang_up(self) -> None:
        """Let both ends find the line dead; who waits in another thread wakes."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # of a TLS socket its layers stay as they are

    def close(self) -> None:
        """Hang up and let the socket go."""
        self.hang_up()
        self._end.close()

    def _push(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                view = view[self._end.send(view) :]
            except TimeoutError:
                self._look()

    def _exactly(self, length: int) -> bytes:
        content = self._incoming.read(length)  # a long one is received where it stays
        if len(content) != length:
            raise ConnectionResetError
        return content

    def _exactly_into(self, view: memoryview) -> None:
        while view.nbytes:
            n_read = self._incoming.readinto(view)
            if not n_read:
                raise ConnectionResetError
            view = view[n_read:]


def serve(
    end: socket.socket,
    desk: Desk,
    functions: Sequence[str] = ("begin", "call", "end"),
    leave: Callable[[], object] | None = None,
) -> None:
    """Answer at a worker what the other end asks, until it hangs up.

    Args:
        functions: of the desk, which may be called.
        leave: called then; left out, the desk's object is let go.
    """
    line = Line(end)
    try:
        line.say_ready()
        while True:
            line.send(_answer(desk, functions, line.receive()))
    except (OSError, pickle.UnpicklingError):
        pass  # nobody asks any more
    finally:
        line.close()
        (leave or desk.end)()


def _answer(desk: Desk, functions: Sequence[str], question: object) -> tuple[str, Any, str]:
    match question:
        case (str(function), tuple(args)) if function in functions:
            pass
        case _:
            raise pickle.UnpicklingError("no function of a desk")
    answer: tuple[str, Any, str] = getattr(desk, function)(*args)
    return answer


class _Incoming(io.RawIOBase):
    def __init__(self, end: socket.socket, look: Callable[[], None]) -> None:
        self._end, self._look = end, look

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                return self._end.recv_into(buffer)
            except TimeoutError:
                self._look()


class _Writer(pickle.Pickler):
    """Writes a form; what is long is left in ``apart``, to be sent behind it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.apart: list[memoryview] = []

    def persistent_id(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if type(value) is bytes and len(value) >= _LEAST_APART:
            self.apart.append(memoryview(value))
            return len(value)
        if type(value) is np.ndarray:
            lies_by_column = value.flags.f_contiguous and not value.flags.c_contiguous
            flat = value.ravel("F" if lies_by_column else "C")  # a copy only of what does not lie in one piece
            self.apart.append(flat.view(np.uint8).data)
            return value.dtype.str, value.shape, lies_by_column
        return None


class _Reader(pickle.Unpickler):
    """Reads a form; long values are received as it comes to them."""

    def __init__(
        self, form: bytes, exactly: Callable[[int], bytes], exactly_into: Callable[[memoryview], None]
    ) -> None:
        super().__init__(io.BytesIO(form))
        self._exactly, self._exactly_into = exactly, exactly_into

    def persistent_load(self, name: Any) -> Any:
        """See ``pickle.Unpickler``."""
        if type(name) is int and name >= 0:
            return self._exactly(name)
        text, shape, lies_by_column = name
        dtype = np.dtype(str(text))
        if dtype.kind not in _NUMBERS or min(shape, default=0) < 0:
            raise pickle.UnpicklingError("no array of numbers")
        flat = np.empty(prod(shape), dtype=dtype)
        self._exactly_into(flat.view(np.uint8).data)
        return flat.reshape(shape, order="F" if lies_by_column else "C")

    def find_class(self, module: str, name: str) -> Any:
        """Load nothing. Raises: UnpicklingError."""
        raise pickle.UnpicklingError("only plain values go over a line")
