"""Models that training shall go on from, as others may have written them: XGBoost would follow them beyond a tree."""

from __future__ import annotations

import copy
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.continuation import MOST_STEPS, check_initial_model, state_of, with_last_round_weighed
from nvflare_plugins.xgb.model_json import model_bytes, trees_model, with_attribute
from nvflare_plugins.xgb.parameters import check_parameters
from tests.support.scoring import in_form_of

NAMES = ["a", "b", "c"]
PARAMS = {"objective": "binary:logistic", "max_depth": 3}


def trained(**params: Any) -> dict[str, Any]:
    values = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    matrix = xgb.DMatrix(values, label=values[:, 0] * values[:, 1] > 0, feature_names=NAMES)
    document: dict[str, Any] = json.loads(bytes(xgb.train({**PARAMS, **params}, matrix, 2).save_raw("json")))
    return document


def _cycle(tree: dict[str, Any], model: dict[str, Any]) -> None:
    inner = [node for node, left in enumerate(tree["left_children"]) if left > 0]
    tree["left_children"][inner[1]] = 0


def _of(field: str, value: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(tree: dict[str, Any], model: dict[str, Any]) -> None:
        tree[field][0] = value

    return change


def _output(tree: dict[str, Any], model: dict[str, Any]) -> None:
    model["tree_info"] = [5, 5]


def _rounds(tree: dict[str, Any], model: dict[str, Any]) -> None:
    model["iteration_indptr"] = [0, 100, 2]


DAMAGE: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "circle": _cycle,
    "own child": _of("left_children", 0),
    "child beyond the tree": _of("left_children", 10**6),
    "column beyond the row": _of("split_indices", 10**6),
    "threshold that is no number": _of("split_conditions", float("nan")),
    "output beyond the answer": _output,
    "rounds beyond the trees": _rounds,
}


def damaged(damage: str) -> bytes:
    document = copy.deepcopy(trained())
    model = trees_model(document["learner"])
    DAMAGE[damage](model["trees"][0], model)
    return json.dumps(document).encode()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_trees_are_refused_before_training(damage: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'m\.json' holds a tree that is none"):
        check_initial_model(damaged(damage), "m.json", check_parameters(PARAMS, NAMES), NAMES)


DROPPED = {"booster": "dart", "rate_drop": 0.9, "one_drop": 1}


@pytest.mark.parametrize("params", [{}, {"booster": "dart"}, DROPPED, {"num_parallel_tree": 2}])
def test_whole_models_are_taken(params: dict[str, Any]) -> None:
    parameters = check_parameters({**PARAMS, **params}, NAMES)
    check_initial_model(json.dumps(trained(**params)).encode(), "m.json", parameters, NAMES)


def test_trees_that_were_dropped_are_not_taken_for_others() -> None:
    with pytest.raises(ConfigurationError, match="has booster dart, the job gbtree"):
        model = json.dumps(trained(**DROPPED)).encode()
        check_initial_model(model, "m.json", check_parameters(PARAMS, NAMES), NAMES)


@pytest.mark.parametrize("form", ["3.2", "3.3", "3.4"])
def test_weights_of_trees_are_never_overlooked(form: str) -> None:
    """XGBoost takes all weights for 1, without a word, where a later release than itself has written them."""
    model = json.dumps(in_form_of(form, trained(**DROPPED))).encode()
    for params in ({}, DROPPED):
        try:
            check_initial_model(model, "m.json", check_parameters({**PARAMS, **params}, NAMES), NAMES)
        except ConfigurationError as error:
            assert re.search("has booster dart, the job gbtree|weighs its trees in a form that XGBoost", str(error))
        else:
            assert params == DROPPED and form <= xgb.__version__


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["circle", "child beyond the tree", "output beyond the answer"])
def test_without_the_check_the_process_would_die(damage: str, tmp_path: Path) -> None:
    """The control: stock XGBoost takes such a model, and training from it ends the process."""
    (tmp_path / "m.json").write_bytes(damaged(damage))
    program = """import sys, numpy as np, xgboost as xgb
matrix = xgb.DMatrix(np.ones((300, 3)), label=np.ones(300), feature_names=["a", "b", "c"])
booster = xgb.Booster({"objective": "binary:logistic"}, [matrix], model_file=sys.argv[1])
booster.update(matrix, 2)
booster.predict(matrix)
"""
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "m.json"], capture_output=True, check=False)
    assert -run.returncode in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)


