"""A second opinion on a plan from an independent accountant, autodp, before a job starts.

Only autodp's exact parts are asked: ``ComposeGaussian`` with the analytic epsilon of a Gaussian (and sums of pure
epsilons need no library). Its generic composition falls back to Renyi bounds, and is not used. Its word can stop a job;
it never enlarges a budget, because what is charged is always our own figure.

autodp takes about a second to import, so it is imported when asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

from dp_components.accounting.composition import compose, count_events
from dp_components.errors import SecondOpinionDiffers
from dp_components.events import DiscreteGaussianEvent, Event, GaussianEvent

TOLERANCE = 1e-9
"""Relative. The two closed forms were seen to agree to 4e-12 for epsilon from 0.01 to 20."""


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """Two accountants on the Gaussian part of a plan; ``ours`` is what counts."""

    delta: float
    ours: float
    autodp: float


def check_second_opinion(events: Event | Iterable[Event], delta: float) -> SecondOpinion | None:
    """Compare our epsilon of a plan's Gaussian part with autodp's.

    Args:
        events: The plan.
        delta: At which epsilon is compared.

    Returns:
        Both figures; None if the plan has no Gaussian part, of which there are no two opinions.

    Raises:
        SecondOpinionDiffers: They disagree beyond rounding, or autodp is not installed or fails.
        UnknownEvent: The plan cannot be priced.
    """
    counts = count_events(events)
    gaussians = [(e, n) for e, n in counts.items() if isinstance(e, GaussianEvent | DiscreteGaussianEvent)]
    if not gaussians:
        compose(events)
        return None
    # Their slack is ours alone: autodp does not know discrete noise.
    continuous = compose([GaussianEvent(1 / math.sqrt(compose(events).mu_squared), gaussians[0][0].relation)])
    ours = continuous.epsilon(delta)
    theirs = _autodp_epsilon([(event.noise_multiplier, count) for event, count in gaussians], delta)
    if not abs(ours - theirs) <= TOLERANCE * max(ours, 1e-3):
        raise SecondOpinionDiffers(
            f"Two accountants disagree on this plan: epsilon {ours:.9g} (ours) and {theirs:.9g} (autodp) at delta "
            f"{delta:g}. The job does not start."
        )
    return SecondOpinion(delta, ours, theirs)


def _autodp_epsilon(gaussians: list[tuple[float, int]], delta: float) -> float:
    try:
        mechanisms = import_module("autodp.mechanism_zoo")
        transformers = import_module("autodp.transformer_zoo")
        parts = [
            mechanisms.ExactGaussianMechanism(sigma=multiplier, name=f"query{i}")
            for i, (multiplier, _) in enumerate(gaussians)
        ]
        whole = transformers.ComposeGaussian()(parts, [count for _, count in gaussians])
        return float(whole.get_approxDP(delta))
    except (ImportError, ArithmeticError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise SecondOpinionDiffers(
            f"The second accountant (autodp) gave no figure ({type(error).__name__}). The job does not start: install "
            "autodp 0.2.3.1."
        ) from None
