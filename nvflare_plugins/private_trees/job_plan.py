"""What a private job will release and what it costs, from the job alone, before anything is released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from dp_components.accounting.composition import PrivacyCost, compose, gaussian_limit
from dp_components.distributed_noise import NoiseShares
from dp_components.errors import PrivacyError
from dp_components.trust import TrustModel
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.releases import ReleasePlan
from nvflare_plugins.private_trees.training import PrivateTreesPlan
from nvflare_plugins.private_trees.trust import Trust

# So that a budget equal to the job's promise is enough for it, whatever the last digits and the grid of the noise do.
_BELOW = 1 - 1e-8


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job's releases over its sites, and what they cost.

    Attributes:
        training: what all sites train by; equal at all of them.
    """

    job: PrivateTreesJob
    training: PrivateTreesPlan

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
        method, bounds, trust = job.resolve(len(names)), tuple(map(job.bounds_of, names)), _trust(job, n_sites)
        target = job.target
        mu = math.sqrt(gaussian_limit(job.epsilon, job.delta).mu_squared) / job.rows_per_person * _BELOW
        try:
            releases = ReleasePlan.of(method, bounds, mu, trust.n_honest, target=target)
        except ValueError:  # of an event's scale; bounds far apart and many rows of a person lead there
            raise ConfigurationError(
                "the noise would be beyond all bounds: ask for more epsilon, or for fewer rows_per_person"
            ) from None
        training = PrivateTreesPlan(method, bounds, releases, trust, job.structure_seed, names, target)
        plan = cls(job, training)
        plan._check_promise()
        return plan

    @property
    def releases(self) -> ReleasePlan:
        """All that is released, in order, for full trees; training may release less."""
        return self.training.releases

    def _check_promise(self) -> None:
        """Add up what will really be drawn, discrete noise included: no plan rests on the formula it came from."""
        job = self.job
        try:
            delta = compose(self.releases.events).for_person(job.rows_per_person).delta(job.epsilon)
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
        cost = cache(compose)  # thousands of releases cost alike
        total, after = PrivacyCost(), {}
        for release in self.releases.releases:
            total = total + cost(release.event)
            after[max(release.round, 0)] = total
        return [after[n].for_person(self.job.rows_per_person).epsilon(self.job.delta) for n in sorted(after)]


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
