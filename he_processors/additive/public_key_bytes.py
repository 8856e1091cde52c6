"""Public keys as bytes: what a key owner announces, and what a receiver checks of it.

Layout (little-endian): magic 4s, version u8, scheme u8, then n as its length u16 and its bytes.
"""

from __future__ import annotations

import math
import struct

import gmpy2

from he_processors.additive.scheme import Scheme, check_key_bits
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.paillier.keys import PaillierPublicKey

_MAGIC = b"VBPK"
_VERSION = 1
_PREFIX = struct.Struct("<4sBB")
_LENGTH = struct.Struct("<H")
_MAX_KEY_BITS = 1 << 14  # a longer one would only cost time
# No factor of an honest n is this small. One that is would spoil nearly every batch of random units.
_SMALL_PRIMES = math.prod(p for p in range(2, 1 << 12) if gmpy2.is_prime(p))


def public_key_to_bytes(public_key: PaillierPublicKey) -> bytes:
    """Return the one encoding of a public key."""
    number = public_key.n.to_bytes((public_key.n.bit_length() + 7) // 8, "little")
    return _PREFIX.pack(_MAGIC, _VERSION, public_key.scheme.value) + _LENGTH.pack(len(number)) + number


def public_key_from_bytes(data: bytes, *, allow_toy_keys: bool = False) -> PaillierPublicKey:
    """Read a public key that a peer announced.

    Security: lengths, and that n is odd, no prime, no perfect power and without small factors. Whether n has the
        structure that hides plaintexts and re-randomised sums cannot be seen: the key owner is taken to be honest but
        curious.

    Args:
        data: the bytes as received.
        allow_toy_keys: accept short keys; True in tests only.

    Raises:
        ProtocolError: these bytes are not the one encoding of a key of a permitted length.
    """
    if len(data) < _PREFIX.size or data[:5] != _MAGIC + bytes([_VERSION]):
        raise ProtocolError("these bytes are no public key of this version")
    if data[5] != Scheme.PAILLIER.value:
        raise ProtocolError("a public key is of a scheme that has none in this form")
    n = _number(data[_PREFIX.size :])
    if n.bit_length() > _MAX_KEY_BITS:
        raise ProtocolError(f"a peer's public key has more than {_MAX_KEY_BITS} bits")
    try:
        check_key_bits(n.bit_length(), allow_toy_keys)
    except ConfigurationError as error:
        raise ProtocolError(f"a peer's public key: {error}") from error
    if math.gcd(n, _SMALL_PRIMES) != 1 or gmpy2.is_prime(n):
        raise ProtocolError("the modulus of a public key is prime or has a small factor")
    if gmpy2.is_power(n):
        raise ProtocolError("the modulus of a public key is a power of a smaller number")
    return PaillierPublicKey(n)


def _number(data: bytes) -> int:
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    number = data[_LENGTH.size :]
    if not number or len(number) != length or number[-1] == 0:
        raise ProtocolError("the number of a public key is cut short, too long or has leading zeros")
    return int.from_bytes(number, "little")
