"""The plan of a horizontal training: seconds, bytes and memory under each profile.

Message sizes are exact for full trees (messages.py). Times come from the latency and bandwidth given, and from rates
that are measured on this machine in a few seconds, on synthetic numbers: CPU seconds of one thread (the wall clock of
a busy machine says little), the median of three repeats. Every assumption is printed with the table.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.fixed_point import Grid
from he_processors.key_agreement import KEY_SIZE_BYTES
from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.randomness import OS_RANDOMNESS
from he_processors.sum_tags import SumTags
from nvflare_plugins.attempt.job_context import goes_on_without
from nvflare_plugins.base.formatting import human_bytes, human_seconds, table_lines
from nvflare_plugins.cli.options import Options
from nvflare_plugins.cli.plan.messages import (
    POOLED_EXCHANGES,
    SESSION_EXCHANGES,
    Network,
    Planned,
    Workload,
    built_nodes,
    final_messages,
    message_bytes,
    round_messages,
    session_bytes,
    setup_messages,
)
from nvflare_plugins.evidence.threat_model import HORIZONTAL, THREAT_MODELS, leakage_class
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.pooled.growing import arithmetic_of_job, check_words, is_grown
from nvflare_plugins.pooled.job import WORD_BITS, HorizontalJob
from nvflare_plugins.pooled.mediated.training import check_histograms
from nvflare_plugins.pooled.row_floors import counts_leaves
from nvflare_plugins.pooled.value_bounds import coarsest_pairs
from nvflare_plugins.wire.aggregation import add_words
from nvflare_plugins.wire.envelope import CHUNK_BYTES
from nvflare_plugins.wire.profiles import BfvSums, CkksSums, MaskedSums, PlainSums, SumProcessor
from nvflare_plugins.xgb.parameters import check_parameters

_N_VALUES = 1 << 15
_MOST_FEATURES = 100
_MOST_CELLS = 3_000_000
_MOST_SUMMANDS = 3
_REPEATS = 3
_ROUNDS = 3

Add = Callable[[list[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class ProtectionRate:
    """Seconds per value: at a site (encode, protect, reveal, decode), and at the server per contribution added."""

    site_s: float
    server_s: float


@dataclass(frozen=True, slots=True)
class TreeRate:
    """Seconds of XGBoost for one tree at one site: a fixed part and a part per row."""

    fixed_s: float
    per_row_s: float

    def seconds(self, rows: int) -> float:
        """Return the time of one tree on ``rows`` rows."""
        return self.fixed_s + self.per_row_s * rows


def measure_trees(workload: Workload) -> TreeRate:
    """Train a few trees on two synthetic tables of this shape and fit a line through their times.

    Capacity: at most 100 features and 3 million cells are really trained on; the time is taken as proportional to
        features and, beyond its fixed part, to rows.
    """
    features = min(workload.features, _MOST_FEATURES)
    scale = workload.features / features
    rows = min(workload.rows_per_site, _MOST_CELLS // features)
    small = max(rows // 4, 1)
    late, early = (_seconds_per_tree(workload, n, features) for n in (rows, small))
    per_row = max(late - early, 0.0) / max(rows - small, 1)
    return TreeRate(max(late - per_row * rows, 0.0) * scale, per_row * scale)


def measure_protection(profile: str, n_sites: int) -> ProtectionRate:
    """Protect, add and reveal 32,768 values under ``profile`` as ``n_sites`` sites would."""
    processor, add = _processor(profile, n_sites)
    tags = SumTags(b"plan", 0, *_secrets(n_sites)) if profile != "plain" else None
    n_added = min(n_sites, _MOST_SUMMANDS)
    grid = Grid.for_sum(10, n_sites, processor.capacity_bits)
    values = np.random.default_rng(0).normal(size=_N_VALUES)
    at_site, at_server = [], []
    for counter in range(_REPEATS):
        label = MessageLabel(counter, "HISTOGRAM", "plan", _N_VALUES)
        protected, first = _timed(partial(_protect, processor, tags, grid, values, label))
        total, added = _timed(partial(add, [protected] * n_added))
        _, last = _timed(partial(_reveal, processor, tags, grid, total, label))
        at_site.append(first + last)
        at_server.append(added / n_added)
    return ProtectionRate(statistics.median(at_site) / _N_VALUES, statistics.median(at_server) / _N_VALUES)


def _protect(
    processor: SumProcessor, tags: SumTags | None, grid: Grid, values: NDArray[np.float64], label: MessageLabel
) -> bytes:
    integers = grid.encode(values)
    _tag(tags, integers, replace(label, counter=2 * label.counter))
    return processor.protect(integers, label)


def _reveal(
    processor: SumProcessor, tags: SumTags | None, grid: Grid, total: bytes, label: MessageLabel
) -> NDArray[np.float64]:
    integers = processor.reveal(total, label)
    _tag(tags, integers, replace(label, counter=2 * label.counter + 1))  # to check a tag takes as long as to make it
    return grid.decode(integers)


def _tag(tags: SumTags | None, integers: NDArray[np.int64], label: MessageLabel) -> None:
    if tags is not None:
        tags.protect(integers, np.zeros(0, dtype=np.uint64), label)


def _secrets(n_sites: int) -> tuple[dict[int, bytes], bytes]:
    pair_secrets = {rank: OS_RANDOMNESS.bytes(KEY_SIZE_BYTES) for rank in range(1, n_sites)}
    return pair_secrets, OS_RANDOMNESS.bytes(KEY_SIZE_BYTES)


def process_memory_bytes() -> int:
    """Return the memory of this process so far: Python with XGBoost and, where used, the lattice library."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _processor(profile: str, n_sites: int) -> tuple[SumProcessor, Add]:
    """Return a processor as a site has it, with random keys of its own, and the server's addition."""
    if profile == "plain":
        return PlainSums(), _add_words
    masks = PairwiseMasks(b"plan", 0, *_secrets(n_sites))
    if profile == "masks":
        return MaskedSums(masks), _add_words
    # Imported here: the lattice library takes long to load and most plans do without it.
    from he_processors import bfv, ckks

    if profile == "bfv":
        bfv_key = bfv.BfvProcessor.from_secret(bfv.BfvProcessor.generate(n_sites))
        return BfvSums(bfv_key, masks), partial(bfv.add_ciphertexts, bfv_key.public_parameters())
    ckks_key = ckks.CkksProcessor.from_secret(ckks.CkksProcessor.generate(n_sites))
    return CkksSums(ckks_key, masks), partial(ckks.add_ciphertexts, ckks_key.public_parameters())


