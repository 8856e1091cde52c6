"""XGBoost's matrices of one site, built outside any communicator so that XGBoost sends nothing about them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.xgb.cuts import Cuts, reference_table


def as_weighed(table: Table) -> Table:
    """Return the table, with one row of no weight in the place of no rows at all where rows have weights.

    XGBoost takes weights of no row for no weights: its messages would then not be those of the other sites. A row of
    weight 0, which misses all values, adds nothing to any sum.
    """
    if table.weight is None or table.n_rows:
        return table
    nothing = np.full((1, len(table.feature_names)), np.nan, dtype=np.float32)
    one = np.ones(1, dtype=np.float32)  # a label that every objective takes
    return dataclasses.replace(table, features=nothing, label=one, weight=np.zeros(1, dtype=np.float32))


def training_matrix(table: Table, cuts: Cuts, max_bin: int) -> xgb.QuantileDMatrix:
    """Bin the rows by the agreed cuts.

    Raises:
        ProtocolError: XGBoost did not take over the cuts; another site's bins would then mean something else.
    """
    n_categories = {
        i: len(table.categories[name]) for i, name in enumerate(table.feature_names) if name in table.categories
    }
    common = {**_layout(table), "max_bin": max_bin}
    reference = xgb.QuantileDMatrix(reference_table(cuts, n_categories), **common)
    matrix = xgb.QuantileDMatrix(table.features, label=table.label, weight=table.weight, ref=reference, **common)
    ends, values = matrix.get_quantile_cut()
    for feature, inner in enumerate(cuts.of_feature):
        found = values[int(ends[feature]) + 1 : int(ends[feature + 1]) - 2]
        if feature not in n_categories and not np.array_equal(found, inner):
            raise ProtocolError("XGBoost did not take over the agreed cut points")
    return matrix


def evaluation_matrix(table: Table) -> xgb.DMatrix:
    """Hold rows as they are, to be scored by thresholds."""
    return xgb.DMatrix(table.features, label=table.label, weight=table.weight, **_layout(table))


def bin_starts(matrix: xgb.QuantileDMatrix, table: Table) -> NDArray[np.int64]:
    """Return where each feature's bins begin in a histogram. Shapes: result: int64[n_features + 1]."""
    listed = np.diff(matrix.get_quantile_cut()[0].astype(np.int64))
    # XGBoost lists one bound more than bins for a feature of numbers: the one below all values.
    is_numeric = np.array([kind != "c" for kind in table.feature_types])
    return np.concatenate([[0], np.cumsum(listed - is_numeric)])


def _layout(table: Table) -> dict[str, Any]:
    return {
        "feature_names": list(table.feature_names),
        "feature_types": list(table.feature_types),
        "enable_categorical": True,
    }
