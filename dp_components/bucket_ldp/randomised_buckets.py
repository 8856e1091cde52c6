"""Element-level local privacy: every value's bucket, randomised on its own, sent once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dp_components.events import Release
from dp_components.mechanisms.randomised_response import randomise_buckets
from dp_components.neighbouring import NeighbouringRelation
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.split_candidates.candidates import Candidates

_RELATIONS = (NeighbouringRelation.CHANGE_VALUE, NeighbouringRelation.REPLACE_ROW)


def release_buckets(
    columns: NDArray[np.float32],
    edges: Candidates,
    epsilon: float,
    relation: NeighbouringRelation = NeighbouringRelation.CHANGE_VALUE,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Put every value in its bucket and randomise the bucket.

    Shapes:  columns: float32[n_features, n_rows]; value: int64[n_rows, n_features].
    Privacy: what leaves the passive party, once. Exactly ``epsilon`` for a value (CHANGE_VALUE), n_features times that
        for a row (REPLACE_ROW). That a row is there at all is not hidden: the parties have matched their rows. A
        feature with fewer buckets has less noise at the same epsilon. Release it through the ledger: drawn twice, it
        costs twice.

    Args:
        columns: the party's features.
        edges: from ``public_edges``, or from ``paid_edges`` whose price was charged.
        epsilon: per value.
        relation: CHANGE_VALUE or REPLACE_ROW.
        randomness: source of the noise.

    Raises:
        ValueError: other features than the edges have, or another relation.
    Reference: FederBoost, section 4.1; dp_components/README.md, section 9.
    """
    if relation not in _RELATIONS:
        raise ValueError(f"randomised buckets say nothing about {relation.value}: rows are matched before")
    if columns.ndim != 2 or columns.shape[0] != len(edges.of_feature):
        raise ValueError("columns are a matrix of features by rows, as many features as there are edges for")
    buckets = edges.bin_rows(columns).T.astype(np.int64)
    return randomise_buckets(buckets, np.array(edges.counts) + 1, epsilon, relation, randomness)


def transition_probabilities(n_buckets: int, epsilon: float) -> NDArray[np.float64]:
    """Return the probability of each bucket to be sent for each true one.

    A bucket stays with probability e^epsilon / (e^epsilon + q - 1); each other one is sent with 1 / (e^epsilon + q -
    1). Rows of the matrix add up to 1, and entries of a column differ by a factor of e^epsilon at most: the guarantee.

    Shapes: result: float64[true, sent].

    Raises:
        ValueError: no bucket, or ``epsilon`` is not a number above 0.
    """
    if n_buckets < 1 or not 0 < epsilon < math.inf:
        raise ValueError("needs at least one bucket and a finite epsilon above 0")
    falling = math.exp(-epsilon)
    whole = 1 + (n_buckets - 1) * falling
    return np.where(np.eye(n_buckets, dtype=bool), 1 / whole, falling / whole)


def wrong_bucket_rate(n_buckets: int, epsilon: float) -> float:
    """Return the probability that a value is sent in a wrong bucket: 21.55 % for 16 buckets at epsilon 4."""
    return float(transition_probabilities(n_buckets, epsilon)[0, 1:].sum())
