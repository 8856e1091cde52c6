"""What a passive party remembers of the sums it has released, over all jobs on one data set.

Per row: how many sums it took part in, its share of them, and how many splits of this party divided it. Per released
set of rows: how many rows, and a fingerprint from which the size of the difference of two sets can be estimated without
keeping the sets.

The fingerprint of a set: every row has a secret key of 64 bits, and bit b of a key stands for +1 or -1; the fingerprint
is the 64 sums over the set. For two sets the mean square of the difference of their fingerprints is their symmetric
difference on average, with a relative error of sqrt(2 / 64), and exactly zero for equal sets.

Privacy: purely local, mode 0600. Holds neither ids nor values nor sums: keys of rows are hashes under a key that never
    leaves the site, so that a row is recognised in the next job, whatever rows that one aligned.
Reference: Alon, Matias, Szegedy, The space complexity of approximating the frequency moments (1996), section 2.2.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.files import write_private
from nvflare_plugins.site.memory.stored_arrays import read_arrays

KEY_BITS = 64
_BLOCK_ROWS = 1 << 17


@dataclass(slots=True, repr=False)
class Released:
    """The content of the ledger, in the order in which rows first came.

    Shapes: keys: uint64[n]; sums, split_bits: int32[n]; share: float32[n]; sizes: int64[n_sets];
        fingerprints: int32[n_sets, 64].
    Units:  share: sums per row, each sum divided evenly among the rows of its set. split_bits: ordered bits, of all
        features together.
    """

    keys: NDArray[np.uint64]
    sums: NDArray[np.int32]
    share: NDArray[np.float32]
    split_bits: NDArray[np.int32]
    sizes: NDArray[np.int64]
    fingerprints: NDArray[np.int32]

    @classmethod
    def nothing(cls) -> Released:
        """Return the ledger of a data set that nothing was released of."""
        return cls(
            np.empty(0, np.uint64),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
            np.empty(0, np.int32),
            np.empty(0, np.int64),
            np.empty((0, KEY_BITS), np.int32),
        )

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
    """The file of one data set. Not safe for concurrent use by threads; processes wait for each other."""

    def __init__(self, folder: Path, data_set: str, randomness: RandomSource = OS_RANDOMNESS):
        """Args: data_set: the name in the site's policy: it stays when the file gains a row."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"{hashlib.sha256(data_set.encode()).hexdigest()[:32]}.npz"
        with self.locked():
            self._key = self._load_key(randomness)

    def row_keys(self, row_ids: Sequence[str]) -> NDArray[np.uint64]:
        """Return the rows' secret keys. Shapes: uint64[n_rows]. Raises: ValueError if an id comes twice."""
        digests = b"".join(hashlib.blake2b(one.encode(), digest_size=8, key=self._key).digest() for one in row_ids)
        keys = np.frombuffer(digests, dtype="<u8")
        if np.unique(keys).size != keys.size:
            raise ValueError("the ids of the rows are not distinct")
        return keys

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock: read, decide and write within one."""
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Released:
        """Read the file; none is an empty ledger.

        Raises:
            ConfigurationError: the file is damaged.
        """
        if not self._path.exists():
            return Released.nothing()
        try:
            stored = read_arrays(self._path)
        except (OSError, ValueError):
            raise self._damaged("its ledger of released sums cannot be read") from None
        if set(stored) != set(Released.__slots__) or not _fits_together(stored):
            raise self._damaged("its ledger of released sums does not fit together")
        return Released(**stored)

    def write(self, released: Released) -> None:
        """Write the file whole and durably."""
        content = io.BytesIO()
        np.savez(content, **{name: getattr(released, name) for name in Released.__slots__})
        write_private(self._path, content.getvalue())

    def _load_key(self, randomness: RandomSource) -> bytes:
        path = self._folder / "key"
        if not path.exists():
            if any(self._folder.glob("*.npz")):
                raise self._damaged("the key of its rows is missing")
            write_private(path, randomness.bytes(32))
        if not path.is_file() or len(key := path.read_bytes()) != 32:
            raise self._damaged("the key of its rows is damaged")
        return key

    def _damaged(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"guards of vertical jobs: {what}. Restore the folder {self._folder.name} of the registry from a backup; "
            "an empty one forgets what was released."
        )


def _fits_together(stored: Mapping[str, NDArray[Any]]) -> bool:
    """Tell whether arrays have the types and shapes of a ledger, and counts that cannot be below none."""
    n_rows, n_sets = stored["keys"].shape[:1], stored["sizes"].shape[:1]
    expected = {
        "keys": ("u8", n_rows),
        "sums": ("i4", n_rows),
        "share": ("f4", n_rows),
        "split_bits": ("i4", n_rows),
        "sizes": ("i8", n_sets),
        "fingerprints": ("i4", (*n_sets, KEY_BITS)),
    }
    if any(stored[name].dtype != kind or stored[name].shape != shape for name, (kind, shape) in expected.items()):
        return False
    # A share that is no number is not at least 0 either.
    return all(bool((stored[name] >= 0).all()) for name in ("sums", "share", "split_bits", "sizes"))


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
