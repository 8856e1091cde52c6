"""What a private job will release and what it costs, from the job alone, before anything is released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dp_components.accounting.composition import PrivacyCost, compose, gaussian_limit
from dp_components.distributed_noise import NoiseShares
from dp_components.errors import PrivacyError
from dp_components.events import ComposedEvent, Event
from dp_components.leaf_weights.query import real_noise_std
from dp_components.split_candidates import dp_quantiles
from dp_components.trust import TrustModel
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.methods import SplitMethod
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.training import PrivateTreesPlan
from nvflare_plugins.wire.catalogue import Kind

# So that a budget equal to the job's promise is enough for it, whatever the last digits do.
_BELOW = 1 - 1e-9
_BYTES_PER_VALUE = 8


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One message of sums.

    Attributes:
        sizes: number of values of each of its queries, for full trees.
        round: boosting round; -1 before the first.
    """

    kind: Kind
    sizes: tuple[int, ...]
    round: int

    @property
    def n_bytes(self) -> int:
        """Size of a site's payload; its reply is as long."""
        return _BYTES_PER_VALUE * sum(self.sizes)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job's releases over its sites.

    Attributes:
        training: what all sites train by; equal at all of them.
        messages: all that is released, in order, for full trees; training may release less.
    """

    job: PrivateTreesJob
    training: PrivateTreesPlan
    n_sites: int
    messages: tuple[PlannedMessage, ...]

    @classmethod
    def of(cls, job: PrivateTreesJob, n_sites: int, feature_names: Sequence[str] = ()) -> JobPlan:
        """Plan a job.

        Args:
            feature_names: the features in order; empty takes the job's own, whose order does not change the cost.

        Raises:
            ConfigurationError: bounds are missing, or there are too few sites for the noise.
        """
        names = tuple(feature_names or job.features or (*job.feature_bounds, *job.categories))
        if not names:
            raise ConfigurationError("feature_bounds is empty: give public bounds of every numeric feature")
        job.check_features(names)
        method = job.resolve(len(names))
        mu = math.sqrt(gaussian_limit(job.epsilon, job.delta).mu_squared) / job.rows_per_person * _BELOW
        training = PrivateTreesPlan(
            method, tuple(map(job.bounds_of, names)), NoisePlan.of(method, len(names), mu), _trust(job, n_sites),
            job.structure_seed, names,
        )  # fmt: skip
        return cls(job, training, n_sites, tuple(_messages(training)))

    def events_of(self, message: PlannedMessage) -> Event:
        """Return what one message costs."""
        noise, n_honest = self.training.noise, self.training.trust.n_honest
        return ComposedEvent(tuple(noise.event(message.kind, size, n_honest) for size in message.sizes))

    def events(self) -> list[Event]:
        """Return what the whole job costs, for the ledger."""
        return [self.events_of(message) for message in self.messages]

    def epsilon_after_rounds(self) -> list[float]:
        """Return epsilon at the job's delta after each boosting round, for a person with ``rows_per_person`` rows.

        What is paid before the first round is in the first figure.
        """
        costs: dict[tuple[Kind, tuple[int, ...]], PrivacyCost] = {}
        total, after = PrivacyCost(), {}
        for message in self.messages:
            key = (message.kind, message.sizes)
            if key not in costs:
                costs[key] = compose(self.events_of(message))
            total = total + costs[key]
            after[max(message.round, 0)] = total
        return [after[n].for_person(self.job.rows_per_person).epsilon(self.job.delta) for n in sorted(after)]

    @property
    def n_rounds(self) -> int:
        """Boosting rounds."""
        return 1 + max(message.round for message in self.messages)

    @property
    def n_bytes(self) -> int:
        """Bytes of sums that a site sends, for full trees; it receives as many."""
        return sum(message.n_bytes for message in self.messages)

    def leaf_noise(self) -> tuple[float, float]:
        """Return the standard deviation of the noise on a released leaf's sums G and H. Units: of g and h.

        With distributed noise it is that of all sites' shares together.
        """
        planned = self.training.noise.leaves
        g, h = real_noise_std(planned.sensitivity, planned.multiplier)
        factor = self.training.trust.noise_factor
        return g * factor, h * factor


def _trust(job: PrivateTreesJob, n_sites: int) -> Trust:
    if job.n_sites is not None and job.n_sites != n_sites:
        raise ConfigurationError(f"the job's noise is meant for {job.n_sites} sites; {n_sites} take part")
    if job.trust_model is TrustModel.LOCAL:
        raise ConfigurationError(
            "trust=local is refused here: the published baseline noises the rows' gradients and leaves open which rows "
            "share a leaf, so that it protects less than a ledger of whole rows counts. Compare it in the simulation"
        )
    if job.trust_model is TrustModel.TRUSTED_AGGREGATOR:
        return Trust()
    try:
        return Trust(NoiseShares(n_sites, job.colluders))
    except PrivacyError as error:
        raise ConfigurationError(str(error)) from None


def _messages(plan: PrivateTreesPlan) -> list[PlannedMessage]:
    method = plan.method
    messages = []
    if method.candidates.is_paid:
        cells = sum(dp_quantiles.public_grid(b).size + 1 for b in plan.bounds)
        messages.append(PlannedMessage(Kind.CELL_COUNTS, (cells,), -1))
    n_rounds = method.n_trees // method.batch_size
    if method.split_method is SplitMethod.TOTALLY_RANDOM:
        leaves = (2 << method.depth,) * method.batch_size
        return messages + [PlannedMessage(Kind.NODE_STATS, leaves, number) for number in range(n_rounds)]
    bins = [n + 2 for n in public_candidates(method, plan.bounds).counts]
    for number in range(n_rounds):
        for level in range(method.depth):
            sizes = tuple(n << (level + 1) for n in bins)
            messages.append(PlannedMessage(Kind.HISTOGRAM, sizes, number))
    return messages
