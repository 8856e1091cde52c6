"""What a private training releases, how much noise is on it, and whom the job trusts with exact sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components import leaf_weights
from dp_components.batched_updates import batch_sizes
from dp_components.events import ComposedEvent, Event
from dp_components.integer_noise import RESOLUTION, NoiseOfOthers, PricedNoise
from dp_components.mechanisms import NoiseShares, noise_event
from dp_components.sensitivity import Sensitivity, clip_rows, count_sensitivity
from dp_components.split_candidates.candidates import Columns, FeatureBounds
from dp_components.split_candidates.dp_quantiles import public_grid
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.kinds.private_trees.methods import CandidateSource, Method, SplitMethod
from nvflare_plugins.wire.envelope import Kind

# All that a private training will release, in order: what, how much noise is on it, and the event that pays for it.
#
# The list follows from public facts alone, before anything is released. Trainers take their releases from it one by
# one, a trusted server answers no others, the ledger reserves its events, plans and reports add it up: nothing else
# counts messages or queries.


ROOT_LEVEL = -1
_BYTES_PER_VALUE = 8


@dataclass(frozen=True, slots=True)
class PlannedNoise:
    """The noise that privacy asks for on one kind of query; shares of sites come on top (``Trust``).

    Attributes:
        sensitivity: how far one row moves the query.
        multiplier: parameter of the noise over the sensitivity: of Gaussian noise its standard deviation, of Laplace
            noise its scale (``add_noise``).
        others: the noise of a mechanism of others, with its price; the multiplier is then that of Laplace noise of its
            standard deviation.
    """

    sensitivity: Sensitivity
    multiplier: float
    others: PricedNoise | None = None

    def by(self, others: NoiseOfOthers) -> PlannedNoise:
        """Return noise of others of what this costs. Raises: UnusableNoise, SecondOpinionDiffers."""
        priced = others.price(self.sensitivity, 1 / self.multiplier)
        return PlannedNoise(self.sensitivity, priced.std() / (RESOLUTION * math.sqrt(2)), priced)

    def events(self, sizes: Sequence[int], n_honest: int) -> tuple[Event, ...]:
        """Return what queries of so many values cost."""
        if self.others is not None:
            return (self.others.event,) * len(sizes)
        return tuple(noise_event(size, self.sensitivity, self.multiplier, n_honest) for size in sizes)

    @property
    def n_coordinates(self) -> int:
        """Number of coordinates of each sum: two of a pair (G, H), more of several classes."""
        return len(self.sensitivity.weights)

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the noise on each coordinate. Units: of g and h, or rows."""
        return leaf_weights.real_noise_std(self.sensitivity, self.multiplier)

    def scaled(self, factor: float) -> PlannedNoise:
        """Return noise so many times as large."""
        return PlannedNoise(self.sensitivity, self.multiplier * factor)


