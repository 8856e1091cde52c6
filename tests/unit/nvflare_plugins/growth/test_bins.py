"""Codes against a search value by value, and what they are when bins and missing values need the same one."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given, settings
from hypothesis import strategies as st

from nvflare_plugins.growth._native import NUMPY, variants
from nvflare_plugins.growth.arithmetic import ARITHMETICS, arithmetic_of
from nvflare_plugins.growth.bins import BinLayout, bin_rows
from nvflare_plugins.xgb.cuts import Cuts, reference_table
from tests.support.examples import examples

F = np.float32
BOTH = (variants()[0], NUMPY)


def layout_of(*n_inner: int, categories: dict[int, int] | None = None) -> BinLayout:
    cuts = Cuts(tuple(np.arange(n, dtype=F) for n in n_inner))
    return BinLayout.from_cuts(cuts, categories or {}, ARITHMETICS["3.4"])


def found_bins(layout: BinLayout, table) -> list[list[int | None]]:
    """Return the bin of each value, None where it is missing."""
    return [
        [None if code == missing else int(code) for code, missing in zip(row, table.missing, strict=True)]
        for row in table.codes
    ]


@pytest.mark.parametrize("variant", BOTH)
@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(width=32, allow_infinity=False), st.sampled_from([0.0, 1.0, 2.0, -1e38, 1e38])),
            st.one_of(st.just(math.nan), st.integers(0, 7).map(float)),
        ),
        max_size=40,
    ),
    st.integers(0, 6),
)
def test_bins_of_values(variant, rows, n_inner):
    layout = layout_of(n_inner, 0, categories={1: 5})
    values = np.array(rows, dtype=F).reshape(-1, 2)
    upper = layout.upper[: n_inner + 2].tolist()
    expected = [
        [
            None if math.isnan(x) else min(bisect.bisect_right(upper, x), n_inner + 1),
            None if math.isnan(c) else min(int(c), 4),
        ]
        for x, c in values.tolist()
    ]
    table = bin_rows(layout, [values[:7], values[7:]], len(values), variant)
    assert found_bins(layout, table) == expected
    assert table.codes.dtype == np.uint8 and table.is_dense == (not np.isnan(values).any())


@pytest.mark.parametrize("variant", BOTH)
@pytest.mark.parametrize(("n_inner", "narrow", "wide"), [(254, np.uint8, np.uint16), (65534, np.uint16, np.uint32)])
def test_the_last_bin_and_missing_values_share_a_code_until_both_are_there(variant, n_inner, narrow, wide):
    layout, last = layout_of(n_inner, 1), n_inner + 1
    present, missing, beyond = [3.0, 0.0], [math.nan, 0.0], [2e38, 0.0]
    for rows, kind in (
        ([present, missing], narrow),
        ([present, beyond], narrow),
        ([missing, present, beyond], wide),
        ([beyond, present, missing], wide),
    ):
        table = bin_rows(layout, [np.array([row], dtype=F) for row in rows], len(rows), variant)
        assert table.codes.dtype == kind
        expected = [None if row is missing else last if row is beyond else 4 for row in rows]
        assert [bins[0] for bins in found_bins(layout, table)] == expected


def test_bytes_of_a_value():
    assert bin_rows(layout_of(300), [np.ones((2, 1), dtype=F)], 2).codes.dtype == np.uint16
    assert bin_rows(layout_of(70000), [np.full((2, 1), np.nan, dtype=F)], 2).codes.dtype == np.uint32


@pytest.mark.parametrize("n_inner", [0, 1, 30])
def test_bins_are_those_of_the_installed_xgboost(n_inner):
    cuts, categories = Cuts((np.arange(n_inner, dtype=F), np.empty(0, dtype=F))), {1: 4}
    layout = BinLayout.from_cuts(cuts, categories, arithmetic_of(xgb.__version__))
    options = {"feature_types": ["q", "c"], "enable_categorical": True, "max_bin": 64}
    ends, values = xgb.QuantileDMatrix(reference_table(cuts, categories), **options).get_quantile_cut()
    assert values[0] == layout.lowest[0]
    assert np.array_equal(values[1 : ends[1]], layout.upper[: layout.starts[1]])
    assert np.array_equal(values[ends[1] :], layout.upper[layout.starts[1] :])
