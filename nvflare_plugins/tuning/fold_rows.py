"""The rows of a tuning whose trees the sites grow: bins that are made once for all folds and trials."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.growth.bins import BinLayout, BinnedTable, bin_rows
from nvflare_plugins.growth.site_rows import HeldRows, RowSet
from nvflare_plugins.growth.training import GrowthPlan
from nvflare_plugins.horizontal.growing import n_categories
from nvflare_plugins.xgb.cuts import Cuts


class FoldRows:
    """All rows of a site, or of a shard, in bins, and the fold of each."""

    def __init__(self, table: Table, folds: NDArray[np.integer], cuts: Cuts, arithmetic: str) -> None:
        """Bin all rows. Shapes: folds: of each row, from 0, [n_rows]."""
        layout = BinLayout.from_cuts(cuts, n_categories(table), ARITHMETICS[arithmetic])
        self._bins, self._folds = bin_rows(layout, table.blocks(), table.n_rows), folds
        self.labels = replace(table, features=table.features[:0], passes=None, ids=None, groups=None)

    def without(self, fold: int, plan: GrowthPlan, start: NDArray[np.float32]) -> HeldRows:
        """Return the rows of all folds but one, and those of that one to be scored. Args: start: margins of any row."""

        def chosen(rows: NDArray[np.bool_]) -> RowSet:
            bins = BinnedTable(self._bins.codes[rows], self._bins.missing, self._bins.is_dense)
            label = self.labels.label[rows]
            margins = np.broadcast_to(start, (label.size, plan.objective.n_outputs)).astype(np.float32)
            return RowSet(bins, label, None, margins)

        held_out = self._folds == fold
        return HeldRows(plan.layout, plan.objective, chosen(~held_out), [chosen(held_out)])
