"""Rankings over three sites against centralized XGBoost's, in every field, of each release.

The installed release ranks live, the others' trees are stored (``ranking_trees.py``; ``make oracle`` grows them anew).
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.growth.arithmetic import ARITHMETICS, arithmetic_of
from nvflare_plugins.pooled.attempt import PooledAttempt
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.xgb.cuts import Cuts
from tests.oracle import ranking_trees
from tests.oracle.ranking_trees import SETTINGS
from tests.support.examples import slow
from tests.support.federation import Federation, succeed
from tests.support.growth import as_float32

STORED = Path(os.environ.get("VEILBOOST_ORACLE") or Path(__file__).parent)
INSTALLED = arithmetic_of(xgb.__version__).name


@cache
def stored(release: str) -> dict[str, dict[str, Any]]:
    with gzip.open(STORED / f"ranking_trees_{release}.json.gz") as file:
        document = json.load(file)
    assert document["xgboost"].startswith(f"{release}.")
    return document["rankings"]


def frame_of(name: str, seed: int = 0) -> pd.DataFrame:
    of = ranking_trees.rows(name, seed)
    frame = pd.DataFrame(of["features"], columns=[f"x{i}" for i in range(ranking_trees.N_FEATURES)])
    return frame.assign(y=of["label"], query=of["query"], site=of["site"], w=of["weight"])


def ranked(folder: Path, name: str, release: str, order: np.random.Generator | None = None, **fields: Any) -> Any:
    """Train over three sites, each with its rows in its file's order, and with its queries in another one on demand."""
    federation = Federation(folder, ranking_trees.SITES)
    for data_set, seed in (("train", 0), ("held", 1)):
        frame = frame_of(name, seed)
        parts = [np.flatnonzero(frame.site == site) for site in range(ranking_trees.SITES)]
        if order is not None:  # of queries; rows of one keep theirs, which decides between equal scores
            parts = [
                part[np.argsort(order.permutation(99)[frame["query"].iloc[part]], kind="stable")] for part in parts
            ]
        federation.give_data(data_set, frame.drop(columns=["site"]), parts)
    federation.set_registry_keys()
    fields = {"profile": "masks", "features": [f"x{i}" for i in range(ranking_trees.N_FEATURES)], **fields}
    fields |= {"weight": "w"} if "weights" in name else {}
    params = ranking_trees.parameters(name)
    job = HorizontalJob("train", "y", params, ranking_trees.ROUNDS, query="query", arithmetic=release, **fields)
    succeed(federation.run(job))
    return federation


@pytest.fixture(autouse=True)
def known_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PooledAttempt, "_searched_cuts", lambda *_: Cuts(tuple(ranking_trees.cut_points())))


def learner_of(model: bytes) -> dict[str, Any]:
    return json.loads(model)["learner"]


def check(federation: Federation, expected: dict[str, Any]) -> None:
    """Compare every field; sums that cancel to nothing differ by the step of the grid, far below a float32's of one."""
    learner = learner_of(federation.model())
    trees = learner["gradient_booster"]["model"]["trees"]
    for one, other in zip(map(as_float32, trees), map(as_float32, expected["trees"]), strict=True):
        off = np.abs(np.array(one["base_weights"]) - np.array(other["base_weights"]))
        assert (off <= np.where(np.array(other["left_children"]) >= 0, 2e-7, 0)).all()
        assert {**one, "base_weights": 0} == {**other, "base_weights": 0}
    assert learner["objective"] == expected["objective"]
    base = [float(one.strip("[]")) for one in (learner["learner_model_param"]["base_score"], expected["base_score"])]
    assert abs(base[0] - base[1]) < 1e-10
    record = json.loads((federation.workspace("site-2") / "runs" / "job" / "run.json").read_text())
    for metric, values in expected["metrics"].items():
        np.testing.assert_allclose([row["metrics"][metric] for row in record["rounds"]], values, rtol=1e-12)


# Of the other releases: one setting for each way to pair rows, and those in which releases differ.
OF_OTHERS = {"ndcg", "mean", "mean_columns"}
PUT_TOGETHER = {"mean_pairs", "mean_seeds"}  # from other settings
LIVE = {"ndcg", "weights", "mean_first"}  # the installed release ranks anew


@pytest.mark.parametrize(
    ("release", "name"),
    [
        one
        for cell in itertools.product(ARITHMETICS, SETTINGS)
        for one in (
            [cell] if cell[1] in (set(SETTINGS) - PUT_TOGETHER if cell[0] == INSTALLED else OF_OTHERS) else slow(cell)
        )
    ],
)
def test_every_field_of_stored_rankings(tmp_path: Path, release: str, name: str) -> None:
    federation = ranked(tmp_path, name, release, eval_data_set="held", evaluate_training=True)
    check(federation, stored(release)[name])
    if release == INSTALLED and name in LIVE:
        check(federation, ranking_trees.rank(name))


@pytest.mark.parametrize("profile", ["bfv", *slow("ckks")])
def test_every_profile_ranks_alike(tmp_path: Path, profile: str) -> None:
    check(ranked(tmp_path, "weights", INSTALLED, profile=profile), {**stored(INSTALLED)["weights"], "metrics": {}})


def test_the_order_of_queries_decides_under_mean_alone(tmp_path: Path) -> None:
    """Files whose queries are mixed are ranked as those in order; the first row of each decides its number."""
    models = {}
    for name in ("ndcg", "mean"):
        for order in (None, np.random.default_rng(1)):
            federation = ranked(tmp_path / f"{name}{order is None}", name, INSTALLED, order)
            models[name, order is None] = federation.model()
    assert models["ndcg", True] == models["ndcg", False]
    assert models["mean", True] != models["mean", False]


def test_releases_differ() -> None:
    """The control: what is compared tells the releases apart, and parameters from one another."""
    assert stored("3.2")["mean"]["trees"] != stored("3.4")["mean"]["trees"]
    assert stored("3.2")["mean_columns"]["trees"] != stored("3.3")["mean_columns"]["trees"]
    told = [json.dumps(one) for one in stored(INSTALLED).values()]
    assert len(set(told)) == len(told)
