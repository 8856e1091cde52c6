"""Lists of points on their way between parties: in blocks, sealed, and always of the same length.

In each step of the protocol a party may send one list to some parties and receive one from some party. Lists travel in
blocks, so that memory, single messages and the silence between two messages stay bounded however long a list is. All
blocks of an intersection have one size, chosen from the longest of the parties' sets: the server, which relays sealed
blocks, cannot tell from their sizes how large a set or an intersection is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_uint64
from nvflare_plugins.alignment.blinding import POINT_BYTES
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import Codec

BLOCK = 1 << 16
"""Points of one message: 2 MB, and half a second of blinding. Must be equal at all parties."""
_COUNT = struct.Struct("<I")


class RoutingChannel(Protocol):
    """What the lists need of ``nvflare_plugins.wire.channel.Channel``."""

    sites: tuple[str, ...]
    rank: int
    world: int

    def route(self, kind: Kind, parts: Sequence[bytes]) -> list[bytes]: ...

    def gather(self, kind: Kind, payload: bytes, codec: Codec = ...) -> list[bytes]: ...


class Seal(Protocol):
    """What the lists need of a session."""

    def seal_to_all(self, plaintext: bytes, purpose: str) -> bytes: ...

    def open_from(self, rank: int, sealed: bytes, purpose: str) -> bytes: ...

    def seal_for(self, rank: int, plaintext: bytes, purpose: str) -> bytes: ...

    def open_of(self, rank: int, sealed: bytes, purpose: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Lists:
    """Carries lists of points of one intersection; all parties make the same calls in the same order.

    Attributes:
        purpose: names the intersection; blocks of another one do not open.
        longest: size of the largest set of any party; no list is longer.
        on_block: called after every block with the number of the block and of all blocks of the step.
        record: takes note, for the evidence, of "sent" (before it is) or "received", the other party and the bytes.
    """

    channel: RoutingChannel
    session: Seal
    purpose: str
    longest: int
    on_block: Callable[[int, int], None] = lambda number, of: None
    record: Callable[[str, str, int], None] = lambda direction, party, size_bytes: None

    @property
    def block(self) -> int:
        """Points of a block."""
        return min(BLOCK, 1 << (self.longest - 1).bit_length())

    @property
    def n_blocks(self) -> int:
        """Blocks of every list."""
        return -(-self.longest // self.block)

    def swap(
        self,
        outgoing: Sequence[Any],
        to: Collection[int],
        source: int | None,
        prepare: Callable[[list[Any]], list[bytes]] = list,
        change: Callable[[list[bytes]], list[bytes]] = list,
    ) -> list[bytes]:
        """Take one step.

        Args:
            outgoing: what to send to each party in ``to``.
            source: the party that sends a list to this one, if any.
            prepare: turns what goes out into points, block by block just before it is sent.
            change: what to do with received points, block by block. So no party is silent for longer than a block.

        Returns:
            The changed points that were received, in order; none if there is no source.

        Raises:
            ProtocolError: parts that nobody should have sent, or that are not blocks of different points.
        """
        block, n_blocks = self.block, self.n_blocks
        received: list[bytes] = []
        seen: set[bytes] = set()
        for number in range(n_blocks):
            own = prepare(list(outgoing[number * block : (number + 1) * block]))
            plain = self.exchange(pack_block(own, block) if to else b"", to, source)
            points = [] if source is None else unpack_block(plain, block)
            seen.update(points)
            received += change(points)
            if len(seen) != len(received) or len(received) > self.longest:
                raise ProtocolError("a party sent a list with repeated points, or a longer one than it may be")
            self.on_block(number + 1, n_blocks)
        return received

    def exchange(self, part: bytes, to: Collection[int], source: int | None) -> bytes:
        """Send one part to some parties; return that of ``source``, empty without one. Raises: ProtocolError."""
        sites, ranks = self.channel.sites, range(self.channel.world)
        for rank in to:
            self.record("sent", sites[rank], len(part))
        parts = [self.session.seal_for(rank, part, self.purpose) if rank in to else b"" for rank in ranks]
        received = self.channel.route(Kind.CONVERSATION, parts)
        for rank in ranks:
            if bool(received[rank]) != (rank == source):
                raise ProtocolError(f"{sites[rank]} is not in step with the alignment")
        if source is None:
            return b""
        plain = self.session.open_of(source, received[source], self.purpose)
        self.record("received", sites[source], len(plain))
        return plain


def tell_all(channel: RoutingChannel, session: Seal, content: bytes, purpose: str) -> list[bytes]:
    """Exchange content, sealed for all parties; in rank order, this one's included."""
    sealed = channel.gather(Kind.AGREEMENT, session.seal_to_all(content, purpose), Codec.SEALED)
    if len(sealed) != channel.world:
        raise ProtocolError("the server answered with another number of messages than there are parties")
    return [
        content if rank == channel.rank else session.open_from(rank, sealed[rank], purpose)
        for rank in range(channel.world)
    ]


def block_bytes(size: int) -> int:
    """Return the length of a block of up to ``size`` points."""
    return _COUNT.size + size * POINT_BYTES


def pack_block(points: Sequence[bytes], size: int) -> bytes:
    """Return up to ``size`` points as bytes whose length depends on ``size`` alone."""
    content = _COUNT.pack(len(points)) + b"".join(points)
    return content.ljust(block_bytes(size), b"\0")


def unpack_block(data: bytes, size: int) -> list[bytes]:
    """Return the points of a block.

    Raises:
        ProtocolError: not exactly what ``pack_block`` makes.
    """
    if len(data) != block_bytes(size):
        raise ProtocolError("a block of the alignment has another size than agreed")
    n_points = _COUNT.unpack_from(data)[0]
    end = _COUNT.size + n_points * POINT_BYTES
    if n_points > size or data[end:].strip(b"\0"):
        raise ProtocolError("a block of the alignment holds something after its points")
    return [data[start : start + POINT_BYTES] for start in range(_COUNT.size, end, POINT_BYTES)]


def shuffled(values: Sequence[Any], randomness: RandomSource = OS_RANDOMNESS) -> list[Any]:
    """Return the values in a secret random order, so that their places say nothing about rows.

    Sorting by 128 random bits each: uniform but for a collision, whose chance is n^2 / 2^129.
    """
    high, low = random_uint64(len(values), randomness), random_uint64(len(values), randomness)
    return [values[place] for place in np.lexsort((low, high)).tolist()]
