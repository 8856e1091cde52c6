"""Frames cut into messages that FLARE's connections carry well, and put together again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from nvflare.fuel.f3.message import Message

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.envelope import CHUNK_BYTES, MAX_FRAME_BYTES

_LABEL = "veilboost"


@dataclass(frozen=True, slots=True)
class Label:
    """Which piece of which frame a message carries.

    Units: size and offset in bytes; number counts the exchanges of one site from 1.
    """

    attempt: str
    number: int
    size: int
    offset: int

    @classmethod
    def of(cls, message: Message) -> Label:
        """Read the label of a message, or raise ProtocolError."""
        fields = message.get_header(_LABEL)
        if not isinstance(fields, (list, tuple)) or len(fields) != 4:
            raise ProtocolError("a message without a valid label")
        attempt, *integers = fields
        if not isinstance(attempt, str) or any(type(value) is not int for value in integers):
            raise ProtocolError("a message whose label has wrong types")
        number, size, offset = integers
        if number < 1 or not 0 <= offset <= size <= MAX_FRAME_BYTES:
            raise ProtocolError("a message whose label is out of range")
        return cls(attempt, number, size, offset)

    def message(self, payload: bytes | memoryview | None = None) -> Message:
        return Message({_LABEL: [self.attempt, self.number, self.size, self.offset]}, payload)


def pieces(attempt: str, number: int, frame: bytes) -> Iterator[Message]:
    """Cut a frame into messages of at most CHUNK_BYTES."""
    view = memoryview(frame)
    for offset in range(0, max(len(view), 1), CHUNK_BYTES):
        yield Label(attempt, number, len(view), offset).message(view[offset : offset + CHUNK_BYTES])


class Assembly:
    """Puts the pieces of one frame together, which may come in any order, each any number of times.

    Ask either for the whole frame (``add``), or for the pieces in their order as they come (``take`` and ``ready``).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.progress_at = time.monotonic()
        self._pieces: dict[int, bytes] = {}
        self._received = self._n_pieces = 0
        self._handed_out = 0

    def add(self, label: Label, payload: object) -> bytes | None:
        """Take one piece.

        Returns:
            The whole frame once it is complete, else None.

        Raises:
            ProtocolError: the piece does not fit the frame.
        """
        self.take(label, payload)
        return b"".join(self.ready()) if self.is_complete else None

    def take(self, label: Label, payload: object) -> None:
        """Take one piece. Raises: ProtocolError if it does not fit the frame."""
        piece = bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else b""
        expected = min(CHUNK_BYTES, label.size - label.offset)
        if label.size != self.size or label.offset % CHUNK_BYTES or len(piece) != expected:
            raise ProtocolError(f"a piece of {len(piece)} bytes at {label.offset} in a frame of {self.size} bytes")
        self.progress_at = time.monotonic()
        if label.offset >= self._handed_out and label.offset not in self._pieces:
            self._pieces[label.offset] = piece
            self._received += len(piece)
            self._n_pieces += 1

    @property
    def is_complete(self) -> bool:
        """Whether every piece has come."""
        return self._n_pieces > 0 and self._received == self.size  # an empty frame has a piece too

    def ready(self) -> list[bytes]:
        """Return the pieces that follow on what was returned before, without a gap; they are not kept."""
        pieces = []
        while (piece := self._pieces.pop(self._handed_out, None)) is not None:
            pieces.append(piece)
            self._handed_out += len(piece)
            if not piece:
                break
        return pieces
