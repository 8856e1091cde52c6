"""DPBoost, pure trees and randomised buckets, attacked: correct code must bear it, and planted faults must be caught.

Their epsilon is pure, so an adversary may watch for one well-chosen outcome: its probability must not change by more
than e^epsilon between the two worlds. Each audit places its data where the sensitivity is really reached. Noise is
seeded; over random seeds correct code would be accused once in a thousand audits.

Reference: dp_components/README.md, sections 6, 8 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dp_components import leaf_weights, mechanisms
from dp_components.bucket_ldp import count_cells, public_edges, release_buckets, release_cell_counts
from dp_components.dpboost import ensemble_of_ensembles, single_tree
from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan, SiteData, train
from dp_components.dpboost.single_tree import SplitTable, SquaredLoss, assign_records
from dp_components.events import NeighbouringRelation, Release
from dp_components.mechanisms import add_noise
from dp_components.sensitivity import Norm, Sensitivity, clip_gradients
from dp_components.split_candidates.candidates import Candidates, FeatureBounds, as_candidates
from nvflare_plugins.kinds.private_trees import noisy_sums
from nvflare_plugins.kinds.private_trees.methods import PURE_2026_11
from nvflare_plugins.kinds.private_trees.plan import Trust
from tests.audit.test_private_trees import BOUNDS, DISTRIBUTED, TRUSTED, setting, shares_of
from tests.support.audit import CANARY_SITE, Errors, Setting, audit, judge, run_attempt
from tests.support.private_trees import plan_with
from tests.support.seeded_randomness import SeededRandomness

N_RUNS = 2000
LABELS = FeatureBounds(-1, 1)
CUT = Candidates((np.array([0.5], np.float32), np.array([0.5], np.float32)))
KEY = b"k" * 16


def site(columns: list[list[float]], label: list[float], name: str = "site-1") -> SiteData:
    ids = [f"{name}-{i}" for i in range(len(label))]
    return SiteData(name, np.array(columns, np.float32).reshape(2, -1), np.array(label, float), ids)


def publish(query: str, make: Callable[[], Release]) -> np.ndarray:
    return make().value


def models(sites: list[SiteData], plan: DpBoostPlan, n_runs: int, seed: int) -> np.ndarray:
    """Train many models. Shapes: int64[n_runs, n_trees, n_values]."""
    source = SeededRandomness(seed)
    loss = SquaredLoss(LABELS)
    return np.stack([train(sites, CUT, loss, plan, KEY, publish, source).trees for _ in range(n_runs)])


# -- DPBoost: the choice of a split -----------------------------------------------------------------------------------


def split_errors(epsilon_of_tree: float) -> Errors:
    """Both candidates have the same gain until the canary comes: one row of gradient +1 among 60 of gradient -1.

    By the first feature it falls among the 60, whose term sinks by nearly 3; by the second it falls into an empty
    child, where it adds nearly 1. The adversary says that it was there if the second feature is chosen.
    """
    plan = DpBoostPlan(epsilon_of_tree, 1, 1, depth=1)
    rows = site([[0.0] * 60] * 2, [1.0] * 60)
    canary = site([[0.0], [1.0]], [-1.0], "site-2")
    without = models([rows], plan, N_RUNS, 1)[:, 0, 0]
    present = models([rows, canary], plan, N_RUNS, 2)[:, 0, 0]
    return Errors.of(without.astype(float), present.astype(float), 0.5)


@pytest.mark.slow
def test_splits_keep_their_epsilon() -> None:
    """Of the tree's epsilon 8 the split has 4; two candidates can reach log((1 + e^(4 * 4 / 6)) / 2) = 2.0 of that."""
    assert 0.7 * 2.0 < split_errors(8.0).epsilon() <= 4


