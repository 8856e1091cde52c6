"""Ranking: rows that answer one query, the gradients of their pairs, and metrics of the lists that scores put them in.

All is XGBoost's arithmetic, operation by operation: pairs are doubles that become float32, and each row adds its pairs
in float32 in the order in which XGBoost comes upon them. Lists are sorted stably, so that equal scores keep the order
of the rows.

Reference: XGBoost 3.2 to 3.4, src/objective/lambdarank_obj.cc and .h, src/common/ranking_utils.h and .cc,
src/metric/rank_metric.cc; libstdc++'s minstd_rand and uniform_int_distribution, which draw the pairs of ``mean``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth import float32
from nvflare_plugins.growth.float32 import Floats

RANK_OBJECTIVES = ("rank:ndcg", "rank:pairwise", "rank:map")

_F = np.float32
_PAIRS_OF_TOPK, _PAIRS_OF_MEAN = 32, 1  # what XGBoost takes where the job names no number
_LEAST_CURVATURE = 1e-16
_FACTOR, _MODULUS = 48271, 2**31 - 1
_DRAWS = _MODULUS - 2  # largest draw minus smallest
_BATCH = 1 << 16

Doubles = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairRules:
    """Which pairs of a query's rows count, and how much: XGBoost's parameters of the same names.

    Attributes:
        is_mean: ``lambdarank_pair_method=mean``: each row is paired with rows that are drawn; else the first rows of
            the list with all below them.
        n_given: ``lambdarank_num_pair_per_sample``, if the job gives it.
        normalizes: ``lambdarank_normalization``.
        by_score: ``lambdarank_score_normalization``.
        exp_gain: ``ndcg_exp_gain``.
    """

    is_mean: bool
    n_given: int | None
    normalizes: bool
    by_score: bool
    exp_gain: bool

    @classmethod
    def of(cls, agreed: Mapping[str, object]) -> Self:
        """Read a job's checked parameters."""
        is_mean, given = agreed.get("lambdarank_pair_method") == "mean", agreed.get("lambdarank_num_pair_per_sample")
        flags = (
            bool(agreed.get(name, True))
            for name in ("lambdarank_normalization", "lambdarank_score_normalization", "ndcg_exp_gain")
        )
        return cls(is_mean, None if given is None else int(str(given)), *flags)

    @property
    def n_pairs(self) -> int:
        """How many of the first rows are paired, or how many rows are drawn for each."""
        return self.n_given or (_PAIRS_OF_MEAN if self.is_mean else _PAIRS_OF_TOPK)

    def section(self) -> dict[str, str]:
        """Return what a model says of them."""
        return {
            "lambdarank_bias_norm": "1",
            "lambdarank_normalization": str(int(self.normalizes)),
            "lambdarank_num_pair_per_sample": str(self.n_given or 2**32 - 1),
            "lambdarank_pair_method": "mean" if self.is_mean else "topk",
            "lambdarank_score_normalization": str(int(self.by_score)),
            "lambdarank_unbiased": "0",
            "ndcg_exp_gain": str(int(self.exp_gain)),
        }

    def bounds(self, most_rows: int) -> tuple[float, float]:
        """Bound |gradient| and hessian of a row whose query has weight 1 and so many rows.

        A metric changes by at most 1, by 2 where average precision is computed as XGBoost does. So of a pair |gradient|
        is at most 2, and 2 / 0.01 where score differences divide it (``by_score``); its hessian is at most twice as
        large, since sigma (1 - sigma) <= 1 - sigma. A row is in at most n - 1 pairs of the first rows, or in
        ``n_pairs`` of its own and of each other row. Normalised, ``topk`` multiplies by log2(1 + s) / s, where s is
        twice the sum of all pairs' |gradient|, at least twice the row's own sum.

        Shapes: results: one number each.
        """
        pair = 200.0 if self.by_score else 2.0
        others = max(most_rows - 1, 1)
        if not self.normalizes:
            gradient = pair * ((others + 1) * self.n_pairs if self.is_mean else others)
        elif self.is_mean:
            gradient = pair * (others + 1)
        else:
            gradient = 0.5 * math.log2(1.0 + 2.0 * pair * others * min(self.n_pairs, most_rows)) + 1.0
        return gradient, 2.0 * gradient


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Queries:
    """Which rows answer one query.

    Shapes: order: int64[n_rows], rows query by query, those of one in the order of the table; starts: int64[n_queries +
        1]; weight: float32[n_queries] or None.

    Attributes:
        first: how many queries of other sites come before these; only ``mean`` reads it.
        n_all: queries of all sites.
        weight_norm: what weights are multiplied by, so that those of all sites' queries are 1 on average.
    """

    order: Places
    starts: Places
    weight: Floats | None = None
    first: int = 0
    n_all: int = 0
    weight_norm: float = 1.0

    @classmethod
    def of(cls, numbers: Places, weight: Floats | None) -> Self:
        """Gather the rows of each query, for a site that has all queries.

        Shapes: numbers: int64[n_rows], the query of each row, counted from 0 without a gap; weight: float32[n_rows].
        """
        order = np.argsort(numbers, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(numbers))]).astype(np.int64)
        own = cls(order, starts, None if weight is None else weight[order[starts[:-1]]])
        return own.among(0, own.n, own.total_weight)

    def among(self, first: int, n_all: int, total_weight: float) -> Self:
        """Return these queries as some of all sites'. Args: first, n_all: see above; total_weight: of all queries."""
        norm = 1.0 if self.weight is None or not total_weight else n_all / total_weight
        return replace(self, first=first, n_all=n_all, weight_norm=norm)

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of queries."""
        return float(self.n) if self.weight is None else float(self.weight.sum(dtype=np.float64))

    def have_pairs(self, labels: Floats) -> NDArray[np.bool_]:
        """Tell which rows count: those of queries whose labels differ. Shapes: float32[n_rows] to bool[n_rows]."""
        found = np.zeros(labels.size, dtype=bool)
        if labels.size:
            in_order = labels[self.order]
            differ = np.maximum.reduceat(in_order, self.starts[:-1]) != np.minimum.reduceat(in_order, self.starts[:-1])
            found[self.order] = np.repeat(differ, self.sizes)
        return found

    @property
    def sizes(self) -> Places:
        """Rows of each query. Shapes: int64[n_queries]."""
        return np.diff(self.starts)

    @property
    def n(self) -> int:
        """How many queries there are."""
        return int(self.starts.size - 1)


class _Batch(NamedTuple):
    """Queries of about as many rows, a row of the arrays each: their places in the list by score.

    Shapes: queries: int64[n]; rows, sizes: int64[n, most], int64[n]; exists: bool[n, most]; score, label: float32[n,
        most], 0 where there is no row.
    """

    queries: Places
    rows: Places
    sizes: Places
    exists: NDArray[np.bool_]
    score: Floats
    label: Floats


def _batches(queries: Queries, scores: Floats, labels: Floats) -> Iterator[_Batch]:
    """Sort each query's rows by falling score."""
    by_size = np.argsort(queries.sizes, kind="stable")
    first = 0
    while first < by_size.size:
        n = max(1, _BATCH // max(int(queries.sizes[by_size[first]]), 1))
        while n > 1 and n * int(queries.sizes[by_size[min(first + n, by_size.size) - 1]]) > 2 * _BATCH:
            n = (n + 1) // 2
        some = by_size[first : first + n]
        first += n
        sizes = queries.sizes[some]
        places = np.arange(int(sizes.max(initial=0)))
        exists = places < sizes[:, np.newaxis]
        rows = queries.order[np.where(exists, queries.starts[some][:, np.newaxis] + places, 0)]
        below = np.where(exists, -scores[rows], _F(np.inf))
        rows = np.take_along_axis(rows, np.argsort(below, axis=1, kind="stable"), axis=1)
        values = (np.where(exists, column[rows], _F(0)) for column in (scores, labels))
        yield _Batch(some, rows, sizes, exists, *values)


def _discounts(n: int) -> Doubles:
    """Return 1 / log2(place + 2), by the C library's logarithm. Shapes: float64[n]."""
    return np.array([1.0 / math.log2(place + 2.0) for place in range(n)])


Gain = Callable[[Floats], Doubles]


def _gains(label: Floats, *, exp: bool) -> Doubles:
    return np.ldexp(1.0, label.astype(np.int32)) - 1.0 if exp else label.astype(np.float64)


def _inverse_ideal(batch: _Batch, depth: int | None, discounts: Doubles, gain: Gain) -> Doubles:
    """Return 1 / DCG of the best list, 0 where nothing is relevant. Shapes: float64[n]."""
    best = -np.sort(np.where(batch.exists, -batch.label, _F(np.inf)), axis=1)
    parts = np.where(batch.exists, discounts * gain(np.where(batch.exists, best, _F(0))), 0.0)[:, :depth]
    ideal = np.cumsum(parts, axis=1)[:, -1]
    return np.where(ideal != 0, 1.0 / np.where(ideal != 0, ideal, 1.0), 0.0)


# -- gradients --------------------------------------------------------------------------------------------------------


def rank_gradients(
    name: str, rules: PairRules, queries: Queries, margins: Floats, labels: Floats, pair_seed: int
) -> Floats:
    """Return the gradient and the hessian of every row.

    Args:
        name: of ``RANK_OBJECTIVES``.
        pair_seed: what ``mean`` draws a round's pairs from, before the query's number is added.

    Shapes: margins, labels: float32[n_rows]; result: float32[n_rows, 2].
    """
    out = np.zeros((labels.size, 2), np.float32)
    for batch in _batches(queries, margins, labels):
        change = _Changes(name, rules, batch)
        if rules.is_mean:
            seeds = pair_seed + queries.first + batch.queries
            pairs = _drawn_pairs(rules, batch, change, seeds)
        else:
            pairs = _first_pairs(rules, batch, change)
        if queries.weight is not None:
            pairs = pairs * queries.weight[batch.queries][:, np.newaxis, np.newaxis] * _F(queries.weight_norm)
        out[batch.rows[batch.exists]] = pairs[batch.exists]
    return out


class _Changes:
    """How much the metric changes where two rows of a list change places."""

    def __init__(self, name: str, rules: PairRules, batch: _Batch) -> None:
        n = batch.label.shape[1]
        self._name = name
        depth = None if rules.is_mean else rules.n_pairs
        if name == "rank:ndcg":
            self._discounts = _discounts(n)
            gain = partial(_gains, exp=rules.exp_gain)
            self._gain, self._inverse = gain(batch.label), _inverse_ideal(batch, depth, self._discounts, gain)
        elif name == "rank:map":
            relevant = batch.label.astype(np.float64)
            self._n_relevant = np.cumsum(relevant, axis=1)
            self._shares = np.cumsum(relevant / np.arange(1.0, n + 1.0), axis=1)

    def between(self, at: Places, high: Places, low: Places) -> Doubles:
        """Return the change, up to its sign.

        Args:
            at: of each pair, its query.
            high, low: places of the rows with the higher and the lower label.

        Shapes: any, all alike.
        """
        if self._name == "rank:ndcg":
            gain_high, gain_low = self._gain[at, high], self._gain[at, low]
            discount_high, discount_low = self._discounts[high], self._discounts[low]
            original = gain_high * discount_high + gain_low * discount_low
            changed = gain_low * discount_high + gain_high * discount_low
            change: Doubles = np.abs((original - changed) * self._inverse[at])
            return change
        if self._name == "rank:map":
            return self._of_precision(at, high, low)
        return np.ones(high.shape)

    def _of_precision(self, at: Places, high: Places, low: Places) -> Doubles:
        first, last = np.minimum(high, low), np.maximum(high, low)
        place_first, place_last = first + 1.0, last + 1.0
        m, n = self._n_relevant[at, last], self._n_relevant[at, first]
        between = self._shares[at, last - 1] - self._shares[at, first]
        with np.errstate(all="ignore"):
            worse = (m / place_last - (n + 1.0) / place_first) - between
            better = (n / place_first - m / place_last) + between
            return np.asarray(np.abs(np.where(high > low, worse, better) / self._n_relevant[at, -1]))


def _pair_values(rules: PairRules, batch: _Batch, change: _Changes, at: Places, i: Places, j: Places) -> Floats:
    """Return the gradient and the hessian of the better one of two rows; zeros where their labels are equal.

    Shapes: at, i, j: int64[any], alike: the query and two places of its list; result: float32[any, 2].
    """
    label_i, label_j = batch.label[at, i], batch.label[at, j]
    is_first = label_i > label_j
    high, low = np.where(is_first, i, j), np.where(is_first, j, i)
    delta = change.between(at, high, low)
    difference = batch.score[at, high] - batch.score[at, low]
    sigmoid = float32.logistic(np.ascontiguousarray(difference)).astype(np.float64)
    if rules.by_score:
        last = batch.score[np.arange(batch.sizes.size), np.maximum(batch.sizes - 1, 0)]
        differs = (batch.score[:, 0] != last)[at]
        delta = np.where(differs, delta / (np.abs(difference).astype(np.float64) + 0.01), delta)
    g = ((sigmoid - 1.0) * delta).astype(np.float32)
    h = (np.maximum(sigmoid * (1.0 - sigmoid), _LEAST_CURVATURE) * delta * 2.0).astype(np.float32)
    counts = label_i != label_j
    return np.stack([np.where(counts, g, _F(0)), np.where(counts, h, _F(0))], axis=-1)


def _first_pairs(rules: PairRules, batch: _Batch, change: _Changes) -> Floats:
    """Pair each of the first rows with all below it. Shapes: float32[n, most, 2], by place."""
    n, most = batch.label.shape
    out, total = np.zeros((n, most, 2), np.float32), np.zeros((n, 1))
    at = np.arange(n)[:, np.newaxis]
    for i in range(min(rules.n_pairs, most - 1)):
        j = np.arange(i + 1, most)[np.newaxis]
        values = _pair_values(rules, batch, change, *np.broadcast_arrays(at, np.array([[i]]), j))
        values[~batch.exists[:, i + 1 :]] = 0
        is_first = (batch.label[:, i : i + 1] > batch.label[:, i + 1 :]).astype(np.float32)
        sign = is_first * _F(2) - _F(1)
        signed = np.stack([values[..., 0] * sign, values[..., 1]], axis=-1)
        # A row's pairs with rows above it come first, and then those with rows below it, each by the other's place.
        out[:, i] = np.cumsum(np.concatenate([out[:, i : i + 1], signed], axis=1), axis=1, dtype=np.float32)[:, -1]
        out[:, i + 1 :] += np.stack([-signed[..., 0], signed[..., 1]], axis=-1)
        total = np.cumsum(np.concatenate([total, -2.0 * values[..., 0].astype(np.float64)], axis=1), axis=1)[:, -1:]
    if not rules.normalizes:
        return out
    norms = [math.log2(1.0 + one) / one if one > 0 else 1.0 for one in total[:, 0].tolist()]
    return out * np.array(norms, np.float32)[:, np.newaxis, np.newaxis]


def _drawn_pairs(rules: PairRules, batch: _Batch, change: _Changes, seeds: Places) -> Floats:
    """Pair each row with rows that are drawn from those with another label. Shapes: float32[n, most, 2], by place."""
    n, most = batch.label.shape
    out = np.zeros((n, most, 2), np.float32)
    by_label = np.argsort(np.where(batch.exists, -batch.label, _F(np.inf)), axis=1, kind="stable")
    label = np.take_along_axis(batch.label, by_label, axis=1)
    begins = np.concatenate([np.ones((n, 1), bool), label[:, 1:] != label[:, :-1]], axis=1) & batch.exists
    place = np.arange(most)[np.newaxis]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    next_one = np.where(begins, place, batch.sizes[:, np.newaxis])[:, ::-1]
    end = np.minimum.accumulate(next_one, axis=1)[:, ::-1]
    end = np.concatenate([end[:, 1:], batch.sizes[:, np.newaxis]], axis=1)
    others = batch.sizes[:, np.newaxis] - (end - first)
    at, own = np.nonzero(batch.exists & (others > 0))
    at, own = np.repeat(at, rules.n_pairs), np.repeat(own, rules.n_pairs)
    repeat = np.tile(np.arange(rules.n_pairs), at.size // rules.n_pairs)
    a, b = first[at, own], end[at, own]
    number = rules.n_pairs * a + repeat * (b - a) + (own - a)  # buckets one by one, in each all rows again and again
    in_order = np.lexsort((number, at))
    at, own, a, b, number = (values[in_order] for values in (at, own, a, b, number))
    drawn = _draws(seeds[at], number, others[at, own])
    other = np.where(drawn >= a, drawn - a + b, drawn)
    i, j = by_label[at, own], by_label[at, other]
    values = _pair_values(rules, batch, change, at, i, j)
    is_first = batch.label[at, i] > batch.label[at, j]
    high, low = np.where(is_first, i, j), np.where(is_first, j, i)
    places = np.stack([at * most + high, at * most + low], axis=1).ravel()
    for side, sign in ((0, -1), (1, 1)):
        both = np.stack([values[:, side], _F(sign) * values[:, side]], axis=1).ravel()
        flat = np.zeros(n * most, np.float32)
        np.add.at(flat, places, both)
        out[..., side] = flat.reshape(n, most)
    return out * _F(1.0 / rules.n_pairs) if rules.normalizes else out


def _draws(seeds: Places, numbers: Places, below: Places) -> Places:
    """Return what std::uniform_int_distribution draws from std::minstd_rand.

    Args:
        seeds: of each draw's query.
        numbers: of a draw among its query's, from 0, ascending.
        below: the draw is from [0, below).

    Shapes: int64[n] each.
    """
    steps = itertools.repeat(_FACTOR, int(numbers.max(initial=0)) + 1)
    powers = np.array(list(itertools.accumulate(steps, lambda power, a: power * a % _MODULUS, initial=1)), np.uint64)
    start = (seeds.astype(np.uint64) & np.uint64(0xFFFFFFFF)) % np.uint64(_MODULUS)
    start[start == 0] = 1
    scaling = _DRAWS // below
    raw = (start * powers[numbers + 1] % np.uint64(_MODULUS)).astype(np.int64) - 1
    found = raw // scaling
    for seed in np.unique(seeds[raw >= below * scaling]):  # a draw that is thrown away shifts those after it
        some = np.flatnonzero(seeds == seed)
        state = int(start[some[0]])
        for place in some:
            while True:
                state = state * _FACTOR % _MODULUS
                if state - 1 < below[place] * scaling[place]:
                    break
            found[place] = (state - 1) // scaling[place]
    return found


# -- metrics ----------------------------------------------------------------------------------------------------------


def rank_parts(
    kind: str, depth: int, queries: Queries, scores: Floats, labels: Floats, *, exp_gain: bool
) -> tuple[float, float]:
    """Return the sum of a metric over queries, and of their weights.

    Args:
        kind: ndcg, map or pre.
        depth: places of a list that count.

    A query without relevant rows counts 1.

    Shapes: scores, labels: float32[n_rows].
    """
    weight = np.ones(queries.n, np.float32) if queries.weight is None else queries.weight
    found = np.zeros(queries.n)
    for batch in _batches(queries, scores, labels):
        of_batch = weight[batch.queries].astype(np.float64)
        gain = partial(_gains, exp=exp_gain)
        found[batch.queries] = _OF_LISTS[kind](batch, depth, of_batch, gain)
    total = np.cumsum(np.concatenate([[0.0], found]))[-1]
    return float(total), float(np.cumsum(np.concatenate([[0.0], weight.astype(np.float64)]))[-1])


def _ndcg(batch: _Batch, depth: int, weight: Doubles, gain: Gain) -> Doubles:
    discounts = _discounts(batch.label.shape[1])
    inverse = _inverse_ideal(batch, depth, discounts, gain)
    parts = discounts * gain(batch.label) * inverse[:, np.newaxis]
    gained = np.cumsum(np.where(batch.exists, parts, 0.0)[:, :depth], axis=1)[:, -1] * weight
    return np.where(inverse <= 0, 1.0, gained)  # XGBoost does not weigh the lists without relevant rows


def _map(batch: _Batch, depth: int, weight: Doubles, gain: Gain) -> Doubles:
    relevant = batch.label.astype(np.float64)
    hits = np.cumsum(relevant, axis=1)
    precision = np.cumsum((hits / np.arange(1.0, relevant.shape[1] + 1.0) * relevant)[:, :depth], axis=1)[:, -1]
    all_hits = hits[:, -1]
    score = np.divide(precision, np.minimum(all_hits, depth), out=np.ones(all_hits.size), where=all_hits > 0)
    return score * weight


def _pre(batch: _Batch, depth: int, weight: Doubles, gain: Gain) -> Doubles:
    hits = np.cumsum((batch.label * weight.astype(np.float32)[:, np.newaxis]).astype(np.float64)[:, :depth], axis=1)
    return np.divide(hits[:, -1], np.minimum(batch.sizes, depth).astype(np.float64))


_OF_LISTS = {"ndcg": _ndcg, "map": _map, "pre": _pre}
