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
from dp_components.leaf_weights import Number, SeveralClasses, Target, Times
from dp_components.sensitivity import Norm, Sensitivity, clip_class_rows, clip_rows
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.growth.survival import AftLoss
from nvflare_plugins.kinds.private_trees import noisy_sums
from nvflare_plugins.kinds.private_trees.methods import Method
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan, ReleasePlan, Trust
from tests.audit.test_private_trees import (
    BOUNDS,
    CANARY_SITE,
    CLAIMED_MU,
    CLIPPED,
    DELTA,
    DISTRIBUTED,
    EPSILON,
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
