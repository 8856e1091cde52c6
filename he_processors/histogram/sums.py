"""Ciphertext histograms: the passive party adds and hides, the key owner opens, checks and subtracts.

Sums per bin that the key owner opens with a mask on each: two parties then hold them as shares modulo 2^64.

Security: a mask is uniform below 2^96 and is added under encryption, before sums are packed and hidden. What the key
    owner opens is uniform but for 2^(b - 96) of a sum of b bits: below 2^-40 for a million sums of 36 bits. Modulo
    2^64 the mask is uniform. Every sum has a mask of its own, drawn when it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Decryptor, PublicKey
from he_processors.bignum.interface import ModBatch, Residues, rows_from_ints
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.fixed_point import (
    REFUSED,
    PackingLayout,
    PairFormat,
    are_within,
    as_words,
    exact_sum,
    lower_words,
    segments_sum_to,
)
from he_processors.histogram.planner import BinLayout, HistogramPlan
from he_processors.paillier import Rerandomiser
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
    return words.astype(np.uint64)


# Noise on encrypted sums per bin: added by the party that summed them, before they are packed and hidden.
#
# The key owner opens sum plus noise and nothing else: the ciphertext of the noise needs no randomiser of its own,
# because what leaves is re-randomised as a whole.


@dataclass(frozen=True, slots=True, repr=False)
class BinNoise:
    """Noise on the sums of some nodes, node by node and slot by slot. Secret of the party that adds it.

    Shapes: g, h: int64[n_nodes * n_slots].
    Units:  encoded integers of the pair format.
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]

    def plaintext_rows(self, pair_format: PairFormat, n_bins: int) -> NDArray[np.uint8]:
        """Return what is added to encrypted sums. Raises: as ``check``."""
        self.check(pair_format, n_bins)
        return pair_format.plaintext_rows(self.g, self.h)

    def check(self, pair_format: PairFormat, n_bins: int) -> None:
        """Refuse noise for other bins, or beyond what the format holds.

        Raises:
            ValueError: there is not exactly one value of each kind for each bin.
            CapacityExceeded: a value beyond the tails: a format that was not made for this noise.
        """
        if self.g.shape != (n_bins,) or self.h.shape != (n_bins,):
            raise ValueError("noise needs one value for each sum")
        largest = [int(np.abs(values).max(initial=0)) for values in (self.g, self.h)]
        if largest[0] > pair_format.tails[0] or largest[1] > pair_format.tails[1]:
            raise CapacityExceeded("noise on a sum is larger than the number format holds; nothing was sent")


def add_unhidden(
    public_key: PublicKey, arithmetic: ModBatch, bins: Residues, noise: BinNoise | BinMasks, pair_format: PairFormat
) -> Residues:
    """Add noise, or masks, to encrypted sums. Shapes: bins, result: Residues[n_bins].

    Security: whoever knows the exact sums' ciphertexts could read the noise off the result: hide it first.

    Raises:
        ValueError, CapacityExceeded: as ``BinNoise.check`` or ``BinMasks.plaintext_rows``.
    """
    return arithmetic.mul(bins, public_key.embed(arithmetic, noise.plaintext_rows(pair_format, len(bins))))


# The passive party's side: add ciphertexts into bins, pack the bins, hide them from the key owner.


def sum_bins(arithmetic: ModBatch, ciphertexts: Residues, plan: HistogramPlan) -> Residues:
    """Add encrypted pairs per bin.

    Shapes:   ciphertexts: Residues[n_rows], one pair each; result: Residues[plan.n_slots].
    Security: needs the public key only. An empty bin is 1, the bare encryption of zero, and every sum is a product
        that the key owner could recompute: pass the result through ``pack_and_hide`` before it leaves.
    Capacity: the pair format's ``max_additions`` rows in one bin.
    """
    parts, slots = [], []
    for block in plan.blocks:
        cells = arithmetic.segprod(ciphertexts, block.cells.order, block.cells.starts)
        parts.append(arithmetic.segprod(cells, block.bins.order, block.bins.starts))
        slots.append(block.slots)
    position = np.empty(plan.n_slots, dtype=np.int64)
    position[np.concatenate(slots)] = np.arange(plan.n_slots, dtype=np.int64)
    return arithmetic.take(arithmetic.concat(parts), position)


def pack_and_hide(bins: Residues, packing: PackingLayout, rerandomiser: Rerandomiser) -> Residues:
    """Pack bins into few ciphertexts and re-randomise those.

    Shapes:   bins: Residues[n_bins]; result: Residues[packing.n_ciphertexts(n_bins)].
    Security: the result holds against the key owner: it reveals the sums and nothing of which rows made them.
    """
    packed = rerandomiser.arithmetic.horner(bins, packing.pairs_per_plaintext, packing.pair_format.pair_bits)
    return rerandomiser.rerandomise(packed)