@dataclass(frozen=True, slots=True)
class PlannedRelease:
    """One message of sums over the sites.

    Attributes:
        kind: what is summed.
        round: boosting round; -1 before the first.
        sizes: most values of each query in it, those of full trees. A row may count in all queries of a message.
        tree: number of the tree that it belongs to; None where it belongs to a whole round.
        level: of that tree, ``ROOT_LEVEL`` being the root's own sums; None where it has none.
        event: what it costs, however few values a tree that ends early asks for.
    """

    kind: Kind
    round: int
    sizes: tuple[int, ...]
    tree: int | None
    level: int | None
    noise: PlannedNoise
    event: Event

    @property
    def n_bytes(self) -> int:
        """Size of a site's payload; its reply is as long."""
        return _BYTES_PER_VALUE * sum(self.sizes)

    @property
    def words(self) -> str:
        """What is asked, for ledgers and evidence."""
        if self.kind is Kind.CELL_COUNTS:
            return "rows per public cell"
        if self.kind is Kind.NODE_STATS:
            return f"leaf sums of round {self.round}"
        if self.kind is Kind.HESSIANS:
            return f"Hessians before tree {self.tree}"
        return f"{'root sums' if self.level == ROOT_LEVEL else f'sums of level {self.level}'} of tree {self.tree}"


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """The releases of one training.

    Attributes:
        releases: in order; training may skip some, and releases nothing else.
        n_queries: queries of the trees, paid candidates apart. Reference: Maddock et al., Table 1.
    """

    releases: tuple[PlannedRelease, ...]
    n_queries: int

    @classmethod
    def of(
        cls,
        method: Method,
        bounds: Sequence[FeatureBounds],
        total: float,
        n_honest: int = 1,
        published_multiplier: float | None = None,
        target: leaf_weights.Target = leaf_weights.TWO_CLASSES,
        others: NoiseOfOthers | None = None,
    ) -> ReleasePlan:
        """List what a method releases, and divide a total among it.

        Gaussian queries compose exactly in the squares of their mu, pure ones in their epsilons.

        Args:
            total: mu of everything together, or the epsilon of a pure method.
            n_honest: shares of the noise that the accounting relies on.
            published_multiplier: noise over sensitivity of the trees' queries, in place of the one that the total
                gives: for reproductions of other people's accounting.
            target: what the label is.
            others: whose noise it is; None for ours.
        """
        weights = method.weight_update.weights(target)
        sums = list(_sums(method, bounds, len(weights.sensitivity(method.query).weights)))
        n_queries = sum(_n_queries(of_message, method) for of_message in sums)
        composed = n_queries / method.training_share()
        multiplier = published_multiplier or (composed if method.is_pure else math.sqrt(composed)) / total
        noise = _noise(method, weights, len(bounds), multiplier, total)
        if others is not None:
            noise = {kind: noise[kind].by(others) for kind in dict.fromkeys(asked.kind for asked in sums)}

        @cache  # thousands of trees ask alike
        def event(kind: Kind, sizes: tuple[int, ...]) -> Event:
            return ComposedEvent(noise[kind].events(sizes, n_honest))

        releases = (PlannedRelease(*asked, noise[asked.kind], event(asked.kind, asked.sizes)) for asked in sums)
        return cls(tuple(releases), n_queries)

    @property
    def events(self) -> list[Event]:
        """What the whole training costs, release by release."""
        return [release.event for release in self.releases]

    @property
    def n_rounds(self) -> int:
        """Boosting rounds."""
        return 1 + self.releases[-1].round

    @property
    def n_bytes(self) -> int:
        """Bytes of sums that a site sends, for full trees; it receives as many."""
        return sum(release.n_bytes for release in self.releases)

    @property
    def tree_noise(self) -> PlannedNoise:
        """The noise on what trees are made of: pairs (G, H) of leaves, of histograms, or of left sums."""
        return self.releases[-1].noise

    @property
    def cell_noise(self) -> PlannedNoise:
        """The noise on the counts of paid candidates; only for methods that pay for them."""
        return self.releases[0].noise

    def multipliers(self) -> dict[str, float]:
        """Return noise over sensitivity by the name of what is released."""
        return {release.kind.name: release.noise.multiplier for release in self.releases}


class ReleaseSchedule:
    """The releases that are still due, taken in order; a tree that ends early skips some."""

    def __init__(self, plan: ReleasePlan) -> None:
        self._releases, self._next = plan.releases, 0

    def take(
        self, kind: Kind, number: int, n_values: int, tree: int | None = None, level: int | None = None
    ) -> PlannedRelease:
        """Return the planned release of so many values in a round, -1 being before the first.

        Args:
            tree, level: which one, where a round has several; a server, which is not told, takes them in order.

        Raises:
            ProtocolError: a sum that the plan does not pay for now, in kind, place or size.
        """
        for i in range(self._next, len(self._releases)):
            planned = self._releases[i]
            is_due = (planned.kind, planned.round) == (kind, number) and 0 < n_values <= sum(planned.sizes)
            if is_due and tree in (None, planned.tree) and level in (None, planned.level):
                if n_values % planned.noise.n_coordinates:
                    break
                self._next = i + 1
                return planned
        raise ProtocolError(f"{kind.name} of {n_values} values in round {number}: the job's plan pays for no such sum")


class _Sums(NamedTuple):
    """A message that is not priced yet."""

    kind: Kind
    round: int
    sizes: tuple[int, ...]
    tree: int | None = None
    level: int | None = None


def _sums(method: Method, bounds: Sequence[FeatureBounds], n_coordinates: int) -> Iterator[_Sums]:
    n_features = len(bounds)
    k, n_refined = method.features_per_tree(n_features), n_refining_trees(method, n_features)
    pays_for_hessians = method.split_method is not SplitMethod.HISTOGRAM  # its own histograms hold them
    if method.candidates.is_paid:
        yield _Sums(Kind.CELL_COUNTS, -1, (sum(public_grid(b).size + 1 for b in bounds),))
    first = 0
    for number, n_trees in enumerate(batch_sizes(method.n_trees, method.batch_size)):
        for tree in range(first, first + n_trees):
            if tree < n_refined and pays_for_hessians:
                yield _Sums(Kind.HESSIANS, number, (_most_bins(method),) * k, tree)
            yield from _greedy_sums(method, number, tree, k, n_coordinates)
        first += n_trees
        if method.split_method is SplitMethod.TOTALLY_RANDOM:
            # A row enters every tree of a batch, so B trees are B queries.
            yield _Sums(Kind.NODE_STATS, number, (n_coordinates << method.depth,) * n_trees)


