"""Bagging over sites equals bagging by hand: stock XGBoost goes on from the common model at each site's rows in turn.

The emulation trains from the whole model, not from margins, and takes whole trees, statistics included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.kinds.bagging.training import run_bagging_site
from tests.support import bagging
from tests.support.examples import quick
from tests.support.federation import succeed
from tests.support.scoring import check_covers_add_up

CASES = {
    "logistic": {},
    "squared error": {"objective": "reg:squarederror", "base_score": 0.25},
    "columns drawn": {"colsample_bynode": 0.5, "seed": 5},
    "few leaves": {"grow_policy": "lossguide", "max_leaves": 4, "max_depth": 5},
    "regularised": {"lambda": 3.0, "alpha": 0.1, "gamma": 0.5, "min_child_weight": 4.0},
    "monotone": {"monotone_constraints": {"a": 1}},
}
MIN_ROWS = 4


def matrix(frame: pd.DataFrame) -> xgb.DMatrix:
    names = [name for name in frame.columns if name != "y"]
    return xgb.DMatrix(frame[names].to_numpy(np.float32), label=frame.y, feature_names=names)


def gbtree(model: bytes) -> dict[str, Any]:
    return json.loads(model)["learner"]["gradient_booster"]["model"]


def by_hand(frames: list[pd.DataFrame], params: dict[str, Any], num_rounds: int) -> list[dict[str, Any]]:
    """Return all trees: in each round every site's, each trained from the same model at a share of the step."""
    bound = 1.0 if params["objective"] == "reg:squarederror" else 0.25
    rate = float(np.float32(params["eta"])) / len(frames)
    own = {"base_score": 0.5, "tree_method": "hist", **params, "eta": rate}
    own["min_child_weight"] = max(params.get("min_child_weight", 1.0), MIN_ROWS * bound)
    common: bytes | None = None
    for number in range(num_rounds):
        grown = []
        for frame in frames:
            seeded = {**own, "seed": params.get("seed", 0) + number}
            start = bytearray(common) if common else None
            grown.append(gbtree(bytes(xgb.train(seeded, matrix(frame), 1, xgb_model=start).save_raw("json"))))
        if common is None:
            common = bytes(xgb.train(own, matrix(frames[0]), 0).save_raw("json"))
        document = json.loads(common)
        model = document["learner"]["gradient_booster"]["model"]
        for part in grown:
            model["trees"].append({**part["trees"][-1], "id": len(model["trees"])})
            model["tree_info"].append(0)
        # One tree to a layer: training then goes on by one.
        model["iteration_indptr"] = list(range(len(model["trees"]) + 1))
        model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
        common = json.dumps(document).encode()
    return gbtree(common)["trees"]


@pytest.mark.parametrize("name", quick(CASES, "logistic", "squared error", "columns drawn", "regularised"))
@pytest.mark.parametrize("n_sites", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_model_is_that_of_bagging_by_hand(tmp_path: Path, name: str, n_sites: int) -> None:
    few = {"min_sites": 2, "max_colluders": 0} if n_sites == 2 else {}
    consents = {**bagging.POLICY["consents"], "fewer_than_three_sites": True}
    parties = bagging.sites(tmp_path, n_sites, **few, consents=consents, min_rows_per_node=MIN_ROWS)
    params = {**bagging.PARAMS, **CASES[name]}
    succeed(parties.run(run_bagging_site, bagging.job(params=params)))
    frames = [pd.read_parquet(parties.workspace(site) / "train.parquet") for site in parties.sites]
    ours, expected = gbtree(bagging.model(parties)), by_hand(frames, params, 4)
    assert len(ours["trees"]) == len(expected) == 4 * n_sites
    assert ours["iteration_indptr"] == [n_sites * number for number in range(5)]
    assert any(len(tree["left_children"]) > 1 for tree in expected)
    for mine, theirs in zip(ours["trees"], expected, strict=True):
        for field in ("left_children", "right_children", "split_conditions", "parents"):
            assert mine[field] == theirs[field], field
        inner = [child >= 0 for child in theirs["left_children"]]
        for field in ("split_indices", "default_left"):
            assert [v for v, is_inner in zip(mine[field], inner, strict=True) if is_inner] == [
                v for v, is_inner in zip(theirs[field], inner, strict=True) if is_inner
            ]
        assert not any(mine["loss_changes"])
    check_covers_add_up(json.loads(bagging.model(parties)))


def test_more_sites_learn_what_one_cannot(tmp_path: Path) -> None:
    """It is a model: on rows of all sites it is better than nothing, and XGBoost reads it as its own."""
    parties = bagging.sites(tmp_path)
    succeed(parties.run(run_bagging_site, bagging.job(num_rounds=15)))
    booster = xgb.Booster(model_file=bytearray(bagging.model(parties)))
    frame = pd.concat([bagging.rows(number, 400) for number in (0, 1, 2)])
    margins = booster.predict(matrix(frame), output_margin=True)
    right = ((margins > 0) == (frame.y > 0.5)).mean()
    assert booster.num_boosted_rounds() == 15 and right > 0.6
    first = booster[0:1].predict(matrix(frame), output_margin=True)
    assert not np.array_equal(first, margins) and len(booster.get_dump()) == 45
