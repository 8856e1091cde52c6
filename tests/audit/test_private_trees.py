"""The privacy that private trees claim, attacked: correct code must bear it, and every planted fault must be caught.

An adversary who knows everything but the canary tells two worlds apart by the likelihood ratio of all that reaches him
(tests/support/audit.py). The claim is (epsilon 8, delta 1e-5), because 500 runs of each world then suffice: a
fault that a user would meet at epsilon 0.1 is the same code. Noise is seeded, so that no result changes from run to
run; over random seeds, correct code would be accused once in a thousand audits.

Reference: dp_components/README.md, section 11.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dp_components import leaf_weights
from dp_components.events import NeighbouringRelation, Release
from dp_components.leaf_weights import LeafQuery
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from dp_components.mechanisms import NoiseShares, add_gaussian_noise, add_noise_share
from dp_components.sensitivity import Sensitivity, clip_logistic_rows
from dp_components.split_candidates.candidates import FeatureBounds
from dp_components.split_methods.histogram import HistogramQuery, OneFeatureHistogramQuery
from he_processors.errors import VeilBoostError
from nvflare_plugins.evidence import log as evidence
from nvflare_plugins.kinds.private_trees import forest, noisy_sums
from nvflare_plugins.kinds.private_trees.forest import ForestGrower, node_sums
from nvflare_plugins.kinds.private_trees.methods import (
    DEFAULT_2026_12,
    CandidateSource,
    Method,
    SplitMethod,
    dp_tr_newton,
    feverless,
)
from nvflare_plugins.kinds.private_trees.noisy_sums import without_ledger
from nvflare_plugins.kinds.private_trees.plan import OwnRows, PlannedRelease, PrivateTreesPlan, ReleaseSchedule, Trust
from nvflare_plugins.wire import envelope
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.envelope import Frame, FrameType, Kind
from tests.support.audit import (
    CANARY_SITE,
    Errors,
    KnownSums,
    Setting,
    SiteRandomness,
    Verdict,
    audit,
    gaussian_power,
    heads_confirm,
    judge,
    noise_p_value,
    run_attempt,
    shape_of,
)
from tests.support.calibration import epsilon_of_mu, mu_for
from tests.support.federation import dies_at
from tests.support.private_federation import PrivateFederation, job_of
from tests.support.private_trees import Part, mu_of, plan_with, split_rows
from tests.support.seeded_randomness import SeededRandomness

EPSILON, DELTA = 8.0, 1e-5
CLAIMED_MU = mu_for(EPSILON, DELTA)
N_RUNS, N_STATISTICS = 500, 2
N_RUNS_FOR_ROOT_2 = 700
"""For faults that multiply mu by the root of two only."""

RANDOM_TREES = replace(dp_tr_newton(20), depth=2, batch_size=5, query=LeafQuery.JOINT)
REFINED: dict[str, Any] = {"candidates": CandidateSource.ITERATIVE_HESSIAN}
HISTOGRAMS = replace(feverless(6), depth=2, n_candidates=7, query=LeafQuery.JOINT)
CLIPPED = replace(DEFAULT_2026_12, n_trees=20, depth=2, batch_size=5)
ONE_FEATURE = replace(HISTOGRAMS, name="one feature", n_features_per_tree=1, n_trees=12, batch_size=4, **REFINED)
PARTIALLY = replace(HISTOGRAMS, name="partially random", split_method=SplitMethod.PARTIALLY_RANDOM)
BOUNDS = (FeatureBounds(0, 1),) * 3
TRUSTED, DISTRIBUTED = Trust(), Trust(NoiseShares(3, 1))


def setting(trust: Trust, method: Method = RANDOM_TREES, at: float = 0.5, **changes: object) -> Setting:
    """200 rows at three sites. The canary has the rarer label, so that training moves its gradient towards 1.

    Args:
        at: the canary's value in every feature.
    """
    rng = np.random.default_rng(0)
    columns, label = rng.random((3, 200)).astype(np.float32), (rng.random(200) < 0.9).astype(np.float32)
    plan = changes.pop("plan", None) or plan_with(method, BOUNDS, mu_of(EPSILON, DELTA), trust)
    canary = Part(np.full((3, 1), at, np.float32), np.zeros(1, np.float32))
    return Setting(plan, tuple(split_rows(columns, label, 3)), canary, **changes)  # type: ignore[arg-type]


def errors(verdicts: dict[bool, list[Verdict]], statistic: str) -> Errors:
    without, with_canary = (np.array([getattr(v, statistic) for v in verdicts[world]]) for world in (False, True))
    return Errors.of(without, with_canary)


def measured_mu(verdicts: dict[bool, list[Verdict]]) -> float:
    """Return the larger of both statistics' lower bounds, which share the confidence."""
    return max(errors(verdicts, s).mu(N_STATISTICS) for s in ("log_ratio", "with_own_noise_twice"))


