"""Sums that are opened with a mask on each: shares that add up, and what is no masked sum."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.bignum.registry import AUTO, open_backend
from he_processors.errors import ProtocolError
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.histogram.planner import BinLayout, plan_level
from he_processors.histogram.sums import BinMasks, MaskedFormat, add_unhidden, open_shares, pack_and_hide, sum_bins
from he_processors.paillier import PaillierDecryptor, Rerandomiser, owner_encryptor
from tests.support.he_toys import toy_paillier

FORMAT = MaskedFormat(14, 1000, g_bound=1.0, h_low=0.0, h_high=1.0)


def test_shares_of_encrypted_sums_add_up_and_look_uniform():
    key, rng = toy_paillier(), np.random.default_rng(1)
    arithmetic = open_backend(AUTO, key.public_key.modulus)
    g, h = FORMAT.encode_pairs(rng.uniform(-1, 1, 1000), rng.uniform(0, 1, 1000))
    pairs = owner_encryptor(key).encrypt(FORMAT.plaintext_rows(g, h))
    codes, layout = rng.integers(0, 9, (3, 1000)).astype(np.uint8), BinLayout((8, 8, 8))
    bins = sum_bins(arithmetic, pairs, plan_level(codes, layout, [np.arange(1000, dtype=np.int32)]))
    masks, packing = BinMasks.draw(len(bins)), PackingLayout.fit(FORMAT, key.public_key.plaintext_bits)
    masked = add_unhidden(key.public_key, arithmetic, bins, masks, FORMAT)
    hidden = arithmetic.to_wire(pack_and_hide(masked, packing, Rerandomiser(key.public_key, arithmetic)))
    opened = open_shares(PaillierDecryptor(key).decrypt(hidden), len(bins), packing)
    for values, own, others in zip((g, h), opened, masks.shares(), strict=True):
        expected = [values[codes[feature] == code].sum() for feature in range(3) for code in range(9)]
        assert (own + others).view(np.int64).tolist() == expected
        assert np.unique(own).size == len(bins)  # also of bins that are alike
        assert abs((own >> np.uint64(63)).mean() - 0.5) < 0.5  # not all of one sign, as sums of h are


def test_masks_are_drawn_anew():
    drawn = np.concatenate([BinMasks.draw(500).rows for _ in range(4)])
    assert np.unique(drawn, axis=0).shape == drawn.shape
    assert not drawn[:, [12, 25, 26, 27, 31]].any()


def test_masks_for_other_sums_are_refused():
    with pytest.raises(ValueError, match="other sums"):
        BinMasks.draw(3).plaintext_rows(FORMAT, 4)
    with pytest.raises(ValueError, match="other sums"):
        BinMasks.draw(3).plaintext_rows(PairFormat.logistic(14, 10), 3)


@pytest.mark.parametrize("plaintexts", [[], [0, 0], [-(1 << 400)], [1 << 600], [1 << 97], [1 << 201], [1 << 208]])
def test_plaintexts_of_no_masked_sums_are_refused(plaintexts):
    packing = PackingLayout(FORMAT, 2)
    open_shares([1 << 95], 1, packing)
    with pytest.raises(ProtocolError, match="not what the protocol allows"):
        open_shares(plaintexts, 1, packing)
