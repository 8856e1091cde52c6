"""The plan of a selection: what a site sends, how long that takes, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator

from nvflare_plugins.attempt.plan import Plan, PlanRequest
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.kinds.profile.planner import count_messages
from nvflare_plugins.kinds.selection.job import Importance, SelectionJob
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.kinds.tuning.planner import bytes_before_rounds, check_rows, estimates_of, workload_of
from nvflare_plugins.pooled.plan import Planned, Workload, cost_of, training_messages
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind


def plan(request: PlanRequest, job: SelectionJob) -> Plan:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    rows, features = request.shape()
    features = features if job.features is None else len(job.features)
    check_rows(rows, job.folds)
    names = job.features or [f"f{place}" for place in range(features)]
    sizes = [*job.sizes(features), *([2 * features] * job.shadows)]
    names = [*names, *(f"shadow {place}" for place in range(features))]
    workloads = [workload_of(request, job.training(names[:size]), job.folds) for size in sizes]
    estimates, network = estimates_of(workloads, job.profile, request.network), request.network
    by_columns = [one.xgboost_s * size / features for one, size in zip(estimates, sizes, strict=True)]
    rounds_s = sum(
        one.n_rounds * (one.round_s - one.xgboost_s + tree_s) for one, tree_s in zip(estimates, by_columns, strict=True)
    )
    further = list(_further_messages(job, sizes, features, workloads[0]))
    further_bytes, further_s = cost_of(further, job.profile, network, request.sites)
    seconds = job.folds * rounds_s + estimates[0].setup_s + further_s
    sent = job.folds * sum(one.n_rounds * one.round_bytes for one in estimates) + further_bytes
    sent += bytes_before_rounds(estimates[0], job.folds, job.profile)
    n_trials = job.n_trials(features)
    size = n_trials * job.folds * job.num_rounds
    memory = estimates[0].site_memory + 2 * rows // request.sites * features
    figures = {"steps": len(job.sizes(features)), "shadows": job.shadows, "folds": job.folds, "rounds": job.num_rounds}
    asked = " and feature_profile" if job.information_value else ""
    values = [
        "          and rows of each class in each fold by bins of each column, at least "
        f"{job.min_rows_per_cut} of all sites together",
    ]
    text = [
        f"{n_trials} trainings for each of {job.folds} folds, of {job.num_rounds} rounds = {size:,}: every policy must "
        f"consent to as many (tuning{asked})",
        f"time      {human_seconds(seconds)} at most under {job.profile}, with full trees, without the start of "
        "FLARE's processes",
        f"sent      at most {human_bytes(sent)} by each site, and as much received",
        f"memory    {human_bytes(memory)} at a site",
        f"shows     all sites: pooled sums over the rows of every fold, each at least {LEAST_ROWS:,} of all sites "
        "together, and every model with its metrics",
        *(values if job.information_value else []),
        "          (SECURITY.md)",
        "spends    nothing: data sets with a privacy budget are refused",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
        "later     train_chosen.py writes the training on the chosen columns, which uses the cut points again",
    ]
    told = {**figures, "tuning": size, "seconds": seconds, "bytes_sent": sent, "sites": request.sites}
    return Plan(told, "\n".join(text))


def _further_messages(job: SelectionJob, sizes: list[int], features: int, workload: Workload) -> Iterator[Planned]:
    """Yield counts by bins, by what each further training begins, and scores of permuted columns."""
    yield from [*training_messages(workload)] * (len(sizes) * job.folds - 1)
    if job.information_value:
        listed = [len(entries) for entries in job.categories.values()]
        n_columns = job.folds * len(job.label_classes or (0, 1))
        yield from count_messages(listed, features - len(listed), workload.bins, n_columns)
    if job.importance == Importance.PERMUTATION.value:
        parts = 3 * workload.outputs if workload.outputs > 1 else 2
        for size in sizes[: len(sizes) - job.shadows]:
            for _ in range(job.folds):
                yield Planned(Kind.METRIC, 1, size * parts)
