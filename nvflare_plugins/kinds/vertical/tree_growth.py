"""One tree as it grows at the active party: its own columns' sums, each passive party's, and the best split of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.fixed_point import WORD_BITS, as_words, exact_sum, is_zero, join, lower_words, split
from he_processors.histogram.planner import BinLayout, child_to_build
from he_processors.histogram.sums import BinSums, NodeTotal, subtract_sibling
from nvflare_plugins.growth import arithmetic as tree_arithmetic
from nvflare_plugins.growth import splits as growth_splits
from nvflare_plugins.growth.bins import BinLayout as GrowthLayout
from nvflare_plugins.growth.bins import bin_rows
from nvflare_plugins.growth.rows import ROOT, BinnedRows, NodeSplit
from nvflare_plugins.growth.tree import NO_THRESHOLD, AppliedSplit, Tree, TreeDriver, finished_tree
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.histogram_maker import Timer, untimed
from nvflare_plugins.kinds.vertical.key_owner import EncodedGradients, GradientOwner
from nvflare_plugins.kinds.vertical.noised import PartyNoise
from nvflare_plugins.kinds.vertical.party_data import find_cut_points

# How the active party reads noised sums: in step with what it knows, and only as far as they stand out of the noise.
#
# The best of many noised candidates is one whose noise was lucky. Every candidate is therefore taken at less than it
# shows: its left sum of gradients is moved one standard deviation of its noise towards that of a split which gains
# nothing, and a side with a sum of hessians within three standard deviations of zero is none. Which split wins then
# says how it is used, and no more: the owner's bits tell which rows go left, and the sums of both sides are exact
# again.
#
# Privacy: post-processing of what was released.


CAUTION = 1.0
"""Standard deviations that a left sum is moved. 0, 0.5, 1 and 2 were tried: 1 was best or level in AUC."""
LEAST_HESSIAN = 3.0
"""Standard deviations that each side's sum of hessians must have; with 1, empty-looking sides win."""


