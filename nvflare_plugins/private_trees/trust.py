"""Who adds the noise to a private training's sums, and how much of it besides what privacy asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_components.distributed_noise import NoiseShares
from he_processors.errors import ConfigurationError


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
