"""One tree as it grows at the active party, from its own columns and from what the passive parties' columns offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.exact_sums import WORD_BITS, exact_sum, lower_words, split
from he_processors.histogram import planner as slots
from he_processors.histogram.planner import child_to_build
from he_processors.histogram.sums import BinSums, NodeTotal
from nvflare_plugins.growth.arithmetic import Arithmetic, NodeToSplit, SplitFormula, TreeParameters, WeightBounds
from nvflare_plugins.growth.bins import BinLayout, bin_rows
from nvflare_plugins.growth.rows import ROOT, BinnedRows, NodeSplit
from nvflare_plugins.growth.splits import Entry, NodeConstraints
from nvflare_plugins.growth.tree import NO_THRESHOLD, AppliedSplit, Tree, TreeDriver, finished_tree
from nvflare_plugins.kinds.vertical.gradient_scale import EncodedGradients
from nvflare_plugins.kinds.vertical.messages import Bits, NodePartition, OwnDivision, OwnedSplit
from nvflare_plugins.kinds.vertical.party_data import find_cut_points
from nvflare_plugins.kinds.vertical.party_sums import Candidate, PartyEvaluator, PartySums

# The active party's columns in its trees: one more party, whose sums are in the clear and need no asking.
#
# Sums are of the same encoded integers as those of the passive parties, so that candidates of all columns compare as in
# centralized training, ties included. Cut points are those of this party's own XGBoost, as at every party.


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


# One tree as it grows at the active party, from its own columns and from what the passive parties' columns offer.
#
# Level by level, or split by split under ``lossguide``: the sums of all parties are evaluated, the best split of each
# node wins, its owner says how it divides the rows, and the others are asked for sums of the children. The driver, the
# constraints and the formulas are those of XGBoost (growth/).
#
# Reference: SecureBoost (Cheng et al., 2021), Algorithms 1 and 2; XGBoost 3.2, src/tree/updater_quantile_hist.cc.


_MASKED = np.float32(0)
"""In the place of a threshold that belongs to another party and stays there."""


@dataclass(slots=True, repr=False)
class _Node:
    depth: int
    constraints: NodeConstraints
    root_gain: np.float32
    best: Candidate | None = None  # features numbered as its owner's
    owner: PartySums | None = None  # of the best split; None is this party
    goes_left: NDArray[np.bool_] | None = None  # once it is known


class TreeGrowth:
    """The state of one growing tree."""

    def __init__(
        self,
        params: TreeParameters,
        formula: SplitFormula,
        eta: np.float32,
        gradients: EncodedGradients,
        own: OwnRows,
        parties: Sequence[PartySums],
        n_columns: int,
        node_columns: Callable[[int], NDArray[np.bool_]],
    ):
        """Prepare for one tree, of which the parties have been asked for the root.

        Args:
            eta: learning rate of the tree.
            n_columns: of all parties.
            node_columns: samples the columns of a node of the given depth, in XGBoost's order.
        """
        self._params, self._formula, self._eta, self._gradients = params, formula, eta, gradients
        self._own, self._rows = own, own.rows
        self.parties = parties
        self._n_columns, self._node_columns = n_columns, node_columns
        self._driver: TreeDriver[Entry] = TreeDriver(params)
        self._own_sums = own.begin_tree(gradients, formula)
        total, constraints = NodeTotal.of_rows(gradients.g, gradients.h), NodeConstraints()
        self._totals = [total]  # of all nodes
        self._nodes = {ROOT: _Node(0, constraints, self._gain(total, constraints))}
        self._splits: list[NodeSplit] = []
        self._thresholds: list[np.float32] = []
        self._changes: list[float] = []
        self._bounds: list[WeightBounds] = []  # of the nodes that were divided
        self._told: list[tuple[PartySums, list[int], Future[Any]]] = []  # of which splits, and the answers to come
        self._unasked: list[PartySums] = []  # parties that have yet to hear how another passive party divides rows

    def grow(self) -> Tree:
        """Grow the tree; afterwards the rows are in its leaves.

        Raises:
            ProtocolError: a party's sums or decisions cannot be right.
        """
        if self._own_sums is not None:
            self._own_sums.add_root(self._totals[ROOT])
        self._evaluate([ROOT])
        while batch := self._driver.pop():
            self._announce(batch)
            self._take_decisions()
            self._evaluate(self._divide(batch))
        formula, sums = self._formula, [self._gradients.unit.decode_total(total) for total in self._totals]
        g, h = np.array(sums, dtype=np.float64).T
        return finished_tree(formula, self._eta, self._splits, self._thresholds, self._changes, self._bounds, (g, h))

    # -- the best split of each node ----------------------------------------------------------------------------------

    def _evaluate(self, nodes: Sequence[int]) -> None:
        """Find the best splits of nodes; of equal ones that of the lowest column is taken, as in XGBoost."""
        if not nodes:
            return
        columns = [self._columns_of(node) for node in nodes]
        if self._own_sums is not None:
            own = [columns[i][: self._own.n_columns] for i in range(len(nodes))]
            facts = [self._facts(node, allowed) for node, allowed in zip(nodes, own, strict=True)]
            self._take_better(nodes, self._own_sums.best_splits(nodes, facts), None)
        for sums in self.parties:
            facts = [self._facts(node, sums.allowed(c)) for node, c in zip(nodes, columns, strict=True)]
            totals = dict(enumerate(self._totals))
            self._take_better(nodes, sums.evaluate(list(nodes), totals, facts), sums)
        self._driver.push([self._entry(node, best) for node in nodes if (best := self._nodes[node].best) is not None])

    def _take_better(
        self, nodes: Sequence[int], candidates: Sequence[Candidate | None], owner: PartySums | None
    ) -> None:
        for number, candidate in zip(nodes, candidates, strict=True):
            node = self._nodes[number]
            if candidate is not None and (node.best is None or candidate.loss_change > node.best.loss_change):
                node.best, node.owner = candidate, owner

    def _entry(self, number: int, best: Candidate) -> Entry:
        node, decode = self._nodes[number], self._gradients.unit.decode_total
        sides = decode(best.left), decode(best.right)
        return Entry(number, node.depth, float(best.loss_change), self._column(node, best), *sides)

    def _columns_of(self, node: int) -> NDArray[np.bool_]:
        state = self._nodes[node]
        return self._node_columns(state.depth) & state.constraints.allowed_columns(self._params, self._n_columns)

    def _facts(self, node: int, allowed: NDArray[np.bool_]) -> NodeToSplit:
        state = self._nodes[node]
        return NodeToSplit(self._totals[node], state.root_gain, state.constraints.bounds, allowed)

    def _gain(self, total: NodeTotal, constraints: NodeConstraints) -> np.float32:
        g, h = self._gradients.unit.decode_total(total)
        result: np.float32 = self._formula.gain(np.array([g]), np.array([h]), constraints.bounds)[0]
        return result

    # -- how rows are divided -----------------------------------------------------------------------------------------

    def _announce(self, batch: Sequence[AppliedSplit[Entry]]) -> None:
        """Tell parties which splits they won, and ask for sums of children where all that takes is known by now."""
        for applied in batch:
            node, best = self._state_of(applied)
            if node.owner is None:
                node.goes_left = self._rows.goes_left(self._as_split(applied, best))
        owners = set()
        for sums in self.parties:
            won = [split.entry.node for split in batch if self._state_of(split)[0].owner is sums]
            if won:
                self._told.append((sums, won, sums.split([self._owned_split(node) for node in won])))
                owners.add(sums)
        if any(split.evaluates_children for split in batch):
            self._unasked = [sums for sums in self.parties if owners - {sums}]
        self._ask([sums for sums in self.parties if sums not in self._unasked], batch)

    def _take_decisions(self) -> None:
        """Wait for the owners of the splits just told. Raises: ProtocolError: one divides otherwise than it said."""
        for sums, won, future in self._told:
            answers = sums.split_answer(future, [self._rows.rows_of(node).size for node in won])
            for number, goes_left in zip(won, answers, strict=True):
                self._check_division(number, goes_left, sums)
                self._nodes[number].goes_left = goes_left
        self._told = []

    def _divide(self, batch: Sequence[AppliedSplit[Entry]]) -> list[int]:
        """Divide the rows, and ask the parties that could not be asked yet; return the children to evaluate."""
        pending: list[int] = []
        for applied in batch:
            (node, best), entry = self._state_of(applied), applied.entry
            if node.goes_left is None:
                raise ProtocolError("nobody has said how a split divides its rows")
            self._rows.divide(entry.node, applied.left, applied.right, node.goes_left)
            self._add_children(applied, node)
            pending += [applied.left, applied.right] if applied.evaluates_children else []
            self._splits.append(self._as_split(applied, best))
            self._thresholds.append(self._threshold(node, best))
            self._changes.append(entry.loss_change)
            self._bounds.append(node.constraints.bounds)
        self._ask(self._unasked, batch)
        self._unasked = []
        for applied in batch:
            del self._nodes[applied.entry.node]
        return pending

    def _ask(self, parties: Sequence[PartySums], batch: Sequence[AppliedSplit[Entry]]) -> None:
        """Ask parties for the sums of a child of each divided node whose children may be divided in turn."""
        evaluated = [split for split in batch if split.evaluates_children]
        states = [(split, self._nodes[split.entry.node]) for split in evaluated]
        for sums in parties if evaluated else ():
            partitions = [
                NodePartition(s.entry.node, s.left, s.right, Bits.of(node.goes_left))
                for s, node in states
                if node.owner is not sums and node.goes_left is not None
            ]
            own = [(s, node) for s, node in states if node.owner is sums]
            divisions = [OwnDivision(s.entry.node, s.left, s.right) for s, _ in own]
            sums.ask(partitions, divisions, sum(self._totals[s.entry.node].n_rows for s, _ in own))
        for sums in parties:
            sums.party.link.flush()

    def _check_division(self, node: int, goes_left: NDArray[np.bool_], sums: PartySums) -> None:
        offered, rows = self._best(node), self._rows.rows_of(node)
        g, h = (exact_sum(values[rows[goes_left]]) for values in (self._gradients.g, self._gradients.h))
        most_g, most_h = sums.most_noise(offered.feature)
        if abs(g - offered.left.g) > most_g or abs(h - offered.left.h) > most_h:
            raise ProtocolError(f"{sums.party.name} divided rows otherwise than its sums of gradients say")

    def _add_children(self, split: AppliedSplit[Entry], node: _Node) -> None:
        """Take note of the children's sums, which are of their rows, exact also where candidates were noised."""
        total, rows = self._totals[split.entry.node], [self._rows.rows_of(child) for child in (split.left, split.right)]
        smaller = int(rows[0].size > rows[1].size)
        added = NodeTotal.of_rows(*(values[rows[smaller]] for values in (self._gradients.g, self._gradients.h)))
        totals = [added, total.minus(added)] if smaller == 0 else [total.minus(added), added]
        self._totals += totals
        if not split.evaluates_children:
            return
        decode, numbers = self._gradients.unit.decode_total, (split.left, split.right)
        sums = [decode(one) for one in totals]
        division = Entry(split.entry.node, node.depth, split.entry.loss_change, split.entry.feature, sums[0], sums[1])
        constraints = node.constraints.of_children(division, self._params, self._formula)
        for child, child_total, child_constraints in zip(numbers, totals, constraints, strict=True):
            # XGBoost takes the gain of a new node under the bounds of its parent.
            self._nodes[child] = _Node(node.depth + 1, child_constraints, self._gain(child_total, node.constraints))
        if self._own_sums is not None:
            built = child_to_build(split.left, totals[0].n_rows, split.right, totals[1].n_rows)
            self._own_sums.add_children(split.entry.node, built, sum(numbers) - built, self._totals[built])

    # -- splits in other forms ----------------------------------------------------------------------------------------

    def _best(self, node: int) -> Candidate:
        best = self._nodes[node].best
        if best is None:
            raise ProtocolError("a node is divided that has no split")
        return best

    def _state_of(self, split: AppliedSplit[Entry]) -> tuple[_Node, Candidate]:
        return self._nodes[split.entry.node], self._best(split.entry.node)

    @staticmethod
    def _column(node: _Node, best: Candidate) -> int:
        return best.feature + (0 if node.owner is None else node.owner.party.first_column)

    def _as_split(self, split: AppliedSplit[Entry], best: Candidate) -> NodeSplit:
        """Return a split as the model has it: without the sets of categories of other parties."""
        is_own = self._nodes[split.entry.node].owner is None
        right = best.right_bins if is_own else None
        return NodeSplit(
            split.entry.node, split.left, split.right, split.entry.feature, best.bin, best.default_left, right
        )

    def _threshold(self, node: _Node, best: Candidate) -> np.float32:
        if node.owner is not None:
            return _MASKED
        return NO_THRESHOLD if best.right_bins is not None else self._own.layout.threshold(best.feature, best.bin)

    def _owned_split(self, node: int) -> OwnedSplit:
        best = self._best(node)
        return OwnedSplit(node, best.feature, best.bin, best.default_left, best.right_bins or ())
