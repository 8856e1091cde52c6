"""Finished models as jobs write them, with the rows that they were trained on, in words and in positions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xgboost as xgb

from nvflare_plugins.xgb.model_json import tree_weights, trees_model, with_lists

COLOURS, SIZES, CLASSES = ["rosé", "grün", "blau"], [7, -3, 10], ["nein", "ja"]
NAMES = ["Größe (cm)", "身長", "🦊 {x}", "colour", "size", "flag"]
CATEGORIES = {"colour": COLOURS, "size": SIZES}
ID = "Kunde"


def frame(n_rows: int = 300, seed: int = 0) -> pd.DataFrame:
    """Return rows as a user has them: words, whole numbers, truth values, and some of each missing."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(rng.normal(size=(n_rows, 3)), columns=NAMES[:3])
    table["colour"] = np.array(COLOURS)[rng.integers(0, 3, n_rows)]
    table["size"] = np.array(SIZES)[rng.integers(0, 3, n_rows)]
    table["flag"] = rng.integers(0, 2, n_rows).astype(bool)
    table.loc[::7, NAMES[1]] = np.nan
    table.loc[::11, "colour"] = None
    return table


def positions(table: pd.DataFrame) -> np.ndarray:
    """Return the same rows as XGBoost was trained on them, worked out by hand."""
    coded = table.copy()
    for name, public in CATEGORIES.items():
        codes = pd.Categorical(table[name], categories=public).codes
        coded[name] = np.where(codes < 0, np.nan, codes)
    return coded.to_numpy(np.float64).astype(np.float32)


@dataclass(frozen=True)
class Trained:
    """A model as a file, XGBoost's own booster without any list, and the matrix of the rows it was trained on."""

    path: Path
    booster: xgb.Booster
    rows: pd.DataFrame
    matrix: xgb.DMatrix


def label_of(values: np.ndarray, n_classes: int) -> np.ndarray:
    """Return classes that need numbers and categories."""
    return ((values[:, 0] > 0).astype(int) + (values[:, 3] == 1) + (values[:, 4] == 2)) % n_classes


def train(
    folder: Path, params: dict[str, Any], label: np.ndarray | None = None, classes: Any = None, rounds: int = 6
) -> Trained:
    """Train on positions and write the model with its lists, as a job does."""
    rows = frame()
    values = positions(rows)
    n_classes = int(params.get("num_class", 2))
    matrix = matrix_of(values, label_of(values, n_classes) if label is None else label)
    booster = xgb.train({"max_depth": 4, "nthread": 1, "seed": 1, **params}, matrix, rounds)
    path = folder / "model.json"
    path.write_bytes(with_lists(bytes(booster.save_raw("json")), NAMES, CATEGORIES, classes))
    return Trained(path, booster, rows, matrix)


def matrix_of(values: np.ndarray, label: np.ndarray | None = None) -> xgb.DMatrix:
    """Return rows in the representation of training."""
    types = ["c" if name in CATEGORIES else "float" for name in NAMES]
    return xgb.DMatrix(values, label=label, feature_names=NAMES, feature_types=types, enable_categorical=True)


def changed(path: Path, change: Any) -> Path:
    """Rewrite a model file after a change of its document."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, ensure_ascii=False))
    return path


def check_covers_add_up(document: dict) -> None:
    """Assert that each leaf of a model has some cover, and each inner node its children's."""
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
        left, right = np.array(tree["left_children"]), np.array(tree["right_children"])
        cover, inner = np.array(tree["sum_hessian"], dtype=np.float32), left >= 0
        assert (cover > 0).all()
        np.testing.assert_allclose(cover[inner], cover[left[inner]] + cover[right[inner]], rtol=1e-5)


def in_form_of(release: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return a model with weights of trees as a release of XGBoost writes them."""
    learner = document["learner"]
    model = {name: part for name, part in trees_model(learner).items() if name != "weight_drop"}
    weights, trees = {"weight_drop": tree_weights(learner)}, {"name": "gbtree", "model": model}
    forms = {
        "3.2": {"name": "dart", "gbtree": trees, **weights},
        "3.3": {**trees, **weights},
        "3.4": {"name": "gbtree", "model": {**model, **weights}},
    }
    return {**document, "learner": {**learner, "gradient_booster": forms[release]}}
