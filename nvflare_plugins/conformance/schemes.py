"""The contract of an additive scheme of vertical jobs: what is opened is the sum, and nobody sees whose it is.

The author of one subclasses it in a test file:

    from acme_numbers.damgard_jurik import SCHEME
    from nvflare_plugins.conformance.schemes import SchemeContract

    class TestDamgardJurik(SchemeContract):
        scheme = SCHEME

and runs pytest, some minutes with keys of real length. What the contract cannot tell is whether the scheme is secure,
and whether encryptions of 0 have the distribution and the order that they are said to have.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import MIN_KEY_BITS, AdditiveScheme, PrivateKey
from he_processors.bignum.interface import byte_width, ints_from_rows, rows_from_ints
from he_processors.bignum.registry import AUTO
from he_processors.ciphertext_wire import (
    CiphertextHeader,
    Content,
    decode_ciphertexts,
    encode_ciphertexts,
    public_key_from_bytes,
    public_key_to_bytes,
)
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import PackingLayout
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import NodeTotal
from he_processors.paillier import Encryptor, Rerandomiser, owner_encryptor, public_encryptor
from nvflare_plugins.conformance.sums import require
from nvflare_plugins.kinds.vertical.histogram_maker import histogram_maker
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, gradient_owner, pair_format, problem_of

_N_ROWS = 40
_N_BINS = 7
_N_COPIES = 12


@cache
def _key_of(scheme: AdditiveScheme, key_bits: int) -> PrivateKey:
    return scheme.generate(key_bits, allow_toy_keys=key_bits < MIN_KEY_BITS)


def _rows(values: Iterable[int], width: int) -> NDArray[np.uint8]:
    joined = b"".join(value.to_bytes(width, "little", signed=True) for value in values)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, width)


class SchemeContract:
    """What every additive scheme over big numbers must satisfy.

    Attributes:
        scheme: what is tested.
        key_bits: of the key that is made once for all tests. Shorter ones than jobs may have are quick, and show less.
    """

    scheme: ClassVar[AdditiveScheme]
    key_bits: ClassVar[int] = MIN_KEY_BITS

    @property
    def _key(self) -> PrivateKey:
        return _key_of(self.scheme, self.key_bits)

    def _encryptors(self) -> tuple[Encryptor, Encryptor]:
        return owner_encryptor(self._key), public_encryptor(self._key.public_key)

    def _read(self, data: bytes) -> object:
        return public_key_from_bytes(data, self.scheme, allow_toy_keys=self.key_bits < MIN_KEY_BITS)

    def _numbers(self) -> list[int]:
        most = (1 << self._key.public_key.plaintext_bits) - 1
        return [0, 1, -1, most, -most, most // 3, -(most // 7), 1 << 64, -(1 << 127)]

    def test_it_says_what_it_is(self) -> None:
        """Name, assumption and kinds of keys are as a site wants them."""
        require(problem_of(self.scheme, self.scheme.name) == "", problem_of(self.scheme, self.scheme.name))

    def test_keys_have_the_length_that_was_asked_for_and_no_short_one_is_made(self) -> None:
        """``check_key_bits`` decides, before anything is generated."""
        found = self._key.public_key.key_bits
        require(found == self.key_bits, f"a key of {found} bits where {self.key_bits} were asked for")
        try:
            self.scheme.generate(MIN_KEY_BITS - 64)
        except ConfigurationError:
            return
        raise AssertionError(f"a key of {MIN_KEY_BITS - 64} bits was made")

    def test_the_public_key_is_one_number_and_decides_all(self) -> None:
        """It travels as n, is checked as a peer's is, and holds nothing else."""
        public = self._key.public_key
        require(self._read(public_key_to_bytes(public)) == public, "a public key is not the same after its way")
        require([one.name for one in fields(public)] == ["n"], "a public key has further fields than n")
        require(set(vars(public)) <= {"n", "modulus", "fingerprint"}, "a public key that was used keeps something else")
        again = self.scheme.public_key(public.n)
        same = again == public and (again.modulus, again.fingerprint) == (public.modulus, public.fingerprint)
        require(same, "two public keys of one n are not alike")
        require(public.modulus % 2 == 1 and public.modulus % public.n == 0, "the modulus is no odd multiple of n")
        largest = self.scheme.public_key((1 << self.key_bits) - 1)
        require(largest.plaintext_bits == public.plaintext_bits, "the capacity depends on more than the key's length")
        require(byte_width(largest.modulus) >= byte_width(public.modulus), "the modulus of a larger n is smaller")

    def test_a_private_key_stays_where_it_is(self) -> None:
        """It is not pickled, and shows nothing of itself."""
        for secret in (self._key, self._key.decryptor(AUTO)):
            try:
                pickle.dumps(secret)
            except TypeError:
                continue
            raise AssertionError(f"a {type(secret).__name__} was pickled: derive it from StaysInProcess")
        name = f"{type(self._key).__name__}({self.key_bits} bits, {self._key.public_key.fingerprint[:16]})"
        require(repr(self._key) == name, "the repr of a private key is not its class, length and fingerprint")

    def test_what_is_encrypted_is_decrypted(self) -> None:
        """By the owner and by anybody, up to the capacity, of either sign, narrow and wide rows, none and many."""
        decryptor, numbers = self._key.decryptor(AUTO), self._numbers()
        require(decryptor.plaintext_bits == self._key.public_key.plaintext_bits, "two capacities")
        width = byte_width(self._key.public_key.modulus)
        for encryptor in self._encryptors():
            for values, n_bytes in ((numbers, width), ([5, -5], 1), ([1 << 62], 16), ([], 16)):
                wire = encryptor.arithmetic.to_wire(encryptor.encrypt(_rows(values, n_bytes)))
                require(
                    list(decryptor.decrypt(wire)) == values, f"{len(values)} numbers were not decrypted to themselves"
                )

    def test_products_of_ciphertexts_are_sums(self) -> None:
        """Of two, of many, of none, with E(m) that hides nothing, and shifted by powers of two."""
        encryptor, decryptor = owner_encryptor(self._key), self._key.decryptor(AUTO)
        arithmetic = encryptor.arithmetic
        most = (1 << self._key.public_key.plaintext_bits) - 1
        values = [most // 8, -(most // 5), 17, -(1 << 70), most // 3]
        rows = _rows(values, byte_width(arithmetic.modulus))
        batch, bare = encryptor.encrypt(rows), self._key.public_key.embed(arithmetic, rows)
        order = np.array([0, 1, 2, 3, 4, 1, 2], dtype=np.int32)
        sums = arithmetic.segprod(batch, order, np.array([0, 5, 5, 7], dtype=np.int64))
        found = list(decryptor.decrypt(arithmetic.to_wire(sums)))
        require(found == [sum(values), 0, values[1] + values[2]], "a product of ciphertexts is not their sum")
        found = list(decryptor.decrypt(arithmetic.to_wire(arithmetic.mul(batch, bare))))
        require(found == [2 * value for value in values], "E(m) times a ciphertext of m is not one of 2 m")
        small = encryptor.encrypt(_rows([3, -4, 5], 16))
        found = list(decryptor.decrypt(arithmetic.to_wire(arithmetic.horner(small, 3, 40))))
        require(found == [3 - (4 << 40) + (5 << 80)], "packed ciphertexts are not packed plaintexts")

    def test_larger_numbers_are_refused(self) -> None:
        """A plaintext that would come back as another one is not encrypted."""
        modulus = self._key.public_key.modulus
        for value in (modulus, -modulus, 1 << modulus.bit_length()):
            try:
                owner_encryptor(self._key).encrypt(_rows([1, value], byte_width(modulus) + 1))
            except CapacityExceeded:
                continue
            raise AssertionError("a plaintext as large as the modulus was encrypted: embed raises CapacityExceeded")

    def test_no_two_ciphertexts_are_alike(self) -> None:
        """Of one number, by the owner, by anybody, and re-randomised: all differ, and from E(m); all open to it."""
        public, seen = self._key.public_key, set()
        rows = _rows([7] * _N_COPIES, 16)
        batches = []
        for encryptor in self._encryptors():
            batches += [encryptor.encrypt(rows), encryptor.encrypt(rows)]
        arithmetic = encryptor.arithmetic
        rerandomiser = Rerandomiser(public, arithmetic)
        batches += [rerandomiser.rerandomise(batches[0]), rerandomiser.rerandomise(batches[0])]
        batches.append(arithmetic.take(public.embed(arithmetic, rows), np.zeros(1, dtype=np.int64)))
        decryptor = self._key.decryptor(AUTO)
        for batch in batches:
            wire = arithmetic.to_wire(batch)
            require(set(decryptor.decrypt(wire)) == {7}, "a re-randomised ciphertext opens to another number")
            seen |= set(ints_from_rows(wire))
        require(len(seen) == sum(map(len, batches)), "a ciphertext of one number came twice: it hides nothing")

    def test_what_is_no_ciphertext_is_refused(self) -> None:
        """Zero, multiples of n and what is not below the modulus: in a message, and by the decryptor."""
        encryptor, public = owner_encryptor(self._key), self._key.public_key
        packing = PackingLayout.fit(pair_format(1), public.plaintext_bits)
        header = CiphertextHeader(public, Content.PAIRS, packing, 1)
        message = encode_ciphertexts(header, encryptor.arithmetic, encryptor.encrypt(_rows([1], 16)))
        width = byte_width(public.modulus)
        numbers = [0, public.n, public.modulus - public.n, public.modulus]
        broken = [message[:-width] + number.to_bytes(width, "little") for number in numbers]
        readers: list[tuple[Callable[[Any], object], list[Any]]] = [
            (lambda data: decode_ciphertexts(data, header, encryptor.arithmetic), [*broken, message[:-1], b""]),
            (self._key.decryptor(AUTO).decrypt, [rows_from_ints([number], width) for number in numbers]),
        ]
        for read, values in readers:
            for value in values:
                try:
                    read(value)
                except ProtocolError:
                    continue
                raise AssertionError("what is no ciphertext was read: raise a ProtocolError")

    def test_a_tree_gets_the_sums_that_it_gets_in_the_clear(self) -> None:
        """Packed to the last bit of the capacity, added into bins and hidden: the model is then the same."""
        rng = np.random.default_rng(0)
        pairs = pair_format(_N_ROWS)
        g = rng.choice([-1.0, 1.0, 0.25, -(2.0**-20)], _N_ROWS)
        encoded = pairs.encode_pairs(g, rng.choice([0.0, 1.0, 2.0**-30], _N_ROWS))
        codes = rng.integers(0, _N_BINS, (3, _N_ROWS)).astype(np.uint8)
        layout, nodes = BinLayout((_N_BINS,) * 3), [np.arange(_N_ROWS, dtype=np.int32), np.arange(5, dtype=np.int32)]
        totals = [NodeTotal.of_rows(*(values[rows] for values in encoded)) for rows in nodes]
        owners = gradient_owner(self._key, pairs), ClearGradientOwner(pairs)
        is_toy, opened = self.key_bits < MIN_KEY_BITS, []
        for owner in owners:
            maker = histogram_maker(owner.setup, _N_ROWS, allow_clear=True, allow_toy_keys=is_toy, numbers=self.scheme)
            maker.begin_tree(_N_ROWS)
            maker.add_gradients(owner.encrypt(*encoded))
            opened.append(owner.open_sums(maker.sum_bins(codes, layout, nodes), layout, totals))
        for mine, clear in zip(*opened, strict=True):
            same = np.array_equal(mine.g, clear.g.ravel()) and np.array_equal(mine.h, clear.h.ravel())
            require(same, "the sums of a tree are not those of its rows")
