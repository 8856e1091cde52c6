"""Federated training against centralized XGBoost on the pooled rows with the same cuts, and profiles against plain.

Tolerances: structure, features, thresholds and default directions must be equal. Leaves differ at most by a unit or two
of float32's last place (2e-7 of max(1, |leaf|)): sums are off by far less, but may lie where float32 rounds the other
way; and not at all where base_score is given.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer

from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.processors import BUILT_IN
from tests.support.federation import Federation, central_model, leaf_difference, succeed

DATA = Path(__file__).parents[3] / "shared" / "data"
MAX_BIN, ROUNDS = 64, 4
LABEL_MEAN_TOLERANCE = 2e-7


def breast() -> pd.DataFrame:
    frame = load_breast_cancer(as_frame=True).frame
    frame = frame.rename(columns={"target": "label"}).sample(frac=1, random_state=0)
    return frame.astype(np.float32)


def synthetic(n_rows: int = 20_000) -> pd.DataFrame:
    """20 columns with 7 % missing, one constant, one all missing, one of few whole numbers."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(n_rows, 20)).astype(np.float32)
    features[:, 5] = rng.integers(0, 4, n_rows)
    label = features[:, 0] + features[:, 1] * features[:, 2] + features[:, 5] + rng.normal(size=n_rows) > 2
    features[rng.random(features.shape) < 0.07] = np.nan
    features[:, 6], features[:, 7] = 3.0, np.nan
    return pd.DataFrame(features, columns=[f"x{i}" for i in range(20)]).assign(label=label.astype(np.float32))


def regression(frame: pd.DataFrame, scale: float = 1.0) -> pd.DataFrame:
    first = np.nan_to_num(frame.iloc[:, 0].to_numpy(np.float64))
    return frame.assign(label=((np.abs(first) * 0.3 + frame.label * 2 + 0.5) * scale).astype(np.float32))


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(label=np.round(np.minimum(regression(frame).label, 30)))


def classes(frame: pd.DataFrame) -> pd.DataFrame:
    first = np.nan_to_num(frame.iloc[:, 0].to_numpy(np.float64))
    return frame.assign(label=np.digitize(first, np.quantile(first, [0.3, 0.6])).astype(np.float32))


