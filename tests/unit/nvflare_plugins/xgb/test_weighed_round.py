"""States beside a model's, and how closely sums at them can be told from those before."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.xgb.model_json import model_bytes, trees_model, with_attribute
from nvflare_plugins.xgb.weighed_round import MOST_STEPS, state_of, with_last_round_weighed


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


@pytest.mark.parametrize("params", [{}, {"num_parallel_tree": 2}, {"objective": "multi:softprob", "num_class": 2}])
def test_every_row_moves_by_a_known_part_of_the_last_round(params: dict) -> None:
    model = raw(trained(3, **params))
    before = margins(model, iteration_range=(0, 2))
    step = margins(model) - before
    for number, weights in enumerate(((0.5, 1.5), (1.5, 0.5), (0.75, 1.25), (1.25, 0.75)), 1):
        moved = margins(with_last_round_weighed(model, number)) - before
        assert np.abs(moved - step).min() > 0
        if not params:
            ratio = moved / step
            assert np.all(np.isclose(ratio, weights[0], atol=1e-3) | np.isclose(ratio, weights[1], atol=1e-3))


def test_states_differ_and_their_names_do_not_depend_on_attributes() -> None:
    model = raw(trained(2))
    states = [state_of(with_last_round_weighed(model, step)) for step in range(MOST_STEPS + 1)]
    assert len(set(states)) == MOST_STEPS + 1
    assert state_of(with_attribute(model, "a", "b")) == states[0] == state_of(raw(trained(2)))
    assert state_of(raw(trained(3))) != states[0]


def test_a_leaf_of_zero_is_no_other_state() -> None:
    document = json.loads(raw(trained(2)))
    tree = trees_model(document["learner"])["trees"][-1]
    leaf = tree["left_children"].index(-1)
    tree["split_conditions"][leaf] = 0.0
    with pytest.raises(ConfigurationError, match="a leaf of the last round is 0"):
        with_last_round_weighed(model_bytes(document), 1)


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
