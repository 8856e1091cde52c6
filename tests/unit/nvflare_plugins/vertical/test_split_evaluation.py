"""The vectorised search against a twin that follows XGBoost's loops line by line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal
from nvflare_plugins.growth.arithmetic import (
    ARITHMETICS,
    Arithmetic,
    GradientUnit,
    NodeToSplit,
    SplitFormula,
    TreeParameters,
    WeightBounds,
)
from nvflare_plugins.growth.splits import Split
from nvflare_plugins.kinds.vertical.tree_growth import PartyEvaluator
from tests.support.examples import examples
from tests.support.growth import tree_parameters

F = np.float32
UNIT = GradientUnit(-12, -11)


def parameters(*, monotone: tuple[int, ...] = (), **changes) -> TreeParameters:
    return dataclasses.replace(tree_parameters(changes), monotone=monotone)


class Twin:
    """CalcWeight, CalcGainGivenWeight, CalcSplitGain and EnumerateSplit, one number at a time."""

    def __init__(self, params: TreeParameters, bounds: WeightBounds, arithmetic: Arithmetic = ARITHMETICS["3.2"]):
        self.p, self.bounds, self.constrained = params, bounds, bool(params.monotone)
        self.by_weight = arithmetic.gains_by_weight

    def threshold(self, g: float) -> float:
        alpha = float(self.p.reg_alpha)
        return g - alpha if g > alpha else g + alpha if g < -alpha else 0.0

    def weight(self, g: float, h: float) -> np.float32:
        if h <= 0 or (not self.by_weight and h < float(self.p.min_child_weight)):
            w = F(0)
        else:
            value = np.float64(-self.threshold(g)) / np.float64(h + float(self.p.reg_lambda))
            limit = float(self.p.max_delta_step)
            if limit != 0 and abs(value) > limit:
                value = np.copysign(limit, value)
            w = F(value)
        if self.constrained:
            return self.bounds.lower if w < self.bounds.lower else self.bounds.upper if w > self.bounds.upper else w
        return w

    def gain(self, g: float, h: float) -> np.float32:
        if h <= 0:
            return F(0)
        if self.by_weight:
            w = self.weight(g, h)
            cost = 2 * np.float64(g) * float(w) + (np.float64(h) + float(self.p.reg_lambda)) * float(F(w * w))
            return F(-(cost + 2 * float(self.p.reg_alpha) * abs(float(w))))
        if self.p.max_delta_step == 0 and not self.constrained:
            t = self.threshold(g)
            return F(np.float64(t) * t) / F(h + float(self.p.reg_lambda))
        w = self.weight(g, h)
        return -(F(F(F(2) * F(g)) * w) + F(F(F(h) + self.p.reg_lambda) * F(w * w)))

    def split_gain(self, feature: int, left: tuple, right: tuple) -> np.float32:
        w_left, w_right = self.weight(*left), self.weight(*right)
        gain = self.gain(*left) + self.gain(*right)
        c = self.p.monotone[feature] if self.constrained else 0
        if c == 0 or (c > 0 and w_left <= w_right) or (c < 0 and w_left >= w_right):
            return gain
        return F(-np.inf)

    def best(self, layout: BinLayout, sums: BinSums, node: NodeToSplit):
        overall = (F(0), None)
        parent = decode(node.total.g, node.total.h)
        for feature in range(layout.n_features):
            if not node.allowed[feature]:
                continue
            bins = range(layout.starts[feature], layout.starts[feature + 1] - 1)
            overall, total = self.scan(bins, 1, feature, layout, sums, parent, node, overall)
            if total != parent:
                overall, _ = self.scan(bins[::-1], -1, feature, layout, sums, parent, node, overall)
        return overall[1]

    def scan(self, bins, step, feature, layout, sums, parent, node, overall):
        left = (0.0, 0.0)
        best = (F(0), None)
        for i in bins:
            here = decode(sums.g[i], sums.h[i])
            left = left[0] + here[0], left[1] + here[1]
            right = parent[0] - left[0], parent[1] - left[1]
            limit = float(self.p.min_child_weight)
            if not (left[1] >= limit and right[1] >= limit):
                continue
            if self.by_weight and not (left[1] > 0 and right[1] > 0):
                continue
            sides = (left, right) if step > 0 else (right, left)
            with np.errstate(all="ignore"):
                change = self.split_gain(feature, *sides) - node.root_gain
            if not np.isinf(change) and change > best[0]:
                position = i - layout.starts[feature]
                best = (change, (change, feature, position if step > 0 else position - 1, step < 0, sides[0]))
        return (best if best[0] > overall[0] else overall), left


def decode(g, h):
    return float(g) * 2.0**UNIT.g_exponent, float(h) * 2.0**UNIT.h_exponent


def as_tuple(split: Split | None):
    return None if split is None else (*split[:4], decode(*split.left))


PARAMETERS = {
    "default": parameters(),
    "no_limits": parameters(reg_lambda=0, min_child_weight=0),
    "alpha": parameters(reg_alpha=0.7),
    "delta_step": parameters(max_delta_step=0.3),
    "delta_step_alpha": parameters(max_delta_step=0.3, reg_alpha=0.4, min_child_weight=0),
    "monotone": parameters(monotone=(1, -1, 0)),
    "monotone_delta_step": parameters(monotone=(-1, 0, 1), max_delta_step=0.2),
}


@st.composite
def histograms(draw):
    """Three features of one node: small numbers, so that ties, empty bins and zero gains are common."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_rows, size = draw(st.integers(1, 60)), draw(st.sampled_from([2, 50, 4000]))
    n_bins = tuple(draw(st.lists(st.integers(1, 7), min_size=3, max_size=3)))
    g, h = rng.integers(-size, size + 1, n_rows), rng.integers(0, size + 1, n_rows)
    layout = BinLayout(n_bins)
    sums = np.zeros((layout.n_slots, 2), dtype=np.int64)
    for feature, n in enumerate(n_bins):
        has_missing = draw(st.booleans())
        codes = rng.integers(0, n + has_missing, n_rows)
        if draw(st.booleans()):
            codes = np.minimum(codes, n // 2)  # upper bins stay empty
        np.add.at(sums, layout.starts[feature] + codes, np.stack([g, h], axis=1))
    allowed = np.array(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    return layout, BinSums(sums[:, 0].copy(), sums[:, 1].copy()), NodeTotal.of_rows(g, h), allowed


@pytest.mark.parametrize("name", PARAMETERS)
@settings(max_examples=examples(150))
@given(histograms(), st.booleans())
def test_equal_to_the_twin(name, histogram, is_bounded):
    params = PARAMETERS[name]
    layout, sums, total, allowed = histogram
    bounds = WeightBounds(F(-0.25), F(0.5)) if is_bounded and params.monotone else WeightBounds()
    formula, twin = SplitFormula(params), Twin(params, bounds)
    g, h = UNIT.decode_total(total)
    root_gain = formula.gain(np.array([g]), np.array([h]), bounds)[0]
    assert root_gain == twin.gain(g, h)
    node = NodeToSplit(total, root_gain, bounds, allowed)
    monotone = np.array(params.monotone or (0, 0, 0), dtype=np.int8)
    evaluator = PartyEvaluator(layout, formula, UNIT, monotone)
    expected = twin.best(layout, sums, node)
    assert as_tuple(evaluator.best_splits([sums], [node])[0]) == expected
    # Beside other nodes the result is the same.
    other = NodeToSplit(NodeTotal(0, 0, 0), F(0), WeightBounds(), np.ones(3, dtype=bool))
    nothing = BinSums(np.zeros_like(sums.g), np.zeros_like(sums.h))
    many = evaluator.best_splits([nothing, sums, nothing], [other, node, other])
    assert [as_tuple(c) for c in many] == [None, expected, None]
    # In two words, of any form, the result is the same.
    moved = np.random.default_rng(0).integers(-5, 5, sums.g.size)
    words = BinSums(*(np.stack([one + (moved << 20), -moved]) for one in (sums.g, sums.h)))
    assert as_tuple(evaluator.best_splits([words], [node])[0]) == expected


@pytest.mark.parametrize("name", PARAMETERS)
@settings(max_examples=examples(50))
@given(histograms())
def test_sums_beyond_64_bits_split_like_small_ones(name, histogram):
    """Gradients on a grid that is finer by 2^48: the same numbers, of up to 66 bits, so the same splits."""
    params, (layout, sums, total, allowed) = PARAMETERS[name], histogram
    formula, monotone = SplitFormula(params), np.array(PARAMETERS[name].monotone or (0, 0, 0), dtype=np.int8)
    root_gain = formula.gain(*(np.array([x]) for x in UNIT.decode_total(total)), WeightBounds())[0]
    small = PartyEvaluator(layout, formula, UNIT, monotone)
    expected = small.best_splits([sums], [NodeToSplit(total, root_gain, WeightBounds(), allowed)])[0]
    finer = PartyEvaluator(layout, formula, GradientUnit(UNIT.g_exponent - 48, UNIT.h_exponent - 48), monotone)
    words = BinSums(*(np.stack([np.zeros_like(one), one << 28]) for one in (sums.g, sums.h)))
    large = NodeTotal(total.n_rows, total.g << 48, total.h << 48)
    found = finer.best_splits([words], [NodeToSplit(large, root_gain, WeightBounds(), allowed)])[0]
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.left == tuple(one << 48 for one in expected.left)
        assert (found.loss_change, found.feature, found.bin) == (expected.loss_change, expected.feature, expected.bin)


def test_planted_ties():
    """Of equal splits the lowest feature wins, forwards the lowest bin, backwards the highest."""
    layout = BinLayout((4, 4))
    one = np.array([0, 6, 0, -6, 0], dtype=np.int64) << 12
    sums = BinSums(np.tile(one, 2), np.tile(np.abs(one), 2))
    node = NodeToSplit(NodeTotal(12, 0, 12 << 12), F(0), WeightBounds(), np.ones(2, dtype=bool))
    evaluator = PartyEvaluator(layout, SplitFormula(parameters()), UNIT, np.zeros(2, dtype=np.int8))
    best = evaluator.best_splits([sums], [node])[0]
    assert (best.feature, best.bin, best.default_left) == (0, 1, False)
    allowed = np.array([False, True])
    equal_scans = np.array([0, 0, 0, -6, 6], dtype=np.int64) << 12  # the missing rows alone make up the other side
    backwards = np.array([3, 0, 0, -6, 6], dtype=np.int64) << 12  # better with the missing rows on the left
    for bins, expected in ((equal_scans, (1, 3, False)), (backwards, (1, 2, True))):
        sums = BinSums(np.concatenate([one, bins]), np.concatenate([np.abs(one), np.abs(bins)]))
        total = NodeTotal(15, int(bins.sum()), int(np.abs(bins).sum()))
        best = evaluator.best_splits([sums], [NodeToSplit(total, F(0), WeightBounds(), allowed)])[0]
        assert (best.feature, best.bin, best.default_left) == expected
