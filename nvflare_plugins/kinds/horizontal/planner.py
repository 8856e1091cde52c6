"""The plan of a horizontal training: seconds, bytes and memory under each profile, with all that is assumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.plan import Network, Plan, PlanRequest, process_memory_bytes
from nvflare_plugins.base.formatting import human_bytes, human_seconds, table_lines
from nvflare_plugins.pooled.job import WORD_BITS, HorizontalJob
from nvflare_plugins.pooled.mediated.training import check_histograms
from nvflare_plugins.pooled.plan import (
    POOLED_EXCHANGES,
    Estimate,
    Workload,
    built_nodes,
    estimate,
    measure_protection,
    measure_trees,
    session_bytes,
    workload_of_job,
)
from nvflare_plugins.pooled.processors import BUILT_IN
from nvflare_plugins.site.profiles import THREAT_MODELS


def plan(request: PlanRequest, job: HorizontalJob | None) -> Plan:
    """Return the plan of a job, or of the shape that is given. Raises: ConfigurationError."""
    rows, features = request.shape()
    if request.profile not in (None, *BUILT_IN):
        raise ConfigurationError(f"profile {request.profile!r} is none of horizontal training: {', '.join(BUILT_IN)}")
    given = request.given("bins", "depth", "rounds", "outputs", "max_leaves", "metrics", "cuts")
    if job is None:
        workload = Workload(rows, features, sites=request.sites, missing=request.missing, **given)
    else:
        of_job = workload_of_job(job, rows, features, request.sites, missing=request.missing)
        workload = dataclasses.replace(of_job, **given)
    if not workload.grown:
        check_histograms(workload.features * workload.bins, max(built_nodes(workload)))
    trees, network = measure_trees(workload), request.network
    profiles = list(BUILT_IN) if request.profile is None else [request.profile]
    rates = {profile: measure_protection(profile, workload.sites) for profile in profiles}
    memory = process_memory_bytes()
    estimates = [estimate(workload, p, network, trees, rate, memory) for p, rate in rates.items()]
    return Plan(figures(workload, network, estimates), render(workload, network, estimates))


_COLUMNS = (
    "profile",
    "XGBoost",
    "protect",
    "network",
    "s/round",
    "setup",
    "total",
    "sent/round",
    "sent in all",
    "site RAM",
    "server RAM",
    "one site opened by",
)


def render(workload: Workload, network: Network, estimates: Sequence[Estimate]) -> str:
    """Return the plan as text."""
    rows = [_COLUMNS, *(_row(e) for e in estimates)]
    text = [_shape(workload), "", *table_lines(rows, range(1, len(_COLUMNS) - 1))]
    text += ["", "Site RAM where the site's policy has the table read in passes (data_sets.<name>.memory):"]
    for e in estimates:
        in_passes, in_files = human_bytes(e.passes_memory), human_bytes(e.external_memory)
        text.append(f"  {e.profile:<7}passes {in_passes}, external {in_files}")
    text += ["", "What the profiles protect:"]
    text += [f"  {e.profile:<7}{THREAT_MODELS[e.profile].summary}" for e in estimates]
    text += ["", "Assumed:", *(f"  - {line}" for line in assumptions(workload, network))]
    return "\n".join(text)


def _row(e: Estimate) -> tuple[str, ...]:
    seconds = (e.xgboost_s, e.protect_s, e.network_s, e.round_s, e.setup_s, e.total_s)
    sizes = (e.round_bytes, e.total_bytes, e.site_memory, e.server_memory)
    return (e.profile, *(f"{human_seconds(s)}" for s in seconds), *map(human_bytes, sizes), e.opened_by)


def _shape(w: Workload) -> str:
    trees = f"{w.trees_per_round} trees of" if w.trees_per_round > 1 else "one tree of"
    size = f"up to {w.max_leaves} leaves" if w.max_leaves else f"depth {w.depth}"
    return (
        f"{w.rows:,} rows over {w.sites} sites, {w.features} features, {w.bins} bins; {w.rounds} rounds, each {trees} "
        f"{size}"
    )


def assumptions(workload: Workload, network: Network) -> Iterator[str]:
    """Yield what the estimate takes for granted."""
    if workload.word_bits != WORD_BITS:
        yield (
            f"histograms travel in words of {workload.word_bits} bits under plain and masks (word_bits), which halves "
            "their bytes; to protect them is counted as if they had 64"
        )
    yield "trees are full and every feature has all its bins: real runs send less"
    yield "rows are spread evenly; every site computes like one thread of this machine, measured just now"
    yield (
        f"one empty rendezvous of all sites takes {1000 * network.latency_s:g} ms (FLARE's simulator: 6.5 ms); sites "
        f"are connected with {network.site_bytes_per_s / 125_000:g} Mbit/s, the server with "
        f"{network.server_bytes_per_s / 125_000:g} Mbit/s for all of them together"
    )
    yield (
        f"opening and closing the session bring each site {human_bytes(session_bytes(workload.sites))}: some 2 KB for "
        "each site's keys and certificates, and MACs that grow with the square of the number of sites"
    )
    if workload.pooled_metrics:
        yield (
            f"pooled metrics, once, are in the setup: {POOLED_EXCHANGES + 1} exchanges. They show all sites counts of "
            "both classes in up to 64 bins of the final model's probability; every policy must consent "
            "(score_histogram)"
        )
    if not workload.missing:
        yield "some feature has no missing values at any site, so that the root sum costs no message (else --missing)"
    yield "not in it: start of FLARE's processes (15 to 20 s a job), reading data, binning, evaluation by XGBoost"
    yield "memory is that of this process plus data, histograms and the largest message; the server adds without a key"


def figures(workload: Workload, network: Network, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "workload": dataclasses.asdict(workload),
        "network": dataclasses.asdict(network),
        "estimates": [{**dataclasses.asdict(e), "round_s": e.round_s, "total_s": e.total_s} for e in estimates],
        "assumptions": list(assumptions(workload, network)),
    }
