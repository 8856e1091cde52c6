"""The plan of a tuning: trainings on all folds but one, as those of a horizontal job, and what they show."""

from __future__ import annotations

import dataclasses
import json

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.cli.options import Options
from nvflare_plugins.cli.plan import vertical
from nvflare_plugins.cli.plan.horizontal import Estimate, estimate, workload_of_job
from nvflare_plugins.cli.plan.messages import Network, Planned, Workload, message_bytes
from nvflare_plugins.cli.plan.rates import TreeRate, measure_protection, measure_trees, process_memory_bytes
from nvflare_plugins.evidence.threat_model import THREAT_MODELS
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.kinds.tuning.job import Trial, TuningJob
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.xgb.parameters import check_parameters


def plan(arguments: Options, job: TuningJob) -> str:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    if arguments.rows is None or arguments.features is None:
        raise ConfigurationError("give --rows and --features: they are not in a job")
    if arguments.rows < LEAST_ROWS * job.folds:
        raise ConfigurationError(
            f"{arguments.rows:,} rows in {job.folds} folds are fewer than {LEAST_ROWS:,} in each, and sites refuse the "
            "job. Remedy: fewer folds, or more rows"
        )
    workloads, network = [_workload(arguments, job, number) for number in range(job.n_of_trials)], Network.of(arguments)
    estimates = _estimates(workloads, job.profile, network)
    seconds = job.folds * sum(one.n_rounds * one.round_s for one in estimates) + estimates[0].setup_s
    sent = job.folds * sum(one.n_rounds * one.round_bytes for one in estimates)
    sent += _total(estimates[0]) + message_bytes(Planned(Kind.EFFECTIVE_ROWS, 1, 2 * job.folds, False), job.profile)
    sent -= N_COUNTS * 8  # added rows are not counted
    figures = {"trials": job.n_of_trials, "folds": job.folds, "rounds": job.num_rounds, "tuning": job.size}
    if arguments.json:
        return json.dumps({**figures, "seconds": seconds, "bytes_sent": sent, "sites": arguments.sites}, indent=2)
    n_held = 1 if workloads[0].grown else job.folds
    memory = n_held * arguments.rows / arguments.sites * workloads[0].features * 5
    return "\n".join(
        [
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
    )


def plan_vertical(arguments: Options, job: VerticalTuningJob) -> str:
    """Return the plan of the deepest trial's training, of which there are as many as trials and folds."""

    def depth(trial: Trial) -> int:  # without a limit as deep as it gets
        return int({**job.params, **trial}.get("max_depth", 6)) or 30

    text = vertical.plan(arguments, job.training_of(max(job.all_trials(), key=depth)))
    n_trainings = job.n_of_trials * job.folds
    if arguments.json:
        return json.dumps({"trainings": n_trainings, "tuning": job.size, "training": json.loads(text)}, indent=2)
    return (
        f"{job.n_of_trials} trials x {job.folds} folds x {job.num_rounds} rounds = {job.size:,}: every policy must "
        f"consent to as many (tuning), a passive party's to exact_bins.\n"
        f"{n_trainings} trainings, each at most:\n\n{text}"
    )


def _workload(arguments: Options, job: TuningJob, number: int) -> Workload:
    training = job.training_of(job.all_trials()[number])
    rows = arguments.rows - arguments.rows // job.folds
    workload = workload_of_job(training, rows, arguments.features, arguments.sites, arguments.missing)
    names = training.features or [f"f{i}" for i in range(arguments.features)]
    columns = {"monotone_constraints", "interaction_constraints"}
    checked = check_parameters({k: v for k, v in training.params.items() if k not in columns}, names)
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
