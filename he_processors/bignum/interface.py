"""What every big-number backend offers: batches of residues modulo one odd number.

Residues in wire form, and functions on blocks of them on several threads.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Residues in wire form: ``uint8[n, width]`` rows, little-endian, and the arithmetic that needs no modular product.
#
# Additions, comparisons and secret draws work on whole batches with numpy, so that no caller loops over rows.


_WORD_BYTES = 8
_DRAW_BYTES = 1 << 16  # small enough for allocations that stay in cache: larger ones cost more than the cipher


def byte_width(modulus: int) -> int:
    """Return the bytes that hold every residue modulo ``modulus``."""
    return (modulus.bit_length() + 7) // 8


def rows_from_ints(values: Iterable[int], width: int) -> NDArray[np.uint8]:
    """Write non-negative integers as rows.

    Shapes: result: uint8[n, width], writable.

    Raises:
        OverflowError: a value does not fit ``width`` bytes.
    """
    joined = bytearray().join(int(value).to_bytes(width, "little") for value in values)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, width)


def ints_from_rows(rows: NDArray[np.uint8]) -> list[int]:
    """Read rows as non-negative integers. Shapes: rows: uint8[n, width]."""
    return [int.from_bytes(row.tobytes(), "little") for row in rows]


def widen(rows: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Pad rows with zero bytes. Shapes: rows: uint8[n, w <= width]; result: uint8[n, width]."""
    if rows.shape[1] == width:
        return rows
    wide = np.zeros((rows.shape[0], width), dtype=np.uint8)
    wide[:, : rows.shape[1]] = rows
    return wide


