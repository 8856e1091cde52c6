"""Oblivious transfer: labels that are a bit's multiple of the offset apart, shared products, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.curve.registry import available_backends, load_backend
from he_processors.errors import ProtocolError
from he_processors.two_party.oblivious_transfer import (
    CHOICE_BYTES,
    OffsetOwner,
    TransferChooser,
    TransferSender,
    product_corrections,
    product_shares,
)
from tests.support.two_party import transfers

OFFSET = 0x0123456789ABCDEF0011223344556677


@pytest.mark.parametrize("backend", available_backends())
def test_the_chooser_gets_the_key_of_its_bit_and_no_other(backend):
    sender = TransferSender(load_backend(backend))
    chooser = TransferChooser(load_backend(backend), sender.offer, OFFSET)
    pairs = sender.key_pairs(chooser.choices)
    assert all(own == pair[OFFSET >> i & 1] for i, (own, pair) in enumerate(zip(chooser.keys, pairs, strict=True)))
    assert len({key for pair in pairs for key in pair}) == 256  # all differ, those of one pair too


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_labels_differ_by_the_offset_where_the_bit_is_one(n):
    owner, chooser = transfers()
    earlier = set()
    for seed in range(3):  # one stream after the other: nothing repeats
        bits = np.random.default_rng(seed).random(n) < 0.5
        labels, choices = chooser.choose(bits)
        zero = owner.labels(choices, n)
        assert np.array_equal(labels, zero ^ owner.offset * bits)
        assert choices not in earlier
        earlier.add(choices)


def test_choices_show_no_bit():
    """Choices of zeros and of ones are alike: each byte is uniform. 16,384 bytes: five standard errors."""
    for bit in (False, True):
        choices = transfers()[1].choose(np.full(1024, bit))[1]
        ones = np.unpackbits(np.frombuffer(choices, np.uint8)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(8 * len(choices))


@pytest.mark.parametrize("width", [9, 38, 64])
def test_shares_of_products_add_up(width):
    owner, chooser = transfers()
    rng, n, m = np.random.default_rng(1), 3, 5
    values = rng.integers(0, 1 << 63, (n, m)).astype(np.uint64) * np.uint64(2) + np.uint64(1)
    numbers = [0, -5, int(rng.integers(0, 1 << 62))]
    bits = np.array([number >> place & 1 for number in numbers for place in range(width)], dtype=bool)
    labels, choices = chooser.choose(bits)
    own, corrections = product_corrections(owner, owner.labels(choices, bits.size), values, width)
    others = product_shares(labels, numbers, m, width, corrections)
    for row, number in enumerate(numbers):
        found = [(int(a) + int(b)) % (1 << width) for a, b in zip(own[row], others[row], strict=True)]
        assert found == [int(value) * number % (1 << width) for value in values[row]]
    with pytest.raises(ProtocolError, match="wrong length"):
        product_shares(labels, numbers, m, width, corrections[:-1])


@pytest.mark.parametrize("offer", [bytes(32), b"\x01" + bytes(31), bytes(31), b"\xff" * 32])
def test_an_offer_that_is_none_is_refused(offer):
    with pytest.raises(ProtocolError):
        TransferChooser(load_backend("reference"), offer, 1)


@pytest.mark.parametrize("choices", [b"", bytes(CHOICE_BYTES - 1), b"\xff" * CHOICE_BYTES])
def test_choices_that_are_none_are_refused(choices):
    with pytest.raises(ProtocolError):
        TransferSender(load_backend("reference")).key_pairs(choices)
    with pytest.raises(ProtocolError, match="wrong length"):
        transfers()[0].labels(choices[:16], 9)


@pytest.mark.parametrize("offset", [2, 1 << 128 | 1])
def test_an_offset_is_odd_and_has_128_bits(offset):
    with pytest.raises(ValueError, match="odd"):
        OffsetOwner(offset, [bytes(16)] * 128)
