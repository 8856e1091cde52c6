"""The number format of gradient pairs: fixed point from public bounds, one signed integer for each (g, h).

A pair is carried as ``g * 2^h_bits + h``, both in units of 2^-fraction_bits. The widths hold every sum of up to
``max_additions`` pairs, so sums of encoded pairs decode exactly, also beyond 64 bits (``exact_sums``). Bounds come from
the objective (|g| <= 1 and 0 <= h <= 1/4 for the logistic loss), never from a round's own gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import CapacityExceeded
from he_processors.exact_sums import as_words, to_float, words_for

_ROW_BYTES = 16
_WORD_BITS = 64
MOST_SUM_BITS = 72  # the upper of two words is an exact double


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """The closed range of a sum of encoded values."""

    low: int
    high: int

    @property
    def bits(self) -> int:
        """Bits of ``value - low`` for every value in the range."""
        return max(1, (self.high - self.low).bit_length())


@dataclass(frozen=True, slots=True)
class PairFormat:
    """Fixed-point format of (g, h) pairs.

    Units:    encoded integers count 2^-fraction_bits.
    Capacity: sums of at most ``max_additions`` pairs, every g in [-g_bound, g_bound], every h in [h_low, h_high], and
        where sums are noised, noise within ``tails`` on each.

    Attributes:
        tails: the largest noise on a sum of g and on one of h; (0, 0) where sums are exact.
    """

    fraction_bits: int
    max_additions: int
    g_bound: float
    h_low: float
    h_high: float
    tails: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.max_additions < 1:
            raise ValueError("max_additions must be at least 1")
        bounds = (self.g_bound, self.h_low, self.h_high)
        if not all(math.isfinite(bound) for bound in bounds) or self.g_bound <= 0 or self.h_low >= self.h_high:
            raise ValueError("bounds must be finite, g_bound positive and h_low below h_high")
        if min(self.tails) < 0:
            raise ValueError("tails must not be negative")
        g, h = self.g_range(self.max_additions), self.h_range(self.max_additions)
        if max(g.high, -h.low, h.high, h.high - h.low) >> MOST_SUM_BITS:
            raise CapacityExceeded(
                f"{self.max_additions} additions at {self.fraction_bits} fraction bits exceed {MOST_SUM_BITS} bits"
            )
        # A row's plaintext has two words, and so has that of the noise on a bin.
        one_row = max(self._steps_up(self.g_bound), self.tails[0]) << self.h_bits
        if one_row >> (8 * _ROW_BYTES - 2):
            raise CapacityExceeded(f"a pair at {self.fraction_bits} fraction bits exceeds {8 * _ROW_BYTES} bits")

    @classmethod
    def logistic(cls, fraction_bits: int, max_additions: int) -> PairFormat:
        """Return the format for the logistic loss without weights: |g| <= 1, 0 <= h <= 1/4.

        XGBoost raises h to at least 1e-16 and computes in float32; both stay within the bounds.
        """
        return cls(fraction_bits, max_additions, g_bound=1.0, h_low=0.0, h_high=0.25)

    def g_range(self, n_rows: int) -> IntegerRange:
        """Return the range of an encoded sum of g over ``n_rows`` rows, noise included."""
        most = n_rows * self._steps_up(self.g_bound) + self.tails[0]
        return IntegerRange(-most, most)

    def h_range(self, n_rows: int) -> IntegerRange:
        """Return the range of an encoded sum of h over ``n_rows`` rows, noise included."""
        low = min(0, -self._steps_up(-self.h_low))
        high = max(0, self._steps_up(self.h_high))
        return IntegerRange(n_rows * low - self.tails[1], n_rows * high + self.tails[1])

    @property
    def is_noised(self) -> bool:
        """Whether sums carry noise, so that they meet a known total only nearly."""
        return any(self.tails)

    @property
    def n_words(self) -> int:
        """Words of a sum (``exact_sums``)."""
        g, h = self.g_range(self.max_additions), self.h_range(self.max_additions)
        return words_for(max(g.high, h.high - h.low))

    @property
    def h_bits(self) -> int:
        """Bits between the h and the g of a pair."""
        return self.h_range(self.max_additions).bits

    @property
    def pair_bits(self) -> int:
        """Bits of one summed pair."""
        return self.h_bits + self.g_range(self.max_additions).bits

    def encode(self, values: NDArray[np.floating], low: float, high: float) -> NDArray[np.int64]:
        """Round values to the grid, half to even.

        Shapes: values: float[n]; result: int64[n].

        Raises:
            CapacityExceeded: a value is not finite or outside [low, high]; nothing is encoded then.
        """
        values = np.asarray(values, dtype=np.float64)
        if values.size and not (low <= values.min() and values.max() <= high):  # NaN fails the comparison
            raise CapacityExceeded("a gradient is not finite or outside the bounds of the number format")
        scaled = values * 2.0**self.fraction_bits  # a power of two: exact
        result: NDArray[np.int64] = np.rint(scaled, out=scaled).astype(np.int64)
        return result

    def encode_pairs(
        self, g: NDArray[np.floating], h: NDArray[np.floating]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Encode gradients and hessians.

        Shapes: g, h: float[n]; results: int64[n].

        Raises:
            CapacityExceeded: a value is out of bounds or there are more rows than one bin may hold.
            ValueError: the lengths differ.
        """
        if np.shape(g) != np.shape(h) or np.ndim(g) != 1:
            raise ValueError("g and h must be vectors of equal length")
        if len(g) > self.max_additions:
            raise CapacityExceeded(f"{len(g)} rows exceed the {self.max_additions} additions of the number format")
        return self.encode(g, -self.g_bound, self.g_bound), self.encode(h, self.h_low, self.h_high)

    def plaintext_rows(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Join encoded pairs to signed plaintexts ``g * 2^h_bits + h``.

        Shapes: g, h: int64[n], encoded single rows; result: uint8[n, 16], two's complement, little-endian.
        """
        if self.h_bits < _WORD_BITS:
            low = (g.view(np.uint64) << np.uint64(self.h_bits)) + h.view(np.uint64)
            pushed_out = g >> np.int64(_WORD_BITS - self.h_bits)
        else:
            low = h.view(np.uint64)
            pushed_out = g << np.int64(self.h_bits - _WORD_BITS)
        carry = low < h.view(np.uint64)
        # The high word is the part of g that the shift pushed out, the sign of h, and the carry of the low words.
        high = pushed_out + (h >> np.int64(63)) + carry
        words = np.stack([low, high.view(np.uint64)], axis=1).astype("<u8")
        return words.view(np.uint8).reshape(-1, _ROW_BYTES)

    def decode(self, sums: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return encoded sums as numbers, correctly rounded.

        Shapes: sums: int64[n] or int64[n_words, n]; result: float64[n].
        """
        return np.ldexp(to_float(as_words(sums)), -self.fraction_bits)

    def _steps_up(self, bound: float) -> int:
        """Return the least integer that no encoded value within ``bound`` exceeds."""
        # Rounding is monotone, so the encoded bound bounds every encoded value; the product is exact in integers.
        numerator, denominator = bound.as_integer_ratio()
        return int(
            -((-numerator * 2 ** max(self.fraction_bits, 0)) // (denominator * 2 ** max(-self.fraction_bits, 0)))
        )
