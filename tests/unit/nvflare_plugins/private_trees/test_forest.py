"""The public forest as an XGBoost model."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.forest import draw_forest, initial_model
from nvflare_plugins.private_trees.methods import dp_rf, dp_tr_newton

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
    forest = draw_forest(METHOD, CANDIDATES, 5)
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
    booster = xgb.Booster(model_file=bytearray(initial_model(forest, METHOD)))
    leaves = booster.predict(xgb.DMatrix(columns.T, nthread=1), pred_leaf=True).astype(int)
    bins = CANDIDATES.bin_rows(columns)
    for number, tree in enumerate(forest.trees):
        assert np.array_equal(leaves[:, number], tree.leaves[tree.leaf_of_rows(bins)])


def test_all_sites_write_the_same_bytes_and_another_seed_other_ones() -> None:
    models = [initial_model(draw_forest(METHOD, CANDIDATES, seed), METHOD) for seed in (5, 5, 6)]
    assert models[0] == models[1] != models[2]


def test_the_empty_forest_answers_nothing() -> None:
    booster = xgb.Booster(model_file=bytearray(initial_model(draw_forest(METHOD, CANDIDATES, 5), METHOD)))
    assert not booster.predict(xgb.DMatrix(np.zeros((3, 3))), output_margin=True).any()


def test_names_come_from_the_schema() -> None:
    model = json.loads(initial_model(draw_forest(METHOD, CANDIDATES, 5), METHOD, ["a", "b", "c"]))
    assert model["learner"]["feature_names"] == ["a", "b", "c"]


def test_batches_must_fill_the_forest() -> None:
    with pytest.raises(ConfigurationError, match="multiple"):
        draw_forest(replace(METHOD, batch_size=4), CANDIDATES, 5)


def test_averaging_is_one_round() -> None:
    assert draw_forest(dp_rf(6), CANDIDATES, 5).n_rounds == 1
