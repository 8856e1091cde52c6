"""Trees that the sites grow themselves: the same bytes whoever holds which rows, and those that XGBoost would grow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth.site_sums import NARROW_BITS, WIDE_BITS, pair_grid
from nvflare_plugins.pooled import attempt as pooled_attempt
from nvflare_plugins.pooled.growing import ARITHMETIC_ATTRIBUTE
from nvflare_plugins.pooled.job import HorizontalJob
from tests.oracle.test_horizontal_equals_central import (
    EQUAL_TO_CENTRAL,
    LOGISTIC,
    ROUNDS,
    breast,
    prepared,
    regression,
    synthetic,
)
from tests.support.examples import slow
from tests.support.federation import Federation, central_model, leaf_difference, succeed

SQUARED = {"objective": "reg:squarederror"}


def grown(folder: Path, frame: pd.DataFrame, params: dict, profile: str = "masks", n_sites: int = 3, **fields) -> bytes:
    """Train over sites that hold the rows in an order of their own."""
    federation = Federation(folder, n_sites)
    rows = np.random.default_rng(n_sites).permutation(len(frame))
    ends = np.sort(
        np.random.default_rng(n_sites + 1).choice(np.arange(20, len(frame) - 20), n_sites - 1, replace=False)
    )
    federation.give_data("train", frame, np.split(rows, ends))
    federation.set_registry_keys()
    fields = {"num_rounds": ROUNDS, "cuts": "exact", "engine": "own", **fields}
    succeed(federation.run(HorizontalJob("train", "label", prepared(params, frame), profile=profile, **fields)))
    return federation.model()


@pytest.mark.parametrize(
    ("name", "profile", "counts"),
    [
        ("logistic", "masks", (3, 6)),
        ("squared", "plain", (3, 5)),
        ("weights", "masks", (3, 6)),
        ("missing", "masks", (3, 5)),
        # With more than five sites a narrow word of bfv has fewer bits: sums on the same grid travel wide.
        pytest.param("logistic", "bfv", (3, 6), marks=pytest.mark.slow),
    ],
)
def test_models_are_the_same_bytes_for_any_number_of_sites(tmp_path, name, profile, counts):
    make = {"squared": lambda: regression(breast()), "missing": lambda: synthetic(2_000)}.get(name, breast)
    frame = make().iloc[:, -17:]
    fields = {}
    if name == "weights":
        frame = frame.assign(w=np.random.default_rng(0).gamma(1.0, size=len(frame)).astype(np.float32))
        fields = {"weight": "w"}
    params = SQUARED if name == "squared" else LOGISTIC
    models = {n: grown(tmp_path / str(n), frame, params, profile, n, **fields) for n in counts}
    assert len(set(models.values())) == 1
    # One row that weighs more makes another model: the equality is not one of models that never change.
    assert grown(tmp_path / "other", frame.iloc[1:], params, profile, counts[0], **fields) not in models.values()


@pytest.mark.parametrize(
    "name",
    [
        "lossguide",
        *slow("plain_logistic", "softprob", "squared_error", "parallel_trees"),
    ],
)
def test_both_engines_grow_the_same_trees(tmp_path, name):
    params, change = EQUAL_TO_CENTRAL[name]
    frame = change(synthetic(2_000))
    own, theirs = (grown(tmp_path / engine, frame, params, engine=engine) for engine in ("own", "xgboost"))
    assert leaf_difference(own, xgb.Booster(model_file=bytearray(theirs))) <= 2e-7


def test_leaves_of_parallel_trees_are_quantiles_of_what_was_before_the_round(tmp_path):
    params = {"objective": "reg:absoluteerror", "num_parallel_tree": 3, "colsample_bynode": 0.5}
    own, theirs = (
        grown(tmp_path / engine, regression(breast()), params, "plain", engine=engine) for engine in ("own", "xgboost")
    )
    assert leaf_difference(own, xgb.Booster(model_file=bytearray(theirs))) <= 2e-7


@pytest.mark.parametrize("arithmetic", [*slow("3.3"), "3.4"])
def test_a_job_may_name_the_arithmetic_of_another_release(tmp_path, arithmetic):
    model = json.loads(grown(tmp_path, breast(), LOGISTIC, arithmetic=arithmetic))
    assert model["learner"]["attributes"][ARITHMETIC_ATTRIBUTE] == arithmetic
    assert ".".join(map(str, model["version"][:2])) == arithmetic


@pytest.mark.parametrize(
    "params", [{"booster": "dart", "rate_drop": 0.1}, {"multi_strategy": "multi_output_tree", "num_class": 3}]
)
def test_what_the_sites_do_not_grow_is_refused_by_name(tmp_path, params):
    objective = "multi:softprob" if "num_class" in params else "binary:logistic"
    federation = Federation(tmp_path)
    frame = breast()
    federation.give_data("train", frame)
    job = HorizontalJob("train", "label", {"objective": objective, **params}, 2, "masks", engine="own")
    outcomes = federation.run(job)
    assert all(isinstance(one, ConfigurationError) and "does not grow" in str(one) for one in outcomes.values())


def test_an_arithmetic_that_nobody_would_read_is_refused():
    with pytest.raises(ConfigurationError, match="set engine='own'"):
        HorizontalJob("train", "label", LOGISTIC, 2, engine="xgboost", arithmetic="3.4")


def test_an_arithmetic_is_refused_where_auto_takes_xgboost(tmp_path):
    federation = Federation.of(tmp_path, train=breast())
    outcomes = federation.run(HorizontalJob("train", "label", {**LOGISTIC, "booster": "dart"}, 2, arithmetic="3.4"))
    assert all(isinstance(one, ConfigurationError) and "leave it out" in str(one) for one in outcomes.values())


ODD = {
    "the outermost floats": lambda frame: frame.assign(x1=np.sign(frame.x1) * np.float32(9.9e37)),
    "labels around 1e9": lambda frame: frame.assign(label=1e9 * (1 + frame.label)),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_columns_are_trained_on_as_xgboost_does(tmp_path, odd):
    frame = ODD[odd](synthetic(900))
    params = prepared(SQUARED if "labels" in odd else LOGISTIC, frame)
    federation = Federation.of(tmp_path, train=frame)
    federation.set_registry_keys()
    succeed(federation.run(HorizontalJob("train", "label", params, 3, "masks", cuts="exact")))
    central = central_model(frame, "label", params, federation.cuts(), 3)
    assert leaf_difference(federation.model(), central) <= 2e-7


@pytest.mark.parametrize("n", [pytest.param(65_536, marks=pytest.mark.slow), 70_000])
def test_more_categories_than_16_bits_hold(tmp_path, n):
    rng = np.random.default_rng(0)
    codes = rng.permutation(n)[:60][rng.integers(0, 60, 900)]
    frame = synthetic(900).iloc[:, :2].set_axis(["f0", "f1"], axis=1).assign(f1=codes.astype(np.float32))
    frame["label"] = (codes % 2 == 0).astype(np.float32)
    named = frame.assign(f1=[f"c{code}" for code in codes])
    federation = Federation.of(tmp_path, train=named)
    federation.set_registry_keys()
    categories = {"f1": [f"c{i}" for i in range(n)]}
    params = {**LOGISTIC, "max_bin": 16, "max_depth": 2}
    succeed(federation.run(HorizontalJob("train", "label", params, 1, "masks", categories=categories)))
    central = central_model(frame, "label", params, federation.cuts(), 1, n_categories={1: n})
    ours = json.loads(federation.model())["learner"]["gradient_booster"]["model"]["trees"]
    theirs = json.loads(central.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    for one, other in zip(ours, theirs, strict=True):
        assert one["categories"] == other["categories"] and one["categories"]
        assert one["split_indices"] == other["split_indices"]


@pytest.mark.parametrize("label", [*slow(1e30), 3e38])
def test_gradients_that_no_float_holds_end_the_job_with_one_text(tmp_path, label):
    frame = breast()
    federation = Federation.of(tmp_path, train=frame.assign(label=frame.label * np.float32(label)))
    outcomes = federation.run(HorizontalJob("train", "label", SQUARED, 2, "masks", cuts="exact"))
    assert {str(one) for one in outcomes.values()} == {
        "CapacityExceeded: a value is larger than 2^192: rescale labels or weights"
    }
    assert not list(tmp_path.glob("*/runs/job/model.json"))


def test_what_xgboost_releases_is_what_registries_of_before_know(tmp_path, monkeypatch):
    """They know jobs without ``engine`` and ``arithmetic``: the same job again stays the same release."""
    seen, reserve = [], pooled_attempt.reserve_together
    monkeypatch.setattr(
        pooled_attempt, "reserve_together", lambda *args: seen.append(json.loads(args[3])["job"]) or reserve(*args)
    )
    for engine in ("xgboost", "own"):
        grown(tmp_path / engine, breast(), LOGISTIC, engine=engine, num_rounds=1)
    assert [{"engine", "arithmetic"} & set(job) for job in seen] == [set()] * 3 + [{"engine", "arithmetic"}] * 3


def test_the_grid_does_not_follow_the_number_of_sites():
    """The schemes' own capacities do: what travels narrow with few sites travels wide with many, on the same grid."""
    few, many = (
        pair_grid(0, -2, 5_000, bits, rows_are_exact=True, coarsest=2.0**-24) for bits in (NARROW_BITS, NARROW_BITS - 4)
    )
    assert (few.g_exponent, few.h_exponent) == (many.g_exponent, many.h_exponent)
    assert (few.wide, many.wide) == (False, True)


