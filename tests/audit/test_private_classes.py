"""The privacy that the papers' methods claim on several classes, attacked as in test_private_trees.py.

Histograms of vectors, shares of classes and Hessian sums of all classes are extensions of ours; each planted fault is
one that a slip in making one of them would have made.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dp_components import leaf_weights
from dp_components.leaf_weights import ClassShares, LeafQuery, SoftmaxWeights
from dp_components.sensitivity import GRID_BITS, ClippedRows, clip_class_rows
from nvflare_plugins.kinds.private_trees.methods import (
    CandidateSource,
    Method,
    SplitMethod,
    dp_gbm,
    dp_rf,
    dp_tr_newton,
)
from tests.audit.test_private_labels import CLASSES, announced, setting
from tests.audit.test_private_trees import (
    CLAIMED_MU,
    DISTRIBUTED,
    HISTOGRAMS,
    N_RUNS,
    N_RUNS_FOR_ROOT_2,
    TRUSTED,
    assert_sound_and_tight,
    half_noise_at_server,
    measured_mu,
)
from tests.support.audit import Setting, audit, judge, run_attempt

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
LONG_STEPS = replace(HISTOGRAMS, query=LeafQuery.CLIPPED, learning_rate=2.0, n_trees=10)


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
    watched = setting(CLASSES, method=LONG_STEPS)
    bound = SoftmaxWeights(4).sensitivity(LONG_STEPS.query).bound
    monkeypatch.setattr(
        leaf_weights,
        "clip_class_rows",
        lambda g, h, length, weight, norm: announced(clip_class_rows(g, h, 2.0, weight, norm=norm), bound),
    )
    assert measured_mu(audit(watched, N_RUNS_FOR_ROOT_2)) > CLAIMED_MU
