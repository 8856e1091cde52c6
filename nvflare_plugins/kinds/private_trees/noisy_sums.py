"""Noisy sums over all sites: shares of noise under masks, or the noise of a server that is trusted with exact sums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import PrivacyCost, compose
from dp_components.errors import UnusableNoise
from dp_components.events import Release
from dp_components.integer_noise import RARE, NoiseMechanism, NoiseOfOthers, rareness_of_draws
from dp_components.mechanisms import add_gaussian_noise, add_noise, add_noise_share
from dp_components.sensitivity import Sensitivity
from dp_components.split_methods.tree import Histograms, in_numpy
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.attempt.payment import event_text
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.growth._native import growth
from nvflare_plugins.growth.bins import BinLayout, BinnedTable
from nvflare_plugins.growth.rows import BinnedRows
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.plan import PlannedRelease, PrivateTreesPlan, ReleaseSchedule
from nvflare_plugins.site.policy import NOISES, SitePolicy, load_hashed, load_pinned_by_server
from nvflare_plugins.site.policy_values import SERVER_POLICY_FILE, PluginPin
from nvflare_plugins.wire.envelope import Codec, Frame, Kind, Phase
from nvflare_plugins.wire.profiles import plugin_of
from nvflare_plugins.wire.sums import ProtectedSums

# Sums over the sites with the plan's noise on them, each charged before it leaves a site.


Pay = Callable[[str, Callable[[], Release]], NDArray[np.int64]]
"""Charges a release to the site's ledger before it is handed out: (query, how to make it) -> value.

