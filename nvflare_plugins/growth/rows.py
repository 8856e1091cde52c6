"""A site's rows while trees grow: bins, places in the tree, margins and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import default_threads, row_blocks, run_blocks
from nvflare_plugins.growth import survival
from nvflare_plugins.growth._native import BEST, NUMPY, growth, say_so_once
from nvflare_plugins.growth.bins import BinLayout, BinnedTable, Codes, new_codes, right_mask
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.objectives import Objective, Scale, largest_pairs
from nvflare_plugins.growth.ranking import Queries
from nvflare_plugins.growth.site_sums import Parts, is_of_all_rows

# Rows while a tree grows: which node each is in, and the sums of their gradients in bins.
#
# Reference: XGBoost 3.2, src/tree/common_row_partitioner.h, src/tree/hist/histogram.h.


ROOT = 0
_ROWS_AT_ONCE = 1 << 16

_LEAST_WORK = 1 << 15
"""Values that are worth a thread of their own."""
_PIECE_BITS = 22
"""Of integers that are added up as doubles: sums of 2^31 of them are exact."""

Piece = tuple[int, int, int]
"""Number of a span of rows, and the part of it from begin to end."""


class NodeSplit(NamedTuple):
    """How the rows of a node are divided.

    Attributes:
        left: number of the left child; ``right`` of the right one.
        bin: the last bin of the feature that goes left; -1 if only rows without a value do.
        right_categories: of a categorical feature, those that go right; ``bin`` then says nothing.
    """

    node: int
    left: int
    right: int
    feature: int
    bin: int
    default_left: bool
    right_categories: tuple[int, ...] | None = None


class Rows(Protocol):
    """The rows of one site, or of a worker's share of it, while a tree grows; all are in the root at first.

    Units: gradient pairs and their sums are integers (g, h) on the tree's grid.
    """

    def total(self) -> NDArray[np.int64]:
        """Return the sum of all rows' pairs. Shapes: int64[2]."""

    def histograms(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """Return the sums of the nodes' rows that have a value, in bins. Shapes: int64[n_nodes, n_bins, 2]."""

    def apply(self, splits: Sequence[NodeSplit]) -> None:
        """Divide the rows of nodes."""


class BinnedRows:
    """Rows that are held in bins; all of ``Rows``, and where each row is."""

    def __init__(self, layout: BinLayout, table: BinnedTable, variant: str = BEST) -> None:
        """Prepare for trees.

        Args:
            variant: of ``_native.variants``; results are the same.
        """
        self._layout = layout
        self._table = table
        self._is_native = variant != NUMPY
        say_so_once()
        self._pairs: NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)
        self._columns = np.empty(0, dtype=table.codes.dtype)  # the codes, feature by feature
        self._span_of: dict[int, tuple[int, int]] = {}  # of each node's rows, in the order
        self._order, self._scratch = np.empty((2, 0), dtype=np.int32)

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return int(self._table.codes.shape[0])

    def begin_tree(self, pairs: NDArray[np.int64]) -> None:
        """Put all rows into the root. Shapes: pairs: int64[n_rows, 2]; kept, not copied."""
        self._pairs = np.ascontiguousarray(pairs, dtype=np.int64)
        self._order, self._scratch = np.empty((2, self.n_rows), dtype=np.int32)
        self._order[:] = np.arange(self.n_rows, dtype=np.int32)
        self._span_of = {ROOT: (0, self.n_rows)}

    def put(self, rows: Sequence[NDArray[np.intp]]) -> None:
        """Let nodes 1, 2, ... hold these rows, and no other node any. Shapes: intp[n_node_rows] for each node."""
        ends = np.cumsum([0, *map(len, rows)]).tolist()
        self._order[: ends[-1]] = np.concatenate(rows)
        self._span_of = dict(enumerate(itertools.pairwise(ends), start=ROOT + 1))

    def total(self) -> NDArray[np.int64]:
        """See ``Rows``."""
        if not self._is_native:
            return np.asarray(self._pairs.sum(axis=0))
        found = np.empty(2, dtype=np.int64)
        growth.total(self._pairs, found)
        return found

    def rows_of(self, node: int) -> NDArray[np.int32]:
        """Return the rows of a node that was not divided, ascending. Shapes: int32[n_node_rows]."""
        begin, end = self._span_of[node]
        return self._order[begin:end]

    def node_of_rows(self) -> NDArray[np.int32]:
        """Return the node that each row is in. Shapes: int32[n_rows]."""
        found = np.empty(self.n_rows, dtype=np.int32)
        if self._is_native:
            spans, nodes = list(self._span_of.values()), list(self._span_of)
            growth.place(self._order, np.array(spans, dtype=np.int64), np.array(nodes, dtype=np.int64), found)
            return found
        for node in self._span_of:
            found[self.rows_of(node)] = node
        return found

    def histograms(self, nodes: Sequence[int], pairs: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """See ``Rows``. Args: pairs: to add up instead of the tree's. Shapes: int64[n_rows, 2]."""
        pairs = self._pairs if pairs is None else np.ascontiguousarray(pairs, dtype=np.int64)
        found = np.empty((len(nodes), self._layout.n_bins, 2), dtype=np.int64)
        if not self._is_native:
            for sums, node in zip(found, nodes, strict=True):
                self._add_in_numpy(self.rows_of(node), pairs, sums)
            return found
        parts = _parts([self._span_of[node] for node in nodes], self._layout.n_features)
        order = self._order if list(nodes) != [ROOT] else self._order[:0]  # all rows, one after the other
        rest = np.empty((len(parts), self._layout.n_bins, 2), dtype=np.int64)  # of spans that begin in another part

        def run(number: int) -> None:
            part = parts[number]
            is_rest = number > 0 and parts[number - 1][-1][0] == part[0][0]
            if is_rest:
                self._add(order, part[:1], pairs, rest[number])
            if len(part) > is_rest:
                self._add(order, part[is_rest:], pairs, found[part[is_rest][0] : part[-1][0] + 1])

        run_blocks(run, list(range(len(parts))), len(parts))
        for number in range(1, len(parts)):
            if parts[number - 1][-1][0] == parts[number][0][0]:
                found[parts[number][0][0]] += rest[number]
        return found

    def _add(
        self, order: NDArray[np.int32], pieces: Sequence[Piece], pairs: NDArray[np.int64], out: NDArray[np.int64]
    ) -> None:
        spans = np.array([piece[1:] for piece in pieces], dtype=np.int64)
        table = self._table
        growth.add(
            table.codes.itemsize,
            *(table.codes, table.missing, table.is_dense, pairs, order, spans, self._layout.starts, out),
        )

    def _add_in_numpy(self, rows: NDArray[np.int32], of_rows: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        """Add up integers in pieces whose sums are exact as doubles. Shapes: out: int64[n_bins, 2]."""
        out[:] = 0
        codes, pairs = self._table.codes[rows], of_rows[rows]
        for feature in range(self._layout.n_features):
            code = codes[:, feature].astype(np.int64)
            has_value = code != self._table.missing[feature]
            bins = out[self._layout.starts[feature] : self._layout.starts[feature + 1]]
            for side, values in enumerate(pairs[has_value].T):
                for shift in (0, _PIECE_BITS, 2 * _PIECE_BITS):
                    rest = values >> shift
                    piece = rest if shift == 2 * _PIECE_BITS else rest & ((1 << _PIECE_BITS) - 1)
                    sums = np.bincount(code[has_value], piece, minlength=len(bins)).astype(np.int64)
                    bins[:, side] += sums << shift

    def apply(self, splits: Sequence[NodeSplit]) -> None:
        """See ``Rows``."""
        if not self._is_native:
            for split in splits:
                self.divide(split.node, split.left, split.right, self.goes_left(split))
            return
        spans = [self._span_of.pop(split.node) for split in splits]
        for split, (begin, end), n in zip(splits, spans, self._divide(splits, spans), strict=True):
            self._span_of[split.left], self._span_of[split.right] = (begin, begin + n), (begin + n, end)

    def goes_left(self, split: NodeSplit) -> NDArray[np.bool_]:
        """Tell which rows of a node its split sends left. Shapes: result: bool[n_node_rows], of ``rows_of``."""
        rows = self.rows_of(split.node)
        codes = self._by_feature()[split.feature][rows] if self._is_native else self._table.codes[rows, split.feature]
        return self._are_left(split, codes)

    def divide(self, node: int, left: int, right: int, goes_left: NDArray[np.bool_]) -> None:
        """Divide the rows of a node as told. Shapes: goes_left: bool[n_node_rows], of ``rows_of``."""
        begin, end = self._span_of.pop(node)
        rows = self._order[begin:end]
        middle = begin + int(np.count_nonzero(goes_left))
        self._order[begin:end] = np.concatenate([rows[goes_left], rows[~goes_left]])
        self._span_of[left], self._span_of[right] = (begin, middle), (middle, end)

    def _by_feature(self) -> NDArray[Any]:
        """Return the codes feature by feature; only dividing needs them. Shapes: [n_features, n_rows]."""
        if not self._columns.size:
            self._columns = _by_feature(self._table.codes)
        return self._columns

    def _divide(self, splits: Sequence[NodeSplit], spans: Sequence[tuple[int, int]]) -> list[int]:
        """Put the rows of each node that go left before the others; return how many do."""
        columns, missing = self._by_feature(), self._table.missing
        masks, rules = self._rules(splits)
        parts = _parts(spans, 1)
        n_left = [np.empty(len(part), dtype=np.int64) for part in parts]

        def run(number: int) -> None:
            part = parts[number]
            divisions = np.array([(*piece[1:], *rules[piece[0]]) for piece in part], dtype=np.int64)
            growth.divide(
                columns.itemsize, columns, missing, masks, divisions, self._order, self._scratch, n_left[number]
            )

        run_blocks(run, list(range(len(parts))), len(parts))
        done: list[list[tuple[int, int, int]]] = [[] for _ in spans]  # begin, end of those that go left, end
        for part, counts in zip(parts, n_left, strict=True):
            for (span, begin, end), n in zip(part, counts.tolist(), strict=True):
                done[span].append((begin, begin + n, end))
        return [self._joined(pieces) for pieces in done]

    def _joined(self, pieces: Sequence[tuple[int, int, int]]) -> int:
        """Bring together what pieces of a node sent left, and right; return how many rows go left."""
        if len(pieces) > 1:
            order = self._order
            left, right = [order[a:b] for a, b, _ in pieces], [order[b:c] for _, b, c in pieces]
            order[pieces[0][0] : pieces[-1][2]] = np.concatenate([*left, *right])
        return sum(middle - begin for begin, middle, _ in pieces)

    def _rules(self, splits: Sequence[NodeSplit]) -> tuple[NDArray[np.uint8], list[tuple[int, int, int, int]]]:
        """Return the masks of splits by categories, and feature, bin, default and the mask's place of each split."""
        masks: list[NDArray[np.bool_]] = []
        rules, n = [], 0
        for split in splits:
            place = -1
            if split.right_categories is not None:
                place = n
                masks.append(right_mask(self._layout, split.feature, split.right_categories))
                n += masks[-1].size
            rules.append((split.feature, split.bin, int(split.default_left), place))
        return np.concatenate([np.empty(0, dtype=bool), *masks]).view(np.uint8), rules

    def _are_left(self, split: NodeSplit, codes: NDArray[Any]) -> NDArray[np.bool_]:
        is_missing = codes == self._table.missing[split.feature]
        if split.right_categories is None:
            is_left = codes.astype(np.int64) <= split.bin
        else:
            is_left = ~np.append(right_mask(self._layout, split.feature, split.right_categories), False)[codes]
        return np.where(is_missing, split.default_left, is_left)

    def leaves(self, splits: Sequence[NodeSplit]) -> NDArray[np.int32]:
        """Send rows down a finished tree, without pairs. Shapes: result: int32[n_rows].

        Args:
            splits: of the tree, parents before children (``Tree.splits``).
        """
        found = np.zeros(self.n_rows, dtype=np.int32)
        if not self._is_native:
            for split in splits:
                rows = np.flatnonzero(found == split.node)
                goes_left = self._are_left(split, self._table.codes[rows, split.feature])
                found[rows] = np.where(goes_left, split.left, split.right)
            return found
        masks, rules = self._rules(splits)
        nodes = np.full((2 * len(splits) + 1, 6), -1, dtype=np.int64)
        for split, rule in zip(splits, rules, strict=True):
            nodes[split.node] = (split.left, split.right, *rule)
        codes, missing, threads = self._table.codes, self._table.missing, default_threads()

        def run(rows: slice) -> None:
            growth.descend(codes.itemsize, codes[rows], missing, masks, nodes, found[rows])

        run_blocks(run, row_blocks(self.n_rows, threads, _LEAST_WORK), threads)
        return found


def on_grid(pairs: NDArray[np.float32], g_exponent: int, h_exponent: int, variant: str = BEST) -> NDArray[np.int64]:
    """Return pairs in steps of 2^exponent, rounded half to even.

    Shapes: pairs: float32[n_rows, 2], contiguous; result: int64[n_rows, 2].

    Args:
        variant: of ``_native.variants``; results are the same.
    """
    scales = np.ldexp(1.0, [-g_exponent, -h_exponent])
    if variant == NUMPY:
        return np.rint(pairs.astype(np.float64) * scales).astype(np.int64)
    found = np.empty(pairs.shape, dtype=np.int64)

    def run(rows: slice) -> None:
        growth.on_grid(pairs[rows], *scales.tolist(), found[rows])

    run_blocks(run, row_blocks(len(pairs), default_threads(), _LEAST_WORK), default_threads())
    return found


def _by_feature(codes: Codes) -> Codes:
    """Return codes feature by feature, in a file beside their own where they are in one."""
    if not isinstance(codes, np.memmap):
        return np.ascontiguousarray(codes.T)  # type: ignore[return-value]
    file = Path(str(codes.filename))
    found = new_codes((codes.shape[1], codes.shape[0]), codes.dtype, file.with_stem(f"{file.stem}_by_feature"))
    for start in range(0, len(codes), _ROWS_AT_ONCE):
        found[:, start : start + _ROWS_AT_ONCE] = codes[start : start + _ROWS_AT_ONCE].T
    return found


def _parts(spans: Sequence[tuple[int, int]], work_per_row: int) -> list[list[Piece]]:
    """Cut spans of rows, one after the other, into parts of nearly as many rows: one for each thread that is worth it.

    A part begins with the rest of a span at most; all others begin in it.
    """
    total = sum(end - begin for begin, end in spans)
    n_parts = max(1, min(default_threads(), total * work_per_row // _LEAST_WORK))
    parts: list[list[Piece]] = [[]]
    room = -(-total // n_parts)
    left = room
    for number, (begin, end) in enumerate(spans):
        while end - begin > left and len(parts) < n_parts:
            if left:
                parts[-1].append((number, begin, begin + left))
            begin += left
            parts.append([])
            left = room
        parts[-1].append((number, begin, end))
        left -= end - begin
    return parts


# The rows of one site, or of one worker's share of them, through a training: bins, margins, gradients, metrics.
#
# Margins are kept from the leaves, in float32 and in the order of the trees, as XGBoost's own predictions are: they
# equal what the finished model predicts.


Floats = NDArray[np.float32]


@dataclass(slots=True, repr=False)
class RowSet:
    """Rows in bins with their labels.

    Shapes: label, weight: float32[n_rows], label float32[n_rows, 2] of survival; margins: float32[n_rows, n_outputs],
        which training changes.
    """

    table: BinnedTable
    label: Floats
    weight: Floats | None
    margins: Floats
    queries: Queries | None = None

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return len(self.label)


class HeldRows:
    """The rows of one training. Attributes: binned: where each training row is while a tree grows."""

    def __init__(
        self, layout: BinLayout, objective: Objective, training: RowSet, evaluated: Sequence[RowSet | None]
    ) -> None:
        """Hold rows. Args: evaluated: each evaluation set; None stands for the training rows."""
        self._objective, self._training = objective, training
        self.binned = BinnedRows(layout, training.table)
        self._evaluated = [training if one is None else one for one in evaluated]
        self._others = [(one, BinnedRows(layout, one.table)) for one in evaluated if one is not None]
        self._gradients: Floats = np.empty((1, 0, 2), dtype=np.float32)
        self._residuals: Floats = np.empty(0, dtype=np.float32)  # before the round
        self._drawn: NDArray[np.bool_] | None = None

    @property
    def n_rows(self) -> int:
        """Return the number of training rows."""
        return self._training.n_rows

    def scale_parts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rows' numerators and weights of the scale of smooth losses. Shapes: float64[n_rows] each."""
        rows = self._training
        weight = np.ones(rows.n_rows) if rows.weight is None else rows.weight.astype(np.float64)
        return self._objective.scale_rows(rows.margins, rows.label, rows.weight).astype(np.float64), weight

    def risk_words(self, n_rows: int) -> NDArray[np.int64]:
        """Return these rows' part of the sums over the rows at risk (survival.py), drawn or not.

        Shapes: result: int64[survival.WORDS * bins of times]. Args: n_rows: no fewer than all sites have together.
        """
        rows = self._training
        risks = survival.weighted_risks(rows.margins[:, 0], rows.weight)
        return survival.to_words(risks, rows.label, self._objective.n_times, n_rows)

    def begin_round(self, drawn: NDArray[np.bool_] | None, scale: Scale, pair_seed: int = 0) -> NDArray[np.float32]:
        """Compute the gradients of a round from the margins.

        Args:
            drawn: which rows take part; None for all. Shapes: bool[n_rows].
            scale: of smooth losses, or hazards.
            pair_seed: of ranking.

        Returns:
            The largest |gradient| and hessian of each output. Shapes: float32[n_outputs, 2].

        Raises:
            ConfigurationError: a gradient is not finite.
        """
        rows, self._drawn = self._training, drawn
        of_rows = rows.margins, rows.label, rows.weight
        self._gradients = self._objective.gradients(*of_rows, scale, rows.queries, pair_seed)
        if drawn is not None:
            self._gradients[:, ~drawn] = 0
        if self._objective.adaptive_leaf:
            self._residuals = rows.label - rows.margins[:, 0]
        return largest_pairs(self._gradients)

    def begin_tree(self, output: int, g_exponent: int, h_exponent: int) -> None:
        """Put all rows into the root, their pairs of an output rounded to steps of 2^exponent, half to even."""
        self.binned.begin_tree(on_grid(self._gradients[output], g_exponent, h_exponent))

    def leaf_rows(self, n_nodes: int) -> NDArray[np.int64]:
        """Return how many rows that take part are in each node of the tree. Shapes: int64[n_nodes]."""
        return np.bincount(self.binned.node_of_rows()[self._takes_part()], minlength=n_nodes).astype(np.int64)

    def residuals(self) -> tuple[NDArray[np.int32], Floats, Floats | None]:
        """Return the node, the residual and the weight of each row that takes part. Shapes: [n_rows that do] each."""
        rows = self._training
        chosen, weight = self._takes_part(), rows.weight
        if weight is None and self._drawn is not None:  # XGBoost takes weighted quantiles of rows that are drawn
            weight = np.ones(rows.n_rows, dtype=np.float32)
        of_each = None if weight is None else weight[chosen]
        return self.binned.node_of_rows()[chosen], self._residuals[chosen], of_each

    def end_tree(self, output: int, values: Floats, splits: Sequence[NodeSplit]) -> None:
        """Add a tree's leaves to the margins. Shapes: values: float32[n_nodes]. Args: splits: of the tree, in order."""
        self._training.margins[:, output] += values[self.binned.node_of_rows()]
        for rows, binned in self._others:
            rows.margins[:, output] += values[binned.leaves(splits)]

    def metric_parts(self, number: int, metrics: Sequence[Metric]) -> list[Parts]:
        """Return the parts of metrics over the rows of an evaluation set."""
        rows, found = self._evaluated[number], list[Parts]()
        for metric in metrics:
            if is_of_all_rows(metric.name):
                scores = self._objective.evaluated(rows.margins)
                found.append((scores if scores.shape[1] > 1 else scores[:, 0], rows.label, rows.weight))
            else:
                found.append(metric.parts(rows.margins, rows.label, rows.weight, rows.queries))
        return found

    def _takes_part(self) -> NDArray[np.bool_]:
        weight = self._training.weight
        has_weight = np.ones(self.n_rows, dtype=bool) if weight is None else weight > 0
        if self._training.queries is not None:
            has_weight &= self._training.queries.have_pairs(self._training.label)
        return has_weight if self._drawn is None else has_weight & self._drawn
