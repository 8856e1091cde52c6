"""Vertical training against centralized XGBoost on the joined table: every bit of every tree, and of predictions.

There is no tolerance: structure, features, merged thresholds, default directions, leaves, gains, hessian sums and
predictions are equal. The scheme is the stand-in without encryption; real Paillier is at the end.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from sklearn.datasets import load_breast_cancer

from he_processors.curve.registry import available_backends
from he_processors.paillier import generate_paillier_key
from nvflare_plugins.kinds.vertical.key_owner import gradient_owner, pair_format
from nvflare_plugins.xgb.rounds import parse_metrics
from tests.support.he_toys import toy_paillier
from tests.support.vertical_federation import (
    Joined,
    Outcome,
    announced,
    central,
    federate,
    first_difference,
    make_clear,
    make_elgamal,
    on_the_curve,
    trees,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
LOGISTIC = {"objective": "binary:logistic"}
ROUNDS = 5


@cache
def table(n_rows: int = 2_000, n_columns: int = 20, missing: float = 0.07, seed: int = 3) -> np.ndarray:
    """Normal, whole-numbered, constant and empty columns with missing values."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, n_columns)).astype(np.float32)
    features[:, 5] = rng.integers(0, 4, n_rows)
    features[:, 8] = np.round(features[:, 8], 1)
    features[rng.random(features.shape) < missing] = np.nan
    return features