The query is words, then ``STATE`` and a hash of everything public that its exact answer depends on.
"""

STATE = "; after "
_CHECKED_DRAWS = 20_000


def without_ledger(query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
    """Hand out a release that nobody pays for: for benchmarks and tests on public data."""
    return make().value


class NoisySums:
    """Releases one after the other what the plan lists, and nothing else.

    Privacy: what leaves the site is under the session's masks: with this site's share of the noise inside, or, for a
        trusted aggregator, exact; then the server adds the noise. Every release is paid for first.
    """

    def __init__(
        self,
        sums: ProtectedSums,
        plan: PrivateTreesPlan,
        pay: Pay = without_ledger,
        randomness: RandomSource = OS_RANDOMNESS,
        n_rows: int = 0,
    ) -> None:
        """Begin with the first release.

        Args:
            n_rows: rows of this site that report, for local noise.
        """
        self._sums, self._trust, self._pay, self._randomness = sums, plan.trust, pay, randomness
        self._n_rows = n_rows
        self._due = ReleaseSchedule(plan.releases)
        self._state = hashlib.sha256(repr((plan, plan.releases.multipliers())).encode())

    def release(
        self, kind: Kind, number: int, exact: NDArray[np.int64], tree: int | None = None, level: int | None = None
    ) -> NDArray[np.int64]:
        """Return the noisy sum of the sites' integers; see ``SumsOverSites``.

        All sums received before, on which the exact answer depends too, are part of what is paid for, as a hash: a site
        that plays its part again gets the same reply only where everything was the same.
        """
        planned = self._due.take(kind, number, exact.size, tree, level)
        query = f"{planned.words}{STATE}{self._state.hexdigest()[:32]}"
        paid = self._pay(query, lambda: self._noised(planned, exact))
        noisy = self._sums.sum_counts(kind, exact.ravel() if self._trust.is_trusted_aggregator else paid.ravel())
        self._state.update(noisy.astype("<i8").tobytes())
        return noisy.reshape(exact.shape)

    def _noised(self, planned: PlannedRelease, exact: NDArray[np.int64]) -> Release:
        trust, noise = self._trust, planned.noise
        if trust.is_trusted_aggregator:
            return Release(np.zeros(1, dtype=np.int64), planned.event)  # exact sums are charged, but kept in no file
        pairs = exact.reshape(-1, noise.n_coordinates)
        if trust.shares is None:  # of a single report, of which the event speaks, the sum tells less
            multiplier = noise.multiplier * trust.local_factor(self._n_rows)
            value = add_gaussian_noise(pairs, noise.sensitivity, multiplier, self._randomness).value
        else:
            value = add_noise_share(pairs, noise.sensitivity, noise.multiplier, trust.shares, self._randomness).value
        return Release(value, planned.event)


# Histograms of a tree's nodes by the kernels that grow XGBoost's trees: the integers that numpy finds, sooner.


_COORDINATES = 2
"""The kernels add pairs (g, h)."""


def node_histograms(
    bins: NDArray[np.uint8], pairs: NDArray[np.int64], features: Sequence[int], n_bins: int
) -> Histograms:
    """Return what sums the nodes of one tree.

    A row without a value is in its feature's last bin, as everywhere in private trees.

    Shapes: bins: uint8[n_features, n_rows]; pairs: int64[n_rows, n_coordinates].

    Args:
        features: that the tree may use.
        n_bins: of each.
    """
    n_features = len(features)
    if growth is None or pairs.shape[1] != _COORDINATES or n_features == 1:
        return in_numpy(bins, pairs, features, n_bins)
    starts = n_bins * np.arange(n_features + 1, dtype=np.int64)
    nothing = np.zeros(n_features, dtype=np.float32)
    layout = BinLayout(np.zeros(starts[-1], dtype=np.float32), starts, nothing.astype(bool), nothing)
    no_code = np.full(n_features, n_bins, dtype=np.uint32)
    rows = BinnedRows(layout, BinnedTable(np.ascontiguousarray(bins[list(features)].T), no_code, is_dense=True))
    rows.begin_tree(pairs)

    def of_nodes(nodes: Sequence[NDArray[np.intp]]) -> NDArray[np.int64]:
        rows.put(nodes)
        return rows.histograms(range(1, len(nodes) + 1)).reshape(len(nodes), n_features, n_bins, _COORDINATES)

    return of_nodes


# The server's part where it is trusted with exact sums: it adds the noise, once, and says so in its evidence.


Mechanism = Callable[[NDArray[np.int64], Sensitivity, float], Release]
"""Adds noise to an exact query: (sums, sensitivity, noise multiplier) -> release. ``add_noise`` is one."""

Spend = Callable[[str, str, float, float], None]
"""``EvidenceLog.spend``: (query, event, epsilon so far, delta)."""


class TrustedServer:
    """Turns each exact sum of a job into a noisy one.

    Security: the server sees exact sums over all sites, and no single site's part. The noise comes from its operating
        system.
    Privacy: one release per exchange, no more of them than the plan has: the aggregator keeps the answer for retries.
    """

    def __init__(self, plan: JobPlan, mechanism: Mechanism = add_noise) -> None:
        self._job, self._mechanism = plan.job, mechanism
        self._due = ReleaseSchedule(plan.releases)
        self._spent = PrivacyCost()

    def answer(self, frame: Frame, total: bytes, spend: Spend) -> bytes:
        """Return the noisy sum of one exchange.

        Raises:
            ProtocolError: a sum that the plan does not pay for now, in kind, number or size.
        """
        number = frame.moment.round if frame.moment.phase is Phase.UPDATE else -1
        planned = self._due.take(frame.kind, number, frame.n_values)
        if frame.codec is not Codec.MASKED:
            raise ProtocolError(f"{frame.kind.name}: not a masked sum")
        self._spent = self._spent + compose(planned.event)
        noise = planned.noise
        exact = np.frombuffer(total, dtype="<i8").reshape(-1, noise.n_coordinates)
        try:
            if noise.others is None:
                noisy = self._mechanism(exact, noise.sensitivity, noise.multiplier).value
            else:
                noisy = noise.others.add(exact, noise.sensitivity).value
        except UnusableNoise as error:
            raise ProtocolError(f"{frame.kind.name}: the server's noise plugin: {error}") from None
        except ValueError:
            raise ProtocolError(f"{frame.kind.name}: the sites' sum is beyond all bounds") from None
        job = self._job
        epsilon = self._spent.for_person(job.rows_per_person).epsilon(job.at_delta)
        spend(f"{frame.kind.name} at {frame.moment}", event_text([planned.event]), epsilon, job.at_delta)
        return noisy.astype("<i8").tobytes()


# Noise mechanisms that others wrote: what a site's policy, or the server's, pins by its files and loads.


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
