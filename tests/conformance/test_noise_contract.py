"""The contract of noise mechanisms: it passes for the example, and each fault fails where it should."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dp_components.errors import UnusableNoise
from dp_components.integer_noise import IntegerNoise, MassFunction, NoiseMechanism
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.conformance.noise import NoiseContract

sys.path.append(str(Path(__file__).parents[1] / "support" / "noise_package"))
from acme_noise.staircase import MECHANISM, Staircase  # type: ignore[import-not-found]


class TestStaircase(NoiseContract):
    mechanism = MECHANISM
    epsilons = (1.0,)


@pytest.mark.slow
class TestStaircaseOfWideSteps(NoiseContract):
    mechanism = MECHANISM
    epsilons = (0.02,)


@dataclass(frozen=True)
class _Faulty:
    mass: MassFunction
    real: IntegerNoise
    change: Callable[..., NDArray[np.int64]]

    def draw(self, n: int, randomness: RandomSource) -> NDArray[np.int64]:
        return self.change(self.real, n, randomness)


def _narrower(noise: Staircase, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    drawn: NDArray[np.int64] = dataclasses.replace(noise, width=noise.width - 1).draw(n, randomness)
    return drawn


def _even(noise: Staircase, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    even: NDArray[np.int64] = 2 * (noise.draw(n, randomness) // 2)
    return even


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "test_it_draws_what_it_says": (_narrower, "not of its mass function"),
    "even": (_even, "not of its mass function"),
    "one_sided": (lambda noise, n, bits: abs(noise.draw(n, bits)), "not of its mass function"),
    "shifted": (lambda noise, n, bits: noise.draw(n, bits) + noise.width, "not of its mass function"),
    "own_bits": (lambda noise, n, bits: noise.draw(n, OS_RANDOMNESS), "other bits than it was given"),
    "constant": (lambda noise, n, bits: np.arange(n), "does not draw from the bits"),
    "one_more": (lambda noise, n, bits: noise.draw(n + 1, bits), "were due"),
    "short": (lambda noise, n, bits: noise.draw(n, bits).astype(np.int32), "not int64"),
}


def _failures(mechanism: NoiseMechanism) -> Iterator[str]:
    contract = type("Faulty", (NoiseContract,), {"mechanism": mechanism, "epsilons": (1.0,), "n_coordinates": (2,)})()
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract, name)()
            except (AssertionError, UnusableNoise) as error:
                yield str(error)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_draw_is_found(fault: str) -> None:
    change, complaint = FAULTS[fault]

    def calibrate(epsilon: float, shift: int, coordinates: int) -> _Faulty:
        real = MECHANISM.calibrate(epsilon, shift, coordinates)
        return _Faulty(real.mass, real, change)

    assert any(complaint in failure for failure in _failures(NoiseMechanism("acme_staircase", calibrate)))


def test_a_price_above_what_was_asked_for_is_found() -> None:
    dear = NoiseMechanism("acme_staircase", lambda epsilon, *shape: MECHANISM.calibrate(1.01 * epsilon, *shape))
    assert any("where 1 was asked for" in failure for failure in _failures(dear))
    assert not list(_failures(MECHANISM))
