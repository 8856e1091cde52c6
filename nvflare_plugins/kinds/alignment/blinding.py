"""Blinding of ids with secret keys, in this process or on a party's own workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from he_processors.additive_schemes import StaysInProcess
from he_processors.bignum.rows import rows_from_ints
from he_processors.curve import equal_logarithms
from he_processors.curve.equal_logarithms import WEIGHT_BYTES, hash_to_ristretto
from he_processors.curve.interface import GROUP_ORDER, RISTRETTO_BYTES, SCALAR_BYTES, Points
from he_processors.curve.registry import open_curve
from he_processors.errors import ProtocolError, VeilBoostError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below
from nvflare_plugins.workers.shards import runs_of
from nvflare_plugins.workers.worker_connection import WorkerPart
from nvflare_plugins.workers.workers import TRIAL, Workers, begin, collect

# Blinding of ids with a secret key, by elliptic-curve Diffie-Hellman: k H(id), and the same with several keys.
#
# Blinding commutes: whoever blinds first, the result is k1 k2 ... km H(id). The group is ristretto255, whose order is a
# prime and whose elements have one encoding each: what is no such encoding is refused, and so is the neutral element,
# so that no list holds anything whose logarithm tells of a key. Arithmetic and hashing are those of
# ``he_processors.curve``. Sets of elements are compared exactly, so that the rate of false positives is that of a
# collision of hashes.
#
# NVFlare's own DH-PSI (openmined-psi, on P-256) is not used: it is for two parties at a time, so that one party of
# three learns every pairwise intersection; it loads the full set again when an intersection was empty; and it puts ids
# into the text of exceptions, which FLARE sends to the server.


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


# Blinding on a party's own workers: each multiplies a run of a block's ids or points, and runs are joined in order.
#
# The result is that of ``BlindingKey`` in one process, byte for byte: each element is multiplied by itself, and has one
# encoding.


PART = f"{__name__}:BlindShard"
METHODS = ("blind_items", "blind", "unblind")
LEAST_IDS = 50_000
"""A party blinds a set of fewer ids in its own process: to reach its workers takes longer than they save."""
LEAST_POINTS = 1_024
"""So few at a time, such as the end of a list, are not sent to workers either."""


class BlindShard(WorkerPart):
    """Blinds what a party sends it.

    Security: holds the party's blinding key of one intersection; sees keyed hashes of the party's ids (no id) and
        points of other parties that these have blinded. A party's workers are that party.
    """

    def __init__(self, domain: bytes, secret: bytes) -> None:
        """Args: of ``BlindingKey.for_workers``."""
        self._key = BlindingKey.given(domain, secret)

    def multiply(self, method: str, ends: NDArray[np.int64], joined: bytes) -> bytes:
        """Do to a run what a method of ``BlindingKey`` does.

        Args:
            method: one of ``METHODS``.
            ends: int64[n], where each of its values ends among the joined ones: Dask takes long over lists.

        Returns:
            The points, joined.

        Raises:
            ProtocolError: as that method.
        """
        if method not in METHODS:
            raise ProtocolError("a blinding key has no such method")
        stops = ends.tolist()
        values = [joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        return b"".join(getattr(self._key, method)(values))

    def weigh(self, joined: list[bytes], weights: NDArray[np.uint8]) -> list[bytes]:
        """Return for a run of each list the sum of weight times point, as ``BlindingKey.weigh``."""
        return self._key.weigh([points_of(points) for points in joined], weights)


class SpreadKey:
    """A blinding key whose multiplications the party's workers do; results and errors are those of ``BlindingKey``."""

    def __init__(self, key: BlindingKey, workers: Workers) -> None:
        self._key, self._workers = key, workers

    def blind_items(self, items: Sequence[bytes]) -> list[bytes]:
        """See ``BlindingKey``. Raises: WorkerFailure."""
        return self._key.blind_items(items) if self._is_small(items) else self._spread("blind_items", items)

    def blind(self, points: Sequence[bytes]) -> list[bytes]:
        """See ``BlindingKey``. Raises: ProtocolError, WorkerFailure."""
        return self._key.blind(points) if self._is_small(points) else self._spread("blind", points)

    def unblind(self, points: Sequence[bytes]) -> list[bytes]:
        """See ``BlindingKey``. Raises: ProtocolError, WorkerFailure."""
        return self._key.unblind(points) if self._is_small(points) else self._spread("unblind", points)

    def decoded(self, points: Sequence[bytes]) -> list[bytes]:
        """Return the points as they are: workers decode them."""
        return list(points)

    def weigh(self, lists: Sequence[Sequence[bytes]], weights: NDArray[np.uint8]) -> list[bytes]:
        """See ``BlindingKey``. Raises: ProtocolError, WorkerFailure."""
        if self._is_small(weights):
            return self._key.weigh(lists, weights)
        asked = [
            self._workers.call(number, "weigh", [b"".join(points[run]) for points in lists], weights[run])
            for number, run in enumerate(runs_of(len(weights), len(self._workers)))
        ]
        return [self._sum(parts) for parts in zip(*collect(asked), strict=True)]

    def _sum(self, parts: Sequence[bytes]) -> bytes:
        found = [part for part in parts if any(part)]  # the neutral element counts for nothing, and is not read
        return self._key.weigh([found], np.eye(1, WEIGHT_BYTES, dtype=np.uint8).repeat(len(found), axis=0))[0]

    def prove(self, transcript: bytes, blinded: bytes, randomness: RandomSource) -> bytes:
        """See ``BlindingKey``."""
        return self._key.prove(transcript, blinded, randomness)

    def _is_small(self, values: Sized) -> bool:
        return len(values) < LEAST_POINTS

    def _spread(self, method: str, values: Sequence[bytes]) -> list[bytes]:
        runs = runs_of(len(values), len(self._workers))
        asked = []
        for number, run in enumerate(runs):
            own = values[run]
            ends = np.cumsum([len(value) for value in own], dtype=np.int64)
            asked.append(self._workers.call(number, "multiply", method, ends, b"".join(own)))
            asked[-1].add_done_callback(self._workers.work[number].counting("blinded", len(own)))
        points = b"".join(collect(asked))
        if len(points) != len(values) * POINT_BYTES:
            raise ProtocolError("workers of this site have blinded another number of points than they were given")
        return points_of(points)


@contextmanager
def held_by(key: BlindingKey, workers: Workers | None) -> Iterator[BlindingKey | SpreadKey]:
    """Give workers the key while an intersection lasts, however it ends; without any, the party's own process does all.

    Raises:
        WorkerFailure: a worker is lost; the text has its number.
    """
    if workers is None:
        yield key
        return
    try:
        begin(workers, PART, [key.for_workers()] * len(workers))
        yield SpreadKey(key, workers)
    except BaseException:
        with suppress(VeilBoostError):  # after a lost worker the others let go when their lines end
            _let_go(workers)
        raise
    _let_go(workers)


def _let_go(workers: Workers) -> None:
    begin(workers, TRIAL, [()] * len(workers))  # in the place of the part
