"""Blinding on a party's own workers: each multiplies a run of a block's ids or points, and runs are joined in order.

The result is that of ``BlindingKey`` in one process, byte for byte: each element is multiplied by itself, and has one
encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.equal_logarithms import WEIGHT_BYTES
from he_processors.errors import ProtocolError, VeilBoostError
from he_processors.randomness import RandomSource
from nvflare_plugins.alignment.blinding import POINT_BYTES, BlindingKey, points_of
from nvflare_plugins.cluster.desk import WorkerPart
from nvflare_plugins.cluster.workers import TRIAL, Workers, begin, collect
from nvflare_plugins.shards.place import runs_of

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
