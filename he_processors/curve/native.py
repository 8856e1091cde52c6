"""The native backend: C kernels for AVX512-IFMA, AVX2 and any 64-bit machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors._native import extension
from he_processors.bignum.interface import default_threads, ints_from_rows, row_blocks, run_blocks
from he_processors.bignum.native import segment_passes
from he_processors.bignum.reference import check_index, check_rows, check_segments
from he_processors.curve.interface import (
    AFFINE_BYTES,
    COMPRESSED_BYTES,
    GROUP_ORDER,
    NOT_ON_CURVE,
    NOT_RISTRETTO,
    RISTRETTO_BYTES,
    SCALAR_BYTES,
)
from he_processors.curve.reference import check_lengths
from he_processors.errors import BackendUnavailable, ProtocolError

# Plans that the native kernels follow: windows of fixed bases, digits of scalars.


# 22 windows of 2,049 entries are 5.8 MB: larger tables take fewer additions and lose more to memory (measured).
_LARGEST_TABLE_BYTES = 6 << 20
_ENTRY_BYTES = 128
_WIDEST_WINDOW = 14
_ENTRY_COST = 2.2  # additions that a table's entry takes, with its share of an inversion
_NAF_WINDOW = 5
NAF_BUCKETS = 1 << (_NAF_WINDOW - 2)  # for the odd digits 1, 3, ..., 2^(window - 1) - 1


def n_windows(width: int, window: int) -> int:
    """Return how many signed digits of ``window`` bits hold every scalar of ``width`` bytes below the group order."""
    return min(8 * width, GROUP_ORDER.bit_length()) // window + 1


def best_window(width: int, n_scalars: int) -> int:
    """Return the window that makes building a table and using it ``n_scalars`` times cheapest."""

    def entries(window: int) -> int:
        return n_windows(width, window) << (window - 1)

    def additions(window: int) -> float:
        return _ENTRY_COST * entries(window) + n_windows(width, window) * n_scalars

    small = [
        window for window in range(1, _WIDEST_WINDOW + 1) if entries(window) * _ENTRY_BYTES <= _LARGEST_TABLE_BYTES
    ]
    return min(small, key=additions)


def digits_of_each(scalars: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Write scalars in non-adjacent form: digits are 0 or odd, and seldom not 0.

    Shapes: scalars: uint8[k, 32]; result: int8[k, n_digits], lowest digit first.
    Reference: Guide to Elliptic Curve Cryptography, algorithm 3.35.
    """
    rows = [_wide_naf(scalar) for scalar in ints_from_rows(scalars)]
    digits = np.zeros((len(rows), max(1, *map(len, rows))), dtype=np.int8)
    for row, values in zip(digits, rows, strict=True):
        row[: len(values)] = values
    return digits


def _wide_naf(scalar: int) -> list[int]:
    digits = []
    size = 1 << _NAF_WINDOW
    while scalar:
        digit = 0
        if scalar & 1:
            digit = scalar % size
            if digit > size >> 1:
                digit -= size
            scalar -= digit
        digits.append(digit)
        scalar >>= 1
    return digits


# The native backend: C kernels for AVX512-IFMA, AVX2 and any 64-bit machine.
#
# The extension is optional. ``load(variant)`` raises ``BackendUnavailable`` where it was not built or where the
# processor (or its operating system) lacks the instructions.
#
# Points are rows of 64-bit words in one of two forms: affine, ``uint64[n, 16]``, which is what bytes become and what is
# cheapest to add, and extended, ``uint64[n, 20]``, which is what sums and multiples are. See ``_native/curve.h``.
#
# Security: nothing here runs in constant time. Tables are indexed by digits of secret scalars, so that someone who
# shares the machine's caches could learn about them; that adversary is outside the threat model (SECURITY.md).


_curve = extension("_curve")

Rows = NDArray[np.uint64]
_Word = TypeVar("_Word", bound=np.generic)

_AFFINE_WORDS = 16
_POINT_WORDS = 20
_LINE_WORDS = 8  # of a cache line: affine rows take two whole ones
_LANES = 8
_ORDER_BYTES = GROUP_ORDER.to_bytes(SCALAR_BYTES, "little")
_SHORTEST_CHUNK = 32