def n_refining_trees(method: Method, n_features: int) -> int:
    """Return from how many trees, the first ones, candidates are refined (iterative Hessian)."""
    if method.candidates is not CandidateSource.ITERATIVE_HESSIAN:
        return 0
    one_each = method.features_per_tree(n_features) == 1
    return min(method.n_trees, method.hessian_rounds * (n_features if one_each else 1))


def _most_bins(method: Method) -> int:
    """Return how many bins a feature has at most: one more than candidates, which refining may double."""
    if method.candidates is CandidateSource.ITERATIVE_HESSIAN:
        return 2 * method.n_candidates + 1
    return method.n_candidates + 2  # another one is spare


def _greedy_sums(method: Method, number: int, tree: int, k: int, n_coordinates: int) -> Iterator[_Sums]:
    """Yield the messages of one greedy tree. Nodes of a level hold other rows each: a feature is one query."""
    if method.split_method is SplitMethod.PARTIALLY_RANDOM:
        yield _Sums(Kind.LEFT_SUMS, number, (n_coordinates,), tree, ROOT_LEVEL)
        for level in range(method.depth):
            yield _Sums(Kind.LEFT_SUMS, number, (n_coordinates << level,) * k, tree, level)
    elif method.split_method is SplitMethod.HISTOGRAM:
        # Of one feature, the root's histogram holds those of all nodes below (``OneFeatureHistogramQuery``).
        for level in range(1 if k == 1 else method.depth):
            size = n_coordinates * _most_bins(method) << level
            yield _Sums(Kind.HISTOGRAM, number, (size,) * k, tree, level)


def _n_queries(asked: _Sums, method: Method) -> int:
    if asked.kind is Kind.CELL_COUNTS:
        return 0
    is_scalar = method.query is leaf_weights.LeafQuery.SCALAR and asked.kind is not Kind.HESSIANS
    return len(asked.sizes) * (2 if is_scalar else 1)


def _noise(
    method: Method, weights: leaf_weights.LeafWeights, n_features: int, multiplier: float, total: float
) -> dict[Kind, PlannedNoise]:
    # Two scalar queries of this multiplier are one query of the weighted pair with 1 / sqrt(2) of it.
    of_pair = multiplier / math.sqrt(2) if method.query is leaf_weights.LeafQuery.SCALAR else multiplier
    pairs = PlannedNoise(weights.sensitivity(method.query), of_pair)
    norm = method.query.norm
    curvature = clip_rows(np.zeros((0, 1)), (weights.largest_curvature,), norm=norm).sensitivity
    hessians = PlannedNoise(curvature, multiplier)
    noise = {Kind.NODE_STATS: pairs, Kind.LEFT_SUMS: pairs, Kind.HISTOGRAM: pairs, Kind.HESSIANS: hessians}
    if method.candidates.is_paid:
        share = method.candidate_share if method.is_pure else math.sqrt(method.candidate_share)
        noise[Kind.CELL_COUNTS] = PlannedNoise(count_sensitivity(n_features, norm=norm), 1.0 / (total * share))
    return noise


# What a private training needs of its job, and whom it trusts with sums.


# Who adds the noise to a private training's sums, and how much of it besides what privacy asks for.


@dataclass(frozen=True, slots=True)
class Trust:
    """Who is trusted with exact sums: the server (neither is given), no one, or each site with its own rows only.

    With shares every site adds its part of the noise under masks, so that no one ever holds an exact sum. Locally every
    row's report, its pair (g, h) at its leaf and zeros elsewhere, gets the noise that hides any other report; a site
    adds its rows' reports up.

    Args:
        local_rows: number of all sites' rows, public, where each is noised by itself.
    """

    shares: NoiseShares | None = None
    local_rows: int | None = None

    @property
    def is_trusted_aggregator(self) -> bool:
        """Whether the server sees exact sums and adds the noise once."""
        return self.shares is None and self.local_rows is None

    @property
    def n_honest(self) -> int:
        """Shares of the noise that the accounting relies on."""
        return 1 if self.shares is None else self.shares.n_honest

    @property
    def noise_factor(self) -> float:
        """The noise on a released sum, in multiples of what privacy asks for."""
        if self.local_rows is not None:
            return self.local_factor(self.local_rows)
        return 1.0 if self.shares is None else self.shares.total_noise_factor

    def local_factor(self, n_rows: int) -> float:
        """Return the noise on the sum of so many rows' reports, in the same multiples.

        A report may become any other: that is twice the sensitivity of a row that is added or removed. The sum of the
        rows' discrete Gaussians is one discrete Gaussian but for 1e-60.
        """
        return 2.0 * math.sqrt(max(n_rows, 1))

    def check_sites(self, n_sites: int) -> None:
        """Refuse another number of sites than the noise was divided for.

        Raises:
            ConfigurationError: another number of sites.
            PrivacyRefusal: so few that too little noise is left.
        """
        if self.shares is not None:
            self.shares.check_live(n_sites)
            if n_sites != self.shares.n_sites:
                raise ConfigurationError(f"the noise was divided for {self.shares.n_sites} sites, not for {n_sites}")


