"""XGBoost's split candidates on the wire: one UBJSON object per node and rank.

XGBoost writes the keys in alphabetical order and each integer in the shortest type that holds it, so entries have
different lengths. Ours hold every integer as 64 bits: their length is known before a split is found, and says nothing
about it. XGBoost's reader takes any integer type.

Reference: XGBoost 3.2, src/tree/hist/expand_entry.h and src/common/json.cc.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from he_processors.errors import ProtocolError

_DEFAULT_LEFT = 1 << 31
_INTEGERS = {b"i": ">b", b"U": ">B", b"I": ">h", b"l": ">i", b"L": ">q"}


@dataclass(frozen=True, slots=True, repr=False)
class ExpandEntry:
    """The best split of one node that one rank knows.

    Units: loss_change is a float32 value; sums are (gradient, hessian) as doubles.

    Attributes:
        feature: index over all parties' columns.
        threshold: the split value; 0 where it belongs to another party and stays there.
        categories: of a categorical split, those that go right, ascending; None for a threshold.
    """

    node: int
    depth: int
    loss_change: float = 0.0
    feature: int = 0
    default_left: bool = False
    threshold: float = 0.0
    left_sum: tuple[float, float] = (0.0, 0.0)
    right_sum: tuple[float, float] = (0.0, 0.0)
    categories: tuple[int, ...] | None = None

    def is_replaced_by(self, other: ExpandEntry) -> bool:
        """Decide as XGBoost does: the larger loss change wins, on a tie the lower feature, never an infinite one.

        Reference: SplitEntryContainer::NeedReplace, src/tree/param.h.
        """
        if other.loss_change in (float("inf"), float("-inf")):
            return False
        if self.feature <= other.feature:
            return other.loss_change > self.loss_change
        return not self.loss_change > other.loss_change


def _key(name: str) -> bytes:
    return b"L" + struct.pack(">q", len(name)) + name.encode()


def _integer(value: int) -> bytes:
    return b"L" + struct.pack(">q", value)


def _pair(values: tuple[float, float]) -> bytes:
    return b"[$D#" + _integer(2) + struct.pack(">2d", *values)


def pack_entry(entry: ExpandEntry) -> bytes:
    """Write an entry in ``ENTRY_SIZE`` bytes.

    A split of another party stands as one of numbers, whatever it is: which rows go left, its owner says.
    """
    split_index = entry.feature | (_DEFAULT_LEFT if entry.default_left else 0)
    return b"".join(
        (
            b"{",
            _key("depth"),
            _integer(entry.depth),
            _key("nid"),
            _integer(entry.node),
            _key("split"),
            b"{",
            _key("cat_bits"),
            b"[$U#",
            _integer(0),
            _key("is_cat"),
            b"F",
            _key("left_sum"),
            _pair(entry.left_sum),
            _key("loss_chg"),
            b"d",
            struct.pack(">f", entry.loss_change),
            _key("right_sum"),
            _pair(entry.right_sum),
            _key("sindex"),
            _integer(split_index),
            _key("split_value"),
            b"d",
            struct.pack(">f", entry.threshold),
            b"}",
            b"}",
        )
    )


ENTRY_SIZE = len(pack_entry(ExpandEntry(0, 0)))
SHORTEST_ENTRY, LONGEST_ENTRY = ENTRY_SIZE - 64, ENTRY_SIZE


def category_bytes(n_categories: int) -> int:
    """Return by how much a categorical split may lengthen an entry: one bit for each category, and one more."""
    return 4 * (n_categories // 32 + 1) if n_categories else 0


def unpack_entry(data: bytes) -> ExpandEntry:
    """Read an entry as XGBoost 3.2 writes it.

    Raises:
        ProtocolError: anything else.
    """
    reader = _Reader(data)
    reader.expect(b"{", "depth")
    depth = reader.integer()
    reader.expect("nid")
    node = reader.integer()
    reader.expect("split", b"{", "cat_bits", b"[$U#")
    bits = reader.take(reader.integer())
    reader.expect("is_cat")
    categories = _categories(bits)
    if reader.flag() != bool(categories) or (bits and not categories):
        raise ProtocolError("a split candidate is not in XGBoost's format")
    reader.expect("left_sum")
    left = reader.pair()
    reader.expect("loss_chg")
    loss_change = reader.real()
    reader.expect("right_sum")
    right = reader.pair()
    reader.expect("sindex")
    split_index = reader.integer()
    reader.expect("split_value")
    threshold = reader.real()
    reader.expect(b"}}")
    reader.finish()
    if node < 0 or depth < 0 or not 0 <= split_index < 1 << 32:
        raise ProtocolError("a split candidate with a number out of range")
    feature, default_left = split_index & (_DEFAULT_LEFT - 1), bool(split_index & _DEFAULT_LEFT)
    return ExpandEntry(node, depth, loss_change, feature, default_left, threshold, left, right, categories or None)


def _categories(bits: bytes) -> tuple[int, ...]:
    """Read XGBoost's bit field: words of 32 bits, in each the first category in the highest bit."""
    if len(bits) % 4:
        raise ProtocolError("a split candidate is not in XGBoost's format")
    words = np.frombuffer(bits, dtype="<u4").astype(">u4")
    return tuple(np.flatnonzero(np.unpackbits(words.view(np.uint8))).tolist())


class _Reader:
    """Reads UBJSON from front to back; whatever is not exactly as expected is refused."""

    def __init__(self, data: bytes):
        self._data = data
        self._position = 0

    def expect(self, *parts: bytes | str) -> None:
        for part in parts:
            if isinstance(part, str):
                if self.integer() != len(part):
                    raise ProtocolError("a split candidate is not in XGBoost's format")
                part = part.encode()
            if self._take(len(part)) != part:
                raise ProtocolError("a split candidate is not in XGBoost's format")

    def integer(self) -> int:
        code = _INTEGERS.get(self._take(1))
        if code is None:
            raise ProtocolError("a split candidate is not in XGBoost's format")
        return int(struct.unpack(code, self._take(struct.calcsize(code)))[0])

    def real(self) -> float:
        self.expect(b"d")
        return float(struct.unpack(">f", self._take(4))[0])

    def take(self, size: int) -> bytes:
        if size < 0:
            raise ProtocolError("a split candidate is not in XGBoost's format")
        return self._take(size)

    def flag(self) -> bool:
        code = self._take(1)
        if code not in (b"T", b"F"):
            raise ProtocolError("a split candidate is not in XGBoost's format")
        return code == b"T"

    def pair(self) -> tuple[float, float]:
        self.expect(b"[$D#")
        if self.integer() != 2:
            raise ProtocolError("a split candidate is not in XGBoost's format")
        return struct.unpack(">2d", self._take(16))

    def finish(self) -> None:
        if self._position != len(self._data):
            raise ProtocolError("a split candidate has trailing bytes")

    def _take(self, size: int) -> bytes:
        part = self._data[self._position : self._position + size]
        if len(part) != size:
            raise ProtocolError("a split candidate is cut short")
        self._position += size
        return part
