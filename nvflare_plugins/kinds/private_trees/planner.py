"""A private job in figures, from its plan alone: for ``veilboost plan``, the report and the log.

The plan of private trees: what they spend, how much noise that means, and what it may cost a model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import compose
from dp_components.batched_updates import tree_scale
from dp_components.leaf_noise import NORMAL_95
from dp_components.leaf_weights import TWO_CLASSES, Number, SeveralClasses, Target, Times, real_noise_std
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
from nvflare_plugins.base.formatting import human_bytes, human_number
from nvflare_plugins.data.labels import words_of_label
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.methods import SplitMethod, WeightUpdate
from nvflare_plugins.kinds.private_trees.noisy_sums import noise_at_site
from nvflare_plugins.kinds.private_trees.plan import PrivateTreesPlan
from nvflare_plugins.pages.run_record import LeafNoise, PointCurve, ReportSection

COMPUTATIONAL = (
    "Epsilon without a delta is kept by the sum, and so by all that follows from it, whoever reads it. That the server "
    "sees no more than the sum is a promise of the masks, which is computational."
)


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a job costs and how much noise it means, before it runs.

    Attributes:
        epsilon_after_rounds: epsilon at ``delta`` after each boosting round; the last is the job's whole price.
        label: what the label is, in words.
        leaf_noise: standard deviation of the noise on a leaf's sums (G, H), of each class. Units: of g and h.
        rows_to_hear: rows whose gradients must point the same way for a leaf's G to exceed its noise: undecided ones,
            or, of numbers, those whose residuals are cut.
        cut_at, label_noise: of numbers, where residuals are cut and the noise on their sum in a leaf; 0 for classes.
            Units: of the label, or of the logarithms of times.
        n_messages, n_bytes: messages of sums, and what a site sends in them; it receives as many bytes.
    """

    method: str
    trust: str
    label: str
    epsilon_after_rounds: tuple[float, ...]
    delta: float
    leaf_noise: tuple[float, float]
    rows_to_hear: float
    cut_at: float
    label_noise: float
    ridge: float
    n_trees: int
    n_rounds: int
    n_messages: int
    n_bytes: int
    is_of_times: bool = False


def summarise(plan: JobPlan) -> PlanSummary:
    """Return the figures of a plan. Costs about a millisecond a round; touches no data."""
    method = plan.training.method
    g, h = plan.training.leaf_noise
    target = plan.training.target
    is_number, unit = isinstance(target, (Number, Times)), plan.training.leaf_unit
    return PlanSummary(
        method.name,
        trust_text(plan),
        label_words(target),
        tuple(plan.epsilon_after_rounds()),
        plan.job.at_delta,
        (g, h),
        g if is_number else 2 * g,
        unit if is_number else 0.0,
        g * unit if is_number else 0.0,
        plan.training.ridge,
        method.n_trees,
        plan.releases.n_rounds,
        len(plan.releases.releases),
        plan.releases.n_bytes,
        isinstance(target, Times),
    )


def epsilon_text(epsilon: float, delta: float) -> str:
    """Say what is spent."""
    return f"epsilon {epsilon:.4g} at delta {delta:g}" if delta else f"pure epsilon {epsilon:.4g}, without a delta"


def label_words(target: Target) -> str:
    """Say what the label is."""
    if isinstance(target, Number):
        return f"a number from {target.bounds.low:g} to {target.bounds.high:g}; what lies outside counts as the bound"
    if isinstance(target, Times):
        return f"times from {target.bounds.low:g} to {target.bounds.high:g}; what lies outside counts as the bound"
    return f"one of {target.n_classes} classes" if isinstance(target, SeveralClasses) else "one of two classes"


def trust_text(plan: JobPlan) -> str:
    """Say who is trusted with what."""
    trust, what = plan.training.trust, plan.job.trust_model.description
    if trust.local_rows is not None:
        return (
            f"{what} A row's report, its leaf included, is hidden among all possible ones; the published baseline "
            "hides only the gradients. The number of rows of each site is public."
        )
    shares = trust.shares
    others = plan.releases.tree_noise.others
    if others is not None:
        return (
            f"{what} The noise is drawn by plugin {others.event.mechanism}; a query costs epsilon "
            f"{others.event.epsilon:.4g}, derived from the mass function that the plugin states."
        )
    if shares is None:
        return what
    of_sites = f"{what} {shares.n_sites} sites, {shares.n_colluders} of which may pool what they know."
    return f"{of_sites} {COMPUTATIONAL}" if plan.job.delta is None else of_sites


