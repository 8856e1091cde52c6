"""ElGamal keys: one secret scalar for each message of a row, all under the same randomiser."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import Scheme, StaysInProcess
from he_processors.bignum.rows import random_rows_below
from he_processors.curve.interface import AFFINE_BYTES, BASE_POINT, GROUP_ORDER, SCALAR_BYTES, Curve, Points
from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Integers as scalars of the group.


def rows_of(scalars: list[int]) -> NDArray[np.uint8]:
    """Write integers as scalars. Shapes: result: uint8[n, 32], below the order."""
    joined = b"".join((scalar % GROUP_ORDER).to_bytes(SCALAR_BYTES, "little") for scalar in scalars)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, SCALAR_BYTES)


# ElGamal keys: one secret scalar for each message of a row, all under the same randomiser.
#
# Layout of a public key (little-endian): magic 4s, version u8, scheme u8, number of points u8, then the points in
# affine form, 64 bytes each.
#
# Security: decisional Diffie-Hellman in the group of prime order of edwards25519, that of ristretto255: 128-bit
# strength. One randomiser serves several keys because all of them are one owner's and independent
# (he_processors/README.md).


MESSAGES = (2, 4)
"""Messages that a key may have: one or two digits of a gradient and of a hessian."""
_MAGIC = b"VBPK"
_VERSION = 1
_PREFIX = struct.Struct("<4sBBB")
_REFUSED = "these bytes are no elgamal key of this version"


@dataclass(frozen=True)
class ElGamalPublicKey:
    """The public key: P_k = x_k B for each message k, in affine form, 64 bytes each."""

    points: tuple[bytes, ...]

    @property
    def scheme(self) -> Scheme:
        """Return ElGamal."""
        return Scheme.ELGAMAL

    @property
    def n_messages(self) -> int:
        """Return the messages that one randomiser hides."""
        return len(self.points)

    @property
    def rows(self) -> NDArray[np.uint8]:
        """Return the points. Shapes: uint8[n_messages, 64]."""
        return np.frombuffer(b"".join(self.points), dtype=np.uint8).reshape(-1, AFFINE_BYTES)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 that names this key."""
        return hashlib.sha256(b"veilboost public key " + self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the one encoding of the key."""
        prefix = _PREFIX.pack(_MAGIC, _VERSION, self.scheme.value, self.n_messages)
        return prefix + b"".join(self.points)

    @classmethod
    def from_bytes(cls, data: bytes, curve: Curve) -> ElGamalPublicKey:
        """Read a key that a peer announced.

        Security: every point is on the curve, of prime order, and not the neutral one. Whether the key owner knows its
            logarithm cannot be seen, and need not be: re-randomised sums are hidden from it whatever it is.

        Raises:
            ProtocolError: these bytes are not the one encoding of such a key.
        """
        n = data[_PREFIX.size - 1] if len(data) >= _PREFIX.size else 0
        is_ours = n in MESSAGES and data[: _PREFIX.size] == _PREFIX.pack(_MAGIC, _VERSION, Scheme.ELGAMAL.value, n)
        if not is_ours or len(data) != _PREFIX.size + n * AFFINE_BYTES:
            raise ProtocolError(_REFUSED)
        body = data[_PREFIX.size :]
        key = cls(tuple(body[i : i + AFFINE_BYTES] for i in range(0, len(body), AFFINE_BYTES)))
        points = curve.from_affine(key.rows)
        neutral = curve.identity(n)
        almost = curve.mul(points, np.repeat(rows_of([-1]), n, axis=0))
        if curve.equal(points, neutral).any() or not curve.equal(curve.add(almost, points), neutral).all():
            raise ProtocolError("a point of a public key has a small factor in its order")
        return key

    def __repr__(self) -> str:
        return f"ElGamalPublicKey({self.n_messages} points, {self.fingerprint[:16]})"


@dataclass(frozen=True, repr=False)
class ElGamalPrivateKey(StaysInProcess):
    """The private key: a secret scalar for each message.

    Security: stays with its owner. It prints as a fingerprint and refuses to be pickled.
    """

    scalars: tuple[int, ...]
    public_key: ElGamalPublicKey

    def __repr__(self) -> str:
        return f"ElGamalPrivateKey({self.public_key.n_messages} scalars, {self.public_key.fingerprint[:16]})"


def generate_elgamal_key(n_messages: int, curve: Curve, source: RandomSource = OS_RANDOMNESS) -> ElGamalPrivateKey:
    """Generate a key with independent, uniform secret scalars from 1 to the order less 1.

    Raises:
        ValueError: the key has another number of messages than ``MESSAGES``.
    """
    if n_messages not in MESSAGES:
        raise ValueError(f"an elgamal key has {MESSAGES} messages")
    below = random_rows_below(n_messages, GROUP_ORDER - 1, source)
    scalars = tuple(int.from_bytes(row.tobytes(), "little") + 1 for row in below)
    table = curve.fixed_base(base_point(curve))
    points = curve.to_affine(table.mul(rows_of(list(scalars))))
    return ElGamalPrivateKey(scalars, ElGamalPublicKey(tuple(row.tobytes() for row in points)))


def base_point(curve: Curve) -> Points:
    """Return the base point. Shapes: result: Points[1]."""
    return curve.from_affine(np.frombuffer(BASE_POINT, dtype=np.uint8)[None])