def as_is(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


LOGISTIC = {"objective": "binary:logistic"}
EQUAL_TO_CENTRAL = {
    "plain_logistic": (LOGISTIC, as_is),
    "base_score": ({**LOGISTIC, "base_score": 0.5}, as_is),
    "lambda_0": ({**LOGISTIC, "lambda": 0}, as_is),
    "alpha": ({**LOGISTIC, "alpha": 1.0}, as_is),
    "gamma": ({**LOGISTIC, "gamma": 1.0}, as_is),
    "child_weight_0": ({**LOGISTIC, "min_child_weight": 0}, as_is),
    "child_weight_20": ({**LOGISTIC, "min_child_weight": 20}, as_is),
    "delta_step": ({**LOGISTIC, "max_delta_step": 0.5}, as_is),
    "lossguide": ({**LOGISTIC, "grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0}, as_is),
    "max_leaves": ({**LOGISTIC, "max_leaves": 6}, as_is),
    "depth_1": ({**LOGISTIC, "max_depth": 1}, as_is),
    "depth_10": ({**LOGISTIC, "max_depth": 10}, as_is),
    "scale_pos_weight": ({**LOGISTIC, "scale_pos_weight": 3.0}, as_is),
    "parallel_trees": ({**LOGISTIC, "num_parallel_tree": 2}, as_is),
    "column_sampling": (
        {**LOGISTIC, "colsample_bytree": 0.7, "colsample_bylevel": 0.7, "colsample_bynode": 0.7, "seed": 7},
        as_is,
    ),
    "monotone": ({**LOGISTIC, "monotone_constraints": "first"}, as_is),
    "interaction": ({**LOGISTIC, "interaction_constraints": "halves"}, as_is),
    "dart": ({**LOGISTIC, "booster": "dart", "rate_drop": 0.3}, as_is),
    "hinge": ({"objective": "binary:hinge"}, as_is),
    "logit_raw": ({"objective": "binary:logitraw"}, as_is),
    "squared_error": ({"objective": "reg:squarederror"}, regression),
    "squared_error_1e6": ({"objective": "reg:squarederror"}, lambda f: regression(f, 1e6)),
    "pseudo_huber": ({"objective": "reg:pseudohubererror"}, regression),
    "squared_log_error": ({"objective": "reg:squaredlogerror"}, regression),
    "poisson": ({"objective": "count:poisson"}, counts),
    "gamma_regression": ({"objective": "reg:gamma"}, regression),
    "tweedie": ({"objective": "reg:tweedie"}, regression),
    "softprob": ({"objective": "multi:softprob", "num_class": 3}, classes),
    "softmax": ({"objective": "multi:softmax", "num_class": 3}, classes),
}
# Adaptive leaves average the sites' medians; vector leaves are compared with plain because XGBoost cannot list their
# trees. These are equal to `plain`, not to centralized training. Sampled rows are compared with centralized training in
# tests/integration/test_row_floors.py.
EQUAL_TO_PLAIN = {
    "subsample": ({**LOGISTIC, "subsample": 0.5, "seed": 3}, as_is),
    "absolute_error": ({"objective": "reg:absoluteerror"}, regression),
    "quantile_error": ({"objective": "reg:quantileerror", "quantile_alpha": 0.3}, regression),
    "vector_leaf": ({"objective": "multi:softprob", "num_class": 3, "multi_strategy": "multi_output_tree"}, classes),
}


# Half of the columns: what is equal is so for any number of them; all meet the slow tests.
TABLES = {"breast": lambda: breast().iloc[:, -16:], "missing": lambda: synthetic(3_000)}
# Parameters of the tree meet missing values, objectives meet real data; the other pairs run with the slow tests, and so
# do those that reach the same code of ours as another: XGBoost computes gradients, and what it splits by, itself.
TREE_PARAMETERS = {
    "plain_logistic",
    "lambda_0",
    "alpha",
    "gamma",
    "child_weight_0",
    "child_weight_20",
    "delta_step",
    "lossguide",
    "max_leaves",
    "depth_1",
    "depth_10",
    "parallel_trees",
    "column_sampling",
    "monotone",
    "interaction",
    "dart",
}
OBJECTIVES = {"base_score"} | (set(EQUAL_TO_CENTRAL) - TREE_PARAMETERS)
LIKE_ANOTHER = {
    "alpha",
    "lambda_0",
    "gamma",
    "child_weight_0",
    "child_weight_20",
    "gamma_regression",
    "max_leaves",
    "depth_1",
    "delta_step",
    "scale_pos_weight",
    "hinge",
    "logit_raw",
    "poisson",
    "squared_error_1e6",
    "pseudo_huber",
    "squared_log_error",
    "tweedie",
    "softmax",
}
FAST = {("missing", name) for name in TREE_PARAMETERS - LIKE_ANOTHER}
FAST |= {("breast", name) for name in OBJECTIVES - LIKE_ANOTHER}


def pairs(names, fast) -> list:
    """Return every table with every name; those that are not fast run with the slow tests only."""
    return [
        pytest.param(
            TABLES[table], name, marks=[] if (table, name) in fast else [pytest.mark.slow], id=f"{table}-{name}"
        )
        for table in TABLES
        for name in names
    ]


def prepared(params: dict, frame: pd.DataFrame) -> dict:
    names = [c for c in frame.columns if c != "label"]
    params = {"max_depth": 4, "max_bin": MAX_BIN, **params}
    if params.get("monotone_constraints") == "first":
        params["monotone_constraints"] = {names[0]: 1, names[1]: -1}
    if params.get("interaction_constraints") == "halves":
        params["interaction_constraints"] = [names[: len(names) // 2], names[len(names) // 2 :]]
    return params


def federate(folder: Path, frame: pd.DataFrame, params: dict, profile: str, **fields) -> Federation:
    federation = Federation.of(folder, train=frame)
    federation.set_registry_keys()
    fields = {"cuts": "exact", "num_rounds": ROUNDS, **fields}
    job = HorizontalJob("train", "label", params, profile=profile, **fields)
    succeed(federation.run(job))
    return federation


def even_cuts(frame: pd.DataFrame) -> dict:
    """Return fields of jobs that are compared with each other: no sites search for cuts."""
    features = frame.drop(columns="label").fillna(0)
    bounds = zip(features.min().sub(1).tolist(), features.max().add(1).tolist(), strict=True)
    return {"cuts": "uniform", "cut_bounds": dict(zip(features, map(list, bounds), strict=True))}


def from_central(folder: Path, frame: pd.DataFrame, params: dict, profile: str) -> float:
    """Return how far the leaves of the sites' model are from those of the central one."""
    params = prepared(params, frame)
    federation = federate(folder, frame, params, profile)
    central = central_model(frame, "label", params, federation.cuts(), ROUNDS)
    return leaf_difference(federation.model(), central)


@pytest.mark.parametrize(("make", "name"), pairs(EQUAL_TO_CENTRAL, FAST))
def test_masks_equal_central(tmp_path, make, name):
    params, change = EQUAL_TO_CENTRAL[name]
    difference = from_central(tmp_path, change(make()), params, "masks")
    assert difference <= (0.0 if "base_score" in params else LABEL_MEAN_TOLERANCE)


@pytest.mark.parametrize(
    ("make", "name"), pairs(EQUAL_TO_PLAIN, {("breast", "subsample"), ("breast", "quantile_error")})
)
def test_masks_equal_plain(tmp_path, make, name):
    params, change = EQUAL_TO_PLAIN[name]
    frame = change(make())
    params = prepared(params, frame)
    models = [federate(tmp_path / p, frame, params, p, **even_cuts(frame)).model() for p in ("plain", "masks")]
    assert models[0] == models[1]


@pytest.mark.parametrize("objective", ["logistic", pytest.param("squared", marks=pytest.mark.slow)])
def test_profiles_equal_plain_on_one_grid(tmp_path, objective):
    frame = breast().iloc[:, -6:]
    frame = frame if objective == "logistic" else regression(frame)
    params = prepared(LOGISTIC if objective == "logistic" else {"objective": "reg:squarederror"}, frame)
    fields = {"finest_exponent": -20, "num_rounds": 2, **even_cuts(frame)}
    models = {federate(tmp_path / name, frame, params, name, **fields).model() for name in BUILT_IN}
    assert len(models) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "tolerance"), [("bfv", LABEL_MEAN_TOLERANCE), ("ckks", 1e-6)])
@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_lattice_profiles_equal_central(tmp_path, make, profile, tolerance):
    assert from_central(tmp_path, make(), LOGISTIC, profile) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "tolerance"), [("bfv", LABEL_MEAN_TOLERANCE), ("ckks", 1e-6)])
@pytest.mark.parametrize("name", EQUAL_TO_CENTRAL)
@pytest.mark.parametrize("make", [breast, lambda: synthetic(6_000)], ids=["breast", "missing"])
def test_lattice_profiles_equal_central_over_all_parameters(tmp_path, make, name, profile, tolerance):
    params, change = EQUAL_TO_CENTRAL[name]
    assert from_central(tmp_path, change(make()), params, profile) <= tolerance


@pytest.mark.parametrize(
    "profile", ["masks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfv", "ckks"))]
)
def test_early_stopping_on_auc_equals_plain(tmp_path, profile):
    frame, models = breast().iloc[:, -12:], []
    for name in ("plain", profile):
        federation = Federation.of(tmp_path / name, train=frame.iloc[:400], eval=frame.iloc[400:])
        job = HorizontalJob(
            "train",
            "label",
            {**prepared(LOGISTIC, frame), "eval_metric": "auc", "eta": 0.9},
            15,
            name,
            eval_data_set="eval",
            early_stopping_rounds=2,
            finest_exponent=-20,
            **even_cuts(frame),
        )
        succeed(federation.run(job))
        models.append(federation.model())
    assert models[0] == models[1]


