"""The sums of one passive party for the nodes of one tree: asked for, opened, completed by subtraction, evaluated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal, subtract_sibling
from he_processors.histogram.planner import child_to_build
from nvflare_plugins.growth.arithmetic import GradientUnit, NodeToSplit, SplitFormula
from nvflare_plugins.vertical.active.noised_evaluation import NoisedBins
from nvflare_plugins.vertical.active.party_evaluation import Candidate, PartyEvaluator
from nvflare_plugins.vertical.noised.plan import PartyNoise
from nvflare_plugins.vertical.protocol.feature_blocks import feature_blocks, layout_of
from nvflare_plugins.vertical.protocol.gradient_scheme import GradientOwner
from nvflare_plugins.vertical.protocol.links import Party, collect
from nvflare_plugins.vertical.protocol.messages import (
    Bits,
    HistogramAnswer,
    HistogramRequest,
    MoreGradients,
    MoreSums,
    NodePartition,
    OwnDivision,
    OwnedSplit,
    SplitAnswer,
    SplitRequest,
    TreeGradients,
)

ROOT = 0
Division = NodePartition | OwnDivision


@dataclass(slots=True)
class _Asked:
    """Sums on their way: one answer for each block of features."""

    divided: tuple[Division, ...]
    answers: list[tuple[slice, Future[Any]]] = field(default_factory=list)
    came_at: float | None = None  # the last of them so far; seconds of ``time.perf_counter``

    def note(self, future: Future[Any]) -> None:
        """Note that an answer came; called by the thread that takes it in."""
        self.came_at = time.perf_counter()


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
        noise: PartyNoise | None = None,
    ):
        """Prepare for one tree.

        Args:
            columns, monotone: of all parties. Shapes: bool[n_columns], int8[n_columns].
            may_withhold: the job is one in which a party may keep the sums of nodes.
            noise: what the party adds to its sums; None where they are exact.
        """
        self.party = party
        self._tree = tree
        self._owner = owner
        self._deadline_s = deadline_s
        self._may_withhold = may_withhold
        self._features = np.flatnonzero(columns[party.columns])
        self._layout = BinLayout(tuple(party.schema.n_bins[feature] for feature in self._features))
        categorical = [i for i, feature in enumerate(self._features) if party.schema.categories[feature]]
        self._noise = noise
        self._evaluator = PartyEvaluator(
            self._layout,
            formula,
            unit,
            monotone[party.columns][self._features],
            categorical,
            None if noise is None else NoisedBins(self._layout, noise.scales),
        )
        self._opened: dict[int, BinSums] = {}
        self._sent: list[Future[Any]] = []
        self._asked: _Asked | None = None
        self.is_closed = False  # the party kept the sums of all rows, and will in later trees

    @property
    def is_noised(self) -> bool:
        """Whether the party's sums carry noise."""
        return self._noise is not None

    def most_noise(self, feature: int) -> tuple[int, int]:
        """Return by how much left sums of a split may be off, of g and of h. Units: encoded integers."""
        if self._noise is None:
            return 0, 0
        n_slots = self.party.schema.n_bins[feature] + 1
        g, h = self._owner.pair_format.tails  # of a slot, and of its part of what all are off
        return 2 * n_slots * g, 2 * n_slots * h

    def send(self, gradients: bytes) -> None:
        """Send the next block of the tree's protected gradients; the first one begins the tree."""
        if self._sent:
            self._sent.append(self.party.link.ask(MoreGradients(self._tree, gradients)))
            return
        chosen = np.zeros(len(self.party.schema.n_bins), dtype=bool)
        chosen[self._features] = True
        self._sent.append(self.party.link.ask(TreeGradients(self._tree, Bits.of(chosen), gradients)))

    def ask(self, partitions: Sequence[NodePartition], own: Sequence[OwnDivision] = (), n_rows: int = 0) -> None:
        """Ask for the sums of one child of each divided node, or of the root; do not wait.

        Below a node whose sums were withheld nothing is asked for, and nothing of its rows is said.

        Args:
            partitions: nodes that others split.
            own: nodes that the party split, with the numbers of rows that they have together.
            n_rows: rows of the root, or of the nodes in ``own``.
        """
        known = tuple(part for part in partitions if part.node in self._opened)
        if not (known or own) and partitions:
            return
        divided: tuple[Division, ...] = (*known, *own)
        most_rows = (n_rows + sum(part.goes_left.n for part in known)) // 2 if divided else n_rows
        n_nodes = max(len(divided) * (2 if self.is_noised else 1), 1)
        blocks = feature_blocks(self._layout, n_nodes, most_rows, self._owner.is_streamed)
        self._asked = _Asked(divided)
        for block in blocks:
            first = not self._asked.answers
            request = HistogramRequest(self._tree, known, tuple(own)) if first else MoreSums(self._tree)
            answer = self.party.link.ask(request)
            answer.add_done_callback(self._asked.note)
            self._asked.answers.append((block, answer))

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
            asked, self._asked = self._asked, None
            self._receive(asked, totals)
        known = [(node, fact) for node, fact in zip(nodes, facts, strict=True) if node in self._opened]
        if len(known) < len(nodes) and not self._may_withhold:
            raise ProtocolError("sums are due that nobody asked for")
        best = self._evaluator.best_splits([self._opened[node] for node, _ in known], [fact for _, fact in known])
        found = dict(zip((node for node, _ in known), best, strict=True))
        return [None if c is None else _with_feature(c, int(self._features[c.feature])) for c in map(found.get, nodes)]

    def allowed(self, columns: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Cut the party's features of this tree out of a mask over all columns."""
        return columns[self.party.columns][self._features]

    def _receive(self, asked: _Asked, totals: dict[int, NodeTotal]) -> None:
        for sent in self._sent:
            collect(self.party, sent, type(None), self._deadline_s)  # fails with the reason of a refusal
        self._sent = []
        built = [_built_child(part, totals) for part in asked.divided] or [ROOT]
        families: list[tuple[int, ...]] = [(child,) for child in built]
        if self.is_noised and asked.divided:
            families = [(one, part.left + part.right - one) for part, one in zip(asked.divided, built, strict=True)]
        opened, withheld = self._open(asked, families, totals)
        self.is_closed = ROOT in withheld
        self._opened |= opened
        for part, child in zip(asked.divided, built, strict=False):
            parent = self._opened.pop(part.node)
            if child in withheld or self.is_noised:
                continue
            sibling = part.left + part.right - child
            self._opened[sibling] = subtract_sibling(
                parent, self._opened[child], totals[sibling], self._layout, self._owner.pair_format
            )

    def _open(
        self, asked: _Asked, families: Sequence[tuple[int, ...]], totals: dict[int, NodeTotal]
    ) -> tuple[dict[int, BinSums], set[int]]:
        """Open the sums block by block as they come; return them, and the nodes that the party keeps.

        Args:
            families: nodes whose sums come together, or none of them; the first one stands for all.
        """
        built = [family[0] for family in families]
        withheld: set[int] | None = None
        opened: list[list[BinSums]] = []  # by block, then by node
        for number, (block, future) in enumerate(asked.answers, 1):
            answer = collect(self.party, future, HistogramAnswer, self._deadline_s)
            if withheld is None:
                withheld = self._checked_withheld(answer, built)
            given = [node for family in families if family[0] not in withheld for node in family]
            if (answer.tree, list(answer.nodes), set(answer.withheld)) != (self._tree, given, withheld):
                raise ProtocolError(f"{self.party.name} sent the sums of other nodes than it was asked for")
            if given:
                is_last = number == len(asked.answers)
                opened.append(self._open_block(asked, answer.sums, block, [totals[node] for node in given], is_last))
        kept = withheld or set()
        given = [node for family in families if family[0] not in kept for node in family]
        return dict(zip(given, map(_joined, zip(*opened, strict=True)), strict=True)), kept

    def _open_block(
        self, asked: _Asked, sums: bytes, block: slice, totals: list[NodeTotal], is_last: bool
    ) -> list[BinSums]:
        """Open one block; after the last one, or one that is refused, something follows that the party sees."""
        try:
            return self._owner.open_sums(sums, layout_of(self._layout, block), totals)
        except ProtocolError:
            is_last = True
            raise
        finally:
            if is_last:
                self._owner.finish_sums(time.perf_counter() if asked.came_at is None else asked.came_at)

    def _checked_withheld(self, answer: HistogramAnswer, built: list[int]) -> set[int]:
        """Return the nodes that the party keeps, of which all blocks must say the same."""
        if answer.withheld and not self._may_withhold:
            raise ProtocolError(f"{self.party.name} withheld sums in a job that promises the centralized model")
        if not set(answer.withheld).issubset(built):
            raise ProtocolError(f"{self.party.name} sent the sums of other nodes than it was asked for")
        return set(answer.withheld)


def _joined(blocks: tuple[BinSums, ...]) -> BinSums:
    """Join the blocks of a node's features."""
    if len(blocks) == 1:
        return blocks[0]
    return BinSums(
        np.concatenate([block.g for block in blocks], axis=-1), np.concatenate([block.h for block in blocks], axis=-1)
    )


def _built_child(part: Division, totals: dict[int, NodeTotal]) -> int:
    return child_to_build(part.left, totals[part.left].n_rows, part.right, totals[part.right].n_rows)


def _with_feature(candidate: Candidate, feature: int) -> Candidate:
    return replace(candidate, feature=feature)
