"""A private job in figures, from its plan alone: for ``veilboost plan``, the report and the log."""

from __future__ import annotations

from dataclasses import dataclass

from dp_components.leaf_weights import Number, SeveralClasses, Target, Times, real_noise_std
from nvflare_plugins.base.formatting import human_bytes, human_number
from nvflare_plugins.kinds.private_trees.job import JobPlan
from nvflare_plugins.pages.run_record import PointCurve, ReportSection

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


def report_sections(plan: JobPlan, spent: float, budget_text: str) -> tuple[ReportSection, ...]:
    """Return what a private job adds to the report.

    Args:
        spent: epsilon of all that the job has released at this site, at the job's delta.
        budget_text: the site's ledger in words.
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
