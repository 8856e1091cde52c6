"""Plans that the CUDA kernels follow, made by numpy on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.native_plan import sliding_window

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
    lengths = np.diff(starts)
    n_chunks = np.maximum(1, -(-lengths // rows))
    chunk_starts = np.concatenate([[0], np.cumsum(n_chunks)]).astype(np.int64)
    segment = np.repeat(np.arange(len(lengths)), n_chunks)
    ordinal = np.arange(chunk_starts[-1]) - chunk_starts[segment]
    begin = lengths[segment] * ordinal // n_chunks[segment]
    end = lengths[segment] * (ordinal + 1) // n_chunks[segment]
    # 16-bit keys sort by radix, in linear time.
    longest_first = np.argsort((rows - (end - begin)).astype(np.uint16), kind="stable")
    return Chunks(
        begin=(starts[segment] + begin)[longest_first],
        length=(end - begin)[longest_first].astype(np.int32),
        target=longest_first.astype(np.int32),
        starts=chunk_starts,
    )


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
