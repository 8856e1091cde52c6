"""Gradient pairs as small digits, because a sum is read back by a discrete logarithm, and that must be short.

With 40 fraction bits an encoded value is two digits of base 2^20, the lower one in [-2^19, 2^19) and the upper one in
[-2^20, 2^20]. Digits are added bin by bin, each by itself, and never carried: the sums are joined when they are
decoded. With 14 fraction bits one digit is enough, and a float32 gradient is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.exact_sums import WORD_BITS, lower_words
from he_processors.fixed_pairs import IntegerRange, PairFormat

EXACT_FRACTION_BITS = 40
"""Every float32 gradient of at least 2^-16 of its bound is encoded without rounding."""
SHORT_FRACTION_BITS = 14
FRACTION_BITS = (EXACT_FRACTION_BITS, SHORT_FRACTION_BITS)
DIGIT_BITS = WORD_BITS
_HALF = 1 << (DIGIT_BITS - 1)
_MAX_ROWS = 1 << 31  # rows are numbered by int32


@dataclass(frozen=True, slots=True)
class DigitFormat(PairFormat):
    """Fixed-point format of (g, h) pairs as digits: |g| <= 1 and 0 <= h <= 1.

    Units:    encoded integers count 2^-fraction_bits.
    Capacity: any number of rows below 2^31.
    """

    @classmethod
    def of(cls, fraction_bits: int, n_rows: int, tails: tuple[int, int] = (0, 0)) -> DigitFormat:
        """Return the format of a table.

        Args:
            tails: see ``PairFormat``; noise on sums needs values of one digit.

        Raises:
            ConfigurationError: other fraction bits, or too many rows.
        """
        if fraction_bits not in FRACTION_BITS:
            raise ConfigurationError(f"elgamal encodes {EXACT_FRACTION_BITS} or {SHORT_FRACTION_BITS} fraction bits")
        if n_rows >= _MAX_ROWS:
            raise ConfigurationError(f"{n_rows} rows are more than a vertical job may have: fewer than {_MAX_ROWS}")
        if any(tails) and fraction_bits != SHORT_FRACTION_BITS:
            raise ConfigurationError(f"noised sums under elgamal have {SHORT_FRACTION_BITS} fraction bits: one digit")
        return cls(fraction_bits, max(n_rows, 1), g_bound=1.0, h_low=0.0, h_high=1.0, tails=tails)

    @property
    def n_digits(self) -> int:
        """Return the digits of one value."""
        return 2 if self.fraction_bits > DIGIT_BITS else 1

    @property
    def n_messages(self) -> int:
        """Return the digits of a pair: those of g, the lowest first, and then those of h."""
        return 2 * self.n_digits

    def digits_of(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Cut encoded pairs into digits. Shapes: g, h: int64[n]; result: n_messages times int64[n]."""
        if self.n_digits == 1:
            return [g, h]
        return [*_cut(g), *_cut(h)]

    def digits_of_total(self, g: int, h: int, low_g: int, low_h: int) -> list[int]:
        """Return the sums of a node's digits from its sums and those of its lower digits."""
        if self.n_digits == 1:
            return [g, h]
        return [low_g, (g - low_g) >> DIGIT_BITS, low_h, (h - low_h) >> DIGIT_BITS]

    def digit_ranges(self, n_rows: int) -> list[IntegerRange]:
        """Return the range of each digit's sum over ``n_rows`` rows."""
        if self.n_digits == 1:
            return [self.g_range(n_rows), self.h_range(n_rows)]
        lower = IntegerRange(-n_rows * _HALF, n_rows * (_HALF - 1))
        top = n_rows << (self.fraction_bits - DIGIT_BITS)
        return [lower, IntegerRange(-top, top), lower, IntegerRange(0, top)]

    def join(self, sums: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sums of digits as sums of g and h.

        Shapes: sums: n_messages times int64[n]; results: int64[n_digits, n] (``exact_sums``).
        """
        half = self.n_digits
        return np.stack(sums[:half]), np.stack(sums[half:])


def _cut(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    low = lower_words(values)
    return low, (values - low) >> DIGIT_BITS
