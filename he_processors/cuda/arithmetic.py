"""Modular arithmetic on one device, and the plans that its kernels follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import byte_width, rows_from_ints
from he_processors.bignum.native import cut_segments, sliding_window
from he_processors.cuda.device import WORD_BITS, Array, Device, ShapePair

# Plans that the CUDA kernels follow, made by numpy on the host.


_LONGEST_CHUNK = 512
_SHORTEST_CHUNK = 4
_CHUNKS_PER_GROUP = 8
_WIDEST_WINDOW = 10

_SQUARE, _MULTIPLY, _SAVE, _TAKE = 0, 1 << 16, 2 << 16, 3 << 16


@dataclass(frozen=True, slots=True)
class Chunks:
    """One launch of segmented products: chunk c multiplies positions begin[c] to begin[c] + length[c].

    Longest first, so that the groups of a warp, which wait for each other, end together. ``target[c]`` is the
    chunk's place in segment order, ``starts`` bounds each segment's chunks there.

    Shapes: begin: int64[c]; length, target: int32[c]; starts: int64[n_segments + 1].
    """

    begin: NDArray[np.int64]
    length: NDArray[np.int32]
    target: NDArray[np.int32]
    starts: NDArray[np.int64]


def chunk_rows(n_positions: int, resident_groups: int) -> int:
    """Return how many rows one chunk should take: several chunks for each group that the device runs at once."""
    return min(max(n_positions // (_CHUNKS_PER_GROUP * resident_groups), _SHORTEST_CHUNK), _LONGEST_CHUNK)


def plan_chunks(starts: NDArray[np.int64], rows: int) -> Chunks:
    """Cut segments into chunks of at most ``rows`` rows, at least one each, as even as they can be.

    Shapes: starts: int64[n_segments + 1].
    """
    tasks, chunk_starts = cut_segments(starts, rows)
    # 16-bit keys sort by radix, in linear time.
    longest_first = np.argsort((rows - tasks[:, 1]).astype(np.uint16), kind="stable")
    return Chunks(
        begin=tasks[longest_first, 0],
        length=tasks[longest_first, 1].astype(np.int32),
        target=longest_first.astype(np.int32),
        starts=chunk_starts,
    )


def chunk_passes(starts: NDArray[np.int64], device: Device, lanes: int) -> Iterator[Chunks]:
    """Plan launches until one chunk of each segment is left: each takes the results of the one before, in order.

    Shapes: starts: int64[n_segments + 1], from 0.

    Args:
        lanes: that work on one number.
    """
    n_segments, n_chunks = len(starts) - 1, -1
    resident_groups = device.multiprocessors * _WARPS * _LANES_PER_WARP // lanes
    while n_chunks != n_segments:
        plan = plan_chunks(starts, chunk_rows(int(starts[-1]), resident_groups))
        n_chunks, starts = len(plan.target), plan.starts
        yield plan


def segment_slabs(starts: NDArray[np.int64], max_positions: int) -> Iterator[tuple[int, int]]:
    """Cut segments into runs of at most ``max_positions`` positions, at least one segment each."""
    n_segments = starts.size - 1
    begin = 0
    while begin < n_segments:
        end = int(np.searchsorted(starts, starts[begin] + max_positions, side="right")) - 1
        end = min(max(end, begin + 1), n_segments)
        yield begin, end
        begin = end


@dataclass(frozen=True, slots=True, repr=False)
class PowerProgram:
    """One constant power as instructions of k_power. Secret if the exponent is.

    Shapes: codes: int32[n_steps].
    """

    codes: NDArray[np.int32]
    slots: int


def power_program(exponent: int) -> PowerProgram:
    """Plan a power with a positive exponent: odd powers first, then a sliding window."""
    steps, n_odd = sliding_window(exponent)
    codes = [_SAVE]
    if n_odd > 1:
        codes += [_SQUARE, _SAVE + n_odd, _TAKE]
    for entry in range(1, n_odd):
        codes += [_MULTIPLY + n_odd, _SAVE + entry]
    codes.append(_TAKE + int(steps[0, 1]))
    for squarings, entry in steps[1:].tolist():
        codes += [_SQUARE] * squarings
        if entry >= 0:
            codes.append(_MULTIPLY + entry)
    return PowerProgram(np.array(codes, dtype=np.int32), n_odd + 1)


def table_window(exponent_bits: int, n_exponents: int, row_bytes: int, table_bytes: int) -> int:
    """Return the window of a fixed-base table that makes building and using it cheapest, within a size."""

    def entries(window: int) -> int:
        return -(-exponent_bits // window) << window

    def products(window: int) -> int:
        return entries(window) * window // 2 + -(-exponent_bits // window) * n_exponents

    windows = range(1, _WIDEST_WINDOW + 1)
    return min((w for w in windows if w == 1 or entries(w) * row_bytes <= table_bytes), key=products)


def table_segments(window: int, n_windows: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Describe a fixed-base table as segmented products of the powers base^(2^j).

    Entry ``i << window | d`` multiplies the powers j = i * window + k over the bits k of the digit d.
    Shapes: result: order int32[m]; starts int64[(n_windows << window) + 1].
    """
    digits, bits = np.nonzero(np.arange(1 << window)[:, None] >> np.arange(window) & 1)
    order = (np.arange(n_windows, dtype=np.int32)[:, None] * window + bits.astype(np.int32)).reshape(-1)
    lengths = np.tile(np.bincount(digits, minlength=1 << window), n_windows)
    return order, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


