"""Randomised response over the buckets of a feature: FederBoost's local differential privacy."""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np
from numpy.typing import ArrayLike

from dp_components.events import LocalRandomisedResponseEvent, Release
from dp_components.mechanisms.exact_bernoulli import toss
from dp_components.neighbouring import NeighbouringRelation
from dp_components.randomness import OS_RANDOMNESS, RandomSource, random_below


def randomise_buckets(
    buckets: ArrayLike,
    n_buckets: ArrayLike,
    epsilon: float,
    relation: NeighbouringRelation = NeighbouringRelation.CHANGE_VALUE,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Keep each bucket with probability e^epsilon / (e^epsilon + q - 1), else send one of the others, uniformly.

    Shapes:  buckets: int64[n_rows, n_features] in [0, n_buckets[feature]); n_buckets: int64[n_features].
    Privacy: exactly ``epsilon`` for one value of one row, n_features times that for a row. The edges must be public or
        paid for: edges that are ranks of the data make one row's output depend on the others.

    Returns:
        The randomised buckets with a ``LocalRandomisedResponseEvent``; a feature with one bucket is sent as it is.

    Raises:
        ValueError: a bucket is out of range, shapes differ, or ``epsilon`` is out of range.
    Reference: FederBoost (Tian et al.), section 4; dp_components/README.md, section 9, with q per feature.
    """
    ids, sizes = np.asarray(buckets), np.asarray(n_buckets)
    if ids.ndim != 2 or sizes.shape != ids.shape[1:] or ids.dtype.kind not in "iu" or sizes.dtype.kind not in "iu":
        raise ValueError("buckets must be an integer matrix with one number of buckets per column")
    if np.any(sizes < 1) or np.any(ids < 0) or np.any(ids >= sizes):
        raise ValueError("a bucket is out of range")
    event = LocalRandomisedResponseEvent(epsilon, ids.shape[1], relation)
    columns = [_randomise(ids[:, f].astype(np.int64), int(sizes[f]), epsilon, randomness) for f in range(len(sizes))]
    return Release(np.stack(columns, axis=1), event)


def _randomise(ids: np.ndarray, n_buckets: int, epsilon: float, randomness: RandomSource) -> np.ndarray:
    if n_buckets == 1 or ids.size == 0:
        return ids
    # Without overflow for large epsilon: 1 / (1 + (q - 1) e^-epsilon).
    keep = 1 / (1 + (n_buckets - 1) * math.exp(-epsilon))

    def exact(_: int, context: Context) -> Decimal:
        odds = context.multiply(Decimal(n_buckets - 1), context.exp(Decimal(-epsilon)))
        return context.divide(Decimal(1), context.add(Decimal(1), odds))

    is_kept = toss(np.full(ids.size, keep), exact, randomness)
    # A step of 1 .. q - 1 around the circle reaches each other bucket equally often.
    steps = 1 + random_below(n_buckets - 1, ids.size, randomness)
    return np.where(is_kept, ids, (ids + steps) % n_buckets)
