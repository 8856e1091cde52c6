"""What a site has released of its rows: sums, and the rows that were in them."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.site.memory import store
from nvflare_plugins.site.policy import SitePolicy

# What a passive party remembers of the sums it has released, over all jobs on one data set.
#
# Per row: how many sums it took part in, its share of them, and how many splits of this party divided it. Per released
# set of rows: how many rows, and a fingerprint from which the size of the difference of two sets can be estimated
# without keeping the sets. Of each answer on how a split divides rows a keyed hash, so that the same answer is counted
# once.
#
# The fingerprint of a set: every row has a secret key of 64 bits, and bit b of a key stands for +1 or -1; the
# fingerprint is the 64 sums over the set. For two sets the mean square of the difference of their fingerprints is their
# symmetric difference on average, with a relative error of sqrt(2 / 64), and exactly zero for equal sets.
#
# Privacy: purely local. Holds neither ids nor values nor sums: keys of rows are hashes under a key that never leaves
# the site, so that a row is recognised in the next job, whatever rows that one aligned. Reference: Alon, Matias,
# Szegedy, The space complexity of approximating the frequency moments (1996), section 2.2.


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
            raise store.DamagedArray("its ledger of released sums does not fit together")
        # A share that is no number is not at least 0 either.
        if not all((arrays[name] >= 0).all() for name in ("sums", "share", "split_bits", "sizes")):
            raise store.DamagedArray("its ledger of released sums holds counts that cannot be")
        return cls(**{**arrays, "fingerprints": arrays["fingerprints"].reshape(n_sets, KEY_BITS)}, told=told)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays as they are stored: of one dimension."""
        return {name: getattr(self, name).ravel() for name in store.COUNTS[store.RELEASED_SUMS]}

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

    def __init__(self, memory: store.Memory, data_set: str):
        """Args: data_set: the name in the site's policy: it stays when the file gains a row."""
        self._memory, self._data_set = memory, store.counted(data_set)
        self._key = memory.secret(store.RELEASED_SUMS)

    def row_keys(self, row_ids: Sequence[str]) -> NDArray[np.uint64]:
        """Return the rows' secret keys. Shapes: uint64[n_rows]. Raises: ValueError if an id comes twice."""
        keys = store.keyed_hashes(self._key, map(str.encode, row_ids))
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
            store.save_counts(db, store.RELEASED_SUMS, self._data_set, released.arrays())
            if released.told.size > n_told:
                store.save_counts(db, store.TOLD_BITS, self._data_set, {"answers": released.told})

    def answer_name(self, split: bytes, left: NDArray[np.uint64], right: NDArray[np.uint64]) -> int:
        """Return what an answer is remembered by: how a split divides rows, in whatever order they come.

        Each side is named by how many rows it has and the sum of their keys, which nobody else knows: two sides have
        the same name with a chance of 2^-64.

        Shapes: left, right: uint64[n], keys of the rows.
        """
        sides = np.array([left.size, left.sum(dtype=np.uint64), right.size, right.sum(dtype=np.uint64)], dtype="<u8")
        return int(store.keyed_hashes(self._key, [sides.tobytes() + split])[0])

    def _load(self, db: sqlite3.Connection) -> Released:
        told = store.load_counts(db, store.TOLD_BITS, self._data_set)["answers"]
        return Released.of(store.load_counts(db, store.RELEASED_SUMS, self._data_set), told)


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


# Whose buckets this party has sent: kept over all jobs, at the party only, and respected by every kind of job.
#
# What was paid for a row's randomised buckets would be undone by a job that uses the row without differential privacy,
# or under the budget of another data set: no ledger adds the two up. So, whatever the data set is called,
#
# * vertical training and prediction, which reveal exact bits of true values, refuse such rows; * horizontal training
# and evaluation refuse them too: the exact sums that the sites see are made of them; * another FederBoost job sends
# them again only under the name of the same data set, whose ledger adds up what each draw of noise costs; under another
# name it refuses; * private trees and DPBoost leave them out, each row by itself and without a word: that they are
# there is private.
#
# A data set without an id column might hold any row, and is refused before it is read. The policy's consent
# ``exact_use_of_budgeted_data`` lifts this for horizontal jobs, private trees and DPBoost. The other way round, a row
# that was used before has shown what it has shown; then the buckets protect the rest of it only. Alignment uses ids
# alone.
#
# The site's memory holds keyed hashes of the identifiers.


