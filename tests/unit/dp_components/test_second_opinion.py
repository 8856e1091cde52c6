"""The second accountant agrees on sound plans, and stops a job when it does not, or cannot be asked."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

from dp_components import accounting
from dp_components.accounting import check_second_opinion
from dp_components.errors import SecondOpinionDiffers, UnknownEvent
from dp_components.events import DisjointPartEvent, GaussianEvent, LaplaceEvent, NeighbouringRelation, RepeatedEvent
from dp_components.mechanisms import gaussian_event
from dp_components.sensitivity import clip_logistic_rows
from tests.support.calibration import noise_multiplier_for

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW


def autodp_epsilon(gaussians: list[tuple[float, int]], delta: float) -> float:
    """Return what a third accountant says, which adds a folder to the path of modules when it is imported."""
    before = list(sys.path)
    zoo, transformers = import_module("autodp.mechanism_zoo"), import_module("autodp.transformer_zoo")
    sys.path[:] = before
    parts = [zoo.ExactGaussianMechanism(sigma=s, name=f"query{i}") for i, (s, _) in enumerate(gaussians)]
    return float(transformers.ComposeGaussian()(parts, [count for _, count in gaussians]).get_approxDP(delta))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 8.0])
@pytest.mark.parametrize("n_queries", [1, 200, 12000])
def test_agreement(epsilon: float, n_queries: int) -> None:
    sensitivity = clip_logistic_rows([0.5], [0.25]).sensitivity
    multiplier = noise_multiplier_for(n_queries, epsilon, 1e-6)
    plan = [RepeatedEvent(gaussian_event(32, sensitivity, multiplier), n_queries), LaplaceEvent(0.1, ROW)]
    opinion = check_second_opinion(plan, 1e-6)
    assert opinion is not None
    assert opinion.ours == pytest.approx(epsilon, rel=1e-4)
    assert opinion.theirs == pytest.approx(opinion.ours, rel=1e-10)
    assert opinion.composed == pytest.approx(opinion.ours, rel=1e-3) and opinion.composed > opinion.ours * (1 - 1e-10)
    assert autodp_epsilon(accounting._gaussians(accounting.count_events(plan)), 1e-6) == pytest.approx(
        opinion.ours, rel=1e-10
    )


def test_agreement_on_disjoint_parts() -> None:
    """Of each partition the costliest part counts, for both accountants."""
    noises = {("a", 0): 9.0, ("a", 1): 5.0, ("b", 0): 7.0}
    plan = [DisjointPartEvent(GaussianEvent(noise, ROW), *part) for part, noise in noises.items()]
    opinion = check_second_opinion([*plan, GaussianEvent(6.0, ROW)], 1e-6)
    assert opinion is not None and opinion.ours > 0


@pytest.mark.parametrize(
    ("closed", "composed"),
    [
        (1 + 3e-9, 1),
        (1 - 3e-9, 1),
        (0.5, 0.5),
        (1.1, 1.1),
        (1, 1.02),
        (1, 1 - 3e-9),
        (float("nan"), 1),
        (1, float("inf")),
    ],
)
def test_disagreement_in_either_direction_stops_the_job(
    closed: float, composed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = accounting._opinions

    def other(*arguments: Any) -> tuple[float, float]:
        return closed * honest(*arguments)[0], composed * honest(*arguments)[0]

    monkeypatch.setattr(accounting, "_opinions", other)
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        check_second_opinion(GaussianEvent(3.0, ROW), 1e-6)


def test_a_sum_that_is_composed_wrongly_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library composes by itself: what counts a query once too few shows, also where both closed forms agree."""
    plan = [RepeatedEvent(GaussianEvent(30.0, ROW), 200), GaussianEvent(9.0, ROW)]
    right = accounting._gaussians
    assert check_second_opinion(plan, 1e-6) is not None
    monkeypatch.setattr(accounting, "_gaussians", lambda counts: [(s, n - (n > 1) * 10) for s, n in right(counts)])
    with pytest.raises(SecondOpinionDiffers, match="disagree"):
        check_second_opinion(plan, 1e-6)


def test_no_second_accountant_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(SecondOpinionDiffers, match="install 'dp-accounting"):
        check_second_opinion(GaussianEvent(3.0, ROW), 1e-6)


def test_plans_without_gaussians_need_none_but_must_be_priced() -> None:
    assert check_second_opinion([LaplaceEvent(1.0, ROW)], 1e-6) is None
    with pytest.raises(UnknownEvent):
        check_second_opinion([object()], 1e-6)  # type: ignore[list-item]
