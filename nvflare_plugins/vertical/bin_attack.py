"""The attack on exact sums per bin: an active party solves for the bins of a passive party's rows.

For one bin, every node's sum of gradients is a linear equation in the 0/1 vector "row i is in this bin"; so is its sum
of hessians. The active party knows all coefficients: its own gradients, and which rows reached the node. With as many
independent equations as rows, least squares solves them; with fewer, it helps that a row is in exactly one bin.

This is a tool to judge settings with, run on data whose bins are known. It needs what an honest active party sees in
any training, and nothing else.

Reference: SECURITY notes on vertical training in the README's threat model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from he_processors.histogram.bins import BinCodes, BinLayout

_SMALLEST = 1e-10  # singular values below this part of the largest are rounding errors


@dataclass(frozen=True, slots=True, repr=False)
class TreeSums:
    """What the active party knows from one tree.

    Shapes: g, h: int64[n_rows]; nodes: int32[n_node_rows] each, the nodes whose sums were sent; sums:
        int64[n_nodes, n_slots, 2].
    Units:  encoded integers of the pair format.
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    nodes: Sequence[NDArray[np.int32]]
    sums: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the attack makes of a training.

    Attributes:
        n_sums: independent sums of one feature.
        sums_per_row: those, per row of the table: equations per unknown.
        by_least_squares, with_one_bin_per_row: part of all rows and features whose bin was recovered, by plain least
            squares, and with the knowledge that a row is in exactly one bin.
        by_guessing: the same for somebody who always names the fullest bin of the feature.
    """

    n_sums: int
    sums_per_row: float
    by_least_squares: float
    with_one_bin_per_row: float
    by_guessing: float


def attack(trees: Sequence[TreeSums], layout: BinLayout, codes: BinCodes, n_projections: int = 200) -> Recovery:
    """Recover the bins of all rows and compare them with the truth.

    Shapes: codes: uint8 or uint16[n_features, n_rows], the truth.
    """
    n_rows = codes.shape[1]
    equations = _Equations.of(trees, layout, n_rows)
    plain = equations.least_squares()
    sharper = equations.with_one_bin_per_row(plain, layout, n_projections)
    rates = [np.mean(_fullest_slot(x, layout) == codes) for x in (plain, sharper)]
    guess = np.mean([np.bincount(line).max() / n_rows for line in codes])
    return Recovery(equations.rank, equations.rank / n_rows, float(rates[0]), float(rates[1]), float(guess))


@dataclass(frozen=True, slots=True, repr=False)
class _Equations:
    """The equations in orthogonal form: ``basis @ x == values`` for the rows' membership x in every slot.

    Shapes: basis: float64[rank, n_rows]; values: float64[rank, n_slots].
    """

    basis: NDArray[np.float64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, trees: Sequence[TreeSums], layout: BinLayout, n_rows: int) -> _Equations:
        lines, sums = [], []
        for tree in trees:
            for rows, node_sums in zip(tree.nodes, tree.sums, strict=True):
                for values, its_sums in zip((tree.g, tree.h), node_sums.T, strict=True):
                    line = np.zeros(n_rows)
                    line[rows] = values[rows]
                    size = np.linalg.norm(line) or 1.0
                    lines.append(line / size)
                    sums.append(its_sums / size)
        if not lines:
            return cls(np.empty((0, n_rows)), np.empty((0, layout.n_slots)))
        left, sizes, right = linalg.svd(np.array(lines), full_matrices=False, lapack_driver="gesdd")
        rank = int(np.count_nonzero(sizes > _SMALLEST * sizes[0]))
        values = (left[:, :rank].T @ np.array(sums)) / sizes[:rank, None]
        return cls(right[:rank], values)

    @property
    def rank(self) -> int:
        return self.basis.shape[0]

    def least_squares(self) -> NDArray[np.float64]:
        """Return the smallest solution. Shapes: float64[n_rows, n_slots]."""
        return self.basis.T @ self.values

    def with_one_bin_per_row(
        self, start: NDArray[np.float64], layout: BinLayout, n_projections: int
    ) -> NDArray[np.float64]:
        """Search a solution in which every row's memberships in a feature's slots are positive and add up to one.

        Projects in turn on both conditions (Douglas-Rachford).
        """
        x = start.copy()
        for _ in range(n_projections):
            on_simplex = _project_on_simplex(x, layout)
            reflected = 2 * on_simplex - x
            x += reflected - self.basis.T @ (self.basis @ reflected - self.values) - on_simplex
        return _project_on_simplex(x, layout)


def _project_on_simplex(x: NDArray[np.float64], layout: BinLayout) -> NDArray[np.float64]:
    """Return the nearest memberships that are at least zero and add up to one for each feature."""
    result = np.empty_like(x)
    for start, end in zip(layout.starts[:-1], layout.starts[1:], strict=True):
        part = x[:, start:end]
        descending = -np.sort(-part, axis=1)
        excess = (np.cumsum(descending, axis=1) - 1) / np.arange(1, end - start + 1)
        last = np.count_nonzero(descending > excess, axis=1) - 1
        result[:, start:end] = np.maximum(part - excess[np.arange(x.shape[0]), last][:, None], 0)
    return result


def _fullest_slot(x: NDArray[np.float64], layout: BinLayout) -> NDArray[np.int64]:
    """Return each row's likeliest slot of each feature. Shapes: int64[n_features, n_rows]."""
    ranges = zip(layout.starts[:-1], layout.starts[1:], strict=True)
    return np.stack([np.argmax(x[:, start:end], axis=1) for start, end in ranges])