def labels(features: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.nan_to_num(features.astype(np.float64))
    score = x[:, 0] + x[:, 1 % x.shape[1]] * x[:, -1] + 0.5 * x[:, x.shape[1] // 2] + rng.normal(size=len(x)) * 0.5
    if kind == "binary":
        return (score > 0.3).astype(np.float32)
    if kind == "classes":
        return np.digitize(score, np.quantile(score, [0.3, 0.7])).astype(np.float32)
    if kind == "counts":
        return np.round(np.minimum(np.exp(score * 0.5), 30)).astype(np.float32)
    if kind == "events":  # no two at one time
        time = np.exp(score + 1e-7 * np.arange(len(x))).astype(np.float32)
        assert np.unique(time).size == time.size
        return np.stack([time, np.where(rng.random(len(x)) < 0.4, np.inf, time)], axis=1).astype(np.float32)
    if kind == "times":
        time = np.exp(score).astype(np.float32)
        upper = np.select([rng.random(len(x)) < share for share in (0.3, 0.5)], [np.inf, 2 * time], time)
        return np.stack([np.where(rng.random(len(x)) < 0.1, 0, time), upper], axis=1).astype(np.float32)
    return (score * (1e6 if kind == "millions" else 1.0)).astype(np.float32)


def joined(kind: str = "binary", widths=(7, 6, 7), with_valid: bool = False, **options) -> Joined:
    features = table(**options)
    label = labels(features, kind)
    if not with_valid:
        return Joined(features, label, widths)
    n = len(features) * 3 // 4
    return Joined(features[:n], label[:n], widths, (features[n:], label[n:]))


def check_equal(data: Joined, outcome: Outcome, reference: xgb.Booster) -> None:
    merged = outcome.merged()
    assert first_difference(merged, bytes(reference.save_raw("json"))) == ""
    matrix = xgb.DMatrix(data.features)
    expected = reference.predict(matrix)
    booster = xgb.Booster(model_file=bytearray(merged))
    named = xgb.DMatrix(data.features, feature_names=booster.feature_names)
    np.testing.assert_array_equal(booster.predict(named), expected)
    np.testing.assert_array_equal(outcome.predict(data, 0), expected)


def compare(data: Joined, params: dict, num_rounds: int = ROUNDS, **settings) -> Outcome:
    outcome = federate(data, params, num_rounds, **settings)
    check_equal(data, outcome, central(data, params, num_rounds))
    return outcome


SPLIT_CONSTRAINTS = {
    "monotone_constraints": "(1,-1,0,0,0,0,0,1,-1,0,0,0,0,0,-1,1,0,0,0,0)",
    "interaction_constraints": "[[0,1,2,9,14],[3,4,10,15,19],[1,5,6,7,8,16,19]]",
}
COLUMNS = {"colsample_bytree": 0.7, "colsample_bylevel": 0.7, "colsample_bynode": 0.7, "seed": 7}
VARIANTS = {
    "plain": (LOGISTIC, "binary"),
    "lambda_0": ({**LOGISTIC, "lambda": 0}, "binary"),
    "alpha": ({**LOGISTIC, "alpha": 1.5}, "binary"),
    "gamma": ({**LOGISTIC, "gamma": 2.0}, "binary"),
    "child_weight_0": ({**LOGISTIC, "min_child_weight": 0}, "binary"),
    "child_weight_20": ({**LOGISTIC, "min_child_weight": 20}, "binary"),
    "delta_step": ({**LOGISTIC, "max_delta_step": 0.5}, "binary"),
    "delta_step_alpha": ({**LOGISTIC, "max_delta_step": 0.5, "alpha": 1.0}, "binary"),
    "eta": ({**LOGISTIC, "eta": 1.0}, "binary"),
    "lossguide": ({**LOGISTIC, "grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0}, "binary"),
    "lossguide_depth": ({**LOGISTIC, "grow_policy": "lossguide", "max_depth": 4}, "binary"),
    "max_leaves": ({**LOGISTIC, "max_leaves": 11}, "binary"),
    "max_leaves_no_depth": ({**LOGISTIC, "max_leaves": 40, "max_depth": 0}, "binary"),
    "depth_1": ({**LOGISTIC, "max_depth": 1}, "binary"),
    "depth_10": ({**LOGISTIC, "max_depth": 10}, "binary"),
    "depth_12_over_256_nodes": ({**LOGISTIC, "max_depth": 12, "min_child_weight": 0}, "binary"),
    "max_bin_4": ({**LOGISTIC, "max_bin": 4}, "binary"),
    "max_bin_64": ({**LOGISTIC, "max_bin": 64}, "binary"),
    "max_bin_1024": ({**LOGISTIC, "max_bin": 1024}, "binary"),
    "scale_pos_weight": ({**LOGISTIC, "scale_pos_weight": 3.0}, "binary"),
    "base_score": ({**LOGISTIC, "base_score": 0.3}, "binary"),
    "parallel_trees": ({**LOGISTIC, "num_parallel_tree": 3}, "binary"),
    "softprob": ({"objective": "multi:softprob", "num_class": 3}, "classes"),
    "softmax": ({"objective": "multi:softmax", "num_class": 3}, "classes"),
    "squared_error": ({"objective": "reg:squarederror"}, "real"),
    "squared_error_millions": ({"objective": "reg:squarederror"}, "millions"),
    "absolute_error": ({"objective": "reg:absoluteerror"}, "real"),
    "quantile_error": ({"objective": "reg:quantileerror", "quantile_alpha": 0.3}, "real"),
    "pseudo_huber": ({"objective": "reg:pseudohubererror"}, "real"),
    "poisson": ({"objective": "count:poisson"}, "counts"),
    **{
        f"aft_{noise}": ({"objective": "survival:aft", "aft_loss_distribution": noise, **more}, "times")
        for noise, more in (("normal", {}), ("logistic", {"aft_loss_distribution_scale": 0.6}), ("extreme", {}))
    },
    "hinge": ({"objective": "binary:hinge"}, "binary"),
    "subsample": ({**LOGISTIC, "subsample": 0.6, "seed": 3}, "binary"),
    "subsample_forest": ({**LOGISTIC, "subsample": 0.5, "num_parallel_tree": 2, "seed": 11}, "binary"),
    "subsample_softprob": ({"objective": "multi:softprob", "num_class": 3, "subsample": 0.7}, "classes"),
    "columns_by_tree": ({**LOGISTIC, "colsample_bytree": 0.5, "seed": 1}, "binary"),
    "columns_by_level": ({**LOGISTIC, "colsample_bylevel": 0.5, "seed": 2}, "binary"),
    "columns_by_node": ({**LOGISTIC, "colsample_bynode": 0.5, "seed": 3}, "binary"),
    "columns_forest": ({**LOGISTIC, **COLUMNS, "num_parallel_tree": 2}, "binary"),
    "columns_softprob": ({"objective": "multi:softprob", "num_class": 3, **COLUMNS}, "classes"),
    "monotone": ({**LOGISTIC, "monotone_constraints": SPLIT_CONSTRAINTS["monotone_constraints"]}, "binary"),
    "interaction": ({**LOGISTIC, "interaction_constraints": SPLIT_CONSTRAINTS["interaction_constraints"]}, "binary"),
    "everything": (
        {**LOGISTIC, **SPLIT_CONSTRAINTS, **COLUMNS, "subsample": 0.8, "alpha": 0.3, "gamma": 0.1},
        "binary",
    ),
}


ELGAMAL_VARIANTS = (
    *("plain", "aft_extreme", "softprob", "squared_error_millions", "subsample", "everything", "lossguide"),
)

# Between two others, or put together from them: with the slow tests.
BETWEEN_OTHERS = {
    "child_weight_20",
    "eta",
    "lossguide_depth",
    "max_leaves",
    "depth_10",
    "max_bin_64",
    "scale_pos_weight",
    "softmax",
    "subsample_forest",
    "subsample_softprob",
    "columns_forest",
    "columns_softprob",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in BETWEEN_OTHERS else []) for name in VARIANTS]
)
def test_variants(name):
    params, kind = VARIANTS[name]
    params = {"max_depth": 5, **params}
    is_deep = params["max_depth"] > 5
    compare(joined(kind, n_rows=4_000 if is_deep else 2_000), params, 1 if is_deep else 2)


COX = {"objective": "survival:cox", "base_score": 1.0, "max_depth": 4}


def farthest(merged: bytes, reference: xgb.Booster) -> float:
    """Return by how much leaves and thresholds of two models differ; infinite where their structures do."""
    found = 0.0
    for one, other in zip(trees(merged), trees(bytes(reference.save_raw("json"))), strict=True):
        if any(one[name] != other[name] for name in ("left_children", "split_indices", "default_left")):
            return np.inf
        a, b = (np.array(tree["split_conditions"]) for tree in (one, other))
        found = max(found, float((np.abs(a - b) / np.maximum(1, np.abs(b))).max()))
    return found


@pytest.mark.parametrize("scheme", [make_clear, make_elgamal])
def test_cox_regression_without_tied_events_is_xgboosts(scheme):
    """XGBoost adds up exp in float32 and takes rows away in float64: its last denominators are off by 1e-6."""
    n_rows, params, num_rounds = (1_200, COX, 6)
    if scheme is not make_clear:  # ciphertexts take long
        n_rows, params, num_rounds = 200, {**COX, "max_bin": 16}, 2
    data = joined("events", n_rows=n_rows, with_valid=True)
    outcome, history = federate(data, params, num_rounds, scheme), {}
    merged, reference = outcome.merged(), central(data, params, num_rounds, evals_result=history)
    assert farthest(merged, reference) < 1e-5
    assert [r.metrics["valid-cox-nloglik"] for r in outcome.result.rounds] == pytest.approx(
        history["valid"]["cox-nloglik"], abs=1e-5
    )
    margins = outcome.predict(data, 1)
    assert margins == pytest.approx(reference.predict(xgb.DMatrix(data.valid[0])), rel=1e-5)


def test_cox_regression_with_tied_events_is_not_xgboosts():
    data = joined("events", n_rows=1_200)
    tied = Joined(data.features, np.ceil(data.label), data.widths)
    assert farthest(federate(tied, COX, 6).merged(), central(tied, COX, 6)) > 1e-3


RANKINGS = {
    "ndcg": {"objective": "rank:ndcg"},
    "pairwise": {"objective": "rank:pairwise", "lambdarank_normalization": False},
    "map": {"objective": "rank:map", "base_score": 0.0},
    "mean": {"objective": "rank:ndcg", "lambdarank_pair_method": "mean", "colsample_bynode": 0.5},
}


def to_rank(kind: str, n_rows: int) -> Joined:
    data = joined("binary" if kind == "map" else "classes", n_rows=n_rows)
    queries = np.sort(np.random.default_rng(4).integers(0, n_rows // 15, n_rows))
    queries = np.unique(queries, return_inverse=True)[1]
    weight = np.random.default_rng(5).integers(1, 9, n_rows).astype(np.float32)[queries] if kind == "ndcg" else None
    features = np.round(data.features * 3)  # a bin for each value: other parties' cut points know no weights
    return Joined(features, data.label, data.widths, queries=queries, weight=weight)


@pytest.mark.parametrize("name", RANKINGS)
def test_rankings(name):
    compare(to_rank(name, 2_000), {"max_depth": 5, **RANKINGS[name]}, 3)


def with_columns(**columns) -> Joined:
    data = joined(n_rows=2_000)
    features = data.features.copy()
    for name, values in columns.items():
        features[:, int(name[1:])] = values
    return Joined(features, data.label, data.widths)


def identical_columns() -> Joined:
    data = joined(n_rows=2_000)
    features = data.features.copy()
    for copy in (8, 14, 19):
        features[:, copy] = features[:, 0]
    return Joined(features, data.label, data.widths)


EDGES = {
    "two_parties": lambda: joined(n_rows=2_000, widths=(9, 11)),
    "ten_parties": lambda: joined(n_rows=2_000, widths=(2,) * 10),
    "one_own_column": lambda: joined(n_rows=2_000, widths=(1, 10, 9)),
    "one_column_each": lambda: joined(n_rows=2_000, n_columns=10, widths=(8, 1, 1)),
    "no_own_columns": lambda: joined(n_rows=2_000, widths=(0, 12, 8)),
    "own_column_constant": lambda: Joined(with_columns(x0=2.0).features, joined(n_rows=2_000).label, (1, 10, 9)),
    "own_column_empty": lambda: Joined(with_columns(x0=np.nan).features, joined(n_rows=2_000).label, (1, 10, 9)),
    "passive_constant_empty_whole": lambda: with_columns(x8=1.5, x9=np.nan, x10=np.arange(2_000) % 3, x14=np.nan),
    "identical_columns": identical_columns,
    "mostly_missing": lambda: joined(n_rows=2_000, missing=0.93),
    "three_rows": lambda: Joined(table(3), np.array([0, 1, 1], dtype=np.float32), (7, 6, 7)),
    "rows_not_whole_bytes": lambda: joined(n_rows=1_003),
    "huge_values": lambda: Joined(table(2_000) * np.float32(1e20), joined(n_rows=2_000).label, (7, 6, 7)),
    "no_missing": lambda: joined(n_rows=2_000, missing=0.0),
}


TINY_NODES = {"min_child_weight": 0, "lambda": 0.1}
# Where few rows share a node; the others meet tiny nodes with the slow tests.
MEET_TINY_NODES = {"identical_columns", "mostly_missing", "three_rows", "huge_values"}


@pytest.mark.parametrize("name", EDGES)
def test_edge_cases(name):
    compare(EDGES[name](), {**LOGISTIC, "max_depth": 4}, 3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in MEET_TINY_NODES else [pytest.mark.slow]) for name in EDGES]
)
def test_edge_cases_of_tiny_nodes(name):
    compare(EDGES[name](), {**LOGISTIC, "max_depth": 4, **TINY_NODES}, 3)


def test_sampling_without_own_columns():
    compare(joined(n_rows=2_000, widths=(0, 12, 8)), {**LOGISTIC, **COLUMNS, "subsample": 0.5, "max_depth": 4})


def test_early_stopping_and_metrics():
    data = joined(with_valid=True)
    params = {**LOGISTIC, "max_depth": 6, "eta": 0.6, "eval_metric": ["auc", "logloss"], "min_child_weight": 0}
    outcome = federate(data, params, 40, early_stopping_rounds=3)
    history: dict = {}
    reference = central(data, params, 40, early_stopping_rounds=3, evals_result=history)
    check_equal(data, outcome, reference)
    assert outcome.result.best_round == reference.best_iteration < 39
    assert [r.metrics["valid-logloss"] for r in outcome.result.rounds] == pytest.approx(
        history["valid"]["logloss"], abs=1e-5
    )  # XGBoost prints metrics with five digits
    valid = xgb.DMatrix(data.valid[0])
    np.testing.assert_array_equal(outcome.predict(data, 1), reference.predict(valid))
    kept = reference.best_iteration + 1
    expected = reference.predict(valid, iteration_range=(0, kept), output_margin=True)
    np.testing.assert_array_equal(outcome.predict(data, 1, n_rounds=kept, output_margin=True), expected)


@pytest.mark.parametrize(
    "params",
    [
        LOGISTIC,
        {"objective": "multi:softprob", "num_class": 3},
        {**LOGISTIC, "num_parallel_tree": 2, "subsample": 0.7},
        {"objective": "reg:absoluteerror"},
    ],
    ids=["logistic", "softprob", "forest", "absolute"],
)
def test_evaluation_does_not_change_the_model(params):
    kinds = {"multi:softprob": "classes", "reg:absoluteerror": "real"}
    data = joined(kinds.get(params["objective"], "binary"), with_valid=True)
    params = {**params, "max_depth": 4}
    outcome = federate(data, params, 4, evaluate_training=True)
    reference = central(data, params, 4)
    check_equal(data, outcome, reference)
    valid_features, valid_label = data.valid
    sets = [
        (xgb.DMatrix(data.features, label=data.label), "train"),
        (xgb.DMatrix(valid_features, label=valid_label), "valid"),
    ]
    assert outcome.result.rounds[-1].metrics == pytest.approx(parse_metrics(reference.eval_set(sets)), abs=2e-5)


@pytest.mark.parametrize(
    "params",
    [
        {**LOGISTIC, "subsample": 0.8, "colsample_bylevel": 0.7},
        {"objective": "multi:softprob", "num_class": 3},
    ],
    ids=["logistic", "softprob"],
)
def test_continuation(params):
    data = joined("classes" if "num_class" in params else "binary", with_valid=True)
    params = {**params, "max_depth": 4}
    first = federate(data, params, 3)
    second = federate(data, params, 3, initial=first)
    reference = central(data, params, 3)
    continued = central(data, params, 3, initial=bytes(reference.save_raw("json")))
    check_equal(data, second, continued)


def test_first_rounds_on_own_columns_alone():
    """Completely SecureBoost: a model on the active party's columns, continued on all of them."""
    data = joined()
    params = {**LOGISTIC, "max_depth": 4}
    outcome = federate(data, params, 5, own_rounds=2)
    own_only = data.features.copy()
    own_only[:, 7:] = np.nan
    first = central(Joined(own_only, data.label, data.widths), params, 2)
    check_equal(data, outcome, central(data, params, 3, initial=bytes(first.save_raw("json"))))
    assert min(tree for passive in outcome.passives for tree, _ in passive.table) == 2


def test_the_active_party_holds_no_foreign_threshold():
    data = joined()
    outcome = federate(data, {**LOGISTIC, "max_depth": 5}, 3)
    thresholds = {str(split.threshold) for passive in outcome.passives for split in passive.table.values()}
    assert len(thresholds) > 20
    text = outcome.result.model.decode()
    assert not [t for t in thresholds if t in text and len(t) > 5]


# -- with encryption --------------------------------------------------------------------------------------------------


def encrypted(private_key, allow_toy_keys: bool = True):
    return announced(lambda n_rows: gradient_owner(private_key, pair_format(n_rows)), allow_toy_keys=allow_toy_keys)


@cache
def breast(n_columns: int = 30) -> Joined:
    features, label = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(label))
    features = np.ascontiguousarray(features[order][:, :n_columns].astype(np.float32))
    return Joined(features, label[order].astype(np.float32), (n_columns - 12, 6, 6))


def test_small_keys():
    compare(breast(16), {**LOGISTIC, "max_depth": 3, "max_bin": 16}, 2, scheme=encrypted(toy_paillier()))


def test_paillier_2048_on_few_rows():
    data = Joined(breast(16).features[:100], breast(16).label[:100], breast(16).widths)
    scheme = encrypted(generate_paillier_key(2048), allow_toy_keys=False)
    compare(data, {**LOGISTIC, "max_depth": 2, "max_bin": 8}, 1, scheme=scheme)


needs_curve = pytest.mark.skipif(available_backends()[0] == "reference", reason="the C extension was not built")


def elgamal(fraction_bits: int = 40):
    return announced(lambda n_rows: on_the_curve(n_rows, fraction_bits), allow_toy_keys=False)


@needs_curve
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "plain" else [pytest.mark.slow]) for n in ELGAMAL_VARIANTS]
)
def test_elgamal(name):
    params, kind = VARIANTS[name]
    compare(joined(kind, n_rows=600), {"max_depth": 4, "max_bin": 16, **params}, 2, scheme=elgamal())


