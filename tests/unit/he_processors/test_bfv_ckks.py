"""BFV and CKKS: exact sums at the limits of capacity, and nothing but sums.

The toy sizes of other tests do not exist here: one ciphertext costs about a millisecond.
"""

from __future__ import annotations

import numpy as np
import pytest

from he_processors import bfv, ckks
from he_processors.bfv import BfvProcessor
from he_processors.ckks import CkksProcessor
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.masks import MessageLabel, PairwiseMasks
from tests.support.he_toys import pair_secrets

SCHEMES = [(bfv, BfvProcessor), (ckks, CkksProcessor)]
SLOTS = {BfvProcessor: 4096, CkksProcessor: 8192}
both = pytest.mark.parametrize(("module", "kind"), SCHEMES, ids=["bfv", "ckks"])


def make_sites(kind, world: int) -> list:
    secret = kind.generate(world)
    return [kind(secret) for _ in range(world)]


def federated_sum(module, sites, vectors) -> np.ndarray:
    payloads = [site.encrypt(vector) for site, vector in zip(sites, vectors, strict=True)]
    total = module.add_ciphertexts(sites[0].public_parameters(), payloads)
    results = [site.decrypt(total, vectors[0].size) for site in sites]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    assert results[0].dtype == np.int64
    return results[0]


@both
@pytest.mark.parametrize("world", [1, 3])
def test_sums_are_exact_for_any_length(module, kind, world):
    rng = np.random.default_rng(world)
    sites = make_sites(kind, world)
    bound = sites[0].capacity // world
    for n in (1, 2, 3, SLOTS[kind] - 1, SLOTS[kind], SLOTS[kind] + 1, 2 * SLOTS[kind] + 5):
        vectors = [rng.integers(-bound, bound, n, endpoint=True) for _ in range(world)]
        np.testing.assert_array_equal(federated_sum(module, sites, vectors), np.sum(vectors, axis=0))


