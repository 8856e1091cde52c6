"""The site's memory of which ids took part in which alignment.

Every alignment tells the other parties which of their ids this site has. Whoever may align again and again with other
sets of his own can ask for one id after another; and two alignments that differ by a party, or by some rows, show the
difference. So the ids of a data set take part in one alignment, whose result later jobs reuse; a further one needs this
site's consent.

``reserve`` comes first and is durable; ``mark_sent`` comes right before the first blinded id leaves, and from then on
the alignment counts whatever happens. ``cancel`` is for one that ended before; if the process dies before, the next
``reserve`` takes its reservation back: beside the site's memory lies a mark for each job that has reserved and sent
nothing yet, which the system lets go of when the process ends.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from dp_components.ledger_journal import Alive
from he_processors.errors import ConfigurationError, PolicyRefusal
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.data_sets.identity import overlap_of
from nvflare_plugins.failures import REGISTRY_TEXT, DataRefusal
from nvflare_plugins.formatting import counted
from nvflare_plugins.site.memory.schema import drop_array, insert, load_array, store_array
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.site.policy.values import Consents


@dataclass(frozen=True, slots=True)
class AlignmentRun:
    """One alignment of one data set.

    Attributes:
        number: in the site's memory.
        is_sent: whether a blinded id may have left.
        ids: number of the array with the hashes of its ids.
    """

    number: int
    job_id: str
    data_set: str
    is_sent: bool
    ids: int


class AlignmentRegistry:
    """The alignments of one site. Privacy: purely local; holds keyed hashes of ids, and counts."""

    def __init__(self, memory: Memory, consents: Consents, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._memory, self._site, self._consents = memory, memory.site, consents
        self._alive = Alive(memory.path)
        self._key = memory.secret("alignments", randomness.bytes(KEY_BYTES))

    @classmethod
    def open(cls, policy: SitePolicy) -> AlignmentRegistry:
        """Open the registry of the site whose policy this is."""
        return cls(Memory.open(policy), policy.consents)

    def fingerprint(self, ids: Sequence[bytes]) -> str:
        """Return a keyed hash of the ids in their order, which changes when any row comes, goes or moves."""
        digest = hashlib.blake2b(key=self._key, digest_size=16, person=b"rows")
        for name in ids:
            digest.update(len(name).to_bytes(4, "little") + name)
        return digest.hexdigest()

    def reserve(
        self, data: Mapping[str, Sequence[bytes]], job_id: str, sites: Sequence[str]
    ) -> tuple[AlignmentRun, ...]:
        """Allow one job to align data sets, and remember it.

        Args:
            data: canonical ids by name of the data set.

        Raises:
            PolicyRefusal: a data set of that name was aligned before, and the policy has no consent.
            DataRefusal: ids of one of them were aligned before under another name.
            ConfigurationError: the registry is damaged.
        """
        with self._memory.transaction() as db:
            self._drop_dead(db)
            earlier = _runs(db)
            fresh = []
            for name, ids in data.items():
                hashes = self._hashes(ids)
                repetition = self._repetition(db, name, hashes, earlier)
                if repetition is not None and not self._consents.gives("recompute_with_changes"):
                    raise repetition
                fresh.append(_add(db, job_id, name, sites, hashes))
            self._alive.hold(job_id)
        return tuple(fresh)

    def mark_sent(self, runs: Sequence[AlignmentRun]) -> None:
        """Note durably that blinded ids leave now: the alignment counts from here on.

        Raises:
            ConfigurationError: it was reserved in a memory that was replaced since.
        """
        with self._memory.transaction() as db:
            for run in runs:
                key = (run.number, run.job_id, run.data_set)
                marked = db.execute("UPDATE alignments SET is_sent = 1 WHERE (id, job_id, data_set) = (?, ?, ?)", key)
                if marked.rowcount != 1:
                    raise ConfigurationError(f"{self._site}: the memory of alignments was replaced during the job")
            self._forget_marks(runs)

    def cancel(self, runs: Sequence[AlignmentRun]) -> None:
        """Take reservations back; only if no blinded id has left."""
        with self._memory.transaction() as db:
            for run in runs:
                _drop(db, run)
            self._forget_marks(runs)

    def describe(self) -> str:
        """Return the alignments, one a line, for a person."""
        with self._memory.reading() as db:
            rows = db.execute(
                "SELECT started, data_set, length, sites, job_id, is_sent FROM alignments "
                "JOIN arrays ON arrays.id = ids ORDER BY alignments.id"
            ).fetchall()
        lines = []
        for started, data_set, n_ids, sites, job_id, is_sent in rows:
            state = "aligned" if is_sent else "reserved"
            described = f"{started:<20} {data_set[:16]:<16} {n_ids:>9} {'ids':<8} {state:<9}"
            lines.append(f"{described} {'':>5}  {', '.join(json.loads(sites))}, {job_id}")
        return "\n".join([*lines, f"{counted(len(rows), 'alignment')}."])

    def _drop_dead(self, db: sqlite3.Connection) -> None:
        """Forget the alignments that do not count: their process ended before it sent anything."""
        dead = [run for run in _runs(db) if not run.is_sent and not self._alive.is_held(run.job_id)]
        for run in dead:
            _drop(db, run)
        self._forget_marks(dead)

    def _forget_marks(self, runs: Sequence[AlignmentRun]) -> None:
        for job_id in {run.job_id for run in runs}:
            self._alive.release(job_id)

    def _repetition(
        self, db: sqlite3.Connection, name: str, hashes: NDArray[np.uint64], earlier: Sequence[AlignmentRun]
    ) -> PolicyRefusal | DataRefusal | None:
        """Return what is to be said of an earlier alignment of the set, or of some of its ids; None without one."""
        for run in earlier:
            is_named = run.data_set == name
            if is_named or overlap_of(hashes, load_array(db, run.ids, "<u8")):
                text = (
                    f"{self._site} aligned rows of data set {name!r} before, in job {run.job_id}: a second alignment "
                    "would answer further questions about which ids it has. Policy key: "
                    "consents.recompute_with_changes. Remedy: use the alignment of that job, or ask "
                    f"{self._site} to consent."
                )
                return PolicyRefusal(text) if is_named else DataRefusal(text, REGISTRY_TEXT)
        return None

    def _hashes(self, ids: Sequence[bytes]) -> NDArray[np.uint64]:
        """Shapes: result: uint64[n_ids], sorted."""
        digests = b"".join(hashlib.blake2b(name, digest_size=8, key=self._key).digest() for name in ids)
        return np.sort(np.frombuffer(digests, dtype="<u8"))


def _runs(db: sqlite3.Connection) -> list[AlignmentRun]:
    rows = db.execute("SELECT id, job_id, data_set, is_sent, ids FROM alignments ORDER BY id")
    return [AlignmentRun(number, job_id, name, bool(is_sent), ids) for number, job_id, name, is_sent, ids in rows]


def _add(
    db: sqlite3.Connection, job_id: str, data_set: str, sites: Sequence[str], hashes: NDArray[np.uint64]
) -> AlignmentRun:
    ids = store_array(db, hashes)
    number = insert(
        db,
        "INSERT INTO alignments (job_id, data_set, sites, started, is_sent, ids) VALUES (?, ?, ?, ?, 0, ?)",
        (job_id, data_set, json.dumps(list(sites)), _now(), ids),
    )
    return AlignmentRun(number, job_id, data_set, False, ids)


def _drop(db: sqlite3.Connection, run: AlignmentRun) -> None:
    if db.execute("DELETE FROM alignments WHERE id = ? AND is_sent = 0", (run.number,)).rowcount:
        drop_array(db, run.ids)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
