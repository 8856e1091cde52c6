"""The list of a training's releases: what is on it, what it costs, and that nothing else is released or answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dp_components.accounting import compose
from dp_components.errors import PrivacyRefusal
from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from dp_components.leaf_weights import CLIPPED_AT, LeafQuery
from dp_components.mechanisms import NoiseShares
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.private_trees.methods import (
    DEFAULT_2026_11,
    DEFAULT_2026_12,
    FEW_ROUNDS,
    PURE_2026_11,
    CandidateSource,
    Method,
    SplitMethod,
    batch_iterative_hessian_ebm,
    dp_ebm,
    dp_ebm_newton,
    dp_gbm,
    dp_rf,
    dp_tr_newton,
    feverless,
    resolve_method,
)
from nvflare_plugins.kinds.private_trees.noisy_sums import NoisySums
from nvflare_plugins.kinds.private_trees.plan import ReleasePlan, ReleaseSchedule, Trust
from nvflare_plugins.wire.envelope import Codec, Frame, Kind, Phase, TrainingStep
from tests.support import frames
from tests.support.private_trees import mu_of, plan_with, trusted_server

DELTA = 1 / 21_000
TRUSTED, DISTRIBUTED = Trust(), Trust(NoiseShares(3, 1))
M = 23
BOUNDS = (FeatureBounds(0.0, 1.0),) * M
TWO_QUERIES = (LeafQuery.JOINT, LeafQuery.CLIPPED)
ONE_FEATURE = replace(feverless(25), name="FEVERLESS of one feature", n_features_per_tree=1)
IH = replace(dp_tr_newton(200), candidates=CandidateSource.ITERATIVE_HESSIAN)
SCALAR = replace(dp_tr_newton(200), name="scalar", query=LeafQuery.SCALAR)


@pytest.mark.parametrize(
    ("method", "queries"),
    [
        (dp_tr_newton(200), 200),
        (dp_rf(100), 100),
        (dp_ebm_newton(100), 100),
        (dp_ebm(M, 100), 2300),
        (dp_gbm(25), 25 * 4 * M),
        (feverless(25), 25 * 4 * M),
        (replace(feverless(25), split_method=SplitMethod.PARTIALLY_RANDOM), 25 * (4 * M + 1)),  # with the root sums
        (replace(feverless(25), n_features_per_tree=3), 25 * 4 * 3),
        (SCALAR, 400),
        (IH, 200 + 5 * M),
        (replace(IH, n_features_per_tree=1), 200 + 5 * M),
        (replace(IH, n_features_per_tree=1, n_trees=50), 50 + 50),
        (replace(batch_iterative_hessian_ebm(1.0), query=LeafQuery.SCALAR), 300),  # their run: sigma of 300 queries
        (replace(feverless(25), candidates=CandidateSource.ITERATIVE_HESSIAN), 25 * 4 * M),  # nothing extra
        (replace(feverless(25), n_features_per_tree=1), 25),  # the root's histogram answers for the whole tree
        (replace(dp_gbm(25), n_features_per_tree=1, depth=7, candidates=CandidateSource.ITERATIVE_HESSIAN), 25),
        (replace(dp_gbm(25), n_features_per_tree=1, query=LeafQuery.SCALAR), 50),
        (replace(feverless(25), n_features_per_tree=1, split_method=SplitMethod.PARTIALLY_RANDOM), 25 * 5),
        (replace(dp_tr_newton(200), batch_size=30), 200),  # six batches of 30 and one of 20
        (DEFAULT_2026_11, 200),
        (DEFAULT_2026_12, 300),
        (PURE_2026_11, 80),
        (FEW_ROUNDS, 240),  # a batch saves rounds, not queries
    ],
    ids=lambda value: value if isinstance(value, int) else value.name,
)
def test_queries(method, queries: int) -> None:
    assert plan_with(method, BOUNDS, 1.0).releases.n_queries == queries


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize(
    "method",
    [DEFAULT_2026_11, DEFAULT_2026_12, dp_tr_newton(200), dp_rf(200), feverless(25), ONE_FEATURE, IH, SCALAR],
    ids=lambda m: m.name,
)
@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_the_releases_spend_their_budget_and_not_more(epsilon: float, method: Method, trust: Trust) -> None:
    events = plan_with(method, BOUNDS, mu_of(epsilon, DELTA), trust).releases.events
    assert 0.999 * epsilon < compose(events).epsilon(DELTA) <= epsilon


@pytest.mark.parametrize("method", [DEFAULT_2026_12, FEW_ROUNDS, PURE_2026_11], ids=lambda m: m.name)
@pytest.mark.parametrize("n_sites", [3, 5, 10])
def test_distributed_noise_loses_nothing_but_the_share_of_colluders(method: Method, n_sites: int) -> None:
    """It is a trusted server's at sqrt((W - t) / W) of mu, or of a pure epsilon: noise, ridge and candidates alike."""
    plan = plan_with(method, BOUNDS, 0.3, Trust(NoiseShares(n_sites, 1)))
    trusted = plan_with(method, BOUNDS, 0.3 * math.sqrt((n_sites - 1) / n_sites))
    assert plan.leaf_noise == pytest.approx(trusted.leaf_noise, rel=1e-12)
    assert plan.ridge == pytest.approx(trusted.ridge, rel=1e-12)
    of_cells = plan.releases.cell_noise.scaled(plan.trust.noise_factor).std
    assert of_cells == pytest.approx(trusted.releases.cell_noise.std, rel=1e-12)
    spent = compose(plan.releases.events)
    assert math.sqrt(spent.mu_squared) + spent.pure_epsilon == pytest.approx(0.3, rel=1e-9)


