"""Gradients that a site computes anew, and when they count as moved."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.data.table import Table
from nvflare_plugins.kinds.horizontal import going_on as gradient_moves
from nvflare_plugins.kinds.horizontal.going_on import GradientMoves, States
from nvflare_plugins.xgb.continuation import with_last_round_weighed
from nvflare_plugins.xgb.objectives import COX, OBJECTIVES, gradients
from nvflare_plugins.xgb.parameters import check_parameters

CONSTANT = ("reg:squarederror", "binary:hinge", "reg:absoluteerror", "reg:quantileerror", "survival:aft", COX)
OWN = {
    "multi:softprob": {"num_class": 3},
    "multi:softmax": {"num_class": 3},
    "reg:pseudohubererror": {"huber_slope": 2.5},
    "reg:tweedie": {"tweedie_variance_power": 1.3},
    "count:poisson": {"max_delta_step": 0.0},
}
NAMES = ("f0", "f1", "f2")


def table_of(n_rows: int) -> Table:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n_rows, 3)).astype(np.float32)
    label = (features[:, 0] + rng.normal(size=n_rows) > 0).astype(np.float32)
    return Table(features, NAMES, ("float",) * 3, label, "y")


def trained(table: Table, n_rounds: int, **params: Any) -> tuple[xgb.Booster, Any]:
    rows = xgb.DMatrix(table.features, label=table.label, feature_names=list(NAMES), feature_types=["float"] * 3)
    document = {"objective": "binary:logistic", "max_depth": 3, **params}
    return xgb.train({**document, "nthread": 1}, rows, n_rounds), check_parameters(document, NAMES)


def raw(booster: xgb.Booster) -> bytes:
    return bytes(booster.save_raw("json"))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in CONSTANT and "rank:" not in name])
def test_gradients_are_those_of_the_wheel(name: str) -> None:
    """A single row's leaf, without regularisation, is -gradient / hessian; two values of lambda give the gradient."""
    rng = np.random.default_rng(1)
    params = {"objective": name, **OWN.get(name, {})}
    for _ in range(6):
        n_outputs = OWN.get(name, {}).get("num_class", 1)
        margin = rng.normal(size=(1, n_outputs)) / 2
        label = float(rng.integers(0, n_outputs if n_outputs > 1 else 2)) if name != "reg:gamma" else 1.7
        leaves = []
        for ridge in (1.0, 3.0):
            rows = xgb.DMatrix(np.zeros((1, 1)), label=[label], base_margin=margin)
            plain = {"lambda": ridge, "eta": 1.0, "min_child_weight": 0, "max_delta_step": 0, "base_score": 0.5}
            booster = xgb.train({**params, **plain, "nthread": 1}, rows, 1)
            leaves.append((booster.predict(rows, output_margin=True) - margin).reshape(-1))
        first, second = leaves  # -g / (h + 1) and -g / (h + 3)
        found = -2.0 * first * second / (first - second)
        ours = gradients(params, margin, np.array([label]))[0]
        assert np.allclose(found, ours, rtol=2e-3, atol=1e-5), (found, ours)


@pytest.mark.parametrize(
    ("params", "n_rounds", "moved"),
    [
        ({}, 6, True),
        ({"num_parallel_tree": 2}, 6, True),
        ({"objective": "multi:softprob", "num_class": 2}, 6, True),
        ({"scale_pos_weight": 3.0}, 6, True),
        ({"eta": 0.001}, 6, False),
        ({"eta": 1e-30}, 6, False),
        ({"lambda": 1e30}, 6, False),
        ({"gamma": 1e6}, 6, False),
    ],
)
def test_a_round_moves_the_gradients_or_does_not(params: dict, n_rounds: int, moved: bool) -> None:
    table = table_of(600)
    booster, parameters = trained(table, n_rounds, **params)
    moves = GradientMoves(table, parameters, None)
    earlier = [States(raw(booster), range(n_rounds + 1))]
    assert moves.have_moved(raw(booster), n_rounds, [States(raw(booster), [0])]) is moved
    assert not moves.have_moved(raw(booster), n_rounds, earlier)
    if moved:
        weighed = with_last_round_weighed(raw(booster), 1)
        assert moves.have_moved(weighed, n_rounds, earlier)
        again = States(weighed, [n_rounds])
        assert moves.have_moved(with_last_round_weighed(raw(booster), 2), n_rounds, [*earlier, again])


def test_a_leaf_that_stays_is_noticed_however_much_the_others_move() -> None:
    table = table_of(600)
    booster, parameters = trained(table, 2)
    document = json.loads(raw(booster))
    tree = document["learner"]["gradient_booster"]["model"]["trees"][-1]
    leaves = np.flatnonzero(np.array(tree["left_children"]) == -1)
    for leaf in leaves:
        tree["split_conditions"][leaf] *= 50.0 * (leaf != leaves[0])
    still = json.dumps(document).encode()
    moves = GradientMoves(table, parameters, None)
    assert not moves.have_moved(still, 2, [States(raw(booster), [1])])


def test_rows_that_do_not_count_in_a_round_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(600)
    booster, parameters = trained(table, 3)
    still = table.features[:, 0] > 1e9

    def draws(number: int) -> np.ndarray:
        assert number == 3
        return still

    assert GradientMoves(table, parameters, draws).have_moved(raw(booster), 3, [States(raw(booster), [3])])
    assert not GradientMoves(table, parameters, None).have_moved(raw(booster), 3, [States(raw(booster), [3])])
    monkeypatch.setattr(gradient_moves, "_MOST_ROWS", 100)  # one in six
    assert GradientMoves(table, parameters, None).have_moved(raw(booster), 3, [States(raw(booster), [0, 1, 2])])


def test_a_site_without_rows_has_nothing_that_stays() -> None:
    table = table_of(600)
    booster, parameters = trained(table, 2)
    nothing = table_of(0)
    assert GradientMoves(nothing, parameters, None).have_moved(raw(booster), 2, [States(raw(booster), [2])])
