"""The public forest as an XGBoost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xgboost as xgb

from dp_components.split_candidates.candidates import Candidates
from nvflare_plugins.kinds.private_trees.methods import dp_tr_newton
from tests.support.refreshed import drawn_trees, empty_model

CANDIDATES = Candidates(
    (
        np.linspace(-1, 1, 7, dtype=np.float32),
        np.array([0.1, 1 / 3, 2.5e-8 + 1], dtype=np.float32),
        np.arange(4, dtype=np.float32),
    )
)
METHOD = replace(dp_tr_newton(), n_trees=6)


def test_xgboost_follows_every_row_to_the_leaf_that_we_do() -> None:
    """Rows on the candidates themselves, beside them, and missing."""
    trees = drawn_trees(METHOD, CANDIDATES, 5)
    rng = np.random.default_rng(0)
    columns = np.stack(
        [
            np.concatenate(
                [cuts, np.nextafter(cuts, np.float32(np.inf)), rng.uniform(-2, 4, 60 - 2 * cuts.size), [np.nan] * 4]
            )[:60]
            for cuts in CANDIDATES.of_feature
        ]
    ).astype(np.float32)
    rng.permuted(columns, axis=1, out=columns)
    booster = xgb.Booster(model_file=bytearray(empty_model(trees, CANDIDATES, 1)))
    leaves = booster.predict(xgb.DMatrix(columns.T, nthread=1), pred_leaf=True).astype(int)
    bins = CANDIDATES.bin_rows(columns)
    for number, tree in enumerate(trees):
        assert np.array_equal(leaves[:, number], tree.leaves[tree.leaf_of_rows(bins)])
