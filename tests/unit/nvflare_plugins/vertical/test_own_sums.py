"""The active party's own columns: exact sums in one word and in two, and the thresholds of each arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.fixed_point import join
from he_processors.histogram.sums import NodeTotal
from nvflare_plugins.growth.arithmetic import ARITHMETICS, GradientUnit, SplitFormula, arithmetic_here
from nvflare_plugins.growth.rows import ROOT, NodeSplit
from nvflare_plugins.kinds.vertical.key_owner import EncodedGradients
from nvflare_plugins.kinds.vertical.party_data import find_cut_points
from nvflare_plugins.kinds.vertical.tree_growth import OwnRows, OwnSums
from tests.unit.nvflare_plugins.vertical.test_split_evaluation import parameters

N_ROWS = 700


def table() -> np.ndarray:
    rng = np.random.default_rng(2)
    features = rng.normal(size=(N_ROWS, 3)).astype(np.float32)
    features[:, 1] = rng.integers(0, 5, N_ROWS)
    features[rng.random(features.shape) < 0.2] = np.nan
    return features


def begun(n_words: int) -> tuple[OwnRows, OwnSums, EncodedGradients]:
    """Return rows in the root of a tree whose sums do not fit 64 bits where they have two words."""
    rng = np.random.default_rng(n_words)
    bound = 1 << (52 if n_words == 1 else 62)
    g, h = rng.integers(-bound, bound, N_ROWS), rng.integers(0, bound, N_ROWS)
    gradients = EncodedGradients(g, h, GradientUnit(-40, -40), n_words)
    own = OwnRows(table(), None, 16, [1], np.zeros(3, np.int8), ARITHMETICS["3.3"])
    sums = own.begin_tree(gradients, SplitFormula(parameters()))
    assert sums is not None
    return own, sums, gradients


def expected(own: OwnRows, gradients: EncodedGradients, rows: np.ndarray) -> list[tuple[int, int]]:
    """Return the sums of each bin and then of missing values, feature by feature, as integers of any length."""
    found = []
    for feature, values in enumerate(table()[rows].T):
        upper = own.layout.upper[own.layout.starts[feature] : own.layout.starts[feature + 1]]
        side = "left" if own.layout.is_categorical[feature] else "right"
        bins = np.where(np.isnan(values), upper.size, np.searchsorted(upper, values, side=side).clip(0, upper.size - 1))
        for number in range(upper.size + 1):
            here = rows[bins == number]
            found.append((sum(gradients.g[here].tolist()), sum(gradients.h[here].tolist())))
    return found


def read(sums: OwnSums, node: int) -> list[tuple[int, int]]:
    of_node = sums._of_node[node]
    return [(join(of_node.g[:, i]), join(of_node.h[:, i])) for i in range(of_node.g.shape[1])]


@pytest.mark.parametrize("n_words", [1, 2])
def test_sums_of_nodes_are_exact_with_what_lacks_a_value_and_what_is_subtracted(n_words):
    own, sums, gradients = begun(n_words)
    everyone = np.arange(N_ROWS)
    total = NodeTotal.of_rows(gradients.g, gradients.h)
    sums.add_root(total)
    assert read(sums, ROOT) == expected(own, gradients, everyone)
    goes_left = own.rows.goes_left(NodeSplit(ROOT, 1, 2, 0, 5, True))
    assert (goes_left == (np.isnan(table()[:, 0]) | (table()[:, 0] < own.layout.threshold(0, 5)))).all()
    own.rows.divide(ROOT, 1, 2, goes_left)
    left, right = everyone[goes_left], everyone[~goes_left]
    assert (own.rows.rows_of(1) == left).all() and (own.rows.rows_of(2) == right).all()
    sums.add_children(ROOT, 2, 1, NodeTotal.of_rows(gradients.g[right], gradients.h[right]))
    assert read(sums, 1) == expected(own, gradients, left)
    assert read(sums, 2) == expected(own, gradients, right)


def test_a_party_without_columns_has_no_sums():
    own = OwnRows(np.empty((9, 0), np.float32), None, 16, [], np.zeros(0, np.int8), ARITHMETICS["3.2"])
    ones = np.ones(9, np.int64)
    assert own.begin_tree(EncodedGradients(ones, ones, GradientUnit(0, 0)), SplitFormula(parameters())) is None
    own.rows.divide(ROOT, 1, 2, np.arange(9) < 4)
    assert own.rows.node_of_rows().tolist() == [1] * 4 + [2] * 5


def test_the_threshold_below_all_values_is_that_of_the_arithmetic_whatever_the_wheel_says():
    columns = np.array([[1.5, 3, np.nan], [-2, 5, 5], [np.nan] * 3, [0, 0, 1e38]], np.float32)
    here = find_cut_points(columns, 16).lowest
    assert (find_cut_points(columns, 16, arithmetic=ARITHMETICS[arithmetic_here()]).lowest == here).all()
    assert (find_cut_points(columns, 16, arithmetic=ARITHMETICS["3.4"]).lowest == -np.inf).all()
    of_old = find_cut_points(columns, 16, arithmetic=ARITHMETICS["3.2"]).lowest
    assert of_old.tolist() == np.array([-1e-5, -4.00001, 1e-5, -1e-5], np.float32).tolist()
