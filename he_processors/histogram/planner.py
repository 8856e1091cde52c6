"""Features in bins, and the plan of the ciphertext products of a level of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.interface import default_threads, run_blocks

# Features in bins.


BinCodes = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True)
class BinLayout:
    """How the bins of all features of one party lie in one vector of slots.

    Feature f has ``n_bins[f]`` bins and, after them, one slot for missing values; its codes are 0 .. n_bins[f].
    """

    n_bins: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.n_bins or any(not 1 <= n < 1 << 16 for n in self.n_bins):
            raise ValueError("every feature needs 1 to 65535 bins")

    @property
    def n_features(self) -> int:
        """Return the number of features."""
        return len(self.n_bins)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Return each feature's first slot, and the number of slots last. Shapes: int64[n_features + 1]."""
        return np.concatenate([[0], np.cumsum(np.array(self.n_bins, dtype=np.int64) + 1)])

    @property
    def n_slots(self) -> int:
        """Return the slots of one node."""
        return int(self.starts[-1])

    def check_codes(self, codes: BinCodes) -> None:
        """Check a matrix of bin codes.

        Shapes: codes: uint8 or uint16[n_features, n_rows].

        Raises:
            TypeError: another dtype.
            ValueError: the shape or a code does not fit this layout.
        """
        if codes.dtype not in (np.uint8, np.uint16):
            raise TypeError("bin codes must be uint8 or uint16")
        if codes.ndim != 2 or codes.shape[0] != self.n_features:
            raise ValueError("bin codes must have one line for each feature")
        if codes.shape[1] and np.any(codes.max(axis=1) > np.array(self.n_bins)):
            raise ValueError("a bin code lies beyond the bins of its feature")


# Plan the ciphertext products of a level of the tree.
#
# Rows are sorted into cells, and cells into bins, by counting sorts, so that a histogram is two segmented products.
# Where two features together have far fewer occupied cells than the node has rows, their cells are pairs of bins: rows
# are multiplied into cells once, and cells into the bins of both features, n + c products instead of 2 n. Cells have a
# cost of their own, so that pairs pay from about three rows in a cell, for points of a curve from twelve. Elsewhere a
# cell is a bin, and the second product only puts it in its place.


# What a cell costs besides its product into the second bin, in products: it is begun, written out and read again.
# Measured with the AVX512-IFMA backend at 2048 bits: 2 to 3.
_CELL_COST = 2
# A block of the plan orders about this many rows: cells that stay near the processor, or launches that fill a GPU.
BLOCK_ROWS = 1 << 17
DEVICE_BLOCK_ROWS = 1 << 26


