"""Plan the ciphertext products of a level of the tree.

Rows are sorted by bin with a counting sort, so that a histogram is one segmented product over a row order. Where
two features together have fewer occupied cells than the node has rows, rows are multiplied into cells first and the
cells into the bins of both features: n + c products instead of 2 n.

Reference: HE.md section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.histogram.bins import BinCodes, BinLayout

# A pair of features is aggregated by cells only where that saves at least this share of the products.
_MIN_SAVING = 0.05
# Features are planned in blocks of about this many rows in the order, to bound the memory of a plan.
_MAX_BLOCK_ROWS = 1 << 24


@dataclass(frozen=True, slots=True)
class Step:
    """One segmented product: segment s multiplies ``order[starts[s]:starts[s + 1]]`` of the previous step's rows."""

    order: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def n_products(self) -> int:
        """Return the multiplications this step takes."""
        lengths = np.diff(self.starts)
        return int(np.maximum(lengths - 1, 0).sum())


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Products for some features of one level.

    Shapes: the last of ``steps`` yields one residue for each of ``slots``, int64, positions in the level's histogram.
    """

    steps: tuple[Step, ...]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HistogramPlan:
    """All products of one level: ``n_slots`` sums, node after node, each in the order of the bin layout."""

    blocks: tuple[BlockPlan, ...]
    n_slots: int

    @property
    def n_products(self) -> int:
        """Return the ciphertext multiplications that the plan takes."""
        return sum(step.n_products for block in self.blocks for step in block.steps)


def child_to_build(left_node_id: int, n_left: int, right_node_id: int, n_right: int) -> int:
    """Return the child whose histogram is built: the one with fewer rows, on a tie the smaller node id.

    Privacy: the choice depends on row counts, which both parties know, never on gradients.
    """
    if n_left == n_right:
        return min(left_node_id, right_node_id)
    return left_node_id if n_left < n_right else right_node_id


def plan_level(
    codes: BinCodes, layout: BinLayout, node_rows: Sequence[NDArray[np.int32]], *, use_pairs: bool = True
) -> HistogramPlan:
    """Plan the histograms of several nodes.

    Shapes: codes: uint8 or uint16[n_features, n_rows]; node_rows: for each node int32[n_node_rows], rows of codes.
    Args:
        codes: bin codes, checked against the layout by the caller once (``layout.check_codes``).
        layout: the bins of each feature.
        node_rows: the rows of each node to build.
        use_pairs: allow cells of feature pairs.
    """
    blocks: list[BlockPlan] = []
    singles: list[tuple[int, int]] = []
    # Neighbours in the order of bin counts make the pairs with the fewest cells.
    features = sorted(range(layout.n_features), key=lambda feature: layout.n_bins[feature])
    for node, rows in enumerate(node_rows):
        pairs, alone = _choose_pairs(codes, layout, features, rows) if use_pairs else ([], features)
        blocks += [_plan_pair(codes, layout, pair, node, rows) for pair in pairs]
        singles += [(node, feature) for feature in alone]
    blocks += _plan_singles(codes, layout, node_rows, singles)
    return HistogramPlan(tuple(blocks), len(node_rows) * layout.n_slots)


def _choose_pairs(
    codes: BinCodes, layout: BinLayout, features: list[int], rows: NDArray[np.int32]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Pair neighbouring features where cells save products in this node."""
    pairs, alone = [], []
    for first, second in zip(features[0::2], features[1::2], strict=False):
        n_cells = _occupied_cells(codes, layout, (first, second), rows)
        if rows.size - n_cells > 2 * _MIN_SAVING * rows.size:
            pairs.append((first, second))
        else:
            alone += [first, second]
    return pairs, alone + features[len(features) // 2 * 2 :]


def _occupied_cells(codes: BinCodes, layout: BinLayout, pair: tuple[int, int], rows: NDArray[np.int32]) -> int:
    """Count the cells that hold rows; where there are far more cells than rows, say that every row has its own."""
    n_possible = (layout.n_bins[pair[0]] + 1) * (layout.n_bins[pair[1]] + 1)
    if n_possible > 16 * rows.size:
        return rows.size
    return int(np.count_nonzero(np.bincount(_cell_codes(codes, layout, pair, rows), minlength=1)))


def _cell_codes(
    codes: BinCodes, layout: BinLayout, pair: tuple[int, int], rows: NDArray[np.int32]
) -> NDArray[np.int64]:
    first, second = pair
    return codes[first, rows].astype(np.int64) * (layout.n_bins[second] + 1) + codes[second, rows]


def _plan_pair(
    codes: BinCodes, layout: BinLayout, pair: tuple[int, int], node: int, rows: NDArray[np.int32]
) -> BlockPlan:
    """Multiply rows into the occupied cells of two features, then cells into the bins of both."""
    first, second = pair
    n_first, n_second = layout.n_bins[first] + 1, layout.n_bins[second] + 1
    by_second = _counting_sort(codes[second, rows])
    by_cell = by_second[_counting_sort(codes[first, rows[by_second]])]
    cell_of_row = _cell_codes(codes, layout, pair, rows[by_cell])
    is_first_of_cell = np.diff(cell_of_row, prepend=-1) != 0
    cell_starts = np.append(np.flatnonzero(is_first_of_cell), cell_of_row.size)
    cells = cell_of_row[is_first_of_cell]
    # The cells already lie in the order of the first feature's bins; the second feature's bins need one more sort.
    first_counts = np.bincount(cells // n_second, minlength=n_first)
    second_counts = np.bincount(cells % n_second, minlength=n_second)
    order = np.concatenate([np.arange(cells.size), np.argsort(cells % n_second, kind="stable")])
    steps = (
        Step(rows[by_cell].astype(np.int32, copy=False), cell_starts),
        Step(order.astype(np.int32), _starts(np.concatenate([first_counts, second_counts]))),
    )
    return BlockPlan(steps, np.concatenate([_slots(layout, node, first), _slots(layout, node, second)]))


def _plan_singles(
    codes: BinCodes,
    layout: BinLayout,
    node_rows: Sequence[NDArray[np.int32]],
    singles: list[tuple[int, int]],
) -> list[BlockPlan]:
    """Sort single features into bins, and join them to blocks of bounded size."""
    blocks: list[BlockPlan] = []
    orders: list[NDArray[np.int32]] = []
    counts: list[NDArray[np.int64]] = []
    slots: list[NDArray[np.int64]] = []
    for position, (node, feature) in enumerate(singles):
        rows = node_rows[node]
        node_codes = codes[feature, rows]
        orders.append(rows[_counting_sort(node_codes)].astype(np.int32, copy=False))
        counts.append(np.bincount(node_codes, minlength=layout.n_bins[feature] + 1))
        slots.append(_slots(layout, node, feature))
        if position + 1 == len(singles) or sum(order.size for order in orders) >= _MAX_BLOCK_ROWS:
            step = Step(np.concatenate(orders), _starts(np.concatenate(counts)))
            blocks.append(BlockPlan((step,), np.concatenate(slots)))
            orders, counts, slots = [], [], []
    return blocks


def _slots(layout: BinLayout, node: int, feature: int) -> NDArray[np.int64]:
    return node * layout.n_slots + np.arange(layout.starts[feature], layout.starts[feature + 1])


def _counting_sort(codes: BinCodes) -> NDArray[np.int64]:
    """Return the stable order of small codes; numpy sorts 8- and 16-bit integers by radix."""
    return np.argsort(codes, kind="stable")


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
