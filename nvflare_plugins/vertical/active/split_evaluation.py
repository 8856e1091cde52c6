"""XGBoost's search for the best split, on sums that are exact integers.

The formulas are those of XGBoost 3.2 to the last bit: sums are doubles, gains are float32, in the order of operations
of its source. Sums of encoded gradients are integers, so left and right always add up to their node, and a feature
has missing values exactly if its missing slot is not zero.

Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateSplit), src/tree/split_evaluator.h, src/tree/param.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.exact_sums import as_words, is_zero, join, split, to_float
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.vertical.active.tree_parameters import TreeParameters

_LARGEST = np.finfo(np.float32).max
_MAX_BLOCK_CELLS = 1 << 21


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """Limits of a node's weight that follow from monotone constraints above it.

    Shapes: float32 scalars, or float32[n_nodes, 1] for several nodes at once.
    """

    lower: np.float32 | NDArray[np.float32] = -_LARGEST
    upper: np.float32 | NDArray[np.float32] = _LARGEST


@dataclass(frozen=True, slots=True, repr=False)
class GradientUnit:
    """What one step of an encoded gradient and hessian is worth: powers of two, so that decoding is exact."""

    g_exponent: int
    h_exponent: int

    def decode(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return sums as doubles, rounded once. Shapes: g, h: int64[n_words, ...]; results: float64[...]."""
        return to_float(g) * 2.0**self.g_exponent, to_float(h) * 2.0**self.h_exponent

    def decode_total(self, total: NodeTotal) -> tuple[float, float]:
        """Return one node's sums as doubles, rounded once."""
        return float(total.g) * 2.0**self.g_exponent, float(total.h) * 2.0**self.h_exponent


@dataclass(frozen=True, slots=True, repr=False)
class NodeToSplit:
    """What the evaluation must know about a node.

    Attributes:
        root_gain: gain of the node as it is, under the bounds of its parent.
        allowed: which of the party's features may split it. Shapes: bool[n_features].
    """

    total: NodeTotal
    root_gain: np.float32
    bounds: WeightBounds
    allowed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, repr=False)
class Candidate:
    """The best split of a node among one party's features.

    Attributes:
        feature: the party's own number of the feature.
        bin: the last bin that goes left; -1 if only rows without a value do.
    """

    loss_change: np.float32
    feature: int
    bin: int
    default_left: bool
    left: NodeTotal
    right: NodeTotal


