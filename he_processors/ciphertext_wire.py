"""Ciphertexts as bytes: a fixed header, then fixed-width little-endian residues.

The receiver states what it expects, key and layout and count, and refuses anything else. Nothing in a message is
believed: not a length, not a residue. There are no optional fields, no pickles and no seeds.

Layout (little-endian): magic 4s, version u16, scheme u8, content u8, key bits u32, residue bytes u32, fraction bits
i32, pair bits u16, h bits u16, pairs per ciphertext u32, max additions u64, count u64, key fingerprint 32s.

Public keys as bytes that a receiver checks, and secret keys as bytes for workers of their owner.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import AdditiveScheme, PrivateKey, PublicKey, Scheme, check_key_bits
from he_processors.bignum.interface import ModBatch, Residues, byte_width, product
from he_processors.elgamal.encryption import MESSAGES, ElGamalPrivateKey, ElGamalPublicKey
from he_processors.errors import ConfigurationError, KeyMismatch, ProtocolError
from he_processors.fixed_point import PackingLayout
from he_processors.paillier import PAILLIER, PaillierPrivateKey

_CIPHERTEXT_MAGIC = b"VBHE"
_CIPHERTEXT_VERSION = 1
_HEADER = struct.Struct("<4sHBBIIiHHIQQ32s")


class Content(enum.Enum):
    """What the ciphertexts of a message hold; the value is the code on the wire."""

    PAIRS = 1
    PACKED_BINS = 2


@dataclass(frozen=True, slots=True)
class CiphertextHeader:
    """Everything that fixes the meaning and the length of a message."""

    public_key: PublicKey
    content: Content
    packing: PackingLayout
    count: int

    def to_bytes(self) -> bytes:
        """Return the header's one encoding."""
        pair_format = self.packing.pair_format
        return _HEADER.pack(
            _CIPHERTEXT_MAGIC,
            _CIPHERTEXT_VERSION,
            self.public_key.scheme.value,
            self.content.value,
            self.public_key.key_bits,
            byte_width(self.public_key.modulus),
            pair_format.fraction_bits,
            pair_format.pair_bits,
            pair_format.h_bits,
            1 if self.content is Content.PAIRS else self.packing.pairs_per_plaintext,
            pair_format.max_additions,
            self.count,
            bytes.fromhex(self.public_key.fingerprint),
        )

    @property
    def message_bytes(self) -> int:
        """Return the length of the whole message."""
        return _HEADER.size + self.count * byte_width(self.public_key.modulus)


def encode_ciphertexts(header: CiphertextHeader, arithmetic: ModBatch, ciphertexts: Residues) -> bytes:
    """Write ciphertexts.

    Shapes:   ciphertexts: Residues[header.count].
    Security: packed bins must have been re-randomised (``pack_and_hide``); single pairs are fresh encryptions.

    Raises:
        KeyMismatch: the arithmetic is not the key's.
        ValueError: the count is not the header's.
    """
    _check_arithmetic(header, arithmetic)
    if len(ciphertexts) != header.count:
        raise ValueError("the number of ciphertexts differs from the header")
    return header.to_bytes() + arithmetic.to_wire(ciphertexts).tobytes()


def decode_ciphertexts(message: bytes | memoryview, expected: CiphertextHeader, arithmetic: ModBatch) -> Residues:
    """Read ciphertexts that arithmetic goes on with.

    Shapes: result: Residues[expected.count].

    Raises:
        ProtocolError: the header differs from ``expected`` in any bit, the length is not exact, or a residue is zero,
            not below the modulus or not coprime to it.
        KeyMismatch: the arithmetic is not the key's.
    """
    return _checked(message, expected, arithmetic)[1]


def decode_for_decryption(
    message: bytes | memoryview, expected: CiphertextHeader, arithmetic: ModBatch
) -> NDArray[np.uint8]:
    """Read ciphertexts to decrypt, after the same checks.

    Shapes: result: uint8[expected.count, width].

    Raises:
        ProtocolError, KeyMismatch: as ``decode_ciphertexts``.
    """
    return _checked(message, expected, arithmetic)[0]


def _checked(
    message: bytes | memoryview, expected: CiphertextHeader, arithmetic: ModBatch
) -> tuple[NDArray[np.uint8], Residues]:
    _check_arithmetic(expected, arithmetic)
    if len(message) != expected.message_bytes:
        raise ProtocolError(f"a ciphertext message has {len(message)} bytes, expected {expected.message_bytes}")
    if bytes(message[: _HEADER.size]) != expected.to_bytes():
        raise ProtocolError("a ciphertext message is for another key, layout, content or count")
    rows = np.frombuffer(message, dtype=np.uint8, offset=_HEADER.size).reshape(expected.count, arithmetic.width)
    residues = arithmetic.from_wire(rows)
    # The product is coprime to n exactly if every residue is; a zero makes it zero.
    if math.gcd(product(arithmetic, residues), expected.public_key.n) != 1:
        raise ProtocolError("a ciphertext is not a unit of its modulus")
    return rows, residues


def _check_arithmetic(header: CiphertextHeader, arithmetic: ModBatch) -> None:
    if arithmetic.modulus != header.public_key.modulus:
        raise KeyMismatch("the arithmetic belongs to another key than the ciphertexts")


# Public keys as bytes: what a key owner announces, and what a receiver checks of it.
#
# Layout (little-endian): magic 4s, version u8, scheme u8, then n as its length u16 and its bytes.