def test_clipped_gradients_cost_the_same_at_six_tenths_of_the_noise() -> None:
    """What falls is the sensitivity, and with it the noise; the multiplier, which is paid for, stays."""
    joint, clipped = (plan_with(replace(DEFAULT_2026_11, query=query), BOUNDS, 0.3).releases for query in TWO_QUERIES)
    assert clipped.tree_noise.multiplier == joint.tree_noise.multiplier
    assert clipped.tree_noise.std[0] / joint.tree_noise.std[0] == pytest.approx(0.6, rel=1e-5)
    assert compose(clipped.events).mu_squared == pytest.approx(compose(joint.events).mu_squared, rel=1e-9)


def test_trees_of_one_feature_have_half_the_noise_of_paying_for_each_of_four_levels() -> None:
    """As many queries as random trees, so their noise; per level it would be the root of the depth more."""
    one, random = (plan_with(method, BOUNDS, 0.3).releases for method in (ONE_FEATURE, dp_tr_newton(25)))
    assert one.tree_noise.multiplier == random.tree_noise.multiplier == pytest.approx(5 / 0.3)
    assert len(one.releases) == 25 and all((r.kind, r.level) == (Kind.HISTOGRAM, 0) for r in one.releases)


@pytest.mark.parametrize("n_candidates", [1, 10, 127])
@pytest.mark.parametrize("source", CandidateSource)
def test_the_planned_root_histogram_holds_all_bins(source: CandidateSource, n_candidates: int) -> None:
    method = replace(ONE_FEATURE, candidates=source, n_candidates=n_candidates)
    [size] = plan_with(method, BOUNDS, 0.3).releases.releases[-1].sizes
    most = 2 * n_candidates if source is CandidateSource.ITERATIVE_HESSIAN else n_candidates
    assert size >= 2 * (most + 1)


