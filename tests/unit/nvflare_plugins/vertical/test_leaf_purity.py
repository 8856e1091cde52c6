"""Leaf purity, by hand and in a training whose leaves stock XGBoost names."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.kinds.vertical.active_party import LeafPurity, purity_report
from tests.support.vertical_federation import Joined, central, federate


def test_known_leaves():
    # A leaf of 3 with labels 1, 1, 0 and one of 5 with labels 0, 0, 0, 0, 1: 2/3 and 4/5 pure, together 6 of 8 rows.
    leaves = np.array([3, 3, 3, 4, 4, 4, 4, 4], dtype=np.int32)
    label = np.array([1, 1, 0, 0, 0, 0, 0, 1], dtype=np.float32)
    assert LeafPurity(label).of(leaves) == 6 / 8
    assert LeafPurity(label).of(np.zeros(8, dtype=np.int32)) == 5 / 8
    assert LeafPurity(np.array([2, 0, 1], dtype=np.float32)).of(np.arange(3, dtype=np.int32)) == 1.0
    with pytest.raises(ValueError):
        LeafPurity(np.empty(0, dtype=np.float32))


def test_the_report_tells_own_rounds_from_shared_ones():
    label = np.array([0, 0, 0, 1], dtype=np.float32)
    report = purity_report([0.9, 0.8, 0.7, 0.6, 0.5, 0.5], 2, 1, label)
    assert report.guess == 0.75
    assert (report.first_round, report.second_round) == pytest.approx((0.85, 0.65))
    assert (report.later_rounds, report.first_shared_round) == pytest.approx((0.575, 0.65))
    only = purity_report([0.9], 1, 1, label)
    assert (only.second_round, only.later_rounds, only.first_shared_round) == (None, None, None)


def test_no_round_stands_in_the_report_twice():
    """Without own rounds the first one is also the first with passive parties."""
    label = np.array([0, 0, 0, 1], dtype=np.float32)
    names = ["largest class alone", "first round", "second round", "later rounds", "first round with passive parties"]
    for own, expected in ((0, names[:4]), (1, names)):
        assert [name for name, _ in purity_report([0.9, 0.8, 0.7], 1, own, label).rows()] == expected
    assert purity_report([0.9], 1, 1, label).rows() == (("largest class alone", "0.7500"), ("first round", "0.9000"))


@pytest.mark.parametrize("own_rounds", [0, 1])
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_training_reports_the_purity_of_xgboosts_own_leaves(own_rounds, parallel):
    rng = np.random.default_rng(1)
    features = rng.normal(size=(300, 5)).astype(np.float32)
    label = (features[:, 0] + 2 * features[:, 3] + rng.normal(size=300) * 0.3 > 0).astype(np.float32)
    params = {"objective": "binary:logistic", "max_depth": 3, "num_parallel_tree": parallel, "colsample_bynode": 0.7}
    joined = Joined(features, label, (2, 3))
    outcome = federate(joined, params, 3, own_rounds=own_rounds)
    # The merged model is an ordinary one; the federated party had no joined table to ask it about.
    merged = xgb.Booster(model_file=bytearray(outcome.merged()))
    leaves = merged.predict(xgb.DMatrix(features, feature_names=merged.feature_names), pred_leaf=True)
    expected = [LeafPurity(label).of(column.astype(np.int32)) for column in leaves.reshape(300, -1).T]
    assert outcome.result.leaf_purities == expected
    if not own_rounds:
        assert np.array_equal(central(joined, params, 3).predict(xgb.DMatrix(features), pred_leaf=True), leaves)


def test_regression_has_none():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(100, 2)).astype(np.float32)
    outcome = federate(Joined(features, features[:, 1], (1, 1)), {"objective": "reg:squarederror", "max_depth": 2}, 1)
    assert outcome.result.leaf_purities == []