def full_histograms(n: int, bound: int) -> dict[str, np.ndarray]:
    """Vectors that are hard for an FFT or a noise bound: large, one-signed, regular."""
    position = np.arange(n)
    half = np.where(position < n // 2, bound, 0)
    return {
        "constant": np.full(n, bound),
        "constant negative": np.full(n, -bound),
        "half": half,
        "gradient and hessian": np.where(position % 2, bound, -(bound // 3)),
        "alternating": np.where(position % 2, bound, -bound),
        "random signs": np.random.default_rng(1).choice([-bound, bound], n),
        "one value": np.where(position == 17, bound, 0),
        "oscillation": np.rint(bound * np.cos(position * 0.01)).astype(np.int64),
    }


@both
@pytest.mark.parametrize("name", list(full_histograms(8, 1)))
def test_full_capacity_on_histograms_of_one_sign(module, kind, name):
    """At the largest allowed sum, for vectors on which other parameters failed."""
    sites = make_sites(kind, 3)
    vector = full_histograms(3 * SLOTS[kind], sites[0].capacity // 3)[name]
    np.testing.assert_array_equal(federated_sum(module, sites, [vector] * 3), 3 * vector)


BFV_LIMITS = [5, 23, 93, 372, 1489]  # the last number of summands of each plain modulus
LIMITS = [*((bfv, BfvProcessor, world) for world in BFV_LIMITS), (ckks, CkksProcessor, 1 << 10)]


@pytest.mark.parametrize(("module", "kind", "world"), LIMITS)
def test_largest_number_of_summands_with_equal_noise(module, kind, world):
    """Adding one ciphertext to itself adds its noise without cancellation: worse than independent sites can do."""
    site = kind(kind.generate(world))
    rng = np.random.default_rng(2)
    bound = site.capacity // world
    vector = rng.choice([-bound, bound, bound - 1, 0], SLOTS[kind])
    total = module.add_ciphertexts(site.public_parameters(), [site.encrypt(vector)] * world)
    np.testing.assert_array_equal(site.decrypt(total, vector.size), world * vector)


@both
def test_values_beyond_capacity_are_refused_before_encoding(module, kind):
    site = make_sites(kind, 3)[0]
    bound = site.capacity // 3
    for value in (bound + 1, -bound - 1, np.iinfo(np.int64).min, np.iinfo(np.int64).max):
        with pytest.raises(CapacityExceeded) as caught:
            site.encrypt(np.array([0, value], dtype=np.int64))
        assert str(value) not in str(caught.value)


@both
def test_number_of_summands_is_limited(module, kind):
    limit = 1489 if kind is BfvProcessor else 1 << 10
    kind.generate(limit)
    for n_summands in (0, limit + 1):
        with pytest.raises(ValueError, match=r"adds (between|at most)"):
            kind.generate(n_summands)
    site = kind(kind.generate(2))
    payload = site.encrypt(np.array([1]))
    with pytest.raises(ProtocolError, match="3"):
        module.add_ciphertexts(site.public_parameters(), [payload] * 3)


@both
def test_equal_plaintexts_give_unrelated_ciphertexts(module, kind):
    site = make_sites(kind, 2)[0]
    vector = np.zeros(16, dtype=np.int64)
    n_words = 2 * SLOTS[kind]  # the low halves of all residues modulo the first prime
    first, second = (np.frombuffer(site.encrypt(vector), "<u4", n_words, 34) for _ in range(2))
    assert not (first == second).any()  # happens by chance with probability 16,384 / 2^32 = 4e-6


@both
def test_public_parameters_hold_no_secret(module, kind):
    secret = kind.generate(2)
    public = kind(secret).public_parameters()
    assert len(public) == 26
    assert public[10:] not in secret[26:], "the key id is drawn apart from the key"


@both
def test_other_keys_are_refused(module, kind):
    ours, theirs = make_sites(kind, 2)[0], make_sites(kind, 2)[0]
    payload = ours.encrypt(np.array([1]))
    with pytest.raises(ProtocolError, match="another key"):
        theirs.decrypt(payload, 1)
    with pytest.raises(ProtocolError, match="another key"):
        module.add_ciphertexts(theirs.public_parameters(), [payload])
    with pytest.raises(ProtocolError, match="another key"):
        module.add_ciphertexts(ours.public_parameters(), [payload, theirs.encrypt(np.array([1]))])


@both
def test_malformed_messages_are_refused(module, kind):
    sites = make_sites(kind, 2)
    public = sites[0].public_parameters()
    good, longer = sites[0].encrypt(np.array([1])), sites[1].encrypt(np.arange(2))
    total = module.add_ciphertexts(public, [good, good])
    saturated = good[:34] + b"\xff" * (len(good) - 34)
    bad_payloads = [b"", good[:33], good[:-1], good + b"\0", b"\0" + good[1:], saturated, total, longer]
    for bad in bad_payloads:
        with pytest.raises(ProtocolError):
            module.add_ciphertexts(public, [good, bad])
    with pytest.raises(ProtocolError):
        module.add_ciphertexts(public, [])
    for bad in (b"", public[:-1], public + b"\0", b"\xff" * 26):
        with pytest.raises(ProtocolError):
            module.add_ciphertexts(bad, [good])
    with pytest.raises(ProtocolError, match="2 are due"):
        sites[0].decrypt(good, 2)


@both
def test_malformed_secrets_are_refused(module, kind):
    secret = kind.generate(2)
    other = CkksProcessor if kind is BfvProcessor else BfvProcessor
    for bad in (b"", secret[:-1], secret + b"\0", b"\xff" * len(secret), other.generate(2)):
        with pytest.raises(ProtocolError):
            kind(bad)


@both
def test_wrong_arguments(module, kind):
    site = make_sites(kind, 1)[0]
    with pytest.raises((TypeError, ValueError)):
        site.encrypt(np.empty(0, dtype=np.int64))
    with pytest.raises(TypeError):
        site.encrypt(np.zeros((2, 2), dtype=np.int64))


def test_damaged_ckks_sums_abort_without_a_value():
    site = make_sites(CkksProcessor, 1)[0]
    payload = bytearray(site.encrypt(np.full(8192, 12345)))
    payload[40] ^= 1  # a small change of one residue is noise of the size of the modulus
    with pytest.raises(ProtocolError, match="not on the agreed grid") as caught:
        site.decrypt(bytes(payload), 8192)
    assert "12345" not in str(caught.value)


def test_plain_moduli_leave_room_for_the_worst_noise():
    q = 1152921504606830593
    assert all(q % 8192 == modulus % 8192 == 1 for modulus in map(bfv.choose_plain_modulus, BFV_LIMITS))
    for world in (1, 2, *BFV_LIMITS):
        assert 22 * world < q / (2 * bfv.choose_plain_modulus(world))
    assert bfv.choose_plain_modulus(3).bit_length() == 52


def masked_sites(world: int) -> list[PairwiseMasks]:
    return [PairwiseMasks(b"s" * 32, rank, pair_secrets(rank, world), b"g" * 32) for rank in range(world)]


def test_masks_inside_bfv_give_the_sum_and_hide_each_site_from_key_holders():
    sites, masks = make_sites(BfvProcessor, 3), masked_sites(3)
    modulus, n = sites[0].plain_modulus, 5000
    label = MessageLabel(1, "HISTOGRAM", "update:0", n)
    rng = np.random.default_rng(3)
    bound = sites[0].capacity // 3
    vectors = [rng.integers(-bound, bound, n) for _ in sites]
    masked = [m.mask(bfv.to_residues(v, modulus), label, modulus) for m, v in zip(masks, vectors, strict=True)]
    payloads = [site.encrypt_residues(residues) for site, residues in zip(sites, masked, strict=True)]
    total = bfv.add_ciphertexts(sites[0].public_parameters(), payloads)
    for site, site_masks in zip(sites, masks, strict=True):
        residues = site_masks.unblind(site.decrypt_residues(total, n), label, modulus)
        np.testing.assert_array_equal(bfv.from_residues(residues, modulus), np.sum(vectors, axis=0))
    # A server that hands site 1's own message to another site learns masked residues only.
    opened = sites[2].decrypt_residues(payloads[1], n)
    np.testing.assert_array_equal(opened, masked[1])
    assert not (opened == bfv.to_residues(vectors[1], modulus)).any()


def test_residues_round_trip_at_the_edges():
    site = make_sites(BfvProcessor, 1)[0]
    edge, modulus = site.capacity, site.plain_modulus
    values = np.array([0, 1, -1, edge, -edge])
    np.testing.assert_array_equal(bfv.from_residues(bfv.to_residues(values, modulus), modulus), values)
    residues = np.array([0, 1, modulus - 1], dtype=np.uint64)
    np.testing.assert_array_equal(site.decrypt_residues(site.encrypt_residues(residues), 3), residues)
    with pytest.raises(ValueError, match="below the plain modulus"):
        site.encrypt_residues(np.array([modulus], dtype=np.uint64))
    with pytest.raises(TypeError):
        site.encrypt_residues(np.array([1], dtype=np.int64))
