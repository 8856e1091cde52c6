"""Garbled circuits over many inputs at once: each gate is one operation on vectors, at the garbler and the evaluator.

A circuit is a function of an ``Engine``, which both parties call alike: where the garbler writes, the evaluator reads.
A wire of n inputs is n labels (``Labels``). Exclusive or is free, an AND takes two ciphertexts of 16 bytes, and a table
of m input bits 2^m words of 16 bits, of which the evaluator opens one: its share, modulo 2^16, of the table's value.
Bits that the garbler knows are free where they meet a wire by exclusive or: sums with its numbers take no label.

Security: labels of one bit differ by the offset D, which the evaluator does not know. H(x) = AES_k(s(x)) + s(x) with
    s(x, y) = (x + y, x) and a key k of its own for each half of a gate, from a start that each message draws: the
    hash of Guo et al. for many instances. A key serves 2 n blocks, at a table 2^m n, all of different labels: p
    evaluations of AES then find D with a chance of some 2^(m + 1) n p / 2^127 in the ideal cipher model. A table's row
    is opened by H(x + r D), r being the row as an element of GF(2^128): for each row that is not the evaluator's, r D
    is as unknown as D, so that the same argument holds. Labels of constants differ from input to input, for the same
    reason: one label under one key twice would show the offset.
References: Zahur, Rosulek, Evans, Two halves make a whole (Eurocrypt 2015); Kolesnikov, Schneider (ICALP 2008); Guo,
    Katz, Wang, Weng, Yu, Better concrete security for half-gates garbling (Crypto 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.randomness import BULK_RANDOMNESS, RandomSource
from he_processors.two_party.oblivious_transfer import LABEL_BYTES, Labels

START_BYTES = 16
WORD_BITS = 16
TRUE = np.array([True])
_WORD_BYTES = WORD_BITS // 8
_ONE, _HIGH = np.uint64(1), np.uint64(63)
_REDUCTION = np.uint64(0x87)  # x^128 = x^7 + x^2 + x + 1
_MAX_TABLE_CELLS = 1 << 19  # rows that are hashed at once: they stay in the cache


class Engine(Protocol):
    """What circuits are made of.

    Shapes: a wire is [2, n]; bits that the garbler knows are bool[n], or bool[1] for all inputs alike. The evaluator's
        engine reads none of them, nor of tables.
    """

    def flip(self, wire: Labels, bits: NDArray[np.bool_]) -> Labels:
        """Add bits that the garbler knows to a wire, by exclusive or."""

    def both(self, a: Labels, b: Labels) -> Labels:
        """Return a AND b."""

    def look_up(self, wires: Sequence[Labels], tables: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Share the words that tables hold at the number which wires make, the first one the lowest bit.

        Shapes: tables: uint16[n or 1, 2^m], one for each input; result: uint16[n]; both parties' add up to the word.
        """

    def reveal(self, wire: Labels) -> NDArray[np.bool_]:
        """Let the evaluator read a wire; the garbler gets nothing."""


class Garbler:
    """Writes a circuit. One for each message; ``message`` is what the evaluator needs."""

    def __init__(self, offset: Labels, randomness: RandomSource = BULK_RANDOMNESS) -> None:
        """Draw the start of keys. Args: offset: of ``OffsetOwner``, [2, 1]."""
        self._offset, self._randomness = offset, randomness
        self._hash = _Hash(randomness.bytes(START_BYTES))
        self._parts: list[bytes] = [self._hash.start]

    def message(self) -> bytes:
        """Return the circuit so far."""
        return b"".join(self._parts)

    def flip(self, wire: Labels, bits: NDArray[np.bool_]) -> Labels:
        return wire ^ (self._offset * bits)

    def both(self, a: Labels, b: Labels) -> Labels:
        offset = self._offset
        a_zero, a_one = self._hash.of(a, a ^ offset)
        b_zero, b_one = self._hash.of(b, b ^ offset)
        a_color, b_color = _color_mask(a), _color_mask(b)
        of_a = a_zero ^ a_one ^ (offset & b_color)
        of_b = b_zero ^ b_one ^ a
        self._parts += [of_a.tobytes(), of_b.tobytes()]
        return a_zero ^ (of_a & a_color) ^ b_zero ^ ((of_b ^ a) & b_color)

    def look_up(self, wires: Sequence[Labels], tables: NDArray[np.uint16]) -> NDArray[np.uint16]:
        n, n_rows = wires[0].shape[1], 1 << len(wires)
        colors = [wire[0] & _ONE for wire in wires]
        uncolored = _combined([wire ^ (self._offset * color) for wire, color in zip(wires, colors, strict=True)])
        moved = sum((color << np.uint64(i) for i, color in enumerate(colors)), np.zeros(n, np.uint64)).astype(np.intp)
        shares = np.frombuffer(self._randomness.bytes(_WORD_BYTES * n), dtype="<u2").astype(np.uint16)
        rows = np.arange(n_rows, dtype=np.intp)
        words = tables[np.arange(n)[:, None] if len(tables) > 1 else 0, rows ^ moved[:, None]] + shares[:, None]
        words ^= self._hash.rows(uncolored, _multiples(self._offset, n_rows))
        self._parts.append(words.astype("<u2").tobytes())
        return np.uint16(0) - shares

    def reveal(self, wire: Labels) -> NDArray[np.bool_]:
        self._parts.append(np.packbits(_colors(wire)).tobytes())
        return _colors(wire)


