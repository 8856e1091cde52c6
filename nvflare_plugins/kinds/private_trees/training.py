"""What a private training needs of its job, and whom it trusts with sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dp_components.distributed_noise import NoiseShares
from dp_components.leaf_weights import (
    TWO_CLASSES,
    ClassShares,
    LeafWeights,
    Number,
    Target,
    noise_proportional_ridge,
    residual_unit,
)
from dp_components.split_candidates import Columns, FeatureBounds
from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.private_trees.methods import Method
from nvflare_plugins.kinds.private_trees.releases import ReleasePlan
from nvflare_plugins.wire.envelope import Kind

# Who adds the noise to a private training's sums, and how much of it besides what privacy asks for.


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


TRUSTED_SERVER = Trust()
"""The server is trusted with exact sums."""


# What the trainer of private trees is given: a public plan, the site's own rows, and sums over all sites.


@dataclass(frozen=True, slots=True)
class PrivateTreesPlan:
    """Everything public about one training; equal at all sites.

    Args:
        bounds: public interval of each feature.
        releases: all that may be released.
        structure_seed: public seed of the forest's structure. Noise never comes from it.
        target: what the label is.
    """

    method: Method
    bounds: tuple[FeatureBounds, ...]
    releases: ReleasePlan = field(repr=False)  # it follows from the rest and from the noise
    trust: Trust
    structure_seed: int
    feature_names: tuple[str, ...] = ()
    target: Target = TWO_CLASSES

    @property
    def weights(self) -> LeafWeights:
        """What a leaf answers, and the row statistics it is computed from."""
        return self.method.weight_update.weights(self.target)

    @property
    def leaf_unit(self) -> float:
        """What a leaf's weight is multiplied with besides the learning rate. Units: of a score."""
        if isinstance(self.target, Number):
            return residual_unit(self.target, self.method.query)
        weights = self.weights
        return weights.score_unit if isinstance(weights, ClassShares) else 1.0

    @property
    def ridge(self) -> float:
        """XGBoost's lambda, with the share that is in proportion to the noise on a leaf."""
        return noise_proportional_ridge(self.method.ridge, self.method.noise_ridge, self.leaf_noise[0])

    @property
    def leaf_noise(self) -> tuple[float, float]:
        """Standard deviation of the noise on a leaf's sums G and H, of each class if there are several.

        Units: of g and h.

        With distributed noise it is that of all sites' shares together.
        """
        g, *_, h = self.releases.tree_noise.std
        weights = self.weights
        if isinstance(weights, ClassShares):  # H is the sum of all classes' rows
            h *= math.sqrt(weights.n_outputs)
        return g * self.trust.noise_factor * weights.noise_kept, h * self.trust.noise_factor


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A site's rows.

    Shapes: columns: float32[n_features, n_rows], held or read when they are asked for; NaN is missing and goes right;
        label: float32[n_rows], positions of classes or finite numbers; weights: float32[n_rows] in units of the public
        largest one, or None.
    """

    columns: Columns
    label: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None

    def statistics(self, margin: NDArray[np.float32], plan: PrivateTreesPlan) -> NDArray[np.int64]:
        """Return each row's pair (g, h), or its vector of several classes, within the method's sensitivity.

        That holds whatever the margins are. Weights are clipped into [0, 1] here: no row counts for more than one.

        Shapes: margin: float32[n_rows], or float32[n_rows, n_classes]; result: int64[n_rows, n_coordinates]. Units:
            grid steps.
        """
        values = plan.weights.row_statistics(margin, self.label, plan.method.query).values
        if self.weights is None:
            return values
        factors = np.clip(self.weights.astype(np.float64), 0.0, 1.0)
        # Toward zero, so that a row stays on the grid and inside its bounds.
        return np.trunc(values * factors[:, None]).astype(np.int64)


class SumsOverSites(Protocol):
    """Asks for noisy sums over the rows of all sites, in the order of the plan's releases."""

    def release(
        self, kind: Kind, number: int, exact: NDArray[np.int64], tree: int | None = None, level: int | None = None
    ) -> NDArray[np.int64]:
        """Return noisy sums for the exact ones of the own rows. Shapes: both alike. Units: grid steps.

        Args:
            number: boosting round, -1 before the first.
            tree, level: which release of the round, where it has several.

        Raises:
            ProtocolError: the plan does not pay for it.
        """


AfterRound = Callable[[int], None]
"""Takes note of a finished round."""


def ignore_round(number: int) -> None:
    """Take no note."""