def noise_of(verdicts: dict[bool, list[Verdict]]) -> float:
    return noise_p_value(np.concatenate([v.noise for of_world in verdicts.values() for v in of_world]))


def assert_sound_and_tight(verdicts: dict[bool, list[Verdict]]) -> None:
    """Not above the claim, and not so far below it that the audit could not have failed."""
    found = measured_mu(verdicts)
    assert found <= CLAIMED_MU, f"epsilon {EPSILON} is claimed, at least {epsilon_of_mu(found, DELTA):.2f} is lost"
    assert found > CLAIMED_MU / 2, "with twice the noise no more than half of the claim could be found"
    # What the canary costs by arithmetic: nearly all that is paid for, and never more.
    largest = max(v.mu for of_world in verdicts.values() for v in of_world)
    assert 0.95 * CLAIMED_MU < largest <= CLAIMED_MU * (1 + 1e-9)
    assert 5e-6 < noise_of(verdicts) < 1 - 5e-6


# -- the faults -------------------------------------------------------------------------------------------------------


def half_noise_at_server(run: int):
    source = SeededRandomness(16 * run + 8)
    return lambda sums, sensitivity, multiplier: add_gaussian_noise(sums, sensitivity, multiplier / 2, source)


def shares_of(factor: float, silent_site: int | None = None):
    """Every share ``factor`` times what it should be, none at one site."""

    def add(sums: np.ndarray, sensitivity: Sensitivity, multiplier: float, shares: NoiseShares, source: SiteRandomness):
        if source.site == silent_site:
            return Release(np.asarray(sums), add_noise_share(sums, sensitivity, multiplier, shares, source).event)
        return add_noise_share(sums, sensitivity, multiplier * factor, shares, source)

    return add


class InnerNodesToo(ForestGrower):
    """Releases all nodes as one query, in which a row counts at every node of its path."""

    def _leaf_sums(self, number, trees, pairs):
        exact = []
        for tree, leaves in trees:
            of_leaves = [np.bincount(leaves, weights=pairs[:, i], minlength=tree.leaves.size) for i in range(2)]
            exact.append(node_sums(tree, np.stack(of_leaves, axis=1)).astype(np.int64))
        noisy = self._sums.release(Kind.NODE_STATS, number, np.concatenate(exact)) / 2**20
        of_trees = np.split(noisy, np.cumsum([len(of_tree) for of_tree in exact])[:-1])
        return [of_tree[tree.leaves] for of_tree, (tree, _) in zip(of_trees, trees, strict=True)]


class RootAgain(ForestGrower):
    """Releases each root's sum apart, although the leaves add up to it."""

    def _leaf_sums(self, number, trees, pairs):
        roots = np.tile(pairs.sum(axis=0), (len(trees), 1))
        self._sums.release(Kind.NODE_STATS, number, roots)
        return super()._leaf_sums(number, trees, pairs)


class NodesAgain(OneFeatureHistogramQuery):
    """Releases a node's own sums beside its histogram, although its bins add up to them."""

    def best(self, nodes):
        for node in nodes:
            self.add_noise(self.histograms([node.rows]).sum(axis=2, keepdims=True))
        return super().best(nodes)


def pays_for_anything(
    self: ReleaseSchedule, kind: Kind, number: int, n_values: int, tree: int | None = None, level: int | None = None
) -> PlannedRelease:
    """Take the place of ``ReleaseSchedule.take``: without it the plan's list refuses every fault that adds a sum."""
    return next(planned for planned in self._releases if (planned.kind, planned.round) == (kind, number))


def caught(monkeypatch: pytest.MonkeyPatch, faulty: Setting, n_runs: int) -> bool:
    """Check that the list of releases refuses a fault, and say whether the audit would see it without the list."""
    with pytest.raises(VeilBoostError, match="pays for no such sum"):
        run_attempt(faulty, False, 0, faulty.randomness(0))
    monkeypatch.setattr(ReleaseSchedule, "take", pays_for_anything)
    return measured_mu(audit(faulty, n_runs)) > CLAIMED_MU


