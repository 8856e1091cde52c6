"""What a horizontal training sends, to the byte, and the network that a plan assumes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from he_processors.errors import ConfigurationError
from he_processors.fixed_point import Grid, exponent_of
from he_processors.sum_tags import MAC_BYTES, N_TAGS
from nvflare_plugins.cli.options import Options
from nvflare_plugins.growth.site_sums import pair_grid
from nvflare_plugins.kinds.horizontal.score_histogram import MOST_BINS
from nvflare_plugins.pooled.job import WORD_BITS
from nvflare_plugins.pooled.row_floors import N_COUNTS
from nvflare_plugins.pooled.value_bounds import COARSEST
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import HIGHEST_EXPONENT, LOWEST_EXPONENT, METRIC_FLAGS
from nvflare_plugins.xgb.cuts import KEY_BITS, CutMode
from nvflare_plugins.xgb.rounds import widest_batch

# What a horizontal training sends: number and exact size of its messages, before anything has run.
#
# Sizes follow from public numbers alone: a histogram message carries two numbers per bin and built node, and XGBoost
# builds one node of every pair of siblings. Trees are taken as full, so that real runs send at most this much.


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
        word_bits: of the words of histograms under `plain` and `masks`; see the job's field.
        metrics_wait: whether those of a round have an exchange of their own, whatever the profile.
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
    word_bits: int = WORD_BITS
    metrics_wait: bool = True

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
    if workload.wide_pairs or profile in ("plain", "masks"):
        return workload.wide_pairs
    capacity = _capacity_bits(profile, workload.sites)
    if workload.grown:
        bound = exponent_of(workload.pair_bound)
        return pair_grid(bound, bound, workload.rows, capacity, profile != "ckks", COARSEST).wide
    bound = exponent_of(workload.rows_per_site * workload.pair_bound)
    return 2.0 ** Grid.for_sum(bound, workload.sites, capacity).exponent > COARSEST


def _capacity_bits(profile: str, n_sites: int) -> int:
    """Return ``SumProcessor.capacity_bits`` without a key. Imported here as in ``payload_bytes``."""
    if profile == "bfv":
        from he_processors.bfv import choose_plain_modulus

        return choose_plain_modulus(n_sites).bit_length() - 2
    from he_processors.ckks import CkksProcessor

    return CkksProcessor.capacity.bit_length() - 1


def metrics_ride(workload: Workload, profile: str) -> bool:
    """Return whether metrics of a round travel with the first root of the next one; the last round's go alone."""
    return workload.metrics > 0 and not workload.metrics_wait and profile in ("plain", "masks")


def round_messages(workload: Workload, profile: str = "masks", *, is_first: bool = False) -> Iterator[Planned]:
    """Yield the messages of one boosting round."""
    values_per_node = 2 * workload.bins * workload.features
    wide_pairs, width = pairs_are_wide(workload, profile), workload.word_bits // 8
    batches = built_nodes(workload)
    if workload.smooth_scale:
        yield Planned(Kind.RESIDUAL_SCALE, 1, 2)
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
        yield Planned(Kind.LEAF_ROWS, 1, workload.trees_per_round * max(min(n_leaves, workload.rows), 1), False)
    if workload.metrics and not metrics_ride(workload, profile):
        yield _metrics(workload)


def _metrics(workload: Workload) -> Planned:
    n_parts = 2 if workload.outputs == 1 else 3 * workload.outputs
    n_messages, together = (1, workload.metrics) if workload.grown else (workload.metrics, 1)
    return Planned(Kind.METRIC, n_messages, together * n_parts, residues=together * METRIC_FLAGS)


def setup_messages(workload: Workload) -> Iterator[Planned]:
    """Yield the sums that precede the first tree."""
    n_thresholds = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
    if workload.weighted_sets:
        yield Planned(Kind.SCALE, 1, 0, False, workload.weighted_sets * n_thresholds)
    yield Planned(Kind.EFFECTIVE_ROWS, 1, 2 * workload.row_sets + N_COUNTS, False)
    searches = workload.cuts in (CutMode.QUANTILE.value, CutMode.EXACT.value)
    yield from cut_messages(workload.features, workload.features if searches else 0, workload.bins)
    n_scales = _SCALES + workload.metrics // workload.eval_sets + (workload.weighted_sets > 0)
    if workload.grown:
        n_scales += _ROW_SCALES + workload.smooth_scale
    yield Planned(Kind.SCALE, 1, 0, False, n_scales * n_thresholds)
    if workload.grown:
        yield Planned(Kind.LABEL_MEAN, 1, max(2, workload.outputs))
        return
    yield Planned(Kind.WEIGHT_TOTAL, 1, 1) if workload.weighted_sets else Planned(Kind.ROW_COUNT, 1, 1, False)
    yield Planned(Kind.LABEL_MEAN, 1, workload.outputs)


def final_messages(workload: Workload, profile: str = "masks") -> Iterator[Planned]:
    """Yield the sums after the last tree."""
    if metrics_ride(workload, profile):
        yield _metrics(workload)
    if workload.pooled_metrics:
        yield Planned(Kind.SCORE_COUNTS, 1, 2 * MOST_BINS, False)


def cut_messages(features: int, searched: int, bins: int) -> Iterator[Planned]:
    """Yield the counts of rows and values, and those of the search of cut points of so many features."""
    yield Planned(Kind.CUT_COUNTS, 1, features + 1, False)
    if searched:
        yield Planned(Kind.CUT_COUNTS, 1, searched, False)
        yield Planned(Kind.CUT_COUNTS, KEY_BITS, searched * max(bins - 2, 1), False)


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
    if profile == "plain":  # without tags
        return word_bytes * n_values + BYTES_PER_WORD * residues
    tail = BYTES_PER_WORD * (residues + N_TAGS)
    if profile == "masks":
        return word_bytes * n_values + tail
    # Imported here: the lattice library takes long to load and most plans do without it.
    if profile == "bfv":
        from he_processors.bfv import message_size
    elif profile == "ckks":
        from he_processors.ckks import message_size
    else:
        raise ConfigurationError(f"profile {profile!r} is unknown")
    return message_size(2 * n_values if wide else n_values) + tail


# The network that a plan assumes.


_BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True)
class Network:
    """Units: seconds per rendezvous of empty messages; bytes per second of a site's and of the server's link."""

    latency_s: float = 0.010
    site_bytes_per_s: float = 12.5e6
    server_bytes_per_s: float = 12.5e6

    def exchange_s(self, size: int, n_sites: int) -> float:
        """Return the time of one exchange: every site sends ``size`` bytes, then every site receives as many."""
        one_way = max(size / self.site_bytes_per_s, n_sites * size / self.server_bytes_per_s)
        return self.latency_s + 2 * one_way

    @classmethod
    def of(cls, arguments: Options) -> Network:
        """Return what the command line says. Raises: ConfigurationError."""
        server = arguments.server_bandwidth_mbit or arguments.bandwidth_mbit
        if not all(0 < value < math.inf for value in (arguments.latency_ms, arguments.bandwidth_mbit, server)):
            raise ConfigurationError("latency and bandwidth must be numbers above 0")
        return cls(arguments.latency_ms / 1000, arguments.bandwidth_mbit * _BYTES_PER_MBIT, server * _BYTES_PER_MBIT)
