"""The plan of a tuning: what a site sends, how long that takes, and who reads what."""

from __future__ import annotations

import dataclasses

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Network, Plan, PlanRequest, process_memory_bytes
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.kinds.tuning.job import TuningJob
from nvflare_plugins.pooled.plan import (
    Estimate,
    Planned,
    TreeRate,
    Workload,
    estimate,
    measure_protection,
    measure_trees,
    message_bytes,
    workload_of_job,
)
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.site.profiles import THREAT_MODELS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.parameters import check_parameters


def plan(request: PlanRequest, job: TuningJob) -> Plan:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    rows, _ = request.shape()
    if rows < LEAST_ROWS * job.folds:
        raise ConfigurationError(
            f"{rows:,} rows in {job.folds} folds are fewer than {LEAST_ROWS:,} in each, and sites refuse the "
            "job. Remedy: fewer folds, or more rows"
        )
    workloads, network = [_workload(request, job, number) for number in range(job.n_of_trials)], request.network
    estimates = _estimates(workloads, job.profile, network)
    seconds = job.folds * sum(one.n_rounds * one.round_s for one in estimates) + estimates[0].setup_s
    sent = job.folds * sum(one.n_rounds * one.round_bytes for one in estimates)
    sent += _total(estimates[0]) + message_bytes(
        Planned(Kind.EFFECTIVE_ROWS, 1, 2 * job.folds, wide=False), job.profile
    )
    sent -= N_COUNTS * 8  # added rows are not counted
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


def _workload(request: PlanRequest, job: TuningJob, number: int) -> Workload:
    training, (n_rows, n_features) = job.training_of(job.all_trials()[number]), request.shape()
    rows = n_rows - n_rows // job.folds
    workload = workload_of_job(training, rows, n_features, request.sites, missing=request.missing)
    names = training.features or [f"f{i}" for i in range(n_features)]
    columns = {"monotone_constraints", "interaction_constraints"}
    checked = check_parameters({k: v for k, v in training.params.items() if k not in columns}, names, label=job.label)
    return dataclasses.replace(workload, metrics=len(checked.metrics), metrics_wait=True)


def _estimates(workloads: list[Workload], profile: str, network: Network) -> list[Estimate]:
    """Estimate each trial's training; trees of one size are measured once."""
    rate, memory = measure_protection(profile, workloads[0].sites), process_memory_bytes()
    trees: dict[tuple[int, int], TreeRate] = {}
    found = []
    for one in workloads:
        size = (one.depth, one.max_leaves)
        trees[size] = trees.get(size) or measure_trees(one)
        found.append(estimate(one, profile, network, trees[size], rate, memory))
    return found


def _total(one: Estimate) -> int:
    """Return what is sent before the first round, the cut search most of it."""
    return one.total_bytes - one.n_rounds * one.round_bytes
