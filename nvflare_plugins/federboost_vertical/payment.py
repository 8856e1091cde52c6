"""What a passive party's buckets cost, and the two releases that are paid for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_components.bucket_ldp.edges import Feature, needs_counts, paid_edges, public_edges, release_cell_counts
from dp_components.bucket_ldp.randomised_buckets import release_buckets, wrong_bucket_rate
from dp_components.events import ComposedEvent, Event, LaplaceEvent, LocalRandomisedResponseEvent, Release
from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.payment import JobLedger
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.federboost_vertical.job import BucketJob, Unit
from nvflare_plugins.report.run_record import ReportSection

LEAST_EPSILON_PER_VALUE = 0.1
"""Below, a bucket says next to nothing: with 16 buckets it is kept in 6.9 % of cases, where a guess has 6.25 %."""
_DOWN = 1 - 2.0**-40  # so that m shares of epsilon do not add up to more than epsilon


def bucket_epsilon(job: BucketJob, n_features: int) -> float:
    """Return the epsilon of one value's randomised response.

    Raises:
        ConfigurationError: a row's epsilon is too small for so many features.
    """
    whole = job.epsilon - job.edges_epsilon
    per_value = whole * _DOWN if job.protected is Unit.VALUE else whole / n_features * _DOWN
    if per_value < LEAST_EPSILON_PER_VALUE:
        raise ConfigurationError(
            f"epsilon {whole:g} for a {job.unit} leaves {per_value:.2g} for each of {n_features} features: buckets "
            "would be sent almost at random. Name fewer features in the description, or ask for more epsilon."
        )
    return per_value


def plan_of(job: BucketJob, features: Sequence[Feature]) -> Event:
    """Return what all of a party's releases cost, for its ledger."""
    relation = job.protected.relation
    response = LocalRandomisedResponseEvent(bucket_epsilon(job, len(features)), len(features), relation)
    if not _pays_for_edges(job, features):
        return response
    return ComposedEvent((LaplaceEvent(job.edges_epsilon, relation), response))


class BucketPayment:
    """A passive party's releases of one job. Opening it reserves their whole price in the ledger."""

    def __init__(self, job: BucketJob, attempt: SiteAttempt, features: Sequence[Feature], ids: bytes) -> None:
        """Reserve.

        Args:
            ids: the rows' identifiers, in order; a hash of them and the values stays in this party's own ledger.

        Raises:
            PolicyRefusal: the data set has no budget, or not so much left.
        """
        self._job, self._features, self._ids = job, list(features), ids
        place, relation = attempt.context, job.protected.relation
        self._ledger = JobLedger(place.policy, job.data_set, place.job_id, relation, attempt.evidence)
        self._ledger.reserve(plan_of(job, features))

    def release(self, columns: NDArray[np.float32]) -> tuple[Candidates, NDArray[np.uint8]]:
        """Return the edges, which stay at the party, and the randomised buckets, which leave it once.

        Shapes:  columns: float32[n_features, n_rows]; result: uint8[n_features, n_rows].
        Privacy: both are charged before this returns. What returns was written to the ledger: a retry gets it again,
            for the same rows only.
        """
        job, relation = self._job, self._job.protected.relation
        rows = hashlib.sha256(self._ids + np.ascontiguousarray(columns).tobytes()).hexdigest()[:32]
        edges = public_edges(self._features, job.n_buckets)
        if _pays_for_edges(job, self._features):
            counts = self._ledger.pay(
                f"rows per public cell; rows {rows}",
                lambda: release_cell_counts(columns, self._features, job.n_buckets, job.edges_epsilon, relation),
            )
            edges = paid_edges(counts, job.edges_epsilon, self._features, job.n_buckets, relation)
        epsilon = bucket_epsilon(job, len(self._features))

        def make() -> Release:
            released = release_buckets(columns, edges, epsilon, relation)
            return Release(_packed(released.value), released.event)

        return edges, _unpacked(self._ledger.pay(f"randomised buckets; rows {rows}", make), columns.shape)

    def section(self, edges: Candidates, aliases: Sequence[str]) -> ReportSection:
        """Say what was spent, and for what, in this party's report."""
        job, n = self._job, len(self._features)
        of_value = bucket_epsilon(job, n)
        unit = f"A whole row is protected, with epsilon {job.epsilon:g} over its {n} features."
        if job.protected is Unit.VALUE:
            unit = (
                f"Every value of a row is protected by itself, with epsilon {job.epsilon:g}. A whole row with its {n} "
                f"features is protected with {n * job.epsilon:g} only: this is no record-level privacy."
            )
        outside = (
            "The labels are not protected by this, nor where the model splits. Prediction uses true values; rows whose "
            "buckets were sent are refused there."
        )
        rows = tuple(
            (alias, str(count + 1), f"{100 * wrong_bucket_rate(count + 1, of_value):.1f} %")
            for alias, count in zip(aliases, edges.counts, strict=True)
        )
        return ReportSection("Privacy", (unit, outside), ("feature", "buckets", "values sent in a wrong bucket"), rows)

    def close(self) -> None:
        """End the job in the ledger: what it has not used becomes free again."""
        self._ledger.close()


def _pays_for_edges(job: BucketJob, features: Sequence[Feature]) -> bool:
    return job.edges_epsilon > 0 and any(needs_counts(feature, job.n_buckets) for feature in features)


def _packed(buckets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Put eight buckets into one of the ledger's integers. Shapes: buckets: int64[n_rows, n_features]."""
    flat = np.ascontiguousarray(buckets.T.astype(np.uint8)).ravel()
    return np.pad(flat, (0, -flat.size % 8)).view("<i8").astype(np.int64)


def _unpacked(packed: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return packed.astype("<i8").view(np.uint8)[: shape[0] * shape[1]].reshape(shape)