# -- weights -----------------------------------------------------------------------------------------------------------


def rows(n: int = 1500) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(n, 4))
    return features, (features[:, 0] + 0.5 * features[:, 3] ** 2 + rng.normal(size=n) > 0.4).astype(float)


def trained_on_weights(n_rounds: int, **params) -> xgb.Booster:
    features, label = rows()
    return xgb.train(
        {"objective": "binary:logistic", "nthread": 1, "max_depth": 4, **params},
        xgb.DMatrix(features, label=label),
        n_rounds,
    )


def raw(booster: xgb.Booster) -> bytes:
    return bytes(booster.save_raw("json"))


def margins(model: bytes, **options) -> np.ndarray:
    return xgb.Booster(model_file=bytearray(model)).predict(xgb.DMatrix(rows()[0]), output_margin=True, **options)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"eta": 0.05},
        {"max_depth": 6, "min_child_weight": 0},
        {"num_parallel_tree": 3, "colsample_bytree": 0.5},
        {"objective": "multi:softprob", "num_class": 2},
    ],
)
@pytest.mark.parametrize("n_rounds", [2, 3, 12])
def test_every_row_moves_from_the_state_the_one_before_and_every_other_beside(params: dict, n_rounds: int) -> None:
    model = raw(trained_on_weights(n_rounds, **params))
    states = [margins(model, iteration_range=(0, n_rounds - 1))]
    states += [margins(with_last_round_weighed(model, step)) for step in range(MOST_STEPS + 1)]
    last, trees = trees_model(json.loads(model)["learner"]), 1 if "num_parallel_tree" in params else None
    first, end = last["iteration_indptr"][-2:]
    leaves = [
        np.array(tree["split_conditions"])[np.array(tree["left_children"]) == -1] for tree in last["trees"][first:end]
    ]
    least = 0.249 * max(np.abs(values).max() for values in leaves[:trees])
    # Before a forest's last round the first tree of a row may have stood against the others.
    for one, other in list(itertools.combinations(states[1:] if trees else states, 2))[0 if trees else 1 :]:
        assert np.abs(one - other).min() > least


