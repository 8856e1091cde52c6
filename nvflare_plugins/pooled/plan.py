"""What a training over pooled rows sends, to the byte, and what it takes: seconds, bytes and memory of a profile.

Sizes follow from public numbers alone: a histogram message carries two numbers per bin and built node, and XGBoost
builds one node of every pair of siblings. Trees are taken as full, so that real runs send at most this much. Times come
from the latency and bandwidth given, and from rates that are measured on this machine in a few seconds, on synthetic
numbers: CPU seconds of one thread (the wall clock of a busy machine says little), the median of three repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.fixed_point import Grid, exponent_of
from he_processors.key_agreement import KEY_SIZE_BYTES
from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.randomness import OS_RANDOMNESS
from he_processors.sum_tags import MAC_BYTES, N_TAGS, SumTags
from nvflare_plugins.attempt.job_context import goes_on_without
from nvflare_plugins.attempt.plan import Network, timed
from nvflare_plugins.evidence.threat_model import leakage_class
from nvflare_plugins.growth import survival
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.growth.site_sums import pair_grid
from nvflare_plugins.pooled.growing import arithmetic_of_job, check_words, is_grown
from nvflare_plugins.pooled.job import SCORE_BINS, WORD_BITS, HorizontalJob
from nvflare_plugins.pooled.processors import BUILT_IN, SumContext, SumProfile
from nvflare_plugins.pooled.row_floors import N_COUNTS, N_OF_FORGETTING, counts_leaves
from nvflare_plugins.pooled.spans import PARTS, spans_of
from nvflare_plugins.pooled.value_bounds import COARSEST, coarsest_pairs
from nvflare_plugins.wire.aggregation import add_words, lattice
from nvflare_plugins.wire.envelope import CHUNK_BYTES, Codec, Kind
from nvflare_plugins.wire.profiles import SumProcessor
from nvflare_plugins.wire.sums import HIGHEST_EXPONENT, LOWEST_EXPONENT, METRIC_FLAGS
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import KEY_BITS, CutMode
from nvflare_plugins.xgb.objectives import COX
from nvflare_plugins.xgb.parameters import check_parameters
from nvflare_plugins.xgb.rounds import widest_batch

BYTES_PER_WORD = 8
SESSION_EXCHANGES = 8  # handshake, key confirmation, agreement, closing: a few kilobytes, but each one a rendezvous
SESSION_BYTES_PER_SITE = 2048  # hello with a certificate, signature, proof, confirmation of the group, terms
GATHERS_WITH_MACS = 6  # terms, reservations, cuts, result, closing twice
POOLED_EXCHANGES = 3  # least rows, bins, edges of pooled metrics, sealed, beside their counts
_SCALES = 4  # gradients, hessians, weights, labels; and one for each metric
_ROW_SCALES = 2  # labels and weights of single rows
_LARGEST_DEPTH = 30


@dataclass(frozen=True, slots=True)
class Workload:
    """A horizontal training in public numbers.

    Attributes:
        rows: training rows of all sites together, spread evenly.
        bins: most bins per feature (max_bin).
        depth: most levels of a tree; 0 only with max_leaves.
        outputs: classes of a multiclass objective, else 1.
        parallel_trees: num_parallel_tree.
        max_leaves: leaves per tree when trees grow best-first (lossguide); 0 for level by level.
        metrics: evaluation metrics times evaluation sets, each round.
        eval_sets: evaluation sets.
        weighted_sets: data sets with a column of weights, the training set first; 0 without weights.
        row_sets: data sets whose rows are counted beforehand, the training set first.
        wide_pairs: whether histograms take twice the room under `bfv` and `ckks` whatever the number of rows
            (pooled/value_bounds.py).
        pair_bound: largest magnitude of a row's gradient or hessian, where these have a bound: with many rows the sums
            outgrow what those schemes carry in one piece (``pairs_are_wide``).
        missing: whether every feature has missing values somewhere, which makes the root sum a message of its own.
        cuts: how cut points are agreed.
        counts_leaves: whether the rows of each leaf are counted, as for objectives without a bound on hessians.
        pooled_metrics: whether the final model's scores are counted over the evaluation rows of all sites.
        grown: whether the sites grow the trees themselves (``engine: own``) or XGBoost does.
        smooth_scale: whether each round begins with the sum behind the scale of a smooth loss.
        time_bins: most bins of times, of survival:cox alone: each round begins with sums over the rows at risk.
        word_bits: of the words of histograms under `plain` and `masks`; see the job's field.
        metrics_wait: whether those of a round have an exchange of their own, whatever the profile.
        forgets: whether rows are counted that the job leaves out, and those that stay.
    """

    rows: int
    features: int
    bins: int = 256
    depth: int = 6
    sites: int = 3
    rounds: int = 10
    outputs: int = 1
    parallel_trees: int = 1
    max_leaves: int = 0
    metrics: int = 1
    missing: bool = False
    cuts: str = CutMode.QUANTILE.value
    eval_sets: int = 1
    weighted_sets: int = 0
    row_sets: int = 1
    wide_pairs: bool = False
    pair_bound: float = 1.0
    counts_leaves: bool = False
    pooled_metrics: bool = False
    grown: bool = False
    smooth_scale: bool = False
    time_bins: int = 0
    word_bits: int = WORD_BITS
    metrics_wait: bool = True
    forgets: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "features", "sites", "rounds", "outputs", "parallel_trees", "eval_sets"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1")
        if self.bins < 2 or self.depth < 0 or self.max_leaves < 0 or self.metrics < 0:
            raise ConfigurationError("bins must be at least 2; depth, max_leaves and metrics cannot be negative")
        if self.depth == 0 and self.max_leaves < 2:
            raise ConfigurationError("unlimited depth needs max_leaves, or the size of a tree has no bound")

    @property
    def rows_per_site(self) -> int:
        """Rows of the largest site."""
        return -(-self.rows // self.sites)

    @property
    def trees_per_round(self) -> int:
        """Trees grown in one boosting round."""
        return self.outputs * self.parallel_trees


@dataclass(frozen=True, slots=True)
class Planned:
    """Messages of one kind and size.

    Attributes:
        n_values: the number of values in each.
        wide: as in wire/profiles.py.
        residues: what else is added, modulo 2^61 - 1; tags come on top.
        word_bytes: of a value where the profile sends words.
    """

    kind: Kind
    messages: int
    n_values: int
    wide: bool = True
    residues: int = 0
    word_bytes: int = BYTES_PER_WORD


def built_nodes(workload: Workload) -> list[int]:
    """Return how many histograms each message of one tree carries, the root's first."""
    if workload.max_leaves:
        return [1] * max(min(workload.max_leaves, workload.rows) - 1, 1)
    batches, widest = [1], widest_batch(workload.depth)
    for level in range(1, workload.depth):
        pairs = min(1 << (level - 1), max(workload.rows // 2, 1))
        full, rest = divmod(pairs, widest)
        batches += [widest] * full + [rest] * (rest > 0)
    return batches


def pairs_are_wide(workload: Workload, profile: str) -> bool:
    """Return whether histograms take twice the room, as it is decided in the job.

    Where the sites grow the trees that is so under `bfv` from 2^16 rows on (growth/site_sums.py), where a row's
    gradient is at most 1; where XGBoost does, under `ckks` and three sites from 262,145 rows a site on.
    """
    codec = _profile(profile).codec
    if workload.wide_pairs or codec.word_bytes:
        return workload.wide_pairs
    capacity = _capacity_bits(profile, workload.sites)
    if workload.grown:
        bound = exponent_of(workload.pair_bound)
        return pair_grid(
            bound, bound, workload.rows, capacity, rows_are_exact=codec is not Codec.CKKS, coarsest=COARSEST
        ).wide
    bound = exponent_of(workload.rows_per_site * workload.pair_bound)
    return 2.0 ** Grid.for_sum(bound, workload.sites, capacity).exponent > COARSEST


@lru_cache(maxsize=32)
def _capacity_bits(profile: str, n_sites: int) -> int:
    return open_alone(profile, n_sites)[0].capacity_bits


def metrics_ride(workload: Workload, profile: str) -> bool:
    """Return whether metrics of a round travel with the first root of the next one; the last round's go alone."""
    return workload.metrics > 0 and not workload.metrics_wait and _profile(profile).codec.word_bytes > 0


def round_messages(workload: Workload, profile: str = "masks", *, is_first: bool = False) -> Iterator[Planned]:
    """Yield the messages of one boosting round."""
    values_per_node = 2 * workload.bins * workload.features
    wide_pairs, width = pairs_are_wide(workload, profile), workload.word_bits // 8
    batches = built_nodes(workload)
    yield from _before_gradients(workload)
    if workload.grown:  # the sum of all rows rides on the root's histogram
        n_riding = int(metrics_ride(workload, profile) and not is_first)
        if n_riding:
            together = _metrics(workload)
            n_residues = together.n_values + together.residues
            yield Planned(Kind.HISTOGRAM_METRIC, 1, values_per_node + 2, wide_pairs, n_residues, word_bytes=width)
        yield Planned(
            Kind.HISTOGRAM, workload.trees_per_round - n_riding, values_per_node + 2, wide_pairs, word_bytes=width
        )
        batches = batches[1:]
    for n_nodes in sorted(set(batches)):
        n_messages = batches.count(n_nodes) * workload.trees_per_round
        yield Planned(Kind.HISTOGRAM, n_messages, n_nodes * values_per_node, wide_pairs, word_bytes=width)
    if workload.missing and not workload.grown:
        yield Planned(Kind.ROOT_SUM, workload.trees_per_round, 2, wide_pairs)
    if workload.counts_leaves:
        n_leaves = workload.max_leaves or 1 << min(workload.depth, _LARGEST_DEPTH)
        yield Planned(Kind.LEAF_ROWS, 1, workload.trees_per_round * max(min(n_leaves, workload.rows), 1), wide=False)
    if workload.metrics and not metrics_ride(workload, profile):
        yield _metrics(workload)


def _before_gradients(workload: Workload) -> Iterator[Planned]:
    if workload.smooth_scale:
        yield Planned(Kind.RESIDUAL_SCALE, 1, 2)
    if workload.time_bins:
        yield Planned(Kind.RISK_SUMS, 1, survival.WORDS * workload.time_bins)


def _metrics(workload: Workload) -> Planned:
    n_parts = 2 + 2 * workload.time_bins if workload.outputs == 1 else 3 * workload.outputs
    n_messages, together = (1, workload.metrics) if workload.grown else (workload.metrics, 1)
    return Planned(Kind.METRIC, n_messages, together * n_parts, residues=together * METRIC_FLAGS)


def setup_messages(workload: Workload) -> Iterator[Planned]:
    """Yield the sums that precede the first tree."""
    n_thresholds = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    if workload.weighted_sets:
        yield Planned(Kind.SCALE, 1, 0, wide=False, residues=workload.weighted_sets * n_thresholds)
    n_further = N_OF_FORGETTING if workload.forgets else N_COUNTS
    yield Planned(Kind.EFFECTIVE_ROWS, 1, 2 * workload.row_sets + n_further, wide=False)
    searches = workload.cuts in (CutMode.QUANTILE.value, CutMode.EXACT.value)
    yield from cut_messages(workload.features, workload.features if searches else 0, workload.bins)
    if workload.time_bins:
        for n_parts in PARTS:
            yield Planned(Kind.CELL_FLAGS, workload.row_sets, 0, wide=False, residues=2 * len(spans_of(n_parts)))
        yield Planned(Kind.CLASS_COUNTS, workload.row_sets, max(PARTS), wide=False)
        yield Planned(Kind.RISK_SUMS, 1, workload.time_bins)
    yield from training_messages(workload)


def training_messages(workload: Workload) -> Iterator[Planned]:
    """Yield the sums by which each training begins, also where a job has several."""
    n_thresholds = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    n_scales = _SCALES + workload.metrics // workload.eval_sets + (workload.weighted_sets > 0)
    if workload.grown:
        n_scales += _ROW_SCALES + workload.smooth_scale
    yield Planned(Kind.SCALE, 1, 0, wide=False, residues=n_scales * n_thresholds)
    if workload.grown:
        yield Planned(Kind.LABEL_MEAN, 1, max(2, workload.outputs))
        return
    yield Planned(Kind.WEIGHT_TOTAL, 1, 1) if workload.weighted_sets else Planned(Kind.ROW_COUNT, 1, 1, wide=False)
    yield Planned(Kind.LABEL_MEAN, 1, workload.outputs)


def final_messages(workload: Workload, profile: str = "masks") -> Iterator[Planned]:
    """Yield the sums after the last tree."""
    if metrics_ride(workload, profile):
        yield _metrics(workload)
    if workload.pooled_metrics:
        yield Planned(Kind.SCORE_COUNTS, 1, 2 * SCORE_BINS, wide=False)


def cut_messages(features: int, searched: int, bins: int) -> Iterator[Planned]:
    """Yield the counts of rows and values, and those of the search of cut points of so many features."""
    yield Planned(Kind.CUT_COUNTS, 1, features + 1, wide=False)
    if searched:
        yield Planned(Kind.CUT_COUNTS, 1, searched, wide=False)
        yield Planned(Kind.CUT_COUNTS, KEY_BITS, searched * max(bins - 2, 1), wide=False)


def session_bytes(n_sites: int) -> int:
    """Return about how many bytes a site receives beside sums, whatever the job: from all sites, and MACs for all.

    Of what is gathered every site gets what each has sent, with MACs for each.
    """
    return n_sites * SESSION_BYTES_PER_SITE + GATHERS_WITH_MACS * MAC_BYTES * n_sites**2


def message_bytes(message: Planned, profile: str) -> int:
    """Return the exact size of a planned message. Raises: ConfigurationError, as ``payload_bytes``."""
    # What is asked of all sites by a flag (any_site) goes under masks in every job.
    protected = "masks" if message.kind in (Kind.SCALE, Kind.CELL_FLAGS) else profile
    return payload_bytes(
        protected, message.n_values, wide=message.wide, residues=message.residues, word_bytes=message.word_bytes
    )


def payload_bytes(
    profile: str, n_values: int, *, wide: bool = False, residues: int = 0, word_bytes: int = BYTES_PER_WORD
) -> int:
    """Return the exact size of a protected sum of ``n_values`` values and some residues as it leaves a site.

    Raises:
        ConfigurationError: unknown profile.
    """
    codec = _profile(profile).codec
    tail = BYTES_PER_WORD * (residues + (0 if codec is Codec.PLAIN else N_TAGS))
    if codec.word_bytes:
        return word_bytes * n_values + tail
    size: int = lattice(codec).message_size(2 * n_values if wide else n_values)
    return size + tail


def _profile(name: str) -> SumProfile:
    """Return a profile of sums that comes with VeilBoost. Raises: ConfigurationError."""
    if name not in BUILT_IN:
        raise ConfigurationError(f"profile {name!r} is unknown")
    return BUILT_IN[name]


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
    processor, add = open_alone(profile, n_sites)
    tags = SumTags(b"plan", 0, *_secrets(n_sites)) if processor.codec is not Codec.PLAIN else None
    n_added = min(n_sites, _MOST_SUMMANDS)
    grid = Grid.for_sum(10, n_sites, processor.capacity_bits)
    values = np.random.default_rng(0).normal(size=_N_VALUES)
    at_site, at_server = [], []
    for counter in range(_REPEATS):
        label = MessageLabel(counter, "HISTOGRAM", "plan", _N_VALUES)
        protected, first = timed(partial(_protect, processor, tags, grid, values, label))
        total, added = timed(partial(add, [protected] * n_added))
        _, last = timed(partial(_reveal, processor, tags, grid, total, label))
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


class _Alone(SumContext):
    """What a processor gets where nobody is but this site, with random keys of its own."""

    def __init__(self, n_sites: int) -> None:
        self.rank, self.world, self.public = 0, n_sites, b""
        self._masks = PairwiseMasks(b"plan", 0, *_secrets(n_sites))

    @property
    def masks(self) -> PairwiseMasks:
        """Random masks."""
        return self._masks

    def share_secret(self, secret: bytes | None) -> bytes:
        """Return it."""
        return secret or b""

    def publish(self, public: bytes) -> bytes:
        """Note it, and return it."""
        self.public = public
        return public


def open_alone(profile: str, n_sites: int) -> tuple[SumProcessor, Add]:
    """Return a processor as a site has it, with random keys of its own, and the server's addition."""
    context = _Alone(n_sites)
    processor = _profile(profile).open(context)
    if processor.codec.word_bytes:
        return processor, lambda payloads: add_words(payloads, len(payloads[0]) // BYTES_PER_WORD)
    return processor, partial(lattice(processor.codec).add_ciphertexts, context.public)


def _secrets(n_sites: int) -> tuple[dict[int, bytes], bytes]:
    pair_secrets = {rank: OS_RANDOMNESS.bytes(KEY_SIZE_BYTES) for rank in range(1, n_sites)}
    return pair_secrets, OS_RANDOMNESS.bytes(KEY_SIZE_BYTES)


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
    times = [timed(partial(booster.update, matrix, i))[1] for i in range(1, _ROUNDS + 1)]
    return statistics.median(times)


_PASSED_ROW_BYTES = 84  # with a gradient pair and a prediction, some 100 bytes a row
_BINS_OF_ONE_BYTE = 256


def workload_of_job(job: HorizontalJob, rows: int, features: int, sites: int, *, missing: bool) -> Workload:
    """Take from a job what the plan needs; rows, features and sites are not in it."""
    columns = {"monotone_constraints", "interaction_constraints"}  # they name columns, and cost nothing
    names = job.features or [f"f{i}" for i in range(features)]
    checked = check_parameters({k: v for k, v in job.params.items() if k not in columns}, names, label=job.label)
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
        wide_pairs=coarsest_pairs(checked, weighted=job.weight is not None) == 0.0,
        pair_bound=max(checked.objective.gradient_bound or 1.0, checked.objective.hessian_bound or 1.0),
        counts_leaves=counts_leaves(checked, rows_per_node=1),  # some floor, as site policies have by default
        pooled_metrics=job.pooled_metrics,
        grown=is_grown(job, checked),
        metrics_wait=not is_grown(job, checked) or job.early_stopping_rounds is not None or goes_on_without(job),
        smooth_scale=is_grown(job, checked) and Objective.of_job(checked, arithmetic_of_job(job)).is_smooth,
        word_bits=job.word_bits,
        time_bins=job.time_bins if checked.objective.name == COX else 0,
        forgets=job.forgets is not None,
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
    wide = 1 if _profile(profile).codec.word_bytes else 2  # under the lattice schemes a wide value takes two
    n_values = sum(m.messages * m.n_values * (wide if m.wide else 1) for m in messages)
    return n_values * (rate.site_s + n_sites * rate.server_s)


def cost_of(messages: Sequence[Planned], profile: str, network: Network, n_sites: int) -> tuple[int, float]:
    """Return how many bytes a site sends in messages, and how long they travel. Units: bytes, seconds."""
    return _total(messages, profile), _network_s(messages, profile, network, n_sites)


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
    is_added_in_pieces = _profile(profile).codec.word_bytes > 0
    under_way = workload.sites * (min(CHUNK_BYTES, payload) if is_added_in_pieces else payload)
    return histograms + largest.n_values * 24 + 3 * payload, 3 * payload + under_way