_MAGIC = b"VBPK"
_VERSION = 1
_PREFIX = struct.Struct("<4sBB")
_LENGTH = struct.Struct("<H")
_MAX_KEY_BITS = 1 << 14  # a longer one would only cost time
# No factor of an honest n is this small. One that is would spoil nearly every batch of random units.
_SMALL_PRIMES = math.prod(p for p in range(2, 1 << 12) if gmpy2.is_prime(p))


def public_key_to_bytes(public_key: PublicKey) -> bytes:
    """Return the one encoding of a public key."""
    number = public_key.n.to_bytes((public_key.n.bit_length() + 7) // 8, "little")
    return _PREFIX.pack(_MAGIC, _VERSION, public_key.scheme.value) + _LENGTH.pack(len(number)) + number


def public_key_from_bytes(data: bytes, scheme: AdditiveScheme = PAILLIER, *, allow_toy_keys: bool = False) -> PublicKey:
    """Read a public key that a peer announced: one number n, of every scheme over big numbers.

    Security: lengths, and that n is odd, no prime, no perfect power and without small factors. Whether n has the
        structure that hides plaintexts and re-randomised sums cannot be seen: the key owner is taken to be honest but
        curious.

    Args:
        data: the bytes as received.
        scheme: of the job.
        allow_toy_keys: accept short keys; True in tests only.

    Raises:
        ProtocolError: these bytes are not the one encoding of a key of a permitted length.
    """
    if len(data) < _PREFIX.size or data[:5] != _MAGIC + bytes([_VERSION]):
        raise ProtocolError("these bytes are no public key of this version")
    n = _number(data[_PREFIX.size :])
    if n.bit_length() > _MAX_KEY_BITS:
        raise ProtocolError(f"a peer's public key has more than {_MAX_KEY_BITS} bits")
    try:
        check_key_bits(n.bit_length(), allow_toy_keys=allow_toy_keys)
    except ConfigurationError as error:
        raise ProtocolError(f"a peer's public key: {error}") from error
    if math.gcd(n, _SMALL_PRIMES) != 1 or gmpy2.is_prime(n):
        raise ProtocolError("the modulus of a public key is prime or has a small factor")
    if gmpy2.is_power(n):
        raise ProtocolError("the modulus of a public key is a power of a smaller number")
    public_key = scheme.public_key(n)
    if data[5] != public_key.scheme.value:
        raise ProtocolError("the public key is not one of the announced scheme")
    return public_key


def _number(data: bytes) -> int:
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    number = data[_LENGTH.size :]
    if not number or len(number) != length or number[-1] == 0:
        raise ProtocolError("the number of a public key is cut short, too long or has leading zeros")
    return int.from_bytes(number, "little")


# Secret keys as bytes, for one use: a key owner hands its key to its own workers, over a link that nobody else reads.
#
# Objects that hold secrets refuse to be pickled (``StaysInProcess``), so that none travels by mistake. These functions
# are the one deliberate way. Nothing here is written to a disk or sent to another party.
#
# Layout (little-endian): magic 4s, version u8, scheme u8, count u8; then each number, a u32 length before it.


_SECRET_MAGIC = b"VBSK"
_SECRET_PREFIX = struct.Struct("<4sBBB")
_SECRET_LENGTH = struct.Struct("<I")
_REFUSED = "these bytes are no secret key of this version"

SecretKey = PaillierPrivateKey | ElGamalPrivateKey


def secret_key_to_bytes(key: PrivateKey | ElGamalPrivateKey) -> bytes:
    """Write a key of ours with what its owner encrypts fast with. Secret."""
    if isinstance(key, PaillierPrivateKey):
        numbers = [key.p, key.q, key.p_generator or 0, key.q_generator or 0]
    elif isinstance(key, ElGamalPrivateKey):
        numbers = list(key.scalars)
    else:
        raise TypeError("the key of a plugin's scheme stays in the process that made it")
    prefix = _SECRET_PREFIX.pack(_SECRET_MAGIC, _VERSION, key.public_key.scheme.value, len(numbers))
    written = [number.to_bytes((number.bit_length() + 7) // 8, "little") for number in numbers]
    return prefix + b"".join(_SECRET_LENGTH.pack(len(one)) + one for one in written)


def secret_key_from_bytes(data: bytes, points: ElGamalPublicKey | None = None) -> SecretKey:
    """Read a key that its owner wrote.

    Args:
        points: the public half of a key of elgamal.

    Raises:
        ProtocolError: without any part of it.
    """
    if len(data) < _SECRET_PREFIX.size:
        raise ProtocolError(_REFUSED)
    magic, version, scheme, count = _SECRET_PREFIX.unpack_from(data)
    numbers, at = [], _SECRET_PREFIX.size
    for _ in range(count):
        if len(data) < at + _SECRET_LENGTH.size:
            raise ProtocolError(_REFUSED)
        (length,) = _SECRET_LENGTH.unpack_from(data, at)
        at += _SECRET_LENGTH.size
        numbers.append(int.from_bytes(data[at : at + length], "little"))
        at += length
    if (magic, version) != (_SECRET_MAGIC, _VERSION) or at != len(data):
        raise ProtocolError(_REFUSED)
    if scheme == Scheme.PAILLIER.value and count == 4 and numbers[0] > numbers[1] > 1:
        return PaillierPrivateKey(numbers[0], numbers[1], numbers[2] or None, numbers[3] or None)
    if scheme == Scheme.ELGAMAL.value and count in MESSAGES and points is not None and points.n_messages == count:
        return ElGamalPrivateKey(tuple(numbers), points)
    raise ProtocolError(_REFUSED)
