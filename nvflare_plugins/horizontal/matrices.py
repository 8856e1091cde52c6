"""XGBoost's matrices of one site, built outside any communicator so that XGBoost sends nothing about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data_sets.passes import BLOCK_VALUES
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.xgb.cuts import Cuts, reference_table
from nvflare_plugins.xgb.row_blocks import RowBlocks

_PAGE_VALUES = 1 << 22
"""Values of a file of bins, one of which is in memory at a time (or a few, where XGBoost reads ahead)."""


def as_weighed(table: Table) -> Table:
    """Return the table, with one row of no weight in the place of no rows at all where rows have weights.

    XGBoost takes weights of no row for no weights: its messages would then not be those of the other sites. A row of
    weight 0, which misses all values, adds nothing to any sum.
    """
    if table.weight is None or table.n_rows:
        return table
    nothing = np.full((1, len(table.feature_names)), np.nan, dtype=np.float32)
    one = np.ones(1, dtype=np.float32)  # a label that every objective takes
    return dataclasses.replace(table, features=nothing, passes=None, label=one, weight=np.zeros(1, dtype=np.float32))


def _blocks(table: Table, most_values: int, cache_prefix: str | None = None) -> RowBlocks:
    layout = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
    return RowBlocks(lambda: table.blocks(most_values), table.label, table.weight, layout, cache_prefix)


def _binned(table: Table, reference: xgb.DMatrix, max_bin: int, pages: Path | None) -> xgb.DMatrix:
    """Bin rows by the cuts of another matrix; if they are read in passes, without ever holding them.

    Args:
        pages: an empty folder for the bins, if they are not to be held either.
    """
    common: dict[str, Any] = {"ref": reference, "max_bin": max_bin}
    if table.passes is None or not table.n_rows:
        return xgb.QuantileDMatrix(table.features, label=table.label, weight=table.weight, **_layout(table), **common)
    if pages is None:
        return xgb.QuantileDMatrix(_blocks(table, BLOCK_VALUES), enable_categorical=True, **common)
    rows = _blocks(table, _PAGE_VALUES, str(pages / "bins"))
    return xgb.ExtMemQuantileDMatrix(rows, enable_categorical=True, **common)


def reference_matrix(table: Table, cuts: Cuts, max_bin: int) -> xgb.QuantileDMatrix:
    """Return a matrix that holds the agreed cuts, and none of the rows."""
    reference = reference_table(cuts, _n_categories(table))
    return xgb.QuantileDMatrix(reference, **_layout(table), max_bin=max_bin)


def training_matrix(table: Table, cuts: Cuts, max_bin: int, pages: Path | None = None) -> xgb.DMatrix:
    """Bin the rows by the agreed cuts.

    Args:
        pages: an empty folder for the bins of a table that is read in passes, if they are not to be held.

    Raises:
        ProtocolError: XGBoost did not take over the cuts; another site's bins would then mean something else.
    """
    n_categories, reference = _n_categories(table), reference_matrix(table, cuts, max_bin)
    matrix = _binned(table, reference, max_bin, pages)
    ends, values = matrix.get_quantile_cut()
    for feature, inner in enumerate(cuts.of_feature):
        found = values[int(ends[feature]) + 1 : int(ends[feature + 1]) - 2]
        if feature not in n_categories and not np.array_equal(found, inner):
            raise ProtocolError("XGBoost did not take over the agreed cut points")
    return matrix


def evaluation_matrix(table: Table, training: xgb.DMatrix, max_bin: int, pages: Path | None = None) -> xgb.DMatrix:
    """Hold rows to be scored: as they are, or, of a table that is read in passes, their bins.

    All thresholds of the job's trees, and of a model that it continues, are among the cuts of the training matrix: a
    row's bin tells on which side of each it is.

    Args:
        pages: as of ``training_matrix``; another folder than that of the training matrix.
    """
    if table.passes is not None:
        return _binned(table, training, max_bin, pages)
    return xgb.DMatrix(table.features, label=table.label, weight=table.weight, **_layout(table))


def unlabelled_blocks(table: Table) -> Iterator[xgb.DMatrix]:
    """Yield the rows to be scored once, some at a time."""
    for block in table.blocks():
        yield xgb.DMatrix(block, **_layout(table))


def every_nth(table: Table, n: int) -> xgb.DMatrix:
    """Hold the first of every n rows, to be scored again and again."""
    found = [(places[places % n == 0], block[places % n == 0]) for places, block in table.placed_blocks()]
    order = np.argsort(np.concatenate([places for places, _ in found]))
    return xgb.DMatrix(np.concatenate([block for _, block in found])[order], **_layout(table))


def bin_starts(matrix: xgb.DMatrix, table: Table) -> NDArray[np.int64]:
    """Return where each feature's bins begin in a histogram. Shapes: result: int64[n_features + 1]."""
    listed = np.diff(matrix.get_quantile_cut()[0].astype(np.int64))
    # XGBoost lists one bound more than bins for a feature of numbers: the one below all values.
    is_numeric = np.array([kind != "c" for kind in table.feature_types])
    return np.concatenate([[0], np.cumsum(listed - is_numeric)])


def _n_categories(table: Table) -> dict[int, int]:
    return {i: len(table.categories[name]) for i, name in enumerate(table.feature_names) if name in table.categories}


def _layout(table: Table) -> dict[str, Any]:
    return {
        "feature_names": list(table.feature_names),
        "feature_types": list(table.feature_types),
        "enable_categorical": True,
    }
