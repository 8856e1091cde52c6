"""What centralized XGBoost grows, one thread, given cuts and pairs of gradients: the oracle of nvflare_plugins/growth.

python tests/oracle/growth_trees.py FILE     grow all settings with the XGBoost of this interpreter, write the trees

It imports XGBoost and numpy alone, so that any release can run it in an environment of its own. Data are integers from
seeds. Pairs lie on a grid of powers of two, so that XGBoost's sums are exact in any order: every field has to be equal.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

GRID_BITS = 12
FIELDS = ("left_children", "right_children", "parents", "split_indices", "split_conditions", "default_left")
FIELDS += ("base_weights", "loss_changes", "sum_hessian", "split_type")
CATEGORY_FIELDS = ("categories", "categories_nodes", "categories_segments", "categories_sizes")
SEED = 7
_OUTERMOST = np.float32(1e38)


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        missing: share of values that are missing, of each feature or of all.
        categories: how many, of each categorical feature.
        cuts: inner cut points of each feature; its values are integers from 0 to that.
        constant: a feature with one value.
        is_logistic: pairs follow from the margins of the trees before; otherwise they are drawn.
        most_weight: rows weigh 1 to this.
    """

    params: dict[str, Any] = field(default_factory=dict)
    n_rows: int = 400
    n_features: int = 4
    n_trees: int = 2
    cuts: int = 14
    missing: Sequence[float] | float = 0.1
    categories: dict[int, int] = field(default_factory=dict)
    constant: int | None = None
    is_logistic: bool = False
    most_weight: int = 1


def _with(**params: Any) -> Setting:
    return Setting(params)


_CATEGORIES = {1: 3, 2: 12}
SETTINGS: dict[str, Setting] = {
    "default": Setting(n_trees=4),
    "dense": Setting(missing=0.0),
    "logistic": Setting({"eta": 0.3}, n_trees=4, is_logistic=True),
    "weights": Setting({"eta": 0.3}, n_trees=3, is_logistic=True, most_weight=5),
    "some_columns_missing": Setting(missing=(0.0, 0.1, 1.0, 0.9)),
    "all_missing": Setting(missing=1.0),
    "one_value": Setting(constant=1),
    "one_row": Setting({"min_child_weight": 0}, n_rows=1),
    "few_rows": Setting({"min_child_weight": 0}, n_rows=7),
    "lambda_0": _with(reg_lambda=0, min_child_weight=0),
    "lambda_7": _with(reg_lambda=7.3),
    "alpha": _with(reg_alpha=3.7),
    "gamma": _with(gamma=0.8),
    "stump": _with(gamma=1e9),
    "min_child_weight": _with(min_child_weight=25),
    "max_delta_step": _with(max_delta_step=0.1),
    "max_delta_step_alpha": _with(max_delta_step=0.1, reg_alpha=2),
    "depth_1": _with(max_depth=1),
    "depth_9": _with(max_depth=9),
    "lossguide": _with(grow_policy="lossguide", max_depth=0, max_leaves=20),
    "lossguide_depth": _with(grow_policy="lossguide", max_depth=4, min_child_weight=0),
    "max_leaves": _with(max_leaves=6),
    "bins_2": Setting(cuts=0),
    "bins_256_dense": Setting(n_features=2, cuts=254, n_rows=900, missing=0.0),
    "bins_256": Setting(n_features=2, cuts=254, n_rows=900),
    "bins_300": Setting(n_features=2, cuts=298, n_rows=900),
    "bins_65536": Setting(n_features=1, cuts=65534, n_rows=300),
    "one_hot": Setting(categories={0: 2, 1: 3}),
    "partition": Setting(categories={1: 12, 2: 40}),
    "categories_missing": Setting({"max_depth": 6}, categories=_CATEGORIES, missing=(0.0, 0.4, 0.5, 0.2)),
    "categories_threshold": Setting({"max_cat_threshold": 5, "max_cat_to_onehot": 2}, categories=_CATEGORIES),
    "categories_monotone": Setting({"monotone_constraints": "(1,0,0,-1)"}, categories=_CATEGORIES),
    "one_category": Setting(categories={0: 1}),
    "monotone": _with(monotone_constraints="(1,-1,0,1)"),
    "monotone_alpha": _with(monotone_constraints="(1,-1,0,1)", reg_alpha=2, min_child_weight=0),
    "monotone_lossguide": _with(
        monotone_constraints="(-1,-1,1,1)", grow_policy="lossguide", max_depth=0, max_leaves=15
    ),
    "interactions": _with(interaction_constraints="[[0, 1], [2, 3]]", max_depth=6),
    "interactions_overlap": _with(interaction_constraints="[[0, 1, 2], [2, 3]]", max_depth=6),
    "columns_of_trees": Setting({"colsample_bytree": 0.5}, n_trees=3),
    "columns_of_levels": Setting({"colsample_bylevel": 0.5}, n_trees=3),
    "columns_of_nodes": Setting({"colsample_bynode": 0.5, "colsample_bytree": 0.75}, n_trees=3),
    "seeds_of_rounds": Setting(
        {"seed_per_iteration": True, "colsample_bytree": 0.5, "colsample_bynode": 0.5}, n_trees=4
    ),
    "rows_and_columns": Setting({"subsample": 0.6, "colsample_bynode": 0.5}, n_trees=3),
}


