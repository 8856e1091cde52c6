"""TrainSingleTree: one complete tree of noised choices and noised leaves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.dpboost.geometric_leaf_clipping import LEAF_BITS, clip_released, leaf_sensitivity
from dp_components.dpboost.gradient_based_data_filtering import filter_by_gradient, gain_bound, gradient_sensitivity
from dp_components.events import ComposedEvent, ExponentialEvent, Release, RepeatedEvent
from dp_components.mechanisms import add_laplace_noise, choose_exponentially, grid_utilities, utility_sensitivity
from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity
from dp_components.split_candidates.candidates import Candidates, FeatureBounds
from he_processors.randomness import OS_RANDOMNESS, RandomSource


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
        is_kept, clipped = filter_by_gradient(grad)
        self._bins = bins[:, is_kept]
        self._grad = clipped.values[:, 0].astype(np.float64)
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
    grads, counts = (np.sum(parts, axis=0) for parts in zip(*sums, strict=True))
    return grads, counts


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
    values = filter_by_gradient(grad)[1].values
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
