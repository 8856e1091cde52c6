"""The search for splits, in every way to compute, against XGBoost's loops line by line."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.growth._native import growth, variants
from nvflare_plugins.growth.arithmetic import ARITHMETICS, NodeToSplit, SplitFormula, WeightBounds, arithmetic_of
from nvflare_plugins.growth.bins import BinLayout
from nvflare_plugins.growth.splits import Question, SplitFinder
from tests.support.examples import examples, quick
from tests.unit.nvflare_plugins.vertical.test_split_evaluation import (
    PARAMETERS,
    UNIT,
    Twin,
    decode,
    histograms,
    parameters,
)

F = np.float32
MORE = {"no_limits_alpha": parameters(reg_lambda=0, min_child_weight=0, reg_alpha=1.5)}


def layout_of(n_bins: tuple[int, ...]) -> BinLayout:
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
@settings(max_examples=examples(80), deadline=None)
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
    layout = layout_of(slots.n_bins)
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
    finder = SplitFinder(layout_of((3, 2)), SplitFormula(parameters()), UNIT)
    asked = question((1, 1), F(0), WeightBounds(), np.ones(2, dtype=bool), 2)
    good, short = np.zeros((5, 2), dtype=np.int64), np.zeros((4, 2), dtype=np.int64)
    assert finder.best([good, good], asked) == [None, None]
    with pytest.raises(ValueError, match="a histogram of the wrong size"):
        finder.best([good, short], asked)
