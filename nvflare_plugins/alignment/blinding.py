"""Blinding of ids with a secret key, by elliptic-curve Diffie-Hellman: k H(id), and the same with several keys.

Blinding commutes: whoever blinds first, the result is k1 k2 ... km H(id). The group is ristretto255, whose order is a
prime and whose elements have one encoding each: what is no such encoding is refused, and so is the neutral element, so
that no list holds anything whose logarithm tells of a key. Arithmetic and hashing are those of ``he_processors.curve``.
Sets of elements are compared exactly, so that the rate of false positives is that of a collision of hashes.

NVFlare's own DH-PSI (openmined-psi, on P-256) is not used: it is for two parties at a time, so that one party of three
learns every pairwise intersection; it loads the full set again when an intersection was empty; and it puts ids into the
text of exceptions, which FLARE sends to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import StaysInProcess
from he_processors.bignum.rows import rows_from_ints
from he_processors.curve import equal_logarithms
from he_processors.curve.hashing import hash_to_ristretto
from he_processors.curve.interface import GROUP_ORDER, RISTRETTO_BYTES, SCALAR_BYTES, Points
from he_processors.curve.registry import open_curve
from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

POINT_BYTES = RISTRETTO_BYTES
_NEUTRAL = bytes(POINT_BYTES)
_SUITE = b"VeilBoost alignment, ristretto255_XMD:SHA-512_R255MAP_RO_, "


class Decoded(list[bytes]):
    """Points as bytes, and decoded: what is done to them next need not decode them again."""

    __slots__ = ("points",)
    points: Points


class BlindingKey(StaysInProcess):
    """A fresh secret key of one party for one intersection.

    Args:
        domain: names the intersection, equal at all its parties: ids hash to other elements under another.

    Security: under the decisional Diffie-Hellman assumption in ristretto255, with the hash as a random oracle, blinded
        ids of others look like random elements. The key never leaves the party, which is its process and, where it has
        workers, these (``blind_shard.py``), and is used for one intersection only.
    """

    def __init__(self, domain: bytes, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._hold(domain, 1 + random_below(GROUP_ORDER - 1, randomness))

    @classmethod
    def given(cls, domain: bytes, secret: bytes) -> BlindingKey:
        """Return the key that a party gave its worker, see ``for_workers``. Raises: ProtocolError, if it is none."""
        number = int.from_bytes(secret, "little")
        if len(secret) != SCALAR_BYTES or not 0 < number < GROUP_ORDER:
            raise ProtocolError("these bytes are no blinding key")
        key = cls.__new__(cls)
        key._hold(domain, number)
        return key

    def for_workers(self) -> tuple[bytes, bytes]:
        """Return domain and secret, for the party's own workers and nobody else."""
        return self._domain, self._secret.tobytes()

    def commitment(self) -> bytes:
        """Return secret G, which fixes the key and tells nothing that would help to find it."""
        return equal_logarithms.commitment(self._curve, self._number)

    def _hold(self, domain: bytes, secret: int) -> None:
        self._domain, self._tag = domain, _SUITE + domain
        self._curve = open_curve()
        self._number = secret
        self._secret = rows_from_ints([secret], SCALAR_BYTES)
        self._inverse = rows_from_ints([pow(secret, -1, GROUP_ORDER)], SCALAR_BYTES)

    def blind_items(self, items: Sequence[bytes]) -> list[bytes]:
        """Hash items to the group and blind them, in order."""
        return self._times(hash_to_ristretto(self._curve, items, self._tag), self._secret)

    def blind(self, points: Sequence[bytes]) -> list[bytes]:
        """Blind points further, in order. Raises: ProtocolError, if one is no element but the neutral one."""
        return self._times(self._read(points), self._secret)

    def unblind(self, points: Sequence[bytes]) -> list[bytes]:
        """Take this key's blinding off, in order. Raises: ProtocolError, as ``blind``."""
        return self._times(self._read(points), self._inverse)

    def decoded(self, points: Sequence[bytes]) -> list[bytes]:
        """Return the points, decoded. Raises: ProtocolError, as ``blind``."""
        if isinstance(points, Decoded):
            return points
        found = Decoded(points)
        found.points = self._read(points)
        return found

    def weigh(self, lists: Sequence[Sequence[bytes]], weights: NDArray[np.uint8]) -> list[bytes]:
        """Return for each list the sum of weight times point.

        Shapes: lists: n points each; weights: uint8[n, 16].

        Raises:
            ProtocolError: as ``blind``.
        """
        return equal_logarithms.weighted_sums(self._curve, [self._read(points) for points in lists], weights)

    def prove(self, transcript: bytes, blinded: bytes, randomness: RandomSource) -> bytes:
        """Prove that this key was taken off an element; see ``equal_logarithms.prove``."""
        return equal_logarithms.prove(self._curve, self._number, transcript, blinded, randomness)

    def _times(self, points: Points, scalar: NDArray[np.uint8]) -> list[bytes]:
        return points_of(self._curve.to_ristretto(self._curve.mul_by_each(points, scalar)[0]).tobytes())

    def _read(self, points: Sequence[bytes]) -> Points:
        if isinstance(points, Decoded):
            return points.points
        if all(len(point) == POINT_BYTES and point != _NEUTRAL for point in points):
            rows = np.frombuffer(b"".join(points), dtype=np.uint8).reshape(-1, POINT_BYTES)
            with suppress(ProtocolError):  # one message, whatever is wrong with it
                return self._curve.from_ristretto(rows)
        raise ProtocolError("a party sent something that is no element of the alignment's group")


def points_of(joined: bytes) -> list[bytes]:
    """Return the points of which bytes were joined."""
    return [joined[start : start + POINT_BYTES] for start in range(0, len(joined), POINT_BYTES)]