def parameters(setting: Setting) -> dict[str, Any]:
    """Return XGBoost's parameters."""
    base = {"tree_method": "hist", "nthread": 1, "base_score": 0, "seed": SEED, "max_depth": 4, "eta": 0.5}
    return base | {"max_bin": max(setting.cuts + 2, 2)} | setting.params


def cut_points(setting: Setting) -> list[NDArray[np.float32]]:
    """Return the inner cut points of each feature. Shapes: float32[setting.cuts] each."""
    return [np.arange(setting.cuts, dtype=np.float32) + np.float32(0.5) for _ in range(setting.n_features)]


def reference(setting: Setting) -> NDArray[np.float32]:
    """Return a table whose sketch is the cut points (xgb.cuts.reference_table). Shapes: float32[n, n_features]."""
    columns = [np.concatenate([[-_OUTERMOST], cuts, [_OUTERMOST]]).astype(np.float32) for cuts in cut_points(setting)]
    for feature, n in setting.categories.items():
        columns[feature] = np.arange(n, dtype=np.float32)
    table = np.full((max(c.size for c in columns), len(columns)), np.nan, dtype=np.float32)
    for feature, column in enumerate(columns):
        table[: column.size, feature] = column
    return table


def features(setting: Setting) -> NDArray[np.float32]:
    """Return the rows, NaN is missing. Shapes: float32[n_rows, n_features]."""
    rng, shape = np.random.default_rng(1), (setting.n_rows, setting.n_features)
    table = rng.integers(0, setting.cuts + 1, shape).astype(np.float32)
    for feature, n in setting.categories.items():
        table[:, feature] = rng.integers(0, n, setting.n_rows)
    if setting.constant is not None:
        table[:, setting.constant] = 3
    percent = np.round(100 * np.broadcast_to(np.asarray(setting.missing), setting.n_features)).astype(np.int64)
    table[rng.integers(0, 100, shape) < percent] = np.nan
    return table


def pairs(setting: Setting, number: int, table: NDArray[np.float32], margins: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return a tree's pairs in steps of 2^-GRID_BITS. Shapes: margins: float32[n_rows]; result: int64[n_rows, 2]."""
    rng = np.random.default_rng([2, number])
    drawn = rng.integers(-(1 << GRID_BITS), (1 << GRID_BITS) + 1, (setting.n_rows, 2))
    if not setting.is_logistic:
        return np.stack([drawn[:, 0], np.abs(drawn[:, 1])], axis=1)
    label = np.nan_to_num(table[:, 0] > setting.cuts / 2) ^ (np.nan_to_num(table[:, 1]) % 5 == 0)
    probability = 1 / (1 + np.exp(-margins.astype(np.float64)))
    both = np.stack([probability - label, probability * (1 - probability)], axis=1)
    weight = np.random.default_rng(3).integers(1, setting.most_weight + 1, (setting.n_rows, 1))
    return np.rint(both * (1 << GRID_BITS)).astype(np.int64) * weight


def grow(setting: Setting) -> Iterator[dict[str, Any]]:
    """Grow the trees of a setting; yield the fields of each."""
    types = ["c" if feature in setting.categories else "q" for feature in range(setting.n_features)]
    layout = {"feature_types": types, "enable_categorical": True}
    params, table = parameters(setting), features(setting)
    given = xgb.QuantileDMatrix(reference(setting), max_bin=params["max_bin"], **layout)
    matrix = xgb.QuantileDMatrix(table, ref=given, max_bin=params["max_bin"], **layout)
    booster = xgb.Booster(params, [matrix])
    margins: NDArray[np.float32] = np.zeros(setting.n_rows, dtype=np.float32)
    for number in range(setting.n_trees):
        g, h = (pairs(setting, number, table, margins) / (1 << GRID_BITS)).astype(np.float32).T
        booster.boost(matrix, number, grad=g.reshape(-1, 1), hess=h.reshape(-1, 1))
        margins = booster.predict(xgb.DMatrix(table, **layout), output_margin=True)
        trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
        yield {name: trees[-1][name] for name in (*FIELDS, *CATEGORY_FIELDS)}


def main() -> int:
    """Write all trees, and of settings that this XGBoost refuses why."""
    found, refused = {}, {}
    for name, setting in SETTINGS.items():
        try:
            found[name] = list(grow(setting))
        except (xgb.core.XGBoostError, TypeError, ValueError, KeyError) as error:
            lines = str(error).strip().splitlines() or [""]
            refused[name] = f"{type(error).__name__}: {lines[0][:200]}"
    document = {"xgboost": xgb.__version__, "trees": found} | ({"refused": refused} if refused else {})
    written = json.dumps(document, separators=(",", ":"))
    with open(sys.argv[1], "wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        packed.write(written.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
