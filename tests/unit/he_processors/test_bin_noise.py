"""Noise under encryption: what the key owner opens is the exact sum plus the noise, and a format's tails bound it."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.elgamal.encryption import DigitFormat
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import PairFormat
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinNoise, BinSums, NodeTotal, check_node
from nvflare_plugins.kinds.vertical.histogram_maker import PairsForm, histogram_maker
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, elgamal_owner, gradient_owner
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.he_toys import toy_paillier

N_ROWS = 60
TAILS = (1 << 24, 1 << 23)
LAYOUT = BinLayout((4, 3))
NODES = [np.arange(N_ROWS, dtype=np.int32), np.arange(0, N_ROWS, 3, dtype=np.int32)]


def halves(scheme: str):
    """Return the owner, and the party's half."""
    if scheme == "elgamal":
        owner = elgamal_owner(DigitFormat.of(14, N_ROWS, TAILS))
        return owner, histogram_maker(owner.setup, N_ROWS, form=PairsForm(TAILS))
    pairs = PairFormat(20, N_ROWS, 1.0, 0.0, 1.0, TAILS)
    if scheme == "plain":
        return ClearGradientOwner(pairs), ClearHistogramMaker()
    owner = gradient_owner(toy_paillier(512), pairs)
    return owner, histogram_maker(owner.setup, N_ROWS, form=PairsForm(TAILS), allow_toy_keys=True)


def naive(codes, g, h, rows):
    """Return the exact sums of one node, slot by slot."""
    sums = [np.bincount(codes[f, rows], values[rows], n + 1) for values in (g, h) for f, n in enumerate(LAYOUT.n_bins)]
    return np.concatenate(sums[:2]).astype(np.int64), np.concatenate(sums[2:]).astype(np.int64)


@pytest.mark.parametrize("scheme", ["plain", "paillier", "elgamal"])
def test_sums_are_opened_with_the_noise_that_was_added(scheme):
    rng = np.random.default_rng(3)
    owner, maker = halves(scheme)
    g, h = owner.pair_format.encode_pairs(rng.uniform(-1, 1, N_ROWS), rng.uniform(0, 1, N_ROWS))
    codes = np.array([rng.integers(0, 5, N_ROWS), rng.integers(0, 4, N_ROWS)]).astype(np.uint8)
    maker.begin_tree(N_ROWS)
    maker.add_gradients(owner.encrypt(g, h))
    # Largest and smallest noise, and hessians that turn negative.
    noise = BinNoise(*(rng.integers(-tail, tail, 2 * LAYOUT.n_slots, endpoint=True) for tail in TAILS))
    noise.g[:2], noise.h[:2] = (TAILS[0], -TAILS[0]), (TAILS[1], -TAILS[1])
    totals = [NodeTotal.of_rows(g[rows], h[rows]) for rows in NODES]
    opened = owner.open_sums(maker.sum_bins(codes, LAYOUT, NODES, noise=noise), LAYOUT, totals)
    for i, (rows, sums) in enumerate(zip(NODES, opened, strict=True)):
        slots = slice(i * LAYOUT.n_slots, (i + 1) * LAYOUT.n_slots)
        exact_g, exact_h = naive(codes, g, h, rows)
        assert (sums.g.ravel() == exact_g + noise.g[slots]).all()
        assert (sums.h.ravel() == exact_h + noise.h[slots]).all()


@pytest.mark.parametrize("scheme", ["paillier", "elgamal"])
def test_noise_beyond_the_tails_is_not_sent(scheme):
    owner, maker = halves(scheme)
    maker.begin_tree(N_ROWS)
    maker.add_gradients(owner.encrypt(np.zeros(N_ROWS, np.int64), np.zeros(N_ROWS, np.int64)))
    codes, zero = np.zeros((2, N_ROWS), np.uint8), np.zeros(LAYOUT.n_slots, np.int64)
    beyond = zero.copy()
    beyond[3] = TAILS[0] + 1
    with pytest.raises(CapacityExceeded, match="nothing was sent"):
        maker.sum_bins(codes, LAYOUT, NODES[:1], noise=BinNoise(beyond, zero))
    with pytest.raises(ValueError, match="one value for each sum"):
        maker.sum_bins(codes, LAYOUT, NODES[:1], noise=BinNoise(zero[:-1], zero[:-1]))


def test_a_node_whose_noised_sums_are_far_off_is_refused():
    pairs, total = PairFormat(20, 100, 1.0, 0.0, 1.0, (1000, 500)), NodeTotal(100, 7000, 9000)
    near_g = np.array([7000 + 4000, 0, 0, 0, 1000, 7000, 0, 0, 0], dtype=np.int64)
    near_h = np.array([9000, 0, 0, 0, -500, 9000, 0, 0, 0], dtype=np.int64)
    check_node(BinSums(near_g, near_h), total, LAYOUT, pairs)
    far = near_g.copy()
    far[5] += 4001  # four slots of at most 1000 each
    for wrong in (BinSums(far, near_h), BinSums(near_g, near_h - 600), BinSums(near_g + (100 << 20), near_h)):
        with pytest.raises(ProtocolError):
            check_node(wrong, total, LAYOUT, pairs)


def test_digits_take_noise_only_where_there_is_one():
    with pytest.raises(ConfigurationError, match="one digit"):
        DigitFormat.of(40, 10, (1, 1))
    with pytest.raises(ValueError, match="tails"):
        PairFormat(20, 10, 1.0, 0.0, 1.0, (-1, 0))