@pytest.mark.parametrize("n_rows", [1, 2, 1_000, 65_535, 65_536, 10**6, 10**9])
@pytest.mark.parametrize("bits", [44, NARROW_BITS, WIDE_BITS])
def test_sums_of_all_rows_fit_and_errors_stay_below_what_was_asked(n_rows, bits):
    grid = pair_grid(3, 1, n_rows, bits, rows_are_exact=bits != 44, coarsest=2.0**-24)
    words = WIDE_BITS if grid.wide else bits
    assert n_rows * 2.0 ** (grid.g_bound - grid.g_exponent - grid.shift) <= 2.0**words
    if not grid.wide and not grid.shift:
        assert 6 * np.sqrt(n_rows / 12) * 2.0 ** max(grid.g_exponent, grid.h_exponent) <= 2.0**-24


def test_sums_rounded_on_their_way_are_off_by_less_than_a_step_and_features_agree():
    rng, starts = np.random.default_rng(0), np.array([0, 4, 9, 12])
    grid = pair_grid(0, 0, 1_000, 44, rows_are_exact=False, coarsest=2.0**-24)
    assert grid.shift
    sums = rng.integers(-(2**50), 2**50, (3, 12, 2))
    sums[:, 8] += sums[:, :4].sum(axis=1) - sums[:, 4:9].sum(axis=1)  # features 0 and 1 add up alike
    coarse = grid.coarse(sums, starts)
    for start, stop in ((0, 4), (4, 9), (9, 12)):
        exact, rounded = (np.cumsum(one[:, start:stop], axis=1) for one in (sums, grid.fine(coarse)))
        assert (np.abs(exact - rounded) <= 2 ** (grid.shift - 1)).all()
    assert (coarse[:, :4].sum(axis=1) == coarse[:, 4:9].sum(axis=1)).all()