def test_states_differ_and_their_names_do_not_depend_on_attributes() -> None:
    model = raw(trained_on_weights(2))
    states = [state_of(with_last_round_weighed(model, step)) for step in range(MOST_STEPS + 1)]
    assert len(set(states)) == MOST_STEPS + 1
    assert state_of(with_attribute(model, "a", "b")) == states[0] == state_of(raw(trained_on_weights(2)))
    assert state_of(raw(trained_on_weights(3))) != states[0]


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"eta": 1e-30}, "next to 0"),
        ({"lambda": 1e30}, "next to 0"),
        ({"gamma": 1e6}, "next to 0"),
        ({"gamma": 1e6, "base_score": 0.2}, "single leaf"),
        ({"objective": "reg:pseudohubererror", "huber_slope": 1e4}, "next to 0"),
    ],
)
def test_a_round_that_is_no_step_has_no_state_beside_it(params: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        with_last_round_weighed(raw(trained_on_weights(2, **params)), 1)


def test_a_leaf_of_zero_moves_as_others_do() -> None:
    document = json.loads(raw(trained_on_weights(2)))
    tree = trees_model(document["learner"])["trees"][-1]
    leaf = tree["left_children"].index(-1)
    tree["split_conditions"][leaf] = 0.0
    moved = trees_model(json.loads(with_last_round_weighed(model_bytes(document), 1))["learner"])["trees"][-1]
    assert moved["split_conditions"][leaf] > 0.05


def _histogram(model: bytes, chosen: np.ndarray) -> np.ndarray:
    features, label = rows()
    gradient = 1 / (1 + np.exp(-margins(model))) - label
    bins = [np.digitize(column, np.quantile(column, np.linspace(0, 1, 17)[1:-1])) for column in features.T]
    return np.array([np.bincount(of[chosen], gradient[chosen], minlength=16) for of in bins])


def _halved(model: bytes) -> bytes:
    document = json.loads(model)
    tree = trees_model(document["learner"])["trees"][-1]
    is_leaf = np.array(tree["left_children"]) == -1
    tree["split_conditions"] = np.where(
        is_leaf, 0.5 * np.array(tree["split_conditions"]), tree["split_conditions"]
    ).tolist()
    return model_bytes(document)


@pytest.mark.parametrize(("eta", "n_rounds"), [(0.3, 5), (0.3, 20), (0.1, 10)])
def test_the_lost_sites_sums_are_estimated_no_better_than_from_the_next_round(eta: float, n_rounds: int) -> None:
    """The attack: what all sites sum to at a state is interpolated from the two before, and the others' part taken."""
    next_one = trained_on_weights(n_rounds + 1, eta=eta)
    last, before = raw(next_one[:n_rounds]), raw(next_one[: n_rounds - 1])
    everybody, lost = np.ones(1500, dtype=bool), np.arange(1500) < 500

    def error_at(state: bytes, share: float) -> float:
        known = [_histogram(model, everybody) for model in (before, last)]
        estimate = known[0] + share * (known[1] - known[0]) - _histogram(state, ~lost)
        true = _histogram(state, lost)
        return float(np.abs(estimate - true).mean() / np.abs(true).mean())

    weighed = min(error_at(with_last_round_weighed(last, 1), share) for share in (0.5, 0.75, 1.0, 1.25, 1.5))
    assert error_at(_halved(last), 0.5) < 0.01 < weighed  # the control: half of all leaves is told at once
    assert weighed > 0.25 * min(error_at(raw(next_one), share) for share in (1.0, 1.5, 2.0))


@pytest.mark.parametrize("eta", [0.3, 0.1, 0.03, 0.01])
def test_an_estimate_from_neighbouring_states_is_as_good_as_the_rounds_are_small(eta: float) -> None:
    """What SECURITY.md says: the relative error of the lost site's root histogram is about the learning rate."""
    booster, everybody, lost = trained_on_weights(6, eta=eta), np.ones(1500, dtype=bool), np.arange(1500) < 500
    true = _histogram(raw(booster[:5]), lost)
    for state in (raw(booster), with_last_round_weighed(raw(booster[:5]), 1)):
        estimate = _histogram(raw(booster[:5]), everybody) - _histogram(state, ~lost)
        assert 0.4 * eta < np.abs(estimate - true).mean() / np.abs(true).mean() < 3 * eta


def test_rows_that_all_move_alike_give_the_lost_site_away() -> None:
    """Why a single leaf is no step: sums of the hessians, which are open too, tell how far each sum has moved."""
    model, lost, moved_by = raw(trained_on_weights(5)), np.arange(1500) < 500, 0.1
    features, label = rows()
    bins = [np.digitize(column, np.quantile(column, np.linspace(0, 1, 17)[1:-1])) for column in features.T]
    shares = [1 / (1 + np.exp(-(margins(model) + by))) for by in (0.0, moved_by)]

    def sums(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.array([np.bincount(of[chosen], values[chosen], minlength=16) for of in bins])

    true = sums(shares[0] - label, lost)
    difference = sums(shares[0] - label, lost | True) - sums(shares[1] - label, ~lost)
    told = difference + moved_by * sums(shares[1] * (1 - shares[1]), ~lost)
    assert np.abs(told - true).mean() < 0.01 * np.abs(true).mean() < 0.1 * np.abs(difference - true).mean()
