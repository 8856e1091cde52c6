"""Who adds how much noise to which sum: fixed before training, from public facts alone.

Trust models. ``TRUSTED``: the server sees exact sums and adds the noise once. ``DISTRIBUTED``: every site adds a share
under masks, so that no one ever holds an exact sum; the shares of the sites that do not collude are enough on their
own. A site knows its own share, so at least one colluder, the observer, is always assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.query import NoiseStd, noise_std
from dp_components.leaf_weights.row_bounds import UNIT
from dp_components.split_candidates import dp_quantiles
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.private_trees.methods import Method
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import Frame

IntegerNoise = Callable[[NDArray[np.float64]], NDArray[np.int64]]
"""Draws one integer per coordinate, given standard deviations in grid steps; from secret randomness."""


class TrustModel(Enum):
    """Who is trusted with exact sums."""

    TRUSTED = "trusted aggregator"
    DISTRIBUTED = "distributed"


@dataclass(frozen=True, slots=True)
class Trust:
    """A trust model for a number of sites, of which some may collude (distributed only)."""

    model: TrustModel
    n_sites: int
    n_colluders: int = 1

    def __post_init__(self) -> None:
        if self.model is TrustModel.DISTRIBUTED and not 1 <= self.n_colluders < self.n_sites:
            raise ConfigurationError(
                f"distributed noise needs at least 1 and fewer than {self.n_sites} tolerated colluders: every site "
                "knows its own share"
            )

    @property
    def share(self) -> float:
        """What each site's noise is multiplied with; the server's in the trusted model is 1."""
        return 0.0 if self.model is TrustModel.TRUSTED else 1.0 / math.sqrt(self.n_sites - self.n_colluders)

    @property
    def total(self) -> float:
        """The noise on a released sum, in multiples of what privacy asks for."""
        return 1.0 if self.model is TrustModel.TRUSTED else self.share * math.sqrt(self.n_sites)


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """Noise that privacy asks for, before shares are taken. Units: of g, h and rows."""

    leaf: NoiseStd
    cells: float

    @classmethod
    def of(cls, method: Method, n_features: int, mu: float) -> NoisePlan:
        """Divide a total of mu (exact Gaussian composition) among everything that the method releases."""
        multiplier = method.noise_multiplier(mu, n_features)
        leaf = noise_std(method.query, method.weight_update.weights().bounds, multiplier)
        paid = method.candidates.is_paid
        cells = dp_quantiles.l2_sensitivity(n_features) / (mu * math.sqrt(method.candidate_share)) if paid else 0.0
        return cls(leaf, cells)

    def grid_std(self, kind: Kind, n_values: int) -> NDArray[np.float64]:
        """Return the noise on each integer of a message. Shapes: float64[n_values]. Units: grid steps.

        Raises: ProtocolError, for a kind that the plan does not pay for.
        """
        if kind is Kind.NODE_STATS and n_values % 2 == 0:
            return np.tile([self.leaf.gradient * UNIT, self.leaf.hessian * UNIT], n_values // 2)
        if kind is Kind.CELL_COUNTS and self.cells > 0:
            return np.full(n_values, self.cells)
        raise ProtocolError(f"{kind.name} is not paid for by this job's plan: it is not released")


class ServerNoise:
    """Adds the noise at a trusted aggregator; give ``release`` to the aggregator as ``on_sum``.

    Privacy: one release per exchange: the aggregator keeps the answer for retries.
    """

    def __init__(self, plan: NoisePlan, noise: IntegerNoise):
        self._plan = plan
        self._noise = noise

    def release(self, frame: Frame, total: bytes) -> bytes:
        """Return the noisy sum of one exchange."""
        noise = self._noise(self._plan.grid_std(frame.kind, frame.n_values))
        return (np.frombuffer(total, dtype="<u8") + noise.view(np.uint64)).tobytes()
