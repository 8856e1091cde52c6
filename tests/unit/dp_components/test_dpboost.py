"""DPBoost as a whole: budget, disjoint rows, planted truth, sites, ledger, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dp_components.accounting import compose, count_events
from dp_components.dpboost.ensemble_of_ensembles import (
    DpBoostModel,
    DpBoostPlan,
    EnsembleTrainer,
    RowSharing,
    SiteData,
    train,
)
from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, clip_bound, leaf_sensitivity
from dp_components.dpboost.gradient_based_data_filtering import filter_by_gradient, gain_bound, gradient_sensitivity
from dp_components.dpboost.single_tree import (
    LogisticLoss,
    SplitTable,
    SquaredLoss,
    TreeRows,
    TreeSettings,
    assign_records,
    choose_splits,
    gains,
    release_leaves,
    release_start,
    start_sums,
    train_single_tree,
    tree_outputs,
)
from dp_components.errors import PrivacyRefusal
from dp_components.events import ExponentialEvent, LaplaceEvent, NeighbouringRelation, Release
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from dp_components.sensitivity import GRID_BITS
from dp_components.split_candidates.candidates import Candidates, FeatureBounds, by_rule, uniform_candidates
from tests.support.dpboost_baselines import para, seq
from tests.support.seeded_randomness import SeededRandomness

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
KEY = bytes(range(16))
CUTS = by_rule(uniform_candidates, [FeatureBounds(0, 1)] * 3, 8)
NO_NOISE = 1e9
PLANS = [
    DpBoostPlan(0.7),
    DpBoostPlan(2.7, 30, 11, start_share=0.07),
    DpBoostPlan(0.1, 50, 7, depth=3),
    para(1.3, 12),
    seq(3.3, 17),
]


def data(n: int = 900, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels depend on two features and their interaction."""
    x = np.random.default_rng(seed).random((3, n)).astype(np.float32)
    return x, ((x[0] > 0.5) ^ (x[2] > 0.25)).astype(float)


def site(x: np.ndarray, y: np.ndarray, name: str = "a", first: int = 0) -> SiteData:
    return SiteData(name, x, y, [f"patient {i}" for i in range(first, first + y.size)])


def at_once(_: str, make: Callable[[], Release]) -> np.ndarray:
    return make().value


def fit(plan: DpBoostPlan, *sites: SiteData, loss: object = None, seed: int = 1) -> DpBoostModel:
    return train(sites, CUTS, loss or LogisticLoss(), plan, KEY, at_once, SeededRandomness(seed))


@pytest.mark.parametrize("plan", PLANS)
def test_the_budget_is_spent_and_never_overdrawn(plan: DpBoostPlan) -> None:
    cost = compose(plan.event())
    assert plan.epsilon * (1 - 1e-12) < cost.pure_epsilon <= plan.epsilon
    assert cost.mu_squared == cost.total_variation == 0 and cost.delta(plan.epsilon) == 0


def test_half_of_a_trees_budget_goes_to_its_leaves() -> None:
    plan = DpBoostPlan(2.0, n_trees=100, trees_per_ensemble=50, depth=4)
    assert plan.leaf_epsilon == pytest.approx(0.5) and plan.split_epsilon == pytest.approx(0.125)


def test_a_tree_releases_exactly_what_its_ensemble_is_charged() -> None:
    x, y = data(50)
    plan = DpBoostPlan(1.0, depth=3)
    table = SplitTable.of(CUTS)
    rows = TreeRows(CUTS.bin_rows(x), y - 0.5, table)
    release = train_single_tree([rows], table, plan.tree_settings(0, 0))
    assert count_events(release.event) == count_events(plan.ensemble_event())
    assert release.value.size == 7 + 8


@pytest.mark.parametrize("plan", PLANS)
def test_row_shares(plan: DpBoostPlan) -> None:
    for ensemble in range(plan.n_ensembles):
        shares = plan.row_shares(ensemble)
        assert shares.size == plan.ensemble_size(ensemble) and shares.sum() == pytest.approx(1)
        is_falling = plan.sharing is RowSharing.GEOMETRIC
        np.testing.assert_allclose(shares[1:], shares[:-1] * (0.9 if is_falling else 1.0))
    assert sum(plan.ensemble_size(e) for e in range(plan.n_ensembles)) == plan.n_trees


def test_a_record_chooses_its_tree_by_itself() -> None:
    shares = DpBoostPlan(1.0, 5, 5).row_shares(0)
    ids = [f"patient {i}" for i in range(20_000)]
    chosen = assign_records(KEY, "a", ids, 0, shares)
    np.testing.assert_array_equal(assign_records(KEY, "a", ids[1::3], 0, shares), chosen[1::3])
    # Two-sided, false alarm 1e-5; equal shares must be rejected.
    counts = np.bincount(chosen, minlength=5)
    assert 1e-5 < stats.chisquare(counts, 20_000 * shares).pvalue < 1 - 1e-5
    assert stats.chisquare(counts).pvalue < 1e-5
    for other in (("b", 0, KEY), ("a", 1, KEY), ("a", 0, KEY[::-1])):
        again = assign_records(other[2], other[0], ids, other[1], shares)
        agreement = np.mean(again == chosen)
        assert agreement == pytest.approx(np.sum(shares**2), abs=0.02)


def test_known_assignment() -> None:
    """Pinned: another hash would move records between trees of a job that is resumed."""
    chosen = assign_records(KEY, "site-1", [f"r{i}" for i in range(12)], 3, np.full(4, 0.25))
    assert chosen.tolist() == [0, 3, 0, 0, 1, 3, 2, 2, 3, 2, 3, 3]


def test_one_more_record_touches_one_tree_and_those_after_it_only() -> None:
    """Without noise, and with trees that see nothing of each other, the rest of the model must not move at all."""
    x, y = data(300)
    plan = DpBoostPlan(NO_NOISE, 6, 6, depth=2, learning_rate=1e-6)
    all_rows = fit(plan, site(x, y)).trees
    fewer = fit(plan, site(x[:, :-1], y[:-1])).trees
    moved = np.flatnonzero(np.abs(all_rows - fewer).max(axis=1) > 1 << 16)
    assert moved.tolist() == assign_records(KEY, "a", ["patient 299"], 0, plan.row_shares(0)).tolist()


@pytest.mark.parametrize("plan", [DpBoostPlan(NO_NOISE, 20, 4, depth=3, learning_rate=0.3), seq(NO_NOISE, 20)])
def test_planted_truth_is_found_where_there_is_no_noise(plan: DpBoostPlan) -> None:
    x, y = data(4000)
    test_x, test_y = data(1000, seed=9)
    assert np.mean((fit(plan, site(x, y)).predict(test_x) > 0.5) == test_y) > 0.97


def test_regression_scales_by_public_bounds() -> None:
    x, _ = data(4000)
    y = 20.0 + 10 * x[0] - 5 * (x[1] > 0.5)
    loss = SquaredLoss(FeatureBounds(10, 35))
    plan = DpBoostPlan(NO_NOISE, 40, 4, depth=3, learning_rate=0.3)
    predicted = fit(plan, site(x, y), loss=loss).predict(x)
    assert np.sqrt(np.mean((predicted - y) ** 2)) < 0.25 * y.std()
    noisy = fit(DpBoostPlan(0.01, 3, 3, depth=1), site(x, y), loss=loss).predict(x)
    assert np.all((noisy >= 10) & (noisy <= 35))


def test_a_regression_may_pay_for_its_start() -> None:
    x, _ = data(2000)
    y = np.full(2000, 27.0)
    loss = SquaredLoss(FeatureBounds(10, 30))
    plan = DpBoostPlan(50.0, 1, 1, depth=1, start_share=0.5)
    start = fit(plan, site(x, y), loss=loss).start
    assert start / 2**32 == pytest.approx(0.7, abs=0.01)
    assert fit(DpBoostPlan(50.0, 1, 1, depth=1), site(x, y), loss=loss).start == 0
    with pytest.raises(ValueError, match="outweigh"):
        fit(plan, site(*data(20)))


def test_the_start_carries_the_noise_of_its_budget() -> None:
    """4,000 starts of 10^6 rows: minus G / n varies as G does. KS, false alarm below 1e-5; 2/3 and 3/2 are rejected."""
    epsilon, n = 0.1, 1_000_000
    sums = np.array([0, n << 20])
    randomness = SeededRandomness(1)
    starts = [int(release_start(sums, epsilon, randomness).value[0]) for _ in range(4000)]
    values = np.array(starts) * 2.0**-32 * n
    for wrong, is_right in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        assert (stats.kstest(values, stats.laplace(scale=wrong * 2 / epsilon).cdf).pvalue > 1e-5) == is_right
    assert release_start(sums, epsilon).event == LaplaceEvent(epsilon, ROW)
    assert [int(v) for v in start_sums([0.5, -1.0, 0.25])] == [-(1 << 18), 3 << 20]
    assert release_start(np.array([0, 0]), 1e9).value.tolist() == [0]


def test_labels_outside_their_bounds_are_clamped() -> None:
    loss = SquaredLoss(FeatureBounds(0, 10))
    np.testing.assert_array_equal(loss.target(np.array([-5.0, 0, 5, 10, 99])), [-1, -1, 0, 1, 1])


def test_a_tree_by_hand() -> None:
    cuts = Candidates((np.array([0.5], np.float32),))
    table = SplitTable.of(cuts)
    bins = cuts.bin_rows(np.array([[0.2, 0.4, 0.9, np.nan]], np.float32))
    rows = TreeRows(bins, np.array([0.5, 0.25, -1.0, -0.5]), table)
    tree = train_single_tree([rows], table, DpBoostPlan(NO_NOISE, depth=1).tree_settings(0, 0)).value
    assert tree[0] == 0
    np.testing.assert_allclose(tree_outputs(table, tree, bins), [-0.75 / 2.1] * 2 + [1.5 / 2.1] * 2, atol=1e-6)


def test_sums_of_sites_are_those_of_their_union() -> None:
    x, y = data(600)
    plan = DpBoostPlan(NO_NOISE, 1, 1, depth=3)
    parts = [site(x[:, i::3], y[i::3], name) for i, name in enumerate("abc")]
    np.testing.assert_array_equal(fit(plan, *parts, seed=4).trees, fit(plan, site(x, y), seed=4).trees)


def test_noise_is_fresh() -> None:
    x, y = data(50)
    plan = DpBoostPlan(1.0, 2, 2, depth=2)
    trees = [train([site(x, y)], CUTS, LogisticLoss(), plan, KEY, at_once).trees for _ in range(2)]
    assert not np.array_equal(*trees)


@pytest.mark.parametrize("plan", [*PLANS[1:], DpBoostPlan(1.0, 6, 3, depth=2)])
def test_a_ledger_that_is_charged_tree_by_tree_counts_an_ensemble_once(plan: DpBoostPlan, tmp_path: Path) -> None:
    epsilon = plan.epsilon
    ledger = Ledger.open(tmp_path, LedgerIdentity("site-1", "toy", ROW), Budget(epsilon, 1e-6, pure_epsilon=epsilon))
    ledger.open_job("one", plan.events_by_tree())
    spent = []
    if plan.start_share:
        ledger.release("one", "start", lambda: Release(np.zeros(1, int), plan.start_event()))
    for ensemble in range(plan.n_ensembles):
        for tree in range(plan.ensemble_size(ensemble)):
            made = Release(np.zeros(1, int), plan.tree_event(ensemble, tree))
            ledger.release("one", f"tree {tree} of {ensemble}", lambda made=made: made)
        spent.append(ledger.spent().pure_epsilon)
    start = plan.start_epsilon
    expected = start + (epsilon - start) * np.arange(1, plan.n_ensembles + 1) / plan.n_ensembles
    np.testing.assert_allclose(spent, expected, rtol=1e-12)
    assert spent[-1] <= epsilon
    with pytest.raises(PrivacyRefusal, match="plan"):
        ledger.release("one", "more", lambda: Release(np.zeros(1, int), plan.tree_event(plan.n_ensembles, 0)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0},
        {"epsilon": float("nan")},
        {"n_trees": 0},
        {"depth": 13},
        {"depth": True},
        {"learning_rate": 1.0},
        {"ridge": 0.0},
        {"n_trees": 400, "trees_per_ensemble": 400},
        {"start_share": 1.0},
        {"start_share": -0.1},
    ],
)
def test_impossible_plans_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        DpBoostPlan(**{"epsilon": 1.0, **wrong})


def test_refusals_come_before_any_release() -> None:
    x, y = data(20)
    plan, good = DpBoostPlan(1.0), site(*data(20))
    for sites, cuts, loss in (
        ([], CUTS, LogisticLoss()),
        ([good, good], CUTS, LogisticLoss()),
        ([good], Candidates(CUTS.of_feature[:2]), LogisticLoss()),
        ([site(x, y + 1)], CUTS, LogisticLoss()),
        ([site(x, np.full(20, np.nan))], CUTS, SquaredLoss(FeatureBounds(0, 1))),
    ):
        with pytest.raises(ValueError):
            EnsembleTrainer(sites, cuts, loss, plan, KEY)
    with pytest.raises(ValueError, match="identifier"):
        SiteData("a", x, y, ["only one"])
    with pytest.raises(ValueError, match="bounds"):
        SquaredLoss(FeatureBounds(3, 3))
    with pytest.raises(TypeError, match="row numbers"):
        assign_records(KEY, "a", [1, 2], 0, np.ones(1))
    with pytest.raises(ValueError, match="key"):
        assign_records(b"short", "a", ["x"], 0, np.ones(1))
    with pytest.raises(ValueError, match="empty"):
        assign_records(KEY, "a", [""], 0, np.ones(1))


# -- sensitivities -----------------------------------------------------------------------------------------------------


GRADIENTS = gradient_sensitivity()
ONE = 1 << GRID_BITS
RIDGE = math.floor(0.1 * ONE)
TABLE = SplitTable.of(Candidates((np.array([0.0, 1.0], np.float32), np.array([5.0], np.float32))))
ALPHA = 1e-5


def term(total: Fraction, n: int, ridge: Fraction) -> Fraction:
    return total**2 / (n + ridge)


def published_gain_bound(ridge: float) -> float:
    return (3 * ridge + 2) / ((ridge + 1) * (ridge + 2))


def test_filtering_drops_large_gradients_and_nothing_else() -> None:
    is_kept, clipped = filter_by_gradient([0.25, -1.0, 1.0000001, 1.0, -7.0])
    assert is_kept.tolist() == [True, True, False, True, False]
    assert clipped.values[:, 0].tolist() == [ONE // 4, -ONE, ONE]
    assert clipped.sensitivity == GRADIENTS and GRADIENTS.bound == ONE
    with pytest.raises(ValueError, match="finite"):
        filter_by_gradient([math.nan])


@given(st.lists(st.integers(-ONE, ONE), max_size=30), st.integers(-ONE, ONE), st.sampled_from([1e-6, 0.1, 1.0, 50.0]))
def test_no_row_changes_a_gain_by_more_than_the_bound(rows: list[int], row: int, ridge: float) -> None:
    exact = Fraction(ridge)
    before = term(Fraction(sum(rows), ONE), len(rows), exact)
    after = term(Fraction(sum(rows) + row, ONE), len(rows) + 1, exact)
    assert abs(after - before) < gain_bound(GRADIENTS) == 3


def test_the_published_gain_bound_is_too_small_and_ours_is_nearly_reached() -> None:
    ridge = Fraction(1, 10)
    change = {n: float(term(Fraction(n), n, ridge) - term(Fraction(n - 1), n + 1, ridge)) for n in (1, 100, 10_000)}
    assert published_gain_bound(0.1) == pytest.approx(0.996, abs=1e-3)
    assert change[1] < published_gain_bound(0.1) < change[100]
    assert change[100] == pytest.approx(2.95, abs=0.02) and change[10_000] == pytest.approx(3, abs=1e-3)


def exact_leaf(rows: list[int], ridge: int, bound: int) -> int:
    """The leaf weight that ``release_leaves`` noises, in whole numbers."""
    weight = (-sum(rows) << LEAF_BITS) // (len(rows) * ONE + ridge)
    return min(max(weight, -bound), bound)


@given(
    st.lists(st.integers(-ONE, ONE), max_size=6), st.integers(-ONE, ONE), st.integers(1, 3 * ONE), st.integers(0, 80)
)
def test_no_row_moves_a_leaf_by_more_than_its_sensitivity(rows: list[int], row: int, ridge: int, tree: int) -> None:
    bound = clip_bound(GRADIENTS, 0.1, tree)
    moved = exact_leaf([*rows, row], ridge, bound) - exact_leaf(rows, ridge, bound)
    assert abs(moved) <= leaf_sensitivity(GRADIENTS, ridge, bound).bound


def test_the_leaf_sensitivity_is_reached() -> None:
    bound = clip_bound(GRADIENTS, 0.1, 0)
    moved = exact_leaf([-ONE], RIDGE, bound) - exact_leaf([], RIDGE, bound)
    assert moved >= leaf_sensitivity(GRADIENTS, RIDGE, bound).bound - 1
    late = clip_bound(GRADIENTS, 0.1, 40)
    assert leaf_sensitivity(GRADIENTS, RIDGE, late).bound == 2 * late
    assert exact_leaf([-ONE] * 9, RIDGE, late) - exact_leaf([ONE] * 9, RIDGE, late) == 2 * late


def test_clipping_falls_geometrically_until_nothing_is_left() -> None:
    bounds = [math.ldexp(clip_bound(GRADIENTS, 0.1, t), -LEAF_BITS) for t in range(50)]
    np.testing.assert_allclose(bounds, 0.9 ** np.arange(50), rtol=1e-6)
    with pytest.raises(ValueError, match="smaller ensembles"):
        clip_bound(GRADIENTS, 0.1, 300)


def test_leaves_carry_exactly_the_noise_of_the_leaf_budget() -> None:
    """20,000 leaves; KS, false alarm below 1e-5 on either side; 2/3 and 3/2 of the noise must be rejected."""
    epsilon, n = 0.5, 20_000
    bound = clip_bound(GRADIENTS, 0.1, 0)
    release = release_leaves(
        TreeSettings(1, RIDGE, bound, epsilon, epsilon), (np.zeros(n, int), np.zeros(n, int)), SeededRandomness(1)
    )
    assert release.event == LaplaceEvent(epsilon, ROW)
    scale = 1 / (1 + RIDGE / ONE) / epsilon
    values = np.ldexp(release.value.astype(float), -LEAF_BITS)
    for wrong, is_right in ((1.0, True), (2 / 3, False), (3 / 2, False)):
        assert (stats.kstest(values, stats.laplace(scale=wrong * scale).cdf).pvalue > ALPHA) == is_right


def test_leaf_weights_are_the_papers() -> None:
    sums, counts = np.array([-3 * ONE, 5 * ONE, 0]), np.array([4, 9, 0])
    bound = clip_bound(GRADIENTS, 0.1, 0)
    value = release_leaves(TreeSettings(1, RIDGE, bound, 1e9, 1e9), (sums, counts)).value
    np.testing.assert_allclose(np.ldexp(value.astype(float), -LEAF_BITS), [3 / 4.1, -5 / 9.1, 0], atol=1e-6)


def level() -> tuple[np.ndarray, np.ndarray]:
    """Two nodes of two features with three and two bins: every feature's bins hold the same rows."""
    grads = np.array([[-4, 1, 2, -3, 2], [0, 0, 0, 0, 0]]) * ONE
    counts = np.array([[5, 2, 3, 6, 4], [0, 0, 0, 0, 0]])
    return grads, counts


def test_gains_against_a_naive_twin() -> None:
    grads, counts = level()
    expected = [16 / 5.1 + 9 / 5.1, 9 / 7.1 + 4 / 3.1, 9 / 6.1 + 4 / 4.1]
    np.testing.assert_allclose(gains(TABLE, grads, counts, 0.1), [expected, [0, 0, 0]])


def splitting_at(epsilon: float) -> TreeSettings:
    return TreeSettings(1, RIDGE, 1, epsilon, epsilon)


def test_splits_are_drawn_with_the_corrected_sensitivity() -> None:
    """6,000 draws of each node; chi-square; the published sensitivity, and 2/3 and 3/2 of ours, must be rejected."""
    grads, counts = level()
    source, epsilon, copies = SeededRandomness(2), 4.0, 100
    many = np.tile(grads, (copies, 1)), np.tile(counts, (copies, 1))  # nodes of a level are drawn apart
    draws = np.concatenate(
        [
            np.reshape(choose_splits(TABLE, splitting_at(epsilon), many, source).value, (copies, 2))
            for _ in range(6_000 // copies)
        ]
    )
    utility = gains(TABLE, grads, counts, 0.1)

    def p_value(node: int, sensitivity: float) -> float:
        weight = np.exp(epsilon * utility[node] / (2 * sensitivity))
        return float(stats.chisquare(np.bincount(draws[:, node], minlength=3), 6_000 * weight / weight.sum()).pvalue)

    assert ALPHA < p_value(0, 3.0) < 1 - ALPHA and ALPHA < p_value(1, 3.0) < 1 - ALPHA
    assert all(p_value(0, wrong) < ALPHA for wrong in (2.0, 4.5, published_gain_bound(0.1)))


def test_a_level_is_one_event_and_large_levels_are_refused() -> None:
    grads, counts = level()
    assert choose_splits(TABLE, splitting_at(0.3), (grads, counts)).event == ExponentialEvent(0.3, ROW)
    with pytest.raises(ValueError, match="too many rows"):
        choose_splits(TABLE, splitting_at(0.3), (grads, counts << 28))
    with pytest.raises(ValueError, match="candidate"):
        SplitTable.of(Candidates((np.zeros(0, np.float32),)))