# Modular arithmetic on one device: one method for each kernel, on whole arrays of rows.
#
# Rows are in Montgomery form, ``uint32[n, limbs]``, those called raw are plain integers. Every method queues its work
# and returns; the caller has made the device current.


_LANES_PER_WARP = 32
_SCHEDULERS = 4  # of one multiprocessor, each with its own warps
_WARPS = 16  # of one multiprocessor at once, as the kernels' registers allow
_MOST_GROUPS_OF_A_BLOCK = 64


class DeviceArithmetic:
    """Kernels of one shape and modulus on one device."""

    def __init__(self, device: Device, modulus: int, shapes: ShapePair) -> None:
        self.device = device
        self.shapes = shapes
        self.row_bytes = shapes.narrow.row_bytes
        self._modulus = gmpy2.mpz(modulus)
        self._n_prime = np.uint32(-pow(modulus, -1, 1 << WORD_BITS) % (1 << WORD_BITS))
        radix = 1 << (WORD_BITS * shapes.limbs)
        words = rows_from_ints([modulus, radix % modulus, radix * radix % modulus], self.row_bytes).view("<u4")
        with device.active():
            self._n, self._one, self._r_squared = (device.upload(row) for row in words[:, None])

    def empty(self, n_rows: int) -> Array:
        """Return rows yet to be written."""
        return self.device.xp.empty((n_rows, self.shapes.limbs), dtype=np.uint32)

    def ones(self, n_rows: int) -> Array:
        """Return rows that are all 1."""
        return self.device.xp.repeat(self._one, n_rows, axis=0)

    def upload(self, rows: NDArray[np.uint8]) -> Array:
        """Copy wire rows to the device, padded. Shapes: rows: uint8[n, at most row_bytes]; result: raw rows."""
        uploaded = self.device.upload(np.ascontiguousarray(rows))
        if rows.shape[1] < self.row_bytes:
            padded = self.device.xp.zeros((len(rows), self.row_bytes), dtype=np.uint8)
            padded[:, : rows.shape[1]] = uploaded
            uploaded = padded
        return uploaded.view(np.uint32)

    def enter(self, raw: Array, too_large: Array | None = None) -> Array:
        """Bring raw rows into Montgomery form, reduced. Shapes: too_large: uint32[1], set to 1 if a row >= modulus."""
        flag = self.device.xp.zeros(1, dtype=np.uint32) if too_large is None else too_large
        out = self.empty(len(raw))
        self._launch("k_enter", len(raw), out, raw, self._r_squared, flag, np.uint64(len(raw)))
        return out

    def leave(self, rows: Array) -> Array:
        """Bring rows out of Montgomery form, raw and canonical."""
        raw = self.empty(len(rows))
        self._launch("k_leave", len(rows), raw, rows, np.uint64(len(rows)))
        return raw

    def multiply(self, a: Array, b: Array) -> Array:
        """Multiply row by row, or every row of ``a`` by the only row of ``b``."""
        return self._combine("k_mul", a, b)

    def add(self, a: Array, b: Array) -> Array:
        """Add row by row, or the only row of ``b`` to every row of ``a``."""
        return self._combine("k_add", a, b)

    def shift(self, rows: Array) -> Array:
        """Multiply every row by 2^(8 * row_bytes)."""
        return self._combine("k_mul", rows, self._r_squared)

    def segment_products(self, rows: Array, order: Array | None, starts: NDArray[np.int64]) -> Array:
        """Multiply the rows of each segment of a row order, in passes over chunks of it.

        Shapes: order: int32[m] on the device, or None for 0, 1, 2, ...; starts: int64[n_segments + 1], from 0.
        """
        upload = self.device.upload
        for plan in chunk_passes(starts, self.device, self.shapes.narrow.lanes):
            n_chunks = len(plan.target)
            out = self.empty(n_chunks)
            chunks = (upload(plan.begin), upload(plan.length), upload(plan.target), np.uint64(n_chunks))
            self._launch("k_segprod", n_chunks, out, rows, order, *chunks, self._one)
            rows, order = out, None
        return rows

    def power(self, rows: Array, program: PowerProgram, scratch_bytes: int) -> Array:
        """Raise every row to the program's exponent, which is erased from the device afterwards."""
        codes = self.device.upload(program.codes)
        steps, slots = np.uint32(len(program.codes)), np.uint32(program.slots)
        out = self.empty(len(rows))
        rows_at_once = max(1, scratch_bytes // (program.slots * self.row_bytes))
        for start in range(0, len(rows), rows_at_once):
            part = rows[start : start + rows_at_once]
            # Groups without a row save numbers too, so there is scratch for whole thread blocks.
            n_places = -(-len(part) // _MOST_GROUPS_OF_A_BLOCK) * _MOST_GROUPS_OF_A_BLOCK
            scratch = self.empty(n_places * program.slots)
            target = out[start : start + len(part)]
            self._launch("k_power", len(part), target, part, codes, steps, scratch, slots, np.uint64(len(part)))
        codes.fill(0)
        return out

    def horner(self, rows: Array, group: int, shift_bits: int) -> Array:
        """Pack consecutive rows, ``group`` at a time; see ``ModBatch.horner``."""
        n_groups = -(-len(rows) // group)
        out = self.empty(n_groups)
        sizes = np.uint64(len(rows)), np.uint32(group), np.uint32(shift_bits), np.uint64(n_groups)
        self._launch("k_horner", n_groups, out, rows, *sizes, self._one)
        return out

    def power_table(self, base: int, window: int, n_windows: int) -> Array:
        """Return base^(d * 2^(window * i)) in row ``i << window | d``. Shapes: result: rows[n_windows << window]."""
        order, starts = table_segments(window, n_windows)
        values, value = [], gmpy2.mpz(base)
        for _ in range(window * n_windows):  # each the square of the one before: no work for a device
            values.append(int(value))
            value = value * value % self._modulus
        powers = self.enter(self.upload(rows_from_ints(values, byte_width(int(self._modulus)))))
        return self.segment_products(powers, self.device.upload(order), starts)

    def table_powers(self, table: Array, window: int, n_windows: int, exponents: NDArray[np.uint32]) -> Array:
        """Raise the base of a table to each exponent; the exponents are erased from the device afterwards.

        Shapes: exponents: uint32[n, n_words].
        """
        words = self.device.upload(exponents)
        out = self.empty(len(exponents))
        sizes = np.uint32(exponents.shape[1]), np.uint32(window), np.uint32(n_windows), np.uint64(len(exponents))
        self._launch("k_fixedbase", len(exponents), out, table, words, *sizes)
        words.fill(0)
        return out

    def _combine(self, kernel: str, a: Array, b: Array) -> Array:
        out = self.empty(len(a))
        step = np.uint64(0 if len(b) == 1 else 1)
        self._launch(kernel, len(a), out, a, b, step, np.uint64(len(a)))
        return out

    def _launch(self, kernel: str, n_numbers: int, *arguments: Any) -> None:
        if n_numbers == 0:
            return
        warps = -(-n_numbers * self.shapes.narrow.lanes // _LANES_PER_WARP)
        is_small = warps < _SCHEDULERS * self.device.multiprocessors
        shape = self.shapes.wide if is_small else self.shapes.narrow
        self.device.launch(shape, kernel, n_numbers, (*arguments, self._n, self._n_prime))
