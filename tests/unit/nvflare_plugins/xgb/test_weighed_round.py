"""States beside a model's, and how closely sums at them can be told from those before."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.continuation import MOST_STEPS, state_of, with_last_round_weighed
from nvflare_plugins.xgb.model_json import model_bytes, trees_model, with_attribute


def rows(n: int = 1500) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(n, 4))
    return features, (features[:, 0] + 0.5 * features[:, 3] ** 2 + rng.normal(size=n) > 0.4).astype(float)


def trained(n_rounds: int, **params) -> xgb.Booster:
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
    model = raw(trained(n_rounds, **params))
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
    model = raw(trained(2))
    states = [state_of(with_last_round_weighed(model, step)) for step in range(MOST_STEPS + 1)]
    assert len(set(states)) == MOST_STEPS + 1
    assert state_of(with_attribute(model, "a", "b")) == states[0] == state_of(raw(trained(2)))
    assert state_of(raw(trained(3))) != states[0]


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
        with_last_round_weighed(raw(trained(2, **params)), 1)


def test_a_leaf_of_zero_moves_as_others_do() -> None:
    document = json.loads(raw(trained(2)))
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
    next_one = trained(n_rounds + 1, eta=eta)
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
    booster, everybody, lost = trained(6, eta=eta), np.ones(1500, dtype=bool), np.arange(1500) < 500
    true = _histogram(raw(booster[:5]), lost)
    for state in (raw(booster), with_last_round_weighed(raw(booster[:5]), 1)):
        estimate = _histogram(raw(booster[:5]), everybody) - _histogram(state, ~lost)
        assert 0.4 * eta < np.abs(estimate - true).mean() / np.abs(true).mean() < 3 * eta


def test_rows_that_all_move_alike_give_the_lost_site_away() -> None:
    """Why a single leaf is no step: sums of the hessians, which are open too, tell how far each sum has moved."""
    model, lost, moved_by = raw(trained(5)), np.arange(1500) < 500, 0.1
    features, label = rows()
    bins = [np.digitize(column, np.quantile(column, np.linspace(0, 1, 17)[1:-1])) for column in features.T]
    shares = [1 / (1 + np.exp(-(margins(model) + by))) for by in (0.0, moved_by)]

    def sums(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.array([np.bincount(of[chosen], values[chosen], minlength=16) for of in bins])

    true = sums(shares[0] - label, lost)
    difference = sums(shares[0] - label, lost | True) - sums(shares[1] - label, ~lost)
    told = difference + moved_by * sums(shares[1] * (1 - shares[1]), ~lost)
    assert np.abs(told - true).mean() < 0.01 * np.abs(true).mean() < 0.1 * np.abs(difference - true).mean()
