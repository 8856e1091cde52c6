"""Rounding to grids: C and numpy agree to the bit, on any values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from he_processors import fixed_point
from he_processors.errors import CapacityExceeded
from he_processors.fixed_point import Grid, Grids

needs_extension = pytest.mark.skipif(fixed_point._grids is None, reason="the C extension was not built")

GRIDS = (Grid(-40, 3), Grid(-59, 2), Grid(0, 61))
HARD = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 2.0**-41, 3 * 2.0**-41, 5e-324, 2.0**52 - 0.5, 2.0**52 + 1, 7.999, 8.0, -8.0]


def _outcome(grids: Grids, values: NDArray[np.float64], running: bool, by_numpy: bool) -> object:
    try:
        if by_numpy:
            return grids.rounded_by_numpy(values, running=running).tolist()
        return (grids.encode_running(values) if running else grids.encode(values)).tolist()
    except CapacityExceeded as error:
        return str(error)


@needs_extension
@pytest.mark.parametrize("running", [False, True])
@given(
    st.lists(st.sampled_from(GRIDS), min_size=1, max_size=3),
    st.lists(st.one_of(st.sampled_from(HARD), st.floats(-4, 4), st.floats(allow_nan=True)), max_size=60),
)
def test_both_ways_to_round_agree(running: bool, of: list[Grid], values: list[float]) -> None:
    grids, array = Grids(tuple(of)), np.array(values[: len(values) // len(of) * len(of)])
    assert _outcome(grids, array, running, False) == _outcome(grids, array, running, True)


@needs_extension
@pytest.mark.parametrize("running", [False, True])
def test_both_ways_to_round_agree_over_blocks(running: bool) -> None:
    values = np.random.default_rng(1).normal(size=3 * 5003) * np.tile([1.0, 0.3, 1e15], 5003)
    grids = Grids(GRIDS)
    assert _outcome(grids, values, running, False) == _outcome(grids, values, running, True)
    backwards = values[::-1]  # not contiguous
    grids = Grids(GRIDS[::-1])
    assert _outcome(grids, backwards, running, False) == _outcome(grids, backwards, running, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 8.1, -8.1])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9_999])
def test_a_value_that_does_not_fit_is_refused_wherever_it_stands(bad: float, place: int) -> None:
    values = np.ones(10_000)
    values[place] = bad
    for encode in (Grids((GRIDS[0],)).encode, Grids((GRIDS[0],)).encode_running):
        with pytest.raises(CapacityExceeded, match=r"not finite or larger than 2\^3"):
            encode(values)


def test_sums_over_runs_stay_within_a_step() -> None:
    grid = Grid(-10, 3)
    values = np.random.default_rng(2).normal(size=100_000)
    off = np.cumsum(Grids((grid,)).encode_running(values)) * 2.0**-10 - np.cumsum(values)
    assert np.abs(off).max() <= 2.0**-10


def test_integers_come_back_as_the_nearest_numbers() -> None:
    integers = np.array([0, -1, 3, 2**62 + 1, -(2**53) - 1, 5], dtype=np.int64)
    steps = np.tile([2.0**-40, 2.0**-59], 3)
    assert np.array_equal(Grids(GRIDS[:2]).decode(integers), integers.astype(np.float64) * steps)


@needs_extension
def test_the_extension_refuses_buffers_that_do_not_fit() -> None:
    good = np.zeros(4), np.ones(2), np.ones(2), True, np.zeros(4, dtype=np.int64)
    for place, wrong in enumerate([np.zeros(3), np.ones(3), np.ones(1), None, np.zeros(3, dtype=np.int64)]):
        if wrong is not None:
            with pytest.raises(ValueError, match="round"):
                fixed_point._grids.round(*(*good[:place], wrong, *good[place + 1 :]))
    with pytest.raises(ValueError, match="too fine"):
        fixed_point._grids.round(np.zeros(1), np.array([2.0**62]), np.array([2.0]), True, np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="scale"):
        fixed_point._grids.scale(np.zeros(3, dtype=np.int64), np.ones(2), np.zeros(3))
