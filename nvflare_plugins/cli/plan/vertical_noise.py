"""What the preset noised adds to the sums of each passive party, from the job and public numbers alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from dp_components.accounting.composition import PrivacyCost, compose
from dp_components.accounting.trade_off import TradeOff
from nvflare_plugins.cli.plan.choosing import BETWEEN_ROWS, Advice, NoiseToSignal, Person, trainings, warnings
from nvflare_plugins.cli.plan.expected_loss import NOISED, ExpectedLoss
from nvflare_plugins.formatting import human_number
from nvflare_plugins.vertical.job import VerticalJob
from nvflare_plugins.vertical.noised.plan import NoisePlan, plan_of
from nvflare_plugins.vertical.parameters import check_vertical_parameters
from nvflare_plugins.xgb.parameters import ALIASES

_NAMES_COLUMNS = ("interaction_constraints",)


def noise_plan(job: VerticalJob | None) -> NoisePlan | None:
    """Return the plan of a job in the preset noised; None for any other. Raises: ConfigurationError."""
    if job is None or not job.is_noised:
        return None
    free = {name: value for name, value in job.params.items() if ALIASES.get(name, name) not in _NAMES_COLUMNS}
    return plan_of(job, check_vertical_parameters(free, ["any"]))


def noise_lines(plan: NoisePlan, foreign: Sequence[int], n_rows: int) -> Iterator[str]:
    """Yield the noise in words, beside what a bin holds on average.

    Args:
        foreign: columns of each passive party.
    """
    yield ""
    again = f", {plan.n_repeats} may be paid for a second time after a loss" if plan.n_repeats else ""
    yield (
        f"preset noised, epsilon {plan.epsilon:g} at delta {plan.delta:g} for each passive party: "
        f"{plan.n_trees - plan.n_repeats} trees may use its columns, {plan.depth} levels each{again}; the rounds "
        "before (own_rounds) cost nothing"
    )
    for number, n_features in enumerate(foreign, 1):
        noise, rows = plan.of_party(n_features), n_rows / plan.n_bins
        yield (
            f"passive party {number}: at most {noise.features_per_tree} of {n_features} features a tree, "
            f"{plan.n_bins} bins; noise on a bin's sum of gradients "
            f"{human_number(plan.rows_of_noise(n_features), 4)} rows (standard deviation), where a bin of "
            f"the root holds about {human_number(rows, 4)} rows"
        )
    yield "given the bits of its splits, which are exact, counted and capped, and not in epsilon"


def noise_advice(arguments: argparse.Namespace, job: VerticalJob, plan: NoisePlan, foreign: Sequence[int]) -> Advice:
    """Return what helps a passive party to choose; of several, that with most columns.

    Raises:
        ConfigurationError: its budget cannot be looked at.
    """
    n_features = max(foreign)
    cost: PrivacyCost = compose(plan.of_party(n_features).whole)
    rows = arguments.rows / plan.n_bins
    ratio = plan.rows_of_noise(n_features) / rows
    text = f"the noise on a bin of the root is {human_number(ratio, 2)} times its largest possible sum of gradients"
    return Advice(
        Person.of(TradeOff.of(cost)),
        NoiseToSignal({"largest_sum_of_mean_root_bin": ratio}, text),
        ExpectedLoss(NOISED),
        trainings(arguments, job.data_set, cost.for_person),
        warnings(plan.epsilon, plan.delta, arguments.rows),
        f"{BETWEEN_ROWS}, the bits of its splits apart",
    )


def noise_json(plan: NoisePlan, foreign: Sequence[int]) -> dict[str, Any]:
    """Return the noise as JSON values. Units: rows with the largest gradient."""
    parties = [
        {"features_per_tree": plan.of_party(n).features_per_tree, "rows_of_noise": plan.rows_of_noise(n)}
        for n in foreign
    ]
    trees = {"trees": plan.n_trees - plan.n_repeats, "repeated_trees": plan.n_repeats}
    return {"epsilon": plan.epsilon, "delta": plan.delta, **trees, "parties": parties}