def test_every_release_says_what_it_is() -> None:
    refined = replace(feverless(2), split_method=SplitMethod.PARTIALLY_RANDOM, depth=2, candidates=IH.candidates)
    words = [release.words for release in ReleasePlan.of(refined, BOUNDS[:3], 1.0).releases]
    assert words[:5] == [
        "Hessians before tree 0",
        "root sums of tree 0",
        "sums of level 0 of tree 0",
        "sums of level 1 of tree 0",
        "Hessians before tree 1",
    ]
    releases = ReleasePlan.of(FEW_ROUNDS, BOUNDS, 1.0).releases
    assert [r.words for r in releases[:2]] == ["rows per public cell", "leaf sums of round 0"] and len(releases) == 25
    assert len({r.words for r in releases}) == 25 and releases[1].sizes == (32,) * 10


# -- the schedule -----------------------------------------------------------------------------------------------------


def test_releases_are_taken_in_order_and_once() -> None:
    due = ReleaseSchedule(ReleasePlan.of(replace(dp_gbm(6), batch_size=3, depth=2), BOUNDS[:2], 1.0))
    first = due.take(Kind.HISTOGRAM, 0, 4, tree=0, level=0)
    # A tree that ends early skips its other levels; the next one's are its own.
    second = due.take(Kind.HISTOGRAM, 0, 4, tree=1, level=0)
    assert (first.words, second.words) == ("sums of level 0 of tree 0", "sums of level 0 of tree 1")
    for again in ((0, 0), (0, 1), (1, 0)):
        with pytest.raises(ProtocolError, match="pays for no such sum"):
            due.take(Kind.HISTOGRAM, 0, 4, *again)
    assert due.take(Kind.HISTOGRAM, 1, 4).tree == 3, "a server takes them in order"


@pytest.mark.parametrize(
    ("kind", "number", "n_values"),
    [
        (Kind.CELL_COUNTS, -1, 4),
        (Kind.HISTOGRAM, 0, 4),
        (Kind.ROOT_SUM, 0, 2),
        (Kind.METRIC, 0, 1),
        (Kind.NODE_STATS, -1, 32),
        (Kind.NODE_STATS, 200, 32),
        (Kind.NODE_STATS, 0, 34),
        (Kind.NODE_STATS, 0, 31),
        (Kind.NODE_STATS, 0, 0),
    ],
)
def test_what_the_plan_does_not_pay_for_is_not_released(kind: Kind, number: int, n_values: int) -> None:
    with pytest.raises(ProtocolError, match="pays for no such sum"):
        ReleaseSchedule(ReleasePlan.of(dp_tr_newton(200), BOUNDS, 0.3)).take(kind, number, n_values)


# -- at a site --------------------------------------------------------------------------------------------------------


class Sums:
    """Stands in for the protected sum; remembers what left."""

    def __init__(self) -> None:
        self.left: list[np.ndarray] = []

    def sum_counts(self, kind: Kind, counts: np.ndarray) -> np.ndarray:
        self.left.append(counts)
        return counts


@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_what_is_paid_is_what_the_plan_lists(trust: Trust) -> None:
    plan, events = plan_with(FEW_ROUNDS, BOUNDS[:3], mu_of(1.0, 1e-5), trust), []

    def pay(query: str, make: Callable[[], Release]) -> np.ndarray:
        release = make()
        events.append(release.event)
        return release.value

    sums = NoisySums(Sums(), plan, pay)  # type: ignore[arg-type]
    for planned in plan.releases.releases:
        sums.release(planned.kind, planned.round, np.zeros(sum(planned.sizes), dtype=np.int64))
    assert events == plan.releases.events
    with pytest.raises(ProtocolError, match="pays for no such sum"):
        sums.release(Kind.NODE_STATS, 23, np.zeros(320, dtype=np.int64))


def test_sites_send_noise_in_the_distributed_model_and_exact_sums_under_masks_otherwise() -> None:
    for trust, is_noised in ((TRUSTED, False), (DISTRIBUTED, True)):
        sums = Sums()
        site = NoisySums(sums, plan_with(dp_tr_newton(2), BOUNDS, 1.0, trust))  # type: ignore[arg-type]
        site.release(Kind.NODE_STATS, 0, np.zeros((16, 2), dtype=np.int64))
        assert sums.left[0].any() == is_noised


