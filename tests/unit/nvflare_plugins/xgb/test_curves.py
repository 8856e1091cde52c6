"""Areas under curves as XGBoost takes them: what it would send for the same rows, and answers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.growth.metrics import curve_parts

ONE = {"nthread": 1, "objective": "binary:logistic", "eval_metric": ["auc", "aucpr"]}
CLASSES = {"nthread": 1, "objective": "multi:softprob", "num_class": 3, "eval_metric": ["auc", "aucpr"]}


def of_xgboost(params: dict[str, object], margins, label, weight) -> tuple[np.ndarray, list[float]]:
    matrix = xgb.DMatrix(np.zeros((label.size, 1)), label=label, weight=weight, base_margin=margins, nthread=1)
    booster = xgb.Booster(params, [matrix])
    said = booster.eval_set([(matrix, "rows")])
    return booster.predict(matrix), [float(one.split(":")[1]) for one in said.split()[1:]]


@pytest.mark.parametrize("seed", range(12))
def test_area_of_two_classes_is_xgboosts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows = int(rng.integers(4, 60))
    margins = rng.normal(size=n_rows).astype(np.float32).round(seed % 3)  # ties
    label = (rng.random(n_rows) if seed % 4 == 3 else rng.random(n_rows) < 0.5).astype(np.float32)
    label[:2] = 0, 1
    weight = rng.random(n_rows).astype(np.float32) if seed % 2 else None
    scores, found = of_xgboost(ONE, margins, label, weight)
    for metric, theirs in zip(("auc", "aucpr"), found, strict=True):
        area, whole = curve_parts(metric, scores, label, weight)
        assert area / whole == pytest.approx(theirs, abs=2e-6)  # XGBoost prints so many digits


def test_area_of_classes_is_xgboosts() -> None:
    rng = np.random.default_rng(5)
    label = rng.integers(0, 3, 50).astype(np.float32)
    scores, found = of_xgboost(CLASSES, rng.normal(size=(50, 3)).astype(np.float32), label, None)
    for metric, theirs in zip(("auc", "aucpr"), found, strict=True):
        whole, positives, area = curve_parts(metric, scores, label, None).reshape(3, 3).T
        assert (area / whole) @ positives / positives.sum() == pytest.approx(theirs, abs=2e-6)


def test_areas_by_hand() -> None:
    scores, label = np.array([0.9, 0.8, 0.8, 0.1], np.float32), np.array([1, 0, 1, 0], np.float32)
    assert curve_parts("auc", scores, label, None).tolist() == [3.5, 4.0]  # of four pairs one is a tie
    assert curve_parts("auc", scores, np.ones(4, np.float32), None).tolist() == [0.0, 0.0]
    assert np.isnan(curve_parts("aucpr", scores, np.ones(4, np.float32), None)[0])
    nothing = np.empty(0, np.float32)
    assert curve_parts("auc", nothing, nothing, None).tolist() == [0.0, 0.0]
    assert curve_parts("auc", np.empty((0, 3), np.float32), nothing, None).tolist() == [0.0] * 9
