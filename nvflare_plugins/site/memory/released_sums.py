"""What a passive party remembers of the sums it has released, over all jobs on one data set.

Per row: how many sums it took part in, its share of them, and how many splits of this party divided it. Per released
set of rows: how many rows, and a fingerprint from which the size of the difference of two sets can be estimated without
keeping the sets. Of each answer on how a split divides rows a keyed hash, so that the same answer is counted once.

The fingerprint of a set: every row has a secret key of 64 bits, and bit b of a key stands for +1 or -1; the fingerprint
is the 64 sums over the set. For two sets the mean square of the difference of their fingerprints is their symmetric
difference on average, with a relative error of sqrt(2 / 64), and exactly zero for equal sets.

Privacy: purely local. Holds neither ids nor values nor sums: keys of rows are hashes under a key that never
    leaves the site, so that a row is recognised in the next job, whatever rows that one aligned.
Reference: Alon, Matias, Szegedy, The space complexity of approximating the frequency moments (1996), section 2.2.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.site.memory.schema import (
    COUNTS,
    RELEASED_SUMS,
    TOLD_BITS,
    DamagedArray,
    counted,
    keyed_hashes,
    load_counts,
    save_counts,
)
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory

KEY_BITS = 64
_BLOCK_ROWS = 1 << 17
_OF_ROWS = ("keys", "sums", "share", "split_bits")


@dataclass(slots=True, repr=False)
class Released:
    """The content of the ledger, in the order in which rows first came.

    Shapes: keys: uint64[n]; sums, split_bits: int32[n]; share: float32[n]; sizes: int64[n_sets];
        fingerprints: int32[n_sets, 64].
    Units:  share: sums per row, each sum divided evenly among the rows of its set. split_bits: ordered bits, of all
        features together.

    Attributes:
        told: keyed hashes of the answers on how splits divide rows, in the order in which they were given. Shapes:
            uint64[n_answers].
    """

    keys: NDArray[np.uint64]
    sums: NDArray[np.int32]
    share: NDArray[np.float32]
    split_bits: NDArray[np.int32]
    sizes: NDArray[np.int64]
    fingerprints: NDArray[np.int32]
    told: NDArray[np.uint64]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], told: NDArray[np.uint64]) -> Released:
        """Return stored arrays as a ledger. Raises: DamagedArray: they do not fit together."""
        n_sets = arrays["sizes"].size
        if arrays["fingerprints"].size != n_sets * KEY_BITS or len({arrays[name].size for name in _OF_ROWS}) != 1:
            raise DamagedArray("its ledger of released sums does not fit together")
        # A share that is no number is not at least 0 either.
        if not all((arrays[name] >= 0).all() for name in ("sums", "share", "split_bits", "sizes")):
            raise DamagedArray("its ledger of released sums holds counts that cannot be")
        return cls(**{**arrays, "fingerprints": arrays["fingerprints"].reshape(n_sets, KEY_BITS)}, told=told)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays as they are stored: of one dimension."""
        return {name: getattr(self, name).ravel() for name in COUNTS[RELEASED_SUMS]}

    def remember(self, answers: Sequence[int]) -> None:
        """Add answers that are given now, at the end. Args: answers: ``ReleasedSums.answer_name`` of each."""
        self.told = np.append(self.told, np.array(answers, dtype="<u8"))

    def enter(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the rows' places in the ledger, entering those that are new at the end. Shapes: int64[n_rows]."""
        order = np.argsort(self.keys)
        place = np.searchsorted(self.keys, keys, sorter=order)
        is_known = np.zeros(keys.size, dtype=bool)
        inside = place < order.size
        is_known[inside] = self.keys[order[place[inside]]] == keys[inside]
        result = np.empty(keys.size, dtype=np.int64)
        result[is_known] = order[place[is_known]]
        n_new = int(np.count_nonzero(~is_known))
        result[~is_known] = self.keys.size + np.arange(n_new)
        self.keys = np.concatenate([self.keys, keys[~is_known]])
        self.sums = np.concatenate([self.sums, np.zeros(n_new, np.int32)])
        self.share = np.concatenate([self.share, np.zeros(n_new, np.float32)])
        self.split_bits = np.concatenate([self.split_bits, np.zeros(n_new, np.int32)])
        return result

    def holds(self, places: NDArray[np.int64], keys: NDArray[np.uint64]) -> bool:
        """Tell whether rows are where they were."""
        return int(places.max(initial=-1)) < self.keys.size and np.array_equal(self.keys[places], keys)

    def has_set(self, size: int, fingerprint: NDArray[np.int32]) -> bool:
        """Tell whether sums over exactly these rows were released."""
        return bool((self.fingerprints[self.sizes == size] == fingerprint).all(axis=1).any())

    def add_set(self, size: int, fingerprint: NDArray[np.int32]) -> None:
        """Remember a released set, once."""
        if not self.has_set(size, fingerprint):
            self.sizes = np.append(self.sizes, size)
            self.fingerprints = np.vstack([self.fingerprints, fingerprint])


class ReleasedSums:
    """What was released of one data set, over all jobs. Processes wait for each other."""

    def __init__(self, memory: Memory, data_set: str, randomness: RandomSource = OS_RANDOMNESS):
        """Args: data_set: the name in the site's policy: it stays when the file gains a row."""
        self._memory, self._data_set = memory, counted(data_set)
        self._key = memory.secret(RELEASED_SUMS, randomness.bytes(KEY_BYTES))

    def row_keys(self, row_ids: Sequence[str]) -> NDArray[np.uint64]:
        """Return the rows' secret keys. Shapes: uint64[n_rows]. Raises: ValueError if an id comes twice."""
        keys = keyed_hashes(self._key, map(str.encode, row_ids))
        if np.unique(keys).size != keys.size:
            raise ValueError("the ids of the rows are not distinct")
        return keys

    def read(self) -> Released:
        """Return what was released; changes of it are not kept. Raises: ConfigurationError: the memory is damaged."""
        with self._memory.reading() as db:
            return self._load(db)

    @contextlib.contextmanager
    def charging(self) -> Iterator[Released]:
        """Read, decide and change within one transaction: durable when the block ends, and undone if it raises.

        Raises:
            ConfigurationError: the site's memory is damaged.
        """
        with self._memory.transaction() as db:
            released = self._load(db)
            n_told = released.told.size
            yield released
            save_counts(db, RELEASED_SUMS, self._data_set, released.arrays())
            if released.told.size > n_told:
                save_counts(db, TOLD_BITS, self._data_set, {"answers": released.told})

    def answer_name(self, split: bytes, left: NDArray[np.uint64], right: NDArray[np.uint64]) -> int:
        """Return what an answer is remembered by: how a split divides rows, in whatever order they come.

        Each side is named by how many rows it has and the sum of their keys, which nobody else knows: two sides have
        the same name with a chance of 2^-64.

        Shapes: left, right: uint64[n], keys of the rows.
        """
        sides = np.array([left.size, left.sum(dtype=np.uint64), right.size, right.sum(dtype=np.uint64)], dtype="<u8")
        return int(keyed_hashes(self._key, [sides.tobytes() + split])[0])

    def _load(self, db: sqlite3.Connection) -> Released:
        told = load_counts(db, TOLD_BITS, self._data_set)["answers"]
        return Released.of(load_counts(db, RELEASED_SUMS, self._data_set), told)


def fingerprint_of(keys: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Return a set's fingerprint. Shapes: keys: uint64[n_set_rows]; result: int32[64]."""
    ones = np.zeros(KEY_BITS, dtype=np.int64)
    for start in range(0, keys.size, _BLOCK_ROWS):
        block = keys[start : start + _BLOCK_ROWS].astype("<u8")
        ones += np.unpackbits(block.view(np.uint8)).reshape(-1, KEY_BITS).sum(axis=0, dtype=np.int64)
    return (2 * ones - keys.size).astype(np.int32)


def differences(fingerprint: NDArray[np.int32], others: NDArray[np.int32]) -> NDArray[np.float64]:
    """Estimate the rows in which a set differs from others. Shapes: others: int32[n, 64]; result: float64[n]."""
    result: NDArray[np.float64] = np.square(np.float64(others) - fingerprint).mean(axis=1)
    return result
