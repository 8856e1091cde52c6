"""One tree as it grows: the active party's view of every node, in step with its XGBoost.

XGBoost does all that concerns the active party's own columns. This class adds what the passive parties' columns offer,
follows which candidate XGBoost takes, and keeps the rows of each node.

Reference: SecureBoost (Cheng et al., 2021), Algorithms 1 and 2; XGBoost 3.2, src/tree/updater_quantile_hist.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.exact_sums import exact_sum
from he_processors.histogram.plain_sums import NodeTotal
from nvflare_plugins.growth.arithmetic import GradientUnit, NodeToSplit, SplitFormula
from nvflare_plugins.growth.constraints import NodeConstraints
from nvflare_plugins.growth.driver import AppliedSplit, TreeDriver
from nvflare_plugins.growth.tree_parameters import TreeParameters
from nvflare_plugins.vertical.active.party_evaluation import Candidate
from nvflare_plugins.vertical.active.party_sums import ROOT, PartySums
from nvflare_plugins.vertical.model.private_table import NO_THRESHOLD, are_others
from nvflare_plugins.vertical.model.tree_routing import TreeStructure
from nvflare_plugins.vertical.protocol.messages import Bits, NodePartition, OwnDivision, OwnedSplit
from nvflare_plugins.wire.expand_entries import ExpandEntry

DISAGREE = "XGBoost and the engine disagree about {}: this is not the XGBoost that the engine was made for"

_TRACE = 1e-30  # of hessian


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
    goes_left: NDArray[np.bool_] | None = None  # once it is known


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
        own_columns: NDArray[np.float32],
    ):
        """Prepare for one tree.

        Args:
            node_columns: samples the columns of a node of the given depth, in XGBoost's order.
            own_columns: the active party's. Shapes: float32[n_rows, n_own_columns].
        """
        self._params = params
        self._formula = formula
        self._gradients = gradients
        self.parties = parties
        self._n_columns = n_columns
        self._node_columns = node_columns
        self._own_columns = own_columns
        self._driver: TreeDriver[ExpandEntry] = TreeDriver(params)
        total = NodeTotal.of_rows(gradients.g, gradients.h)
        self._totals = {ROOT: total}
        constraints = NodeConstraints()
        rows = np.arange(gradients.g.size, dtype=np.int32)
        self._nodes = {ROOT: _Node(0, rows, constraints, self._gain(total, constraints))}
        self._splits: list[AppliedSplit[ExpandEntry]] = []
        self.pending = [ROOT]
        self.applied: list[AppliedSplit[ExpandEntry]] = []
        self._told: list[tuple[PartySums, list[int], Future[Any]]] = []  # of which splits, and the answers to come
        self._unasked: list[PartySums] = []  # parties that have yet to hear how another passive party divides rows
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
        self._apply()
        self._make_exact(offers)
        return offers

    def passive_decisions(self, decisions: NDArray[np.bool_]) -> None:
        """Take in how the passive parties divide the nodes whose splits they won.

        Shapes: decisions: bool[n_rows], XGBoost's own; theirs are written into it.

        Raises:
            ProtocolError: a party divides rows otherwise than its sums said.
        """
        self._take_decisions()
        for split in self.applied:
            node = self._nodes[split.entry.node]
            if node.offer is not None and node.goes_left is not None:
                decisions[node.rows] = node.goes_left

    def _take_decisions(self) -> None:
        """Wait for the owners of the splits just told. Raises: ProtocolError: see ``passive_decisions``."""
        for sums, won, future in self._told:
            answers = sums.split_answer(future, [self._nodes[node].rows.size for node in won])
            for number, goes_left in zip(won, answers, strict=True):
                self._check_division(number, goes_left, sums)
                self._nodes[number].goes_left = goes_left
        self._told = []

    def _make_exact(self, offers: list[ExpandEntry]) -> None:
        """Replace noised sums of the splits that were won by exact ones, which XGBoost sets leaves and children from.

        The owners have told by then which rows go left, so that this party can add up its own gradients. It needs a
        tree that grows level by level: all nodes that XGBoost will split are known at once.
        """
        if not any(sums.is_noised for sums, _, _ in self._told):
            return
        self._take_decisions()
        exact: dict[int, ExpandEntry] = {}
        for i, split in enumerate(self.applied):
            node = self._nodes[split.entry.node]
            if node.offer is None or node.goes_left is None:
                continue
            total = self._totals[split.entry.node]
            rows = node.rows[node.goes_left]
            left = NodeTotal.of_rows(self._gradients.g[rows], self._gradients.h[rows])
            sides = [self._sums_of_side(side) for side in (left, total.minus(left))]
            entry = replace(split.entry, left_sum=sides[0], right_sum=sides[1])
            exact[entry.node] = entry
            self.applied[i] = replace(split, entry=entry)
        offers[:] = [exact.get(offer.node, offer) for offer in offers]

    def _sums_of_side(self, side: NodeTotal) -> tuple[float, float]:
        """Return the sums of one side of a split; one without hessian gets a trace, or XGBoost would not split."""
        g, h = self._gradients.unit.decode_total(side)
        return g, h if h > 0 else _TRACE

    def divide(self, decisions: NDArray[np.bool_], missing: NDArray[np.bool_]) -> None:
        """Divide the rows of the split nodes, and ask the parties that could not be asked yet for sums of children.

        Shapes: decisions, missing: bool[n_rows], XGBoost's own; passive nodes are cleared in ``missing``, because
            their owners have already sent rows without a value the right way.

        Raises:
            ProtocolError: XGBoost divides rows otherwise than its split says.
        """
        self.pending = []
        for split in self.applied:
            node = self._nodes[split.entry.node]
            if node.goes_left is None:
                raise ProtocolError(DISAGREE.format("the owner of a split"))
            if node.offer is not None:
                missing[node.rows] = False
            elif not np.array_equal(
                node.goes_left, np.where(missing[node.rows], split.entry.default_left, decisions[node.rows])
            ):
                raise ProtocolError(DISAGREE.format("the rows of a node"))
            self.leaf_of_row[node.rows] = np.where(node.goes_left, split.left, split.right)
            if split.evaluates_children:
                self._add_children(split, node, node.goes_left)
                self.pending += [split.left, split.right]
        self._ask(self._unasked)
        self._unasked = []
        for split in self.applied:
            del self._nodes[split.entry.node]
        self._splits += self.applied
        self.applied = []
        if not self.pending:
            self._apply()

    def _apply(self) -> None:
        """Follow XGBoost to the nodes that it splits next; tell and ask the passive parties all that can be by now."""
        self.applied = self._driver.pop()
        for split in self.applied:
            node = self._nodes[split.entry.node]
            if node.offer is None:
                node.goes_left = self._own_side(split.entry, node.rows)
        owners = set()
        for sums in self.parties:
            won = [s.entry.node for s in self.applied if self._offer_of(s.entry.node, sums) is not None]
            if won:
                self._told.append((sums, won, sums.split([self._owned_split(node) for node in won])))
                owners.add(sums)
        if any(split.evaluates_children for split in self.applied):
            self._unasked = [sums for sums in self.parties if owners - {sums}]
        self._ask([sums for sums in self.parties if sums not in self._unasked])

    def _own_side(self, entry: ExpandEntry, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Divide rows at a split of the active party's own, as XGBoost will."""
        values = self._own_columns[rows, entry.feature]
        below = values < np.float32(entry.threshold)
        is_left = below if entry.categories is None else are_others(values, entry.categories)
        result: NDArray[np.bool_] = np.where(np.isnan(values), entry.default_left, is_left)
        return result

    def _ask(self, parties: Sequence[PartySums]) -> None:
        """Ask parties for the sums of a child of each divided node whose children XGBoost evaluates."""
        evaluated = [split for split in self.applied if split.evaluates_children]
        for sums in parties if evaluated else ():
            own = [s for s in evaluated if self._offer_of(s.entry.node, sums) is not None]
            partitions = [
                NodePartition(s.entry.node, s.left, s.right, Bits.of(goes_left))
                for s in evaluated
                if s not in own and (goes_left := self._nodes[s.entry.node].goes_left) is not None
            ]
            divisions = [OwnDivision(s.entry.node, s.left, s.right) for s in own]
            sums.ask(partitions, divisions, sum(self._nodes[s.entry.node].rows.size for s in own))
        for sums in parties:
            sums.party.link.flush()

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
        offered, rows = self._offered(node), self._nodes[node].rows
        g, h = (exact_sum(values[rows[goes_left]]) for values in (self._gradients.g, self._gradients.h))
        most_g, most_h = sums.most_noise(offered.feature)
        if abs(g - offered.left.g) > most_g or abs(h - offered.left.h) > most_h:
            raise ProtocolError(f"{sums.party.name} divided rows otherwise than its sums of gradients say")

    def _add_children(self, split: AppliedSplit[ExpandEntry], node: _Node, goes_left: NDArray[np.bool_]) -> None:
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
