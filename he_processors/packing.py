"""Many summed pairs in one plaintext.

The passive party joins ``pairs_per_plaintext`` ciphertexts by shifts of ``pair_bits`` (Horner, in ciphertext). The
key owner decrypts one integer and reads the pairs back. The spare bits above the pairs are zero in every honest
plaintext: a value that wrapped, or that a party made up, fails that test but for a chance of 2^-spare_bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.rows import rows_from_ints
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.exact_sums import WORD_BITS, is_zero, split
from he_processors.fixed_pairs import PairFormat

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
            int64[2, n_bins] (``exact_sums``) where sums of the format may leave 64 bits.
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
