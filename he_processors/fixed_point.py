"""Numbers on power-of-two grids, and gradient pairs as integers, many of them in one plaintext.

Sums of encoded gradients in one word or in two: exact for any number of rows, rounded once when they become doubles.

An array of sums has a first axis of words. One word is the sum itself. Two words stand for
``words[0] + words[1] * 2^20``, in no particular form, so that arrays are added and subtracted word by word.

Capacity: one word, sums below 2^63; two words, sums of fewer than 2^31 values below 2^52.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors._native import extension
from he_processors.bignum.interface import rows_from_ints
from he_processors.errors import CapacityExceeded, ProtocolError

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
    return ((values + half) & _MASK) - half


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


# Numbers on power-of-two grids: what masks, BFV and CKKS add exactly.
#
# A float64 x is carried as an integer near x / 2^exponent. Sums of such integers are exact, so every profile that uses
# the same exponents gives the same model, bit for bit.


_grids = extension("_grids")  # in one pass what numpy does in ten

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Grid:
    """A fixed-point grid with spacing 2^exponent.

    Capacity: ``encode`` accepts |x| <= 2^bound_exponent; the sum of ``n_summands`` such values stays below
    2^capacity_bits grid steps, the most the processor in use can carry.
    """

    exponent: int
    bound_exponent: int

    @classmethod
    def for_sum(cls, bound_exponent: int, n_summands: int, capacity_bits: int, finest: int | None = None) -> Grid:
        """Choose the finest grid on which ``n_summands`` values of at most 2^bound_exponent can be added.

        Args:
            bound_exponent: every summand is at most 2^bound_exponent in magnitude.
            n_summands: number of sites.
            capacity_bits: a sum of integers must stay at most 2^capacity_bits in magnitude.
            finest: do not go below this exponent (to compare profiles on one grid).
        """
        exponent = bound_exponent + (n_summands - 1).bit_length() - capacity_bits
        return cls(exponent if finest is None else max(exponent, finest), bound_exponent)

    def encode(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round to the grid, half to even.

        Shapes: values: float64[n]; result: int64[n].

        Raises:
            CapacityExceeded: a value is not finite or larger than the bound; nothing was encoded then.
        """
        return Grids((self,)).encode(values)

    def decode(self, integers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the grid values. Shapes: integers: int64[n]; result: float64[n]."""
        return Grids((self,)).decode(integers)


@dataclass(frozen=True, slots=True)
class Grids:
    """Grids by position: value i of a message lies on grid i modulo their number.

    Gradients and hessians, or a metric's numerator and its count of rows, travel in turn and differ in size by many
    orders of magnitude: on one grid the smaller of the two would lose its digits.
    """

    of: tuple[Grid, ...]

    def exceeded(self, values: NDArray[np.float64]) -> list[bool]:
        """Say of each grid whether some value on it is not finite or larger than its bound.

        Shapes: values: float64[n], n a multiple of the number of grids.
        """
        columns = self._columns(values)
        # NaN propagates through both and fails the comparison.
        largest = np.maximum(columns.max(axis=0, initial=0.0), -columns.min(axis=0, initial=0.0))
        return [not x <= 2.0**grid.bound_exponent for x, grid in zip(largest, self.of, strict=True)]

    def encode(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round to the grids, half to even.

        Shapes: values: float64[n], n a multiple of the number of grids; result: int64[n].

        Raises:
            CapacityExceeded: a value is not finite or larger than its bound; nothing was encoded then.
        """
        return self._rounded(values, running=False)

    def encode_running(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round so that sums over neighbours stay on the grid's resolution: each error is carried to the next value.

        A sum over any run of values on one grid is off by less than one step, however long the run; with ``encode``
        the error would grow with the root of its length. A split's left side is such a run of bins.

        Shapes: values: float64[n], n a multiple of the number of grids; result: int64[n].

        Raises:
            CapacityExceeded: as ``encode``.
        """
        return self._rounded(values, running=True)

    def decode(self, integers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the grid values. Shapes: integers: int64[n]; result: float64[n]."""
        if _grids is None:
            return (self._columns(integers) * self._steps()).reshape(-1)
        values = np.empty(integers.size, dtype=np.float64)
        _grids.scale(np.ascontiguousarray(integers), self._steps(), values)
        return values

    def _rounded(self, values: NDArray[np.float64], *, running: bool) -> NDArray[np.int64]:
        if _grids is None:
            return self.rounded_by_numpy(values, running=running)
        integers = np.empty(values.size, dtype=np.int64)
        bounds = np.ldexp(1.0, [grid.bound_exponent for grid in self.of])
        self._refuse(_grids.round(np.ascontiguousarray(values), 1.0 / self._steps(), bounds, running, integers))
        return integers

    def rounded_by_numpy(self, values: NDArray[np.float64], *, running: bool) -> NDArray[np.int64]:
        """Do what the extension does, to the bit, where there is none."""
        self._refuse(sum(1 << i for i, is_exceeded in enumerate(self.exceeded(values)) if is_exceeded))
        scaled = self._columns(values) * (1.0 / self._steps())  # powers of two: exact
        rounded = np.rint(scaled)
        if running:
            # Rounding errors are exact in float64 and at most 1/2, so their running sums keep full precision.
            carried = np.rint(np.cumsum(scaled - rounded, axis=0))
            rounded += np.diff(carried, axis=0, prepend=0.0)
        return rounded.astype(np.int64).reshape(-1)

    def _refuse(self, exceeded: int) -> None:
        """Args: exceeded: a bit for each grid. Raises: CapacityExceeded."""
        for number, grid in enumerate(self.of):
            if exceeded >> number & 1:
                raise CapacityExceeded(f"a value is not finite or larger than 2^{grid.bound_exponent}")

    def _steps(self) -> NDArray[np.float64]:
        return np.ldexp(1.0, [grid.exponent for grid in self.of])

    def _columns(self, values: NDArray[_Number]) -> NDArray[_Number]:
        return values.reshape(-1, len(self.of))


def exponent_of(bound: float) -> int:
    """Return the smallest e with bound <= 2^e; -1022 for a bound of zero.

    Raises:
        CapacityExceeded: the bound is not finite.
    """
    if not np.isfinite(bound):
        raise CapacityExceeded("a bound is not finite")
    mantissa, exponent = np.frexp(abs(bound))
    if mantissa == 0:
        return -1022
    return int(exponent) - 1 if mantissa == 0.5 else int(exponent)


# The number format of gradient pairs: fixed point from public bounds, one signed integer for each (g, h).
#
# A pair is carried as ``g * 2^h_bits + h``, both in units of 2^-fraction_bits. The widths hold every sum of up to
# ``max_additions`` pairs, so sums of encoded pairs decode exactly, also beyond 64 bits (``fixed_point``). Bounds come
# from the objective (|g| <= 1 and 0 <= h <= 1/4 for the logistic loss), never from a round's own gradients.


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
        """Words of a sum (``fixed_point``)."""
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


# Many summed pairs in one plaintext.
#
# The passive party joins ``pairs_per_plaintext`` ciphertexts by shifts of ``pair_bits`` (Horner, in ciphertext). The
# key owner decrypts one integer and reads the pairs back. The spare bits above the pairs are zero in every honest
# plaintext: a value that wrapped, or that a party made up, fails that test but for a chance of 2^-spare_bits.


MIN_SPARE_BITS = 64
REFUSED = "a decrypted histogram is not what the protocol allows"


@dataclass(frozen=True, slots=True)
class PackingLayout:
    """How summed pairs share a plaintext.

    Capacity: ``pairs_per_plaintext`` sums, each of at most ``pair_format.max_additions`` rows.
    """

    pair_format: PairFormat
    pairs_per_plaintext: int

    @classmethod
    def fit(cls, pair_format: PairFormat, plaintext_bits: int) -> PackingLayout:
        """Pack as many pairs as leave ``MIN_SPARE_BITS`` spare.

        Args:
            pair_format: the number format of the pairs.
            plaintext_bits: every |plaintext| below 2^plaintext_bits decrypts to itself.

        Raises:
            CapacityExceeded: not even one pair fits.
        """
        n_pairs = (plaintext_bits - MIN_SPARE_BITS) // pair_format.pair_bits
        if n_pairs < 1:
            raise CapacityExceeded(f"a pair of {pair_format.pair_bits} bits does not fit {plaintext_bits} bits")
        return cls(pair_format, n_pairs)

    def n_ciphertexts(self, n_bins: int) -> int:
        """Return the ciphertexts that carry ``n_bins`` bins."""
        return -(-n_bins // self.pairs_per_plaintext)

    def unpack(self, plaintexts: Sequence[int], n_bins: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read the summed pairs of decrypted plaintexts.

        Shapes: plaintexts: signed integers[n_ciphertexts(n_bins)]; results: g and h, int64[n_bins], or in two words
            int64[2, n_bins] (``fixed_point``) where sums of the format may leave 64 bits.
        Security: every digit lies within the capacity of the format and all spare bits are clear, or nothing is
            returned. Bounds of single nodes and known totals are checked where they are known.

        Raises:
            ProtocolError: with one fixed message.
        """
        if len(plaintexts) != self.n_ciphertexts(n_bins):
            raise ProtocolError(REFUSED)
        pair_bits, n_pairs = self.pair_format.pair_bits, self.pairs_per_plaintext
        g_low, h_low = self._lowest()
        # Shifting every digit by its lowest value makes all digits non-negative: no borrow runs between them.
        offset = sum(((-g_low << self.pair_format.h_bits) - h_low) << (pair_bits * j) for j in range(n_pairs))
        shifted = [plaintext + offset for plaintext in plaintexts]
        if any(value < 0 or value >> (pair_bits * n_pairs) for value in shifted):
            raise ProtocolError(REFUSED)
        rows = rows_from_ints(shifted, (pair_bits * n_pairs) // 8 + 10)  # room to read nine bytes at any bit offset
        g, h = self._digits(rows)
        if not (is_zero(g[:, n_bins:]).all() and is_zero(h[:, n_bins:]).all()):
            raise ProtocolError(REFUSED)
        g, h = g[:, :n_bins], h[:, :n_bins]
        return (g, h) if self.pair_format.n_words > 1 else (g[0], h[0])

    def _lowest(self) -> tuple[int, int]:
        n_rows = self.pair_format.max_additions
        return self.pair_format.g_range(n_rows).low, self.pair_format.h_range(n_rows).low

    def _digits(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Cut rows of shifted digits.

        Shapes: rows: uint8[n, width]; results: int64[n_words, n * pairs_per_plaintext].
        """
        h_bits, pair_bits, n_words = self.pair_format.h_bits, self.pair_format.pair_bits, self.pair_format.n_words
        shape = (n_words, rows.shape[0], self.pairs_per_plaintext)
        g, h = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        g_low, h_low = (split([low], n_words) for low in self._lowest())
        for j in range(self.pairs_per_plaintext):
            h[:, :, j] = _words(rows, j * pair_bits, h_bits, n_words) + h_low
            # A g digit may use all 64 bits; int64 arithmetic wraps back into the range that the format guarantees.
            g[:, :, j] = _words(rows, j * pair_bits + h_bits, pair_bits - h_bits, n_words) + g_low
        return g.reshape(n_words, -1), h.reshape(n_words, -1)


def _words(rows: NDArray[np.uint8], first_bit: int, n_bits: int, n_words: int) -> NDArray[np.int64]:
    """Read the same non-negative digit of every row. Shapes: rows: uint8[n, width]; result: int64[n_words, n]."""
    if n_words == 1:
        return bit_field(rows, first_bit, n_bits).view(np.int64)[None]
    low_bits = min(n_bits, WORD_BITS)
    low = bit_field(rows, first_bit, low_bits)
    high = bit_field(rows, first_bit + low_bits, n_bits - low_bits) if n_bits > low_bits else np.zeros_like(low)
    return np.stack([low, high]).view(np.int64)


def bit_field(rows: NDArray[np.uint8], first_bit: int, n_bits: int) -> NDArray[np.uint64]:
    """Read the same bit field of every row.

    Shapes: rows: uint8[n, width], little-endian, at least nine bytes from the field's first; result: uint64[n].

    Args:
        first_bit: position of the lowest bit.
        n_bits: length, 1 to 64.
    """
    first_byte, shift = divmod(first_bit, 8)
    window = np.ascontiguousarray(rows[:, first_byte : first_byte + 8]).view("<u8").reshape(-1)
    field = window.astype(np.uint64, copy=False) >> np.uint64(shift)
    if shift:
        field = field | (rows[:, first_byte + 8].astype(np.uint64) << np.uint64(64 - shift))
    return field & np.uint64((1 << n_bits) - 1)
