"""The contract of a noise mechanism: what it draws is what it says, and no price is above what was asked for.

The author of one subclasses it in a test file:

    from acme_noise.staircase import MECHANISM
    from nvflare_plugins.conformance.noise import NoiseContract

    class TestStaircase(NoiseContract):
        mechanism = MECHANISM

and runs pytest. What the contract cannot tell is whether draws are exact: a deviation that 100,000 draws do not
show passes. A fair mechanism fails once in 10^8 runs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from dp_components import integer_noise
from dp_components.events import NeighbouringRelation
from dp_components.sensitivity import Norm, Sensitivity
from nvflare_plugins.conformance.sums import require

_DRAWS = 100_000


class _Seeded:
    """Bits that repeat, so that it is seen whether a draw used others."""

    def __init__(self, seed: int) -> None:
        self._bits = random.Random(seed)  # noqa: S311 - no secret

    def bytes(self, n: int) -> bytes:
        """Return random bytes."""
        return self._bits.randbytes(n)


class NoiseContract:
    """What every noise mechanism must satisfy.

    Attributes:
        mechanism: what is tested.
        epsilons: of a query, to try.
        n_coordinates: of a query, to try.
    """

    mechanism: ClassVar[integer_noise.NoiseMechanism]
    epsilons: ClassVar[tuple[float, ...]] = (0.02, 1.0)
    n_coordinates: ClassVar[tuple[int, ...]] = (1, 2, 7)

    def _priced(self) -> Iterator[tuple[float, int, integer_noise.PricedNoise]]:
        others = integer_noise.NoiseOfOthers(self.mechanism, self.mechanism.name)
        for epsilon in self.epsilons:
            for n in self.n_coordinates:
                weights = tuple(1.0 + i % 2 for i in range(n))
                sensitivity = Sensitivity(2.0**19, Norm.L1, NeighbouringRelation.ADD_OR_REMOVE_ROW, weights)
                yield epsilon, n, others.price(sensitivity, epsilon)

    def _noises(self) -> Iterator[integer_noise.IntegerNoise]:
        for _, _, priced in self._priced():
            yield priced.noise

    def test_it_has_the_name_of_an_entry_point(self) -> None:
        """Letters, digits and underscores."""
        require(
            re.fullmatch("[A-Za-z0-9_]{1,64}", self.mechanism.name) is not None, "its name is none of an entry point"
        )

    def test_it_costs_no_more_than_was_asked_for(self) -> None:
        """By the price that follows from its mass function, on which two accountants agree."""
        for epsilon, n, priced in self._priced():
            require(
                priced.event.epsilon <= epsilon * (1 + 1e-9),
                f"a query of {n} coordinates costs {priced.event.epsilon:.9g} where {epsilon:g} was asked for",
            )

    def test_it_draws_what_it_says(self) -> None:
        """100,000 draws against the mass function, sign by sign."""
        for noise in self._noises():
            rareness = integer_noise.rareness_of_draws(noise, _DRAWS, _Seeded(0))
            require(rareness > integer_noise.RARE, f"its draws are not of its mass function (p = {rareness:.1g})")

    def test_it_draws_from_the_bits_that_it_is_given(self) -> None:
        """The same bits give the same noise, other bits another, and no two draws are alike."""
        for noise in self._noises():
            one, again, other = (noise.draw(2000, _Seeded(seed)) for seed in (1, 1, 2))
            require(np.array_equal(one, again), "it draws from other bits than it was given")
            require(not np.array_equal(one, other), "it does not draw from the bits that it was given")
            bits = _Seeded(3)
            require(not np.array_equal(noise.draw(2000, bits), noise.draw(2000, bits)), "it repeats its noise")

    def test_it_draws_as_many_as_it_is_asked_for(self) -> None:
        """None, one and many, as int64."""
        for noise in self._noises():
            for n in (0, 1, 77):
                drawn = noise.draw(n, _Seeded(4))
                require(drawn.shape == (n,), f"it drew {drawn.shape} where {n} were due")
                require(drawn.dtype == np.int64, "its draws are not int64")
