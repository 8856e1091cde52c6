from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.growth.objectives import RESIDUAL_ROOTS, FirstEstimate, Objective, adaptive_leaves
from nvflare_plugins.wire.envelope import BaseScoreSource
from nvflare_plugins.wire.sums import Family
from nvflare_plugins.xgb.cuts import quantile
from nvflare_plugins.xgb.objectives import OBJECTIVES
from nvflare_plugins.xgb.parameters import check_parameters
from tests.support.survival import label_of

OF_ITS_OWN = {
    "multi:softprob": {"num_class": 3},
    "multi:softmax": {"num_class": 3},
    "reg:quantileerror": {"quantile_alpha": 0.7},
}
N = 4_000
_STEPS = 2.0**30


def _objective(name: str, arithmetic: str = "3.4", **more: object) -> tuple[Objective, BaseScoreSource]:
    label = label_of({"objective": name})
    parameters = check_parameters({"objective": name, **OF_ITS_OWN.get(name, {}), **more}, ["a"], [], label=label)
    return Objective.of_job(parameters, arithmetic), parameters.objective.base_score_source


def _labels(objective: Objective) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    labels = (rng.random(N) + 0.01).astype(np.float32)
    if objective.n_outputs > 1:
        labels = rng.integers(0, 3, N).astype(np.float32)
    elif objective.name.startswith(("binary", "reg:logistic")):
        labels = (labels < 0.3).astype(np.float32)
    return labels, (rng.random(N) + 0.1).astype(np.float32)


def _on_grid(quantity: str, values: np.ndarray) -> np.ndarray:
    return np.rint(values * _STEPS).astype(np.int64)


def _estimated(objective: Objective, source: BaseScoreSource, parts: Sequence[np.ndarray], rows: tuple) -> np.ndarray:
    labels, weights = rows
    estimates = [FirstEstimate(objective, source, len(parts)) for _ in parts]
    while estimates[0].due:
        each = [one.local(labels[part], weights[part], _on_grid) for one, part in zip(estimates, parts, strict=True)]
        assert all(one.dtype == np.int64 and one.size == len(estimates[0].due) for one in each)
        pooled = sum(each).astype(np.float64) / _STEPS
        for estimate in estimates:
            estimate.take(pooled)
    scores = [estimate.base_score() for estimate in estimates]
    assert all(score.tobytes() == scores[0].tobytes() for score in scores)
    assert scores[0].dtype == np.float32 and scores[0].shape == (objective.n_outputs,)
    return scores[0]


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not name.startswith(("reg:quantile", "rank:"))])
def test_sums_of_rows_give_one_base_score_for_every_partition(name: str) -> None:
    objective, source = _objective(name)
    rows = _labels(objective)
    shuffled = np.random.default_rng(1).permutation(N)
    one = _estimated(objective, source, [np.arange(N)], rows)
    for n_parts in (2, 7):
        assert _estimated(objective, source, np.array_split(shuffled, n_parts), rows).tobytes() == one.tobytes()


def test_medians_and_quantiles_are_means_of_the_sites() -> None:
    halves = [np.arange(1000), np.arange(1000, N)]
    absolute, source = _objective("reg:absoluteerror", "3.3")
    labels, weights = _labels(absolute)
    of_each = [float(quantile(labels[half], weights[half], 0.5)) for half in halves]
    sizes = [float(weights[half].astype(np.float64).sum()) for half in halves]
    score = _estimated(absolute, source, halves, (labels, weights))
    assert score[0] == pytest.approx(np.average(of_each, weights=sizes), rel=1e-6)
    pinball, source = _objective("reg:quantileerror", "3.4")
    of_each = [float(quantile(labels[half], weights[half], 0.7)) for half in halves]
    assert FirstEstimate(pinball, source, 2).needs_whole_site
    assert _estimated(pinball, source, halves, (labels, weights))[0] == pytest.approx(np.mean(of_each), rel=1e-6)


def test_what_is_due_says_what_the_numbers_are() -> None:
    smooth = FirstEstimate(*_objective("reg:absoluteerror", "3.4"), 2)
    asked = []
    while smooth.due:
        asked.append(smooth.due)
        smooth.take(np.ones(len(smooth.due)))
    pairs = (Family.GRADIENTS, Family.HESSIANS)
    assert asked == [(Family.LABELS, Family.WEIGHTS), (RESIDUAL_ROOTS,), pairs]
    assert FirstEstimate(*_objective("multi:softprob"), 2).due == (Family.WEIGHTS,) * 3
    assert FirstEstimate(*_objective("binary:logistic", scale_pos_weight=2.0), 2).due == pairs


def test_sums_that_were_not_asked_for_and_scores_before_their_time_are_refused() -> None:
    estimate = FirstEstimate(*_objective("binary:logistic"), 2)
    with pytest.raises(ProtocolError, match="not all sums yet"):
        estimate.base_score()
    with pytest.raises(ProtocolError, match="other sums than it asked for"):
        estimate.take(np.ones(3))
    estimate.take(np.array([1.0, 4.0]))
    assert estimate.base_score().tolist() == [0.25]
    with pytest.raises(ProtocolError, match="other sums than it asked for"):
        estimate.take(np.ones(2))


@pytest.mark.parametrize("name", ["binary:logistic", "multi:softprob"])
def test_rows_without_any_weight_have_no_mean(name: str) -> None:
    objective, source = _objective(name)
    estimate = FirstEstimate(objective, source, 2)
    estimate.take(np.zeros(len(estimate.due)))
    with pytest.raises(ConfigurationError, match="no row has a weight above 0"):
        estimate.base_score()


@pytest.mark.parametrize(("name", "arithmetic"), [("reg:absoluteerror", "3.2"), ("reg:quantileerror", "3.2")])
def test_a_site_without_rows_adds_nothing_to_a_quantile(name: str, arithmetic: str) -> None:
    estimate = FirstEstimate(*_objective(name, arithmetic), 2)
    empty = np.empty(0, np.float32)
    assert not estimate.local(empty, None).any() and not estimate.local(empty, empty).any()


def test_adaptive_leaves_are_means_of_the_sites_that_have_rows_there() -> None:
    n_valid, pooled = np.array([2, 1, 0]), np.array([12, 10, 0], np.float32)
    grown, rate = np.array([5, 6, 7], np.float32), np.float32(0.5)
    leaves = adaptive_leaves(n_valid, pooled, grown, rate)
    assert leaves.tolist() == [3.0, 5.0, 3.5] and leaves.dtype == np.float32