@pytest.mark.parametrize(
    "make", [pytest.param(TABLES["breast"], marks=pytest.mark.slow), TABLES["missing"]], ids=TABLES
)
def test_bfv_equals_central_exactly_when_the_base_score_is_given(tmp_path, make):
    frame = make()
    params = prepared({**LOGISTIC, "base_score": 0.5}, frame)
    federation = federate(tmp_path, frame, params, "bfv")
    assert leaf_difference(federation.model(), central_model(frame, "label", params, federation.cuts(), ROUNDS)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("profile", [name for name in BUILT_IN if name != "plain"])
@pytest.mark.parametrize("name", ["credit2", "missing"])
def test_large_sets_equal_central(tmp_path, name, profile):
    if name == "credit2":
        path = DATA / "credit2.parquet"
        if not path.exists():
            pytest.skip("credit2 is not on this machine")
        frame = pd.read_parquet(path).sample(frac=1, random_state=0).astype(np.float32)
    else:
        frame = synthetic()
    params = prepared({**LOGISTIC, "max_bin": 256, "max_depth": 5}, frame)
    federation = federate(tmp_path, frame, params, profile, num_rounds=10)
    central = central_model(frame, "label", params, federation.cuts(), 10)
    assert leaf_difference(federation.model(), central) <= (1e-6 if profile == "ckks" else LABEL_MEAN_TOLERANCE)


def test_weights_equal_central(tmp_path):
    frame = breast().assign(w=np.random.default_rng(0).random(569).astype(np.float32) + 0.5)
    params = prepared(LOGISTIC, frame.drop(columns="w"))
    federation = federate(tmp_path, frame, params, "masks", weight="w")
    central = central_model(frame, "label", params, federation.cuts(), ROUNDS, weight="w")
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE
