"""DPBoost as a whole: budget, disjoint rows, planted truth, sites, ledger, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
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
from dp_components.dpboost.single_tree import (
    LogisticLoss,
    SplitTable,
    SquaredLoss,
    TreeRows,
    assign_records,
    release_start,
    start_sums,
    train_single_tree,
    tree_outputs,
)
from dp_components.errors import PrivacyRefusal
from dp_components.events import LaplaceEvent, NeighbouringRelation, Release
from dp_components.ledger import Budget, Ledger, LedgerIdentity
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
