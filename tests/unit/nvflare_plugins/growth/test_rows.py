"""Sums in bins and the division of nodes against loops over rows, in every way to compute and on several threads."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math

import numpy as np
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth import _native
from nvflare_plugins.growth._native import NUMPY, growth, variants
from nvflare_plugins.growth.arithmetic import ARITHMETICS, NodeToSplit, SplitFormula, WeightBounds, arithmetic_of
from nvflare_plugins.growth.bins import BinLayout, BinnedTable, bin_rows
from nvflare_plugins.growth.rows import ROOT, BinnedRows, NodeSplit, on_grid
from nvflare_plugins.growth.splits import Question, SplitFinder
from nvflare_plugins.xgb.cuts import Cuts, reference_table
from tests.support.examples import quick
from tests.unit.nvflare_plugins.vertical.test_split_evaluation import (
    PARAMETERS,
    UNIT,
    Twin,
    decode,
    histograms,
    parameters,
)

F = np.float32
BOTH = (variants()[0], NUMPY)
needs_c = pytest.mark.skipif(growth is None, reason="installed without a C compiler")


@st.composite
def tables(draw):
    """Rows of columns of numbers of unlike bins and of one of categories, and their pairs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_rows = draw(st.integers(0, 70))
    n_inner = [draw(st.sampled_from([0, 1, 5, 254, 300])) for _ in range(draw(st.integers(0, 8)))]
    if draw(st.booleans()):
        n_inner = [5] * len(n_inner)
    categories = {len(n_inner): 9}
    cuts = Cuts((*(np.arange(n, dtype=F) for n in n_inner), np.empty(0, dtype=F)))
    layout = BinLayout.from_cuts(cuts, categories, ARITHMETICS["3.4"])
    values = np.stack([rng.integers(-1, n + 2, n_rows).astype(F) for n in (*n_inner, 7)], axis=1)
    values[:, -1] = np.abs(values[:, -1])
    values[rng.random(values.shape) < draw(st.sampled_from([0, 0.2, 1]))] = np.nan
    most = draw(st.sampled_from([3, 2**40, 2**62]))
    pairs = rng.integers(-most, most, (n_rows, 2))
    return layout, values, pairs, rng


def naive_bins(layout: BinLayout, table: BinnedTable) -> list[list[int]]:
    """Return each value's bin among all bins, or -1."""
    return [
        [-1 if c == m else int(s + c) for c, m, s in zip(row, table.missing, layout.starts, strict=False)]
        for row in table.codes
    ]


def naive_sums(layout: BinLayout, bins: list[list[int]], pairs: np.ndarray, rows: list[int]) -> np.ndarray:
    sums = [[0, 0] for _ in range(layout.n_bins)]
    for row in rows:
        for one in bins[row]:
            if one >= 0:
                sums[one] = [(a + int(b) + 2**63) % 2**64 - 2**63 for a, b in zip(sums[one], pairs[row], strict=True)]
    return np.array(sums, dtype=np.int64).reshape(layout.n_bins, 2)


def drawn_split(rng: np.random.Generator, layout: BinLayout, node: int, number: int) -> NodeSplit:
    feature = int(rng.integers(layout.n_features))
    n_bins = int(layout.bins_of_feature[feature])
    right = tuple(np.flatnonzero(rng.random(n_bins) < 0.5).tolist()) if layout.is_categorical[feature] else None
    last_left = int(rng.integers(-1, min(n_bins, 9)))
    return NodeSplit(node, number, number + 1, feature, last_left, bool(rng.integers(2)), right)


@pytest.mark.parametrize("variant", BOTH)
@pytest.mark.parametrize("threads", [1, 3])
@given(tables())
def test_sums_and_divisions_equal_loops_over_rows(variant, threads, drawn):
    layout, values, pairs, rng = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VEILBOOST_THREADS", str(threads))
        patch.setattr("nvflare_plugins.growth.rows._LEAST_WORK", 1)
        table = bin_rows(layout, [values], len(values), variant)
        rows = BinnedRows(layout, table, variant)
        rows.begin_tree(pairs)
        bins = naive_bins(layout, table)
        members = {ROOT: list(range(len(values)))}
        assert rows.total().tolist() == pairs.sum(axis=0).tolist()
        splits: list[NodeSplit] = []
        for _ in range(3):
            nodes = list(members)
            expected = [naive_sums(layout, bins, pairs, members[node]) for node in nodes]
            assert np.array_equal(rows.histograms(nodes), expected)
            level = [drawn_split(rng, layout, node, 2 * (len(splits) + i) + 1) for i, node in enumerate(nodes)]
            rows.apply(level)
            for split in level:
                sides: tuple[list[int], list[int]] = ([], [])
                for row in members.pop(split.node):
                    place = bins[row][split.feature] - int(layout.starts[split.feature])
                    is_left = (
                        place <= split.bin if split.right_categories is None else place not in split.right_categories
                    )
                    sides[0 if (split.default_left if bins[row][split.feature] < 0 else is_left) else 1].append(row)
                members[split.left], members[split.right] = sides
            splits += level
        found = rows.node_of_rows()
        for node, own in members.items():
            assert rows.rows_of(node).tolist() == own and (found[own] == node).all()
        assert np.array_equal(BinnedRows(layout, table, variant).leaves(splits), found)


