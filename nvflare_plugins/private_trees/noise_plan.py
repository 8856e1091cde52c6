"""Who adds how much noise to which sum: fixed before training, from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting.composition import gaussian_limit
from dp_components.distributed_noise import NoiseShares
from dp_components.events import Event, Release, RepeatedEvent
from dp_components.leaf_weights.query import LeafQuery, pair_sensitivity, real_noise_std
from dp_components.mechanisms.gaussian import add_gaussian_noise, gaussian_event
from dp_components.sensitivity import Sensitivity, clip_rows, count_sensitivity
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.private_trees.methods import Method, SplitMethod
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import Frame

Mechanism = Callable[[NDArray[np.int64], Sensitivity, float], Release]
"""Adds noise to an exact query: (sums, sensitivity, noise multiplier) -> release. ``add_gaussian_noise`` is one."""

_KIND_OF_TREES = {
    SplitMethod.TOTALLY_RANDOM: Kind.NODE_STATS,
    SplitMethod.PARTIALLY_RANDOM: Kind.LEFT_SUMS,
    SplitMethod.HISTOGRAM: Kind.HISTOGRAM,
}


@dataclass(frozen=True, slots=True)
class PlannedNoise:
    """The noise on one kind of query."""

    sensitivity: Sensitivity
    multiplier: float


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """The noise that privacy asks for, by what is released; shares of sites come on top (``Trust``)."""

    leaves: PlannedNoise  # also histograms and left sums of greedy trees: pairs (G, H)
    hessians: PlannedNoise  # Hessian histograms of the iterative Hessian
    cells: PlannedNoise | None  # count histograms of paid candidates
    trees: Kind = Kind.NODE_STATS  # what the trees are made of: leaf sums, left sums, or histograms
    refines: bool = False  # whether Hessian histograms are paid for

    @classmethod
    def of(cls, method: Method, n_features: int, mu: float, noise_multiplier: float | None = None) -> NoisePlan:
        """Divide a total of mu (exact Gaussian composition) among everything that the method releases.

        Args:
            noise_multiplier: of the training's queries, in place of the one that mu gives: for reproductions of other
                people's accounting.
        """
        multiplier = noise_multiplier or method.noise_multiplier(mu, n_features)
        bounds = method.weight_update.weights().bounds
        # Two scalar queries of this multiplier are one query of the weighted pair with 1 / sqrt(2) of it.
        of_pair = multiplier / math.sqrt(2) if method.query is LeafQuery.SCALAR else multiplier
        cells = None
        if method.candidates.is_paid:
            cells = PlannedNoise(count_sensitivity(n_features), 1.0 / (mu * math.sqrt(method.candidate_share)))
        return cls(
            PlannedNoise(pair_sensitivity(method.query, bounds), of_pair),
            PlannedNoise(clip_rows(np.zeros((0, 1)), (bounds.hessian,)).sensitivity, multiplier),
            cells,
            _KIND_OF_TREES[method.split_method],
            method.hessian_histogram_trees(n_features) > 0,
        )

    @classmethod
    def for_budget(cls, method: Method, n_features: int, epsilon: float, delta: float) -> NoisePlan:
        """Return the plan that keeps (epsilon, delta) towards adding or removing one row."""
        return cls.of(method, n_features, math.sqrt(gaussian_limit(epsilon, delta).mu_squared))

    @property
    def gradient_std(self) -> float:
        """Standard deviation of the noise on a leaf's G, before shares. Units: of g."""
        return real_noise_std(self.leaves.sensitivity, self.leaves.multiplier)[0]

    def of_kind(self, kind: Kind) -> PlannedNoise:
        """Return the noise on a message. Raises: ProtocolError, for a kind that the plan does not pay for."""
        if kind is self.trees:
            return self.leaves
        if kind is Kind.CELL_COUNTS and self.cells is not None:
            return self.cells
        if kind is Kind.HESSIANS and self.refines:
            return self.hessians
        raise ProtocolError(f"{kind.name} is not paid for by this job's plan: it is not released")

    def event(self, kind: Kind, n_values: int, n_honest: int = 1) -> Event:
        """Return the event that one message costs."""
        planned = self.of_kind(kind)
        return gaussian_event(n_values, planned.sensitivity, planned.multiplier, n_honest)


@dataclass(frozen=True, slots=True)
class Trust:
    """Who is trusted with exact sums: the server (neither is given), no one, or each site with its own rows only.

    With shares every site adds its part of the noise under masks, so that no one ever holds an exact sum. Locally every
    row's report, its pair (g, h) at its leaf and zeros elsewhere, gets the noise that hides any other report; a site
    adds its rows' reports up.

    Args:
        local_rows: number of all sites' rows, public, where each is noised by itself.
    """

    shares: NoiseShares | None = None
    local_rows: int | None = None

    @property
    def is_trusted_aggregator(self) -> bool:
        """Whether the server sees exact sums and adds the noise once."""
        return self.shares is None and self.local_rows is None

    @property
    def n_honest(self) -> int:
        """Shares of the noise that the accounting relies on."""
        return 1 if self.shares is None else self.shares.n_honest

    @property
    def noise_factor(self) -> float:
        """The noise on a released sum, in multiples of what privacy asks for."""
        if self.local_rows is not None:
            return self.local_factor(self.local_rows)
        return 1.0 if self.shares is None else self.shares.total_noise_factor

    def local_factor(self, n_rows: int) -> float:
        """Return the noise on the sum of so many rows' reports, in the same multiples.

        A report may become any other: that is twice the sensitivity of a row that is added or removed. The sum of the
        rows' discrete Gaussians is one discrete Gaussian but for 1e-60.
        """
        return 2.0 * math.sqrt(max(n_rows, 1))

    def check_sites(self, n_sites: int) -> None:
        """Refuse another number of sites than the noise was divided for.

        Raises:
            ConfigurationError: another number of sites.
            PrivacyRefusal: so few that too little noise is left.
        """
        if self.shares is not None:
            self.shares.check_live(n_sites)
            if n_sites != self.shares.n_sites:
                raise ConfigurationError(f"the noise was divided for {self.shares.n_sites} sites, not for {n_sites}")


class ServerNoise:
    """Adds the noise at a trusted aggregator; give ``release`` to the aggregator as ``on_sum``.

    Privacy: one release per exchange: the aggregator keeps the answer for retries.
    """

    def __init__(self, plan: NoisePlan, mechanism: Mechanism = add_gaussian_noise):
        self._plan = plan
        self._mechanism = mechanism

    def release(self, frame: Frame, total: bytes) -> bytes:
        """Return the noisy sum of one exchange. Raises: ProtocolError, for what the plan does not pay for."""
        planned = self._plan.of_kind(frame.kind)
        exact = np.frombuffer(total, dtype="<i8").reshape(-1, len(planned.sensitivity.weights))
        return self._mechanism(exact, planned.sensitivity, planned.multiplier).value.astype("<i8").tobytes()


def planned_events(plan: NoisePlan, leaves_per_tree: list[int], n_cells: int, n_honest: int = 1) -> list[Event]:
    """Return the events of a whole training of random trees, for the ledger, before anything is released.

    Each tree of a batch is a query of its own, although one message carries them all.
    """
    events: list[Event] = []
    if plan.cells is not None:
        events.append(plan.event(Kind.CELL_COUNTS, n_cells, n_honest))
    for n_leaves in sorted(set(leaves_per_tree)):
        of_tree = plan.event(Kind.NODE_STATS, 2 * n_leaves, n_honest)
        events.append(RepeatedEvent(of_tree, leaves_per_tree.count(n_leaves)))
    return events
