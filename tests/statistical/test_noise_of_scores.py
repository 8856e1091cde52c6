"""The stated noise of scores is that of trainings with other noise: intervals of 95 % hold 93 to 97 % of scores.

Table and structure stay, the mechanisms of the product draw. Leaves of hundreds of rows; small ones are told apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dp_components.leaf_noise
from dp_components.events import Release
from dp_components.leaf_weights import CLIPPED_AT
from dp_components.mechanisms import NoiseShares, add_noise
from dp_components.sensitivity import Sensitivity
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.kinds.private_trees.forest import ForestGrower, GrownTree, finished_model
from nvflare_plugins.kinds.private_trees.methods import (
    DEFAULT_2026_12,
    CandidateSource,
    Interactions,
    Method,
    dp_tr_newton,
)
from nvflare_plugins.kinds.private_trees.plan import OwnRows, PrivateTreesPlan, Trust
from nvflare_plugins.kinds.private_trees.planner import leaf_noise
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.scoring.noise import NoiseOfScores
from nvflare_plugins.xgb.continuation import with_clipping
from nvflare_plugins.xgb.model_json import with_positive_covers
from tests.support.private_simulation import MechanismSums
from tests.support.private_trees import plan_with
from tests.support.seeded_randomness import SeededRandomness

N_TRAININGS, N_ASKED, N_SITES, MU = 24, 3, 3, 0.25
FIXED = replace(
    DEFAULT_2026_12, candidates=CandidateSource.UNIFORM, interactions=Interactions.ALTERNATING, n_trees=16, depth=3
)
"""The default with a structure that follows from the seed alone."""
METHODS = {
    "default": FIXED,
    "batches": replace(FIXED, batch_size=4, learning_rate=0.8),
    "newton": replace(dp_tr_newton(16), depth=3),
}
N_ROWS = 4_000
SHARES = Trust(NoiseShares(N_SITES, 1))


def table(n_rows: int) -> OwnRows:
    rng = np.random.default_rng(4)
    columns = rng.uniform(-1, 1, size=(3, n_rows)).astype(np.float32)
    odds = 1.5 * columns[0] + columns[1] * columns[2]
    return OwnRows(columns, (rng.random(n_rows) < 1 / (1 + np.exp(-odds))).astype(np.float32))


def plan_of(method: Method, trust: Trust = SHARES, mu: float = MU) -> PrivateTreesPlan:
    return replace(plan_with(method, [FeatureBounds(-1, 1)] * 3, mu, trust), feature_names=("a", "b", "c"))


def exact(sums: np.ndarray, sensitivity: Sensitivity, multiplier: float) -> Release:
    return Release(sums, add_noise(sums, sensitivity, multiplier).event)


def drawn(seed: int, trust: Trust):
    """Return the server's noise, or that of all sites' shares."""
    randomness = SeededRandomness(seed)

    def mechanism(sums: np.ndarray, sensitivity: Sensitivity, multiplier: float) -> Release:
        for _ in range(N_SITES if trust.shares else 1):
            release = add_noise(sums, sensitivity, multiplier / trust.noise_factor, randomness, trust.n_honest)
            sums = release.value
        return release

    return mechanism


def trained(plan: PrivateTreesPlan, rows: OwnRows, mechanism) -> FinishedModel:
    trees: list[GrownTree] = []
    ForestGrower(plan, rows, MechanismSums(plan, mechanism)).run(lambda n: None, lambda n, grown: trees.extend(grown))
    model = with_positive_covers(finished_model(trees, plan))
    return FinishedModel(with_clipping(model, CLIPPED_AT) if plan.method.query.is_clipped else model, "model.json")


def coverage(plan: PrivateTreesPlan, rows: OwnRows, n_trainings: int = N_TRAININGS) -> float:
    """Return how many scores of noised trainings have the noiseless one in their interval."""
    asked = np.random.default_rng(5).uniform(-1, 1, size=(200, 3)).astype(np.float32)
    models = [trained(plan, rows, drawn(seed, plan.trust)) for seed in range(n_trainings)]
    scores = np.stack([model.predict(asked, output_margin=True) for model in models])
    wanted = trained(plan, rows, exact).predict(asked, output_margin=True)
    stated = [NoiseOfScores(model, leaf_noise(plan, b"")).deviations(asked) for model in models[:N_ASKED]]
    return float(np.mean(np.abs(scores - wanted) < 1.96 * np.mean(stated, axis=0)))


@pytest.mark.parametrize(
    ("name", "trust", "n_rows"),
    [
        ("default", Trust(), N_ROWS),
        ("default", SHARES, N_ROWS),
        ("batches", SHARES, N_ROWS),
    ],
)
def test_intervals_hold_what_they_say(name: str, trust: Trust, n_rows: int) -> None:
    assert 0.93 < coverage(plan_of(METHODS[name], trust), table(n_rows)) < 0.97


def test_without_what_later_trees_take_back_they_would_be_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dp_components.leaf_noise.LeafMaking, "slopes", lambda self, margin: (0 * margin, np.ones(margin.size))
    )
    assert coverage(plan_of(METHODS["default"]), table(N_ROWS)) > 0.975


def test_a_model_of_noise_alone_has_a_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "with_positive_covers", lambda model: model)
    plan = plan_of(METHODS["default"], mu=0.0005)
    model = trained(plan, table(300), drawn(1, SHARES))
    covers = [tree["sum_hessian"][0] for tree in model.document()["learner"]["gradient_booster"]["model"]["trees"]]
    assert min(covers) < 0 < max(covers), "noise has left some trees fewer rows than none"
    of_sample = NoiseOfScores(model, leaf_noise(plan, b"")).of_sample
    assert np.isfinite(of_sample).all() and (of_sample > 0).all()
