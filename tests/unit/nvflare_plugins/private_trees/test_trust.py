"""Who adds the noise, and with how many sites."""

from __future__ import annotations

import math

import pytest

from dp_components.distributed_noise import NoiseShares
from dp_components.errors import PrivacyRefusal
from he_processors.errors import ConfigurationError
from nvflare_plugins.kinds.private_trees.plan import Trust


def test_shares_of_three_sites_and_one_colluder() -> None:
    trust = Trust(NoiseShares(3, 1))
    assert trust.noise_factor == pytest.approx(math.sqrt(1.5)) and trust.n_honest == 2
    assert Trust().noise_factor == 1.0


@pytest.mark.parametrize(("n_sites", "n_colluders"), [(3, 0), (3, 3), (2, 2)])
def test_impossible_collusion_is_refused(n_sites: int, n_colluders: int) -> None:
    with pytest.raises(PrivacyRefusal):
        Trust(NoiseShares(n_sites, n_colluders))


def test_fewer_or_more_sites_than_calibrated_are_refused() -> None:
    with pytest.raises(PrivacyRefusal):
        Trust(NoiseShares(3, 1)).check_sites(2)
    with pytest.raises(ConfigurationError):
        Trust(NoiseShares(3, 1)).check_sites(4)
    Trust(NoiseShares(3, 1)).check_sites(3)