@pytest.mark.slow
def test_the_gain_sensitivity_of_the_paper_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: (3 lambda + 2) / ((lambda + 1)(lambda + 2)) is 0.996 at lambda 0.1, which holds for a single row only."""
    monkeypatch.setattr(single_tree, "gain_bound", lambda gradients: 0.996)
    assert split_errors(8.0).epsilon() > 4


# -- DPBoost: leaves --------------------------------------------------------------------------------------------------


def leaf_errors(epsilon_of_tree: float) -> Errors:
    """An empty tree, and one with the canary alone, which moves its leaf by g* / (1 + lambda): all that is paid for.

    Its leaf is known up to the choice of the feature: the canary is left by both.
    """
    plan = DpBoostPlan(epsilon_of_tree, 1, 1, depth=1)
    nobody, canary = site([[], []], []), site([[0.0], [0.0]], [1.0], "site-2")
    worlds = [models(sites, plan, N_RUNS, 3 + i)[:, 0, 1] for i, sites in enumerate(([nobody], [nobody, canary]))]
    return Errors.of(worlds[0].astype(float), worlds[1].astype(float), threshold=2.0**32 / 1.1 - 1)


@pytest.mark.slow
def test_leaves_keep_their_epsilon() -> None:
    """Of the tree's epsilon 4 the leaves have 2."""
    assert 0.8 * 2 < leaf_errors(4.0).epsilon() <= 2


@pytest.mark.slow
def test_half_the_noise_on_leaves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(sums: np.ndarray, sensitivity: Sensitivity, epsilon: float, source: SeededRandomness) -> Release:
        return mechanisms.add_laplace_noise(sums, sensitivity, 2 * epsilon, source)

    monkeypatch.setattr(single_tree, "add_laplace_noise", half)
    assert leaf_errors(4.0).epsilon() > 2


# -- DPBoost: whole models --------------------------------------------------------------------------------------------


N_TREES, N_MODELS = 16, 600
TARGET = 0.8
"""The canary's label; a label of 1 would leave the trees as soon as noise pushes its gradient above g*."""


def whole_model_errors(epsilon: float) -> Errors:
    """A record in one tree of an ensemble: the adversary adds up what every tree's leaf says about the canary.

    He says that it was there if the log-likelihood ratio, as if it were in every tree, exceeds 2.
    """
    plan = DpBoostPlan(epsilon, N_TREES, N_TREES, depth=1, learning_rate=0.02)
    nobody, canary = site([[], []], []), site([[0.0], [0.0]], [TARGET], "site-2")
    bounds = 0.98 ** np.arange(N_TREES)
    shifts, scales = np.minimum(TARGET / 1.1, bounds), np.minimum(1 / 1.1, 2 * bounds) / plan.leaf_epsilon
    ratios = []
    for i, sites in enumerate(([nobody], [nobody, canary])):
        weights = np.ldexp(models(sites, plan, N_MODELS, 5 + i)[:, :, 1].astype(float), -32)
        ratios.append(((np.abs(weights) - np.abs(weights - shifts)) / scales).sum(axis=1))
    return Errors.of(ratios[0], ratios[1], 2.0)


@pytest.mark.slow
def test_a_record_costs_one_tree_of_an_ensemble() -> None:
    assert whole_model_errors(2.0).epsilon() <= 2


class _Everywhere(np.ndarray):
    """Equal to every tree's number."""

    def __eq__(self, other: object) -> np.ndarray:  # type: ignore[override]
        return np.ones(self.shape, dtype=bool)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.slow