_HASH_BYTES = 12
_PAID_ONCE = (
    "randomised buckets of rows of this job were sent, and this job would reveal more of them than was paid for. Take "
    "rows that were not sent."
)


class SentRows:
    """The rows of one site."""

    def __init__(self, policy: SitePolicy) -> None:
        self._site, self._consents = policy.site, policy.consents
        self._memory = store.Memory.open(policy)
        self._key = self._memory.secret("sent rows")

    def note(self, job_id: str, ids: Sequence[str], data_set: str = "") -> None:
        """Remember rows, durably; to be called before their buckets are sent.

        Args:
            data_set: whose ledger has paid.

        Raises:
            DataRefusal: one of them was sent under the name of another data set, perhaps since ``refuse`` allowed it.
            ConfigurationError: the site's memory is damaged.
        """
        hashes = self._hashes(ids)
        with self._memory.transaction() as db:
            # A job at the same time may have noted them since ``refuse`` looked.
            if not _sent(db, data_set).isdisjoint(hashes):
                raise DataRefusal(_PAID_ONCE)
            stored = store.store_array(db, np.frombuffer(b"".join(hashes), dtype="|u1"))
            db.execute(
                "INSERT INTO sent_rows (job_id, data_set, row_hashes) VALUES (?, ?, ?)", (job_id, data_set, stored)
            )

    def asks_for_ids(self, spec: DataSet) -> bool:
        """Return whether the rows of a data set must be compared with those sent; decided before any is read.

        Raises:
            PolicyRefusal: they must, and the data set has no id column.
            ConfigurationError: the site's memory is damaged.
        """
        if not self._of_others("") or self._consents.gives("exact_use_of_budgeted_data"):
            return False
        if spec.id is None:
            raise self._no_ids(f"Policy keys: data_sets.{spec.name}.id, consents.exact_use_of_budgeted_data.")
        return True

    def sent(self, ids: Sequence[str | None]) -> NDArray[np.bool_]:
        """Return whose buckets were sent; a row without an id may be any. Shapes: result: bool[n_rows]."""
        known = self._of_others("")
        if not known or not len(ids):
            return np.zeros(len(ids), dtype=np.bool_)
        return np.array([row is None or self._hashes([row])[0] in known for row in ids])

    def refuse(self, ids: Sequence[str] | None, data_set: str = "") -> None:
        """Refuse a job on rows whose buckets were sent; to be called before anything is answered.

        Args:
            ids: canonical identifiers; None where the rows have none, so that they might be any.
            data_set: whose ledger pays for this job too: what was sent under its name does not count.

        Raises:
            PolicyRefusal: rows without ids may be such ones.
            DataRefusal: there is such a row.
            ConfigurationError: the site's memory is damaged.
        """
        if ids is None and self._of_others(data_set):
            raise self._no_ids("Policy key: data_sets.<name>.id.")
        if ids is not None and self.sent_by_others(ids, data_set):
            raise DataRefusal(_PAID_ONCE)

    def sent_by_others(self, ids: Sequence[str], data_set: str) -> bool:
        """Return whether buckets of one of the rows were sent under the name of another data set."""
        known = self._of_others(data_set)
        return bool(known) and not known.isdisjoint(self._hashes(ids))

    def _no_ids(self, keys: str) -> PolicyRefusal:
        return PolicyRefusal(
            f"{self._site} has sent randomised buckets of rows that may be among those of this job, which have no ids: "
            "it would reveal more of them than was paid for. Nothing was answered. Remedy: take rows that were not "
            f"sent, from a data set with an id column. {keys}"
        )

    def _of_others(self, data_set: str) -> set[bytes]:
        """Return the hashes of the rows that were sent under another name; an empty one is another of all."""
        with self._memory.reading() as db:
            return _sent(db, data_set)

    def _hashes(self, ids: Sequence[str]) -> list[bytes]:
        return [hashlib.blake2b(item.encode(), digest_size=_HASH_BYTES, key=self._key).digest() for item in ids]


def _sent(db: sqlite3.Connection, data_set: str) -> set[bytes]:
    """See ``SentRows._of_others``. Notes of versions before 0.3 have no name."""
    numbers = db.execute("SELECT row_hashes FROM sent_rows WHERE ? = '' OR data_set != ?", (data_set, data_set))
    stored = [store.load_array(db, number, "|u1").tobytes() for (number,) in numbers.fetchall()]
    return {hashes[start : start + _HASH_BYTES] for hashes in stored for start in range(0, len(hashes), _HASH_BYTES)}
