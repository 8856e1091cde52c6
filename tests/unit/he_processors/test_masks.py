"""Pairwise masks: they cancel, they hide, and no keystream serves twice."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from he_processors.errors import ProtocolError
from he_processors.key_agreement import derive_key
from he_processors.masks import MessageLabel, PairwiseMasks, uniform_residues

SESSION = b"s" * 32
GROUP = b"g" * 32
BFV_MODULUS = 1152921504606830593
MODULI = [None, 2, 3, (1 << 32) + 1, BFV_MODULUS, 1 << 63]


def pair_secret(a: int, b: int) -> bytes:
    return bytes([16 * min(a, b) + max(a, b)]) * 32


def make_sites(world: int, blinder: int | None = 0, session: bytes = SESSION) -> list[PairwiseMasks]:
    return [
        PairwiseMasks(session, rank, {p: pair_secret(rank, p) for p in range(world) if p != rank}, GROUP, blinder)
        for rank in range(world)
    ]


def label(n_values: int, counter: int = 7) -> MessageLabel:
    return MessageLabel(counter, "HISTOGRAM", "update:3", n_values)


def draw(rng: np.random.Generator, n: int, modulus: int | None) -> np.ndarray:
    return rng.integers(0, (modulus or 1 << 64) - 1, n, dtype=np.uint64, endpoint=True)


def add(vectors: list[np.ndarray], modulus: int | None) -> np.ndarray:
    total = [sum(int(v) for v in column) % (modulus or 1 << 64) for column in zip(*vectors, strict=True)]
    return np.array(total, dtype=np.uint64)


@pytest.mark.parametrize("modulus", MODULI)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_masks_cancel_in_the_sum(world, modulus):
    rng = np.random.default_rng(world)
    values = [draw(rng, 257, modulus) for _ in range(world)]
    sites = make_sites(world)
    masked = [site.mask(v, label(257), modulus) for site, v in zip(sites, values, strict=True)]
    total = add(masked, modulus)
    for site in sites:
        np.testing.assert_array_equal(site.unblind(total, label(257), modulus), add(values, modulus))
    if modulus is None or modulus > 3:
        assert not np.array_equal(total, add(values, modulus)), "the server must not see the sum"


@pytest.mark.parametrize("modulus", [None, BFV_MODULUS, (1 << 62) + 1])
def test_long_messages_cross_chunks(modulus):
    n = (1 << 15) + 3
    zeros = np.zeros(n, dtype=np.uint64)
    a, b = (site.mask(zeros, label(n), modulus) for site in make_sites(2, blinder=None))
    np.testing.assert_array_equal((a.astype(object) + b) % (modulus or 1 << 64), np.zeros(n, dtype=object))
    assert len(np.unique(a)) > n - 10, "chunks must not repeat the keystream"


def naive_keystream(key: bytes, message: MessageLabel, modulus: int | None) -> list[int]:
    """One number at a time, as a reader of the docstrings would write it."""
    fields = (message.counter, message.kind, message.phase, message.n_values, modulus or 0)
    aes = Cipher(algorithms.AES(derive_key(key, b"", "masks/message", *fields)), modes.CTR(bytes(16))).encryptor()
    stream = aes.update(bytes(64 * (message.n_values + 100)))
    words = (int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8))
    if modulus is None:
        return [next(words) for _ in range(message.n_values)]
    shift, numbers = 64 - (modulus - 1).bit_length(), []
    while len(numbers) < message.n_values:
        # One request reads whole blocks of two words; a spare word at its end is skipped.
        n_missing = message.n_values - len(numbers)
        request = [next(words) >> shift for _ in range(n_missing + n_missing % 2)][:n_missing]
        numbers += [word for word in request if word < modulus]
    return numbers


@pytest.mark.parametrize("modulus", [None, BFV_MODULUS, (1 << 62) + 1, 3])
def test_agrees_with_the_naive_twin(modulus):
    message = label(101)
    zeros = np.zeros(101, dtype=np.uint64)
    for (low, high), blinder, purpose in (
        (make_sites(2, blinder=None), None, "masks/readable/pair"),
        (make_sites(2, blinder=0), 0, "masks/pair"),
        (make_sites(2, blinder=1), 1, "masks/pair"),
    ):
        key = derive_key(pair_secret(0, 1), SESSION, purpose, 0, 1)
        expected = naive_keystream(key, message, modulus)
        if blinder != 0:
            assert low.mask(zeros, message, modulus).tolist() == expected
        if blinder != 1:
            negated = [-word % (modulus or 1 << 64) for word in expected]
            assert high.mask(zeros, message, modulus).tolist() == negated


def test_known_answer():
    """Sites of different releases must derive the same masks; a change here breaks that and needs a new version."""
    masked = make_sites(3)[1].mask(np.array([1, 2, 3], dtype=np.uint64), label(3))
    assert masked.tobytes().hex() == KNOWN_ANSWER


KNOWN_ANSWER = "223ca1c6dbbb20de4214c426010f66639ac693cb5d0b6194"


def test_a_counter_encodes_once():
    site = make_sites(3)[0]
    values = np.arange(4, dtype=np.uint64)
    site.mask(values, label(4, counter=5))
    for counter in (5, 4, 0):
        with pytest.raises(ProtocolError, match="once"):
            site.mask(values, label(4, counter))
    # Nor under another name: the counter alone decides.
    with pytest.raises(ProtocolError):
        site.mask(values, MessageLabel(5, "ROOT_SUM", "update:4", 4))
    site.mask(values, label(4, counter=6))


def test_unblind_only_what_was_masked():
    site = make_sites(2)[0]
    with pytest.raises(ProtocolError, match="not been masked"):
        site.unblind(np.zeros(4, dtype=np.uint64), label(4))


def test_nothing_works_after_close():
    site = make_sites(2)[0]
    site.mask(np.zeros(4, dtype=np.uint64), label(4))
    site.close()
    with pytest.raises(ProtocolError):
        site.mask(np.zeros(4, dtype=np.uint64), label(4, counter=8))
    with pytest.raises(ProtocolError):
        site.unblind(np.zeros(4, dtype=np.uint64), label(4))


def test_wrong_arguments():
    site = make_sites(2)[0]
    words = np.zeros(4, dtype=np.uint64)
    with pytest.raises(TypeError):
        site.mask(words.astype(np.int64), label(4))
    with pytest.raises(ValueError, match="announces"):
        site.mask(words, label(5))
    with pytest.raises(ValueError, match="modulus"):
        site.mask(words, label(4), (1 << 63) + 1)
    with pytest.raises(ValueError, match="below"):
        site.mask(words + np.uint64(3), label(4), 3)
    with pytest.raises(ValueError, match="ranks"):
        PairwiseMasks(SESSION, 0, {2: bytes(32)}, GROUP)
    with pytest.raises(ValueError, match="32"):
        PairwiseMasks(SESSION, 0, {1: b"short"}, GROUP)
    with pytest.raises(ValueError, match="blinder"):
        PairwiseMasks(SESSION, 0, {1: bytes(32)}, GROUP, blinder=2)
    # A refused argument has not used up its counter.
    site.mask(words, label(4))


@pytest.mark.parametrize("n", [0, 1, 5, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 100_003])
def test_residues_are_the_keystream_however_many_are_asked_for(n):
    key, modulus = b"k" * 32, (1 << 61) - 1
    aes = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(aes.update(bytes(16 * (n + 1))), dtype="<u8") >> np.uint64(3)
    expected = words[words < modulus][:n]
    assert (uniform_residues(key, modulus, n) == expected).all()


# -- words of 32 bits -------------------------------------------------------------------------------------------------

SHORT_ANSWER = "215bd815df30d7bc5d422bcd"


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 257, (1 << 15) + 3])
def test_masks_of_short_words_cancel_modulo_2_32(world, n):
    rng = np.random.default_rng(world)
    values = [rng.integers(0, 1 << 32, n, dtype=np.uint32) for _ in range(world)]
    sites, message = make_sites(world), label(n)
    total = np.sum([site.mask(v, message) for site, v in zip(sites, values, strict=True)], axis=0, dtype=np.uint32)
    for site in sites:
        opened = site.unblind(total, message)
        assert opened.dtype == np.uint32 and np.array_equal(opened, np.sum(values, axis=0, dtype=np.uint32))
    assert n < 257 or np.mean(total == np.sum(values, axis=0, dtype=np.uint32)) < 0.01, "the server sees no sum"


def naive_short_keystream(key: bytes, message: MessageLabel) -> list[int]:
    """The words of four bytes of a key of their own, one behind the other, each once."""
    fields = (message.counter, message.kind, message.phase, message.n_values, 1 << 32)
    aes = Cipher(algorithms.AES(derive_key(key, b"", "masks/message", *fields)), modes.CTR(bytes(16))).encryptor()
    stream = aes.update(bytes(4 * message.n_values))
    return [int.from_bytes(stream[i : i + 4], "little") for i in range(0, len(stream), 4)]


@pytest.mark.parametrize("n", [1, 3, 101, (1 << 15) + 3, 3 * (1 << 15)])
def test_short_words_take_each_word_of_their_keystream_once(n):
    message, zeros = label(n), np.zeros(n, dtype=np.uint32)
    low, high = make_sites(2, blinder=None)
    expected = naive_short_keystream(derive_key(pair_secret(0, 1), SESSION, "masks/readable/pair", 0, 1), message)
    assert low.mask(zeros, message).tolist() == expected
    assert high.mask(zeros, message).tolist() == [-word % (1 << 32) for word in expected]


def test_short_words_are_masked_once_and_take_no_modulus():
    site = make_sites(3)[1]
    values = np.array([1, 2, 3], dtype=np.uint32)
    with pytest.raises(TypeError, match="uint32 without a modulus"):
        site.mask(values, label(3), 1 << 32)
    assert site.mask(values, label(3)).tobytes().hex() == SHORT_ANSWER
    with pytest.raises(ProtocolError, match="once"):
        site.mask(values, label(3))
