"""The parts that sites exchange in one step of a conversation, and messages cut into fragments that fit.

Bytes from a peer are either exactly a step or a ``ProtocolError``.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from he_processors.errors import ProtocolError

_HEADER = struct.Struct("<4sBBQII")
_FRAGMENT = struct.Struct("<QBQ")
_MAGIC, _VERSION = b"VLBC", 1
MAX_FRAGMENTS = 1 << 16


class Flag(IntEnum):
    """Who sends a step, and how the asking site goes on."""

    MORE = 1
    COLLECT = 2
    END = 3
    ANSWERS = 4


_FLAGS = frozenset(flag.value for flag in Flag)


@dataclass(frozen=True, slots=True, repr=False)
class Fragment:
    """A piece of a message. Messages of one direction are numbered from 0."""

    message: int
    is_last: bool
    data: bytes


@dataclass(frozen=True, slots=True, repr=False)
class ConversationStep:
    """What one site sends another in one exchange.

    Attributes:
        number: of the step in this conversation.
        turn: of the asking site, for example the boosting round.
    """

    flag: Flag
    number: int
    turn: int
    fragments: tuple[Fragment, ...]

    def to_bytes(self) -> bytes:
        """Return the bytes that are sealed."""
        parts = [_HEADER.pack(_MAGIC, _VERSION, self.flag, self.number, self.turn, len(self.fragments))]
        for fragment in self.fragments:
            parts += [_FRAGMENT.pack(fragment.message, fragment.is_last, len(fragment.data)), fragment.data]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a step strictly. Raises: ProtocolError."""
        if len(data) < _HEADER.size:
            raise ProtocolError("a step of a conversation is shorter than its header")
        magic, version, flag, number, turn, n_fragments = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or flag not in _FLAGS or n_fragments > MAX_FRAGMENTS:
            raise ProtocolError("not a step of a conversation of this version")
        fragments, position = [], _HEADER.size
        for _ in range(n_fragments):
            if position + _FRAGMENT.size > len(data):
                raise ProtocolError("a step of a conversation is cut short")
            message, is_last, size = _FRAGMENT.unpack_from(data, position)
            start = position + _FRAGMENT.size
            position = start + size
            if is_last > 1 or position > len(data):
                raise ProtocolError("a step of a conversation is cut short")
            fragments.append(Fragment(message, bool(is_last), data[start:position]))
        if position != len(data):
            raise ProtocolError("a step of a conversation has trailing bytes")
        return cls(Flag(flag), number, turn, tuple(fragments))


class Outbox:
    """Messages on their way out, in order."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._number = 0  # of the first waiting message
        self._offset = 0  # how much of it has gone
        self.n_bytes = 0

    def put(self, message: bytes) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self.n_bytes += max(len(message), 1)  # an empty message waits too

    def take(self, limit: int) -> tuple[Fragment, ...]:
        """Return fragments of at most ``limit`` bytes of content, and forget them."""
        taken: list[Fragment] = []
        while self._waiting and limit > 0 and len(taken) < MAX_FRAGMENTS:
            message = self._waiting[0]
            end = min(self._offset + limit, len(message))
            is_last = end == len(message)
            taken.append(Fragment(self._number, is_last, message[self._offset : end]))
            gone = end - self._offset
            limit -= gone
            self.n_bytes -= gone if message else 1
            self._offset = end
            if is_last:
                self._waiting.popleft()
                self._number, self._offset = self._number + 1, 0
        return tuple(taken)


class Inbox:
    """Puts fragments of messages together."""

    def __init__(self, message_bytes: int) -> None:
        self.most = message_bytes
        self._number = 0
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def is_open(self) -> bool:
        """Whether the rest of a message is still due."""
        return bool(self._parts)

    def put(self, fragments: tuple[Fragment, ...]) -> list[bytes]:
        """Take fragments; return the messages that are whole now.

        Raises:
            ProtocolError: a fragment that is not the next one, or a message that is too long.
        """
        whole = []
        for fragment in fragments:
            self._size += len(fragment.data)
            if fragment.message != self._number or not (fragment.data or fragment.is_last):
                raise ProtocolError("a fragment of a message is not the one that is due")
            if self._size > self.most:
                raise ProtocolError("a message of a conversation is too long")
            self._parts.append(fragment.data)
            if fragment.is_last:
                whole.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
                self._parts, self._size, self._number = [], 0, self._number + 1
        return whole
