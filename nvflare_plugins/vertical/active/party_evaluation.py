"""The best splits among one party's columns, on sums that are exact integers.

Sums of encoded gradients are integers, so left and right always add up to their node, and a feature has missing values
exactly if its missing slot is not zero.

Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateSplit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from he_processors.exact_sums import as_words, is_zero, join, split
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.growth.arithmetic import GradientUnit, NodeToSplit, SplitFormula, loss_changes
from nvflare_plugins.growth.bins import BinLayout as GrowthLayout
from nvflare_plugins.growth.categories import CategoryBlock, CategoryEvaluator, CategorySplit
from nvflare_plugins.growth.splits import Question, Split, SplitFinder
from nvflare_plugins.vertical.active.noised_evaluation import NoisedBins

_MAX_BLOCK_CELLS = 1 << 21


@dataclass(frozen=True, slots=True, repr=False)
class Candidate:
    """The best split of a node among one party's features.

    Attributes:
        feature: the party's own number of the feature.
        bin: the last bin that goes left; -1 if only rows without a value do.
        right_bins: of a categorical feature, the bins that go right, ascending; ``bin`` then says nothing.
    """

    loss_change: np.float32
    feature: int
    bin: int
    default_left: bool
    left: NodeTotal
    right: NodeTotal
    right_bins: tuple[int, ...] | None = None


class PartyEvaluator:
    """Finds the best splits among the features of one party.

    Security: runs where the sums are known, at the key owner; needs no threshold.
    """

    def __init__(
        self,
        layout: BinLayout,
        formula: SplitFormula,
        unit: GradientUnit,
        monotone: NDArray[np.int8],
        categorical: Sequence[int] = (),
        noise: NoisedBins | None = None,
    ) -> None:
        """Prepare for the features of one tree.

        Args:
            monotone: constraint of each of the party's features. Shapes: int8[n_features].
            categorical: features whose bins are categories.
            noise: on the sums; None where they are exact.
        """
        self._noise = noise
        self._layout = layout
        self._formula = formula
        self._unit = unit
        self._feature = np.repeat(np.arange(layout.n_features), np.array(layout.n_bins, dtype=np.int64) + 1)
        self._missing_slot = layout.starts[1:] - 1
        self._is_bin = np.ones(layout.n_slots, dtype=bool)
        self._is_bin[self._missing_slot] = False
        self._slots_of_bins = np.flatnonzero(self._is_bin)
        self._finder = None if noise is not None else _finder(layout, formula, unit, monotone, categorical)
        self._categorical = {
            feature: CategoryEvaluator(formula, unit, int(monotone[feature])) for feature in categorical
        }
        self._is_bin[np.isin(self._feature, list(self._categorical))] = False
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
        if self._finder is not None and all(one.g.ndim == 1 or len(one.g) == 1 for one in sums):
            return self._in_one_word(self._finder, sums, nodes)
        found: list[Candidate | None] = []
        for start in range(0, len(nodes), n_block):
            found += self._block(sums[start : start + n_block], nodes[start : start + n_block])
        return found

    def _in_one_word(
        self, finder: SplitFinder, sums: list[BinSums], nodes: list[NodeToSplit]
    ) -> list[Candidate | None]:
        """Let the kernel find the splits, which takes exact sums of 64 bits."""
        if not nodes:
            return []
        bins = [np.stack([as_words(s.g)[0], as_words(s.h)[0]], axis=1)[self._slots_of_bins] for s in sums]
        return [
            None if split is None else self._from_split(split, node)
            for split, node in zip(finder.best(bins, Question.of_nodes(nodes)), nodes, strict=True)
        ]

    @staticmethod
    def _from_split(split: Split, node: NodeToSplit) -> Candidate:
        left = NodeTotal(0, *split.left)
        right = NodeTotal(0, node.total.g - left.g, node.total.h - left.h)
        change = np.float32(split.loss_change)
        return Candidate(change, split.feature, split.bin, split.default_left, left, right, split.right_categories)

    def _block(self, sums: list[BinSums], nodes: list[NodeToSplit]) -> list[Candidate | None]:
        # From here on int64[n_words, n_nodes, n_slots].
        g = np.stack([as_words(s.g) for s in sums], axis=1)
        h = np.stack([as_words(s.h) for s in sums], axis=1)
        best = self._by_threshold(g, h, nodes)
        for feature, evaluator in self._categorical.items():
            best = list(map(_better_feature, best, self._by_category(feature, evaluator, g, h, nodes)))
        return best

    def _by_threshold(
        self, g: NDArray[np.int64], h: NDArray[np.int64], nodes: list[NodeToSplit]
    ) -> list[Candidate | None]:
        """Return each node's best split of the columns of numbers."""
        if self._noise is not None:
            totals = _totals(nodes, len(g))
            g, h = self._noise.in_step(g, totals[0]), self._noise.in_step(h, totals[1])
        left_g, left_h = self._prefix_sums(g), self._prefix_sums(h)
        allowed = np.stack([node.allowed for node in nodes])[:, self._feature] & self._is_bin
        forward = self._loss_changes(left_g, left_h, nodes, allowed)
        best = [self._pick(forward[i], node, False, left_g[:, i], left_h[:, i]) for i, node in enumerate(nodes)]
        missing_g, missing_h = g[..., self._missing_slot], h[..., self._missing_slot]
        has_missing = ~(is_zero(missing_g) & is_zero(missing_h))
        has_missing &= self._is_bin[self._layout.starts[:-1]]  # of a column of numbers
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
        totals = _totals(nodes, len(left_g))
        left = (left_g, left_h) if self._noise is None else self._noise.careful((left_g, left_h), totals)
        return loss_changes(self._formula, self._unit, left, totals, nodes, self._monotone, allowed)

    def _by_category(
        self,
        feature: int,
        evaluator: CategoryEvaluator,
        g: NDArray[np.int64],
        h: NDArray[np.int64],
        nodes: list[NodeToSplit],
    ) -> list[Candidate | None]:
        """Return each node's best split of one categorical feature. Shapes: g, h: int64[n_words, n_nodes, n_slots]."""
        bins = slice(int(self._layout.starts[feature]), int(self._missing_slot[feature]))
        lacking = slice(bins.stop, bins.stop + 1)
        allowed = np.array([node.allowed[feature] for node in nodes])
        block = CategoryBlock(
            g[..., bins], h[..., bins], *_totals(nodes, len(g)), g[..., lacking], h[..., lacking], allowed
        )
        return [
            None if found is None else self._candidate(feature, found, node)
            for found, node in zip(evaluator.best_splits(block, nodes), nodes, strict=True)
        ]

    @staticmethod
    def _candidate(feature: int, split: CategorySplit, node: NodeToSplit) -> Candidate:
        left = NodeTotal(0, join(split.left_g), join(split.left_h))
        right = NodeTotal(0, node.total.g - left.g, node.total.h - left.h)
        return Candidate(split.loss_change, feature, -1, split.default_left, left, right, split.right)

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