def test_nothing_leaves_when_the_ledger_refuses() -> None:
    sums = Sums()

    def refuse(query: str, make: Callable[[], Release]) -> np.ndarray:
        raise PrivacyRefusal("overdrawn")

    site = NoisySums(sums, plan_with(dp_tr_newton(2), BOUNDS, 1.0), refuse)  # type: ignore[arg-type]
    with pytest.raises(PrivacyRefusal):
        site.release(Kind.NODE_STATS, 0, np.zeros(32, dtype=np.int64))
    assert not sums.left


# -- at a trusted server ----------------------------------------------------------------------------------------------


def frame(kind: Kind, n_values: int, codec: Codec = Codec.MASKED) -> Frame:
    return frames.frame(kind=kind, moment=TrainingStep(Phase.UPDATE), codec=codec, n_values=n_values)


def test_the_server_noises_pairs_and_refuses_the_rest() -> None:
    plan, asked = plan_with(dp_tr_newton(200), BOUNDS, 0.3), []

    def mechanism(sums, sensitivity, multiplier) -> Release:
        asked.append((sums.shape, sensitivity, multiplier))
        return Release(sums + 1, GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW))

    answer, noise = trusted_server(plan, mechanism), plan.releases.tree_noise
    reply = answer(frame(Kind.NODE_STATS, 4), np.array([1, -2, 3, -4], dtype="<i8").tobytes())
    assert np.frombuffer(reply, dtype="<i8").tolist() == [2, -1, 4, -3]
    assert asked == [((2, 2), noise.sensitivity, noise.multiplier)]
    for wrong in (frame(Kind.HISTOGRAM, 4), frame(Kind.NODE_STATS, 4), frame(Kind.NODE_STATS, 3)):
        with pytest.raises(ProtocolError, match="pays for no such sum"):
            answer(wrong, bytes(8 * wrong.n_values))
    with pytest.raises(ProtocolError, match="not a masked sum"):
        trusted_server(plan)(frame(Kind.NODE_STATS, 4, Codec.PUBLIC), bytes(32))


# -- the presets' parameters -------------------------------------------------------------------------------------------


def test_a_forest_of_averages_is_one_batch_without_boosting() -> None:
    forest = dp_rf(50)
    assert (forest.batch_size, forest.learning_rate, forest.ridge, forest.clip) == (50, 1.0, 0.0, 1.0)


def test_the_frozen_defaults_stay_as_they_were_frozen() -> None:
    assert (
        DEFAULT_2026_11.n_trees,
        DEFAULT_2026_11.depth,
        DEFAULT_2026_11.n_candidates,
        DEFAULT_2026_11.batch_size,
    ) == (200, 4, 32, 1)
    assert (
        DEFAULT_2026_11.learning_rate,
        DEFAULT_2026_11.ridge,
        DEFAULT_2026_11.noise_ridge,
        DEFAULT_2026_11.clip,
    ) == (0.3, 1.0, 3.0, 2.0)
    assert (FEW_ROUNDS.n_trees, FEW_ROUNDS.batch_size, FEW_ROUNDS.learning_rate) == (240, 10, 1.5)
    newer = DEFAULT_2026_12
    assert (newer.n_trees, newer.depth, newer.n_candidates, newer.batch_size) == (300, 4, 32, 1)
    assert (newer.learning_rate, newer.ridge, newer.noise_ridge, newer.clip) == (0.3, 1.0, 5.0, 2.0)
    assert (newer.query.name, newer.interactions.name, CLIPPED_AT) == ("CLIPPED", "INFORMED", 0.6)
    assert FEW_ROUNDS.n_trees // FEW_ROUNDS.batch_size + 1 <= 25  # with the message for private quantiles


def test_the_default_is_the_newest_and_older_ones_stay_selectable() -> None:
    assert resolve_method("default", {}, 5) == resolve_method("default_2026_12", {}, 5) == DEFAULT_2026_12
    assert resolve_method("default_2026_11", {}, 5) == DEFAULT_2026_11
