"""The privacy that private trees on numbers and on several classes claim, attacked as in test_private_trees.py.

The canary's vector fills its sensitivity in every query: a label at the far bound, or of a class that nobody has. Each
planted fault is one that a slip in the clipping would make.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dp_components import leaf_weights
from dp_components.leaf_weights import ClassShares, LeafQuery, Number, SeveralClasses, SoftmaxWeights, Target, Times
from dp_components.sensitivity import GRID_BITS, ClippedRows, Norm, Sensitivity, clip_class_rows, clip_rows
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.growth.survival import AftLoss
from nvflare_plugins.kinds.private_trees import noisy_sums
from nvflare_plugins.kinds.private_trees.methods import (
    CandidateSource,
    Method,
    SplitMethod,
    dp_gbm,
    dp_rf,
    dp_tr_newton,
)
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan, ReleasePlan, Trust
from tests.audit.test_private_trees import (
    BOUNDS,
    CANARY_SITE,
    CLAIMED_MU,
    CLIPPED,
    DELTA,
    DISTRIBUTED,
    EPSILON,
    HISTOGRAMS,
    N_RUNS,
    N_RUNS_FOR_ROOT_2,
    TRUSTED,
    assert_sound_and_tight,
    half_noise_at_server,
    measured_mu,
    noise_of,
    shares_of,
)
from tests.support.audit import Setting, audit, judge, run_attempt
from tests.support.private_trees import Part, mu_of, split_rows

CLASSES, NUMBERS = SeveralClasses(4), Number(FeatureBounds(0.0, 10.0))
TIMES = Times(FeatureBounds(1.0, 100.0), AftLoss("normal", 0.5))
TARGETS = pytest.mark.parametrize("target", [CLASSES, NUMBERS, TIMES], ids=["classes", "numbers", "times"])
FEW = replace(CLIPPED, n_trees=10)
LONG_STEPS = replace(CLIPPED, learning_rate=2.0, batch_size=2)
"""So that the canary's scores go far within few rounds."""


def setting(target: Target, trust: Trust = TRUSTED, method: Method = FEW, beyond: float = 0.0, **changes) -> Setting:
    """200 rows at three sites, of classes most in one; the canary has a label that nobody else has.

    Args:
        beyond: how far the canary's label lies beyond the bounds of numbers.
    """
    rng = np.random.default_rng(0)
    columns = rng.random((3, 200)).astype(np.float32)
    label = np.maximum(rng.integers(-17, 3, 200), 0) if target == CLASSES else 8 + 2 * rng.random(200)
    label = label if target != TIMES else 10 * label[:, None] * np.ones(2)
    releases = ReleasePlan.of(method, BOUNDS, mu_of(EPSILON, DELTA), trust.n_honest, target=target)
    plan = PrivateTreesPlan(method, BOUNDS, releases, trust, 1, (), target)
    of_canary = 3.0 if target == CLASSES else -beyond
    of_canary = np.full((1, 2), 1 / (1 + beyond)) if target == TIMES else np.full(1, of_canary)
    canary = Part(np.full((3, 1), 0.5, np.float32), of_canary.astype(np.float32))
    return Setting(plan, tuple(split_rows(columns, label.astype(np.float32), 3)), canary, **changes)


@TARGETS
def test_the_canary_fills_the_sensitivity_and_no_more(target: Target) -> None:
    """By arithmetic, in one run of each trust model; its label far beyond the bounds changes nothing."""
    for trust in (TRUSTED, DISTRIBUTED):
        watched = setting(target, trust, beyond=1e6)
        view = run_attempt(watched, True, 1, watched.randomness(1))
        assert 0.95 * CLAIMED_MU < judge(watched, [view], True).mu <= CLAIMED_MU * (1 + 1e-9)


def test_smoke() -> None:
    """The right noise is not accused; half of it is, by its scale, after few runs."""
    few = replace(CLIPPED, n_trees=4, batch_size=4)
    right = audit(setting(CLASSES, DISTRIBUTED, few), 8)
    assert measured_mu(right) <= CLAIMED_MU and 5e-6 < noise_of(right) < 1 - 5e-6
    half = audit(setting(NUMBERS, TRUSTED, few, server_noise=half_noise_at_server), 10)
    assert noise_of(half) < 1e-9


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_correct_code_keeps_its_promise(target: Target, trust: Trust) -> None:
    assert_sound_and_tight(audit(setting(target, trust), N_RUNS))