@needs_curve
def test_elgamal_ranks_alike():
    """Only what a root, whose gradients cancel, would weigh is off by the rounding of all rows."""
    data, params = to_rank("ndcg", 1_000), {"max_depth": 4, "max_bin": 32, **RANKINGS["ndcg"]}
    outcome, reference = federate(data, params, 2, scheme=elgamal()), central(data, params, 2)
    assert first_difference(outcome.merged(), bytes(reference.save_raw("json"))) in ("", "tree 0: base_weights")
    np.testing.assert_array_equal(outcome.predict(data, 0), reference.predict(xgb.DMatrix(data.features)))


@needs_curve
def test_elgamal_of_fourteen_bits_is_near_and_not_equal():
    data, params = breast(16), {**LOGISTIC, "max_depth": 3, "max_bin": 16}
    outcome = federate(data, params, 2, scheme=elgamal(14))
    reference = central(data, params, 2)
    assert first_difference(outcome.merged(), bytes(reference.save_raw("json")))
    expected = reference.predict(xgb.DMatrix(data.features))
    assert np.corrcoef(outcome.predict(data, 0), expected)[0, 1] > 0.99


@pytest.mark.slow
def test_paillier_2048_on_breast():
    key = generate_paillier_key(2048)
    compare(breast(), {**LOGISTIC, "max_depth": 5}, 3, scheme=encrypted(key, allow_toy_keys=False))


# -- larger tables ----------------------------------------------------------------------------------------------------


def large(name: str) -> Joined:
    if name == "missing":
        return joined(n_rows=20_000)
    path = DATA / "credit2.parquet"
    if not path.exists():
        pytest.skip("credit2 is not on this machine")
    frame = pd.read_parquet(path).sample(frac=1, random_state=0).astype(np.float32)
    label = frame.pop("label").to_numpy()
    return Joined(np.ascontiguousarray(frame.to_numpy()), label, (11, 12))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["credit2", "missing"])
def test_large_sets(name):
    compare(large(name), {**LOGISTIC, "max_depth": 5}, 10)


@needs_curve
@pytest.mark.slow
@pytest.mark.parametrize("name", ["credit2", "missing"])
def test_large_sets_with_elgamal(name):
    compare(large(name), {**LOGISTIC, "max_depth": 5}, 5, scheme=elgamal())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["credit2", "missing"])
def test_large_sets_with_paillier_2048(name):
    scheme = encrypted(generate_paillier_key(2048), allow_toy_keys=False)
    compare(large(name), {**LOGISTIC, "max_depth": 5}, 3, scheme=scheme)
