"""The plan of a tuning: what a site sends, how long that takes, and who reads what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Network, Plan, PlanRequest, process_memory_bytes
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.plan import (
    Estimate,
    Planned,
    TreeRate,
    Workload,
    cost_of,
    estimate,
    measure_protection,
    measure_trees,
    message_bytes,
    training_messages,
    workload_of_job,
)
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.parameters import check_parameters


def plan(request: PlanRequest, job: TuningJob) -> Plan:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    rows, _ = request.shape()
    check_rows(rows, job.folds)
    trainings = [job.training_of(trial) for trial in job.all_trials()]
    workloads, network = [workload_of(request, one, job.folds) for one in trainings], request.network
    estimates = estimates_of(workloads, job.profile, network)
    again = [*training_messages(workloads[0])] * (job.n_of_trials * job.folds - 1)
    again_bytes, again_s = cost_of(again, job.profile, network, request.sites)
    seconds = job.folds * sum(one.n_rounds * one.round_s for one in estimates) + estimates[0].setup_s + again_s
    sent = again_bytes + job.folds * sum(one.n_rounds * one.round_bytes for one in estimates)
    sent += bytes_before_rounds(estimates[0], job.folds, job.profile)
    figures = {"trials": job.n_of_trials, "folds": job.folds, "rounds": job.num_rounds, "tuning": job.size}
    n_held = 1 if workloads[0].grown else job.folds
    memory = n_held * rows / request.sites * workloads[0].features * 5
    text = [
        f"{job.n_of_trials} trials x {job.folds} folds x {job.num_rounds} rounds = {job.size:,}: every policy must "
        "consent to as many (tuning)",
        f"time      {human_seconds(seconds)} at most under {job.profile}, with all rounds and full trees, without "
        "the start of FLARE's processes",
        f"sent      at most {human_bytes(sent)} by each site, and as much received",
        f"memory    {human_bytes(estimates[0].site_memory + int(memory))} at a site: its rows are held once"
        f"{'' if n_held == 1 else ' for each fold'}",
        f"shows     all sites: pooled sums over the rows of every fold, each at least {LEAST_ROWS:,} of all sites "
        "together, and the metrics of every model (SECURITY.md)",
        "spends    nothing: data sets with a privacy budget are refused",
        f"privacy   {THREAT_MODELS[job.profile].summary}",
        "later     train_best.py writes the training on all rows, which uses the cut points again",
    ]
    return Plan({**figures, "seconds": seconds, "bytes_sent": sent, "sites": request.sites}, "\n".join(text))


def check_rows(rows: int, folds: int) -> None:
    """Refuse what every site would refuse. Raises: ConfigurationError."""
    if rows < LEAST_ROWS * folds:
        raise ConfigurationError(
            f"{rows:,} rows in {folds} folds are fewer than {LEAST_ROWS:,} in each, and sites refuse the job. "
            "Remedy: fewer folds, or more rows"
        )


def workload_of(request: PlanRequest, training: HorizontalJob, folds: int) -> Workload:
    """Return the size of a training on all rows but those of a fold."""
    n_rows, n_features = request.shape()
    rows = n_rows - n_rows // folds
    workload = workload_of_job(training, rows, n_features, request.sites, missing=request.missing)
    names = training.features or [f"f{i}" for i in range(n_features)]
    columns = {"monotone_constraints", "interaction_constraints"}
    checked = check_parameters(
        {k: v for k, v in training.params.items() if k not in columns}, names, label=training.label
    )
    return dataclasses.replace(workload, metrics=len(checked.metrics), metrics_wait=True)


def estimates_of(workloads: Sequence[Workload], profile: str, network: Network) -> list[Estimate]:
    """Estimate each training; trees of one size are measured once, on as many columns as the first has."""
    rate, memory = measure_protection(profile, workloads[0].sites), process_memory_bytes()
    trees: dict[tuple[int, int], TreeRate] = {}
    found = []
    for one in workloads:
        size = (one.depth, one.max_leaves)
        trees[size] = trees.get(size) or measure_trees(one)
        found.append(estimate(one, profile, network, trees[size], rate, memory))
    return found


def bytes_before_rounds(one: Estimate, folds: int, profile: str) -> int:
    """Return what is sent before the first round, the cut search most of it."""
    of_folds = message_bytes(Planned(Kind.EFFECTIVE_ROWS, 1, 2 * folds, wide=False), profile)
    return one.total_bytes - one.n_rounds * one.round_bytes + of_folds - N_COUNTS * 8  # added rows are not counted
