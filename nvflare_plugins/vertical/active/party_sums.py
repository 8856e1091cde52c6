"""The sums of one passive party for the nodes of one tree: asked for, opened, completed by subtraction, evaluated."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal, subtract_sibling
from he_processors.histogram.planner import child_to_build
from nvflare_plugins.vertical.active.party_evaluation import Candidate, PartyEvaluator
from nvflare_plugins.vertical.active.split_evaluation import GradientUnit, NodeToSplit, SplitFormula
from nvflare_plugins.vertical.protocol.gradient_scheme import GradientOwner
from nvflare_plugins.vertical.protocol.links import Party, collect
from nvflare_plugins.vertical.protocol.messages import (
    Bits,
    HistogramAnswer,
    HistogramRequest,
    MoreGradients,
    NodePartition,
    OwnedSplit,
    SplitAnswer,
    SplitRequest,
    TreeGradients,
)

ROOT = 0


class PartySums:
    """One party's part in one tree.

    Security: lives at the key owner; what it opens is checked against each node's known total before it is used.
    """

    def __init__(
        self,
        party: Party,
        tree: int,
        columns: NDArray[np.bool_],
        owner: GradientOwner,
        formula: SplitFormula,
        unit: GradientUnit,
        monotone: NDArray[np.int8],
        deadline_s: float,
        may_withhold: bool = False,
    ):
        """Prepare for one tree.

        Args:
            columns, monotone: of all parties. Shapes: bool[n_columns], int8[n_columns].
            may_withhold: the job is a guarded one, in which a party may keep the sums of nodes.
        """
        self.party = party
        self._tree = tree
        self._owner = owner
        self._deadline_s = deadline_s
        self._may_withhold = may_withhold
        self._features = np.flatnonzero(columns[party.columns])
        self._layout = BinLayout(tuple(party.schema.n_bins[feature] for feature in self._features))
        categorical = [i for i, feature in enumerate(self._features) if party.schema.categories[feature]]
        self._evaluator = PartyEvaluator(
            self._layout, formula, unit, monotone[party.columns][self._features], categorical
        )
        self._opened: dict[int, BinSums] = {}
        self._sent: list[Future[Any]] = []
        self._asked: Future[Any] | None = None
        self._asked_for: list[NodePartition] = []
        self.is_closed = False  # the party kept the sums of all rows, and will in later trees

    def send(self, gradients: bytes) -> None:
        """Send the next block of the tree's protected gradients; the first one begins the tree."""
        if self._sent:
            self._sent.append(self.party.link.ask(MoreGradients(self._tree, gradients)))
            return
        chosen = np.zeros(len(self.party.schema.n_bins), dtype=bool)
        chosen[self._features] = True
        self._sent.append(self.party.link.ask(TreeGradients(self._tree, Bits.of(chosen), gradients)))

    def ask(self, partitions: list[NodePartition]) -> None:
        """Ask for the sums of one child of each partition, or of the root; do not wait.

        Below a node whose sums were withheld nothing is asked for, and nothing of its rows is said.
        """
        self._asked_for = [part for part in partitions if part.node in self._opened]
        if self._asked_for or not partitions:
            self._asked = self.party.link.ask(HistogramRequest(self._tree, tuple(self._asked_for)))

    def split(self, splits: list[OwnedSplit]) -> Future[Any]:
        """Tell the party which splits it won."""
        return self.party.link.ask(SplitRequest(self._tree, tuple(splits)))

    def split_answer(self, future: Future[Any], sizes: list[int]) -> list[NDArray[np.bool_]]:
        """Return which rows of each node go left."""
        answer = collect(self.party, future, SplitAnswer, self._deadline_s)
        if answer.tree != self._tree or [bits.n for bits in answer.goes_left] != sizes:
            raise ProtocolError(f"{self.party.name} divided other rows than it was asked to")
        return [bits.unpack() for bits in answer.goes_left]

    def evaluate(
        self, nodes: list[int], totals: dict[int, NodeTotal], facts: list[NodeToSplit]
    ) -> list[Candidate | None]:
        """Wait for the sums, open and check them, and find the best splits; none where sums were withheld.

        The features of the result are numbered as in the party's schema.
        """
        if self._asked is not None:
            self._receive(totals)
        known = [(node, fact) for node, fact in zip(nodes, facts, strict=True) if node in self._opened]
        if len(known) < len(nodes) and not self._may_withhold:
            raise ProtocolError("sums are due that nobody asked for")
        best = self._evaluator.best_splits([self._opened[node] for node, _ in known], [fact for _, fact in known])
        found = dict(zip((node for node, _ in known), best, strict=True))
        return [None if c is None else _with_feature(c, int(self._features[c.feature])) for c in map(found.get, nodes)]

    def allowed(self, columns: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Cut the party's features of this tree out of a mask over all columns."""
        return columns[self.party.columns][self._features]

    def _receive(self, totals: dict[int, NodeTotal]) -> None:
        for sent in self._sent:
            collect(self.party, sent, type(None), self._deadline_s)  # fails with the reason of a refusal
        self._sent = []
        if self._asked is None:
            raise ProtocolError(f"{self.party.name} was not asked for sums")
        answer = collect(self.party, self._asked, HistogramAnswer, self._deadline_s)
        self._asked = None
        built = [_built_child(part, totals) for part in self._asked_for] or [ROOT]
        if answer.withheld and not self._may_withhold:
            raise ProtocolError(f"{self.party.name} withheld sums in a job that promises the centralized model")
        withheld = set(answer.withheld)
        given = [node for node in built if node not in withheld]
        if (answer.tree, list(answer.nodes)) != (self._tree, given) or not withheld.issubset(built):
            raise ProtocolError(f"{self.party.name} sent the sums of other nodes than it was asked for")
        self.is_closed = ROOT in withheld
        opened = self._owner.open_sums(answer.sums, self._layout, [totals[node] for node in given]) if given else []
        self._opened |= dict(zip(given, opened, strict=True))
        for part, child in zip(self._asked_for, built, strict=False):
            parent = self._opened.pop(part.node)
            if child in withheld:
                continue
            sibling = part.left + part.right - child
            self._opened[sibling] = subtract_sibling(
                parent, self._opened[child], totals[sibling], self._layout, self._owner.pair_format
            )


def _built_child(part: NodePartition, totals: dict[int, NodeTotal]) -> int:
    return child_to_build(part.left, totals[part.left].n_rows, part.right, totals[part.right].n_rows)


def _with_feature(candidate: Candidate, feature: int) -> Candidate:
    return replace(candidate, feature=feature)