def _add_words(payloads: list[bytes]) -> bytes:
    return add_words(payloads, len(payloads[0]) // 8)


def _seconds_per_tree(workload: Workload, rows: int, features: int) -> float:
    rng = np.random.default_rng(0)
    table: NDArray[np.float32] = rng.normal(size=(rows, features)).astype(np.float32)
    # A noisy label keeps the trees full, as the plan assumes.
    label = (table[:, 0] + rng.normal(size=rows) > 0).astype(np.float32)
    parameters: dict[str, Any] = {
        "objective": "binary:logistic",
        "max_depth": workload.depth,
        "max_bin": workload.bins,
        "nthread": 1,
        "min_child_weight": 0,
        "base_score": 0.5,
    }
    if workload.max_leaves:
        parameters |= {"grow_policy": "lossguide", "max_leaves": workload.max_leaves}
    booster = xgb.Booster(parameters, [matrix := xgb.QuantileDMatrix(table, label, max_bin=workload.bins)])
    booster.update(matrix, 0)  # the first round also sets up
    times = [_timed(partial(booster.update, matrix, i))[1] for i in range(1, _ROUNDS + 1)]
    return statistics.median(times)


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = action()
    return result, time.process_time() - started


_PASSED_ROW_BYTES = 84  # with a gradient pair and a prediction, some 100 bytes a row
_BINS_OF_ONE_BYTE = 256


def plan(arguments: Options, job: HorizontalJob | None) -> str:
    """Return the plan of a job, or of the shape that the command line gives. Raises: ConfigurationError."""
    if arguments.rows is None or arguments.features is None:
        raise ConfigurationError("give --rows and --features: they are not in a job")
    if arguments.profile not in ("all", *HORIZONTAL):
        raise ConfigurationError(
            f"profile {arguments.profile!r} is none of horizontal training: {', '.join(HORIZONTAL)}"
        )
    workload, network = _workload(arguments, job), Network.of(arguments)
    if not workload.grown:
        check_histograms(workload.features * workload.bins, max(built_nodes(workload)))
    profiles = list(HORIZONTAL) if arguments.profile == "all" else [arguments.profile]
    trees = measure_trees(workload)
    rates = {profile: measure_protection(profile, workload.sites) for profile in profiles}
    memory = process_memory_bytes()
    estimates = [estimate(workload, p, network, trees, rate, memory) for p, rate in rates.items()]
    if arguments.json:
        return json.dumps(to_json(workload, network, estimates), indent=2)
    return render(workload, network, estimates)


def _workload(arguments: Options, job: HorizontalJob | None) -> Workload:
    given = {
        name: getattr(arguments, name)
        for name in ("bins", "depth", "rounds", "outputs", "max_leaves", "metrics", "cuts")
        if getattr(arguments, name) is not None
    }
    if job is None:
        return Workload(arguments.rows, arguments.features, sites=arguments.sites, missing=arguments.missing, **given)
    workload = workload_of_job(job, arguments.rows, arguments.features, arguments.sites, missing=arguments.missing)
    return dataclasses.replace(workload, **given)


def workload_of_job(job: HorizontalJob, rows: int, features: int, sites: int, *, missing: bool) -> Workload:
    """Take from a job what the plan needs; rows, features and sites are not in it."""
    columns = {"monotone_constraints", "interaction_constraints"}  # they name columns, and cost nothing
    names = job.features or [f"f{i}" for i in range(features)]
    checked = check_parameters({k: v for k, v in job.params.items() if k not in columns}, names)
    check_words(job, checked, rows)
    effective = checked.effective
    n_sets = int(job.eval_data_set is not None) + int(job.evaluate_training)
    lossguide = effective.get("grow_policy") == "lossguide"
    return Workload(
        rows=rows,
        features=len(names),
        bins=checked.max_bin,
        depth=int(effective.get("max_depth", 6)),
        sites=sites,
        rounds=job.num_rounds,
        outputs=checked.objective.n_outputs,
        parallel_trees=int(effective.get("num_parallel_tree", 1)),
        max_leaves=int(effective.get("max_leaves", 0)) if lossguide else 0,
        metrics=n_sets * len(checked.metrics),
        missing=missing,
        cuts=job.cuts,
        eval_sets=max(n_sets, 1),
        row_sets=1 + (job.eval_data_set is not None),
        weighted_sets=0 if job.weight is None else 1 + (job.eval_data_set is not None),
        wide_pairs=coarsest_pairs(checked, job.weight is not None) == 0.0,
        pair_bound=max(checked.objective.gradient_bound or 1.0, checked.objective.hessian_bound or 1.0),
        counts_leaves=counts_leaves(checked, rows_per_node=1),  # some floor, as site policies have by default
        pooled_metrics=job.pooled_metrics,
        grown=is_grown(job, checked),
        metrics_wait=not is_grown(job, checked) or job.early_stopping_rounds is not None or goes_on_without(job),
        smooth_scale=is_grown(job, checked) and Objective.of_job(checked, arithmetic_of_job(job)).needs_scale,
        word_bits=job.word_bits,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a training would cost under one profile. Units: seconds, bytes.

    Attributes:
        xgboost_s, protect_s, network_s: per round; protect_s holds the work at a site and at the server.
        setup_s: session, cuts and scales before the first round, and metrics after the last.
        round_bytes: what one site sends in one round; it receives as much.
        total_bytes: what one site sends in the whole training.
        site_memory, server_memory: at the largest, per process; of a site that holds its table.
        passes_memory, external_memory: of a site that reads it in passes, with its bins in memory or in files.
        opened_by: who can open one site's contributions.
    """

    profile: str
    xgboost_s: float
    protect_s: float
    network_s: float
    setup_s: float
    round_bytes: int
    total_bytes: int
    server_bytes: int
    site_memory: int
    server_memory: int
    passes_memory: int
    external_memory: int
    opened_by: str
    n_rounds: int

    @property
    def round_s(self) -> float:
        """Seconds per round."""
        return self.xgboost_s + self.protect_s + self.network_s

    @property
    def total_s(self) -> float:
        """Seconds of the whole training, without the start of FLARE's processes."""
        return self.setup_s + self.n_rounds * self.round_s


def estimate(
    workload: Workload, profile: str, network: Network, trees: TreeRate, rate: ProtectionRate, process_bytes: int
) -> Estimate:
    """Combine sizes, rates and network. Pure: same arguments, same result."""
    first, later = (list(round_messages(workload, profile, is_first=is_first)) for is_first in (True, False))
    per_round = later if workload.rounds > 1 else first
    once = [*setup_messages(workload), *final_messages(workload, profile)]
    round_bytes = _total(per_round, profile)
    total_bytes = _total([*once, *first], profile) + (workload.rounds - 1) * round_bytes
    site, server = _memory(workload, profile, [*per_round, *once])
    held, passes, external = _data_memory(workload)
    exchanges = SESSION_EXCHANGES + POOLED_EXCHANGES * workload.pooled_metrics
    return Estimate(
        profile=profile,
        xgboost_s=trees.seconds(workload.rows_per_site) * workload.trees_per_round,
        protect_s=_protect_s(per_round, profile, rate, workload.sites),
        network_s=_network_s(per_round, profile, network, workload.sites),
        setup_s=_protect_s(once, profile, rate, workload.sites)
        + _network_s(once, profile, network, workload.sites)
        + _session_s(network, workload.sites)
        + exchanges * network.latency_s,
        round_bytes=round_bytes,
        total_bytes=total_bytes,
        server_bytes=2 * workload.sites * total_bytes,
        site_memory=process_bytes + site + held,
        server_memory=process_bytes + server,
        passes_memory=process_bytes + site + passes,
        external_memory=process_bytes + site + external,
        opened_by=leakage_class(profile, workload.sites),
        n_rounds=workload.rounds,
    )


def _total(messages: Iterable[Planned], profile: str) -> int:
    return sum(m.messages * message_bytes(m, profile) for m in messages)


def _protect_s(messages: Iterable[Planned], profile: str, rate: ProtectionRate, n_sites: int) -> float:
    # Under the lattice schemes a wide value takes the room of two.
    wide = 2 if profile in ("bfv", "ckks") else 1
    n_values = sum(m.messages * m.n_values * (wide if m.wide else 1) for m in messages)
    return n_values * (rate.site_s + n_sites * rate.server_s)


def _network_s(messages: Iterable[Planned], profile: str, network: Network, n_sites: int) -> float:
    return sum(m.messages * network.exchange_s(message_bytes(m, profile), n_sites) for m in messages)


def _session_s(network: Network, n_sites: int) -> float:
    received = session_bytes(n_sites)
    return max(received / network.site_bytes_per_s, n_sites * received / network.server_bytes_per_s)


def _data_memory(workload: Workload) -> tuple[int, int, int]:
    """Return the bytes of a site's rows: held, read in passes, and so with the bins in files."""
    cells, rows = workload.rows_per_site * workload.features, workload.rows_per_site
    bin_bytes = 1 if workload.bins <= _BINS_OF_ONE_BYTE else 2
    of_rows = rows * 16 * workload.outputs  # gradients and predictions
    # Held: the table, its sorted keys during the search of cuts, the binned matrix. In passes, as measured: XGBoost's
    # bins while it builds them, and labels, weights and ids.
    passed = cells * (bin_bytes + (5 if workload.missing else 2))
    external = of_rows + rows * _PASSED_ROW_BYTES
    return cells * (4 + 4 + bin_bytes) + of_rows, external + passed, external


def _memory(workload: Workload, profile: str, messages: Sequence[Planned]) -> tuple[int, int]:
    """Return the bytes that histograms and messages take at a site and at the server."""
    histograms = 2 * sum(built_nodes(workload)) * workload.features * workload.bins * 16
    largest = max(messages, key=lambda m: m.n_values)
    payload = message_bytes(largest, profile)
    # At a site: float64, integers, protected, frame and reply. At the server, which adds words as they come: the sum,
    # the reply, the reply before, and a piece from each site; ciphertexts are added when a site's message is complete.
    is_added_in_pieces = profile in ("plain", "masks")
    under_way = workload.sites * (min(CHUNK_BYTES, payload) if is_added_in_pieces else payload)
    return histograms + largest.n_values * 24 + 3 * payload, 3 * payload + under_way


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


def to_json(workload: Workload, network: Network, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "workload": dataclasses.asdict(workload),
        "network": dataclasses.asdict(network),
        "estimates": [{**dataclasses.asdict(e), "round_s": e.round_s, "total_s": e.total_s} for e in estimates],
        "assumptions": list(assumptions(workload, network)),
    }
