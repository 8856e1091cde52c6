"""What a private job will release and what it costs, from the job alone, before anything is released."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from dp_components.accounting.composition import PrivacyCost, compose, gaussian_limit
from dp_components.distributed_noise import NoiseShares
from dp_components.errors import PrivacyError
from dp_components.events import ComposedEvent, Event
from dp_components.leaf_weights.query import real_noise_std
from dp_components.split_candidates import dp_quantiles
from dp_components.trust import TrustModel
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.private_trees.greedy_training import level_size
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.methods import CandidateSource, Grower, Method, SplitMethod
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.training import PrivateTreesPlan
from nvflare_plugins.wire.catalogue import Kind

# So that a budget equal to the job's promise is enough for it, whatever the last digits and the grid of the noise do.
_BELOW = 1 - 1e-8
_BYTES_PER_VALUE = 8


class Trainer(Enum):
    """What trains a method. The choice is public: it follows from the method alone."""

    REFRESH = "XGBoost's refresh of random trees"
    HISTOGRAMS = "XGBoost's histogram trees"
    OWN = "numpy at every site; XGBoost holds the model"

    @classmethod
    def of(cls, method: Method) -> Trainer:
        """Return the trainer: XGBoost for random trees whose candidates stay the same, and where a job asks for it."""
        if method.split_method is SplitMethod.TOTALLY_RANDOM:
            return cls.OWN if method.candidates is CandidateSource.ITERATIVE_HESSIAN else cls.REFRESH
        return cls.HISTOGRAMS if method.grower is Grower.XGBOOST else cls.OWN


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
            ConfigurationError: bounds are missing, there are too few sites for the noise, or the releases of the plan,
                added up, do not keep the job's epsilon and delta.
        """
        names = tuple(feature_names or job.features or (*job.feature_bounds, *job.categories))
        if not names:
            raise ConfigurationError("feature_bounds is empty: give public bounds of every numeric feature")
        job.check_features(names)
        method = job.resolve(len(names))
        mu = math.sqrt(gaussian_limit(job.epsilon, job.delta).mu_squared) / job.rows_per_person * _BELOW
        training = PrivateTreesPlan(
            method,
            tuple(map(job.bounds_of, names)),
            NoisePlan.of(method, len(names), mu),
            _trust(job, n_sites),
            job.structure_seed,
            names,
        )
        plan = cls(job, training, n_sites, tuple(planned_messages(training)))
        plan._check_promise()
        return plan

    def events_of(self, message: PlannedMessage) -> Event:
        """Return what one message costs."""
        noise, n_honest = self.training.noise, self.training.trust.n_honest
        return ComposedEvent(tuple(noise.event(message.kind, size, n_honest) for size in message.sizes))

    def events(self) -> list[Event]:
        """Return what the whole job costs, for the ledger."""
        return [self.events_of(message) for message in self.messages]

    def _check_promise(self) -> None:
        """Add up what will really be drawn, discrete noise included: no plan rests on the formula it came from."""
        job = self.job
        try:
            delta = compose(self.events()).for_person(job.rows_per_person).delta(job.epsilon)
        except ValueError as error:
            raise ConfigurationError(f"epsilon {job.epsilon:g} with this method: {error}") from None
        if not delta <= job.delta:
            raise ConfigurationError(
                f"the noise of this plan keeps epsilon {job.epsilon:g} at delta {delta:.3g} only, and the job promises "
                f"{job.delta:g}: ask for a larger delta or a smaller epsilon"
            )

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
    def trainer(self) -> Trainer:
        """What trains it."""
        return Trainer.of(self.training.method)

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
        return Trust(local_rows=job.n_rows)
    if job.trust_model is TrustModel.TRUSTED_AGGREGATOR:
        return Trust()
    try:
        return Trust(NoiseShares(n_sites, job.colluders))
    except PrivacyError as error:
        raise ConfigurationError(str(error)) from None


class ReleaseSchedule:
    """The messages that a plan still pays for, taken in order; a tree that ends early skips some."""

    def __init__(self, plan: JobPlan):
        self._messages, self._next = plan.messages, 0

    def take(self, kind: Kind, number: int, n_values: int) -> PlannedMessage:
        """Return the planned message for so many values in a round, -1 being before the first.

        Raises:
            ProtocolError: a sum that the plan does not pay for now, in kind, number or size.
        """
        for i in range(self._next, len(self._messages)):
            message = self._messages[i]
            if (message.kind, message.round) == (kind, number) and 0 < n_values <= sum(message.sizes):
                self._next = i + 1
                return message
        raise ProtocolError(f"{kind.name} of {n_values} values in round {number}: the job's plan pays for no such sum")


def planned_messages(plan: PrivateTreesPlan) -> Iterator[PlannedMessage]:
    """Yield the messages of a training whose content is noised, in order."""
    method = plan.method
    if method.candidates.is_paid:
        cells = sum(dp_quantiles.public_grid(b).size + 1 for b in plan.bounds)
        yield PlannedMessage(Kind.CELL_COUNTS, (cells,), -1)
    n_features = len(plan.bounds)
    k = method.features_per_tree(n_features)
    for number in range(method.n_trees // method.batch_size):
        for tree in range(number * method.batch_size, (number + 1) * method.batch_size):
            if tree < method.hessian_histogram_trees(n_features):
                # Refining at most doubles the wanted number of candidates.
                yield PlannedMessage(Kind.HESSIANS, (2 * method.n_candidates + 1,) * k, number)
            yield from _greedy_messages(plan, number, k)
        if method.split_method is SplitMethod.TOTALLY_RANDOM:
            yield PlannedMessage(Kind.NODE_STATS, (2 << method.depth,) * method.batch_size, number)


def _greedy_messages(plan: PrivateTreesPlan, number: int, k: int) -> Iterator[PlannedMessage]:
    """Yield the messages of one greedy tree."""
    method = plan.method
    if method.split_method is SplitMethod.PARTIALLY_RANDOM:
        yield PlannedMessage(Kind.LEFT_SUMS, (2,), number)
        for level in range(method.depth):
            yield PlannedMessage(Kind.LEFT_SUMS, (2 << level,) * k, number)
    elif method.split_method is SplitMethod.HISTOGRAM:
        for level in range(method.depth):
            yield PlannedMessage(Kind.HISTOGRAM, (level_size(method, level),) * k, number)
