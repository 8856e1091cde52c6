"""Plans that the native kernels follow: windows of fixed bases, digits of scalars."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.rows import ints_from_rows
from he_processors.curve.interface import GROUP_ORDER

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