def test_a_record_in_every_tree_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: trees that share rows compose; sixteen trees then cost sixteen times as much."""

    def everywhere(*arguments: object) -> np.ndarray:
        return assign_records(*arguments).view(_Everywhere)  # type: ignore[arg-type]

    monkeypatch.setattr(ensemble_of_ensembles, "assign_records", everywhere)
    assert whole_model_errors(2.0).epsilon() > 2


# -- private trees: pure ----------------------------------------------------------------------------------------------


PURE = replace(PURE_2026_11, depth=1)
TREES_EPSILON, N_TREES_RUNS = 2.0, 1000
MOVED = Sensitivity(2.0**20, Norm.L1, NeighbouringRelation.ADD_OR_REMOVE_ROW)
N_SUMS = 40_000


def honest_errors(n_shares: int, n_added: int = 2) -> Errors:
    """One row at its bound, or none, beneath the shares of the two honest sites of three; epsilon 1 is promised."""
    noise = [
        add_noise(np.zeros(N_SUMS, int), MOVED, 1.0, SeededRandomness(70 + k), n_shares).value
        for k in range(2 * n_added)
    ]
    without, present = sum(noise[:n_added]), sum(noise[n_added:]) + 2**20
    return Errors.of(without.astype(float), present.astype(float), 2.0**20 - 1)


def test_shares_of_laplace_noise_keep_their_epsilon() -> None:
    assert 0.95 < honest_errors(2).epsilon() <= 1


@pytest.mark.parametrize(("n_shares", "n_added"), [(3, 2), (2, 1)], ids=["order 1/W", "a missing share"])
def test_too_little_of_laplace_noise_is_caught(n_shares: int, n_added: int) -> None:
    assert honest_errors(n_shares, n_added).epsilon() > 1


def pure_trees(trust: Trust, n_trees: int = 2, **changes: object) -> Setting:
    method = replace(PURE, n_trees=n_trees)
    return setting(trust, method, plan=plan_with(method, BOUNDS, TREES_EPSILON, trust), **changes)


def of_one_run(watched: Setting) -> float:
    """What the canary costs by arithmetic."""
    return judge(watched, [run_attempt(watched, True, 1, watched.randomness(1))], True).epsilon


@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_the_canary_of_pure_trees_costs_what_is_paid_for(trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    """And more, where rows are clipped in the other norm."""
    assert 0.999 * TREES_EPSILON < of_one_run(pure_trees(trust)) <= TREES_EPSILON * (1 + 1e-9)
    watched = pure_trees(trust)
    monkeypatch.setattr(leaf_weights, "clip_gradients", lambda g, h, c, norm: clip_gradients(g, h, c))
    assert of_one_run(watched) > 1.1 * TREES_EPSILON


def trees_epsilon(watched: Setting, n_runs: int = N_TREES_RUNS) -> float:
    """He says that it was there where all queries together speak for it as loudly as the claim lets them."""
    verdicts = audit(watched, n_runs)
    ratios = [np.array([v.log_ratio for v in verdicts[world]]) for world in (False, True)]
    return Errors.of(*ratios, 0.99 * TREES_EPSILON).epsilon()


@pytest.mark.slow
@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_pure_trees_keep_their_epsilon(trust: Trust) -> None:
    assert TREES_EPSILON / 2 < trees_epsilon(pure_trees(trust)) <= TREES_EPSILON


@pytest.mark.slow
def test_half_the_noise_of_a_server_on_pure_trees_is_caught() -> None:
    def half(run: int) -> Callable:
        source = SeededRandomness(16 * run + 8)
        return lambda sums, sensitivity, multiplier: add_noise(sums, sensitivity, multiplier / 2, source)

    assert trees_epsilon(pure_trees(TRUSTED, 1, server_noise=half)) > TREES_EPSILON


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "n_runs"),
    [(shares_of(0.5), N_TREES_RUNS), (shares_of(1.0, silent_site=CANARY_SITE), 5 * N_TREES_RUNS // 2)],
    ids=["half", "missing"],
)
def test_faulty_shares_of_pure_trees_are_caught(fault: Callable, n_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one share loses of epsilon 2 is less than what half the noise does, so that it takes more runs."""
    monkeypatch.setattr(noisy_sums, "add_noise_share", fault)
    assert trees_epsilon(pure_trees(DISTRIBUTED, 1), n_runs) > TREES_EPSILON


# -- FederBoost: randomised buckets -----------------------------------------------------------------------------------

EDGES = public_edges([FeatureBounds(0, 16)], 16)


