"""The one message of training data: randomised buckets of some features of all rows, in a strict byte form.

    magic, version, n_rows u64, n_features u16, n_buckets u8 per feature, then one byte per value, feature by feature

More than ``BLOCK_BYTES`` travel as several blocks of whole features.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError

BLOCK_BYTES = 64 << 20
_HEADER = struct.Struct("<4sBQH")
_MAGIC, _VERSION = b"VLBB", 1


@dataclass(frozen=True, slots=True, eq=False)
class BucketBlock:
    """Buckets of some features. Shapes: n_buckets: one per feature; ids: uint8[n_features, n_rows]."""

    n_buckets: tuple[int, ...]
    ids: NDArray[np.uint8]

    def to_bytes(self) -> bytes:
        """Return the bytes that travel, sealed."""
        n_features, n_rows = self.ids.shape
        header = _HEADER.pack(_MAGIC, _VERSION, n_rows, n_features)
        return b"".join((header, bytes(self.n_buckets), np.ascontiguousarray(self.ids).tobytes()))

    @classmethod
    def from_bytes(cls, data: bytes, n_rows: int, n_features: int) -> BucketBlock:
        """Read a block of a peer.

        Raises:
            ProtocolError: not exactly one block for so many rows and features, or a bucket that its feature does not
                have.
        """
        if len(data) < _HEADER.size:
            raise ProtocolError("a block of buckets is shorter than its header")
        magic, version, rows, features = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError("not a block of buckets of this version: all sites must run the same one")
        start = _HEADER.size + n_features
        if rows != n_rows or features != n_features or len(data) != start + n_features * n_rows:
            raise ProtocolError("a block of buckets has another size than it should")
        n_buckets = np.frombuffer(data, np.uint8, n_features, _HEADER.size)
        ids = np.frombuffer(data, np.uint8, n_features * n_rows, start).reshape(n_features, n_rows)
        if (n_buckets < 1).any() or (n_rows and (ids.max(axis=1) >= n_buckets).any()):
            raise ProtocolError("a block of buckets holds a bucket that its feature does not have")
        return cls(tuple(map(int, n_buckets)), ids)


def blocks_of(n_rows: int, n_features: int) -> list[slice]:
    """Return which features travel together. At least one block, of no feature if there is none."""
    width = max(1, BLOCK_BYTES // max(1, n_rows))
    return [slice(i, min(i + width, n_features)) for i in range(0, n_features, width)] or [slice(0, 0)]


def joined(blocks: Sequence[BucketBlock]) -> BucketBlock:
    """Put the blocks of one party together again."""
    n_buckets = tuple(n for block in blocks for n in block.n_buckets)
    return BucketBlock(n_buckets, np.concatenate([block.ids for block in blocks]))
