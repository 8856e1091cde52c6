"""The quantile search against sorted pooled data, its floor, and the reference table against XGBoost."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.xgb.cuts import (
    CutMode,
    Cuts,
    SortedValues,
    from_keys,
    leaf_quantiles,
    quantile,
    reference_table,
    search_quantiles,
    spaced_cuts,
    to_keys,
)
from tests.support.threads import in_threads

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def pool(features: np.ndarray, n_sites: int = 3):
    """Run the search of site 0 where the secure sum adds the counts of the other sites' rows too."""
    parts = np.array_split(features, n_sites)
    asked: list[int] = []

    def search(max_bin: int, min_rows: int | None) -> Cuts:
        import threading

        barrier, slots = threading.Barrier(n_sites), [None] * n_sites
        found = [None] * n_sites

        def site(rank: int) -> None:
            def sum_counts(counts: np.ndarray) -> np.ndarray:
                slots[rank] = counts
                barrier.wait(100)
                total = np.sum(slots, axis=0)
                barrier.wait(100)
                if rank == 0:
                    asked.append(counts.size)
                return total

            found[rank] = search_quantiles(SortedValues(parts[rank]), max_bin, min_rows, sum_counts)

        in_threads(site, range(n_sites))
        for other in found[1:]:
            assert other.to_lists() == found[0].to_lists()
        return found[0]

    return search, asked


@given(st.lists(finite, min_size=2, max_size=50))
def test_keys_keep_the_order_and_invert(values):
    array = np.array(values, dtype=np.float32)
    keys = to_keys(array)
    assert np.array_equal(from_keys(keys), array)
    assert np.array_equal(array[:, None] < array[None, :], keys[:, None] < keys[None, :])