class NoisedBins:
    """What is known of the noise on the sums of one tree.

    Units: encoded integers of the pair format.
    """

    def __init__(self, layout: BinLayout, scales: tuple[float, float]) -> None:
        """Args: scales: noise on one sum of g and on one of h."""
        self._layout, self._scales = layout, scales
        sizes = np.diff(layout.starts)
        self._sizes = np.repeat(sizes, sizes)
        # A split at bin b has b + 1 slots on its left: the bins up to b, or those before it and the missing values.
        n_left = np.arange(layout.n_slots) - np.repeat(layout.starts[:-1], sizes) + 1
        self._spread = np.sqrt(n_left * (self._sizes - n_left) / self._sizes)  # the slots' noise sums to nothing

    def in_step(self, sums: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Spread over each feature's slots what they are off the node's sum, which is known.

        Shapes: sums: int64[1, n_nodes, n_slots]; totals: int64[1, n_nodes, 1]; result: as sums.
        """
        starts = self._layout.starts[:-1]
        excess = np.add.reduceat(sums, starts, axis=-1) - totals
        each = np.rint(excess / np.diff(self._layout.starts)).astype(np.int64)
        result: NDArray[np.int64] = sums - np.repeat(each, np.diff(self._layout.starts), axis=-1)
        return result

    def careful(
        self,
        left: tuple[NDArray[np.int64], NDArray[np.int64]],
        totals: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return left sums at which candidates are compared; a hessian of -1 stands for a split that is none.

        Shapes: left: (g, h), int64[1, n_nodes, n_slots], in step; totals: int64[1, n_nodes, 1]; results: as left.
        """
        g, h = (values.astype(np.float64) for values in left)
        total_g, total_h = (values.astype(np.float64) for values in totals)
        least = LEAST_HESSIAN * self._scales[1] * self._spread
        is_split = (h >= least) & (total_h - h >= least) & (total_h > 0)
        h = np.clip(h, 0, total_h)
        neutral = total_g * h / np.where(total_h > 0, total_h, 1.0)
        beyond = g - neutral
        kept = np.sign(beyond) * np.maximum(np.abs(beyond) - CAUTION * self._scales[0] * self._spread, 0.0)
        return np.rint(neutral + kept).astype(np.int64), np.where(is_split, np.rint(h), -1).astype(np.int64)


# The best splits among one party's columns, on sums that are exact integers.
#
# Sums of encoded gradients are integers, so left and right always add up to their node, and a feature has missing
# values exactly if its missing slot is not zero.
#
# Reference: XGBoost 3.2, src/tree/hist/evaluate_splits.h (EnumerateSplit).


_MAX_BLOCK_CELLS = 1 << 21


class PartyEvaluator:
    """Finds the best splits among the features of one party.

    Security: runs where the sums are known, at the key owner; needs no threshold.
    """

    def __init__(
        self,
        layout: BinLayout,
        formula: tree_arithmetic.SplitFormula,
        unit: tree_arithmetic.GradientUnit,
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
            feature: growth_splits.CategoryEvaluator(formula, unit, int(monotone[feature])) for feature in categorical
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

    def best_splits(
        self, sums: list[BinSums], nodes: list[tree_arithmetic.NodeToSplit]
    ) -> list[growth_splits.Split | None]:
        """Return each node's best split with a positive loss change, or None.

        Shapes: sums: for each node int64[n_slots].
        """
        n_block = max(1, _MAX_BLOCK_CELLS // self._layout.n_slots)
        if self._finder is not None and all(one.g.ndim == 1 or len(one.g) == 1 for one in sums):
            bins = [np.stack([as_words(s.g)[0], as_words(s.h)[0]], axis=1)[self._slots_of_bins] for s in sums]
            return self._finder.best(bins, growth_splits.Question.of_nodes(nodes)) if nodes else []
        found: list[growth_splits.Split | None] = []
        for start in range(0, len(nodes), n_block):
            found += self._block(sums[start : start + n_block], nodes[start : start + n_block])
        return found

    def _block(self, sums: list[BinSums], nodes: list[tree_arithmetic.NodeToSplit]) -> list[growth_splits.Split | None]:
        # From here on int64[n_words, n_nodes, n_slots].
        g = np.stack([as_words(s.g) for s in sums], axis=1)
        h = np.stack([as_words(s.h) for s in sums], axis=1)
        best = self._by_threshold(g, h, nodes)
        for feature, evaluator in self._categorical.items():
            best = list(map(growth_splits.better, best, self._by_category(feature, evaluator, g, h, nodes)))
        return best

    def _by_threshold(
        self, g: NDArray[np.int64], h: NDArray[np.int64], nodes: list[tree_arithmetic.NodeToSplit]
    ) -> list[growth_splits.Split | None]:
        """Return each node's best split of the columns of numbers."""
        if self._noise is not None:
            totals = _totals(nodes, len(g))
            g, h = self._noise.in_step(g, totals[0]), self._noise.in_step(h, totals[1])
        left_g, left_h = self._prefix_sums(g), self._prefix_sums(h)
        allowed = np.stack([node.allowed for node in nodes])[:, self._feature] & self._is_bin
        best = self._best(left_g, left_h, nodes, allowed, default_left=False)
        missing_g, missing_h = g[..., self._missing_slot], h[..., self._missing_slot]
        has_missing = ~(is_zero(missing_g) & is_zero(missing_h))
        has_missing &= self._is_bin[self._layout.starts[:-1]]  # of a column of numbers
        if not has_missing.any():
            return best
        # Row by row the same bins, with the rows that lack the value on the left: bin i then splits below itself.
        left_g += missing_g[..., self._feature] - g
        left_h += missing_h[..., self._feature] - h
        allowed &= has_missing[:, self._feature]
        return list(map(growth_splits.better, best, self._best(left_g, left_h, nodes, allowed, default_left=True)))

    def _prefix_sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add up each feature's bins from its first one. Sums over features may wrap; their differences do not."""
        running = np.cumsum(values, axis=-1)
        starts = self._layout.starts[:-1]
        before = running[..., starts] - values[..., starts]
        return running - before[..., self._feature]

    def _best(
        self,
        left_g: NDArray[np.int64],
        left_h: NDArray[np.int64],
        nodes: list[tree_arithmetic.NodeToSplit],
        allowed: NDArray[np.bool_],
        *,
        default_left: bool,
    ) -> list[growth_splits.Split | None]:
        """Return each node's best split with these sums on the left."""
        totals, left = _totals(nodes, len(left_g)), (left_g, left_h)
        compared = left if self._noise is None else self._noise.careful(left, totals)
        changes = tree_arithmetic.loss_changes(
            self._formula, self._unit, compared, totals, nodes, self._monotone, allowed
        )
        of_nodes = zip(changes, left_g.swapaxes(0, 1), left_h.swapaxes(0, 1), strict=True)
        return [self._pick(*of_node, default_left=default_left) for of_node in of_nodes]

    def _by_category(
        self,
        feature: int,
        evaluator: growth_splits.CategoryEvaluator,
        g: NDArray[np.int64],
        h: NDArray[np.int64],
        nodes: list[tree_arithmetic.NodeToSplit],
    ) -> list[growth_splits.Split | None]:
        """Return each node's best split of one categorical feature. Shapes: g, h: int64[n_words, n_nodes, n_slots]."""
        bins = slice(int(self._layout.starts[feature]), int(self._missing_slot[feature]))
        lacking = slice(bins.stop, bins.stop + 1)
        allowed = np.array([node.allowed[feature] for node in nodes])
        block = growth_splits.CategoryBlock(
            g[..., bins], h[..., bins], *_totals(nodes, len(g)), g[..., lacking], h[..., lacking], allowed
        )
        return [
            None
            if one is None
            else growth_splits.Split(
                float(one.loss_change), feature, -1, one.default_left, (join(one.left_g), join(one.left_h)), one.right
            )
            for one in evaluator.best_splits(block, nodes)
        ]

    def _pick(
        self,
        changes: NDArray[np.float32],
        left_g: NDArray[np.int64],
        left_h: NDArray[np.int64],
        *,
        default_left: bool,
    ) -> growth_splits.Split | None:
        """Take the first of the largest loss changes in XGBoost's order: lowest feature, then along its scan."""
        slot = int(self._downwards[np.argmax(changes[self._downwards])]) if default_left else int(np.argmax(changes))
        if not changes[slot] > 0:
            return None
        feature = int(self._feature[slot])
        left = join(left_g[:, slot]), join(left_h[:, slot])
        last_left_bin = slot - int(self._layout.starts[feature]) - default_left
        return growth_splits.Split(float(changes[slot]), feature, last_left_bin, default_left, left)


def _finder(
    layout: BinLayout,
    formula: tree_arithmetic.SplitFormula,
    unit: tree_arithmetic.GradientUnit,
    monotone: NDArray[np.int8],
    categorical: Sequence[int],
) -> growth_splits.SplitFinder:
    """Return the search over the party's features as if they were all."""
    params = replace(formula.params, monotone=tuple(monotone.tolist()) if formula.is_constrained else ())
    starts = np.cumsum([0, *layout.n_bins]).astype(np.int64)
    is_categorical = np.isin(np.arange(layout.n_features), list(categorical))
    no_values = np.empty(0, dtype=np.float32)  # thresholds belong to the party
    bins = GrowthLayout(no_values, starts, is_categorical, no_values)
    return growth_splits.SplitFinder(bins, tree_arithmetic.SplitFormula(params, formula.arithmetic), unit)


def _totals(nodes: list[tree_arithmetic.NodeToSplit], n_words: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sums of nodes in words. Shapes: results: int64[n_words, n_nodes, 1]."""
    return (
        split([n.total.g for n in nodes], n_words)[..., None],
        split([n.total.h for n in nodes], n_words)[..., None],
    )


# The sums of one passive party for the nodes of one tree: asked for, opened, completed by subtraction, evaluated.


Division = messages.NodePartition | messages.OwnDivision


@dataclass(slots=True)
class _Asked:
    """Sums on their way: one answer for each block of features."""

    divided: tuple[Division, ...]
    answers: list[tuple[slice, Future[Any]]] = field(default_factory=list)
    came_at: float | None = None  # the last of them so far; seconds of ``time.perf_counter``

    def note(self, future: Future[Any]) -> None:
        """Note that an answer came; called by the thread that takes it in."""
        self.came_at = time.perf_counter()


@dataclass(frozen=True, slots=True, repr=False)
class SumsOfTraining:
    """What the sums of all trees and parties share.

    Attributes:
        monotone: constraint of each column of all parties. Shapes: int8[n_columns].
        may_withhold: the job is one in which a party may keep the sums of nodes.
        timer: measures the stage "decrypt".
    """

    owner: GradientOwner
    formula: tree_arithmetic.SplitFormula
    monotone: NDArray[np.int8]
    deadline_s: float
    may_withhold: bool = False
    timer: Timer = untimed


class PartySums:
    """One party's part in one tree.

    Security: lives at the key owner; what it opens is checked against each node's known total before it is used.

    Attributes:
        decides: what it finds was compared with this party's splits already.
    """

    decides = False

    def __init__(
        self,
        training: SumsOfTraining,
        party: messages.Party,
        tree: int,
        columns: NDArray[np.bool_],
        unit: tree_arithmetic.GradientUnit,
        noise: PartyNoise | None = None,
    ):
        """Prepare for one tree.

        Args:
            columns: that the tree may use, of all parties. Shapes: bool[n_columns].
            noise: what the party adds to its sums; None where they are exact.
        """
        self.party = party
        self._tree = tree
        self._owner, self._deadline_s = training.owner, training.deadline_s
        self._may_withhold, self._timer = training.may_withhold, training.timer
        self._features = np.flatnonzero(columns[party.columns])
        self._layout = BinLayout(tuple(party.schema.n_bins[feature] for feature in self._features))
        categorical = [i for i, feature in enumerate(self._features) if party.schema.categories[feature]]
        self._noise = noise
        self._evaluator = PartyEvaluator(
            self._layout,
            training.formula,
            unit,
            training.monotone[party.columns][self._features],
            categorical,
            None if noise is None else NoisedBins(self._layout, noise.scales),
        )
        self._opened: dict[int, BinSums] = {}
        self._sent: list[Future[Any]] = []
        self._asked: _Asked | None = None
        self.is_closed = False  # the party kept the sums of all rows, and will in later trees

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
            self._sent.append(self.party.link.ask(messages.MoreGradients(self._tree, gradients)))
            return
        chosen = np.zeros(len(self.party.schema.n_bins), dtype=bool)
        chosen[self._features] = True
        self._sent.append(self.party.link.ask(messages.TreeGradients(self._tree, messages.Bits.of(chosen), gradients)))

    def ask(
        self, partitions: Sequence[messages.NodePartition], own: Sequence[messages.OwnDivision] = (), n_rows: int = 0
    ) -> None:
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
        n_nodes = max(len(divided) * (1 if self._noise is None else 2), 1)
        blocks = messages.feature_blocks(self._layout, n_nodes, most_rows, is_streamed=self._owner.is_streamed)
        self._asked = _Asked(divided)
        for block in blocks:
            first = not self._asked.answers
            request = (
                messages.HistogramRequest(self._tree, known, tuple(own)) if first else messages.MoreSums(self._tree)
            )
            answer = self.party.link.ask(request)
            answer.add_done_callback(self._asked.note)
            self._asked.answers.append((block, answer))

    def split(self, splits: list[messages.OwnedSplit]) -> Future[Any]:
        """Tell the party which splits it won."""
        return self.party.link.ask(messages.SplitRequest(self._tree, tuple(splits)))

    def split_answer(self, future: Future[Any], sizes: list[int]) -> list[NDArray[np.bool_]]:
        """Return which rows of each node go left."""
        answer = messages.collect(self.party.name, future, messages.SplitAnswer, self._deadline_s)
        if answer.tree != self._tree or [bits.n for bits in answer.goes_left] != sizes:
            raise ProtocolError(f"{self.party.name} divided other rows than it was asked to")
        return [bits.unpack() for bits in answer.goes_left]

    def evaluate(
        self,
        nodes: list[int],
        totals: Sequence[NodeTotal],
        facts: list[tree_arithmetic.NodeToSplit],
        rivals: Sequence[growth_splits.Split | None] = (),
    ) -> list[growth_splits.Split | None]:
        """Wait for the sums, open and check them, and find the best splits; none where sums were withheld.

        The features of the result are numbered as in the party's schema.

        Args:
            rivals: of each node the best split so far; here they are compared with later.
        """
        self._take_in(totals)
        known = [(node, fact) for node, fact in zip(nodes, facts, strict=True) if node in self._opened]
        if len(known) < len(nodes) and not self._may_withhold:
            raise ProtocolError("sums are due that nobody asked for")
        best = self._evaluator.best_splits([self._opened[node] for node, _ in known], [fact for _, fact in known])
        found = dict(zip((node for node, _ in known), best, strict=True))
        return [
            None if c is None else c._replace(feature=int(self._features[c.feature])) for c in map(found.get, nodes)
        ]

    def allowed(self, columns: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Cut the party's features of this tree out of a mask over all columns."""
        return columns[self.party.columns][self._features]

    def _take_in(self, totals: Sequence[NodeTotal]) -> None:
        """Wait for the sums that were asked for, if any were."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        for sent in self._sent:
            messages.collect(self.party.name, sent, type(None), self._deadline_s)  # fails with the reason of a refusal
        self._sent = []
        sizes = [(part.left, totals[part.left].n_rows, part.right, totals[part.right].n_rows) for part in asked.divided]
        built = [child_to_build(*of_children) for of_children in sizes] or [ROOT]
        families: list[tuple[int, ...]] = [(child,) for child in built]
        if self._noise is not None and asked.divided:
            families = [(one, part.left + part.right - one) for part, one in zip(asked.divided, built, strict=True)]
        opened, withheld = self._open(asked, families, totals)
        self.is_closed = ROOT in withheld
        self._opened |= opened
        for part, child in zip(asked.divided, built, strict=False):
            parent = self._opened.pop(part.node)
            if child in withheld or self._noise is not None:
                continue
            sibling = part.left + part.right - child
            self._opened[sibling] = self._sibling(parent, self._opened[child], totals[sibling])

    def _sibling(self, parent: BinSums, child: BinSums, total: NodeTotal) -> BinSums:
        """Return the sums of the child that was not built. Args: total: its own."""
        return subtract_sibling(parent, child, total, self._layout, self._owner.pair_format)

    def _open(
        self, asked: _Asked, families: Sequence[tuple[int, ...]], totals: Sequence[NodeTotal]
    ) -> tuple[dict[int, BinSums], set[int]]:
        """Open the sums block by block as they come; return them, and the nodes that the party keeps.

        Args:
            families: nodes whose sums come together, or none of them; the first one stands for all.
        """
        built = [family[0] for family in families]
        withheld: set[int] | None = None
        opened: list[list[BinSums]] = []  # by block, then by node
        for number, (block, future) in enumerate(asked.answers, 1):
            answer = messages.collect(self.party.name, future, messages.HistogramAnswer, self._deadline_s)
            if withheld is None:
                withheld = self._checked_withheld(answer, built)
            given = [node for family in families if family[0] not in withheld for node in family]
            if (answer.tree, list(answer.nodes), set(answer.withheld)) != (self._tree, given, withheld):
                raise ProtocolError(f"{self.party.name} sent the sums of other nodes than it was asked for")
            if given:
                is_last = number == len(asked.answers)
                opened.append(
                    self._open_block(asked, answer.sums, block, [totals[node] for node in given], is_last=is_last)
                )
        kept = withheld or set()
        given = [node for family in families if family[0] not in kept for node in family]
        return dict(zip(given, map(_joined, zip(*opened, strict=True)), strict=True)), kept

    def _open_block(
        self, asked: _Asked, sums: bytes, block: slice, totals: list[NodeTotal], *, is_last: bool
    ) -> list[BinSums]:
        """Open one block; after the last one, or one that is refused, something follows that the party sees."""
        with self._timer("decrypt"):
            try:
                return self._owner.open_sums(sums, messages.layout_of(self._layout, block), totals)
            except ProtocolError:
                is_last = True
                raise
            finally:
                if is_last:
                    self._owner.finish_sums(time.perf_counter() if asked.came_at is None else asked.came_at)

    def _checked_withheld(self, answer: messages.HistogramAnswer, built: list[int]) -> set[int]:
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
        arithmetic: tree_arithmetic.Arithmetic,
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
        self.layout = GrowthLayout(upper, starts, is_categorical, cuts.lowest)
        self.rows = BinnedRows(self.layout, bin_rows(self.layout, [features], n_rows))
        self._categorical, self._monotone = tuple(categorical), monotone

    def begin_tree(self, gradients: EncodedGradients, formula: tree_arithmetic.SplitFormula) -> OwnSums | None:
        """Put all rows into the root; return the sums of the tree, None without a column."""
        pairs = np.stack([gradients.g, gradients.h], axis=1)
        self.rows.begin_tree(pairs)
        if not self.n_columns:
            return None
        layout = BinLayout(tuple(self.layout.bins_of_feature.tolist()))
        evaluator = PartyEvaluator(layout, formula, gradients.unit, self._monotone, self._categorical)
        return OwnSums(self, layout, evaluator, _words(pairs, gradients.n_words))


class OwnSums:
    """The sums of one tree's nodes."""

    def __init__(
        self, columns: OwnRows, layout: BinLayout, evaluator: PartyEvaluator, words: Sequence[NDArray[np.int64]]
    ) -> None:
        """Args: words: what adds up to the rows' pairs (``fixed_point``). Shapes: int64[n_rows, 2] each."""
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

    def best_splits(
        self, nodes: Sequence[int], facts: list[tree_arithmetic.NodeToSplit]
    ) -> list[growth_splits.Split | None]:
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
    constraints: growth_splits.NodeConstraints
    root_gain: np.float32
    best: growth_splits.Split | None = None  # features numbered as its owner's
    owner: PartySums | None = None  # of the best split; None is this party
    goes_left: NDArray[np.bool_] | None = None  # once it is known


class TreeGrowth:
    """The state of one growing tree."""

    def __init__(
        self,
        params: tree_arithmetic.TreeParameters,
        formula: tree_arithmetic.SplitFormula,
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
        self._driver: TreeDriver[growth_splits.Entry] = TreeDriver(params)
        self._own_sums = own.begin_tree(gradients, formula)
        total, constraints = NodeTotal.of_rows(gradients.g, gradients.h), growth_splits.NodeConstraints()
        self._totals = [total]  # of all nodes
        self._nodes = {ROOT: _Node(0, constraints, self._gain(total, constraints))}
        self._splits: list[NodeSplit] = []
        self._thresholds: list[np.float32] = []
        self._changes: list[float] = []
        self._bounds: list[tree_arithmetic.WeightBounds] = []  # of the nodes that were divided
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
        states = [self._nodes[node] for node in nodes]
        columns = [
            self._node_columns(one.depth) & one.constraints.allowed_columns(self._params, self._n_columns)
            for one in states
        ]
        if self._own_sums is not None:
            facts = [self._facts(node, c[: self._own.n_columns]) for node, c in zip(nodes, columns, strict=True)]
            self._take_better(nodes, self._own_sums.best_splits(nodes, facts), None)
        for sums in self.parties:
            facts = [self._facts(node, sums.allowed(c)) for node, c in zip(nodes, columns, strict=True)]
            rivals = [one.best for one in states]
            self._take_better(nodes, sums.evaluate(list(nodes), self._totals, facts, rivals), sums)
        self._driver.push([self._entry(node, best) for node in nodes if (best := self._nodes[node].best) is not None])

    def _take_better(
        self, nodes: Sequence[int], candidates: Sequence[growth_splits.Split | None], owner: PartySums | None
    ) -> None:
        for number, candidate in zip(nodes, candidates, strict=True):
            node = self._nodes[number]
            if candidate is None:
                continue
            is_decided = node.best is None or (owner is not None and owner.decides)
            if is_decided or (node.best is not None and candidate.loss_change > node.best.loss_change):
                node.best, node.owner = candidate, owner

    def _entry(self, number: int, best: growth_splits.Split) -> growth_splits.Entry:
        node, decode = self._nodes[number], self._gradients.unit.decode_total
        left = NodeTotal(0, *best.left)
        sides = decode(left), decode(self._totals[number].minus(left))
        return growth_splits.Entry(number, node.depth, float(best.loss_change), self._column(node, best), *sides)

    def _facts(self, node: int, allowed: NDArray[np.bool_]) -> tree_arithmetic.NodeToSplit:
        state = self._nodes[node]
        return tree_arithmetic.NodeToSplit(self._totals[node], state.root_gain, state.constraints.bounds, allowed)

    def _gain(self, total: NodeTotal, constraints: growth_splits.NodeConstraints) -> np.float32:
        g, h = self._gradients.unit.decode_total(total)
        result: np.float32 = self._formula.gain(np.array([g]), np.array([h]), constraints.bounds)[0]
        return result

    # -- how rows are divided -----------------------------------------------------------------------------------------

    def _announce(self, batch: Sequence[AppliedSplit[growth_splits.Entry]]) -> None:
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

    def _divide(self, batch: Sequence[AppliedSplit[growth_splits.Entry]]) -> list[int]:
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

    def _ask(self, parties: Sequence[PartySums], batch: Sequence[AppliedSplit[growth_splits.Entry]]) -> None:
        """Ask parties for the sums of a child of each divided node whose children may be divided in turn."""
        evaluated = [split for split in batch if split.evaluates_children]
        states = [(split, self._nodes[split.entry.node]) for split in evaluated]
        for sums in parties if evaluated else ():
            partitions = [
                messages.NodePartition(s.entry.node, s.left, s.right, messages.Bits.of(node.goes_left))
                for s, node in states
                if node.owner is not sums and node.goes_left is not None
            ]
            own = [(s, node) for s, node in states if node.owner is sums]
            divisions = [messages.OwnDivision(s.entry.node, s.left, s.right) for s, _ in own]
            sums.ask(partitions, divisions, sum(self._totals[s.entry.node].n_rows for s, _ in own))
        for sums in parties:
            sums.party.link.flush()

    def _check_division(self, node: int, goes_left: NDArray[np.bool_], sums: PartySums) -> None:
        offered, rows = self._best(node), self._rows.rows_of(node)
        g, h = (exact_sum(values[rows[goes_left]]) for values in (self._gradients.g, self._gradients.h))
        most_g, most_h = sums.most_noise(offered.feature)
        if abs(g - offered.left[0]) > most_g or abs(h - offered.left[1]) > most_h:
            raise ProtocolError(f"{sums.party.name} divided rows otherwise than its sums of gradients say")

    def _add_children(self, split: AppliedSplit[growth_splits.Entry], node: _Node) -> None:
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
        division = growth_splits.Entry(
            split.entry.node, node.depth, split.entry.loss_change, split.entry.feature, sums[0], sums[1]
        )
        constraints = node.constraints.of_children(division, self._params, self._formula)
        for child, child_total, child_constraints in zip(numbers, totals, constraints, strict=True):
            # XGBoost takes the gain of a new node under the bounds of its parent.
            self._nodes[child] = _Node(node.depth + 1, child_constraints, self._gain(child_total, node.constraints))
        if self._own_sums is not None:
            built = child_to_build(split.left, totals[0].n_rows, split.right, totals[1].n_rows)
            self._own_sums.add_children(split.entry.node, built, sum(numbers) - built, self._totals[built])

    # -- splits in other forms ----------------------------------------------------------------------------------------

    def _best(self, node: int) -> growth_splits.Split:
        best = self._nodes[node].best
        if best is None:
            raise ProtocolError("a node is divided that has no split")
        return best

    def _state_of(self, split: AppliedSplit[growth_splits.Entry]) -> tuple[_Node, growth_splits.Split]:
        return self._nodes[split.entry.node], self._best(split.entry.node)

    @staticmethod
    def _column(node: _Node, best: growth_splits.Split) -> int:
        return best.feature + (0 if node.owner is None else node.owner.party.first_column)

    def _as_split(self, split: AppliedSplit[growth_splits.Entry], best: growth_splits.Split) -> NodeSplit:
        """Return a split as the model has it: without the sets of categories of other parties."""
        is_own = self._nodes[split.entry.node].owner is None
        right = best.right_categories if is_own else None
        return NodeSplit(
            split.entry.node, split.left, split.right, split.entry.feature, best.bin, best.default_left, right
        )

    def _threshold(self, node: _Node, best: growth_splits.Split) -> np.float32:
        if node.owner is not None:
            return _MASKED
        return NO_THRESHOLD if best.right_categories is not None else self._own.layout.threshold(best.feature, best.bin)

    def _owned_split(self, node: int) -> messages.OwnedSplit:
        best = self._best(node)
        return messages.OwnedSplit(node, best.feature, best.bin, best.default_left, best.right_categories or ())
