"""What monotone and interaction constraints allow in each node of a tree.

Reference: XGBoost 3.2, src/tree/constraints.cc (SplitImpl), src/tree/split_evaluator.h (AddSplit).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.arithmetic import SplitFormula, WeightBounds
from nvflare_plugins.growth.tree_parameters import TreeParameters


class Division(Protocol):
    """A split as its children's constraints follow from it. Units: sums are (gradient, hessian) as doubles."""

    @property
    def feature(self) -> int: ...
    @property
    def left_sum(self) -> tuple[float, float]: ...
    @property
    def right_sum(self) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class NodeConstraints:
    """Constraints of one node: bounds of its weight, and the features on the path to it."""

    bounds: WeightBounds = WeightBounds()
    path_features: frozenset[int] = frozenset()

    def allowed_columns(self, params: TreeParameters, n_columns: int) -> NDArray[np.bool_]:
        """Return the columns that may split the node. Shapes: result: bool[n_columns], over all parties."""
        if params.interactions is None or not self.path_features:
            return np.ones(n_columns, dtype=bool)
        allowed = set(self.path_features)
        for group in params.interactions:
            if self.path_features <= group:
                allowed |= group
        mask = np.zeros(n_columns, dtype=bool)
        mask[[column for column in allowed if column < n_columns]] = True
        return mask

    def of_children(
        self, entry: Division, params: TreeParameters, formula: SplitFormula
    ) -> tuple[NodeConstraints, NodeConstraints]:
        """Return the constraints of the left and the right child of a split."""
        if params.interactions is None and not formula.is_constrained:
            return self, self
        path = self.path_features | {entry.feature} if params.interactions is not None else self.path_features
        if not formula.is_constrained:
            child = NodeConstraints(self.bounds, path)
            return child, child
        left, right = self._bounds_of_children(entry, params, formula)
        return NodeConstraints(left, path), NodeConstraints(right, path)

    def _bounds_of_children(
        self, entry: Division, params: TreeParameters, formula: SplitFormula
    ) -> tuple[WeightBounds, WeightBounds]:
        w_left, w_right = (
            np.float32(formula.weight(np.array(g), np.array(h), self.bounds))
            for g, h in (entry.left_sum, entry.right_sum)
        )
        middle = (w_left + w_right) / np.float32(2)
        direction = params.monotone[entry.feature] if entry.feature < len(params.monotone) else 0
        lower, upper = self.bounds.lower, self.bounds.upper
        if direction < 0:
            return WeightBounds(middle, upper), WeightBounds(lower, middle)
        if direction > 0:
            return WeightBounds(lower, middle), WeightBounds(middle, upper)
        return self.bounds, self.bounds
