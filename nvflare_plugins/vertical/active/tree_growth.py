"""One tree as it grows: the active party's view of every node, in step with its XGBoost.

XGBoost does all that concerns the active party's own columns. This class adds what the passive parties' columns offer,
follows which candidate XGBoost takes, and keeps the rows of each node.

Reference: SecureBoost (Cheng et al., 2021), Algorithms 1 and 2; XGBoost 3.2, src/tree/updater_quantile_hist.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.exact_sums import exact_sum
from he_processors.histogram.plain_sums import NodeTotal
from nvflare_plugins.vertical.active.node_constraints import NodeConstraints
from nvflare_plugins.vertical.active.party_evaluation import Candidate
from nvflare_plugins.vertical.active.party_sums import ROOT, PartySums
from nvflare_plugins.vertical.active.split_evaluation import GradientUnit, NodeToSplit, SplitFormula
from nvflare_plugins.vertical.active.tree_driver import AppliedSplit, TreeDriver
from nvflare_plugins.vertical.active.tree_parameters import TreeParameters
from nvflare_plugins.vertical.model.private_table import NO_THRESHOLD
from nvflare_plugins.vertical.model.tree_routing import TreeStructure
from nvflare_plugins.vertical.protocol.messages import Bits, NodePartition, OwnedSplit
from nvflare_plugins.wire.expand_entries import ExpandEntry

DISAGREE = "XGBoost and the engine disagree about {}: this is not the XGBoost that the engine was made for"


@dataclass(frozen=True, slots=True, repr=False)
class EncodedGradients:
    """The gradients of one tree on the grid of the number format. Shapes: g, h: int64[n_rows]."""

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    unit: GradientUnit


@dataclass(slots=True, repr=False)
class _Node:
    depth: int
    rows: NDArray[np.int32]
    constraints: NodeConstraints
    root_gain: np.float32
    offer: tuple[PartySums, Candidate] | None = None


class TreeGrowth:
    """The state of one growing tree."""

    def __init__(
        self,
        params: TreeParameters,
        formula: SplitFormula,
        gradients: EncodedGradients,
        parties: Sequence[PartySums],
        n_columns: int,
        node_columns: Callable[[int], NDArray[np.bool_]],
    ):
        """Args: node_columns: samples the columns of a node of the given depth, in XGBoost's order."""
        self._params = params
        self._formula = formula
        self._gradients = gradients
        self.parties = parties
        self._n_columns = n_columns
        self._node_columns = node_columns
        self._driver = TreeDriver(params)
        total = NodeTotal.of_rows(gradients.g, gradients.h)
        self._totals = {ROOT: total}
        constraints = NodeConstraints()
        rows = np.arange(gradients.g.size, dtype=np.int32)
        self._nodes = {ROOT: _Node(0, rows, constraints, self._gain(total, constraints))}
        self._splits: list[AppliedSplit] = []
        self.pending = [ROOT]
        self.applied: list[AppliedSplit] = []
        self._go_left: dict[int, NDArray[np.bool_]] = {}
        self.leaf_of_row = np.zeros(gradients.g.size, dtype=np.int32)  # so far

    @property
    def is_finished(self) -> bool:
        """Whether XGBoost neither evaluates nor splits another node."""
        return not self.pending and not self.applied

    def offers(self, own: Sequence[ExpandEntry]) -> list[ExpandEntry]:
        """Evaluate the pending nodes, and follow XGBoost's choice between its own entries and these offers.

        Raises:
            ProtocolError: XGBoost evaluated other nodes than the engine expects.
        """
        expected = [(node, self._nodes[node].depth) for node in self.pending]
        if [(entry.node, entry.depth) for entry in own] != expected:
            raise ProtocolError(DISAGREE.format("the nodes of the tree"))
        columns = [self._columns_of(node) for node in self.pending]
        if any(
            entry.loss_change > 0 and not allowed[entry.feature] for entry, allowed in zip(own, columns, strict=True)
        ):
            raise ProtocolError(DISAGREE.format("the columns of a node"))
        offers = [ExpandEntry(node, self._nodes[node].depth) for node in self.pending]
        for sums in self.parties:
            facts = [self._facts(node, sums.allowed(c)) for node, c in zip(self.pending, columns, strict=True)]
            for i, candidate in enumerate(sums.evaluate(self.pending, self._totals, facts)):
                entry = None if candidate is None else self._entry(self.pending[i], sums, candidate)
                if candidate is not None and entry is not None and offers[i].is_replaced_by(entry):
                    offers[i] = entry
                    self._nodes[self.pending[i]].offer = (sums, candidate)
        winners = []
        for mine, theirs in zip(own, offers, strict=True):
            is_taken = mine.is_replaced_by(theirs)
            winners.append(theirs if is_taken else mine)
            if not is_taken:
                self._nodes[mine.node].offer = None
        self.pending = []
        self._driver.push(winners)
        self.applied = self._driver.pop()
        return offers

    def passive_decisions(self, decisions: NDArray[np.bool_]) -> None:
        """Have the passive parties divide the nodes whose splits they won.

        Shapes: decisions: bool[n_rows], XGBoost's own; theirs are written into it.

        Raises:
            ProtocolError: a party divides rows otherwise than its sums said.
        """
        asked = []
        for sums in self.parties:
            won = [s.entry.node for s in self.applied if self._offer_of(s.entry.node, sums) is not None]
            if won:
                asked.append((sums, won, sums.split([self._owned_split(node) for node in won])))
        for sums, won, future in asked:
            answers = sums.split_answer(future, [self._nodes[node].rows.size for node in won])
            for node, goes_left in zip(won, answers, strict=True):
                self._check_division(node, goes_left, sums)
                self._go_left[node] = goes_left
                decisions[self._nodes[node].rows] = goes_left

    def divide(self, decisions: NDArray[np.bool_], missing: NDArray[np.bool_]) -> None:
        """Divide the rows of the split nodes, and ask the passive parties for the sums of children to evaluate.

        Shapes: decisions, missing: bool[n_rows], XGBoost's own; passive nodes are cleared in ``missing``, because
            their owners have already sent rows without a value the right way.
        """
        partitions = []
        for split in self.applied:
            node = self._nodes[split.entry.node]
            goes_left = self._go_left.pop(split.entry.node, None)
            if goes_left is not None:
                missing[node.rows] = False
            else:
                goes_left = np.where(missing[node.rows], split.entry.default_left, decisions[node.rows])
            self.leaf_of_row[node.rows] = np.where(goes_left, split.left, split.right)
            if split.evaluates_children:
                partitions.append(self._add_children(split, node, goes_left))
            del self._nodes[split.entry.node]
        self._splits += self.applied
        if partitions:
            self.pending = [child for part in partitions for child in (part.left, part.right)]
            for sums in self.parties:
                sums.ask(partitions)
            self.applied = []
        else:
            self.applied = self._driver.pop()

    def structure(self) -> TreeStructure:
        """Return the finished tree, without its leaves' values."""
        n = self._driver.n_nodes
        left, right = np.full(n, -1, dtype=np.int32), np.full(n, -1, dtype=np.int32)
        feature, threshold = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.float32)
        default_left = np.zeros(n, dtype=bool)
        categories = {}
        for split in self._splits:
            node = split.entry.node
            left[node], right[node], feature[node] = split.left, split.right, split.entry.feature
            threshold[node], default_left[node] = split.entry.threshold, split.entry.default_left
            if split.entry.categories is not None:
                threshold[node], categories[node] = NO_THRESHOLD, split.entry.categories
        return TreeStructure(left, right, feature, threshold, default_left, categories)

    def _check_division(self, node: int, goes_left: NDArray[np.bool_], sums: PartySums) -> None:
        left, rows = self._offered(node).left, self._nodes[node].rows
        g, h = (exact_sum(values[rows[goes_left]]) for values in (self._gradients.g, self._gradients.h))
        if (g, h) != (left.g, left.h):
            raise ProtocolError(f"{sums.party.name} divided rows otherwise than its sums of gradients say")

    def _add_children(self, split: AppliedSplit, node: _Node, goes_left: NDArray[np.bool_]) -> NodePartition:
        entry = split.entry
        left_rows, right_rows = node.rows[goes_left], node.rows[~goes_left]
        total = self._totals.pop(entry.node)
        left_is_smaller = left_rows.size <= right_rows.size
        rows = left_rows if left_is_smaller else right_rows
        smaller = NodeTotal.of_rows(self._gradients.g[rows], self._gradients.h[rows])
        totals = (smaller, total.minus(smaller)) if left_is_smaller else (total.minus(smaller), smaller)
        constraints = node.constraints.of_children(entry, self._params, self._formula)
        for child, child_rows, child_total, child_constraints in zip(
            (split.left, split.right), (left_rows, right_rows), totals, constraints, strict=True
        ):
            self._totals[child] = child_total
            # XGBoost takes the gain of a new node under the bounds of its parent.
            gain = self._gain(child_total, node.constraints)
            self._nodes[child] = _Node(node.depth + 1, child_rows, child_constraints, gain)
        return NodePartition(entry.node, split.left, split.right, Bits.of(goes_left))

    def _gain(self, total: NodeTotal, constraints: NodeConstraints) -> np.float32:
        g, h = self._gradients.unit.decode_total(total)
        result: np.float32 = self._formula.gain(np.array([g]), np.array([h]), constraints.bounds)[0]
        return result

    def _columns_of(self, node: int) -> NDArray[np.bool_]:
        sampled = self._node_columns(self._nodes[node].depth)
        return sampled & self._nodes[node].constraints.allowed_columns(self._params, self._n_columns)

    def _facts(self, node: int, allowed: NDArray[np.bool_]) -> NodeToSplit:
        state = self._nodes[node]
        return NodeToSplit(self._totals[node], state.root_gain, state.constraints.bounds, allowed)

    def _entry(self, node: int, sums: PartySums, candidate: Candidate) -> ExpandEntry:
        decode = self._gradients.unit.decode_total
        feature = sums.party.first_column + candidate.feature
        return ExpandEntry(
            node,
            self._nodes[node].depth,
            float(candidate.loss_change),
            feature,
            candidate.default_left,
            0.0,
            decode(candidate.left),
            decode(candidate.right),
        )

    def _offer_of(self, node: int, sums: PartySums) -> Candidate | None:
        offer = self._nodes[node].offer
        return offer[1] if offer is not None and offer[0] is sums else None

    def _offered(self, node: int) -> Candidate:
        offer = self._nodes[node].offer
        if offer is None:
            raise ProtocolError(DISAGREE.format("the owner of a split"))
        return offer[1]

    def _owned_split(self, node: int) -> OwnedSplit:
        candidate = self._offered(node)
        right = candidate.right_bins or ()
        return OwnedSplit(node, candidate.feature, candidate.bin, candidate.default_left, right)