def _finder(
    layout: BinLayout,
    formula: SplitFormula,
    unit: GradientUnit,
    monotone: NDArray[np.int8],
    categorical: Sequence[int],
) -> SplitFinder:
    """Return the search over the party's features as if they were all."""
    params = replace(formula.params, monotone=tuple(monotone.tolist()) if formula.is_constrained else ())
    starts = np.cumsum([0, *layout.n_bins]).astype(np.int64)
    is_categorical = np.isin(np.arange(layout.n_features), list(categorical))
    no_values = np.empty(0, dtype=np.float32)  # thresholds belong to the party
    bins = GrowthLayout(no_values, starts, is_categorical, no_values)
    return SplitFinder(bins, SplitFormula(params, formula.arithmetic), unit)


def _totals(nodes: list[NodeToSplit], n_words: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sums of nodes in words. Shapes: results: int64[n_words, n_nodes, 1]."""
    return (
        split([n.total.g for n in nodes], n_words)[..., None],
        split([n.total.h for n in nodes], n_words)[..., None],
    )


def _better(forward: Candidate | None, backward: Candidate | None) -> Candidate | None:
    """Compare the two scans: within a feature the forward one comes first, across features the lower one does."""
    if forward is None or backward is None:
        return forward or backward
    if backward.loss_change == forward.loss_change:
        return backward if backward.feature < forward.feature else forward
    return backward if backward.loss_change > forward.loss_change else forward


def _better_feature(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    """Compare the best splits of different features: on a tie the lower feature wins."""
    if one is None or other is None:
        return one or other
    if one.loss_change == other.loss_change:
        return min(one, other, key=lambda candidate: candidate.feature)
    return max(one, other, key=lambda candidate: candidate.loss_change)