def test_many_columns_come_in_groups():
    """More slots than stay in the cache: features are added group by group."""
    n_features, n_rows = 70, 300
    cuts = Cuts(tuple(np.arange(254, dtype=F) for _ in range(n_features)))
    layout = BinLayout.from_cuts(cuts, {}, ARITHMETICS["3.4"])
    rng = np.random.default_rng(0)
    values = rng.integers(0, 250, (n_rows, n_features)).astype(F)
    pairs = rng.integers(-(2**50), 2**50, (n_rows, 2))
    for missing in (0, 0.1):
        values[rng.random(values.shape) < missing] = np.nan
        found = []
        for variant in BOTH:
            rows = BinnedRows(layout, bin_rows(layout, [values], n_rows, variant), variant)
            rows.begin_tree(pairs)
            rows.apply([NodeSplit(0, 1, 2, 69, 120, True)])
            found.append(rows.histograms([1, 2]))
        assert np.array_equal(*found) or len(BOTH) == 1


@needs_c
def test_buffers_of_wrong_sizes_and_indices_beyond_them_are_refused():
    codes, missing = np.zeros((3, 2), dtype=np.uint8), np.full(2, 9, dtype=np.uint32)
    pairs, order, starts = np.zeros((3, 2), dtype=np.int64), np.arange(3, dtype=np.int32), np.array([0, 2, 4])
    out, spans = np.zeros((1, 4, 2), dtype=np.int64), np.array([[0, 3]])
    good = {"codes": codes, "missing": missing, "dense": True, "pairs": pairs, "order": order, "spans": spans}
    good |= {"starts": starts, "out": out}
    growth.add(1, *good.values())
    wrong = {
        "codes": codes[:2],
        "missing": missing[:1],
        "pairs": pairs[:2],
        "order": order[:2],
        "spans": np.array([[0, 4]]),
        "starts": np.array([0, 3, 2]),
        "out": out[:, :3].copy(),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="wrong size"):
            growth.add(1, *(good | {name: value}).values())
    with pytest.raises(ValueError, match="wrong size"):
        growth.add(3, *good.values())
    columns, scratch, n_left = (
        np.zeros((2, 3), dtype=np.uint8),
        np.empty(3, dtype=np.int32),
        np.empty(1, dtype=np.int64),
    )
    masks = np.zeros(2, dtype=np.uint8)
    for division in ([0, 4, 0, 0, 0, -1], [0, 3, 2, 0, 0, -1], [0, 3, -1, 0, 0, -1], [0, 3, 0, 0, 0, 2]):
        with pytest.raises(ValueError, match="wrong size"):
            growth.divide(1, columns, missing, masks, np.array([division]), order.copy(), scratch, n_left)
    loop = np.array([[0, 0, 0, 0, 0, -1]])  # a node that is its own child
    with pytest.raises(ValueError, match="wrong size"):
        growth.descend(1, codes, missing, masks, loop, np.empty(3, dtype=np.int32))


def test_an_installation_without_c_says_so_once(monkeypatch, caplog):
    layout = BinLayout.from_cuts(Cuts((np.empty(0, dtype=F),)), {}, ARITHMETICS["3.4"])
    monkeypatch.setattr(_native, "growth", None)
    _native.say_so_once.cache_clear()
    for _ in range(2):
        BinnedRows(layout, bin_rows(layout, [], 0, NUMPY), NUMPY)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["trees are grown in numpy"]


@pytest.mark.parametrize("exponents", [(0, 0), (-40, -7), (3, -50)])
def test_pairs_are_rounded_half_to_even_in_every_way(exponents: tuple[int, int], monkeypatch) -> None:
    steps = np.ldexp(1.0, exponents)
    drawn = np.random.default_rng(0).normal(size=(500, 2)) * steps * 100
    halves = (np.arange(-10, 10)[:, None] + 0.5) * steps
    pairs = np.concatenate([drawn, halves, np.zeros((1, 2))]).astype(F)
    expected = [[round(float(x) / step) for x, step in zip(pair, steps, strict=True)] for pair in pairs]
    monkeypatch.setattr("nvflare_plugins.growth.rows._LEAST_WORK", 1)
    for threads in ("1", "3"):
        monkeypatch.setenv("VEILBOOST_THREADS", threads)
        assert all(on_grid(pairs, *exponents, variant).tolist() == expected for variant in BOTH)


