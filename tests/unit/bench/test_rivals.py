"""The reimplemented rival spends what it is given, its trees are what they should be, and the picture is one."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest

from dp_components.split_candidates.candidates import FeatureBounds
from tests.bench.dp_data import Split
from tests.bench.rival_s_bdt import Filter, Parameters, _bins, _random_tree, s_bdt
from tests.bench.rivals_figure import draw
from tests.support.private_simulation import Table


@pytest.mark.parametrize("epsilon", [0.1, 0.2, 0.3, 4.0])
def test_all_trees_together_cost_mu_and_neither_more_nor_less(epsilon: float) -> None:
    """A row moves each sum of one leaf a tree by its bound at most: the costs of both sums, over all trees."""
    parameters = Parameters.of(epsilon)
    std_g, std_h = parameters.noise(0.7)
    mu_squared = parameters.n_trees * ((parameters.g_bound / std_g) ** 2 + (parameters.h_bound / std_h) ** 2)
    assert math.sqrt(mu_squared) == pytest.approx(0.7)


def split_of(n_rows: int = 4000) -> Split:
    rng = np.random.default_rng(3)
    columns = rng.random((3, n_rows)).astype(np.float32)
    label = (columns[1] + 0.2 * rng.normal(size=n_rows) > 0.5).astype(np.float32)
    half = n_rows // 2
    tables = [Table(columns[:, part], label[part]) for part in (slice(half), slice(half, None))]
    return Split(*tables, (FeatureBounds(0.0, 1.0),) * 3)


def test_it_learns_and_more_with_less_noise() -> None:
    data = split_of()
    ranks = [np.argsort(np.argsort(s_bdt(data, 4.0, mu, 1))) for mu in (1e-3, 50.0)]
    positive = data.test.label == 1
    loud, quiet = (float(rank[positive].mean() / rank.size) for rank in ranks)
    assert quiet > 0.7 and quiet > loud + 0.1


def test_the_filter_stops_no_row_within_the_planned_trees_and_none_spends_more_than_mu() -> None:
    parameters, mu, rng = Parameters.of(0.1), 0.7, np.random.default_rng(5)
    std_g, std_h = parameters.noise(mu)
    rows, full = Filter(50, mu, std_g, std_h), np.linspace(0.0, 1.0, 50)
    for number in range(4 * parameters.n_trees):
        g = full * parameters.g_bound * rng.choice([-1, 1], 50)
        able = rows.pay(g, full * parameters.h_bound)
        assert able.all() == (number < parameters.n_trees), "the fullest row ends with the plan"
        assert able[:20].all(), "a row of small gradients goes on"
    assert rows.spent.max() <= mu**2 * (1 + 1e-6) and not able[-1]


def test_candidates_begin_at_the_lower_bound_and_a_value_there_goes_left() -> None:
    data = split_of()
    columns = np.array([[0.0, 1 / 32, 1.0], [0.5, 0.51, 0.999], [0.0, 0.0, 0.0]], dtype=np.float32)
    assert _bins(columns, data)[:2].tolist() == [[0, 1, 32], [16, 17, 32]]


def test_a_random_tree_divides_bins_into_intervals_of_at_most_two_to_the_depth() -> None:
    for seed in range(20):
        leaves = _random_tree(4, np.random.default_rng(seed))
        assert leaves.size == 33 and set(leaves) == set(range(int(leaves.max()) + 1)) and leaves.max() < 16
        assert np.count_nonzero(np.diff(leaves)) == leaves.max(), "a leaf is one interval of bins"


def test_the_picture_has_a_curve_for_each_method_and_table() -> None:
    cells = {"0.1": {"auc": {"mean": 0.7}}, "1": {"auc": {"mean": 0.8}}}
    tables = {name: {"default": cells, "rival": cells, "xgboost": cells} for name in ("one", "two", "three")}
    root = ElementTree.fromstring(draw(tables, (0.1, 1.0), "xgboost"))
    assert len(root.findall(".//{*}path")) == 9 and "NaN" not in draw(tables, (0.1, 1.0), "xgboost")
