"""What the server sees under masks is uniform, and two messages' keystreams have nothing to do with each other.

Inputs are fixed, so results are too: no test fails by chance from run to run. The bounds are those at which a random
run would fail with probability 1e-5 or less, on both sides, and each statistic is shown to reject a wrong distribution.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from he_processors.bfv import choose_plain_modulus
from he_processors.masks import MessageLabel, PairwiseMasks

N_VALUES = 1 << 17
ALPHA = 1e-5


def masked(modulus: int | None, counter: int, values: np.ndarray | None = None) -> np.ndarray:
    """What site 0 of two sends for the worst plaintext: all zeros, or the given values."""
    values = np.zeros(N_VALUES, dtype=np.uint64) if values is None else values
    masks = PairwiseMasks(b"s" * 32, 0, {1: b"p" * 32}, b"g" * 32)
    return masks.mask(values, MessageLabel(counter, "HISTOGRAM", "update:0", values.size), modulus)


def uniformity(words: np.ndarray, modulus: int) -> float:
    """Chi-square p-value of the counts in 256 equal intervals below the modulus."""
    counts = np.bincount((words.astype(np.float64) / modulus * 256).astype(int).clip(0, 255), minlength=256)
    return stats.chisquare(counts).pvalue


def is_plausible(p_value: float) -> bool:
    """Two-sided: neither too far from uniform nor suspiciously close to it."""
    return ALPHA / 2 < p_value < 1 - ALPHA / 2


@pytest.mark.parametrize("modulus", [None, choose_plain_modulus(3), 3 << 60, (1 << 62) + 1])
def test_masked_zeros_are_uniform(modulus):
    assert is_plausible(uniformity(masked(modulus, 1), modulus or 1 << 64))


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_is_fair(bit):
    ones = int((masked(None, 2) >> np.uint64(bit) & np.uint64(1)).sum())
    assert stats.binomtest(ones, N_VALUES, 0.5).pvalue > ALPHA / 64


def test_uniformity_is_rejected_where_it_does_not_hold():
    """A modulus taken by remainder instead of rejection, a plain histogram, and a counter in place of noise."""
    modulus = 3 << 60  # 2^64 mod 3 * 2^60 = 2^60: the lower third would be hit more often
    assert not is_plausible(uniformity(masked(None, 1) % np.uint64(modulus), modulus))
    assert not is_plausible(uniformity(np.arange(N_VALUES, dtype=np.uint64) << np.uint64(30), 1 << 64))
    even = (np.arange(N_VALUES, dtype=np.uint64) % np.uint64(256)) << np.uint64(56)
    assert not is_plausible(uniformity(even, 1 << 64)), "perfectly even counts are not random either"


def differences(a: np.ndarray, b: np.ndarray) -> float:
    """p-value of a - b being uniform: what an observer of two messages computes."""
    return uniformity(a - b, 1 << 64)


@pytest.mark.parametrize("lag", [0, 1, 2, 32768])
def test_keystreams_of_two_messages_are_independent(lag):
    first, second = masked(None, 1), masked(None, 2)
    assert is_plausible(differences(first, np.roll(second, lag)))


@pytest.mark.parametrize("lag", [1, 2, 32768])
def test_a_keystream_does_not_repeat_within_a_message(lag):
    first = masked(None, 1)
    assert is_plausible(differences(first, np.roll(first, lag)))


def test_a_reused_keystream_is_noticed():
    """The fault that the counters exist for: the difference of two messages is the difference of their plaintexts."""
    values = np.random.default_rng(0).integers(0, 1 << 40, N_VALUES).astype(np.uint64)
    first, again = masked(None, 1), masked(None, 1, values)
    np.testing.assert_array_equal(again - first, values)
    assert not is_plausible(differences(again, first))