def shift_signed(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Add 2^(8 * width - 1) to integers in two's complement, so that none is negative.

    Shapes: rows: uint8[n, width], two's complement; result: uint8[n, width], plain.

    Raises:
        ValueError: another dtype or shape.
    """
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] < 1:
        raise ValueError("plaintexts must be uint8[n, width]")
    shifted = rows.copy()
    shifted[:, -1] ^= 0x80
    return shifted


def less_than(rows: NDArray[np.uint8], bound: int) -> NDArray[np.bool_]:
    """Compare every row with one integer.

    Shapes: rows: uint8[n, width]; result: bool[n].
    """
    n_words = -(-rows.shape[1] // _WORD_BYTES)
    if bound >> (8 * _WORD_BYTES * n_words):
        return np.ones(rows.shape[0], dtype=np.bool_)
    words = _words(rows, n_words)
    bound_words = _words(rows_from_ints([bound], n_words * _WORD_BYTES), n_words)[0]
    is_less: NDArray[np.bool_] = words[:, -1] < bound_words[-1]
    undecided = np.flatnonzero(words[:, -1] == bound_words[-1])
    for word_idx in range(n_words - 2, -1, -1):
        column = words[undecided, word_idx]
        is_less[undecided[column < bound_words[word_idx]]] = True
        undecided = undecided[column == bound_words[word_idx]]
    return is_less


def add_rows(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Add two batches of integers; the caller knows that no sum overflows the width.

    Shapes: a: uint8[n, width]; b: uint8[n, width] or uint8[1, width]; result: uint8[n, width].
    """
    n_words = -(-a.shape[1] // _WORD_BYTES)
    total, _ = _add_words(_words(a, n_words), _words(b, n_words))
    return _rows(total, a.shape[1])


def add_mod(a: NDArray[np.uint8], b: NDArray[np.uint8], modulus: int) -> NDArray[np.uint8]:
    """Add two batches of residues modulo ``modulus``.

    Shapes: a, b: uint8[n, width], canonical; result: uint8[n, width], canonical.
    """
    n_words = a.shape[1] // _WORD_BYTES + 1  # at least one spare byte above the width: the sum cannot overflow
    total, _ = _add_words(_words(a, n_words), _words(b, n_words))
    # Adding 2^k - modulus carries out of the top word exactly when the sum is at least the modulus.
    complement = (1 << (8 * _WORD_BYTES * n_words)) - modulus
    reduced, is_over = _add_words(total, _words(rows_from_ints([complement], n_words * _WORD_BYTES), n_words))
    return _rows(np.where(is_over[:, None], reduced, total), a.shape[1])


def random_rows_below(n: int, bound: int, source: RandomSource = OS_RANDOMNESS) -> NDArray[np.uint8]:
    """Draw ``n`` integers uniformly from [0, bound) by rejection.

    Shapes: result: uint8[n, byte_width(bound - 1)], writable.

    Raises:
        ValueError: bound < 2.
    """
    if bound < 2:
        raise ValueError("bound must be at least 2")
    width = byte_width(bound - 1)
    top_mask = 0xFF >> (8 * width - (bound - 1).bit_length())
    rows = _random_rows(n, width, top_mask, source)
    rejected = np.flatnonzero(~less_than(rows, bound))
    while rejected.size:
        drawn = _random_rows(rejected.size, width, top_mask, source)
        rows[rejected] = drawn
        rejected = rejected[~less_than(drawn, bound)]
    return rows


def sum_rows(rows: NDArray[np.uint8]) -> int:
    """Return the exact sum of all rows as one integer. Shapes: rows: uint8[n, width]."""
    # 32-bit columns: the sum of fewer than 2^32 rows fits 64 bits.
    words = widen(rows, -(-rows.shape[1] // 4) * 4).view("<u4")
    columns = words.sum(axis=0, dtype=np.uint64)
    return sum(int(column) << (32 * word_idx) for word_idx, column in enumerate(columns))


def _random_rows(n: int, width: int, top_mask: int, source: RandomSource) -> NDArray[np.uint8]:
    rows = np.empty((n, width), dtype=np.uint8)
    step = max(1, _DRAW_BYTES // width)
    for begin in range(0, n, step):
        block = rows[begin : begin + step]
        block[:] = np.frombuffer(source.bytes(block.size), dtype=np.uint8).reshape(block.shape)
    if top_mask != 0xFF:
        rows[:, -1] &= top_mask
    return rows


def _words(rows: NDArray[np.uint8], n_words: int) -> NDArray[np.uint64]:
    wide = np.ascontiguousarray(widen(rows, n_words * _WORD_BYTES))
    return wide.view("<u8").astype(np.uint64, copy=False)


def _rows(words: NDArray[np.uint64], width: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)[:, :width]


def _add_words(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Add 64-bit word rows; return the sums and which of them carried out of the top word."""
    total = a + b
    carry = total < a
    is_over = carry[:, -1].copy()
    while carry[:, :-1].any():
        # A carry out of word i goes into word i + 1, and carries on only where that word wraps to zero.
        incoming = carry[:, :-1]
        total[:, 1:] += incoming
        carry = np.zeros_like(carry)
        carry[:, 1:] = incoming & (total[:, 1:] == 0)
        is_over |= carry[:, -1]
    return total, is_over


# Run a function on blocks of rows, on several threads.
#
# The native kernels release the interpreter lock and keep no state, so one call per block of rows is all the
# parallelism that they need. Work of several calls on one block (he_processors/elgamal) shares the threads as a whole:
# calls inside it run on the thread that they are on.


Block = TypeVar("Block")

ENVIRONMENT_VARIABLE = "VEILBOOST_THREADS"

_pools: dict[int, ThreadPoolExecutor] = {}
_here = threading.local()
if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads: it starts its own
    os.register_at_fork(after_in_child=_pools.clear)


def default_threads() -> int:
    """Return the number of threads: the environment variable ``VEILBOOST_THREADS``, or one for each core.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is None:
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{ENVIRONMENT_VARIABLE} must be a positive number")
    return int(text)


def row_blocks(n_rows: int, threads: int, multiple: int) -> list[slice]:
    """Cut rows into at most ``threads`` blocks of nearly equal size, each but the last a multiple of ``multiple``."""
    n_units = -(-n_rows // multiple)
    n_blocks = max(1, min(threads, n_units))
    bounds = [min(n_rows, n_units * block // n_blocks * multiple) for block in range(n_blocks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def run_blocks(function: Callable[[Block], object], blocks: list[Block], threads: int) -> None:
    """Call ``function`` on every block, at most ``threads`` at a time; the first error of any of them is raised.

    A function that calls this itself gets its blocks one after the other: its threads are at work already.
    """
    if len(blocks) == 1 or threads == 1 or getattr(_here, "is_shared", False):
        for block in blocks:
            function(block)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads, "bignum", _share))
    futures = [pool.submit(function, block) for block in blocks]
    wait(futures)  # also after an error: no thread may still write into the caller's arrays
    for future in futures:
        future.result()


def _share() -> None:
    _here.is_shared = True


# What every big-number backend offers: batches of residues modulo one odd number.
#
# A backend is a factory ``ModBatch(modulus)``. Residues enter and leave in wire form (``uint8[n, width]``, little-
# endian, canonical, below the modulus); in between they stay in the backend's own form (Montgomery limbs, device
# memory, Python ints) behind the opaque ``Residues``.
#
# A module that holds a backend offers ``load() -> Callable[[int], ModBatch]`` (``load(variant)`` for the native one),
# which raises ``BackendUnavailable`` where it cannot run; ``registry.py`` calls it. A backend may offer four further
# methods, listed above, which otherwise go through wire form.


class Residues(Protocol):
    """A batch of residues in the backend's own form. Belongs to the ``ModBatch`` that made it."""

    def __len__(self) -> int: ...


class FixedBase(Protocol):
    """A table of powers of one base."""

    def pow(self, exponents: NDArray[np.uint8]) -> Residues:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """


class ModBatch(Protocol):
    """Batch arithmetic modulo one odd modulus."""

    name: str
    modulus: int
    width: int

    def from_wire(self, rows: NDArray[np.uint8]) -> Residues:
        """Take residues in. Shapes: rows: uint8[n, width]. Raises: ProtocolError if a value >= modulus."""

    def to_wire(self, residues: Residues) -> NDArray[np.uint8]:
        """Give residues out in canonical form. Shapes: result: uint8[n, width]."""

    def take(self, residues: Residues, index: NDArray[np.int64]) -> Residues:
        """Gather rows. Shapes: index: int64[m]; result: Residues[m]."""

    def concat(self, parts: list[Residues]) -> Residues:
        """Join batches in order."""

    def mul(self, a: Residues, b: Residues) -> Residues:
        """Multiply element by element; ``a`` and ``b`` may be the same object."""

    def segprod(self, residues: Residues, order: NDArray[np.int32], starts: NDArray[np.int64]) -> Residues:
        """Multiply the rows of each segment of a row order.

        Segment s is ``residues[order[starts[s]:starts[s + 1]]]``; an empty segment gives 1. Segments may be of any
        length: a backend with lanes cuts the long ones.
        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; result: Residues[n_segments].
        """

    def fixed_base(self, base: int, exponent_bits: int) -> FixedBase:
        """Prepare powers of one base for exponents of at most ``exponent_bits`` bits."""

    def pow_const(self, residues: Residues, exponent: int) -> Residues:
        """Raise every row to the same non-negative exponent."""

    def horner(self, residues: Residues, group: int, shift_bits: int) -> Residues:
        """Pack: for each group of ``group`` consecutive rows c_0, c_1, ... return prod_j c_j^(2^(shift_bits * j)).

        Shapes: residues: Residues[n], the last group may be shorter; result: Residues[ceil(n / group)].
        """


# Batch operations built from the backend interface, with the backend's own version where it has one.
#
# A backend may offer four further methods beyond ``ModBatch``; each saves a trip through wire form, which matters on a
# device whose memory is far from numpy's:
#
# - ``scale(residues, factor)``: multiply every row by the single row of ``factor``. - ``add(a, b)``: add element by
# element. - ``lift(source, residues)``: take residues of ``source`` (a ``ModBatch`` of the same backend with a smaller
# modulus), canonical, as residues of this modulus. - ``from_wide(rows)``: take integers of any width in, reduced by the
# modulus.


_Operation = Callable[..., Residues]


def constant(arithmetic: ModBatch, value: int) -> Residues:
    """Take one integer in. Shapes: result: Residues[1]."""
    return arithmetic.from_wire(rows_from_ints([value % arithmetic.modulus], arithmetic.width))


def scale(arithmetic: ModBatch, residues: Residues, factor: Residues) -> Residues:
    """Multiply every row by one row. Shapes: residues: Residues[n]; factor: Residues[1]; result: Residues[n]."""
    own: _Operation | None = getattr(arithmetic, "scale", None)
    if own is not None:
        return own(residues, factor)
    return arithmetic.mul(residues, arithmetic.take(factor, np.zeros(len(residues), dtype=np.int64)))


def add(arithmetic: ModBatch, a: Residues, b: Residues) -> Residues:
    """Add element by element. Shapes: a, b: Residues[n]; or b: Residues[1], added to every row."""
    own: _Operation | None = getattr(arithmetic, "add", None)
    if own is not None:
        return own(a, b)
    total = add_mod(arithmetic.to_wire(a), arithmetic.to_wire(b), arithmetic.modulus)
    return arithmetic.from_wire(total)


def lift(target: ModBatch, source: ModBatch, residues: Residues) -> Residues:
    """Take the canonical residues of a smaller modulus as residues of ``target``."""
    own: _Operation | None = getattr(target, "lift", None)
    if own is not None:
        return own(source, residues)
    return target.from_wire(widen(source.to_wire(residues), target.width))


def from_wide(arithmetic: ModBatch, rows: NDArray[np.uint8]) -> Residues:
    """Take integers of any width in, reduced by the modulus. Shapes: rows: uint8[n, any width]."""
    own: _Operation | None = getattr(arithmetic, "from_wide", None)
    if own is not None:
        return own(rows)
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise ValueError("rows must be uint8[n, width]")
    if rows.shape[1] < arithmetic.width:
        return arithmetic.from_wire(widen(rows, arithmetic.width))
    reduced = (value % arithmetic.modulus for value in ints_from_rows(rows))
    return arithmetic.from_wire(rows_from_ints(reduced, arithmetic.width))


def product(arithmetic: ModBatch, residues: Residues) -> int:
    """Multiply a whole batch together; the product of no rows is 1."""
    order = np.arange(len(residues), dtype=np.int32)
    total = arithmetic.segprod(residues, order, np.array([0, len(residues)], dtype=np.int64))
    return ints_from_rows(arithmetic.to_wire(total))[0]