@pytest.mark.slow
@TARGETS
def test_half_the_noise_is_caught(target: Target) -> None:
    assert measured_mu(audit(setting(target, server_noise=half_noise_at_server), N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
@TARGETS
def test_a_missing_share_is_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noisy_sums, "add_noise_share", shares_of(1.0, silent_site=CANARY_SITE))
    assert measured_mu(audit(setting(target, DISTRIBUTED), N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


def announced(rows, bound: float):
    """Return rows that claim a sensitivity of another clipping: the plan was made before, with the right one."""
    sensitivity = Sensitivity(bound, Norm.L2, rows.sensitivity.relation, rows.sensitivity.weights)
    return replace(rows, sensitivity=sensitivity)


@pytest.mark.slow
def test_vectors_that_are_not_shortened_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for 0.85, and rows of up to sqrt(2): what the softmax gives without any clipping."""
    watched = setting(CLASSES, method=LONG_STEPS)
    bound = leaf_weights.SoftmaxWeights(4).sensitivity(LONG_STEPS.query).bound
    monkeypatch.setattr(
        leaf_weights,
        "clip_class_rows",
        lambda g, h, length, weight, norm: announced(clip_class_rows(g, h, 2.0, weight, norm=norm), bound),
    )
    assert measured_mu(audit(watched, N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


@pytest.mark.slow
def test_classes_clipped_one_by_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each |g_k| within the bound, as one query a class would have it, and all of them sent as one query."""

    def one_by_one(g, h, length: float, weight: float, norm: Norm):
        n = g.shape[1]
        return announced(
            clip_rows(np.concatenate([g, h], axis=1), (length,) * n + (length / weight,) * n, norm=norm), bound
        )

    watched = setting(CLASSES, method=LONG_STEPS)
    bound = leaf_weights.SoftmaxWeights(4).sensitivity(LONG_STEPS.query).bound
    monkeypatch.setattr(leaf_weights, "clip_class_rows", one_by_one)
    assert measured_mu(audit(watched, N_RUNS_FOR_ROOT_2)) > CLAIMED_MU


@pytest.mark.slow
def test_gradients_of_times_that_are_not_clipped_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for a surprise of one deviation, and one of nine: times within their bounds do not bound gradients."""
    bound = leaf_weights.TimesWeights(TIMES, counts_rows=False).sensitivity(FEW.query).bound

    def as_they_are(query, pulled, h):
        return announced(clip_rows(np.stack([pulled, h], axis=1), (100.0, 1.0)), bound)

    watched = setting(TIMES)
    monkeypatch.setattr(leaf_weights, "_clip", as_they_are)
    assert measured_mu(audit(watched, N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_labels_that_are_not_clipped_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label of ten times the bounds, with residuals as they are: nothing else of the clipping is left out."""
    watched = setting(NUMBERS, beyond=5.0)
    bound = leaf_weights.SquaredWeights(NUMBERS).sensitivity(FEW.query).bound

    def as_they_are(query, residuals, h=1.0):
        return announced(clip_rows(np.stack([residuals, np.ones(residuals.size)], axis=1), (100.0, 1.0)), bound)

    monkeypatch.setattr(leaf_weights, "_clip", as_they_are)
    assert measured_mu(audit(watched, N_RUNS)) > CLAIMED_MU


def test_the_count_beside_a_residual_is_paid_for() -> None:
    """Left out of the norm, the 1 of a row would cost nothing: the bound says |(1, w)|, and the rows fill it."""
    of = leaf_weights.SquaredWeights(NUMBERS).sensitivity(FEW.query)
    assert of.bound / 2**20 == pytest.approx(math.hypot(1.0, leaf_weights.COUNT_WEIGHT))
    watched = setting(NUMBERS)
    view = run_attempt(watched, True, 1, watched.randomness(1))
    without = CLAIMED_MU / math.hypot(1.0, leaf_weights.COUNT_WEIGHT)
    assert judge(watched, [view], True).mu > without


# -- the papers' methods on several classes ----------------------------------------------------------------------------
# Histograms of vectors, shares of classes and Hessian sums of all classes are extensions of ours; each planted fault is
# one that a slip in making one of them would have made.


OF_VECTORS = replace(HISTOGRAMS, query=LeafQuery.VECTOR)
REFINED = replace(dp_tr_newton(6), depth=2, n_candidates=7, candidates=CandidateSource.ITERATIVE_HESSIAN)
METHODS: dict[str, Method] = {
    "averaging": replace(dp_rf(10), depth=2),
    "averaged histograms": replace(dp_rf(6), depth=2, n_candidates=7, split_method=SplitMethod.HISTOGRAM),
    "histograms": OF_VECTORS,
    "histograms of gradient updates": replace(dp_gbm(6), depth=2, n_candidates=7),
    "partially random": replace(OF_VECTORS, split_method=SplitMethod.PARTIALLY_RANDOM),
    "refined": REFINED,
}
FILLED = {"averaging", "averaged histograms"}
"""The canary's one 1 is all of the sensitivity. Of a vector it is what the scores make of it."""
LONG_STEPS_OF_CLASSES = replace(HISTOGRAMS, query=LeafQuery.CLIPPED, learning_rate=2.0, n_trees=10)


def mu_of_one_run(watched: Setting) -> float:
    view = run_attempt(watched, True, 1, watched.randomness(1))
    return judge(watched, [view], True).mu


@pytest.mark.parametrize("name", METHODS)
def test_the_canary_costs_no_more_than_is_paid_for(name: str) -> None:
    """By arithmetic, in one run of each trust model."""
    for trust in (TRUSTED, DISTRIBUTED):
        least = 0.999 if name in FILLED else 0.4
        assert least * CLAIMED_MU < mu_of_one_run(setting(CLASSES, trust, METHODS[name])) <= CLAIMED_MU * (1 + 1e-9)


def plus_and_minus(self: ClassShares, margin: np.ndarray, label: np.ndarray, query: LeafQuery) -> ClippedRows:
    """One against the rest: a row is 1 in its class and -1 in all others, of length root K and not 1."""
    counts = np.ones((label.size, self.n_outputs), dtype=np.int64)
    counts[np.arange(label.size), label.astype(int)] = -1
    claimed = clip_class_rows(np.zeros((0, self.n_outputs)), np.zeros((0, 0)), 1.0, 1.0).sensitivity
    return ClippedRows(counts << GRID_BITS, claimed)


def uncut(self: SoftmaxWeights, values: np.ndarray) -> np.ndarray:
    result: np.ndarray = values[:, self.n_outputs :].sum(axis=1)
    return result


def of_one_class(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Plan noise for the Hessian of one class, and release the sum over all."""
    whole = SoftmaxWeights.__init__

    def begin(self: SoftmaxWeights, n_classes: int) -> None:
        whole(self, n_classes)
        self.largest_curvature = self.bounds.hessian

    monkeypatch.setattr(SoftmaxWeights, "__init__", begin)
    monkeypatch.setattr(SoftmaxWeights, "curvature", uncut)
    return setting(CLASSES, method=REFINED)


def test_faults_show_by_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the audits below must find in runs: each costs the canary more than is claimed."""
    with monkeypatch.context() as patch:
        patch.setattr(ClassShares, "row_statistics", plus_and_minus)
        assert mu_of_one_run(setting(CLASSES, method=METHODS["averaging"])) == pytest.approx(2 * CLAIMED_MU, rel=1e-3)
    with monkeypatch.context() as patch:
        assert mu_of_one_run(of_one_class(patch)) > 1.5 * CLAIMED_MU


@pytest.mark.slow
@pytest.mark.parametrize("trust", [TRUSTED, DISTRIBUTED], ids=["trusted", "distributed"])
def test_shares_of_classes_keep_their_promise(trust) -> None:
    assert_sound_and_tight(audit(setting(CLASSES, trust, METHODS["averaging"]), N_RUNS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averaged histograms", "histograms", "refined"])
def test_greedy_and_refined_trees_keep_their_promise(name: str) -> None:
    found = measured_mu(audit(setting(CLASSES, TRUSTED, METHODS[name]), N_RUNS))
    assert CLAIMED_MU / 4 < found <= CLAIMED_MU


@pytest.mark.slow
def test_half_the_noise_of_histograms_is_caught() -> None:
    """Of the vectors that fill their sensitivity."""
    watched = setting(CLASSES, TRUSTED, METHODS["averaged histograms"], server_noise=half_noise_at_server)
    assert measured_mu(audit(watched, N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_classes_coded_against_the_rest_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassShares, "row_statistics", plus_and_minus)
    assert measured_mu(audit(setting(CLASSES, method=METHODS["averaging"]), N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_the_hessian_bound_of_one_class_for_the_sum_of_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_mu(audit(of_one_class(monkeypatch), N_RUNS)) > CLAIMED_MU


@pytest.mark.slow
def test_histograms_of_vectors_that_are_not_shortened_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for 0.85, and rows of up to sqrt(2)."""
    watched = setting(CLASSES, method=LONG_STEPS_OF_CLASSES)
    bound = SoftmaxWeights(4).sensitivity(LONG_STEPS_OF_CLASSES.query).bound
    monkeypatch.setattr(
        leaf_weights,
        "clip_class_rows",
        lambda g, h, length, weight, norm: announced(clip_class_rows(g, h, 2.0, weight, norm=norm), bound),
    )
    assert measured_mu(audit(watched, N_RUNS_FOR_ROOT_2)) > CLAIMED_MU