class RenoisingAggregator(Aggregator):
    """Answers a retry with fresh noise instead of the answer that was given."""

    def __init__(self, *args: object, on_sum: Callable[[Frame, bytes], bytes], **more: object) -> None:
        self._noise, self._exact = on_sum, {}
        super().__init__(*args, on_sum=self._keep, **more)

    def _keep(self, frame: Frame, total: bytes) -> bytes:
        self._exact[frame.counter] = frame, bytes(total)
        return self._noise(frame, total)

    def _join(self, frame: Frame, committed, reply):
        known = self._exchanges.get(frame.counter)
        if known is None or known.answers is None:
            return super()._join(frame, committed, reply)
        payload = self._noise(*self._exact[frame.counter])
        answer = replace(frame, type=FrameType.RESULT, rank=len(self._sites), payload=payload, attachment=b"")
        reply(answer.pack())
        return None


def same_seed_at_two_sites(run: int) -> list[SiteRandomness]:
    return [SiteRandomness(seed, rank) for rank, seed in enumerate((16 * run, 16 * run, 16 * run + 2))]


def paid_from_ledger(folder: Path, plan: PrivateTreesPlan):
    """Every site pays from a durable ledger of its own, the same one after a restart."""

    def pay_of(run: int, site: int):
        identity = LedgerIdentity(f"site-{site + 1}", f"run-{run}", NeighbouringRelation.ADD_OR_REMOVE_ROW)
        ledger = Ledger.open(folder / str(site), identity, Budget(EPSILON, 1e-3))
        ledger.open_job("job", plan.releases.events)
        return partial(ledger.release, "job")

    return pay_of


# -- the audits -------------------------------------------------------------------------------------------------------


def test_smoke() -> None:
    """A quarter of the noise needs 50 runs of each world, of few trees; the noise's scale shows after fewer."""
    few_trees = replace(dp_tr_newton(4), depth=2, batch_size=2, query=LeafQuery.JOINT)
    right = audit(setting(DISTRIBUTED, few_trees), 20)
    assert measured_mu(right) <= CLAIMED_MU and 5e-6 < noise_of(right) < 1 - 5e-6

    def quarter(run: int):
        source = SeededRandomness(run)
        return lambda sums, sensitivity, multiplier: add_gaussian_noise(sums, sensitivity, multiplier / 4, source)

    wrong = audit(setting(TRUSTED, replace(few_trees, batch_size=4), server_noise=quarter), 55)
    assert measured_mu(wrong) > CLAIMED_MU and noise_of(wrong) < 1e-12


def test_the_audit_has_the_power_it_claims() -> None:
    """Computed before any run, for the canary's share of the claim: correct code passes, each fault is caught."""
    canary = 0.97 * CLAIMED_MU
    assert gaussian_power(CLAIMED_MU, canary, N_RUNS, N_STATISTICS, 1000) < 0.001
    assert gaussian_power(CLAIMED_MU, np.sqrt(3) * canary, N_RUNS, N_STATISTICS, 1000) > 0.99
    assert gaussian_power(CLAIMED_MU, np.sqrt(2) * canary, N_RUNS_FOR_ROOT_2, N_STATISTICS, 1000) > 0.97


