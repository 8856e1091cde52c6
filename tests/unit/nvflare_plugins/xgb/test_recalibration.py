"""Probabilities of models that were trained on clipped gradients."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.scoring.export import facts
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.xgb.continuation import CLIPPING_ATTRIBUTE, clipping_of, recalibrated, with_clipping

C = 0.6


def test_the_correction_is_where_clipped_gradients_balance() -> None:
    """The balance found by bisection, for any share q of positive rows, gives back q."""
    q = np.concatenate([np.linspace(0.001, 0.999, 300), [0.4, 0.5, 0.6]])
    low, high = np.zeros(q.size), np.ones(q.size)
    for _ in range(60):
        p = (low + high) / 2
        pull = (1 - q) * np.minimum(p, C) - q * np.minimum(1 - p, C)
        low, high = np.where(pull < 0, p, low), np.where(pull < 0, high, p)
    answers = ((low + high) / 2).astype(np.float32)
    assert recalibrated(answers, C) == pytest.approx(q, abs=1e-4)
    assert np.abs(answers - q).max() > 0.05, "without the correction they would be off"


def test_order_and_the_class_at_one_half_stay() -> None:
    p = np.linspace(0, 1, 2001, dtype=np.float32)
    found = recalibrated(p, C)
    assert (np.diff(found) > 0).all() and ((found > 0.5) == (p > 0.5)).all()
    assert (found[0], found[-1]) == (0.0, 1.0) and found.dtype == np.float32


@pytest.fixture(scope="module")
def model() -> bytes:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2)).astype(np.float32)
    matrix = xgb.DMatrix(x, label=(x[:, 0] + rng.normal(size=300) > 1), feature_names=["a", "b"])
    return bytes(xgb.train({"objective": "binary:logistic", "nthread": 1}, matrix, 4).save_raw("json"))


def test_scoring_applies_it_and_stock_xgboost_reads_over_it(model: bytes) -> None:
    x = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    plain, clipped = FinishedModel(model, "m"), FinishedModel(with_clipping(model, C), "m")
    assert (plain.clipped_at, clipped.clipped_at) == (None, C)
    assert np.array_equal(clipped.predict(x), plain.predict(x))
    stock = xgb.Booster(model_file=bytearray(with_clipping(model, C)))
    assert np.array_equal(stock.predict(xgb.DMatrix(x, feature_names=["a", "b"])), plain.predict(x))
    wanted = recalibrated(plain.predict(x), C)
    assert np.array_equal(clipped.probabilities(x)[:, 1], wanted) and np.ptp(wanted) > 0.1
    assert np.allclose(clipped.probabilities(x).sum(axis=1), 1)
    assert np.array_equal(clipped.positions(x), plain.positions(x))
    assert facts(clipped)["gradients_clipped_at"] == C and "gradients_clipped_at" not in facts(plain)


@pytest.mark.parametrize("word", ["", "nan", "0.3", "1.5", "much"])
def test_a_number_that_is_none_is_refused(model: bytes, word: str) -> None:
    document = json.loads(model)
    document["learner"]["attributes"][CLIPPING_ATTRIBUTE] = word
    with pytest.raises(ScoringError, match="by which number its probabilities follow: copy it from the run"):
        FinishedModel(json.dumps(document).encode(), "m")
    assert clipping_of({}) is None


def test_a_model_of_another_objective_carries_none(model: bytes) -> None:
    document = json.loads(with_clipping(model, C))
    document["learner"]["objective"]["name"] = "binary:logitraw"
    with pytest.raises(ScoringError):
        FinishedModel(json.dumps(document).encode(), "m")
