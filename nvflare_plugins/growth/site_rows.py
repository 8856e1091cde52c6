"""The rows of one site, or of one worker's share of them, through a training: bins, margins, gradients, metrics.

Margins are kept from the leaves, in float32 and in the order of the trees, as XGBoost's own predictions are: they equal
what the finished model predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.bins import BinLayout, BinnedTable
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.objectives import Objective, largest_pairs
from nvflare_plugins.growth.rows import BinnedRows, NodeSplit, on_grid
from nvflare_plugins.growth.site_sums import Parts, is_of_all_rows

Floats = NDArray[np.float32]


@dataclass(slots=True, repr=False)
class RowSet:
    """Rows in bins with their labels.

    Shapes: label, weight: float32[n_rows]; margins: float32[n_rows, n_outputs], which training changes.
    """

    table: BinnedTable
    label: Floats
    weight: Floats | None
    margins: Floats

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return int(self.label.size)


class HeldRows:
    """The rows of one training; all of ``Rows`` (rows.py) beside what is below."""

    def __init__(
        self, layout: BinLayout, objective: Objective, training: RowSet, evaluated: Sequence[RowSet | None]
    ) -> None:
        """Hold rows. Args: evaluated: each evaluation set; None stands for the training rows."""
        self._objective, self._training = objective, training
        self._rows = BinnedRows(layout, training.table)
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

    def begin_round(self, drawn: NDArray[np.bool_] | None, scale: np.float32) -> NDArray[np.float32]:
        """Compute the gradients of a round from the margins.

        Args:
            drawn: which rows take part; None for all. Shapes: bool[n_rows].
            scale: of smooth losses.

        Returns:
            The largest |gradient| and hessian of each output. Shapes: float32[n_outputs, 2].

        Raises:
            ConfigurationError: a gradient is not finite.
        """
        rows, self._drawn = self._training, drawn
        self._gradients = self._objective.gradients(rows.margins, rows.label, rows.weight, scale)
        if drawn is not None:
            self._gradients[:, ~drawn] = 0
        if self._objective.adaptive_leaf:
            self._residuals = rows.label - rows.margins[:, 0]
        return largest_pairs(self._gradients)

    def begin_tree(self, output: int, g_exponent: int, h_exponent: int) -> None:
        """Put all rows into the root, their pairs of an output rounded to steps of 2^exponent, half to even."""
        self._rows.begin_tree(on_grid(self._gradients[output], g_exponent, h_exponent))

    def total(self) -> NDArray[np.int64]:
        """Return the sum of all rows' pairs. Shapes: int64[2]."""
        return self._rows.total()

    def histograms(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """Return the sums of the nodes' pairs in bins. Shapes: int64[n_nodes, n_bins, 2]."""
        return self._rows.histograms(nodes)

    def apply(self, splits: Sequence[NodeSplit]) -> None:
        """Divide the rows of nodes."""
        self._rows.apply(splits)

    def leaf_rows(self, n_nodes: int) -> NDArray[np.int64]:
        """Return how many rows that take part are in each node of the tree. Shapes: int64[n_nodes]."""
        return np.bincount(self._rows.node_of_rows()[self._takes_part()], minlength=n_nodes).astype(np.int64)

    def residuals(self) -> tuple[NDArray[np.int32], Floats, Floats | None]:
        """Return the node, the residual and the weight of each row that takes part. Shapes: [n_rows that do] each."""
        rows = self._training
        chosen, weight = self._takes_part(), rows.weight
        if weight is None and self._drawn is not None:  # XGBoost takes weighted quantiles of rows that are drawn
            weight = np.ones(rows.n_rows, dtype=np.float32)
        of_each = None if weight is None else weight[chosen]
        return self._rows.node_of_rows()[chosen], self._residuals[chosen], of_each

    def end_tree(self, output: int, values: Floats, splits: Sequence[NodeSplit]) -> None:
        """Add a tree's leaves to the margins. Shapes: values: float32[n_nodes]. Args: splits: of the tree, in order."""
        self._training.margins[:, output] += values[self._rows.node_of_rows()]
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
                found.append(metric.parts(rows.margins, rows.label, rows.weight))
        return found

    def _takes_part(self) -> NDArray[np.bool_]:
        weight = self._training.weight
        has_weight = np.ones(self.n_rows, dtype=bool) if weight is None else weight > 0
        return has_weight if self._drawn is None else has_weight & self._drawn