def test_evidence_heads_tell_no_more_than_the_noised_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colluders who know all masks of the canary's site test both worlds against the heads that reach them.

    With a trusted server site 3 sends exact sums under masks that they can compute. Its log commits to these bytes, and
    its head to the log: unsalted, as the commitment once was, the head says in every run whether the canary is there.
    """
    watched = setting(TRUSTED, evidence=tmp_path)
    views = [run_attempt(watched, bool(run % 2), run, watched.randomness(run)) for run in range(4)]
    assert len({str(shape_of(view)) for view in views}) == 1, "sizes, order and lists of heads differ between worlds"
    assert sum(bool(heads) for *_, heads in shape_of(views[0])) == 4 and len(shape_of(views[0])) == 5
    assert not any(heads_confirm(watched, view, guess) for view in views for guess in (False, True))
    for module in (evidence, envelope):
        monkeypatch.setattr(module, "UNSALTED_CODECS", frozenset({"PUBLIC", "SEALED", "MASKED"}))
    for has_canary in (False, True):
        view = run_attempt(watched, has_canary, 0, watched.randomness(0))
        assert [heads_confirm(watched, view, guess) for guess in (False, True)] == [not has_canary, has_canary]


@pytest.mark.slow
@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_correct_code_keeps_its_promise(trust: Trust) -> None:
    assert_sound_and_tight(audit(setting(trust), N_RUNS))


@pytest.mark.slow
@pytest.mark.parametrize("method", [HISTOGRAMS, ONE_FEATURE, PARTIALLY], ids=lambda method: method.name)
def test_greedy_trees_keep_their_promise(method: Method) -> None:
    """The canary lies where nearly every split sends it to the left: partially random trees release left sums only."""
    assert CLAIMED_MU / 2 < measured_mu(audit(setting(TRUSTED, method, at=0.05), N_RUNS)) <= CLAIMED_MU


@pytest.mark.slow
@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_clipped_gradients_and_informed_trees_keep_their_promise(trust: Trust) -> None:
    """The default of December: the canary fills the smaller sensitivity, and trees follow from what was released."""
    assert_sound_and_tight(audit(setting(trust, CLIPPED), N_RUNS))


@pytest.mark.slow
def test_gradients_that_are_not_clipped_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for 0.6, and rows that go up to 1: long steps take the canary there in a few rounds."""
    plan = plan_with(replace(CLIPPED, learning_rate=2.0, batch_size=2), BOUNDS, mu_of(EPSILON, DELTA), TRUSTED)
    monkeypatch.setattr(leaf_weights, "clip_gradients", lambda g, h, bound, norm: clip_logistic_rows(g, h))
    assert measured_mu(audit(setting(TRUSTED, plan=plan), N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


@pytest.mark.slow
def test_half_the_noise_of_clipped_gradients_is_caught() -> None:
    assert measured_mu(audit(setting(TRUSTED, CLIPPED, server_noise=half_noise_at_server), N_RUNS)) > CLAIMED_MU


def test_the_trees_follow_from_what_was_released_alone() -> None:
    """The same replies and other rows: the same trees; drawn by exact sums instead, they would tell of rows."""
    watched = setting(TRUSTED, CLIPPED)
    totals = run_attempt(watched, False, 0, watched.randomness(0)).totals

    def trees_of(part: Part) -> list[list[int]]:
        trees: list[list[int]] = []
        grower = ForestGrower(watched.plan, OwnRows(part.columns, part.label), KnownSums(totals))
        grower.run(lambda number: None, lambda number, grown: trees.extend(g.tree.feature.tolist() for g in grown))
        return trees

    mine, others = watched.parts[0], watched.canary
    assert trees_of(mine) == trees_of(others) and len({str(tree) for tree in trees_of(mine)}) > 5


@pytest.mark.slow
def test_half_noise_at_the_server_is_caught() -> None:
    assert measured_mu(audit(setting(TRUSTED, server_noise=half_noise_at_server), N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_half_shares_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_sums, "add_noise_share", shares_of(0.5))
    assert measured_mu(audit(setting(DISTRIBUTED), N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_inner_nodes_as_part_of_the_query_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest, "ForestGrower", InnerNodesToo)
    assert caught(monkeypatch, setting(TRUSTED), N_RUNS)


@pytest.mark.slow
def test_a_root_sum_released_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest, "ForestGrower", RootAgain)
    assert caught(monkeypatch, setting(TRUSTED), N_RUNS_FOR_ROOT_2)


@pytest.mark.slow
def test_sums_released_beside_the_histograms_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """At two levels that is three times the queries that are paid for."""
    monkeypatch.setattr(forest, "OneFeatureHistogramQuery", NodesAgain)
    assert caught(monkeypatch, setting(TRUSTED, ONE_FEATURE), N_RUNS)


@pytest.mark.slow
def test_fresh_histograms_below_the_root_of_one_feature_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other trees pay for level by level: at two levels twice the queries."""
    monkeypatch.setattr(forest, "OneFeatureHistogramQuery", HistogramQuery)
    assert caught(monkeypatch, setting(TRUSTED, ONE_FEATURE, at=0.05), N_RUNS_FOR_ROOT_2)


@pytest.mark.slow
def test_all_features_as_one_query_are_caught() -> None:
    """A row enters one bin of every feature: three queries a level, not one."""
    right = plan_with(HISTOGRAMS, BOUNDS, mu_of(EPSILON, DELTA))
    too_little = right.releases.tree_noise.multiplier / np.sqrt(len(BOUNDS))
    plan = plan_with(HISTOGRAMS, BOUNDS, mu_of(EPSILON, DELTA), published_multiplier=too_little)
    assert measured_mu(audit(setting(TRUSTED, plan=plan), N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_a_missing_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_sums, "add_noise_share", shares_of(1.0, silent_site=CANARY_SITE))
    assert measured_mu(audit(setting(DISTRIBUTED), N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


@pytest.mark.slow
def test_the_same_seed_at_two_sites_is_caught() -> None:
    """Site 1 then knows the share of site 2; the plain likelihood ratio does not see it, the other statistic does."""
    verdicts = audit(setting(DISTRIBUTED, randomness=same_seed_at_two_sites), N_RUNS_FOR_ROOT_2)
    assert measured_mu(verdicts) > CLAIMED_MU > errors(verdicts, "log_ratio").mu(N_STATISTICS)


@pytest.mark.slow
def test_a_retry_gets_the_same_answer_and_a_fresh_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_sound_and_tight(audit(setting(TRUSTED, sends_twice=True), N_RUNS))
    wrong = setting(TRUSTED, sends_twice=True, aggregator=RenoisingAggregator)
    assert caught(monkeypatch, wrong, N_RUNS_FOR_ROOT_2)


@pytest.mark.slow
def test_a_restart_replays_from_the_ledger_and_without_it_is_caught(tmp_path: Path) -> None:
    one_round = replace(RANDOM_TREES, batch_size=20)
    right = setting(DISTRIBUTED, one_round, n_attempts=2)
    assert_sound_and_tight(audit(replace(right, pays=paid_from_ledger(tmp_path, right.plan)), N_RUNS))
    assert measured_mu(audit(right, N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


@pytest.mark.slow
def test_a_restart_with_a_trusted_aggregator_is_not_free(tmp_path: Path) -> None:
    """The sites' ledgers replay exact sums and charge nothing, but the server noises them afresh: a second release.

    A job must therefore never replay from the ledger under a trusted aggregator, unless the server replays too.
    """
    restarted = setting(TRUSTED, replace(RANDOM_TREES, batch_size=20), n_attempts=2)
    server = [partial(add_gaussian_noise, randomness=SeededRandomness(run)) for run in range(2 * N_RUNS_FOR_ROOT_2)]
    pays = paid_from_ledger(tmp_path, restarted.plan)
    restarted = replace(restarted, server_noise=lambda run: server[run], pays=pays)
    assert measured_mu(audit(restarted, N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


def test_replays_of_some_sites_only_are_not_free(tmp_path: Path) -> None:
    """Site 2 draws its share afresh in each attempt, the others replay theirs and charge nothing.

    The mean over attempts then holds less noise than their ledgers have paid for: s^2 / 2 + s^2 / 16 after eight. This
    is training without the payment of a job, which refuses: see the next test.
    """
    one_round = replace(dp_tr_newton(25), depth=2, batch_size=25, query=LeafQuery.JOINT)
    case = setting(DISTRIBUTED, one_round, n_attempts=8)
    from_ledger = paid_from_ledger(tmp_path, case.plan)
    mixed = replace(case, pays=lambda run, site: from_ledger(run, site) if site != 1 else without_ledger)
    noise = []
    for run in range(4):
        sources = mixed.randomness(run)
        views = [run_attempt(mixed, False, run, sources) for _ in range(mixed.n_attempts)]
        assert len({view.totals[0].tobytes() for view in views}) == mixed.n_attempts
        noise.append(np.mean([judge(mixed, [view], False).noise for view in views], axis=0))
        identity = LedgerIdentity("site-3", f"run-{run}", NeighbouringRelation.ADD_OR_REMOVE_ROW)
        spent = Ledger.open(tmp_path / str(CANARY_SITE), identity, Budget(EPSILON, 1e-3)).spent()
        assert spent.mu_squared <= CLAIMED_MU**2
    assert noise_p_value(np.concatenate(noise)) < 1e-12
    assert np.mean(np.concatenate(noise) ** 2) == pytest.approx(1 / 2 + 1 / 16, rel=0.15)


def test_a_job_is_not_resumed_where_one_site_would_draw_afresh_what_others_replay(tmp_path: Path) -> None:
    """Site 2 puts back an older copy of its ledger: every site then refuses before any sum leaves, none is charged."""
    federation = PrivateFederation(tmp_path)
    ledgers = federation.workspace("site-2") / "veilboost_ledgers"
    federation.run_private(job_of(), "first", tamper={"site-1": dies_at(Kind.NODE_STATS, 3)})
    shutil.copytree(ledgers, tmp_path / "copy")
    federation.run_private(job_of(resume_from="first"), "second", tamper={"site-1": dies_at(Kind.NODE_STATS, 6)})
    shutil.copytree(tmp_path / "copy", ledgers, dirs_exist_ok=True)
    spent = [federation.ledger(site).spent() for site in federation.sites]
    third = federation.run_private(job_of(resume_from="first"), "third")
    assert any("hold different releases" in str(third.error(site)) for site in federation.sites)
    assert not third.kinds & {"CELL_COUNTS", "NODE_STATS"}
    assert spent == [federation.ledger(site).spent() for site in federation.sites]
