"""Frames between processes of one machine, over socket pairs: what the benchmark uses in place of FLARE.

Every site's process holds one end of a socket pair, the benchmark's process the other, with the aggregator and the
server's evidence behind it. One frame is a length of eight bytes and that many bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import SERVER, export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import ATTEMPT_BYTES

_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 4 << 20  # a whole frame fits as a rule: the sender need not wait for the reader
DEADLINE_S = 600.0


def connected_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets, one for each process."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return pair


class SocketTransport:
    """A site's end; see wire/channel.py for what a transport does."""

    def __init__(self, end: socket.socket):
        self._end = end
        self._reason: str | None = None

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        """Send a frame and wait for the answer. Raises: JobAborted."""
        self._end.settimeout(timeout_s)
        try:
            _send(self._end, frame)
            return _receive(self._end)
        except OSError as error:
            raise JobAborted(self._reason or f"the connection failed ({type(error).__name__})") from None

    def abort(self, reason: str) -> None:
        """Wake a waiting exchange."""
        self._reason = reason
        self._end.shutdown(socket.SHUT_RDWR)


class LoopbackServer:
    """The server of one job attempt, in threads of this process: aggregation and evidence as under FLARE.

    Attributes:
        attempt: the attempt's id, which every site must be given.
    """

    def __init__(self, sites: Sequence[str], ends: Sequence[socket.socket], job_id: str, profile: str, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.attempt = os.urandom(ATTEMPT_BYTES)
        self._evidence = EvidenceLog(
            folder / export_name(SERVER), SERVER, job_id, self.attempt.hex(), profile, role="server"
        )
        self._aggregator = Aggregator(
            sites, self.attempt, DEADLINE_S, self._evidence.transfer, self._evidence.signed_head
        )
        self._ends = dict(zip(sites, ends, strict=True))
        for site in sites:
            threading.Thread(target=self._serve, args=(site,), name=f"server of {site}", daemon=True).start()

    def close(self) -> None:
        """Finish the evidence and hang up."""
        self._evidence.end("completed" if self._aggregator.reason is None else "aborted", self._aggregator.reason or "")
        self._evidence.close()
        for end in self._ends.values():
            end.close()

    def _serve(self, site: str) -> None:
        end = self._ends[site]
        # A site that hangs up has either finished or told its reason to the benchmark.
        with contextlib.suppress(OSError):
            while True:
                self._aggregator.submit(site, _receive(end), lambda answer: _send(end, answer))
        self._aggregator.abort(f"{site} has hung up")


def _send(end: socket.socket, data: bytes) -> None:
    end.sendall(_LENGTH.pack(len(data)))
    end.sendall(data)


def _receive(end: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(end, _LENGTH.size))
    return _receive_exactly(end, size)


def _receive_exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, n_read = memoryview(data), 0
    while n_read < size:
        n = end.recv_into(view[n_read:], 0, socket.MSG_WAITALL)
        if not n:
            raise ConnectionResetError
        n_read += n
    return bytes(data)