# The key owner's side: decrypt histograms, check them, subtract siblings.
#
# Security: nothing decrypted is used or shown before every check has passed, and a failed check says nothing about what
# was decrypted: one fixed message, whatever the reason.


@dataclass(frozen=True, slots=True)
class NodeTotal:
    """What the key owner knows about a node: its rows and its exact sums.

    Units: g and h in encoded integers of the pair format.

    Attributes:
        lower: sums of the rows' lower digits of g and of h (``fixed_point.lower_words``), for schemes that add digits.
    """

    n_rows: int
    g: int
    h: int
    lower: tuple[int, int] = (0, 0)

    @classmethod
    def of_rows(cls, g: NDArray[np.int64], h: NDArray[np.int64]) -> NodeTotal:
        """Add up a node's encoded rows. Shapes: g, h: int64[n_node_rows]."""
        lower = int(lower_words(g).sum()), int(lower_words(h).sum())
        return cls(g.size, exact_sum(g), exact_sum(h), lower)

    def minus(self, child: NodeTotal) -> NodeTotal:
        """Return the sibling's total."""
        lower = self.lower[0] - child.lower[0], self.lower[1] - child.lower[1]
        return NodeTotal(self.n_rows - child.n_rows, self.g - child.g, self.h - child.h, lower)


@dataclass(frozen=True, slots=True, repr=False)
class BinSums:
    """Decrypted and checked sums of one node. Private to the key owner.

    Shapes: g, h: int64[n_slots], or int64[2, n_slots] in two words (``fixed_point``).
    Units:  encoded integers of the pair format.
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]


def decrypt_level(
    ciphertexts: NDArray[np.uint8],
    decryptor: Decryptor,
    packing: PackingLayout,
    layout: BinLayout,
    totals: Sequence[NodeTotal],
) -> list[BinSums]:
    """Decrypt the packed histograms of a level and check them.

    Shapes: ciphertexts: uint8[n_ciphertexts, width], as received; result: one BinSums for each of ``totals``.

    Raises:
        ProtocolError: with one fixed message, if any value of any node is not what it must be.
    """
    plaintexts = decryptor.decrypt(ciphertexts)
    g, h = packing.unpack(plaintexts, len(totals) * layout.n_slots)
    firsts = range(0, len(totals) * layout.n_slots, layout.n_slots)
    sums = [BinSums(g[..., i : i + layout.n_slots], h[..., i : i + layout.n_slots]) for i in firsts]
    for node_sums, total in zip(sums, totals, strict=True):
        check_node(node_sums, total, layout, packing.pair_format)
    return sums


def check_node(sums: BinSums, total: NodeTotal, layout: BinLayout, pair_format: PairFormat) -> None:
    """Check one node: every bin within the node's bounds, every feature's bins summing to the node exactly.

    Where sums are noised, the bins of a feature sum to the node up to as many of the format's tails as it has slots.

    Raises:
        ProtocolError: with one fixed message.
    """
    if total.n_rows < 0 or total.n_rows > pair_format.max_additions:
        raise ProtocolError(REFUSED)
    for values, bounds, expected, tail in (
        (sums.g, pair_format.g_range(total.n_rows), total.g, pair_format.tails[0]),
        (sums.h, pair_format.h_range(total.n_rows), total.h, pair_format.tails[1]),
    ):
        words = as_words(values)
        if not are_within(words, bounds.low, bounds.high):
            raise ProtocolError(REFUSED)
        if pair_format.is_noised:
            is_due = _are_near(words, layout, expected, tail)
        else:
            is_due = segments_sum_to(words, layout.starts[:-1], expected)
        if not is_due.all():
            raise ProtocolError(REFUSED)


def _are_near(words: NDArray[np.int64], layout: BinLayout, expected: int, tail: int) -> NDArray[np.bool_]:
    """Tell for which features the noised bins sum to nearly the node. Shapes: words: int64[1, n_slots].

    The caller has checked every bin against its bounds, so that no sum wraps.
    """
    totals = np.add.reduceat(words[0], layout.starts[:-1])
    result: NDArray[np.bool_] = np.abs(totals - expected) <= tail * np.diff(layout.starts)
    return result


def subtract_sibling(
    parent: BinSums, child: BinSums, sibling_total: NodeTotal, layout: BinLayout, pair_format: PairFormat
) -> BinSums:
    """Return the histogram of the child that was not built, checked like a decrypted one.

    Raises:
        ProtocolError: with one fixed message.
    """
    sibling = BinSums(parent.g - child.g, parent.h - child.h)
    check_node(sibling, sibling_total, layout, pair_format)
    return sibling
