"""Public keys as bytes: what a key owner announces, and what a receiver checks of it.

Layout (little-endian): magic 4s, version u8, scheme u8, then each number as its length u16 and its bytes: n for
Paillier, n and g for Okamoto-Uchiyama.
"""

from __future__ import annotations

import math
import struct

import gmpy2

from he_processors.additive.scheme import PublicKey, Scheme, check_key_bits
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.okamoto_uchiyama.keys import OkamotoUchiyamaPublicKey
from he_processors.paillier.keys import PaillierPublicKey

_MAGIC = b"VBPK"
_VERSION = 1
_PREFIX = struct.Struct("<4sBB")
_LENGTH = struct.Struct("<H")
_MAX_KEY_BITS = 1 << 14  # a longer one would only cost time
# No factor of an honest n is this small. One that is would spoil nearly every batch of random units.
_SMALL_PRIMES = math.prod(p for p in range(2, 1 << 12) if gmpy2.is_prime(p))


def public_key_to_bytes(public_key: PublicKey) -> bytes:
    """Return the one encoding of a public key."""
    numbers = [public_key.n]
    if isinstance(public_key, OkamotoUchiyamaPublicKey):
        numbers.append(public_key.g)
    encoded = [number.to_bytes((number.bit_length() + 7) // 8, "little") for number in numbers]
    prefix = _PREFIX.pack(_MAGIC, _VERSION, public_key.scheme.value)
    return prefix + b"".join(_LENGTH.pack(len(number)) + number for number in encoded)


def public_key_from_bytes(data: bytes, *, allow_toy_keys: bool = False) -> PublicKey:
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
    scheme, numbers = data[5], _numbers(data[_PREFIX.size :])
    if (scheme, len(numbers)) not in ((Scheme.PAILLIER.value, 1), (Scheme.OKAMOTO_UCHIYAMA.value, 2)):
        raise ProtocolError("a public key has the wrong numbers for its scheme")
    n = numbers[0]
    if n.bit_length() > _MAX_KEY_BITS:
        raise ProtocolError(f"a peer's public key has more than {_MAX_KEY_BITS} bits")
    try:
        check_key_bits(n.bit_length(), allow_toy_keys)
    except ConfigurationError as error:
        raise ProtocolError(f"a peer's public key: {error}") from error
    if math.gcd(n, _SMALL_PRIMES) != 1 or gmpy2.is_prime(n):
        raise ProtocolError("the modulus of a public key is prime or has a small factor")
    if gmpy2.is_power(n):  # neither p q nor p^2 q is one
        raise ProtocolError("the modulus of a public key is a power of a smaller number")
    if scheme == Scheme.PAILLIER.value:
        return PaillierPublicKey(n)
    g = numbers[1]
    if not 1 < g < n or math.gcd(g, n) != 1:
        raise ProtocolError("the base of a public key is not a unit of its modulus")
    return OkamotoUchiyamaPublicKey(n, g)


def _numbers(data: bytes) -> list[int]:
    numbers = []
    while data:
        length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
        number, rest = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
        if not number or len(number) != length or number[-1] == 0:
            raise ProtocolError("a number of a public key is cut short or has leading zeros")
        numbers.append(int.from_bytes(number, "little"))
        data = rest
    return numbers
