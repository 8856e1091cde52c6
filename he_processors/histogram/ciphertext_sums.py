"""The passive party's side: add ciphertexts into bins, pack the bins, hide them from the key owner."""

from __future__ import annotations

import numpy as np

from he_processors.additive.rerandomiser import Rerandomiser
from he_processors.bignum.interface import ModBatch, Residues
from he_processors.histogram.planner import HistogramPlan
from he_processors.packing import PackingLayout


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
