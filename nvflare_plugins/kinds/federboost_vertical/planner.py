"""The plan of a FederBoost job: what one passive party spends and sends."""

from __future__ import annotations

from dataclasses import replace

from dp_components.accounting import PrivacyCost
from dp_components.bucket_ldp import wrong_bucket_rate
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.attempt.plan_advice import (
    BETWEEN_ROWS,
    ExpectedLoss,
    Fit,
    advise,
    expected_loss,
    shown_lines,
    warnings,
)
from nvflare_plugins.base.formatting import human_bytes
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob, Description, Unit
from nvflare_plugins.kinds.federboost_vertical.payment import bucket_epsilon, edges_epsilon_of

BUCKETS = Fit(0.401, 0.362, (0.01, 106.0), 0.86)
"""FederBoost, all columns randomised."""


EQUAL_WIDTHS = "public: as described, or equal widths between bounds"


def plan(request: PlanRequest, job: BucketJob) -> Plan:
    """Return what one passive party of a FederBoost job spends and sends; --features counts its columns.

    Raises:
        ConfigurationError: no number of features, or too many for epsilon.
    """
    if job.buckets_from is not None:
        paid = f"job {job.buckets_from} has paid for the buckets: this one sends none and is charged nothing"
        return Plan({"epsilon": 0.0, "bytes_sent": 0}, shown_lines({"privacy": paid}))
    if request.features is None or request.features < 1:
        raise ConfigurationError("give --features, the columns of a passive party: its noise depends on their number")
    described = _described(request, job)
    for_edges = job.most_for_edges if described is None else edges_epsilon_of(job, described.features)
    per_value = bucket_epsilon(job, request.features, for_edges)
    of_row = job.epsilon if job.protected is Unit.ROW else job.epsilon * request.features
    wrong = wrong_bucket_rate(job.n_buckets, per_value)
    sent = None if request.rows is None else request.rows * request.features
    kept = (1 - wrong * job.n_buckets / (job.n_buckets - 1)) ** 2 if job.n_buckets > 1 else 1.0
    words = f"counts over randomised buckets tell as much as {100 * kept:.3g} % of the rows sent in clear"
    advice = advise(
        request,
        job.data_set,
        PrivacyCost(pure_epsilon=of_row),
        PrivacyCost(pure_epsilon=job.epsilon).for_person,
        noise=({"rows_that_count": kept}, words),
        expected=of_buckets(kept),
        warned=[*warnings(of_row, 0.0, request.rows, _bounds(described)), *_of_equal_widths(job, described)],
        guessed=BETWEEN_ROWS,
    )
    figures = {"epsilon": job.epsilon, "unit": job.unit, "epsilon_of_a_value": per_value, "epsilon_of_a_row": of_row}
    figures |= {"epsilon_of_edges": for_edges, "wrong_bucket_rate": wrong, "bytes_sent": sent, **advice.figures}
    shown = {
        "privacy": f"epsilon {job.epsilon:g} for a {job.unit}: {per_value:.3g} for each value, {of_row:.3g} for a row "
        f"of {request.features} features",
        "edges": f"epsilon {for_edges:g} of it pays for buckets of about equal counts" if for_edges else EQUAL_WIDTHS,
        "noise": f"{100 * wrong:.1f} % of the values are sent in a wrong one of {job.n_buckets} buckets",
    }
    if sent is not None:
        shown["sent once"] = f"{human_bytes(sent)} by a passive party with {request.rows:,} rows"
    return Plan(figures, shown_lines({**shown, **advice.shown}))


def _described(request: PlanRequest, job: BucketJob) -> Description | None:
    """Return a passive party's own description, which is looked at where its workspace is named."""
    return None if request.policy is None else Description.read(request.policy.input_file(job.description))


def _bounds(described: Description | None) -> dict[str, tuple[float, float]]:
    if described is None:
        return {}
    pairs = zip(described.names, described.features, strict=True)
    return {name: (of.low, of.high) for name, of in pairs if isinstance(of, FeatureBounds)}


def _of_equal_widths(job: BucketJob, described: Description | None) -> list[str]:
    """Warn of public edges, unless the party is known to describe no feature by its bounds."""
    if job.most_for_edges > 0 or (described is not None and not _bounds(described)):
        return []
    return [
        "edges_epsilon is 0: equal widths put nearly all rows of a column with a long tail into one bucket. On "
        "Give-Me-Some-Credit that took the AUC from .851 to .797. Leave edges_epsilon out, which pays a tenth of "
        "epsilon, or describe such columns by edges"
    ]


def of_buckets(kept: float) -> ExpectedLoss:
    """Return the expected loss of randomised buckets. Args: kept: share of rows that counts over them are worth."""
    more = (
        "as if all columns were buckets; own columns of the active party lose nothing, and columns of which equal "
        "widths put nearly all rows into one bucket lose nearly all"
    )
    expected = expected_loss(BUCKETS, buckets_over_signal(kept))
    return expected if expected.seldom is None else replace(expected, text=f"{expected.text}; {more}")


def buckets_over_signal(kept: float) -> float:
    """Return x of randomised buckets."""
    return 1 / kept - 1
