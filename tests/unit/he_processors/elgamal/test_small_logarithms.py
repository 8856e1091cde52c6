from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from he_processors.curve.interface import base_point
from he_processors.elgamal.decryption import SearchBounds, SmallLogarithms
from he_processors.errors import ProtocolError
from tests.support.elgamal_toys import toy_curve

BITS = 6


@pytest.fixture(scope="module")
def logarithms() -> SmallLogarithms:
    curve = toy_curve()
    return SmallLogarithms(curve, curve.double(base_point(curve), 3), BITS)


def one_group(values: list[int], expected: int = 0, low: int = -5000, high: int = 5000) -> SearchBounds:
    distance = sum(abs(value - expected) for value in values)
    return SearchBounds(*(np.array([one]) for one in (expected, low, high, distance, len(values))))


def find(logarithms: SmallLogarithms, values: list[int], bounds: SearchBounds, **options: bool) -> NDArray[np.int64]:
    points = logarithms.times(np.array(values))
    return logarithms.find(points, np.zeros(len(values), dtype=np.int64), bounds, **options)


def test_every_value_around_every_step_is_found(logarithms: SmallLogarithms) -> None:
    values = [*range(-300, 301, 7), 63, 64, -63, -64, logarithms.step, -logarithms.step, 190, 191, -191, 4999, -5000]
    assert find(logarithms, values, one_group(values)).tolist() == values
    assert find(logarithms, values, one_group(values, expected=-170)).tolist() == values


def test_one_sided_ranges(logarithms: SmallLogarithms) -> None:
    values = [0, 1, 600, 5000]
    assert find(logarithms, values, one_group(values, expected=1400, low=0)).tolist() == values


def test_a_value_that_is_very_far_is_found_in_growing_strides(logarithms: SmallLogarithms) -> None:
    far = 300_001
    for values in ([far, 0], [-far, 17], [far, -far]):
        bounds = one_group(values, low=-400_000, high=400_000)
        assert find(logarithms, values, bounds).tolist() == values


@pytest.mark.parametrize(("values", "low", "high"), [([5001], -5000, 5000), ([-1], 0, 100), ([2**40], -5000, 5000)])
def test_values_out_of_range_are_not_found(logarithms: SmallLogarithms, values: list[int], low: int, high: int) -> None:
    bounds = one_group(values, low=low, high=high)
    with pytest.raises(ProtocolError) as caught:
        find(logarithms, values, bounds)
    assert str(values[0]) not in str(caught.value)


def test_a_group_may_not_take_more_steps_than_honest_sums_do(logarithms: SmallLogarithms) -> None:
    """Three points as far as one may be: within the range, but their sum is not."""
    far = [4000, 4000, 4000]
    assert find(logarithms, far, one_group(far)).tolist() == far
    honest = one_group([4000, 0, 0])
    with pytest.raises(ProtocolError):
        find(logarithms, far, honest)
    assert find(logarithms, [4000, 0, 0], honest).tolist() == [4000, 0, 0]


def test_groups_have_budgets_of_their_own(logarithms: SmallLogarithms) -> None:
    bounds = SearchBounds(*(np.array(one) for one in ([0, 50], [-9000, 0], [9000, 9000], [9000, 8000], [2, 2])))
    values = np.array([9000, 0, 60, 8000])
    assert logarithms.find(logarithms.times(values), np.array([0, 0, 1, 1]), bounds).tolist() == values.tolist()


def test_random_sums_never_exceed_their_budget(logarithms: SmallLogarithms) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.integers(-20, 21, (8, 40)).sum(axis=1) * rng.integers(0, 30, 8)
        bounds = one_group(values.tolist(), expected=int(values.sum()) // 8, low=-40_000, high=40_000)
        assert find(logarithms, values.tolist(), bounds).tolist() == values.tolist()


class CollidingCurve:
    """A curve whose coordinates are cut to a few bits, so that the table finds what is not in it."""

    def __init__(self) -> None:
        self._curve = toy_curve()

    def __getattr__(self, name: str) -> object:
        return getattr(self._curve, name)

    def y_words(self, points):
        words, signs = self._curve.y_words(points)
        return words & np.uint64(0x3FFF), signs


def test_chance_hits_are_found_out_when_hits_are_checked() -> None:
    curve = CollidingCurve()
    colliding = SmallLogarithms(curve, curve.double(base_point(curve), 3), BITS)  # its own entries stay distinct
    values = list(range(1000, 3000, 50))
    bounds = one_group(values)
    assert find(colliding, values, bounds).tolist() != values, "the control: unchecked hits mislead"
    assert find(colliding, values, bounds, checks_hits=True).tolist() == values
