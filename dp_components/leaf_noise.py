"""What the noise on leaf sums may have done to scores: drawn again, and carried through the trees that came after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights import UNIT, LeafQuery, LeafWeights, leaf_outputs

N_DRAWS = 200
NORMAL_95 = 1.96
"""Deviations on either side that hold 95 % of normal noise."""
_STEP = 0.02  # of margins, for slopes
_SEED = 0  # of draws that protect nothing: a model has one answer


@dataclass(frozen=True, slots=True)
class LeafMaking:
    """How a private training makes leaves of two classes; all of it public.

    Attributes:
        std: of the noise on a leaf's G and H. Units: of g and h.
        ridge, clip, scale: as in ``leaf_outputs``.
    """

    weights: LeafWeights
    query: LeafQuery
    std: tuple[float, float]
    ridge: float
    clip: float
    scale: float

    def outputs(self, sums: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return what leaves answer. Shapes: float64[..., 2] -> float32[...]."""
        flat = self.weights.repaired(sums.reshape(-1, 2))
        return leaf_outputs(flat, self.ridge, self.clip, self.scale).reshape(sums.shape[:-1])

    def slopes(self, margin: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return by how much a row's g grows with its margin, and its h: means over the label, at which g balances.

        Shapes: float64[n_rows] each.
        """

        def pairs(at: NDArray[np.float64], label: int) -> NDArray[np.float64]:
            labels = np.full(at.size, label, dtype=np.float32)
            return self.weights.row_statistics(at.astype(np.float32), labels, self.query).values.T / UNIT

        of = [pairs(margin, label) for label in (0, 1)]
        share = of[0][0] / np.maximum(of[0][0] - of[1][0], 1 / UNIT)  # of the second class
        up, down = ([pairs(margin + step, label)[0] for label in (0, 1)] for step in (_STEP, -_STEP))
        slope = [(up[label] - down[label]) / (2 * _STEP) for label in (0, 1)]
        mean = [(1 - share) * zero + share * one for zero, one in ((slope[0], slope[1]), (of[0][1], of[1][1]))]
        return mean[0], mean[1]


@dataclass(frozen=True, slots=True)
class NoisedLeaves:
    """The leaves of one tree. Shapes: sums: float64[n_leaves, 2], released; of_rows: intp[n_rows], rows' leaves."""

    sums: NDArray[np.float64]
    of_rows: NDArray[np.intp]


def drawn_again(rounds: Sequence[Sequence[NoisedLeaves]], making: LeafMaking) -> list[NDArray[np.float32]]:
    """Return by how much each tree's leaves differ in ``N_DRAWS`` trainings with other noise and the same structure.

    A leaf's sums get fresh noise of the public deviation, and answer as the model's leaves do, clipping and all. A
    later tree sees what earlier ones did wrong: a leaf's G moves by the sum of its rows' slopes times their moves, and
    so takes some of it back. Its rows are those of a sample, weighed so that their h add up to the tree's.

    Shapes: float32[n_leaves, N_DRAWS] for each tree. A score's deviation is that of the sum of its leaves' moves.
    Privacy: post-processing of released sums, if the sample is.

    Args:
        rounds: trees of a round see the same margins.
    """
    random = np.random.default_rng(_SEED)
    n_rows = rounds[0][0].of_rows.size
    margin, moved = np.zeros(n_rows), np.zeros((n_rows, N_DRAWS), dtype=np.float32)
    found: list[NDArray[np.float32]] = []
    for trees in rounds:
        slope, hessian = making.slopes(margin)
        steps = np.zeros_like(moved)
        for tree in trees:
            n_leaves = len(tree.sums)
            weighed = np.zeros((n_leaves, n_rows), dtype=np.float32)
            weighed[tree.of_rows, np.arange(n_rows)] = slope * (
                max(tree.sums[:, 1].sum(), 0) / max(hessian.sum(), 1 / UNIT)
            )
            draws = tree.sums[:, None, :] + random.normal(size=(n_leaves, N_DRAWS, 2)) * making.std
            draws[..., 0] += weighed @ moved
            answer = making.outputs(tree.sums)
            found.append(making.outputs(draws) - answer[:, None])
            steps += found[-1][tree.of_rows]
            margin = margin + answer[tree.of_rows]
        moved += steps
    return found
