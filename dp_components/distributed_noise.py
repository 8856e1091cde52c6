"""Noise in shares: each site adds a part, so that no one ever holds an exact sum.

Every site sees the model and knows its own share, and so does a coalition of sites. The noise that counts is the one
that remains when the shares of t colluders are known: each of W sites adds 1 / (W - t) of its variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from numpy.typing import ArrayLike

from dp_components.errors import PrivacyRefusal
from dp_components.events import Release
from dp_components.mechanisms import add_noise
from dp_components.sensitivity import Sensitivity
from he_processors.randomness import OS_RANDOMNESS, RandomSource


@dataclass(frozen=True, slots=True)
class NoiseShares:
    """How the noise is divided.

    Attributes:
        n_sites: sites that add a share; all of them must be alive in every sum.
        n_colluders: sites that may pool what they know, the observer included: at least 1, fewer than ``n_sites``.

    Raises:
        PrivacyRefusal: the numbers leave no noise, or leave none unknown to some site.
    """

    n_sites: int
    n_colluders: int = 1

    def __post_init__(self) -> None:
        if self.n_colluders < 1:
            raise PrivacyRefusal(
                "Distributed noise with no tolerated colluder is refused: every site sees the model and knows its own "
                "share of the noise. Set at least 1."
            )
        if self.n_colluders >= self.n_sites:
            raise PrivacyRefusal(
                f"Distributed noise among {self.n_sites} site(s) cannot tolerate {self.n_colluders} colluder(s): they "
                "would know all of it. Add sites or tolerate fewer."
            )

    @property
    def n_honest(self) -> int:
        """The number of shares that the accounting relies on."""
        return self.n_sites - self.n_colluders

    @property
    def total_noise_factor(self) -> float:
        """Standard deviation of the noise in the sum over that of a trusted aggregator: sqrt(W / (W - t))."""
        return math.sqrt(self.n_sites / self.n_honest)

    def check_live(self, n_live: int) -> None:
        """Refuse a sum to which fewer sites contribute than the noise was calibrated for.

        Raises:
            PrivacyRefusal: sites are missing, and their shares with them.
        """
        if n_live < self.n_sites:
            raise PrivacyRefusal(
                f"Only {n_live} of {self.n_sites} sites are alive: the shares of noise of the others are missing, so "
                "the sum would be less private than promised. Start again with the sites that remain."
            )


def add_noise_share(
    sums: ArrayLike,
    sensitivity: Sensitivity,
    noise_multiplier: float,
    shares: NoiseShares,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Add this site's share of the noise to its own sums, before they are masked.

    Shapes:   sums: int64[..., n_coordinates], this site's.
    Units:    grid units.
    Privacy:  for an L2 sensitivity each coordinate's share has variance s^2 / (W - t), rounded up, so that the shares
        of the sites outside a coalition sum to at least s^2. The event is that of their sum, which is what is sampled:
        a sum of discrete Gaussians. For an L1 sensitivity a share is a difference of negative binomials of order
        1 / (W - t), so that those of the sites outside a coalition sum to exactly discrete Laplace noise. One share
        alone protects less: the value must leave this site under masks only.
    Security: the share must never be known to any other site; it comes from this site's operating system.

    Returns:
        The site's noised sums with the event of the honest sites' total (``noise_event``).

    Raises:
        ValueError: as ``add_noise``.
    Reference: Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism, Theorem 9.
    """
    return add_noise(sums, sensitivity, noise_multiplier, randomness, shares.n_honest)


# Who may see what before the noise is on it.


class TrustModel(Enum):
    """The trust model of a private job; it stands in the job and in the evidence.

    Attributes:
        TRUSTED_AGGREGATOR: the server sees the exact sums and adds the noise once.
        DISTRIBUTED: each site adds its share of the noise under masks: nobody ever sees an exact sum of all sites.
        LOCAL: each site noises every row by itself; the sums are never exact anywhere else.
    """

    TRUSTED_AGGREGATOR = "trusted_aggregator"
    DISTRIBUTED = "distributed"
    LOCAL = "local"

    @property
    def description(self) -> str:
        """Say what is protected against whom, for report and evidence."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    TrustModel.TRUSTED_AGGREGATOR: (
        "The server sees exact sums and adds the noise once. The guarantee holds towards everyone who sees the noised "
        "sums and the model, not towards the server."
    ),
    TrustModel.DISTRIBUTED: (
        "Each site adds its share of the noise before the sums are masked. The guarantee holds towards the server and "
        "any coalition of as many sites as the job says, who know their own shares."
    ),
    TrustModel.LOCAL: (
        "Each row is noised at its own site before anything is added up. The guarantee holds towards everyone else, "
        "for what is noised: the row's gradients, or the values of its buckets, as the mechanism says."
    ),
}
