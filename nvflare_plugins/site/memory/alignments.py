"""The site's memory of which ids took part in which alignment.

Every alignment tells the other parties which of their ids this site has. Whoever may align again and again with other
sets of his own can ask for one id after another; and two alignments that differ by a party, or by some rows, show the
difference. So the ids of a data set take part in one alignment, whose result later jobs reuse; a further one needs this
site's consent ``recompute_with_changes``. Two further ones are allowed without:

* An alignment that failed has left no result, and may be tried again with the same ids among the same sites. Each trial
  is a question all the same, as others may bring other ids to it: there are ``MOST_FAILURES`` of them for a set.
* A standing alignment, for scoring, is refreshed as a batch: with the consent ``scoring``, and as often a day as
  ``vertical.scoring_alignments_per_day`` says, failed trials apart, of which there are as many as above. Two of them
  tell the others which of their ids came and which went.

``reserve`` comes first and is durable; ``mark_sent`` comes right before the first blinded id leaves, and from then on
the alignment counts whatever happens; ``finish`` says that it has its result. ``cancel`` is for one that ended before
anything was sent; if the process dies before, the next ``reserve`` takes its reservation back: beside the site's memory
lies a mark for each job that has no result yet, which the system lets go of when the process ends.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dp_components.ledger import Alive
from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import REGISTRY_TEXT, DataRefusal, PolicyRefusal
from nvflare_plugins.base.formatting import counted, fitted
from nvflare_plugins.data.identity import overlap_of
from nvflare_plugins.site.memory.store import Memory, drop_array, insert, keyed_hashes, load_array, store_array
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Consents


class State(IntEnum):
    """How far an alignment has come, as it is stored."""

    RESERVED = 0
    ALIGNED = 1
    SENT = 2  # without a result: it failed, unless its process is alive


MOST_FAILURES = 3
_DAY = timedelta(days=1)
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class AlignmentRun:
    """One alignment of one data set.

    Attributes:
        number: in the site's memory.
        state: see ``State``.
        ids: number of the array with the hashes of its ids.
        started: in UTC.
    """

    number: int
    job_id: str
    data_set: str
    state: State
    ids: int
    sites: tuple[str, ...] = ()
    started: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """What a job asks to align. Shapes: hashes: uint64[n_ids], keyed and sorted. Args: standing: it is for scoring."""

    data_set: str
    hashes: NDArray[np.uint64]
    sites: tuple[str, ...]
    standing: bool


class AlignmentRegistry:
    """The alignments of one site. Privacy: purely local; holds keyed hashes of ids, and counts."""

    def __init__(
        self,
        memory: Memory,
        consents: Consents,
        per_day: int = 1,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Open the registry. Args: per_day: standing alignments of a data set (``scoring_alignments_per_day``)."""
        self._memory, self._site, self._consents = memory, memory.site, consents
        self._per_day, self._clock = per_day, clock
        self._alive = Alive(memory.path)
        self._key = memory.secret("alignments")

    @classmethod
    def open(cls, policy: SitePolicy) -> AlignmentRegistry:
        """Open the registry of the site whose policy this is."""
        return cls(Memory.open(policy), policy.consents, per_day=policy.vertical.scoring_alignments_per_day)

    def fingerprint(self, ids: Sequence[bytes]) -> str:
        """Return a keyed hash of the ids in their order, which changes when any row comes, goes or moves."""
        digest = hashlib.blake2b(key=self._key, digest_size=16, person=b"rows")
        for name in ids:
            digest.update(len(name).to_bytes(4, "little") + name)
        return digest.hexdigest()

    def reserve(
        self, data: Mapping[str, Sequence[bytes]], job_id: str, sites: Sequence[str], *, standing: bool = False
    ) -> tuple[AlignmentRun, ...]:
        """Allow one job to align data sets, and remember it.

        Args:
            data: canonical ids by name of the data set.
            standing: it is for scoring.

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
                asked = _Request(name, np.sort(keyed_hashes(self._key, ids)), tuple(sites), standing)
                if not (standing and self._consents.scoring and self._is_due(db, asked, earlier)):
                    repetition = self._repetition(db, asked, earlier)
                    if repetition is not None and not self._consents.gives("recompute_with_changes"):
                        raise repetition
                elif any(run.state is not State.RESERVED for run in earlier):
                    self._consents.gives("scoring")
                fresh.append(_add(db, job_id, asked, self._clock().strftime(_TIME)))
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
                marked = db.execute("UPDATE alignments SET is_sent = 2 WHERE (id, job_id, data_set) = (?, ?, ?)", key)
                if marked.rowcount != 1:
                    raise ConfigurationError(f"{self._site}: the memory of alignments was replaced during the job")

    def finish(self, runs: Sequence[AlignmentRun], *, has_result: bool) -> None:
        """End alignments that were sent. Args: has_result: else they have failed, and may be tried again."""
        with self._memory.transaction() as db:
            if has_result:
                for run in runs:
                    db.execute("UPDATE alignments SET is_sent = 1 WHERE id = ?", (run.number,))
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
            state = {State.RESERVED: "reserved", State.ALIGNED: "aligned"}.get(is_sent, "failed")
            described = f"{started:<20} {fitted(data_set, 16)} {n_ids:>9} {'ids':<8} {state:<9}"
            lines.append(f"{described} {'':>5}  {', '.join(json.loads(sites))}, {job_id}")
        return "\n".join([*lines, f"{counted(len(rows), 'alignment')}."])

    def _drop_dead(self, db: sqlite3.Connection) -> None:
        """Forget the alignments that do not count: their process ended before it sent anything."""
        dead = [run for run in _runs(db) if run.state is State.RESERVED and not self._alive.is_held(run.job_id)]
        for run in dead:
            _drop(db, run)
        left = [run for run in _runs(db) if run.state is State.SENT and not self._alive.is_held(run.job_id)]
        self._forget_marks([*dead, *left])

    def _forget_marks(self, runs: Sequence[AlignmentRun]) -> None:
        for job_id in {run.job_id for run in runs}:
            self._alive.release(job_id)

    def _is_due(self, db: sqlite3.Connection, asked: _Request, earlier: Sequence[AlignmentRun]) -> bool:
        """Tell whether a standing alignment of a data set may be refreshed; trials that fail use up no day."""
        since = (self._clock() - _DAY).strftime(_TIME)
        today = [run for run in earlier if run.data_set == asked.data_set and run.started > since]
        n_failed = sum(self._is_failed_trial(db, run, asked) for run in today)
        return len(today) - n_failed + n_failed // MOST_FAILURES < self._per_day

    def _is_failed_trial(self, db: sqlite3.Connection, run: AlignmentRun, asked: _Request) -> bool:
        """Tell whether an alignment of the same ids among the same sites has failed."""
        has_failed = run.state is State.SENT and not self._alive.is_held(run.job_id)
        return has_failed and run.sites == asked.sites and np.array_equal(asked.hashes, load_array(db, run.ids, "<u8"))

    def _repetition(
        self, db: sqlite3.Connection, asked: _Request, earlier: Sequence[AlignmentRun]
    ) -> PolicyRefusal | DataRefusal | None:
        """Return what is to be said of an earlier alignment of the set, or of some of its ids; None without one."""
        n_failed = 0
        for run in earlier:
            is_named = run.data_set == asked.data_set
            if not is_named and not overlap_of(asked.hashes, load_array(db, run.ids, "<u8")):
                continue
            if self._is_failed_trial(db, run, asked):
                n_failed += 1
                if n_failed < MOST_FAILURES:
                    continue
            remedy = self._remedy(run, n_failed, standing=asked.standing)
            text = (
                f"{self._site} aligned rows of data set {asked.data_set!r} before, in job {run.job_id}: a second "
                f"alignment would answer further questions about which ids it has. {remedy}"
            )
            return PolicyRefusal(text) if is_named else DataRefusal(text, REGISTRY_TEXT)
        return None

    def _remedy(self, run: AlignmentRun, n_failed: int, *, standing: bool) -> str:
        """Return what helps: the result of a failed alignment cannot be used, and a site may refresh for scoring."""
        ask = f"ask {self._site} to consent."
        if standing and self._consents.scoring:
            return (
                "Policy keys: vertical.scoring_alignments_per_day, consents.recompute_with_changes. Remedy: use the "
                f"alignment of that job (alignment={run.job_id!r}), wait a day, or {ask}"
            )
        keys = "consents.recompute_with_changes" + (", consents.scoring" if standing else "")
        key = f"Policy key{'s' if standing else ''}: {keys}."
        if run.state is State.ALIGNED:
            return f"{key} Remedy: use the alignment of that job (alignment={run.job_id!r}), or {ask}"
        if n_failed >= MOST_FAILURES:
            return f"{key} It has failed {n_failed} times. Remedy: {ask}"
        if self._alive.is_held(run.job_id):
            return f"{key} Remedy: wait until that job has ended and use its alignment, or {ask}"
        return f"{key} That one failed. Remedy: try again with the same ids and sites, or {ask}"


def _runs(db: sqlite3.Connection) -> list[AlignmentRun]:
    rows = db.execute("SELECT id, job_id, data_set, is_sent, ids, sites, started FROM alignments ORDER BY id")
    return [
        AlignmentRun(number, job_id, name, State(state), ids, tuple(json.loads(sites)), started)
        for number, job_id, name, state, ids, sites, started in rows
    ]


def _add(db: sqlite3.Connection, job_id: str, asked: _Request, started: str) -> AlignmentRun:
    ids = store_array(db, asked.hashes)
    number = insert(
        db,
        "INSERT INTO alignments (job_id, data_set, sites, started, is_sent, ids) VALUES (?, ?, ?, ?, 0, ?)",
        (job_id, asked.data_set, json.dumps(asked.sites), started, ids),
    )
    return AlignmentRun(number, job_id, asked.data_set, State.RESERVED, ids, asked.sites, started)


def _drop(db: sqlite3.Connection, run: AlignmentRun) -> None:
    if db.execute("DELETE FROM alignments WHERE id = ? AND is_sent = 0", (run.number,)).rowcount:
        drop_array(db, run.ids)
