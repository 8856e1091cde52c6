"""Documents of trees that XGBoost has not grown: it reads them, and scores as the arrays say."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost as xgb

from nvflare_plugins.xgb.model_json import model_bytes, model_document, shortest_decimals, tree_document

NAMES = ["Größe", "b"]
SPLIT = (np.array([1, -1, -1]), np.array([2, -1, -1]), np.array([1, 7, 7]))


def booster(tree: dict) -> xgb.Booster:
    settings = {"batch_size": 1, "objective": "reg:squarederror", "base_score": "[0E0]", "feature_names": NAMES}
    return xgb.Booster(model_file=bytearray(model_bytes(model_document([tree], 2, **settings))))


def scores(model: xgb.Booster, *rows: tuple[float, float]) -> list[float]:
    return model.predict(xgb.DMatrix(np.array(rows, np.float32), feature_names=NAMES)).tolist()


@pytest.mark.parametrize("threshold", [0.0, 1e-9, -1e9, 1e38])
def test_rows_go_where_the_arrays_send_them(threshold: float) -> None:
    tree = tree_document(0, 2, *SPLIT, [threshold, -1.0, 2.0])
    below, at = np.nextafter(np.float32(threshold), np.float32(-np.inf)), np.float32(threshold)
    assert scores(booster(tree), (0, below), (0, at), (0, np.nan)) == [-1.0, 2.0, 2.0]
    assert scores(booster({**tree, "default_left": [1, 0, 0]}), (0, np.nan)) == [-1.0]
    assert tree_document(0, 2, *SPLIT, [threshold, -1.0, 2.0], [1, 0, 0])["default_left"] == [1, 0, 0]


def test_decimals_read_back_as_the_same_number() -> None:
    values = np.array([0.1, 1 / 3, 1e-45, 3.4e38, -0.0], dtype=np.float32)
    assert np.array_equal(np.array(json.loads(json.dumps(shortest_decimals(values))), np.float32), values)
    assert shortest_decimals(values[:1]) == [0.1]