TRUSTED_SERVER = Trust()
"""The server is trusted with exact sums."""


# What the trainer of private trees is given: a public plan, the site's own rows, and sums over all sites.


@dataclass(frozen=True, slots=True)
class PrivateTreesPlan:
    """Everything public about one training; equal at all sites.

    Args:
        bounds: public interval of each feature.
        releases: all that may be released.
        structure_seed: public seed of the forest's structure. Noise never comes from it.
        target: what the label is.
    """

    method: Method
    bounds: tuple[FeatureBounds, ...]
    releases: ReleasePlan = field(repr=False)  # it follows from the rest and from the noise
    trust: Trust
    structure_seed: int
    feature_names: tuple[str, ...] = ()
    target: leaf_weights.Target = leaf_weights.TWO_CLASSES

    @property
    def weights(self) -> leaf_weights.LeafWeights:
        """What a leaf answers, and the row statistics it is computed from."""
        return self.method.weight_update.weights(self.target)

    @property
    def leaf_unit(self) -> float:
        """What a leaf's weight is multiplied with besides the learning rate. Units: of a score."""
        if isinstance(self.target, leaf_weights.Number):
            return leaf_weights.residual_unit(self.target, self.method.query)
        if isinstance(self.target, leaf_weights.Times):
            return self.target.loss.scale * leaf_weights.surprise_unit(self.target, self.method.query)
        return self.weights.score_unit

    @property
    def ridge(self) -> float:
        """XGBoost's lambda, with the share that is in proportion to the noise on a leaf."""
        return leaf_weights.noise_proportional_ridge(self.method.ridge, self.method.noise_ridge, self.leaf_noise[0])

    @property
    def leaf_noise(self) -> tuple[float, float]:
        """Standard deviation of the noise on a leaf's sums G and H, of each class if there are several.

        Units: of g and h.

        With distributed noise it is that of all sites' shares together.
        """
        g, *_, h = self.releases.tree_noise.std
        weights = self.weights
        if isinstance(weights, leaf_weights.ClassShares):  # H is the sum of all classes' rows
            h *= math.sqrt(weights.n_outputs)
        return g * self.trust.noise_factor * weights.noise_kept, h * self.trust.noise_factor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A site's rows.

    Shapes: columns: float32[n_features, n_rows], held or read when they are asked for; NaN is missing and goes right;
        label: float32[n_rows], positions of classes or finite numbers, or float32[n_rows, 2] of times; weights:
        float32[n_rows] in units of the public largest one, or None.
    """

    columns: Columns
    label: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None

    def statistics(self, margin: NDArray[np.float32], plan: PrivateTreesPlan) -> NDArray[np.int64]:
        """Return each row's pair (g, h), or its vector of several classes, within the method's sensitivity.

        That holds whatever the margins are. Weights are clipped into [0, 1] here: no row counts for more than one.

        Shapes: margin: float32[n_rows], or float32[n_rows, n_classes]; result: int64[n_rows, n_coordinates]. Units:
            grid steps.
        """
        values = plan.weights.row_statistics(margin, self.label, plan.method.query).values
        if self.weights is None:
            return values
        factors = np.clip(self.weights.astype(np.float64), 0.0, 1.0)
        # Toward zero, so that a row stays on the grid and inside its bounds.
        return np.trunc(values * factors[:, None]).astype(np.int64)


class SumsOverSites(Protocol):
    """Asks for noisy sums over the rows of all sites, in the order of the plan's releases."""

    def release(
        self, kind: Kind, number: int, exact: NDArray[np.int64], tree: int | None = None, level: int | None = None
    ) -> NDArray[np.int64]:
        """Return noisy sums for the exact ones of the own rows. Shapes: both alike. Units: grid steps.

        Args:
            number: boosting round, -1 before the first.
            tree, level: which release of the round, where it has several.

        Raises:
            ProtocolError: the plan does not pay for it.
        """


AfterRound = Callable[[int], None]
"""Takes note of a finished round."""


def ignore_round(number: int) -> None:
    """Take no note."""