@dataclass(frozen=True, slots=True)
class Step:
    """One segmented product: segment s multiplies the rows ``order[starts[s]:starts[s + 1]]``.

    Shapes: order: int32[m]; starts: int64[n_segments + 1].
    """

    order: NDArray[np.int32]
    starts: NDArray[np.int64]

    @property
    def n_products(self) -> int:
        """Return the multiplications this step takes."""
        return int(np.maximum(np.diff(self.starts) - 1, 0).sum())


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Products for some features of some nodes: rows into cells, cells into bins.

    Shapes: slots: int64[n_bins], the place of each product of ``bins`` in the level's histogram.
    """

    cells: Step
    bins: Step
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HistogramPlan:
    """All products of one level: ``n_slots`` sums, node after node, each in the order of the bin layout."""

    blocks: tuple[BlockPlan, ...]
    n_slots: int

    @property
    def n_products(self) -> int:
        """Return the ciphertext multiplications that the plan takes."""
        return sum(block.cells.n_products + block.bins.n_products for block in self.blocks)


def child_to_build(left_node_id: int, n_left: int, right_node_id: int, n_right: int) -> int:
    """Return the child whose histogram is built: the one with fewer rows, on a tie the smaller node id.

    Privacy: the choice depends on row counts, which both parties know, never on gradients.
    """
    if n_left == n_right:
        return min(left_node_id, right_node_id)
    return left_node_id if n_left < n_right else right_node_id


def plan_level(
    codes: BinCodes,
    layout: BinLayout,
    node_rows: Sequence[NDArray[np.int32]],
    *,
    use_pairs: bool = True,
    cell_cost: int = _CELL_COST,
    block_rows: int = BLOCK_ROWS,
) -> HistogramPlan:
    """Plan the histograms of several nodes.

    Shapes: codes: uint8 or uint16[n_features, n_rows]; node_rows: for each node int32[n_node_rows], rows of codes.

    Args:
        codes: bin codes that fit the layout (``layout.check_codes``).
        layout: the bins of each feature.
        node_rows: the rows of each node to build.
        use_pairs: allow cells of feature pairs.
        cell_cost: what a cell costs besides its product, in products of rows.
        block_rows: rows in one product, ``DEVICE_BLOCK_ROWS`` for the CUDA backend. Changes no result.
    """
    # Neighbours in the order of bin counts make the pairs with the fewest cells.
    features = sorted(range(layout.n_features), key=lambda feature: layout.n_bins[feature])
    group_size = 2 if use_pairs else 1
    groups = [tuple(features[i : i + group_size]) for i in range(0, layout.n_features, group_size)]
    tasks = [(node, rows, group) for node, rows in enumerate(node_rows) for group in groups]
    parts: list[list[BlockPlan]] = [[] for _ in tasks]

    def plan(task_idx: int) -> None:
        node, rows, group = tasks[task_idx]
        parts[task_idx] = _plan_group(codes, layout, group, node, rows, cell_cost)

    run_blocks(plan, list(range(len(tasks))), default_threads())
    blocks = tuple(map(_join, _batches([block for part in parts for block in part], block_rows)))
    return HistogramPlan(blocks, len(node_rows) * layout.n_slots)


def _plan_group(
    codes: BinCodes, layout: BinLayout, group: tuple[int, ...], node: int, rows: NDArray[np.int32], cell_cost: int
) -> list[BlockPlan]:
    """Plan a pair of features by cells where that saves products, else each feature by itself."""
    columns = [codes[feature, rows] for feature in group]
    slots = [node * layout.n_slots + np.arange(layout.starts[feature], layout.starts[feature + 1]) for feature in group]
    if len(group) == 2:
        block = _plan_pair(rows, (columns[0], columns[1]), (slots[0], slots[1]), cell_cost)
        if block is not None:
            return [block]
    return [_plan_single(rows, column, its_slots) for column, its_slots in zip(columns, slots, strict=True)]


def _plan_single(rows: NDArray[np.int32], codes: BinCodes, slots: NDArray[np.int64]) -> BlockPlan:
    counts = np.bincount(codes, minlength=slots.size)
    cells = Step(rows[_counting_sort(codes)], _starts(counts))
    bins = Step(np.arange(slots.size, dtype=np.int32), np.arange(slots.size + 1, dtype=np.int64))
    return BlockPlan(cells, bins, slots)


def _plan_pair(
    rows: NDArray[np.int32],
    codes: tuple[BinCodes, BinCodes],
    slots: tuple[NDArray[np.int64], NDArray[np.int64]],
    cell_cost: int,
) -> BlockPlan | None:
    """Plan rows into the occupied cells of two features and cells into the bins of both; None if it saves nothing."""
    if not rows.size:
        return None
    first, second = codes
    n_second = int(second.max()) + 1
    n_cells = (int(first.max()) + 1) * n_second
    if n_cells > 16 * rows.size:  # far more cells than rows: hardly any holds two
        return None
    cell_of_row = first.astype(np.uint32) * np.uint32(n_second) + second
    counts = np.bincount(cell_of_row)
    cells = np.flatnonzero(counts)
    if rows.size + (1 + cell_cost) * cells.size >= 2 * rows.size:
        return None
    into_cells = Step(rows[_counting_sort(cell_of_row, n_cells)], _starts(counts[cells]))
    # The cells lie in the order of the first feature's bins; the second feature's bins need one more sort.
    in_first, in_second = np.divmod(cells, n_second)
    order = np.concatenate([np.arange(cells.size), np.argsort(in_second, kind="stable")])
    per_bin = [np.bincount(in_first, minlength=slots[0].size), np.bincount(in_second, minlength=slots[1].size)]
    into_bins = Step(order.astype(np.int32), _starts(np.concatenate(per_bin)))
    return BlockPlan(into_cells, into_bins, np.concatenate(slots))


def _batches(blocks: list[BlockPlan], block_rows: int) -> Iterator[list[BlockPlan]]:
    """Group blocks so that each batch orders about ``block_rows`` rows."""
    batch: list[BlockPlan] = []
    n_rows = 0
    for block in blocks:
        batch.append(block)
        n_rows += block.cells.order.size
        if n_rows >= block_rows:
            yield batch
            batch, n_rows = [], 0
    if batch:
        yield batch


def _join(blocks: list[BlockPlan]) -> BlockPlan:
    """Make one block of several: the cells of each come after those of the blocks before it."""
    first_cell = _starts([block.cells.starts.size - 1 for block in blocks])[:-1]
    cells = _join_steps([block.cells for block in blocks], np.zeros(len(blocks), dtype=np.int64))
    bins = _join_steps([block.bins for block in blocks], first_cell)
    return BlockPlan(cells, bins, np.concatenate([block.slots for block in blocks]))


def _join_steps(steps: list[Step], row_offsets: NDArray[np.int64]) -> Step:
    orders = [step.order + np.int32(offset) for step, offset in zip(steps, row_offsets, strict=True)]
    first = _starts([step.order.size for step in steps])
    starts = [step.starts[:-1] + offset for step, offset in zip(steps, first[:-1], strict=True)]
    return Step(np.concatenate(orders), np.concatenate([*starts, first[-1:]]))


def _counting_sort(codes: NDArray[np.unsignedinteger], n_codes: int = 1 << 16) -> NDArray[np.int64]:
    """Return the stable order of codes below ``n_codes``; numpy sorts 8- and 16-bit integers by radix."""
    if n_codes <= 1 << 16:
        return np.argsort(codes.astype(np.uint16) if codes.itemsize > 2 else codes, kind="stable")
    low = np.argsort(codes.astype(np.uint16), kind="stable")
    return low[np.argsort((codes >> 16).astype(np.uint16)[low], kind="stable")]


def _starts(counts: NDArray[np.int64] | list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
