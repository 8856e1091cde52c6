"""A site's own rows with the margins that the common model gives them.

Trees of other sites split between the bins of this one, so that margins need the values themselves: those that are
held, or, of a table that is read in passes, those of a block of rows after the other, once a round. Trees are grown on
the same bins either way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.bagging.model import own_matrix
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.xgb.row_blocks import RowBlocks


class OwnRows:
    """What trees of this site are grown on.

    Attributes:
        matrix: XGBoost's, with the margins.
    """

    def __init__(self, table: Table, max_bin: int, nthread: int) -> None:
        self._table, self._nthread = table, nthread
        self._margins: NDArray[np.float32] | None = None
        if table.passes is None:
            self.matrix = own_matrix(table.features, table.label, table.feature_names, nthread)
            return
        layout = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
        blocks = RowBlocks(table.blocks, table.label, None, layout)
        self.matrix = xgb.QuantileDMatrix(blocks, max_bin=max_bin, nthread=nthread)

    def add(self, booster: xgb.Booster) -> None:
        """Add a model's trees to the margins, tree by tree; the first time, what it begins with too.

        Raises:
            DataRefusal: a file has changed since the data set was loaded.
        """
        if self._table.passes is None:
            margins = booster.predict(self.matrix, output_margin=True)
        else:
            margins = np.concatenate(list(self._in_blocks(booster)))
        self._margins = margins
        self.matrix.set_base_margin(margins)

    def _in_blocks(self, booster: xgb.Booster) -> Iterator[NDArray[np.float32]]:
        first = 0
        for block in self._table.blocks():
            rows = slice(first, first + len(block))
            first = rows.stop
            matrix = own_matrix(block, self._table.label[rows], self._table.feature_names, self._nthread)
            if self._margins is not None:
                matrix.set_base_margin(self._margins[rows])
            yield booster.predict(matrix, output_margin=True)
