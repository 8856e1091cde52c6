"""Secret keys as bytes, for one use: a key owner hands its key to its own workers, over a link that nobody else reads.

Objects that hold secrets refuse to be pickled (``StaysInProcess``), so that none travels by mistake. These functions
are the one deliberate way. Nothing here is written to a disk or sent to another party.

Layout (little-endian): magic 4s, version u8, scheme u8, count u8; then each number, a u32 length before it.
"""

from __future__ import annotations

import struct

from he_processors.additive.scheme import Scheme
from he_processors.elgamal.keys import MESSAGES, ElGamalPrivateKey, ElGamalPublicKey
from he_processors.errors import ProtocolError
from he_processors.paillier.keys import PaillierPrivateKey

_MAGIC = b"VBSK"
_VERSION = 1
_PREFIX = struct.Struct("<4sBBB")
_LENGTH = struct.Struct("<I")
_REFUSED = "these bytes are no secret key of this version"

SecretKey = PaillierPrivateKey | ElGamalPrivateKey


def secret_key_to_bytes(key: SecretKey) -> bytes:
    """Write a key with what its owner encrypts fast with. Secret."""
    if isinstance(key, PaillierPrivateKey):
        numbers = [key.p, key.q, key.p_generator or 0, key.q_generator or 0]
    else:
        numbers = list(key.scalars)
    prefix = _PREFIX.pack(_MAGIC, _VERSION, key.public_key.scheme.value, len(numbers))
    written = [number.to_bytes((number.bit_length() + 7) // 8, "little") for number in numbers]
    return prefix + b"".join(_LENGTH.pack(len(one)) + one for one in written)


def secret_key_from_bytes(data: bytes, points: ElGamalPublicKey | None = None) -> SecretKey:
    """Read a key that its owner wrote.

    Args:
        points: the public half of a key of elgamal.

    Raises:
        ProtocolError: without any part of it.
    """
    if len(data) < _PREFIX.size:
        raise ProtocolError(_REFUSED)
    magic, version, scheme, count = _PREFIX.unpack_from(data)
    numbers, at = [], _PREFIX.size
    for _ in range(count):
        if len(data) < at + _LENGTH.size:
            raise ProtocolError(_REFUSED)
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        numbers.append(int.from_bytes(data[at : at + length], "little"))
        at += length
    if (magic, version) != (_MAGIC, _VERSION) or at != len(data):
        raise ProtocolError(_REFUSED)
    if scheme == Scheme.PAILLIER.value and count == 4 and numbers[0] > numbers[1] > 1:
        return PaillierPrivateKey(numbers[0], numbers[1], numbers[2] or None, numbers[3] or None)
    if scheme == Scheme.ELGAMAL.value and count in MESSAGES and points is not None and points.n_messages == count:
        return ElGamalPrivateKey(tuple(numbers), points)
    raise ProtocolError(_REFUSED)
