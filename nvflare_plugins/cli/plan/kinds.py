"""Plans of bagging, profiles and tunings: what travels, what it shows, and how long it takes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import human_bytes, human_seconds
from nvflare_plugins.cli.options import Options
from nvflare_plugins.cli.plan import vertical
from nvflare_plugins.cli.plan.horizontal import (
    Estimate,
    TreeRate,
    estimate,
    measure_protection,
    measure_trees,
    process_memory_bytes,
    workload_of_job,
)
from nvflare_plugins.cli.plan.messages import SESSION_EXCHANGES, Network, Planned, Workload, cut_messages, message_bytes
from nvflare_plugins.evidence.threat_model import THREAT_MODELS
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.bagging.model import message_bytes as tree_bytes
from nvflare_plugins.kinds.profile.cells import spans_of
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.kinds.tuning.folds import LEAST_ROWS
from nvflare_plugins.kinds.tuning.job import Trial, TuningJob
from nvflare_plugins.kinds.vertical_tuning.job import VerticalTuningJob
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import plugin_of
from nvflare_plugins.xgb.parameters import check_parameters


def plan_bagging(arguments: Options, job: BaggingJob) -> str:
    """Return what a site sends and receives, and who reads it. Raises: ConfigurationError."""
    depth = int(job.parameters(job.features or ["any"]).effective["max_depth"])
    sent = tree_bytes(depth)
    received = sent * arguments.sites
    if arguments.json:
        figures = {"rounds": job.num_rounds, "sites": arguments.sites, "depth": depth, "bytes_sent_per_round": sent}
        return json.dumps({**figures, "bytes_received_per_round": received}, indent=2)
    return "\n".join(
        [
            f"{job.num_rounds} rounds, each one tree of depth {depth} of each of {arguments.sites} sites: "
            f"{job.num_rounds * arguments.sites} trees in all",
            f"sent      {human_bytes(sent)} a round and site, whatever its tree; {human_bytes(sent * job.num_rounds)} "
            "in all",
            f"received  {human_bytes(received)} a round and site",
            f"privacy   {THREAT_MODELS[job.profile].summary}",
        ]
    )


def plan_profile(arguments: Options, job: ProfileJob) -> str:
    """Return what a site sends, how long that takes and who reads what. Raises: ConfigurationError."""
    if job.features is None and arguments.features is None:
        raise ConfigurationError("give --features, the number of columns: they are not in the job")
    if plugin_of(job.profile) is not None:
        raise ConfigurationError(f"the messages of {job.profile} are its own: no plan")
    features = len(job.features) if job.features is not None else int(arguments.features)
    messages, network = list(profile_messages(job, features)), Network.of(arguments)
    sent = sum(one.messages * message_bytes(one, job.profile) for one in messages)
    exchanges = SESSION_EXCHANGES + sum(one.messages for one in messages)
    seconds = SESSION_EXCHANGES * network.latency_s + sum(
        one.messages * network.exchange_s(message_bytes(one, job.profile), arguments.sites) for one in messages
    )
    if arguments.json:
        figures = {"features": features, "sites": arguments.sites, "bytes_sent": sent, "exchanges": exchanges}
        return json.dumps({**figures, "network_s": seconds, "min_rows_per_class": job.min_rows_per_cut}, indent=2)
    return "\n".join(
        [
            f"{features} columns of up to {job.max_bin} bins, {job.n_classes} classes, {arguments.sites} sites",
            f"sent      at most {human_bytes(sent)} by each site, and as much received, in {exchanges} exchanges",
            f"network   {human_seconds(seconds)}, without the start of FLARE's processes and the reading of data",
            f"shows     all sites: rows of each class, over all sites, in bins of at least {job.min_rows_per_cut} of "
            "every class; missing values",
            "          by column; and of runs of bins whether some site has so many rows there (SECURITY.md)",
            "spends    nothing: data sets with a privacy budget are refused; every policy must consent "
            "(feature_profile)",
            f"privacy   {THREAT_MODELS[job.profile].summary}",
            "later     a training over the same data, sites, max_bin and min_rows_per_cut does not search again",
        ]
    )


def profile_messages(job: ProfileJob, features: int) -> Iterator[Planned]:
    """Yield a profile's sums; with fewer cut points or merged bins they are smaller."""
    listed = [len(entries) for entries in job.categories.values()]
    searched = features - len(listed)
    if searched < 0:
        raise ConfigurationError(f"the job has {len(listed)} categorical columns, and --features says {features}")
    yield Planned(Kind.EFFECTIVE_ROWS, 1, 2 + N_COUNTS, False)
    yield from cut_messages(features, searched, job.max_bin)
    bins = [*listed, *([job.max_bin - 1] * searched)]  # max_bin - 2 cut points lie between the outer bounds
    flags = 2 * job.n_classes * (1 + sum(len(spans_of(n_bins)) + 1 for n_bins in bins))
    yield Planned(Kind.CELL_FLAGS, 1, 0, False, flags)
    yield Planned(Kind.CLASS_COUNTS, 1, job.n_classes * sum(n_bins + 1 for n_bins in bins), False)


def plan_tuning(arguments: Options, job: TuningJob) -> str:
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


def plan_vertical_tuning(arguments: Options, job: VerticalTuningJob) -> str:
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
    workload = workload_of_job(training, rows, arguments.features, arguments.sites, missing=arguments.missing)
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
