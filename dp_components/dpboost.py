"""DPBoost (Li et al., AAAI 2020): boosting with a pure epsilon and a trusted aggregator, with its errors mended.

What differs from the paper, because the paper's version is not private: the gain's sensitivity is 3 g*^2, leaves are
noised with the leaf budget, split candidates are public and all of them always run, trees are complete (no choice of
the next leaf by its exact gain, no early stop), rows choose their tree by a keyed hash, there is no base score.
Noised leaves are clipped once more, which costs nothing; a regression may pay for its start (``release_start``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.events import (
    ComposedEvent,
    DisjointPartEvent,
    Event,
    ExponentialEvent,
    LaplaceEvent,
    Release,
    RepeatedEvent,
)
from dp_components.mechanisms import add_laplace_noise, choose_exponentially, grid_utilities, utility_sensitivity
from dp_components.sensitivity import GRID_BITS, ClippedRows, Norm, Sensitivity, clip_rows, grid_bound
from dp_components.split_candidates import Candidates, Columns, FeatureBounds
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Gradient-based data filtering (GDF): only rows with a gradient of at most g* take part in a tree.


GRADIENT_BOUND = 1.0
"""g*: the largest gradient at score 0, for square loss on labels in [-1, 1] and for logistic loss."""


@dataclass(frozen=True, slots=True, eq=False)
class FilteredRows:
    """The rows of one tree.

    Shapes: is_kept: bool[n_rows]; clipped.values: int64[n_kept, 1], gradients in units of 2^-20.
    """

    is_kept: NDArray[np.bool_]
    clipped: ClippedRows


def filter_by_gradient(grad: ArrayLike) -> FilteredRows:
    """Drop the rows whose gradient exceeds g*, and put the others on the integer grid.

    Shapes:  grad: float[n_rows].
    Privacy: which rows are dropped depends on each row alone and on the trees that are out already. L1 sensitivity of
        a sum: g* when a row is added or removed.

    Raises:
        ValueError: a gradient is not finite.
    Reference: DPBoost, section "Gradient-based Data Filtering".
    """
    gradients = np.asarray(grad, dtype=np.float64)
    if not np.isfinite(gradients).all():
        raise ValueError("gradients must be finite")
    is_kept = np.abs(gradients) <= GRADIENT_BOUND
    return FilteredRows(is_kept, clip_rows(gradients[is_kept, np.newaxis], [GRADIENT_BOUND], norm=Norm.L1))


def gradient_sensitivity() -> Sensitivity:
    """Return the L1 sensitivity that ``filter_by_gradient`` guarantees, for the side that sees sums only."""
    return filter_by_gradient(np.zeros(0)).clipped.sensitivity


def gain_bound(gradients: Sensitivity) -> float:
    """Return the most that adding or removing a row changes any candidate's gain: 3 g*^2, for every lambda > 0.

    The row enters one child. With G and n of that child without the row, its term changes by (2 G g + g^2) / (n + 1 +
    lambda) - G^2 / ((n + lambda)(n + 1 + lambda)). As |G| <= n g*, that is below 2 g*^2 and above -3 g*^2, and comes
    near the latter as n grows. The paper's (3 lambda + 2) / ((lambda + 1)(lambda + 2)) g*^2 holds for n <= 1 only.

    Units: of g squared.
    """
    return float(3 * (gradients.bound / 2**GRID_BITS) ** 2)


# Geometric leaf clipping (GLC), and the leaves' noise.


LEAF_BITS = 32
"""Leaf weights are whole numbers of 2^-32, so that late trees, which are clipped to little, keep their digits."""


def clip_bound(gradients: Sensitivity, learning_rate: float, position: int) -> int:
    """Return the largest leaf weight of a tree: g* (1 - eta)^position, rounded down.

    Units: 2^-LEAF_BITS.

    Args:
        gradients: sensitivity of a sum of gradients, hence g*.
        learning_rate: eta.
        position: 0 for the first tree; counts as the plan says.

    Raises:
        ValueError: nothing is left of the weight after so many trees.
    """
    bound = math.floor(math.ldexp(gradients.bound * (1 - learning_rate) ** position, LEAF_BITS - GRID_BITS))
    if bound < 1:
        raise ValueError("geometric clipping leaves nothing after so many trees: use smaller ensembles")
    return bound


def leaf_sensitivity(gradients: Sensitivity, ridge: int, bound: int) -> Sensitivity:
    """Return the L1 sensitivity of all leaf weights of a tree: min(g* / (1 + lambda), 2 bound).

    A row lies in one leaf. With n >= 0 further rows there it moves G / (n + lambda) by at most
    (2 n + lambda) g* / ((n + lambda)(n + 1 + lambda)), which is largest for n = 0 and n = 1 alike. Weights are rounded
    down to integers; integers that differ by less than s + 1 before rounding up differ by at most ceil(s).

    Units: ridge: lambda in 2^-GRID_BITS; bound and result: 2^-LEAF_BITS.
    """
    numerator = int(gradients.bound) << LEAF_BITS
    without_clipping = -(-numerator // ((1 << GRID_BITS) + ridge))
    return Sensitivity(float(min(without_clipping, 2 * bound)), Norm.L1, gradients.relation)


def clip_released(weights: NDArray[np.int64], bound: int) -> NDArray[np.int64]:
    """Clip released weights to the bound that the weights obey without their noise.

    Not in the paper. Late trees have a bound far below their noise, so this takes most of the noise away.

    Shapes:  int64[n_leaves].
    Privacy: post-processing.
    """
    return np.clip(weights, -bound, bound)


def release_leaves(settings: TreeSettings, sums: Sums, randomness: RandomSource = OS_RANDOMNESS) -> Release:
    """Compute, clip and noise the weights of all leaves of a tree, empty leaves too.

    Shapes:  sums: int64[n_leaves] each, of gradients and of rows; value: int64[n_leaves].
    Units:   gradients: 2^-GRID_BITS; value: 2^-LEAF_BITS.
    Privacy: exactly ``leaf_epsilon`` for all leaves together, because they are disjoint.

    Reference: DPBoost, Algorithm 1, lines 12 to 16, where the noise's budget must be that of the leaves.
    """
    ridge, bound = settings.ridge, settings.leaf_bound
    weights = [
        (-int(total) << LEAF_BITS) // ((int(count) << GRID_BITS) + ridge) for total, count in zip(*sums, strict=True)
    ]
    clipped = np.clip(np.array(weights, dtype=np.int64), -bound, bound)
    sensitivity = leaf_sensitivity(gradient_sensitivity(), ridge, bound)
    return add_laplace_noise(clipped, sensitivity, settings.leaf_epsilon, randomness)


def release_clipped_leaves(settings: TreeSettings, sums: Sums, randomness: RandomSource = OS_RANDOMNESS) -> Release:
    """Release the leaf weights, clipped once more after the noise. Shapes: as ``release_leaves``."""
    noised = release_leaves(settings, sums, randomness)
    return Release(clip_released(noised.value, settings.leaf_bound), noised.event)


# TrainSingleTree: one complete tree of noised choices and noised leaves.


# Choosing the splits of one level of a tree by the exponential mechanism, over all public candidates.


GAIN_GRID = 2.0**-20
MAX_ROWS = 1 << 28
"""Up to here the rounding of a gain in doubles stays below half a unit of the gain grid."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitTable:
    """All candidates of all features under one number, and where each feature's bins lie in a row of bin sums.

    Shapes: feature, candidate: int64[n_candidates]; bins_of_feature: one slice per feature.
    """

    feature: NDArray[np.int64]
    candidate: NDArray[np.int64]
    bins_of_feature: tuple[slice, ...]

    @classmethod
    def of(cls, candidates: Candidates) -> SplitTable:
        """Number the candidates.

        Raises:
            ValueError: there are none.
        """
        counts = candidates.counts
        if sum(counts) == 0:
            raise ValueError("no feature has a split candidate")
        ends = np.cumsum([count + 1 for count in counts])
        return cls(
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([np.arange(count) for count in counts]),
            tuple(slice(int(end) - count - 1, int(end)) for end, count in zip(ends, counts, strict=True)),
        )

    @property
    def n_bins(self) -> int:
        """Bins of all features together."""
        return int(self.bins_of_feature[-1].stop)

    def left_sums(self, bin_sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what goes left at each candidate. Shapes: bin_sums: int64[..., n_bins]; result [..., n_candidates]."""
        parts = [np.cumsum(bin_sums[..., bins], axis=-1)[..., :-1] for bins in self.bins_of_feature]
        return np.concatenate(parts, axis=-1)

    def totals(self, bin_sums: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums per node: every feature's bins hold every row once."""
        result: NDArray[np.int64] = bin_sums[..., self.bins_of_feature[0]].sum(axis=-1)
        return result


def gains(
    table: SplitTable, grad_sums: NDArray[np.int64], counts: NDArray[np.int64], ridge: float
) -> NDArray[np.float64]:
    """Return G_L^2 / (n_L + lambda) + G_R^2 / (n_R + lambda) of each candidate.

    Shapes: grad_sums, counts: int64[n_nodes, n_bins], from ``bin_sums``; result: float64[n_nodes, n_candidates].
    Units:  grad_sums: 2^-GRID_BITS; ridge: rows.
    Privacy: exact; must not leave the aggregator.
    """
    left, n_left = table.left_sums(grad_sums), table.left_sums(counts)
    right = table.totals(grad_sums)[:, np.newaxis] - left
    n_right = table.totals(counts)[:, np.newaxis] - n_left

    def half(sums: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = np.ldexp(sums.astype(np.float64), -GRID_BITS) ** 2 / (n + ridge)
        return result

    return half(left, n_left) + half(right, n_right)


def choose_splits(
    table: SplitTable, settings: TreeSettings, sums: Sums, randomness: RandomSource = OS_RANDOMNESS
) -> Release:
    """Choose one candidate for every node of a level, nodes without rows included.

    Shapes:  sums: as ``gains``; value: int64[n_nodes], numbers in the table.
    Privacy: exactly ``split_epsilon`` for the level: a row lies in one of its nodes. Utility sensitivity 3 g*^2.

    Raises:
        ValueError: more rows than ``MAX_ROWS``.
    Reference: DPBoost, Algorithm 1, lines 4 to 10.
    """
    if int(table.totals(sums[1]).sum()) > MAX_ROWS:
        raise ValueError("too many rows for the grid of the gains")
    gradients, epsilon = gradient_sensitivity(), settings.split_epsilon
    sensitivity = utility_sensitivity(gain_bound(gradients), GAIN_GRID, gradients)
    chosen = [
        int(choose_exponentially(grid_utilities(of_node, GAIN_GRID), sensitivity, epsilon, randomness).value[0])
        for of_node in gains(table, *sums, math.ldexp(settings.ridge, -GRID_BITS))
    ]
    return Release(np.array(chosen, dtype=np.int64), ExponentialEvent(epsilon, gradients.relation))


# TrainSingleTree: one complete tree of noised choices and noised leaves.


Sums = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """What a tree is grown with.

    Units: ridge: lambda in 2^-GRID_BITS rows; leaf_bound: 2^-LEAF_BITS.
    """

    depth: int
    ridge: int
    leaf_bound: int
    split_epsilon: float
    leaf_epsilon: float


class TreeRows:
    """One site's rows of one tree. Only sums over nodes and bins leave it, under secure aggregation."""

    def __init__(self, bins: NDArray[np.uint8], grad: NDArray[np.float64], table: SplitTable) -> None:
        """Shapes: bins: uint8[n_features, n_rows]; grad: float64[n_rows]."""
        filtered = filter_by_gradient(grad)
        self._bins = bins[:, filtered.is_kept]
        self._grad = filtered.clipped.values[:, 0].astype(np.float64)
        self._node = np.zeros(self._grad.size, dtype=np.int64)
        self._table = table

    def bin_sums(self, n_nodes: int) -> Sums:
        """Sum gradients and rows per node of the level and bin. Shapes: int64[n_nodes, n_bins] each."""
        sums = np.zeros((2, n_nodes, self._table.n_bins), dtype=np.int64)
        for feature, bins in enumerate(self._table.bins_of_feature):
            width = bins.stop - bins.start
            place = self._node * width + self._bins[feature]
            # Whole numbers below 2^53: exact in doubles.
            of_grad = np.bincount(place, self._grad, minlength=n_nodes * width)
            of_rows = np.bincount(place, minlength=n_nodes * width)
            sums[0, :, bins] = of_grad.reshape(n_nodes, width)
            sums[1, :, bins] = of_rows.reshape(n_nodes, width)
        return sums[0], sums[1]

    def move_down(self, splits: NDArray[np.int64]) -> None:
        """Follow the splits of a level. Shapes: splits: int64[n_nodes], numbers in the table."""
        self._node = step_down(self._table, splits, self._bins, self._node)

    def leaf_sums(self, n_leaves: int) -> Sums:
        """Sum gradients and rows per leaf. Shapes: int64[n_leaves] each."""
        of_grad = np.bincount(self._node, self._grad, minlength=n_leaves)
        return of_grad.astype(np.int64), np.bincount(self._node, minlength=n_leaves)


def train_single_tree(
    sites: Sequence[TreeRows],
    table: SplitTable,
    settings: TreeSettings,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Grow one complete tree from the sites' sums.

    Shapes:  value: int64[2^depth - 1 + 2^depth]: the splits level by level, then the leaf weights.
    Units:   splits: numbers in the table; leaf weights: 2^-LEAF_BITS.
    Privacy: depth * split_epsilon + leaf_epsilon. The aggregator sees exact sums and is trusted with them.

    Reference: DPBoost, Algorithm 1 (the slides' TrainSingleTree).
    """
    parts: list[Release] = []
    for level in range(settings.depth):
        sums = _add([site.bin_sums(1 << level) for site in sites])
        parts.append(choose_splits(table, settings, sums, randomness))
        for site in sites:
            site.move_down(parts[-1].value)
    leaf_sums = _add([site.leaf_sums(1 << settings.depth) for site in sites])
    leaves = release_clipped_leaves(settings, leaf_sums, randomness)
    event = ComposedEvent((RepeatedEvent(parts[0].event, settings.depth), leaves.event))
    return Release(np.concatenate([part.value for part in parts] + [leaves.value]), event)


def step_down(
    table: SplitTable, splits: NDArray[np.int64], bins: NDArray[np.uint8], node: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each row's node one level below. Shapes: splits: int64[n_nodes]; node, result: int64[n_rows]."""
    chosen = splits[node]
    goes_right = bins[table.feature[chosen], np.arange(node.size)] > table.candidate[chosen]
    return 2 * node + goes_right


def tree_outputs(table: SplitTable, tree: NDArray[np.int64], bins: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return a released tree's leaf weight for each row.

    Shapes: tree: as ``train_single_tree`` gives it; bins: uint8[n_features, n_rows]; result: float64[n_rows].
    """
    depth = tree.size.bit_length() - 1
    node = np.zeros(bins.shape[1], dtype=np.int64)
    for level in range(depth):
        first = (1 << level) - 1
        node = step_down(table, tree[first : first + (1 << level)], bins, node)
    return np.ldexp(tree[(1 << depth) - 1 :][node].astype(np.float64), -LEAF_BITS)


def _add(sums: Sequence[Sums]) -> Sums:
    grads, counts = zip(*sums, strict=True)
    return sum(grads[1:], grads[0]), sum(counts[1:], counts[0])


# The two losses whose gradients at score 0 are at most g* = 1.


Vector = NDArray[np.float64]


class Loss(Protocol):
    """A loss whose second derivative is taken for 1, as in the paper."""

    def target(self, label: Vector) -> Vector:
        """Return the labels as the gradient wants them. Shapes: float64[n_rows]."""

    def gradient(self, score: Vector, target: Vector) -> Vector:
        """Return the gradient at the score."""

    def prediction(self, score: Vector) -> Vector:
        """Return what is predicted: post-processing."""


@dataclass(frozen=True, slots=True)
class SquaredLoss:
    """Regression. The public bounds of the label are mapped onto [-1, 1]; labels outside are clamped.

    There is no base score: the labels' mean would be a release of its own.
    """

    label_bounds: FeatureBounds

    def __post_init__(self) -> None:
        if not self.label_bounds.low < self.label_bounds.high:
            raise ValueError("regression needs public bounds of the label, the lower one below the upper one")

    def target(self, label: Vector) -> Vector:
        """Scale and clamp."""
        if not np.isfinite(label).all():
            raise ValueError("labels must be finite")
        low, high = self.label_bounds.low, self.label_bounds.high
        return np.clip(2 * (label - low) / (high - low) - 1, -1.0, 1.0)

    def gradient(self, score: Vector, target: Vector) -> Vector:
        """Return score - target."""
        return score - target

    def prediction(self, score: Vector) -> Vector:
        """Scale back; a label lies within its public bounds, so a prediction does too."""
        low, high = self.label_bounds.low, self.label_bounds.high
        return low + (np.clip(score, -1.0, 1.0) + 1) / 2 * (high - low)


@dataclass(frozen=True, slots=True)
class LogisticLoss:
    """Binary classification with labels 0 and 1; filtering drops no row."""

    def target(self, label: Vector) -> Vector:
        """Check."""
        if not np.isin(label, (0.0, 1.0)).all():
            raise ValueError("binary labels must be 0 or 1")
        return label

    def gradient(self, score: Vector, target: Vector) -> Vector:
        """Return p - y."""
        return self.prediction(score) - target

    def prediction(self, score: Vector) -> Vector:
        """Return the probability of 1."""
        return 0.5 * (1 + np.tanh(score / 2))


# A paid start: the score from which a regression's trees begin, released once with a share of the budget.
#
# Not in the paper, whose code starts regressions from the exact mean of the labels, which is a release that nobody pays
# for. With two classes it would do harm: geometric clipping keeps the sum of all trees of an ensemble below g*, which
# could not outweigh a start far from 0.


def start_sums(grad: ArrayLike) -> NDArray[np.int64]:
    """Return one site's sum of gradients at score 0, and its number of rows.

    Shapes: grad: float[n_rows]; result: int64[2].
    Units:  2^-GRID_BITS, of rows too.
    """
    values = filter_by_gradient(grad).clipped.values
    return np.array([values.sum(), values.shape[0] << GRID_BITS], dtype=np.int64)


def release_start(sums: NDArray[np.int64], epsilon: float, randomness: RandomSource = OS_RANDOMNESS) -> Release:
    """Release the score that the mean gradient asks for: minus G / n, within [-1, 1].

    Shapes:  sums: int64[2], over all sites; value: int64[1].
    Units:   value: 2^-LEAF_BITS.
    Privacy: exactly ``epsilon``; a row moves G by at most g* and n by 1.
    """
    gradients = gradient_sensitivity()
    moved = Sensitivity(gradients.bound + (1 << GRID_BITS), Norm.L1, gradients.relation)
    noised = add_laplace_noise(sums, moved, epsilon, randomness)
    grad_sum, n_rows = (int(value) for value in noised.value)
    one = 1 << LEAF_BITS
    start = max(-one, min(one, -(grad_sum << LEAF_BITS) // n_rows)) if n_rows > 0 else 0
    return Release(np.array([start], dtype=np.int64), noised.event)


# Which tree of an ensemble a record belongs to: a keyed hash of the record alone.
#
# The paper draws subsets of fixed sizes, which depend on the number of rows; then one more row moves others, and trees
# do not use disjoint data in the sense of parallel composition. A hash of the record's own identifier moves nobody
# else, and every site can compute it for its rows without asking anyone.


MIN_KEY_BYTES = 16
_PURPOSE = b"dpboost rows"


def assign_records(
    key: bytes, site: str, record_ids: Sequence[str], ensemble: int, shares: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Assign each record to one tree, independently, with probability ``shares[tree]``.

    Shapes:   shares: float64[n_trees], adding up to 1; result: int64[n_records].
    Security: the guarantee does not rest on the key's secrecy; the key keeps anyone from choosing identifiers that
        land in one tree.
    Privacy:  depends on nothing but the record's identifier, so a neighbouring data set moves no other record.

    Args:
        key: the job's key, the same at all sites.
        site: name of the site.
        record_ids: stable identifiers; a row number is none, because removing a row would move those after it.
        ensemble: number of the ensemble; each has an assignment of its own.
        shares: probability of each tree.

    Raises:
        ValueError: the key is too short, or an identifier is empty.
        TypeError: an identifier is not a text.
    """
    if not MIN_KEY_BYTES <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"the key of the assignment needs {MIN_KEY_BYTES} to {hashlib.blake2b.MAX_KEY_SIZE} bytes")
    if not all(isinstance(record, str) for record in record_ids):
        raise TypeError("record identifiers are texts, never row numbers")
    if not all(record_ids):
        raise ValueError("a record identifier must not be empty")
    begun = hashlib.blake2b(key=key, digest_size=8, person=_PURPOSE)
    name = site.encode()
    begun.update(ensemble.to_bytes(4, "big") + len(name).to_bytes(4, "big") + name)

    def word(record: str) -> int:
        hashed = begun.copy()
        hashed.update(record.encode())
        return int.from_bytes(hashed.digest(), "big")

    words = np.fromiter((word(record) for record in record_ids), dtype=np.uint64, count=len(record_ids))
    ends = np.cumsum(shares)[:-1]
    return np.searchsorted(ends, np.ldexp(words.astype(np.float64), -64), side="right").astype(np.int64)


# What a DPBoost model costs, and how its budget and its rows are divided: DPBoost, PARA and SEQ.


# The parts are rounded down by a little more than adding them up can round up.
_DOWN = 1 - 2.0**-47
MAX_DEPTH = 12


class RowSharing(Enum):
    """How an ensemble's trees share the rows."""

    GEOMETRIC = "geometric"
    """Tree t gets a share proportional to (1 - eta)^t, as gradients fall: the paper's."""
    EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class DpBoostPlan:
    """Parameters of a model; the defaults are those of the paper's experiments.

    Attributes:
        epsilon: of the whole model; pure.
        n_trees: T.
        trees_per_ensemble: T_e. Trees of one ensemble use disjoint rows; ensembles use the same rows again.
        depth: of every tree; trees are complete.
        learning_rate: eta.
        ridge: lambda; above 0.
        sharing: how the trees of an ensemble share the rows.
        clips_over_all_trees: whether geometric clipping counts all trees, or begins anew in each ensemble.
        start_share: part of epsilon that pays for the score to start from (paid_start.py); 0 starts from 0.
    """

    epsilon: float
    n_trees: int = 50
    trees_per_ensemble: int = 50
    depth: int = 6
    learning_rate: float = 0.1
    ridge: float = 0.1
    sharing: RowSharing = RowSharing.GEOMETRIC
    clips_over_all_trees: bool = False
    start_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("n_trees", "trees_per_ensemble", "depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1")
        if self.depth > MAX_DEPTH:
            raise ValueError(f"depth must be at most {MAX_DEPTH}")
        if not 0 < self.learning_rate < 1:
            raise ValueError("learning_rate must be between 0 and 1")
        if not 0 < self.epsilon < math.inf:
            raise ValueError("epsilon must be a finite number above 0")
        if not 0 <= self.start_share < 1:
            raise ValueError("start_share must be from 0 to less than 1")
        grid_bound(self.ridge, 20)
        self.tree_settings(self.n_ensembles - 1, self.ensemble_size(self.n_ensembles - 1) - 1)
        self.tree_settings(0, self.ensemble_size(0) - 1)

    @property
    def n_ensembles(self) -> int:
        """N_e."""
        return -(-self.n_trees // self.trees_per_ensemble)

    @property
    def start_epsilon(self) -> float:
        """Budget of the start."""
        return self.epsilon * self.start_share * _DOWN

    @property
    def split_epsilon(self) -> float:
        """Budget of one level of a tree: half of the tree's, divided by the depth."""
        return self.leaf_epsilon / self.depth * _DOWN

    @property
    def leaf_epsilon(self) -> float:
        """Budget of all leaves of a tree: half of the tree's."""
        return self.epsilon * (1 - self.start_share) / self.n_ensembles / 2 * _DOWN

    def ensemble_size(self, ensemble: int) -> int:
        """Return the number of trees; the last ensemble may have fewer."""
        return min(self.trees_per_ensemble, self.n_trees - ensemble * self.trees_per_ensemble)

    def row_shares(self, ensemble: int) -> NDArray[np.float64]:
        """Return the probability of each tree of an ensemble: eta (1 - eta)^t / (1 - (1 - eta)^T_e), or equal ones.

        Shapes: result: float64[ensemble_size].
        """
        size = self.ensemble_size(ensemble)
        falling = 1.0 if self.sharing is RowSharing.EQUAL else 1 - self.learning_rate
        weights = falling ** np.arange(size)
        result: NDArray[np.float64] = weights / weights.sum()
        return result

    def tree_settings(self, ensemble: int, tree: int) -> TreeSettings:
        """Return the settings of one tree, each with the whole budget of its ensemble.

        Raises:
            ValueError: geometric clipping leaves nothing of so late a tree.
        """
        position = tree + (ensemble * self.trees_per_ensemble if self.clips_over_all_trees else 0)
        bound = clip_bound(gradient_sensitivity(), self.learning_rate, position)
        return TreeSettings(self.depth, grid_bound(self.ridge, 20), bound, self.split_epsilon, self.leaf_epsilon)

    def ensemble_event(self) -> Event:
        """Return what an ensemble costs: as much as one tree, because no row is in two of its trees.

        Reference: parallel composition; it holds for trees that are chosen adaptively, too.
        """
        relation = gradient_sensitivity().relation
        splits = RepeatedEvent(ExponentialEvent(self.split_epsilon, relation), self.depth)
        return ComposedEvent((splits, LaplaceEvent(self.leaf_epsilon, relation)))

    def tree_event(self, ensemble: int, tree: int) -> Event:
        """Return what one tree costs as a part of its ensemble, for a ledger that is charged tree by tree.

        The first tree of an ensemble costs as much as all of them, because a record is in one of them only.
        """

        def part(event: ExponentialEvent | LaplaceEvent) -> DisjointPartEvent:
            return DisjointPartEvent(event, f"ensemble {ensemble}", tree)

        relation = gradient_sensitivity().relation
        splits = RepeatedEvent(part(ExponentialEvent(self.split_epsilon, relation)), self.depth)
        return ComposedEvent((splits, part(LaplaceEvent(self.leaf_epsilon, relation))))

    def event(self) -> Event:
        """Return what the model costs: ensembles add up. To be reserved before training (``Ledger.open_job``)."""
        ensembles = RepeatedEvent(self.ensemble_event(), self.n_ensembles)
        return ComposedEvent((self.start_event(), ensembles)) if self.start_share else ensembles

    def events_by_tree(self) -> Event:
        """Return what the model costs in the events that are charged one by one: ``start_event``, ``tree_event``."""
        trees = [
            self.tree_event(ensemble, tree)
            for ensemble in range(self.n_ensembles)
            for tree in range(self.ensemble_size(ensemble))
        ]
        return ComposedEvent((*([self.start_event()] if self.start_share else []), *trees))

    def start_event(self) -> Event:
        """Return what the start costs, where it is paid for."""
        return LaplaceEvent(self.start_epsilon, gradient_sensitivity().relation)


# Ensemble of ensembles (EoE): boosting over disjoint rows inside an ensemble, over the same rows between ensembles.


Publish = Callable[[str, Callable[[], Release]], NDArray[np.int64]]
"""(query, make) -> value: charges the release before it hands it out, as ``Ledger.release`` with its job does."""


@dataclass(frozen=True, slots=True, eq=False)
class SiteData:
    """A site's rows. None of it leaves the site but sums.

    Shapes: columns: float32[n_features, n_rows], held or read when they are asked for; label: float64[n_rows];
        record_ids: one stable text per row.
    """

    site: str
    columns: Columns
    label: NDArray[np.float64]
    record_ids: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.columns.shape) != 2 or self.label.shape != (self.columns.shape[1],):
            raise ValueError("columns are a matrix of features by rows, with one label per row")
        if len(self.record_ids) != self.label.size:
            raise ValueError("every row needs a record identifier")


@dataclass(frozen=True, slots=True, eq=False)
class DpBoostModel:
    """Released trees and the public data to read them with.

    Shapes: trees: int64[n_trees, n_values], each row as ``train_single_tree`` gives it.
    Units:  start: 2^-LEAF_BITS, as leaves.
    """

    candidates: Candidates
    loss: Loss
    learning_rate: float
    trees: NDArray[np.int64]
    start: int = 0

    def scores(self, bins: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Return start and trees added up. Shapes: bins: uint8[n_features, n_rows]; result: float64[n_rows]."""
        start = start_scores(self.start, bins.shape[1])
        return add_trees(start, self.trees, bins, SplitTable.of(self.candidates), self.learning_rate)

    def predict(self, columns: ArrayLike) -> NDArray[np.float64]:
        """Return the predicted value, or the probability of 1. Shapes: columns: float32[n_features, n_rows]."""
        return self.loss.prediction(self.scores(self.candidates.bin_rows(np.asarray(columns, dtype=np.float32))))


class EnsembleTrainer:
    """Trains the ensembles of one model one after the other."""

    def __init__(
        self,
        sites: Sequence[SiteData],
        candidates: Candidates,
        loss: Loss,
        plan: DpBoostPlan,
        key: bytes,
        randomness: RandomSource = OS_RANDOMNESS,
    ) -> None:
        """Bin the rows.

        Args:
            sites: all sites, under names that differ.
            candidates: public split candidates, or ones that were paid for; never values of the data.
            loss: with its public bounds.
            plan: parameters and budget.
            key: of the rows' assignment to trees, the same at all sites.
            randomness: source of the noise.

        Raises:
            ValueError: no site, two sites of one name, other features than the candidates have, impossible labels, or
                a start that is paid for two classes.
        """
        if not sites or len({site.site for site in sites}) != len(sites):
            raise ValueError("training needs sites, under names that differ")
        if any(site.columns.shape[0] != len(candidates.of_feature) for site in sites):
            raise ValueError("a site has other features than the split candidates")
        if plan.start_share and not isinstance(loss, SquaredLoss):
            raise ValueError("a paid start is for regressions: with two classes the trees could not outweigh it")
        self._sites, self._plan, self._loss, self._key, self._randomness = sites, plan, loss, key, randomness
        self._table = SplitTable.of(candidates)
        self._bins = [candidates.bin_rows(site.columns) for site in sites]
        self._targets = [loss.target(site.label.astype(np.float64)) for site in sites]

    def start(self, start: int = 0) -> list[NDArray[np.float64]]:
        """Return the scores before the first tree, for each site. Shapes: float64[n_rows]."""
        return [start_scores(start, target.size) for target in self._targets]

    def release_start(self) -> Release:
        """Release the score to start from. Privacy: ``plan.start_event()``."""
        gradients = (self._loss.gradient(np.zeros(target.size), target) for target in self._targets)
        total = np.sum([start_sums(grad) for grad in gradients], axis=0)
        return release_start(total, self._plan.start_epsilon, self._randomness)

    def train_ensemble(self, ensemble: int, scores: Sequence[NDArray[np.float64]]) -> Release:
        """Train the trees of one ensemble, each on the rows that are assigned to it.

        Shapes:  scores: float64[n_rows] for each site, of the trees before; value: int64[n_trees, n_values].
        Privacy: what one tree costs: a record is in one tree only, wherever the others' are.

        Reference: DPBoost, Algorithm 2.
        """
        plan = self._plan
        trees_of_rows = [
            assign_records(self._key, site.site, site.record_ids, ensemble, plan.row_shares(ensemble))
            for site in self._sites
        ]
        scores, trees = list(scores), []
        for tree in range(plan.ensemble_size(ensemble)):
            rows = [self._rows_of(i, trees_of_rows[i] == tree, scores[i]) for i in range(len(self._sites))]
            settings = plan.tree_settings(ensemble, tree)
            released = train_single_tree(rows, self._table, settings, self._randomness).value
            trees.append(released)
            scores = self.advance(scores, released[np.newaxis])
        return Release(np.stack(trees), plan.ensemble_event())

    def advance(self, scores: Sequence[NDArray[np.float64]], trees: NDArray[np.int64]) -> list[NDArray[np.float64]]:
        """Add released trees to every site's scores."""
        return [
            add_trees(score, trees, bins, self._table, self._plan.learning_rate)
            for score, bins in zip(scores, self._bins, strict=True)
        ]

    def _rows_of(self, site: int, is_assigned: NDArray[np.bool_], scores: NDArray[np.float64]) -> TreeRows:
        grad = self._loss.gradient(scores[is_assigned], self._targets[site][is_assigned])
        return TreeRows(self._bins[site][:, is_assigned], grad, self._table)


def train(
    sites: Sequence[SiteData],
    candidates: Candidates,
    loss: Loss,
    plan: DpBoostPlan,
    key: bytes,
    publish: Publish,
    randomness: RandomSource = OS_RANDOMNESS,
) -> DpBoostModel:
    """Train a model with a pure epsilon of ``plan.epsilon``, under a trusted aggregator.

    Privacy: adding or removing a record of any site; ``plan.event()`` says what it costs. Every ensemble passes
        through ``publish`` before the next one sees it.

    Args:
        sites: as in ``EnsembleTrainer``, like the next four.
        candidates: see there.
        loss: see there.
        plan: see there.
        key: see there.
        publish: usually ``partial(ledger.release, job_id)``, after ``ledger.open_job(job_id, plan.event())``.
        randomness: source of the noise.

    Raises:
        ValueError: arguments that do not fit together.
        PrivacyRefusal: from ``publish``: the budget does not allow it.
    """
    trainer = EnsembleTrainer(sites, candidates, loss, plan, key, randomness)
    start = 0
    if plan.start_share:
        start = int(publish(_query("start", candidates, loss, plan, key, []), trainer.release_start)[0])
    scores = trainer.start(start)
    ensembles: list[NDArray[np.int64]] = []
    for ensemble in range(plan.n_ensembles):
        before = [np.array([start]), *ensembles]
        query = _query(f"ensemble {ensemble}", candidates, loss, plan, key, before)
        trees = publish(query, partial(trainer.train_ensemble, ensemble, scores))
        scores = trainer.advance(scores, trees)
        ensembles.append(trees)
    return DpBoostModel(candidates, loss, plan.learning_rate, np.concatenate(ensembles), start)


def start_scores(start: int, n_rows: int) -> NDArray[np.float64]:
    """Return every row's score before the first tree. Shapes: float64[n_rows]. Units: start: 2^-LEAF_BITS."""
    return np.full(n_rows, math.ldexp(start, -LEAF_BITS))


def add_trees(
    scores: NDArray[np.float64],
    trees: NDArray[np.int64],
    bins: NDArray[np.uint8],
    table: SplitTable,
    learning_rate: float,
) -> NDArray[np.float64]:
    """Return scores plus the trees' outputs.

    Shapes: scores, result: float64[n_rows]; bins: uint8[n_features, n_rows].
    """
    for tree in trees:
        scores = scores + learning_rate * tree_outputs(table, tree, bins)
    return scores


def _query(
    what: str,
    candidates: Candidates,
    loss: Loss,
    plan: DpBoostPlan,
    key: bytes,
    before: Sequence[NDArray[np.int64]],
) -> str:
    """Name everything that a release depends on beside the rows."""
    digest = hashlib.sha256(f"{plan!r} {loss!r} {candidates.counts!r} ".encode())
    for part in (*candidates.of_feature, *before):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(hashlib.sha256(key).digest())
    return f"dpboost {what} {digest.hexdigest()}"
