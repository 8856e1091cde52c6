"""Dask's own messages, as far as a site needs them: asked with plain values, read as plain values, nothing loaded.

Dask's client loads the pickles in what schedulers and workers send before its caller sees them. So a site has no such
client, and its process does not import Dask. Of a message it reads the first frame alone, msgpack without extensions;
a pickle in it is bytes, and the frames behind it are passed over.

A message is the length of what follows, the number of frames, their lengths, and the frames. Numbers are as the machine
has them: Dask asks for machines of one kind.
"""

from __future__ import annotations

import platform
import socket
import ssl
import struct
import time
from pickle import HIGHEST_PROTOCOL
from typing import Any, Self
from urllib.parse import urlsplit

from nvflare_plugins.cluster.plain_values import require_plain
from nvflare_plugins.cluster.reach import require_own_user

MOST_FRAMES, MOST_BYTES = 1 << 10, 1 << 26
"""How much an answer may have. A scheduler tells of each worker in about two kilobytes."""
_PIECE = 1 << 16
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 10))  # as Dask's: half a minute in all


class NoAnswer(ValueError):
    """What came is no answer of Dask's, in plain values."""


class DaskConnection:
    """A connection to a port of Dask's. A context manager, which closes it unless ``take`` was called."""

    def __init__(self, address: str, context: ssl.SSLContext | None, until: float) -> None:
        """Connect and introduce this end.

        Args:
            address: tls://host:port with a context; tcp://host:port, of this machine's loopback, without.
            until: on the monotonic clock, for all that is said here.

        Raises:
            OSError: there is no way; TimeoutError among them.
            NoAnswer: something else is there.
            ConfigurationError: without a context, a process of another user is there.
        """
        self._until = until
        try:
            place = urlsplit(address)
            self._end = socket.create_connection((place.hostname or "", place.port or 0), self._left())
        except (ValueError, OverflowError):
            raise OSError("no address") from None
        try:
            self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE:
                if hasattr(socket, name):
                    self._end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if context is not None:
                self._end = context.wrap_socket(self._end)
            python = tuple(int(part) for part in platform.python_version_tuple()[:2])
            self.say({"compression": None, "python": (*python, 0), "pickle-protocol": HIGHEST_PROTOCOL})
            self.hear()  # how the other end would compress and pickle
            if context is None:
                require_own_user(self._end)
        except BaseException:
            self._end.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end.fileno() >= 0:
            self._end.close()

    def ask(self, op: str, **more: Any) -> Any:
        """Call a function of the other end. Returns: see ``hear``."""
        self.say({"op": op, **more})
        return self.hear()

    def say(self, message: dict[str, Any]) -> None:
        """Send plain values."""
        import msgpack

        frame = msgpack.packb(message)
        self._end.settimeout(self._left())
        self._end.sendall(struct.pack("=QQQ", 16 + len(frame), 1, len(frame)) + frame)

    def hear(self) -> Any:
        """Return the plain values of a message; what is pickled in it stays a place's number.

        Raises:
            NoAnswer: they are not plain, or too many.
            OSError: the other end is gone; TimeoutError: it does not answer in time.
        """
        import msgpack

        _, n_frames = struct.unpack("=QQ", self._exactly(16))
        if not 0 < n_frames <= MOST_FRAMES:
            raise NoAnswer("no message of Dask's")
        first, *others = struct.unpack(f"={n_frames}Q", self._exactly(8 * n_frames))
        if first + sum(others) > MOST_BYTES:
            raise NoAnswer("a message that is too long")
        frame = self._exactly(first)
        for length in others:
            for start in range(0, length, _PIECE):
                self._exactly(min(_PIECE, length - start))
        try:
            answer = msgpack.unpackb(frame, raw=False, strict_map_key=False, use_list=False)
            require_plain(answer)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            raise NoAnswer("no plain values") from None
        return answer

    def take(self) -> socket.socket:
        """Return the socket, which is the caller's from now on."""
        end, self._end = self._end, socket.socket()
        self._end.close()
        return end

    def _exactly(self, length: int) -> bytes:
        content = bytearray(length)
        view = memoryview(content)
        while view.nbytes:
            self._end.settimeout(self._left())
            n_read = self._end.recv_into(view)
            if not n_read:
                raise ConnectionResetError
            view = view[n_read:]
        return bytes(content)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
