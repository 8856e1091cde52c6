"""Sums of encoded gradients in one word or in two: exact for any number of rows, rounded once when they become doubles.

An array of sums has a first axis of words. One word is the sum itself. Two words stand for
``words[0] + words[1] * 2^20``, in no particular form, so that arrays are added and subtracted word by word.

Capacity: one word, sums below 2^63; two words, sums of fewer than 2^31 values below 2^52.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 20
_MASK = (1 << WORD_BITS) - 1
_HALF_BITS = 32
_ONE_WORD_BITS = 63


def words_for(bound: int) -> int:
    """Return the words of a sum of magnitude at most ``bound``."""
    return 1 if bound >> _ONE_WORD_BITS == 0 else 2


def as_words(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give sums in one word their axis. Shapes: values: int64[n] or int64[n_words, n]; result: int64[n_words, n]."""
    return values if values.ndim > 1 else values[None]


def split(values: Sequence[int], n_words: int) -> NDArray[np.int64]:
    """Write integers in words. Shapes: result: int64[n_words, n]. Raises: OverflowError beyond one word of 64 bits."""
    if n_words == 1:
        return np.array([list(values)], dtype=np.int64)
    return np.array([[value & _MASK for value in values], [value >> WORD_BITS for value in values]], dtype=np.int64)


def join(words: NDArray[np.int64]) -> int:
    """Return one sum as an integer. Shapes: words: int64[n_words]."""
    return sum(int(word) << (WORD_BITS * i) for i, word in enumerate(words))


def exact_sum(values: NDArray[np.int64]) -> int:
    """Add up integers that a 64-bit sum might not hold. Shapes: values: int64[n], fewer than 2^31."""
    low, high = values & ((1 << _HALF_BITS) - 1), values >> _HALF_BITS
    return (int(high.sum()) << _HALF_BITS) + int(low.sum())


def lower_words(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each value modulo 2^20, in [-2^19, 2^19): its lower word if words are to stay small in sums.

    Shapes: values, result: int64[n].
    """
    half = 1 << (WORD_BITS - 1)
    result: NDArray[np.int64] = ((values + half) & _MASK) - half
    return result


def to_float(words: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return sums as doubles, correctly rounded. Shapes: words: int64[n_words, ...]; result: float64[...]."""
    result: NDArray[np.float64] = words[0].astype(np.float64)
    if len(words) > 1:
        # Both words are exact doubles (below 2^53), and so is the upper one times a power of two: one rounding.
        result += words[1].astype(np.float64) * float(1 << WORD_BITS)
    return result


def is_zero(words: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which sums are zero. Shapes: words: int64[n_words, ...]; result: bool[...]."""
    high, low = _parts(words)
    result: NDArray[np.bool_] = (high == 0) & (low == 0)
    return result


def are_within(words: NDArray[np.int64], low: int, high: int) -> bool:
    """Tell whether every sum lies in [low, high]. Shapes: words: int64[n_words, n]."""
    upper, lower = _parts(words)
    (low_upper, low_lower), (high_upper, high_lower) = divmod(low, 1 << WORD_BITS), divmod(high, 1 << WORD_BITS)
    is_below = (upper < low_upper) | ((upper == low_upper) & (lower < low_lower))
    is_above = (upper > high_upper) | ((upper == high_upper) & (lower > high_lower))
    return not np.any(is_below | is_above)


def segments_sum_to(words: NDArray[np.int64], starts: NDArray[np.int64], expected: int) -> NDArray[np.bool_]:
    """Tell in which segments the sums add up to one number, without overflow.

    Shapes: words: int64[n_words, n]; starts: int64[n_segments], each segment up to the next one's start and fewer than
        2^31 sums long; result: bool[n_segments].
    """
    upper, low = _parts(words)
    # Parts of 20 and 32 bits, and a signed rest: their sums over a segment cannot overflow. Carries go up at the end.
    parts = (low, upper & ((1 << _HALF_BITS) - 1), upper >> _HALF_BITS)
    result = np.ones(starts.size, dtype=np.bool_)
    carry = np.zeros(starts.size, dtype=np.int64)
    for part, bits in zip(parts, (WORD_BITS, _HALF_BITS), strict=False):
        total = np.add.reduceat(part, starts) + carry
        result &= (total & ((1 << bits) - 1)) == expected & ((1 << bits) - 1)
        carry, expected = total >> bits, expected >> bits
    result &= np.add.reduceat(parts[2], starts) + carry == expected
    return result


def _parts(words: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the one form of sums as high * 2^20 + low, low in [0, 2^20). Shapes: results: int64[...]."""
    carry = words[0] >> WORD_BITS
    return (carry if len(words) == 1 else words[1] + carry), words[0] & _MASK
