"""The CUDA backend: points in the memory of one GPU, and square roots on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import random_rows_below, widen
from he_processors.bignum.reference import check_index, check_rows, check_segments
from he_processors.cuda.arithmetic import chunk_passes
from he_processors.cuda.device import CURVE, Array, Device, guarded, open_devices
from he_processors.curve.interface import (
    AFFINE_BYTES,
    GROUP_ORDER,
    NOT_ON_CURVE,
    SCALAR_BYTES,
    Curve,
    base_point,
)
from he_processors.curve.reference import check_lengths, check_scalars
from he_processors.curve.registry import BACKENDS
from he_processors.errors import BackendUnavailable, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Points are rows of 32-bit words in one of two forms, 24 as read and 32 as made: see ``cuda/curve.cuh``. What needs a
# square root, and scalars modulo the group order, are the work of the fastest backend of the CPU.
#
# Security: what a kernel does and which addresses it reads do not depend on scalars. Scalars are erased from device
# memory after use. What the CPU does, and the planning of sums, is not in constant time.

READ_WORDS = 24
MADE_WORDS = 32
MULTIPLES = 8  # of a point, for digits of four bits
_DIGIT_BITS = 4
_MOST_DIGITS = 8 * SCALAR_BYTES // _DIGIT_BITS
_SHARE = 16  # rows that share one inversion
_SCRATCH_BYTES = 4 * MADE_WORDS * MULTIPLES  # of a row that is multiplied
_N_RANDOM = 5


@cache
def load() -> CudaCurve:
    """Return the curve on the first GPU of this machine.

    Raises:
        BackendUnavailable: CuPy, a driver, a device or the run-time compiler is missing or fails, or the device does
            not compute what the CPU computes.
    """
    curve = CudaCurve(open_devices()[0])
    wrong = first_disagreement(curve)
    if wrong is not None:
        raise BackendUnavailable(f"CUDA device 0 computes wrong {wrong}")
    return curve


def first_disagreement(curve: CudaCurve, source: RandomSource = OS_RANDOMNESS) -> str | None:
    """Return the first operation whose result differs from the CPU's, or None.

    Operands: the neutral point, the base point, its negative, and random multiples of it.
    """
    scalars = random_rows_below(_N_RANDOM, GROUP_ORDER, source)
    host = curve.host
    base = base_point(host)
    rows = host.to_affine(host.concat([host.identity(1), base, host.negate(base), host.fixed_base(base).mul(scalars)]))
    for name, operation in _operations(len(rows), random_rows_below(len(rows), GROUP_ORDER, source)):
        ours, theirs = (one.to_affine(operation(one, one.from_affine(rows))) for one in (curve, host))
        if not np.array_equal(ours, theirs):
            return name
    return None


def _operations(n: int, scalars: NDArray[np.uint8]) -> Iterator[tuple[str, Callable[[Any, Any], Any]]]:
    order, starts = np.tile(np.arange(n, dtype=np.int32)[::-1], 3), np.array([0, 0, 1, 3, 3 * n], dtype=np.int64)
    yield "entering and leaving", lambda curve, points: points
    yield "sums", lambda curve, points: curve.add(points, curve.add(points, points))
    yield "doubles", lambda curve, points: curve.negate(curve.double(points, 3))
    yield "segment sums", lambda curve, points: curve.segment_sums(order, starts, n)(points)
    yield "segment sums of sums", lambda curve, points: curve.segment_sums(order, starts, n)(curve.double(points, 1))
    yield "multiples of one base", lambda curve, points: curve.fixed_base(points[n - 1 :]).mul(scalars)
    yield "multiples", lambda curve, points: curve.mul(points, scalars)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CudaPoints:
    """Rows in device memory. Never written again. Shapes: rows: uint32[n, 24] (as read) or [n, 32] (as made)."""

    rows: Array
    device: Device

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def __getitem__(self, part: slice) -> CudaPoints:
        """Return some of the points."""
        return CudaPoints(self.device.xp.ascontiguousarray(self.rows[part]), self.device)

    def __repr__(self) -> str:
        return f"CudaPoints({len(self)} rows)"


class CudaCurve:
    """Batch arithmetic on edwards25519 on one device.

    Args:
        device: the device.
        host: the backend that decodes and encodes where that takes square roots; the CPU's fastest by default.
    """

    name = "cuda"
    threads = 1

    def __init__(self, device: Device, host: Curve | None = None) -> None:
        self.device, self.device_errors = device, device.errors
        self.host = BACKENDS.load(BACKENDS.first()) if host is None else host

    @guarded
    def from_affine(self, rows: NDArray[np.uint8]) -> CudaPoints:
        """Take points in. Shapes: rows: uint8[n, 64]. Raises: ProtocolError unless canonical and on the curve."""
        check_rows(rows, AFFINE_BYTES)
        raw = self._upload(np.ascontiguousarray(rows)).view(np.uint32)
        refused = self._upload(np.zeros(1, dtype=np.uint32))
        points = self._made("k_enter", len(rows), raw, refused, words=READ_WORDS)
        if self.device.download(refused)[0]:
            raise ProtocolError(NOT_ON_CURVE)
        return points

    @guarded
    def to_affine(self, points: CudaPoints) -> NDArray[np.uint8]:
        """Give points out in their one affine form. Shapes: result: uint8[n, 64]."""
        return np.ascontiguousarray(self.device.download(self._affine(points))).view(np.uint8)

    def from_compressed(self, rows: NDArray[np.uint8]) -> CudaPoints:
        """Decode points. Shapes: rows: uint8[n, 32]. Raises: ProtocolError unless canonical and on the curve."""
        return self.from_affine(self.host.to_affine(self.host.from_compressed(rows)))

    def from_ristretto(self, rows: NDArray[np.uint8]) -> CudaPoints:
        """Decode elements of ristretto255. Shapes: rows: uint8[n, 32]. Raises: ProtocolError for any other bytes."""
        return self.from_affine(self.host.to_affine(self.host.from_ristretto(rows)))

    def to_ristretto(self, points: CudaPoints) -> NDArray[np.uint8]:
        """Encode elements of ristretto255. Shapes: result: uint8[n, 32]."""
        return self.host.to_ristretto(self.host.from_affine(self.to_affine(points)))

    def from_uniform(self, rows: NDArray[np.uint8]) -> CudaPoints:
        """Derive elements of ristretto255 from uniform bytes. Shapes: rows: uint8[n, 64]; result: Points[n]."""
        return self.from_affine(self.host.to_affine(self.host.from_uniform(rows)))

    @guarded
    def identity(self, n: int) -> CudaPoints:
        """Return the neutral point ``n`` times."""
        rows = np.zeros((1, READ_WORDS), dtype=np.uint32)
        rows[0, [0, 8]] = 1  # y + x and y - x
        with self._active():
            return self._points(self.device.xp.repeat(self.device.upload(rows), n, axis=0))

    @guarded
    def take(self, points: CudaPoints, index: NDArray[np.int64]) -> CudaPoints:
        """Gather points. Shapes: index: int64[m]; result: Points[m]. Raises: IndexError out of range."""
        check_index(index, len(points))
        with self._active():
            return self._points(self._rows(points)[self.device.upload(np.asarray(index, dtype=np.int64))])

    @guarded
    def concat(self, parts: list[CudaPoints]) -> CudaPoints:
        """Join batches in order."""
        rows = [self._rows(part) for part in parts or [self.identity(0)]]
        if len({part.shape[1] for part in rows}) > 1:
            rows = [part if part.shape[1] == MADE_WORDS else self.double(self._points(part), 0).rows for part in rows]
        with self._active():
            return self._points(rows[0] if len(rows) == 1 else self.device.xp.concatenate(rows))

    @guarded
    def column(self, n: int) -> CudaColumn:
        """Set memory aside for ``n`` points that come in batches."""
        return CudaColumn(self._points(self._empty(n, READ_WORDS)))

    @guarded
    def add(self, a: CudaPoints, b: CudaPoints) -> CudaPoints:
        """Add point by point; ``a`` may be ``b``. Raises: ValueError if the lengths differ."""
        check_lengths(a, b)
        return self._made("k_add", len(a), *self._with_words(a), *self._with_words(b))

    def negate(self, points: CudaPoints) -> CudaPoints:
        """Return the negative of every point."""
        return self._doubled(points, 0, is_negative=True)

    def double(self, points: CudaPoints, times: int) -> CudaPoints:
        """Multiply every point by 2^times. Raises: ValueError if ``times`` is negative."""
        if times < 0:
            raise ValueError("times must not be negative")
        return self._doubled(points, times, is_negative=False)

    @guarded
    def segment_sums(
        self, order: NDArray[np.int32], starts: NDArray[np.int64], n_rows: int
    ) -> Callable[[CudaPoints], CudaPoints]:
        """Prepare sums of segments: order and chunks go to the device once for all columns of a row.

        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; its result: Points[n_segments].
        """
        check_segments(order, starts, n_rows)
        begin, end = int(starts[0]), int(starts[-1])
        places: Array | None = self._upload(np.ascontiguousarray(order[begin:end], dtype=np.int32))
        passes = []
        for plan in chunk_passes(np.asarray(starts, dtype=np.int64) - begin, self.device, CURVE.lanes):
            passes.append((places, self._upload(plan.begin), self._upload(plan.length), self._upload(plan.target)))
            places = None

        return partial(self._summed, passes, n_rows)

    def fixed_base(self, base: CudaPoints) -> CudaFixedBase:
        """Prepare multiples of one point. Shapes: base: Points[1]. Raises: ValueError for any other number."""
        if len(base) != 1:
            raise ValueError("a fixed base is one point")
        return CudaFixedBase(self, base)

    @guarded
    def mul(self, points: CudaPoints, scalars: NDArray[np.uint8]) -> CudaPoints:
        """Multiply every point by a scalar of its own. Shapes: scalars: uint8[n, 32]; result: Points[n]."""
        check_rows(scalars, SCALAR_BYTES)
        check_scalars(scalars)
        check_lengths(points, scalars)
        return self._multiplied(points, scalars)

    @guarded
    def mul_by_each(self, points: CudaPoints, scalars: NDArray[np.uint8]) -> list[CudaPoints]:
        """Multiply every point by each of a few scalars. Shapes: scalars: uint8[k, 32]; result: k times Points[n]."""
        check_rows(scalars, SCALAR_BYTES)
        check_scalars(scalars)
        return [self._multiplied(points, scalar[None]) for scalar in scalars]

    def scale(self, scalars: NDArray[np.uint8], factors: list[int], shift: int) -> list[NDArray[np.uint8]]:
        """Return factor * scalar + shift modulo the group order. Shapes: scalars: uint8[n, 32]; results: likewise."""
        return self.host.scale(scalars, factors, shift)

    @guarded
    def equal(self, a: CudaPoints, b: CudaPoints) -> NDArray[np.bool_]:
        """Compare point by point, as points of the curve. Shapes: result: bool[n]."""
        check_lengths(a, b)
        with self._active():
            return self.device.download((self._affine(a) == self._affine(b)).all(axis=1))

    @guarded
    def y_words(self, points: CudaPoints) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the low 64 bits of each y and the lowest bit of each x. Shapes: uint64[n], uint8[n]."""
        with self._active():
            keys = self.device.download(self._affine(points)[:, [0, 8, 9]])
        return keys[:, 1] | keys[:, 2].astype(np.uint64) << np.uint64(32), (keys[:, 0] & 1).astype(np.uint8)

    @guarded
    def multiples_table(self, base: CudaPoints) -> Array:
        """Return (d + 1) 16^j times a point in row ``8 j + d``. Shapes: base: Points[1]; result: uint32[512, 24]."""
        powers = [base]
        for _ in range(_MOST_DIGITS - 1):
            powers.append(self.double(powers[-1], _DIGIT_BITS))
        counts = np.tile(np.arange(1, MULTIPLES + 1), _MOST_DIGITS)
        order = np.repeat(np.repeat(np.arange(_MOST_DIGITS), MULTIPLES), counts).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        sums = self.segment_sums(order, starts, _MOST_DIGITS)(self.concat(powers))
        return self.from_affine(self.to_affine(sums)).rows

    @guarded
    def table_multiples(self, table: Array, scalars: NDArray[np.uint8]) -> CudaPoints:
        """Multiply the base of a table by each scalar. Shapes: scalars: uint8[n, width]; result: Points[n]."""
        digits = min(_MOST_DIGITS, scalars.shape[1] * 8 // _DIGIT_BITS + 1)
        words = self._upload(shifted_digits(scalars, digits))
        points = self._made("k_fixed", len(scalars), table, words, np.uint32(digits))
        words.fill(0)
        return points

    def _multiplied(self, points: CudaPoints, scalars: NDArray[np.uint8]) -> CudaPoints:
        """Multiply points by scalars, or by the only one; rows at a time, as scratch memory allows."""
        rows, words = self._with_words(points)
        uploaded, step = self._upload(shifted_digits(scalars, _MOST_DIGITS)), int(len(scalars) == len(points))
        at_once, parts = max(1, self.device.block_bytes // _SCRATCH_BYTES), [self._points(self._empty(0, MADE_WORDS))]
        for start in range(0, len(points), at_once):
            part = rows[start : start + at_once]
            scratch = self._empty(len(part) * MULTIPLES, MADE_WORDS)
            own = uploaded[step * start :]
            parts.append(self._made("k_mul", len(part), part, words, own, np.uint64(step), scratch))
        uploaded.fill(0)
        return parts[1] if len(parts) == 2 else self.concat(parts)

    @guarded
    def _summed(self, passes: list[tuple[Array, ...]], n_rows: int, points: CudaPoints) -> CudaPoints:
        check_lengths(points, range(n_rows))
        for planned in passes:
            rows, words = self._with_words(points)
            kernel = "k_sum_read" if words == READ_WORDS else "k_sum_made"
            points = self._made(kernel, len(planned[-1]), rows, *planned)
        return points

    @guarded
    def _doubled(self, points: CudaPoints, times: int, *, is_negative: bool) -> CudaPoints:
        flags = np.uint32(times), np.uint32(is_negative)
        return self._made("k_double", len(points), *self._with_words(points), *flags)

    def _affine(self, points: CudaPoints) -> Array:
        """Return x and y. Shapes: result: uint32[n, 16], canonical."""
        raw, n = self._empty(len(points), AFFINE_BYTES // 4), len(points)
        threads = -(-n // _SHARE)
        self._launch("k_leave", threads, raw, *self._with_words(points), np.uint64(threads), np.uint64(n))
        return raw

    def _made(self, kernel: str, n: int, *arguments: Any, words: int = MADE_WORDS) -> CudaPoints:
        out = self._empty(n, words)
        self._launch(kernel, n, out, *arguments, np.uint64(n))
        return self._points(out)

    def _launch(self, kernel: str, threads: int, *arguments: Any) -> None:
        if threads:
            with self._active():
                self.device.launch(CURVE, kernel, threads, arguments)

    def _upload(self, array: NDArray[Any]) -> Array:
        with self._active():
            return self.device.upload(array)

    def _empty(self, n: int, words: int) -> Array:
        with self._active():
            return self.device.xp.empty((n, words), dtype=np.uint32)

    def _active(self) -> AbstractContextManager[Any]:
        return self.device.active()

    def _points(self, rows: Array) -> CudaPoints:
        return CudaPoints(rows, self.device)

    def _rows(self, points: CudaPoints) -> Array:
        if getattr(points, "device", None) is not self.device:
            raise ValueError("these points belong to another backend")
        return points.rows

    def _with_words(self, points: CudaPoints) -> tuple[Array, np.uint32]:
        rows = self._rows(points)
        return rows, np.uint32(rows.shape[1])


class CudaColumn:
    """Points that come in batches, as they were read."""

    def __init__(self, points: CudaPoints) -> None:
        self.device_errors = points.device.errors
        self._points, self._taken = points, 0

    @guarded
    def append(self, points: CudaPoints) -> None:
        """Take the next points. Raises: ValueError for too many of them, or others than were read."""
        end = self._taken + len(points)
        is_ours = getattr(points, "device", None) is self._points.device and points.rows.shape[1] == READ_WORDS
        if end > len(self._points) or not is_ours:
            raise ValueError("a column takes points as they were read, and no more than it has room for")
        with points.device.active():
            self._points.rows[self._taken : end] = points.rows
        self._taken = end

    def whole(self) -> CudaPoints:
        """Return all points. Raises: ValueError before the last has come."""
        if self._taken != len(self._points):
            raise ValueError("a column lacks points")
        return self._points


class CudaFixedBase:
    """A table of multiples of one point, made when the first scalars come: small, for all of it is read each time."""

    def __init__(self, curve: CudaCurve, base: CudaPoints) -> None:
        self._curve, self._base = curve, base
        self._table: Array | None = None

    def mul(self, scalars: NDArray[np.uint8]) -> CudaPoints:
        """Multiply the point by each scalar. Shapes: scalars: uint8[n, width <= 32]; result: Points[n]."""
        check_scalars(scalars)
        if self._table is None:  # no lock, as in native.py: threads at worst make a table twice
            self._table = self._curve.multiples_table(self._base)
        return self._curve.table_multiples(self._table, scalars)


def shifted_digits(scalars: NDArray[np.uint8], digits: int) -> NDArray[np.uint32]:
    """Add 8 to each of the lowest digits of four bits: less 8 again, they are signed and stand for the scalar.

    Shapes: scalars: uint8[n, width <= 32], below 2^256 less what is added; result: uint32[n, 8].
    """
    words = widen(scalars, SCALAR_BYTES).copy().view("<u8")
    eights = np.frombuffer(((16**digits - 1) // 15 * 8).to_bytes(SCALAR_BYTES, "little"), dtype="<u8")
    carry = np.zeros(len(words), dtype=np.uint64)
    for word, added in zip(words.T, eights, strict=True):
        total = word + added
        word[:] = total + carry
        carry = ((total < added) | (word < carry)).astype(np.uint64)
    return words.view("<u4")
