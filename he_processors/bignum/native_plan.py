"""Plans that the native kernels follow: how to cut segments, which windows powers use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# 2^11 rows of 2048 bits are 670 KB: one window of the table still fits the second-level cache beside other things.
_WIDEST_TABLE_WINDOW = 11
_LARGEST_TABLE_BYTES = 96 << 20
_WIDEST_SLIDING_WINDOW = 7


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