def lines(summary: PlanSummary) -> list[str]:
    """Return the figures as lines of text."""
    g, h = summary.leaf_noise
    heard = "undecided rows" if not summary.cut_at else "rows so far off"
    wide = "as logarithms of time" if summary.is_of_times else "wider bounds make both larger in proportion"
    cut = [
        f"                 residuals are cut at {human_number(summary.cut_at, 4)}, and the noise on their sum is "
        f"{human_number(summary.label_noise, 4)}: {wide}"
    ]
    return [
        f"method           {summary.method}: {summary.n_trees} trees in {summary.n_rounds} rounds",
        f"trust            {summary.trust}",
        f"label            {summary.label}",
        *(cut if summary.cut_at else []),
        f"privacy          {epsilon_text(summary.epsilon_after_rounds[-1], summary.delta)}",
        f"noise on a leaf  {human_number(g, 4)} on G, {human_number(h, 4)} on H (standard deviations); ridge "
        f"{human_number(summary.ridge, 4)}",
        f"                 about {summary.rows_to_hear:.0f} {heard} in a leaf outweigh it",
        f"sums             {summary.n_messages} messages, {human_bytes(summary.n_bytes)} from each site",
    ]


def leaf_noise(plan: PrivateTreesPlan, model: bytes) -> LeafNoise | None:
    """Return from what the noise of scores follows: of boosted random trees for two classes, whose leaves are noised.

    None of others: averaged leaves are cut at 0 and 1, a bias that no deviation tells. None where the last batch is
    smaller, too: its leaves have another scale.
    """
    method = plan.method
    batch = min(method.batch_size, method.n_trees)
    is_random = method.split_method is SplitMethod.TOTALLY_RANDOM
    is_boosted = method.weight_update is not WeightUpdate.AVERAGING
    if plan.target is not TWO_CLASSES or not is_random or not is_boosted or method.n_trees % batch:
        return None
    scale = tree_scale(method.learning_rate, batch) * plan.leaf_unit
    update, query = method.weight_update.value, method.query.name.lower()
    return LeafNoise(hashlib.sha256(model).hexdigest(), update, query, *plan.leaf_noise, plan.ridge, method.clip, scale)


def report_sections(
    plan: JobPlan, spent: float, budget_text: str, of_scores: NDArray[np.float64] | None = None
) -> tuple[ReportSection, ...]:
    """Return what a private job adds to the report.

    Args:
        spent: epsilon of all that the job has released at this site, at the job's delta.
        budget_text: the site's ledger in words.
        of_scores: deviations of scores by the noise, of rows drawn from what was released; None where not known.
    """
    summary = summarise(plan)
    noise = plan.releases.tree_noise
    largest = real_noise_std(noise.sensitivity, 1.0)[0]
    job, (g, h) = plan.job, summary.leaf_noise
    points = tuple((float(number + 1), epsilon) for number, epsilon in enumerate(summary.epsilon_after_rounds))
    rows = (
        ("method", summary.method),
        ("trust model", summary.trust),
        ("label", summary.label),
        ("protected", f"all rows of one person, up to {job.rows_per_person}, added or removed"),
        ("spent by this job", epsilon_text(spent, job.at_delta)),
        ("noise on a leaf's G", f"{human_number(g, 4)} (standard deviation; a row moves G by at most {largest:g})"),
        ("noise on a leaf's H", f"{human_number(h, 4)}"),
        ("ridge", f"{human_number(summary.ridge, 4)}"),
        *_of_scores(of_scores),
        ("trees, rounds, messages of sums", f"{summary.n_trees}, {summary.n_rounds}, {summary.n_messages}"),
    )
    paragraphs = (
        f"{summary.trust} What the job did not ask for is not in the model: inner nodes are sums of noisy leaves, the "
        "base score is a public constant, and no metric was computed.",
        "Runs with other sites or rows can be compared by no one beyond what the epsilons of both add up to, so the "
        f"registry against differencing has no part in this. {budget_text}",
    )
    return (
        ReportSection("Privacy", paragraphs, ("", ""), rows),
        ReportSection(
            "Privacy spent over rounds", curves=(PointCurve("epsilon", points),), x_label="round", y_label="epsilon"
        ),
    )


def _of_scores(deviations: NDArray[np.float64] | None) -> tuple[tuple[str, str], ...]:
    if deviations is None:
        return ()
    half, most = (human_number(float(of), 3) for of in NORMAL_95 * np.quantile(deviations, (0.5, 0.9)))
    words = f"{half} for half of the rows, {most} for nine of ten (95 %; the noise alone, not sampling or model error)"
    return (("score before the probability, ± from noise", words),)


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
    fit = OURS if method.candidates.is_paid and method.noise_ridge > 0 else PUBLISHED
    return expected_loss(fit, noise_over_signal(plan, rows, base_rate))


def noise_over_signal(plan: PrivateTreesPlan, rows: int, base_rate: float | None) -> float:
    """Return x of trees on noised sums; without a base rate the classes count as equally frequent."""
    b = 0.5 if base_rate is None else base_rate
    noise = plan.leaf_noise[0] / math.sqrt(plan.method.n_trees)
    return math.ldexp(noise, plan.method.depth) / (rows * math.sqrt(b * (1 - b)))


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