class SplitFormula:
    """Weights and gains, elementwise on arrays of doubles."""

    def __init__(self, params: TreeParameters):
        self._lambda = np.float64(params.reg_lambda)
        self._alpha = np.float64(params.reg_alpha)
        self._max_delta_step = params.max_delta_step
        self._min_child_weight = np.float64(params.min_child_weight)
        self.is_constrained = bool(params.monotone)
        self._uses_weights = self.is_constrained or params.max_delta_step != 0

    def weight(self, g: NDArray[np.float64], h: NDArray[np.float64], bounds: WeightBounds) -> NDArray[np.float32]:
        """Return leaf weights before the learning rate."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            weight = -self._threshold(g) / (h + self._lambda)
            if self._max_delta_step != 0:
                limit = np.float64(self._max_delta_step)
                weight = np.where(np.abs(weight) > limit, np.copysign(limit, weight), weight)
            rounded = np.where((h < self._min_child_weight) | (h <= 0), 0.0, weight).astype(np.float32)
        if not self.is_constrained:
            return rounded
        return np.where(rounded < bounds.lower, bounds.lower, np.where(rounded > bounds.upper, bounds.upper, rounded))

    def gain(self, g: NDArray[np.float64], h: NDArray[np.float64], bounds: WeightBounds) -> NDArray[np.float32]:
        """Return the gain of nodes that stay as they are."""
        if not self._uses_weights:
            return self._ratio_gain(g, h)
        return self._weight_gain(g, h, self.weight(g, h, bounds))

    def split_gain(
        self,
        left: tuple[NDArray[np.float64], NDArray[np.float64]],
        right: tuple[NDArray[np.float64], NDArray[np.float64]],
        monotone: NDArray[np.int8],
        bounds: WeightBounds,
    ) -> NDArray[np.float32]:
        """Return the gains of splits; minus infinity where a monotone constraint forbids one.

        Shapes: left, right: (float64[n], float64[n]); monotone: int8[n], broadcastable; result: float32[n].
        """
        if not self._uses_weights:
            return self._ratio_gain(*left) + self._ratio_gain(*right)
        w_left, w_right = self.weight(*left, bounds), self.weight(*right, bounds)
        gain = self._weight_gain(*left, w_left) + self._weight_gain(*right, w_right)
        forbidden = ((monotone > 0) & ~(w_left <= w_right)) | ((monotone < 0) & ~(w_left >= w_right))
        return np.where(forbidden, np.float32(-np.inf), gain)

    def is_valid(self, h_left: NDArray[np.float64], h_right: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which splits leave enough hessian on both sides."""
        return (h_left >= self._min_child_weight) & (h_right >= self._min_child_weight)

    def _threshold(self, g: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._alpha == 0:
            return g
        return np.where(g > self._alpha, g - self._alpha, np.where(g < -self._alpha, g + self._alpha, 0.0))

    def _ratio_gain(self, g: NDArray[np.float64], h: NDArray[np.float64]) -> NDArray[np.float32]:
        # Both arguments of XGBoost's division are narrowed to float32 before it divides.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            threshold = self._threshold(g)
            gain = (threshold * threshold).astype(np.float32) / (h + self._lambda).astype(np.float32)
        return np.where(h <= 0, np.float32(0), gain)

    def _weight_gain(
        self, g: NDArray[np.float64], h: NDArray[np.float64], weight: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore", over="ignore"):
            g32, h32 = g.astype(np.float32), h.astype(np.float32)
            regularised = h32 + np.float32(self._lambda)
            gain = -(np.float32(2) * g32 * weight + regularised * (weight * weight))
        return np.where(h <= 0, np.float32(0), gain)


class PartyEvaluator:
    """Finds the best splits among the features of one party.

    Security: runs where the sums are known, at the key owner; needs no threshold.
    """

    def __init__(
        self, layout: BinLayout, formula: SplitFormula, unit: GradientUnit, monotone: NDArray[np.int8]
    ) -> None:
        """Args: monotone: constraint of each of the party's features. Shapes: int8[n_features]."""
        self._layout = layout
        self._formula = formula
        self._unit = unit
        self._feature = np.repeat(np.arange(layout.n_features), np.array(layout.n_bins, dtype=np.int64) + 1)
        self._missing_slot = layout.starts[1:] - 1
        self._is_bin = np.ones(layout.n_slots, dtype=bool)
        self._is_bin[self._missing_slot] = False
        self._monotone = monotone[self._feature]
        # XGBoost scans a second time from the last bin down: on a tie the highest bin wins.
        self._downwards = np.concatenate(
            [
                np.arange(end - 1, start - 1, -1)
                for start, end in zip(layout.starts[:-1], layout.starts[1:], strict=True)
            ]
        )

    def best_splits(self, sums: list[BinSums], nodes: list[NodeToSplit]) -> list[Candidate | None]:
        """Return each node's best split with a positive loss change, or None.

        Shapes: sums: for each node int64[n_slots].
        """
        n_block = max(1, _MAX_BLOCK_CELLS // self._layout.n_slots)
        found: list[Candidate | None] = []
        for start in range(0, len(nodes), n_block):
            found += self._block(sums[start : start + n_block], nodes[start : start + n_block])
        return found

    def _block(self, sums: list[BinSums], nodes: list[NodeToSplit]) -> list[Candidate | None]:
        # From here on int64[n_words, n_nodes, n_slots].
        g = np.stack([as_words(s.g) for s in sums], axis=1)
        h = np.stack([as_words(s.h) for s in sums], axis=1)
        left_g, left_h = self._prefix_sums(g), self._prefix_sums(h)
        allowed = np.stack([node.allowed for node in nodes])[:, self._feature] & self._is_bin
        forward = self._loss_changes(left_g, left_h, nodes, allowed)
        best = [self._pick(forward[i], node, False, left_g[:, i], left_h[:, i]) for i, node in enumerate(nodes)]
        missing_g, missing_h = g[..., self._missing_slot], h[..., self._missing_slot]
        has_missing = ~(is_zero(missing_g) & is_zero(missing_h))
        if not has_missing.any():
            return best
        # Row by row the same bins, with the rows that lack the value on the left: bin i then splits below itself.
        left_g += missing_g[..., self._feature] - g
        left_h += missing_h[..., self._feature] - h
        backward = self._loss_changes(left_g, left_h, nodes, allowed & has_missing[:, self._feature])
        for i, node in enumerate(nodes):
            best[i] = _better(best[i], self._pick(backward[i], node, True, left_g[:, i], left_h[:, i]))
        return best

    def _prefix_sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add up each feature's bins from its first one. Sums over features may wrap; their differences do not."""
        running = np.cumsum(values, axis=-1)
        starts = self._layout.starts[:-1]
        before = running[..., starts] - values[..., starts]
        return running - before[..., self._feature]

    def _loss_changes(
        self,
        left_g: NDArray[np.int64],
        left_h: NDArray[np.int64],
        nodes: list[NodeToSplit],
        allowed: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        """Return the loss change of every split; -inf where there is none. Shapes: float32[n_nodes, n_slots]."""
        left = self._unit.decode(left_g, left_h)
        total_g = split([n.total.g for n in nodes], len(left_g))[..., None]
        total_h = split([n.total.h for n in nodes], len(left_h))[..., None]
        right = self._unit.decode(total_g - left_g, total_h - left_h)
        bounds = WeightBounds(_column([n.bounds.lower for n in nodes]), _column([n.bounds.upper for n in nodes]))
        gain = self._formula.split_gain(left, right, self._monotone, bounds)
        with np.errstate(invalid="ignore"):
            change = gain - _column([n.root_gain for n in nodes])
        usable = allowed & self._formula.is_valid(left[1], right[1]) & np.isfinite(change)
        return np.where(usable, change, np.float32(-np.inf))

    def _pick(
        self,
        changes: NDArray[np.float32],
        node: NodeToSplit,
        default_left: bool,
        left_g: NDArray[np.int64],
        left_h: NDArray[np.int64],
    ) -> Candidate | None:
        """Take the first of the largest loss changes in XGBoost's order: lowest feature, then along its scan."""
        slot = int(self._downwards[np.argmax(changes[self._downwards])]) if default_left else int(np.argmax(changes))
        if not changes[slot] > 0:
            return None
        feature = int(self._feature[slot])
        left = NodeTotal(0, join(left_g[:, slot]), join(left_h[:, slot]))
        right = NodeTotal(0, node.total.g - left.g, node.total.h - left.h)
        last_left_bin = slot - int(self._layout.starts[feature]) - default_left
        return Candidate(changes[slot], feature, last_left_bin, default_left, left, right)


def _column(values: list[Any]) -> NDArray[Any]:
    return np.array(values)[:, None]


def _better(forward: Candidate | None, backward: Candidate | None) -> Candidate | None:
    """Compare the two scans: within a feature the forward one comes first, across features the lower one does."""
    if forward is None or backward is None:
        return forward or backward
    if backward.loss_change == forward.loss_change:
        return backward if backward.feature < forward.feature else forward
    return backward if backward.loss_change > forward.loss_change else forward