@needs_c
def test_pairs_without_room_are_refused() -> None:
    for shapes in (((3, 2), (2, 2)), ((3,), (3, 2))):
        with pytest.raises(ValueError, match="wrong size"):
            growth.on_grid(np.zeros(shapes[0], F), 1.0, 1.0, np.zeros(shapes[1], np.int64))


# -- codes of values ---------------------------------------------------------------------------------------------------


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


# -- splits ------------------------------------------------------------------------------------------------------------


MORE = {"no_limits_alpha": parameters(reg_lambda=0, min_child_weight=0, reg_alpha=1.5)}


def layout_of_bins(n_bins: tuple[int, ...]) -> BinLayout:
    starts = np.concatenate([[0], np.cumsum(n_bins)])
    n = len(n_bins)
    return BinLayout(np.zeros(starts[-1], dtype=F), starts, np.zeros(n, dtype=bool), np.zeros(n, dtype=F))


def question(total: tuple[int, int], gain: np.float32, bounds: WeightBounds, allowed: np.ndarray, n: int) -> Question:
    limits = (np.array([value] * n, dtype=F) for value in (gain, bounds.lower, bounds.upper))
    return Question(np.array([total] * n), *limits, np.array([allowed] * n))


@pytest.mark.parametrize(
    ("release", "name"),
    quick(
        itertools.product(ARITHMETICS, [*PARAMETERS, *MORE]),
        *zip(itertools.cycle(ARITHMETICS), [*PARAMETERS, *MORE], strict=False),
    ),
)
@given(histograms(), st.booleans(), st.sampled_from([0, 40]))
def test_equal_to_the_twin(release, name, histogram, is_bounded, finer):
    """Also on a grid that is finer by 2^40, where sums need more than the 53 bits of a double's number."""
    params, arithmetic = (PARAMETERS | MORE)[name], ARITHMETICS[release]
    slots, sums, total, allowed = histogram
    bounds = WeightBounds(F(-0.25), F(0.5)) if is_bounded and params.monotone else WeightBounds()
    twin = Twin(params, bounds, arithmetic)
    g, h = UNIT.decode_total(total)
    formula = SplitFormula(params, arithmetic)
    root_gain = formula.gain(np.array([g]), np.array([h]), bounds)[0]
    assert root_gain == twin.gain(g, h)
    expected = twin.best(slots, sums, NodeToSplit(total, root_gain, bounds, allowed))
    layout = layout_of_bins(slots.n_bins)
    is_bin = np.ones(slots.n_slots, dtype=bool)
    is_bin[slots.starts[1:] - 1] = False
    own = np.stack([sums.g, sums.h], axis=1)[is_bin] << finer
    unit = dataclasses.replace(UNIT, g_exponent=UNIT.g_exponent - finer, h_exponent=UNIT.h_exponent - finer)
    asked = question((total.g << finer, total.h << finer), root_gain, bounds, allowed, 3)
    for variant in variants():
        for found in SplitFinder(layout, formula, unit, variant).best([own.copy() for _ in range(3)], asked):
            if expected is None:
                assert found is None
                continue
            left = decode(*(side >> finer for side in found.left))
            assert (found.loss_change, found.feature, found.bin, found.default_left) == expected[:4]
            assert left == expected[4]


def test_arithmetic_of_releases():
    assert [arithmetic_of(version).name for version in ("3.2.0", "3.3.1", "3.4.1")] == ["3.2", "3.3", "3.4"]
    for unknown in ("3.1.2", "3.5.0", "4.0.0"):
        with pytest.raises(ConfigurationError, match=r"is not known; remedy: one of 3\.2, 3\.3, 3\.4"):
            arithmetic_of(unknown)


@pytest.mark.skipif(growth is None, reason="installed without a C compiler")
def test_histograms_of_the_wrong_size_are_refused():
    finder = SplitFinder(layout_of_bins((3, 2)), SplitFormula(parameters()), UNIT)
    asked = question((1, 1), F(0), WeightBounds(), np.ones(2, dtype=bool), 2)
    good, short = np.zeros((5, 2), dtype=np.int64), np.zeros((4, 2), dtype=np.int64)
    assert finder.best([good, good], asked) == [None, None]
    with pytest.raises(ValueError, match="a histogram of the wrong size"):
        finder.best([good, short], asked)
