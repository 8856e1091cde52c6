"""How the active party reads noised sums: in step with what it knows, and only as far as they stand out of the noise.

The best of many noised candidates is one whose noise was lucky. Every candidate is therefore taken at less than it
shows: its left sum of gradients is moved one standard deviation of its noise towards that of a split which gains
nothing, and a side with a sum of hessians within three standard deviations of zero is none. Which split wins then says
how it is used, and no more: the owner's bits tell which rows go left, and the sums of both sides are exact again.

Privacy: post-processing of what was released.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.histogram.bins import BinLayout

CAUTION = 1.0
"""Standard deviations that a left sum is moved. 0, 0.5, 1 and 2 were tried: 1 was best or level in AUC."""
LEAST_HESSIAN = 3.0
"""Standard deviations that each side's sum of hessians must have; with 1, empty-looking sides win."""


class NoisedBins:
    """What is known of the noise on the sums of one tree.

    Units: encoded integers of the pair format.
    """

    def __init__(self, layout: BinLayout, scales: tuple[float, float]) -> None:
        """Args: scales: noise on one sum of g and on one of h."""
        self._layout, self._scales = layout, scales
        sizes = np.diff(layout.starts)
        self._sizes = np.repeat(sizes, sizes)
        # A split at bin b has b + 1 slots on its left: the bins up to b, or those before it and the missing values.
        n_left = np.arange(layout.n_slots) - np.repeat(layout.starts[:-1], sizes) + 1
        self._spread = np.sqrt(n_left * (self._sizes - n_left) / self._sizes)  # the slots' noise sums to nothing

    def in_step(self, sums: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Spread over each feature's slots what they are off the node's sum, which is known.

        Shapes: sums: int64[1, n_nodes, n_slots]; totals: int64[1, n_nodes, 1]; result: as sums.
        """
        starts = self._layout.starts[:-1]
        excess = np.add.reduceat(sums, starts, axis=-1) - totals
        each = np.rint(excess / np.diff(self._layout.starts)).astype(np.int64)
        result: NDArray[np.int64] = sums - np.repeat(each, np.diff(self._layout.starts), axis=-1)
        return result

    def careful(
        self,
        left: tuple[NDArray[np.int64], NDArray[np.int64]],
        totals: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return left sums at which candidates are compared; a hessian of -1 stands for a split that is none.

        Shapes: left: (g, h), int64[1, n_nodes, n_slots], in step; totals: int64[1, n_nodes, 1]; results: as left.
        """
        g, h = (values.astype(np.float64) for values in left)
        total_g, total_h = (values.astype(np.float64) for values in totals)
        least = LEAST_HESSIAN * self._scales[1] * self._spread
        is_split = (h >= least) & (total_h - h >= least) & (total_h > 0)
        h = np.clip(h, 0, total_h)
        neutral = total_g * h / np.where(total_h > 0, total_h, 1.0)
        beyond = g - neutral
        kept = np.sign(beyond) * np.maximum(np.abs(beyond) - CAUTION * self._scales[0] * self._spread, 0.0)
        return np.rint(neutral + kept).astype(np.int64), np.where(is_split, np.rint(h), -1).astype(np.int64)
