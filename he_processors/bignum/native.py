"""The native backend: C kernels for AVX512-IFMA, AVX2 and any 64-bit machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from he_processors._native import extension
from he_processors.bignum import reference
from he_processors.bignum.interface import byte_width, default_threads, row_blocks, run_blocks
from he_processors.errors import BackendUnavailable, ProtocolError

# Plans that the native kernels follow: how to cut segments, which windows powers use.


# 2^11 rows of 2048 bits are 670 KB: one window of the table still fits the second-level cache beside other things.
_WIDEST_TABLE_WINDOW = 11
_LARGEST_TABLE_BYTES = 96 << 20
_WIDEST_SLIDING_WINDOW = 7
_LANES = 8
_SHORTEST_CHUNK, _LONGEST_CHUNK = 16, 512
_CHUNKS_PER_LANE = 8


def cut_segments(starts: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut segments of a row order into tasks of at most ``chunk`` rows, as even as they can be.

    Shapes: starts: int64[n_segments + 1]; result: tasks int64[n_tasks, 3] of (start, length, number of the task), in
    segment order, at least one for each segment, and where each segment's tasks start: int64[n_segments + 1].
    """
    lengths = np.diff(starts)
    n_tasks = np.maximum(1, -(-lengths // chunk))
    task_starts = np.concatenate([[0], np.cumsum(n_tasks)]).astype(np.int64)
    segment = np.repeat(np.arange(len(lengths)), n_tasks)
    number = np.arange(task_starts[-1])
    ordinal = number - task_starts[segment]
    begin = lengths[segment] * ordinal // n_tasks[segment]
    end = lengths[segment] * (ordinal + 1) // n_tasks[segment]
    return np.stack([starts[segment] + begin, end - begin, number], axis=1), task_starts


SegmentPass = tuple[NDArray[np.int32], list[NDArray[np.int64]], int]
"""A row order, its tasks as dealt out to the threads, and how many these are."""


def segment_passes(
    order: NDArray[np.int32], starts: NDArray[np.int64], threads: int, shortest: int
) -> list[SegmentPass]:
    """Plan segmented products: each pass works on the results of the one before, the last gives one for each segment.

    Long segments are cut into chunks, of at least ``shortest`` rows where there are so many, so that one of them cannot
    leave the other lanes idle. Cutting costs no products: a segment of k rows takes k - 1 of them anyway. Chunks are
    dealt out to the threads in turn, longest first: each gets as many long ones.

    Shapes: order: int32[m]; starts: int64[n_segments + 1], checked.
    """
    order, starts = np.ascontiguousarray(order, dtype=np.int32), np.asarray(starts, dtype=np.int64)
    chunks = threads * _LANES * _CHUNKS_PER_LANE
    chunk = int(np.clip(int(starts[-1] - starts[0]) // chunks, shortest, _LONGEST_CHUNK))
    passes: list[SegmentPass] = []
    while True:
        tasks, chunk_starts = cut_segments(starts, chunk)
        longest_first = np.argsort(-tasks[:, 1], kind="stable")
        n_hands = max(1, min(threads, len(tasks) // _LANES))
        hands = [np.ascontiguousarray(tasks[longest_first[hand::n_hands]]) for hand in range(n_hands)]
        passes.append((order, hands, len(tasks)))
        if len(tasks) == len(starts) - 1:
            return passes
        order, starts = np.arange(len(tasks), dtype=np.int32), chunk_starts


def best_window(exponent_bits: int, n_exponents: int, row_bytes: int) -> int:
    """Return the window that makes building a fixed-base table and using it ``n_exponents`` times cheapest."""

    def rows(window: int) -> int:
        return -(-exponent_bits // window) << window

    def products(window: int) -> int:
        return rows(window) + -(-exponent_bits // window) * n_exponents

    windows = range(1, _WIDEST_TABLE_WINDOW + 1)
    return min((w for w in windows if w == 1 or rows(w) * row_bytes <= _LARGEST_TABLE_BYTES), key=products)


def sliding_window(exponent: int) -> tuple[NDArray[np.int32], int]:
    """Plan a power by a sliding window.

    Starting from 1, each step (squarings, entry) squares so often and then multiplies by the odd power
    ``2 * entry + 1`` of the base; entry -1 multiplies by nothing.

    Shapes: result: int32[n_steps, 2] and the number of odd powers that are used, at least 1.
    Reference: Handbook of Applied Cryptography, algorithm 14.85.
    """
    n_bits = exponent.bit_length()
    window = min(range(1, _WIDEST_SLIDING_WINDOW + 1), key=lambda w: (1 << (w - 1)) + n_bits / (w + 1))
    bits = bin(exponent)[2:] if exponent else ""
    steps: list[tuple[int, int]] = []
    squarings = 0
    position = 0
    while position < len(bits):
        if bits[position] == "0":
            squarings += 1
            position += 1
            continue
        digits = bits[position : position + window].rstrip("0")
        steps.append((squarings + len(digits) if steps else 0, int(digits, 2) >> 1))
        squarings = 0
        position += len(digits)
    if squarings:
        steps.append((squarings, -1))
    return np.array(steps, dtype=np.int32).reshape(-1, 2), 1 << (window - 1)


# The native backend: C kernels for AVX512-IFMA, AVX2 and any 64-bit machine.
#
# The extension is optional. ``load(variant)`` raises ``BackendUnavailable`` where it was not built or where the
# processor (or its operating system) lacks the instructions.
#
# Residues are rows of Montgomery limbs, ``uint64[n, limbs]`` (``uint32`` for AVX2); see ``_native/bignum.h`` for the
# representation. Besides the interface, ``NativeBatch`` offers ``scale``, ``add`` and ``from_wide`` (see
# ``interface.py``).
#
# Security: nothing here runs in constant time. Fixed-base tables are indexed by digits of the exponent and
# ``pow_const`` follows the bits of its exponent, so that someone who shares the machine's caches with the key owner
# could learn about them; that adversary is outside the threat model (SECURITY.md).


_bignum = extension("_bignum")

Limbs = NDArray[np.uint64] | NDArray[np.uint32]

_MIN_LIMBS = 8
_SLACK_BITS = 4  # R is at least 2^4 times the scaled modulus: a sum of two products may enter a product


def instruction_sets() -> tuple[str, ...]:
    """Return the variants that run on this machine, fastest first; none if the extension was not built."""
    return () if _bignum is None else tuple(name for name, _, _ in _bignum.instruction_sets())


def load(variant: str, threads: int | None = None) -> Callable[[int], NativeBatch]:
    """Return the factory ``NativeBatch(modulus)`` of one variant: ``ifma``, ``avx2`` or ``portable``.

    Args:
        variant: the instruction set.
        threads: how many threads share a batch; by default ``VEILBOOST_THREADS`` or one for each core.

    Raises:
        BackendUnavailable: the extension was not built or this machine lacks the instructions.
    """
    if _bignum is None:
        raise BackendUnavailable("the native extension was not built")
    if variant not in instruction_sets():
        raise BackendUnavailable(f"this machine does not run the {variant} instructions")
    return partial(NativeBatch, variant=variant, threads=threads)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NativeResidues:
    """Rows of limbs, and the variant and modulus that they belong to. Shapes: limbs: uint64 or uint32[n, limbs].

    Security: a modulus may be secret (the square of a prime), as may the residues; neither is shown by ``repr``.
    """

    limbs: Limbs
    kind: tuple[str, int]

    def __len__(self) -> int:
        return int(self.limbs.shape[0])

    def __repr__(self) -> str:
        return f"NativeResidues({len(self)} rows)"


class NativeBatch:
    """Batch arithmetic modulo one odd modulus in C.

    Batches may be used by several threads at once; results never share memory with inputs.
    """

    def __init__(self, modulus: int, *, variant: str, threads: int | None = None) -> None:
        reference.check_modulus(modulus)
        if threads is not None and threads < 1:
            raise ValueError("threads must be at least 1")
        layout = {name: (bits, size) for name, bits, size in _bignum.instruction_sets()}
        limb_bits, limb_bytes = layout[variant]
        self.name = variant
        self.modulus = modulus
        self.width = byte_width(modulus)
        self.threads = default_threads() if threads is None else threads
        scaled = modulus * (-pow(modulus, -1, 1 << limb_bits) % (1 << limb_bits))
        self._n_limbs = max(_MIN_LIMBS, -(-(scaled.bit_length() + _SLACK_BITS) // limb_bits))
        self.row_bytes = self._n_limbs * limb_bytes
        self._dtype = np.dtype(np.uint64 if limb_bytes == 8 else np.uint32)
        self._kind = (variant, modulus)
        radix = 1 << (limb_bits * self._n_limbs)
        constants = (scaled + 1, radix % modulus, radix * radix % modulus)
        self._handle = _bignum.modulus(
            variant,
            self._n_limbs,
            modulus.to_bytes(self.width, "little"),
            *(value.to_bytes((value.bit_length() + 7) // 8, "little") for value in constants),
        )

    def from_wire(self, rows: NDArray[np.uint8]) -> NativeResidues:
        """Take residues in. Shapes: rows: uint8[n, width]. Raises: ProtocolError if a value >= modulus."""
        reference.check_rows(rows, self.width)
        rows = np.ascontiguousarray(rows)
        if _bignum.first_not_below(rows, self.width, self.modulus.to_bytes(self.width, "little")) >= 0:
            raise ProtocolError("a residue is not below its modulus")
        return self.from_wide(rows)

    def from_wide(self, rows: NDArray[np.uint8]) -> NativeResidues:
        """Take integers of any width in, reduced by the modulus.

        Shapes: rows: uint8[n, any width], little-endian; result: Residues[n].
        """
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] < 1:
            raise ValueError("rows must be uint8[n, width]")
        rows = np.ascontiguousarray(rows)
        out = self._empty(len(rows))
        self._by_rows(len(rows), lambda block: _bignum.enter(self._handle, rows[block], rows.shape[1], out[block]))
        return self._residues(out)

    def to_wire(self, residues: NativeResidues) -> NDArray[np.uint8]:
        """Give residues out in canonical form. Shapes: result: uint8[n, width]."""
        limbs = self._limbs(residues)
        out = np.empty((len(limbs), self.width), dtype=np.uint8)
        self._by_rows(len(limbs), lambda block: _bignum.leave(self._handle, limbs[block], out[block]))
        return out

    def take(self, residues: NativeResidues, index: NDArray[np.int64]) -> NativeResidues:
        """Gather rows. Shapes: index: int64[m]; result: Residues[m]. Raises: IndexError out of range."""
        reference.check_index(index, len(residues))
        return self._residues(self._limbs(residues)[index])

    def concat(self, parts: list[NativeResidues]) -> NativeResidues:
        """Join batches in order."""
        return self._residues(np.concatenate([self._empty(0), *(self._limbs(part) for part in parts)]))

    def mul(self, a: NativeResidues, b: NativeResidues) -> NativeResidues:
        """Multiply element by element; ``a`` and ``b`` may be the same object. Raises: ValueError on lengths."""
        if len(a) != len(b):
            raise ValueError("batches of different length cannot be multiplied")
        return self._combine(_bignum.mul, a, b)

    def scale(self, residues: NativeResidues, factor: NativeResidues) -> NativeResidues:
        """Multiply every row by one row. Shapes: factor: Residues[1]; result: Residues[n]."""
        if len(factor) != 1:
            raise ValueError("the factor must be a single residue")
        return self._combine(_bignum.mul, residues, factor)

    def add(self, a: NativeResidues, b: NativeResidues) -> NativeResidues:
        """Add element by element. Shapes: a, b: Residues[n]; or b: Residues[1], added to every row."""
        if len(b) not in (1, len(a)):
            raise ValueError("batches of different length cannot be added")
        return self._combine(_bignum.add, a, b)

    def segprod(self, residues: NativeResidues, order: NDArray[np.int32], starts: NDArray[np.int64]) -> NativeResidues:
        """Multiply the rows of each segment of a row order, in passes over chunks of it; an empty segment gives 1.

        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; result: Residues[n_segments].
        """
        limbs = self._limbs(residues)
        reference.check_segments(order, starts, len(limbs))
        for of_pass in segment_passes(order, starts, self.threads, _SHORTEST_CHUNK):
            limbs = self._products(limbs, *of_pass)
        return self._residues(limbs)

    def fixed_base(self, base: int, exponent_bits: int) -> NativeFixedBase:
        """Prepare powers of one base for exponents of at most ``exponent_bits`` bits."""
        return NativeFixedBase(self, base, exponent_bits)

    def pow_const(self, residues: NativeResidues, exponent: int) -> NativeResidues:
        """Raise every row to the same non-negative exponent. Raises: ValueError if it is negative."""
        if exponent < 0:
            raise ValueError("exponent must not be negative")
        limbs = self._limbs(residues)
        steps, n_odd = sliding_window(exponent)
        out = self._empty(len(limbs))
        self._by_rows(len(limbs), lambda block: _bignum.pow_const(self._handle, limbs[block], steps, n_odd, out[block]))
        return self._residues(out)

    def horner(self, residues: NativeResidues, group: int, shift_bits: int) -> NativeResidues:
        """Pack: for each group of consecutive rows c_0, c_1, ... return prod_j c_j^(2^(shift_bits * j)).

        Shapes: residues: Residues[n], the last group may be shorter; result: Residues[ceil(n / group)].
        """
        reference.check_horner(group, shift_bits)
        limbs = self._limbs(residues)
        out = self._empty(-(-len(limbs) // group))

        def pack(block: slice) -> None:
            members = limbs[block.start * group : block.stop * group]
            _bignum.horner(self._handle, members, group, shift_bits, out[block])

        self._by_rows(len(out), pack)
        return self._residues(out)

    def power_table(self, base: int, window: int, n_windows: int) -> Limbs:
        """Return base^(d * 2^(window * i)) in row ``i << window | d``.

        Shapes: result: limbs[n_windows << window, ...].
        """
        unit = self.from_wire(np.frombuffer((base % self.modulus).to_bytes(self.width, "little"), np.uint8)[None, :])
        bases = self._empty(n_windows)
        _bignum.ladder(self._handle, unit.limbs, window, bases)
        out = self._empty(n_windows << window)

        def fill(block: slice) -> None:
            entries = out[block.start << window : block.stop << window]
            _bignum.table(self._handle, bases[block], window, entries)

        self._by_rows(n_windows, fill)
        return out

    def table_powers(self, table: Limbs, window: int, exponents: NDArray[np.uint8]) -> NativeResidues:
        """Raise the base of a table to each exponent; bits beyond the table's windows are ignored."""
        exponents = np.ascontiguousarray(exponents)
        out = self._empty(len(exponents))
        self._by_rows(
            len(exponents),
            lambda block: _bignum.powers(self._handle, table, window, exponents[block], exponents.shape[1], out[block]),
        )
        return self._residues(out)

    def _products(self, limbs: Limbs, order: NDArray[np.int32], hands: list[NDArray[np.int64]], n_tasks: int) -> Limbs:
        out = self._empty(n_tasks)
        run_blocks(lambda hand: _bignum.products(self._handle, limbs, order, hand, out), hands, self.threads)
        return out

    def _combine(self, operation: Callable[..., None], a: NativeResidues, b: NativeResidues) -> NativeResidues:
        left, right = self._limbs(a), self._limbs(b)
        out = self._empty(len(left))
        is_single = len(right) == 1
        self._by_rows(
            len(left),
            lambda block: operation(self._handle, left[block], right if is_single else right[block], out[block]),
        )
        return self._residues(out)

    def _by_rows(self, n_rows: int, function: Callable[[slice], object]) -> None:
        run_blocks(function, row_blocks(n_rows, self.threads, _LANES), self.threads)

    def _empty(self, n_rows: int) -> Limbs:
        return np.empty((n_rows, self._n_limbs), dtype=self._dtype)

    def _residues(self, limbs: Limbs) -> NativeResidues:
        return NativeResidues(limbs, self._kind)

    def _limbs(self, residues: NativeResidues) -> Limbs:
        if residues.kind != self._kind:
            raise ValueError("these residues belong to another modulus or variant")
        return residues.limbs


class NativeFixedBase:
    """A table of powers of one base, made when the first exponents come.

    The window suits the number of exponents seen so far: a wider one needs fewer products for each exponent and a
    larger table. The table is read window after window for a block of exponents, so that one window stays in cache.
    """

    def __init__(self, arithmetic: NativeBatch, base: int, exponent_bits: int) -> None:
        if exponent_bits < 1:
            raise ValueError("exponent_bits must be at least 1")
        self._arithmetic = arithmetic
        self._base = base
        self._exponent_bits = exponent_bits
        self._seen = 0
        self._made: tuple[Limbs, int] | None = None  # table and window, replaced together

    def pow(self, exponents: NDArray[np.uint8]) -> NativeResidues:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """
        reference.check_exponents(exponents, self._exponent_bits)
        table, window = self._table_for(len(exponents))
        return self._arithmetic.table_powers(table, window, exponents)

    def _table_for(self, n_exponents: int) -> tuple[Limbs, int]:
        # No lock: a fork could find it held, and the child would wait for ever. Threads at worst make a table twice.
        self._seen += n_exponents
        made = self._made
        window = best_window(self._exponent_bits, self._seen, self._arithmetic.row_bytes)
        if made is None or window > made[1] + 1:
            table = self._arithmetic.power_table(self._base, window, -(-self._exponent_bits // window))
            made = self._made = table, window
        return made
