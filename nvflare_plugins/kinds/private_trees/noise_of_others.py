"""Noise mechanisms that others wrote: what a site's policy, or the server's, pins by its files and loads."""

from __future__ import annotations

from pathlib import Path

from dp_components.integer_noise import RARE, NoiseMechanism, NoiseOfOthers, rareness_of_draws
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.noisy_sums import TrustedServer
from nvflare_plugins.site.policy import NOISES, SitePolicy, load_hashed, load_pinned_by_server
from nvflare_plugins.site.policy_values import SERVER_POLICY_FILE, PluginPin
from nvflare_plugins.wire.profiles import plugin_of

_CHECKED_DRAWS = 20_000


def noise_at_site(policy: SitePolicy, job: PrivateTreesJob) -> NoiseOfOthers | None:
    """Return the mechanism that a job names, for its price; None of a job with our noise. A site draws nothing of it.

    Raises:
        PolicyRefusal, ConfigurationError: as ``load_hashed``.
    """
    name = plugin_of(job.noise)
    if name is None:
        return None
    if policy.cluster_for(job.data_set) is not None:
        raise ConfigurationError(
            f"{policy.site} trains data set {job.data_set!r} on a cluster, whose workers load no plugins: noise of "
            "others is refused there. Remedy: leave noise out."
        )
    loaded, pin = load_hashed(policy, name, NOISES, "on which the price of its noise depends")
    return _named(loaded, name, pin)


def noise_at_server(workspace: Path, job: PrivateTreesJob) -> NoiseOfOthers | None:
    """Return the mechanism that the server's policy pins for a job; None of a job with our noise.

    Raises:
        PolicyRefusal, ConfigurationError: it pins none, or as ``load_pinned_by_server``.
    """
    name = plugin_of(job.noise)
    if name is None:
        return None
    found = load_pinned_by_server(workspace, name, NOISES)
    if found is None:
        raise PolicyRefusal(
            f"this server pins no plugin {name}, whose noise the job asks for. Remedy: have the server's operator pin "
            f"it ({SERVER_POLICY_FILE}, key plugins), or leave noise out."
        )
    loaded, pin = found
    return _named(loaded, name, pin)


def _named(loaded: object, name: str, pin: PluginPin) -> NoiseOfOthers:
    if not isinstance(loaded, NoiseMechanism) or loaded.name != name:
        raise ConfigurationError(f"plugin {name} of {pin} is no NoiseMechanism of that name: choose another noise")
    return NoiseOfOthers(loaded, f"{name} {pin.distribution} {pin.version} sha256 {pin.sha256}")


def server_of(job: PrivateTreesJob, n_sites: int, workspace: Path) -> TrustedServer | None:
    """Return the server's part in a job; None where it is trusted with no sums.

    Draws of noise of others are compared with its mass function, before any is given away.

    Raises:
        PolicyRefusal, ConfigurationError: see ``noise_at_server``; or its draws are of another mass function.
    """
    plan = JobPlan.of(job, n_sites, (), noise_at_server(workspace, job))
    found = {id(release.noise.others): release.noise.others for release in plan.releases.releases}
    for priced in found.values():
        if priced is not None and rareness_of_draws(priced.noise, _CHECKED_DRAWS) <= RARE:
            raise ConfigurationError(
                f"noise {priced.event.mechanism} is not drawn from the mass function that it states: choose another"
            )
    return TrustedServer(plan) if plan.training.trust.is_trusted_aggregator else None
