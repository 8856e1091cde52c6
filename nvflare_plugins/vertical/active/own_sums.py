"""The active party's columns in its trees: one more party, whose sums are in the clear and need no asking.

Sums are of the same encoded integers as those of the passive parties, so that candidates of all columns compare as in
centralized training, ties included. Cut points are those of this party's own XGBoost, as at every party.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.exact_sums import WORD_BITS, lower_words, split
from he_processors.histogram import bins as slots
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.growth.arithmetic import Arithmetic, NodeToSplit, SplitFormula
from nvflare_plugins.growth.bins import BinLayout, bin_rows
from nvflare_plugins.growth.rows import ROOT, BinnedRows
from nvflare_plugins.vertical.active.gradient_scale import EncodedGradients
from nvflare_plugins.vertical.active.party_evaluation import Candidate, PartyEvaluator
from nvflare_plugins.vertical.passive.cut_points import find_cut_points


class OwnRows:
    """The active party's columns of the training rows, in bins, and which node of the tree each row is in."""

    def __init__(
        self,
        features: NDArray[np.float32],
        weight: NDArray[np.float32] | None,
        max_bin: int,
        categorical: Sequence[int],
        monotone: NDArray[np.int8],
        arithmetic: Arithmetic,
    ) -> None:
        """Find cut points and bin the rows.

        Shapes: features: float32[n_rows, n_columns]; weight: float32[n_rows], which cut points count; monotone:
            int8[n_columns], constraint of each column.

        Raises:
            ConfigurationError: XGBoost refuses the values.
        """
        n_rows, self.n_columns = features.shape
        cuts = find_cut_points(features.T, max_bin, categorical, weight, arithmetic)
        starts = np.cumsum([0, *(bounds.size for bounds in cuts.upper)]).astype(np.int64)
        upper = np.concatenate([np.empty(0, dtype=np.float32), *cuts.upper])
        is_categorical = np.isin(np.arange(self.n_columns), list(categorical))
        self.layout = BinLayout(upper, starts, is_categorical, cuts.lowest)
        self.rows = BinnedRows(self.layout, bin_rows(self.layout, [features], n_rows))
        self._categorical, self._monotone = tuple(categorical), monotone

    def begin_tree(self, gradients: EncodedGradients, formula: SplitFormula) -> OwnSums | None:
        """Put all rows into the root; return the sums of the tree, None without a column."""
        pairs = np.stack([gradients.g, gradients.h], axis=1)
        self.rows.begin_tree(pairs)
        if not self.n_columns:
            return None
        layout = slots.BinLayout(tuple(self.layout.bins_of_feature.tolist()))
        evaluator = PartyEvaluator(layout, formula, gradients.unit, self._monotone, self._categorical)
        return OwnSums(self, layout, evaluator, _words(pairs, gradients.n_words))


class OwnSums:
    """The sums of one tree's nodes."""

    def __init__(
        self, columns: OwnRows, layout: slots.BinLayout, evaluator: PartyEvaluator, words: Sequence[NDArray[np.int64]]
    ) -> None:
        """Args: words: what adds up to the rows' pairs (``exact_sums``). Shapes: int64[n_rows, 2] each."""
        self._columns, self._evaluator, self._words = columns, evaluator, words
        bins = columns.layout
        feature = np.repeat(np.arange(bins.n_features), bins.bins_of_feature)
        self._n_slots, self._missing = layout.n_slots, layout.starts[1:] - 1
        self._slot_of_bin = np.arange(bins.n_bins) + feature
        self._of_node: dict[int, BinSums] = {}

    def add_root(self, total: NodeTotal) -> None:
        """Add up the root."""
        self._of_node[ROOT] = self._added(ROOT, total)

    def add_children(self, node: int, built: int, other: int, total: NodeTotal) -> None:
        """Add up one child; the other is what the node has beside it. Args: total: of the child that is built."""
        parent, child = self._of_node.pop(node), self._added(built, total)
        self._of_node[built] = child
        self._of_node[other] = BinSums(parent.g - child.g, parent.h - child.h)

    def best_splits(self, nodes: Sequence[int], facts: list[NodeToSplit]) -> list[Candidate | None]:
        """Return each node's best split with a positive loss change, or None."""
        return self._evaluator.best_splits([self._of_node[node] for node in nodes], facts)

    def _added(self, node: int, total: NodeTotal) -> BinSums:
        found = np.zeros((2, len(self._words), self._n_slots), dtype=np.int64)
        starts, rows = self._columns.layout.starts[:-1], self._columns.rows
        for word, pairs in enumerate(self._words):
            sums = rows.histograms([node], pairs)[0].T
            found[:, word, self._slot_of_bin] = sums
            found[:, word, self._missing] = -np.add.reduceat(sums, starts, axis=-1)
        for side, value in zip(found, (total.g, total.h), strict=True):
            side[:, self._missing] += split([value], len(self._words))
        return BinSums(*found)


def _words(pairs: NDArray[np.int64], n_words: int) -> list[NDArray[np.int64]]:
    """Take integers apart so that sums of each part fit 64 bits. Shapes: pairs, results: int64[n_rows, 2]."""
    if n_words == 1:
        return [pairs]
    low = lower_words(pairs)
    return [low, (pairs - low) >> WORD_BITS]