class Evaluator:
    """Reads a circuit: computes on one label of each wire, and learns what is revealed."""

    def __init__(self, message: bytes) -> None:
        self._message, self._at = memoryview(message), 0
        self._hash = _Hash(bytes(self._next(START_BYTES)))

    def finish(self) -> None:
        """Refuse what is left over. Raises: ProtocolError."""
        if self._at != len(self._message):
            raise ProtocolError("a garbled circuit is longer than its description")

    def flip(self, wire: Labels, bits: NDArray[np.bool_]) -> Labels:
        return wire

    def both(self, a: Labels, b: Labels) -> Labels:
        (of_a_wire,), (of_b_wire,) = self._hash.of(a), self._hash.of(b)
        size = a.shape[1] * LABEL_BYTES
        of_a, of_b = (np.frombuffer(self._next(size), dtype="<u8").reshape(2, -1) for _ in range(2))
        return of_a_wire ^ (of_a & _color_mask(a)) ^ of_b_wire ^ ((of_b ^ a) & _color_mask(b))

    def look_up(self, wires: Sequence[Labels], tables: NDArray[np.uint16]) -> NDArray[np.uint16]:
        n, n_rows = wires[0].shape[1], 1 << len(wires)
        words = np.frombuffer(self._next(_WORD_BYTES * n * n_rows), dtype="<u2").reshape(n, n_rows)
        row = sum((wire[0] & _ONE) << np.uint64(i) for i, wire in enumerate(wires))
        pads = self._hash.rows(_combined(wires), np.zeros((2, 1), dtype=np.uint64))[:, 0]
        return words[np.arange(n), np.asarray(row, dtype=np.intp)] ^ pads

    def reveal(self, wire: Labels) -> NDArray[np.bool_]:
        n = wire.shape[1]
        of_zero = np.unpackbits(np.frombuffer(self._next(-(-n // 8)), dtype=np.uint8), count=n).astype(bool)
        return of_zero ^ _colors(wire)

    def _next(self, size: int) -> memoryview:
        part = self._message[self._at : self._at + size]
        if len(part) != size:
            raise ProtocolError("a garbled circuit is shorter than its description")
        self._at += size
        return part


# Circuits of several bits. Numbers are lists of wires, the lowest bit first.


def zero_wire(n: int) -> Labels:
    """Return a wire that is zero for all inputs, whose labels both parties know: no two alike."""
    return np.stack([np.arange(n, dtype=np.uint64) << _ONE, np.zeros(n, dtype=np.uint64)])


def add_known(
    engine: Engine, wires: Sequence[Labels], known: NDArray[np.bool_], *, plus_one: bool = False
) -> list[Labels]:
    """Add the garbler's number to that of wires, and one where that is said, modulo two to the number of wires.

    Shapes: known: bool[bits, n].
    """
    carried, result = zero_wire(wires[0].shape[1]), []
    if plus_one:
        carried = engine.flip(carried, TRUE)
    for place, wire in enumerate(wires):
        total = engine.flip(wire, known[place])
        result.append(total ^ carried)
        if place + 1 < len(wires):  # the carry in, where both summands differ, else either of them
            carried = engine.flip(engine.both(total, engine.flip(carried, known[place])), known[place])
    return result


def at_least(engine: Engine, wires: Sequence[Labels], bound: int) -> Labels:
    """Tell whether the number is at least a public one, which is positive and has not more bits."""
    lowest = (bound & -bound).bit_length() - 1
    reached = wires[lowest]
    for place in range(lowest + 1, len(wires)):
        combined = engine.both if bound >> place & 1 else partial(either, engine)
        reached = combined(reached, wires[place])
    return reached


def either(engine: Engine, a: Labels, b: Labels) -> Labels:
    """Return a OR b."""
    return a ^ b ^ engine.both(a, b)


def chosen(engine: Engine, which: Labels, one: Labels, zero: Labels) -> Labels:
    """Return ``one`` where ``which`` is set, else ``zero``."""
    return zero ^ engine.both(which, one ^ zero)


def is_more(engine: Engine, a: Sequence[Labels], b: Sequence[Labels]) -> Labels:
    """Tell whether a is more than b."""
    more = zero_wire(a[0].shape[1])
    for of_a, of_b in zip(a, b, strict=True):
        more = more ^ engine.both(of_a ^ of_b, of_a ^ more)  # of_a where both differ
    return more


def normalised(
    engine: Engine, wires: Sequence[Labels], shifts: Sequence[int], n_kept: int
) -> tuple[list[Labels], list[Labels]]:
    """Shift a number up until its highest bit is set, by some of the shifts.

    Args:
        wires: the highest bit first, at most ``n_kept`` and all shifts together; zeros follow the last one.

    Returns:
        For each shift whether it was made; the ``n_kept`` highest bits, the highest first. That one is zero where the
        number is less than what is shifted out.

    Security: zeros that follow are no wires. Of two constants the sum would be one label for all inputs, and an AND of
        it would show the offset.
    """
    bits, flags, left = list(wires), [], sum(shifts)
    for shift in shifts:
        left -= shift
        is_zero = engine.flip(bits[0], TRUE)
        for bit in bits[1:shift]:
            is_zero = engine.both(is_zero, engine.flip(bit, TRUE))
        flags.append(is_zero)
        shifted = [chosen(engine, is_zero, b, a) for a, b in zip(bits, bits[shift:], strict=False)]
        last = [engine.both(engine.flip(is_zero, TRUE), bit) for bit in bits[len(shifted) : n_kept + left]]
        bits = shifted + last
    return flags, bits + [zero_wire(wires[0].shape[1])] * (n_kept - len(bits))


def shifts_up_to(most: int) -> tuple[int, ...]:
    """Return shifts of which some add up to every number up to ``most``, each at most one more than the rest."""
    shifts = []
    while most > 0:
        shifts.append(-(-most // 2))
        most //= 2
    return tuple(shifts)


class _Hash:
    """AES under one key after the other."""

    def __init__(self, start: bytes) -> None:
        self.start = start
        self._number = int.from_bytes(start, "little")

    def of(self, *labels: Labels) -> list[Labels]:
        """Hash labels under the next key. Shapes: each label: [2, n]; results: alike."""
        blocks = np.empty((len(labels), labels[0].shape[1], 2), dtype="<u8")
        for block, label in zip(blocks, labels, strict=True):
            np.bitwise_xor(label[0], label[1], out=block[:, 0])
            block[:, 1] = label[0]
        hashed = blocks ^ self._encrypted(self._next_key(), blocks)
        return [one.T for one in hashed]

    def rows(self, labels: Labels, multiples: Labels) -> NDArray[np.uint16]:
        """Hash every label plus every multiple under the next key; keep 16 bits. Shapes: result: uint16[n, n_rows]."""
        key, (n, n_rows) = self._next_key(), (labels.shape[1], multiples.shape[1])
        result = np.empty((n, n_rows), dtype=np.uint16)
        step = max(1, _MAX_TABLE_CELLS // n_rows)
        mixed = [np.stack([part[0] ^ part[1], part[0]], axis=1) for part in (labels, multiples)]
        for at in range(0, n, step):
            blocks = mixed[0][at : at + step, None] ^ mixed[1][None]
            words = (blocks, self._encrypted(key, blocks))
            first, second = (one.view("<u2")[..., 0] for one in words)
            result[at : at + step] = first ^ second
        return result

    def _next_key(self) -> bytes:
        self._number = (self._number + 1) % (1 << 128)
        return self._number.to_bytes(16, "little")

    def _encrypted(self, key: bytes, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - AES itself: blocks that differ
        return np.frombuffer(cipher.update(blocks.data.cast("B")), dtype="<u8").reshape(blocks.shape)


def _color_mask(wire: Labels) -> NDArray[np.uint64]:
    mask: NDArray[np.uint64] = np.uint64(0) - (wire[0] & _ONE)
    return mask


def _colors(wire: Labels) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (wire[0] & _ONE).astype(bool)
    return found


def _doubled(labels: Labels) -> Labels:
    """Multiply by x in GF(2^128)."""
    high = labels >> _HIGH
    result = labels << _ONE
    result[0] ^= high[1] * _REDUCTION
    result[1] ^= high[0]
    return result


def _combined(wires: Sequence[Labels]) -> Labels:
    """Return the sum of x^i times wire i."""
    total = wires[-1]
    for wire in reversed(wires[:-1]):
        total = _doubled(total) ^ wire
    return total


def _multiples(offset: Labels, n: int) -> Labels:
    """Return the offset times each number below n, as elements of GF(2^128). Shapes: result: [2, n]."""
    found, doubled = np.zeros((2, 1), dtype=np.uint64), offset
    while found.shape[1] < n:
        found = np.concatenate([found, found ^ doubled], axis=1)
        doubled = _doubled(doubled)
    return found