def bucket_errors(release: Callable[..., Release]) -> Errors:
    """The canary's value is 0.5 or 15.5; the adversary looks whether its bucket is the last one."""
    sent = []
    for i, value in enumerate((0.5, 15.5)):
        columns = np.full((1, 4 * N_RUNS), value, np.float32)
        sent.append(release(columns, EDGES, 2.0, randomness=SeededRandomness(7 + i)).value[:, 0].astype(float))
    return Errors.of(sent[0], sent[1], 14.5)


def test_buckets_keep_their_epsilon() -> None:
    assert 0.8 * 2 < bucket_errors(release_buckets).epsilon() <= 2


def test_buckets_of_another_epsilon_are_caught() -> None:
    def doubled(columns: np.ndarray, edges: Candidates, epsilon: float, randomness: SeededRandomness) -> Release:
        return release_buckets(columns, edges, 2 * epsilon, randomness=randomness)

    assert bucket_errors(doubled).epsilon() > 2


def ranked_edges(columns: np.ndarray) -> Candidates:
    return Candidates(tuple(as_candidates(np.quantile(c, np.arange(1, 16) / 16, method="lower")) for c in columns))


def edge_errors(edges_of: Callable[[np.ndarray], Candidates]) -> Errors:
    """One value of 160 moves from the lower end to the upper one; the adversary reads the log-likelihood ratio."""
    worlds = [np.arange(160, dtype=np.float32)[np.newaxis] / 10 for _ in range(2)]
    worlds[1][0, 0] = 15.99
    tables = [edges_of(columns).bin_rows(columns)[0].astype(int) for columns in worlds]
    keep, move = np.exp(2.0) / (np.exp(2.0) + 15), 1 / (np.exp(2.0) + 15)
    differs = tables[0] != tables[1]
    ratios = []
    for i, columns in enumerate(worlds):
        all_runs = np.tile(columns, N_RUNS)  # each row is randomised by itself
        sent = release_buckets(all_runs, edges_of(columns), 2.0, randomness=SeededRandomness(11 + i)).value
        odds = [np.where(sent.reshape(N_RUNS, -1) == table, keep, move)[:, differs] for table in tables]
        ratios.append(np.log(odds[1] / odds[0]).sum(axis=1))
    return Errors.of(*ratios)


def test_public_edges_let_one_value_move_one_bucket() -> None:
    assert edge_errors(lambda columns: EDGES).epsilon() <= 2


def test_edges_that_are_ranks_are_caught() -> None:
    """As in the paper: one value that changes moves a row across every edge."""
    assert edge_errors(ranked_edges).epsilon() > 2


def count_errors(epsilon: float) -> Errors:
    """A value moves from one cell of the public grid to another: the difference of both counts goes from 1 to -1."""
    feature, differences = [FeatureBounds(0, 16)], []
    place = [int(count_cells(np.array([[v]], np.float32), feature, 2)[0].argmax()) for v in (0.01, 15.99)]
    for i, value in enumerate((0.01, 15.99)):
        columns = np.tile(np.array([[8.0, value]], np.float32), (N_RUNS, 1))  # a run is a feature: each has its noise
        release = release_cell_counts(columns, feature * N_RUNS, 2, epsilon, randomness=SeededRandomness(i))
        counts = release.value.reshape(N_RUNS, -1)[:, place].astype(float)
        # Both likelihood ratios at once: large noise tells nothing beyond the two counts' places.
        differences.append(np.clip(counts[:, 1], 0, 1) - np.clip(counts[:, 0], 0, 1))
    return Errors.of(differences[0], differences[1], 0.5)


def test_paid_edges_keep_their_epsilon() -> None:
    assert 0.5 < count_errors(2.0).epsilon() <= 2
    assert count_errors(4.0).epsilon() > 2, "half the noise must be caught"


def test_every_candidate_is_in_the_race() -> None:
    """A node without rows still chooses uniformly: an absent row is not told by a split that cannot be."""
    chosen = models([site([[], []], [])], DpBoostPlan(8.0, 1, 1, depth=1), 400, 9)[:, 0, 0]
    assert SplitTable.of(CUT).feature.size == 2 and 150 < chosen.sum() < 250
