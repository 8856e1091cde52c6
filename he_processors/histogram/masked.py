"""Sums per bin that the key owner opens with a mask on each: two parties then hold them as shares modulo 2^64.

Security: a mask is uniform below 2^96 and is added under encryption, before sums are packed and hidden. What the key
    owner opens is uniform but for 2^(b - 96) of a sum of b bits: below 2^-40 for a million sums of 36 bits. Modulo
    2^64 the mask is uniform. Every sum has a mask of its own, drawn when it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.rows import rows_from_ints
from he_processors.errors import ProtocolError
from he_processors.fixed_point import REFUSED, PackingLayout, PairFormat
from he_processors.randomness import BULK_RANDOMNESS, RandomSource

MASK_BYTES = 12
_SLOT_BYTES = MASK_BYTES + 1  # a mask and a sum
_PAIR_BYTES = 2 * _SLOT_BYTES
_ROW_BYTES = 32
_LOWEST = 1 << 63  # sums of gradients have a sign

Shares = NDArray[np.uint64]


class MaskedFormat(PairFormat):
    """The number format of pairs whose sums are masked: each sum has 104 bits of a plaintext."""

    __slots__ = ()

    @property
    def h_bits(self) -> int:
        """Bits between the h and the g of a pair."""
        return 8 * _SLOT_BYTES

    @property
    def pair_bits(self) -> int:
        """Bits of one summed and masked pair."""
        return 8 * _PAIR_BYTES


@dataclass(frozen=True, slots=True, repr=False)
class BinMasks:
    """Masks on the sums of some nodes, node by node and slot by slot. Secret of the party that adds them, used once.

    Shapes: rows: uint8[n_bins, 32], the masks of h and g as a plaintext.
    """

    rows: NDArray[np.uint8]

    @classmethod
    def draw(cls, n_bins: int, randomness: RandomSource = BULK_RANDOMNESS) -> BinMasks:
        """Draw masks for so many bins."""
        drawn = np.frombuffer(randomness.bytes(2 * MASK_BYTES * n_bins), dtype=np.uint8).reshape(n_bins, 2, MASK_BYTES)
        rows = np.zeros((n_bins, _ROW_BYTES), dtype=np.uint8)
        rows[:, :MASK_BYTES] = drawn[:, 0]
        rows[:, _SLOT_BYTES : _SLOT_BYTES + MASK_BYTES] = drawn[:, 1]
        return cls(rows)

    def shares(self) -> tuple[Shares, Shares]:
        """Return this party's shares of g and of h: what is opened, plus these, is the sum. Shapes: uint64[n_bins]."""
        of_g, of_h = _low_words(self.rows, _SLOT_BYTES), _low_words(self.rows, 0)
        return np.uint64(0) - of_g, np.uint64(0) - of_h

    def plaintext_rows(self, pair_format: PairFormat, n_bins: int) -> NDArray[np.uint8]:
        """Return what is added to encrypted sums.

        Raises:
            ValueError: masks of other bins, or sums of a format without room for them.
        """
        if len(self.rows) != n_bins or not isinstance(pair_format, MaskedFormat):
            raise ValueError("masks are for other sums")
        return self.rows


def open_shares(plaintexts: Sequence[int], n_bins: int, packing: PackingLayout) -> tuple[Shares, Shares]:
    """Read the key owner's shares of g and of h off decrypted plaintexts.

    Shapes: plaintexts: signed integers; results: uint64[n_bins].

    Raises:
        ProtocolError: with one fixed message, if a plaintext is not one of masked sums.
    """
    n_pairs = packing.pairs_per_plaintext
    if len(plaintexts) != packing.n_ciphertexts(n_bins):
        raise ProtocolError(REFUSED)
    offset = sum(_LOWEST << 8 * (_PAIR_BYTES * pair + _SLOT_BYTES) for pair in range(n_pairs))
    shifted = [plaintext + offset for plaintext in plaintexts]
    if any(value < 0 or value >> (8 * _PAIR_BYTES * n_pairs) for value in shifted):
        raise ProtocolError(REFUSED)
    rows = rows_from_ints(shifted, _PAIR_BYTES * n_pairs).reshape(-1, _PAIR_BYTES)
    if (rows[:, _SLOT_BYTES - 1 :: _SLOT_BYTES] > 1).any():
        raise ProtocolError(REFUSED)
    g, h = _low_words(rows, _SLOT_BYTES) - np.uint64(_LOWEST), _low_words(rows, 0)
    if g[n_bins:].any() or h[n_bins:].any():
        raise ProtocolError(REFUSED)
    return g[:n_bins], h[:n_bins]


def _low_words(rows: NDArray[np.uint8], first_byte: int) -> Shares:
    words = np.ascontiguousarray(rows[:, first_byte : first_byte + 8]).view("<u8")[:, 0]
    result: Shares = words.astype(np.uint64)
    return result