def test_exact_cuts_are_the_pooled_order_statistics():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(600, 4)).astype(np.float32)
    features[:, 1] = rng.integers(0, 4, 600)
    features[rng.random(features.shape) < 0.1] = np.nan
    features[:, 3] = np.nan
    search, asked = pool(features)
    cuts = search(16, None)
    for feature in range(4):
        present = np.sort(features[:, feature][~np.isnan(features[:, feature])])
        ranks = [-(-j * present.size // 15) for j in range(1, 15)]
        expected = np.unique(present[np.array(ranks) - 1]) if present.size else []
        assert np.array_equal(cuts.of_feature[feature], expected)
    assert asked == [4] + [4 * 14] * 32, "the number and size of queries must not depend on data"


def test_the_floor_keeps_values_of_few_rows_out_of_the_cuts():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(3000, 1)).astype(np.float32)
    features[:600] = 2.5  # a value that many rows share may be a cut
    search, _ = pool(features)
    cuts = search(64, 10).of_feature[0]
    values, counts = np.unique(features, return_counts=True)
    shared = dict(zip(values, counts, strict=True))
    disclosed = [c for c in cuts if 0 < shared.get(c, 0) < 10]
    assert len(disclosed) <= 1, "a short decimal may meet a value by chance only"
    assert np.float32(2.5) in cuts
    exact = search(64, None).of_feature[0]
    assert np.isin(exact, values).all()
    # Coarser, but still quantiles: every bin holds about its share of the rows.
    assert np.histogram(features, [-np.inf, *cuts, np.inf])[0].max() < 600 + 3000 / 62 + 25


@pytest.mark.parametrize("min_rows", [2, 10, 40])
def test_no_query_looks_into_a_bracket_below_the_floor(min_rows):
    """What the sites learn are counts at the queried points: none may lie inside a known interval of too few rows."""
    keys = np.sort(to_keys(np.random.default_rng(2).lognormal(size=500).astype(np.float32))).astype(np.int64)
    known = {-1: 0}  # queried key -> pooled rows up to it
    first, asked = [], []
    original = np.searchsorted

    def sum_counts(counts: np.ndarray) -> np.ndarray:
        if not first:
            first.append(True)
            known[2**32 - 1] = int(counts[0])
            return counts
        for point in dict.fromkeys(asked):
            if point not in known:
                below = max(k for k in known if k < point)
                above = min(k for k in known if k > point)
                assert known[above] - known[below] >= min_rows
        known.update({point: int(original(keys, point, side="right")) for point in asked})
        return counts

    def watched(a, v, side="left", **options):
        asked[:] = np.atleast_1d(v).tolist()
        return original(a, v, side=side, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvflare_plugins.xgb.cuts.np.searchsorted", watched)
        search_quantiles(SortedValues(from_keys(keys.astype(np.uint32))[:, None]), 32, min_rows, sum_counts)


def test_few_rows_in_all_give_no_cut_that_is_a_value():
    features = np.array([[1.1234567], [2.7654321], [3.1415927]], dtype=np.float32)
    search, _ = pool(features)
    assert not np.isin(search(8, 10).of_feature[0], features).any()


def test_constant_and_missing_columns_and_empty_sites():
    features = np.full((30, 2), np.nan, dtype=np.float32)
    features[:, 0] = 7
    search, _ = pool(features)
    cuts = search(8, 10)
    assert cuts.to_lists() == [[7.0], []]


def test_counts_that_contradict_each_other_are_refused():
    calls = []

    def lie(counts: np.ndarray) -> np.ndarray:
        calls.append(counts)
        return counts + (1000 if len(calls) == 5 else 0)

    with pytest.raises(ProtocolError, match="monotone"):
        search_quantiles(SortedValues(np.arange(100, dtype=np.float32)[:, None]), 8, None, lie)


@pytest.mark.parametrize("max_bin", [4, 16, 256])
def test_xgboost_takes_over_exactly_the_agreed_cuts(max_bin):
    rng = np.random.default_rng(2)
    features = rng.normal(size=(2000, 5)).astype(np.float32)
    features[:, 1] = rng.integers(0, 3, 2000)
    features[:, 2] = 1.0
    features[:, 3] = np.nan
    features[:, 4] *= 1e20
    cuts = search_quantiles(SortedValues(features), max_bin, None, lambda counts: counts)
    reference = xgb.QuantileDMatrix(reference_table(cuts, {}), max_bin=max_bin)
    matrix = xgb.QuantileDMatrix(features, ref=reference, max_bin=max_bin)
    ends, values = matrix.get_quantile_cut()
    for feature, inner in enumerate(cuts.of_feature):
        assert np.array_equal(values[int(ends[feature]) + 1 : int(ends[feature + 1]) - 2], inner)
        assert inner.size <= max_bin - 2


def test_spaced_cuts_touch_no_data():
    uniform = spaced_cuts(["a"], {"a": [0.0, 1.0]}, 7, CutMode.UNIFORM).of_feature[0]
    assert np.allclose(uniform, [0, 0.25, 0.5, 0.75, 1])
    logarithmic = spaced_cuts(["a"], {"a": [-1.0, 999.0]}, 7, CutMode.LOGARITHMIC).of_feature[0]
    assert logarithmic[0] == -1 and logarithmic[-1] == 999
    assert (np.diff(np.diff(logarithmic)) > 0).all()
    for bounds in ({}, {"a": [1.0, 1.0]}, {"a": [0.0, float("inf")]}):
        with pytest.raises(ConfigurationError):
            spaced_cuts(["a"], bounds, 6, CutMode.UNIFORM)


def test_stored_cuts_are_read_strictly():
    cuts = Cuts((np.array([1, 2], dtype=np.float32), np.array([], dtype=np.float32)))
    assert Cuts.from_lists(cuts.to_lists()).to_lists() == cuts.to_lists()
    for bad in ([[2.0, 1.0]], [[float("nan")]], [[1e38]], [[[1.0]]]):
        with pytest.raises(ProtocolError):
            Cuts.from_lists(bad)


# Quantiles as XGBoost takes them for absolute and quantile error: its own estimates, to the last bit.


@pytest.mark.parametrize("seed", range(12))
def test_quantile_is_xgboosts_first_estimate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows = int(rng.integers(1, 40))
    values = rng.normal(size=n_rows).astype(np.float32).round(seed % 3)
    weight = rng.random(n_rows).astype(np.float32) if seed % 2 else None
    for alpha in (0.01, 0.3, 0.5, 0.99):
        params = {"objective": "reg:quantileerror", "quantile_alpha": alpha, "max_depth": 1, "nthread": 1}
        booster = xgb.train(params, xgb.DMatrix(np.zeros((n_rows, 1)), label=values, weight=weight, nthread=1), 1)
        learner = json.loads(booster.save_config())["learner"]
        assert quantile(values, weight, alpha) == np.float32(learner["learner_model_param"]["base_score"].strip("[]"))


def test_quantiles_of_leaves_are_those_of_their_rows() -> None:
    rng = np.random.default_rng(1)
    residuals, weight = rng.normal(size=50).astype(np.float32), rng.random(50).astype(np.float32)
    leaf = rng.choice([0, 2, 3], 50).astype(np.int32)
    for weights in (None, weight):
        found = leaf_quantiles(residuals, weights, leaf, 4, 0.5)
        assert np.isnan(found[1])
        for number in (0, 2, 3):
            own = leaf == number
            assert found[number] == quantile(residuals[own], None if weights is None else weights[own], 0.5)


def test_quantiles_by_hand() -> None:
    values = np.array([4, 1, 3, 2], np.float32)
    assert quantile(values, None, 0.5) == np.float32(2.5)
    assert quantile(values, np.array([0, 1, 1, 1], np.float32), 0.5) == np.float32(2)
    assert quantile(values[:1], None, 0.9) == np.float32(4)
    assert np.isnan(quantile(values[:0], None, 0.5))