def instruction_sets() -> tuple[str, ...]:
    """Return the variants that run on this machine, fastest first; none if the extension was not built."""
    return () if _curve is None else tuple(_curve.instruction_sets())


def load(variant: str, threads: int | None = None) -> NativeCurve:
    """Return the curve in one variant: ``ifma``, ``avx2`` or ``portable``.

    Args:
        variant: the instruction set.
        threads: how many threads share a batch; by default ``VEILBOOST_THREADS`` or one for each core.

    Raises:
        BackendUnavailable: the extension was not built or this machine lacks the instructions.
    """
    if _curve is None:
        raise BackendUnavailable("the native extension was not built")
    if variant not in instruction_sets():
        raise BackendUnavailable(f"this machine does not run the {variant} instructions")
    return NativeCurve(variant, default_threads() if threads is None else threads)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NativePoints:
    """Rows of words, and the variant that they belong to. Shapes: rows: uint64[n, 16] (affine) or [n, 20]."""

    rows: Rows
    variant: str

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def __getitem__(self, part: slice) -> NativePoints:
        """Return some of the points, in the same memory."""
        return NativePoints(self.rows[part], self.variant)

    def __repr__(self) -> str:
        return f"NativePoints({len(self)} rows)"


class NativeCurve:
    """Batch arithmetic on edwards25519 in C.

    Batches may be used by several threads at once; results never share memory that is written again.
    """

    def __init__(self, variant: str, threads: int) -> None:
        if threads < 1:
            raise ValueError("threads must be at least 1")
        self.name = variant
        self.threads = threads
        self._set = instruction_sets().index(variant)

    def from_affine(self, rows: NDArray[np.uint8]) -> NativePoints:
        """Take points in. Shapes: rows: uint8[n, 64]. Raises: ProtocolError unless canonical and on the curve."""
        check_rows(rows, AFFINE_BYTES)
        return self._read(_curve.from_affine, rows, _AFFINE_WORDS, NOT_ON_CURVE)

    def to_affine(self, points: NativePoints) -> NDArray[np.uint8]:
        """Give points out in their one affine form. Shapes: result: uint8[n, 64]."""
        return self._apply(_curve.to_affine, np.empty((len(points), AFFINE_BYTES), np.uint8), self._rows(points))

    def from_compressed(self, rows: NDArray[np.uint8]) -> NativePoints:
        """Decode points. Shapes: rows: uint8[n, 32]. Raises: ProtocolError unless canonical and on the curve."""
        check_rows(rows, COMPRESSED_BYTES)
        return self._read(_curve.from_compressed, rows, _AFFINE_WORDS, NOT_ON_CURVE)

    def from_ristretto(self, rows: NDArray[np.uint8]) -> NativePoints:
        """Decode elements of ristretto255. Shapes: rows: uint8[n, 32]. Raises: ProtocolError for any other bytes."""
        check_rows(rows, RISTRETTO_BYTES)
        return self._read(_curve.from_ristretto, rows, _AFFINE_WORDS, NOT_RISTRETTO)

    def to_ristretto(self, points: NativePoints) -> NDArray[np.uint8]:
        """Encode elements of ristretto255. Shapes: result: uint8[n, 32]."""
        return self._apply(_curve.to_ristretto, np.empty((len(points), RISTRETTO_BYTES), np.uint8), self._rows(points))

    def from_uniform(self, rows: NDArray[np.uint8]) -> NativePoints:
        """Derive elements of ristretto255 from uniform bytes. Shapes: rows: uint8[n, 64]; result: Points[n]."""
        check_rows(rows, 2 * RISTRETTO_BYTES)
        return self._read(_curve.from_uniform, rows, _POINT_WORDS, "")

    def identity(self, n: int) -> NativePoints:
        """Return the neutral point ``n`` times."""
        rows = _empty(n, _AFFINE_WORDS)
        rows[:] = 0
        rows[:, [0, 5]] = 1  # y + x and y - x
        return self._points(rows)

    def take(self, points: NativePoints, index: NDArray[np.int64]) -> NativePoints:
        """Gather points. Shapes: index: int64[m]; result: Points[m]. Raises: IndexError out of range."""
        rows = self._rows(points)
        check_index(index, len(rows))
        out = _empty(len(index), rows.shape[1])
        if len(index):
            np.take(rows, index, axis=0, out=out, mode="clip")  # checked above; "raise" would go through a copy
        return self._points(out)

    def concat(self, parts: list[NativePoints]) -> NativePoints:
        """Join batches in order."""
        rows = [self._rows(part) for part in parts] or [_empty(0, _AFFINE_WORDS)]
        if len({part.shape[1] for part in rows}) > 1:
            rows = [self._extended(part) for part in rows]
        out = _empty(sum(map(len, rows)), rows[0].shape[1])
        return self._points(np.concatenate(rows, out=out))

    def column(self, n: int) -> NativeColumn:
        """Set memory aside for ``n`` points that come in batches."""
        return NativeColumn(self.name, n)

    def add(self, a: NativePoints, b: NativePoints) -> NativePoints:
        """Add point by point; ``a`` may be ``b``. Raises: ValueError if the lengths differ."""
        check_lengths(a, b)
        return self._points(self._apply(_curve.add, _empty(len(a), _POINT_WORDS), self._rows(a), self._rows(b)))

    def negate(self, points: NativePoints) -> NativePoints:
        """Return the negative of every point."""
        rows = self._rows(points)
        return self._points(self._apply(_curve.negate, _empty(*rows.shape), rows))

    def double(self, points: NativePoints, times: int) -> NativePoints:
        """Multiply every point by 2^times. Raises: ValueError if ``times`` is negative."""
        if times < 0:
            raise ValueError("times must not be negative")
        return self._points(self._apply(_curve.twice, _empty(len(points), _POINT_WORDS), self._rows(points), times))

    def segment_sums(
        self, order: NDArray[np.int32], starts: NDArray[np.int64], n_rows: int
    ) -> Callable[[NativePoints], NativePoints]:
        """Prepare sums of segments: chunks are cut and dealt out once for all columns of a row.

        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; its result: Points[n_segments].
        """
        check_segments(order, starts, n_rows)
        passes = segment_passes(order, starts, self.threads, _SHORTEST_CHUNK)

        def add(points: NativePoints) -> NativePoints:
            check_lengths(points, range(n_rows))
            rows = self._rows(points)
            for of_pass in passes:
                rows = self._sums(rows, *of_pass)
            return self._points(rows)

        return add

    def fixed_base(self, base: NativePoints) -> NativeFixedBase:
        """Prepare multiples of one point. Shapes: base: Points[1]. Raises: ValueError for any other number."""
        if len(base) != 1:
            raise ValueError("a fixed base is one point")
        return NativeFixedBase(self, base)

    def mul(self, points: NativePoints, scalars: NDArray[np.uint8]) -> NativePoints:
        """Multiply every point by a scalar of its own. Shapes: scalars: uint8[n, 32]; result: Points[n]."""
        check_rows(scalars, SCALAR_BYTES)
        scalars = _checked(scalars)
        check_lengths(points, scalars)
        return self._points(self._apply(_curve.mul, _empty(len(points), _POINT_WORDS), self._rows(points), scalars))

    def mul_by_each(self, points: NativePoints, scalars: NDArray[np.uint8]) -> list[NativePoints]:
        """Multiply every point by each of a few scalars. Shapes: scalars: uint8[k, 32]; result: k times Points[n]."""
        check_rows(scalars, SCALAR_BYTES)
        scalars = _checked(scalars)
        if not len(scalars):
            return []
        rows, digits = self._rows(points), digits_of_each(scalars)
        results = [_empty(len(rows), _POINT_WORDS) for _ in digits]

        def multiply(block: slice) -> None:
            members = rows[block]
            out = _empty(len(digits) * len(members), _POINT_WORDS)
            _curve.mul_each(self._set, members, digits, len(digits), NAF_BUCKETS, out)
            for result, part in zip(results, np.split(out, len(digits)), strict=True):
                result[block] = part

        self._by_rows(len(rows), multiply)
        return [self._points(result) for result in results]

    def scale(self, scalars: NDArray[np.uint8], factors: list[int], shift: int) -> list[NDArray[np.uint8]]:
        """Return factor * scalar + shift modulo the group order. Shapes: scalars: uint8[n, 32]; results: likewise."""
        check_rows(scalars, SCALAR_BYTES)
        scalars, results = _checked(scalars), []
        added = _scalar_bytes(shift)
        for factor in factors:
            raised, out = _scalar_bytes(factor << (8 * SCALAR_BYTES)), np.empty_like(scalars)
            self._by_rows(len(scalars), partial(_scale, scalars, raised, added, out))
            results.append(out)
        return results

    def equal(self, a: NativePoints, b: NativePoints) -> NDArray[np.bool_]:
        """Compare point by point, as points of the curve. Shapes: result: bool[n]."""
        check_lengths(a, b)
        return self._apply(_curve.equal, np.empty(len(a), np.uint8), self._rows(a), self._rows(b)).view(np.bool_)

    def y_words(self, points: NativePoints) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the low 64 bits of each y and the lowest bit of each x. Shapes: uint64[n], uint8[n]."""
        rows = self._rows(points)
        words, odd = np.empty(len(rows), dtype=np.uint64), np.empty(len(rows), dtype=np.uint8)
        self._by_rows(len(rows), lambda block: _curve.y_words(self._set, rows[block], words[block], odd[block]))
        return words, odd

    def multiples_table(self, base: NativePoints, window: int, windows: int) -> Rows:
        """Return d * 2^(window * i) * base, d up to 2^(window - 1), in row ``i * (2^(window - 1) + 1) + d``.

        Shapes: result: uint64[windows * (2^(window - 1) + 1), 16], affine.
        """
        entries = (1 << (window - 1)) + 1
        bases, table = _empty(windows, _POINT_WORDS), _empty(windows * entries, _AFFINE_WORDS)
        _curve.ladder(self._set, self._rows(base), window, bases)

        def fill(block: slice) -> None:
            extended = _empty((block.stop - block.start) * entries, _POINT_WORDS)
            _curve.table(self._set, bases[block], window, extended)
            _curve.narrow(self._set, extended, table[block.start * entries : block.stop * entries])

        run_blocks(fill, row_blocks(windows, -(-windows // _LANES), _LANES), self.threads)
        return table

    def table_multiples(self, table: Rows, window: int, windows: int, scalars: NDArray[np.uint8]) -> NativePoints:
        """Multiply the base of a table by each scalar, which ``windows`` of its windows have to hold.

        Shapes: scalars: uint8[n, width], without gaps; result: Points[n].
        """
        width, out = scalars.shape[1], _empty(len(scalars), _POINT_WORDS)
        self._by_rows(
            len(scalars),
            lambda block: _curve.fixed_mul(self._set, table, window, windows, scalars[block], width, out[block]),
        )
        return self._points(out)

    def _sums(self, rows: Rows, order: NDArray[np.int32], hands: list[NDArray[np.int64]], n_tasks: int) -> Rows:
        out = _empty(n_tasks, _POINT_WORDS)
        run_blocks(lambda hand: _curve.sums(self._set, rows, order, hand, out), hands, self.threads)
        return out

    def _read(self, operation: Callable[..., bool], rows: NDArray[np.uint8], words: int, error: str) -> NativePoints:
        """Raises: ProtocolError with that text if a row is refused."""
        rows, out = np.ascontiguousarray(rows), _empty(len(rows), words)
        taken: list[bool] = []
        self._by_rows(len(rows), lambda block: taken.append(operation(self._set, rows[block], out[block])))
        if not all(taken):
            raise ProtocolError(error)
        return self._points(out)

    def _apply(self, operation: Callable[..., object], out: NDArray[_Word], *inputs: Any) -> NDArray[_Word]:
        """Run an operation on blocks of rows of its inputs, each with the same rows of ``out``; numbers are for all."""

        def run(block: slice) -> None:
            parts = (one[block] if isinstance(one, np.ndarray) else one for one in inputs)
            operation(self._set, *parts, out[block])

        self._by_rows(len(out), run)
        return out

    def _extended(self, rows: Rows) -> Rows:
        if rows.shape[1] == _POINT_WORDS:
            return rows
        return self._apply(_curve.widen, _empty(len(rows), _POINT_WORDS), rows)

    def _by_rows(self, n_rows: int, function: Callable[[slice], object]) -> None:
        run_blocks(function, row_blocks(n_rows, self.threads, _LANES), self.threads)

    def _points(self, rows: Rows) -> NativePoints:
        return NativePoints(rows, self.name)

    def _rows(self, points: NativePoints) -> Rows:
        if points.variant != self.name:
            raise ValueError("these points belong to another variant")
        return points.rows


class NativeColumn:
    """Affine points that come in batches."""

    def __init__(self, variant: str, n: int) -> None:
        self._points = NativePoints(_empty(n, _AFFINE_WORDS), variant)
        self._taken = 0

    def append(self, points: NativePoints) -> None:
        """Take the next points. Raises: ValueError for too many of them, or others than were read."""
        end = self._taken + len(points)
        if end > len(self._points) or points.rows.shape[1] != _AFFINE_WORDS or points.variant != self._points.variant:
            raise ValueError("a column takes points as they were read, and no more than it has room for")
        self._points.rows[self._taken : end] = points.rows
        self._taken = end

    def whole(self) -> NativePoints:
        """Return all points. Raises: ValueError before the last has come."""
        if self._taken != len(self._points):
            raise ValueError("a column lacks points")
        return self._points


class NativeFixedBase:
    """A table of multiples of one point, made when the first scalars come.

    The window suits the number of scalars seen so far: a wider one needs fewer additions for each scalar and a larger
    table.
    """

    def __init__(self, curve: NativeCurve, base: NativePoints) -> None:
        self._curve = curve
        self._base = base
        self._seen = 0
        self._width = 1
        self._made: tuple[Rows, int, int] | None = None  # table, window and windows, replaced together

    def mul(self, scalars: NDArray[np.uint8]) -> NativePoints:
        """Multiply the point by each scalar. Shapes: scalars: uint8[n, width <= 32]; result: Points[n]."""
        scalars = _checked(scalars)
        table, window = self._table_for(len(scalars), scalars.shape[1])
        return self._curve.table_multiples(table, window, n_windows(scalars.shape[1], window), scalars)

    def _table_for(self, n_scalars: int, width: int) -> tuple[Rows, int]:
        # No lock: a fork could find it held, and the child would wait for ever. Threads at worst make a table twice.
        self._seen += n_scalars
        self._width = max(self._width, width)
        made, window = self._made, best_window(self._width, self._seen)
        if made is None or made[2] < n_windows(width, made[1]) or window > made[1] + 1:
            windows = n_windows(self._width, window)
            made = self._made = self._curve.multiples_table(self._base, window, windows), window, windows
        return made[0], made[1]


def _checked(scalars: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return scalars without gaps. Raises: ValueError unless uint8[n, 1 to 32], each below the group order."""
    if scalars.dtype != np.uint8 or scalars.ndim != 2 or not 1 <= scalars.shape[1] <= SCALAR_BYTES:
        raise ValueError(f"scalars must be uint8[n, width], width 1 to {SCALAR_BYTES}")
    scalars = np.ascontiguousarray(scalars)
    if not _curve.all_below(scalars, scalars.shape[1], _ORDER_BYTES):
        raise ValueError("a scalar is not below the group order")
    return scalars


def _scale(scalars: NDArray[np.uint8], factor: bytes, shift: bytes, out: NDArray[np.uint8], block: slice) -> None:
    _curve.scale(scalars[block], factor, shift, out[block])


def _scalar_bytes(value: int) -> bytes:
    return (value % GROUP_ORDER).to_bytes(SCALAR_BYTES, "little")


def _empty(n_rows: int, words: int) -> Rows:
    """Return rows that begin on a cache line."""
    memory = np.empty(n_rows * words + _LINE_WORDS - 1, dtype=np.uint64)
    skip = -(memory.ctypes.data // 8) % _LINE_WORDS
    return memory[skip : skip + n_rows * words].reshape(n_rows, words)
