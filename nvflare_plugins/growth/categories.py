"""XGBoost's search for the best split of a categorical column, on sums that are exact integers.

A column of few categories is split one category against all others. One of more is sorted by the weight that each
category's rows would have as a leaf, and cut in two along that order, from both ends. Categories of the split go right;
rows without a value go left or right, whichever gains more.

Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateOneHot, EnumeratePart), src/common/categorical.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.arithmetic import (
    GradientUnit,
    NodeToSplit,
    SplitFormula,
    WeightBounds,
    loss_changes,
)

_NO_BOUNDS = WeightBounds()


@dataclass(frozen=True, slots=True, repr=False)
class CategoryBlock:
    """The sums of one categorical feature in several nodes.

    Shapes: g, h: int64[n_words, n_nodes, n_categories]; total_g, total_h: int64[n_words, n_nodes, 1], of the nodes;
        missing_g, missing_h: as the totals, of the rows without a value; allowed: bool[n_nodes].
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    total_g: NDArray[np.int64]
    total_h: NDArray[np.int64]
    missing_g: NDArray[np.int64]
    missing_h: NDArray[np.int64]
    allowed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, repr=False)
class CategorySplit:
    """The best split of a node by categories.

    Shapes: left_g, left_h: int64[n_words].

    Attributes:
        right: the categories that go right, ascending.
    """

    loss_change: np.float32
    right: tuple[int, ...]
    default_left: bool
    left_g: NDArray[np.int64]
    left_h: NDArray[np.int64]


class CategoryEvaluator:
    """Finds the best splits of one categorical feature."""

    def __init__(self, formula: SplitFormula, unit: GradientUnit, direction: int):
        """Args: direction: the feature's monotone constraint."""
        self._formula = formula
        self._unit = unit
        self._monotone = np.array([direction], dtype=np.int8)

    def best_splits(self, block: CategoryBlock, nodes: list[NodeToSplit]) -> list[CategorySplit | None]:
        """Return each node's best split with a positive loss change, or None."""
        if block.g.shape[-1] < self._formula.max_cat_to_onehot:
            return self._one_against_others(block, nodes)
        return self._sorted_cuts(block, nodes)

    def _one_against_others(self, block: CategoryBlock, nodes: list[NodeToSplit]) -> list[CategorySplit | None]:
        """Try each category, first with the rows without a value on the other side, then with them on its own."""
        left_g = _interleaved(block.total_g - block.g, block.total_g - block.g - block.missing_g)
        left_h = _interleaved(block.total_h - block.h, block.total_h - block.h - block.missing_h)
        changes = self._loss_changes(left_g, left_h, block, nodes)
        found: list[CategorySplit | None] = []
        for i, best in enumerate(changes.argmax(axis=-1).tolist()):
            is_better = changes[i, best] > 0
            split = CategorySplit(changes[i, best], (best // 2,), best % 2 == 0, left_g[:, i, best], left_h[:, i, best])
            found.append(split if is_better else None)
        return found

    def _sorted_cuts(self, block: CategoryBlock, nodes: list[NodeToSplit]) -> list[CategorySplit | None]:
        """Cut the categories in two along their order, at most ``max_cat_threshold`` of them from either end."""
        n_categories = block.g.shape[-1]
        n_cuts = min(self._formula.max_cat_threshold, n_categories) - 1
        if n_cuts < 1:
            return [None] * len(nodes)
        order = np.argsort(
            self._formula.weight(*self._unit.decode(block.g, block.h), _NO_BOUNDS), axis=-1, kind="stable"
        )
        g, h = (np.take_along_axis(sums, order[None], axis=-1) for sums in (block.g, block.h))
        # From the lowest on: what is added up goes right, and rows without a value go left.
        low_g = block.total_g - np.cumsum(g[..., :n_cuts], axis=-1)
        low_h = block.total_h - np.cumsum(h[..., :n_cuts], axis=-1)
        # From the highest down: what is added up goes left, and rows without a value go right.
        high_g, high_h = (np.cumsum(sums[..., : -n_cuts - 1 : -1], axis=-1) for sums in (g, h))
        left_g, left_h = np.concatenate([low_g, high_g], axis=-1), np.concatenate([low_h, high_h], axis=-1)
        changes = self._loss_changes(left_g, left_h, block, nodes)
        found: list[CategorySplit | None] = []
        for i, best in enumerate(changes.argmax(axis=-1).tolist()):
            n_right = best + 1 if best < n_cuts else n_categories - 1 - (best - n_cuts)
            right = tuple(sorted(order[i, :n_right].tolist()))
            split = CategorySplit(changes[i, best], right, best < n_cuts, left_g[:, i, best], left_h[:, i, best])
            found.append(split if changes[i, best] > 0 else None)
        return found

    def _loss_changes(
        self,
        left_g: NDArray[np.int64],
        left_h: NDArray[np.int64],
        block: CategoryBlock,
        nodes: list[NodeToSplit],
    ) -> NDArray[np.float32]:
        """Return the loss change of every split; -inf where there is none. Shapes: float32[n_nodes, n_splits]."""
        return loss_changes(
            self._formula,
            self._unit,
            (left_g, left_h),
            (block.total_g, block.total_h),
            nodes,
            self._monotone,
            block.allowed[:, None],
        )


def _interleaved(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)
