"""The plan of private trees: what they spend, how much noise that means, and what it may cost a model."""

from __future__ import annotations

import dataclasses
import math

from dp_components.accounting import compose
from dp_components.leaf_weights import TWO_CLASSES
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import (
    NOT_TWO_CLASSES,
    ExpectedLoss,
    Fit,
    Noise,
    Plan,
    PlanRequest,
    advise,
    expected_loss,
    shown_lines,
    warnings,
)
from nvflare_plugins.base.formatting import human_number
from nvflare_plugins.data.labels import words_of_label
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.methods import Method, SplitMethod
from nvflare_plugins.kinds.private_trees.noise_of_others import noise_at_site
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan
from nvflare_plugins.kinds.private_trees.summary import lines, summarise

NO_ROWS = "not estimated: it depends on the number of all sites' rows; give --rows where that is public"
OURS = Fit(4.50, 0.584, (0.0009, 1.26), 0.97)
"""The defaults and few_rounds: random trees with paid candidates and a ridge in proportion to the noise."""
PUBLISHED = Fit(25.4, 0.648, (0.005, 1.74), 0.90)
"""Other random trees."""
GREEDY = (
    "not estimated: a formula was off by 26 points of a hundred on average on tables to which it was not fitted. Of 14 "
    "tables half lost more than 63 % of what XGBoost's AUC has above 0.5 at epsilon 0.5 and 1, 43 % at 4"
)
PURE = (
    "not estimated: the formula is of Gaussian noise. Five tables of 14,000 to 32,000 rows lost 5 to 44 % of what "
    "XGBoost's AUC has above 0.5 at epsilon 1, 3 to 31 % at 4 and 3 to 27 % at 10"
)


def plan(request: PlanRequest, job: PrivateTreesJob) -> Plan:
    """Return the plan of private trees. Raises: ConfigurationError: its noise needs other sites than these."""
    if job.noise and request.policy is None:
        raise ConfigurationError(
            "the price of the job's noise follows from the files of its plugin: plan at a site whose policy names it"
        )
    others = None if request.policy is None else noise_at_site(request.policy, job)
    job_plan = JobPlan.of(job, request.sites, (), others)
    summary, method = summarise(job_plan), job_plan.training.method
    of_row = compose(job_plan.releases.events)
    epsilon = summary.epsilon_after_rounds[-1]
    rows = job.n_rows if request.rows is None else request.rows
    of_label = {} if job.label_bounds is None else {words_of_label(job.label): job.label_bounds}
    bounds = {**job.feature_bounds, **of_label}
    advice = advise(
        request,
        job.data_set,
        of_row.for_person(job.rows_per_person),
        of_row.for_person,
        noise=_of_mean_leaf(rows, method.depth, summary.rows_to_hear),
        expected=of_private_trees(job_plan.training, rows, request.base_rate),
        warned=warnings(epsilon, job.at_delta, rows, bounds),
    )
    text = "\n".join([*lines(summary), shown_lines(advice.shown)])
    return Plan({**dataclasses.asdict(summary), **advice.figures}, text)


def of_private_trees(plan: PrivateTreesPlan, rows: int | None, base_rate: float | None) -> ExpectedLoss:
    """Return the expected loss of private trees.

    Args:
        rows: of all sites together, if public.
        base_rate: share of one of the two classes, if public.
    """
    method = plan.method
    if plan.target is not TWO_CLASSES:
        return ExpectedLoss(NOT_TWO_CLASSES)
    if method.split_method is not SplitMethod.TOTALLY_RANDOM:
        return ExpectedLoss(GREEDY)
    if method.is_pure:
        return ExpectedLoss(PURE)
    if rows is None:
        return ExpectedLoss(NO_ROWS)
    return expected_loss(_fit_of(method), noise_over_signal(plan, rows, base_rate))


def noise_over_signal(plan: PrivateTreesPlan, rows: int, base_rate: float | None) -> float:
    """Return x of trees on noised sums; without a base rate the classes count as equally frequent."""
    b = 0.5 if base_rate is None else base_rate
    noise = plan.leaf_noise[0] / math.sqrt(plan.method.n_trees)
    return math.ldexp(noise, plan.method.depth) / (rows * math.sqrt(b * (1 - b)))


def _fit_of(method: Method) -> Fit:
    return OURS if method.candidates.is_paid and method.noise_ridge > 0 else PUBLISHED


def _of_mean_leaf(rows: int | None, depth: int, rows_to_hear: float) -> Noise:
    """Return the noise on G over the largest G of a mean leaf, in which all of its rows agree."""
    if rows is None:
        return {}, "give --rows, where the number of all sites' rows is public, to have it told"
    of_leaf = rows / 2**depth
    ratio = rows_to_hear / of_leaf
    text = (
        f"a mean leaf has {human_number(of_leaf, 4)} of {rows:,} rows: its noise is {human_number(ratio, 2)} times its "
        f"largest possible sum, and {human_number(10 * ratio, 2)} times that of rows of which 55 in a hundred agree; "
        "the trees together average it"
    )
    return {"largest_sum_of_mean_leaf": ratio}, text
