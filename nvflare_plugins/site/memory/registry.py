"""The site's memory of what was released, against differencing.

Two runs that differ by one site or by some rows reveal the difference, so a site remembers across jobs: which data,
with which sites, under which parameters. The kind of parameters does not matter for a refusal, because the first
histogram of a run hardly depends on them.

Protocol: ``reserve`` before the first private byte leaves; it is durable, and from then on the run counts as
released, also if the process dies. ``trees_complete`` at every checkpoint, ``complete`` at the end. ``cancel`` takes
the reservation back and is for a run that ended before anything private was sent.

Each of these is one transaction of the site's memory (``store.Memory``).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.key_agreement import derive_key
from nvflare_plugins.base.errors import REGISTRY_TEXT, DataRefusal, PolicyRefusal
from nvflare_plugins.base.formatting import counted, fitted
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import DataRecord, Relation, identify, named_rows, overlap_of, row_tags
from nvflare_plugins.data.table import Table
from nvflare_plugins.site.memory.forgetting import BEGUN, Queue, Split, Standing, ToForget, split_of, without
from nvflare_plugins.site.memory.store import (
    NAMED_ROWS,
    UNCHECKED,
    Memory,
    insert,
    load_array,
    load_counts,
    save_counts,
    store_array,
)
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Consents

_ROWS = "rows or columns"
ADDED_SITES, ADDED_ROWS = 3, 1000
"""How many sites must have added rows since earlier runs, and how many in all, for training again without consents."""


def describe_draw(fraction: float = 1.0, weight: str | None = None, query: str | None = None) -> str:
    """Return which of the rows a run trains on and how much each counts, for ``Registry.reserve``.

    Args:
        fraction: of the rows that each round draws.
        weight: column of weights.
        query: column of queries: another one leaves other rows without pairs.
    """
    said = {"subsample": fraction if fraction < 1 else None, "weight": weight, "query": query}
    return ", ".join(f"{name} {value!r}" for name, value in said.items() if value is not None)


class Verdict(Enum):
    """Why a run may take place."""

    NEW = "new data"
    IDENTICAL = "the same run again: the same release"
    OTHER_PARAMETERS = "the same data and sites with other parameters"
    RESUMED = "resumed"
    GROWN = "added rows, if the sites' counts of them together allow it"
    SHRUNK = "rows of persons to forget left out, if the sites' counts of them together allow it"
    CONSENTED = "another site set or changed rows, with this site's consent"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A run that may send: its number in the site's memory; ``message`` is for the log and the report.

    Attributes:
        n_added: rows that no earlier job has used, where the verdict is ``GROWN``; that this one leaves out, where it
            is ``SHRUNK``.
        n_left: rows of all earlier jobs that a run which forgets persons goes on with.
        n_settled: batches of other runs that had left when it was reserved; None of a run that forgets nobody.
        is_again: an earlier attempt of the same job has reserved it, and may have released what it allows.
        refusal: what ends such a run where the sites' counts do not allow it.
    """

    run: int
    verdict: Verdict
    message: str
    n_added: int = 0
    n_left: int = 0
    refusal: DataRefusal | None = None
    n_settled: int | None = None
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The interrupted job that a new one continues, and the complete trees of the checkpoint all sites share.

    Attributes:
        lost: sites without which a job goes on in a later attempt, where this site's policy consents.
    """

    job_id: str
    trees: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CutPlan:
    """Cuts already known from an earlier search (feature -> float32[n]), and the features still to search."""

    known: Mapping[str, NDArray[np.float32]]
    to_search: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Wanted:
    """What a run wants to look at.

    Attributes:
        table: the rows of the run.
        data_set: the data set they come from.
        ids: what names the rows, where something does: rows of few columns are alike by chance.
        draw: see ``describe_draw``. Another one is a change of the rows.
        may_grow: the job has the sites count the rows that were added since earlier runs, before anything else of rows
            leaves.
        is_settled: the job calls ``grown`` or ``cancel`` once its rows have been counted; as one with ``may_grow``.
        continues: jobs whose model the run continues: it must be about none of their rows.
        forgets: whom the run leaves out, of a job that trains a model again without them.
    """

    table: Table
    data_set: DataSet
    ids: Sequence[bytes] | None = None
    draw: str = ""
    may_grow: bool = False
    is_settled: bool = False
    continues: tuple[str, ...] = ()
    forgets: ToForget | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Used:
    """Which rows of a table earlier runs had. Shapes: all: bool[n_rows].

    Attributes:
        by_base: the run that is to be replaced; None where the registry knows of none.
    """

    by_any: NDArray[np.bool_]
    by_all: NDArray[np.bool_]
    by_base: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class _Judged:
    """What the registry makes of a run. Attributes: others: see ``Reservation``; gone: see ``Split``."""

    verdict: Verdict
    message: str
    n_added: int = 0
    refusal: DataRefusal | None = None
    split: Split | None = None


class Registry:
    """The registry of one site.

    Privacy: purely local. Holds no row, value or sum except the agreed cuts, which are in every model anyway.
    """

    def __init__(self, memory: Memory, consents: Consents) -> None:
        self._memory, self._site, self._consents = memory, memory.site, consents
        self._key = memory.secret("registry")

    @classmethod
    def open(cls, policy: SitePolicy) -> Registry:
        """Open the registry of the site whose policy this is."""
        return cls(Memory.open(policy), policy.consents)

    def reserve(
        self,
        wanted: Wanted,
        *,
        job_id: str,
        sites: Sequence[str],
        parameters: bytes,
        resume: ResumePoint | None = None,
        beside: Sequence[Reservation] = (),
    ) -> Reservation:
        """Decide whether a run may take place and, if so, record it durably.

        Args:
            job_id: FLARE's job id.
            sites: the data-bearing sites of the job.
            parameters: the agreed canonical document of the job, without rounds, ids and resumption; kept as a hash.
            resume: the interrupted job to continue; None for a fresh start.
            beside: reservations of the same job for its other data sets, with which it is not compared.

        Raises:
            DataRefusal: the run would recompute a released quantity with another site set or changed rows.
            ConfigurationError: there is no such interrupted job or checkpoint, or the site's memory is damaged.
        """
        table, spec = wanted.table, wanted.data_set
        (record, rows), named = identify(table, spec, self._key, wanted.ids), named_rows(table, spec, self._key)
        with self._memory.transaction() as db:
            version = _Version(db, record, rows, named)
            data = add_data(db, record, rows)
            if named is not None:
                known = load_counts(db, NAMED_ROWS, str(data))["keys"]  # under which it had other ids
                save_counts(db, NAMED_ROWS, str(data), {"keys": np.union1d(known, named).astype("<u8")})
            terms = Terms(data, record.fingerprint, tuple(sorted(sites)), _digest(parameters), wanted.draw)
            own = tuple(reservation.run for reservation in beside)
            again = _reserved(db, job_id, terms, own) if resume is None and wanted.forgets is None else None
            if resume is None:
                own += () if again is None else (again,)
                self._check_new(version, wanted.continues)
                found = self._judge(terms, version, own, may_grow=wanted.may_grow, forgets=wanted.forgets)
            else:
                found = _Judged(*self._check_resume(db, terms, record, resume))
                if resume.lost:
                    own = tuple(
                        number for (number,) in db.execute("SELECT id FROM runs WHERE job_id = ?", (resume.job_id,))
                    )
                    self._judge(terms, version, own, may_grow=False)
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            run = again or add_run(db, job_id, terms, now, 0 if resume is None else resume.trees)
            if resume is None and again is None and (wanted.may_grow or wanted.is_settled):
                note_unchecked(db, run)
            n_settled = None
            if wanted.forgets is not None:
                queue = Queue.read(db, spec.name)
                gone = version.gone(wanted.forgets, queue) if found.split is None else found.split.gone
                queue.take(job_id, run, wanted.forgets, gone)
                queue.write(db)
                n_settled = queue.settled_beside(run)
        n_left = 0 if found.split is None else found.split.n_left
        counts = (found.n_added, n_left, found.refusal, n_settled)
        return Reservation(run, found.verdict, found.message, *counts, is_again=again is not None)

    def used(self, table: Table, spec: DataSet, replaces: str | None = None) -> Used:
        """Return which rows of a table earlier runs of this site had, as far as their columns tell.

        Args:
            replaces: the job whose model is to be trained again.
        """
        (record, rows), tags = identify(table, spec, self._key), row_tags(table, self._key)
        with self._memory.reading() as db:
            version = _Version(db, record, rows, None)
            by_any, by_all = np.zeros(table.n_rows, dtype=np.bool_), np.ones(table.n_rows, dtype=np.bool_)
            for data in _released(db):
                had = version.had(data, tags)
                if had is not None:
                    by_any, by_all = by_any | had, by_all & had
            base = None if replaces is None else _base(db, replaces, spec.name)
            by_base = None if base is None else version.had(base, tags)
        return Used(by_any, by_all, by_base)

    def trained_on(self, table: Table, spec: DataSet, job_id: str, name: str) -> bool | None:
        """Return whether a table holds the very rows that a complete job of this site trained on; None if unknown.

        Args:
            spec: where the table was read. name: of the job's data set.
        """
        fresh, _ = identify(table, spec, self._key)
        of_job = (
            "SELECT fingerprint FROM runs JOIN terms ON terms.id = terms JOIN data_versions ON data_versions.id = data "
            "WHERE (job_id, name, state) = (?, ?, 'complete')"
        )
        with self._memory.reading() as db:
            found = {fingerprint for (fingerprint,) in db.execute(of_job, (job_id, name))}
        return fresh.fingerprint in found if found else None

    def grown(self, run: Reservation, *, is_enough: bool) -> None:
        """Settle a run once the sites have counted added rows; before anything else of rows leaves.

        Args:
            is_enough: what all sites have found alike.

        Raises:
            DataRefusal: there are too few, and this site's rows are among those that grew.
            PolicyRefusal: there are too few for another site; or another job has settled persons to forget meanwhile.
        """
        if not is_enough:
            raise run.refusal or PolicyRefusal(
                "too few rows were added since earlier jobs, or are to be forgotten, or at too few sites, for a site "
                "that trained on an earlier version of its rows and does not consent. Policy key: "
                f"consents.recompute_with_changes. Remedy: wait until at least {ADDED_SITES} sites have added (or "
                f"forget) {ADDED_ROWS} rows together, train on the unchanged rows, or ask that site to consent."
            )
        with self._memory.transaction() as db:
            queue = Queue.read(db, data_of(db, run_of(db, run.run).terms.data).name)
            if queue.settled_beside(run.run) != run.n_settled:
                raise PolicyRefusal(BEGUN)
            forget_unchecked(db, run.run)

    def secret(self, purpose: str, *facts: str) -> bytes:
        """Return 32 secret bytes of this site, the same in every job that names the same facts.

        Security: derived from this registry's key, which comes from the operating system and never leaves the site.
        """
        return derive_key(self._key, b"", f"registry: {purpose}", *facts)

    def plan_cuts(self, run: Reservation, features: Sequence[str], settings: bytes) -> CutPlan:
        """Return the cuts to reuse and the features to search, and record the search before it starts.

        One search per column and site set: the counts of a second search with other settings could be subtracted
        from those of the first. All sites of a job hold the same history unless one lost its registry: compare
        ``to_search`` with the peers.

        Args:
            run: the reserved run.
            features: the columns of the run.
            settings: what fixes the search (bins, least rows per cut, method), canonical.

        Raises:
            DataRefusal: a column was searched before with other settings, and the policy has no consent.
        """
        with self._memory.transaction() as db:
            terms = run_of(db, run.run).terms
            record = data_of(db, terms.data)
            known: dict[str, NDArray[np.float32]] = {}
            for feature in features:
                found = earlier_searches(db, terms.sites, record.n_rows, feature, record.columns[feature])
                same = [cuts for with_settings, cuts in found if with_settings == _digest(settings)]
                if found and not same and not self._consents.gives("second_quantile_search"):
                    raise self._refusal(
                        "consents.second_quantile_search",
                        f"was searched for quantiles of column {feature!r} before, with other settings",
                        "use the earlier number of bins and rows per cut",
                    )
                kept = [cuts for cuts in same if cuts is not None]
                if kept:
                    known[feature] = load_array(db, kept[-1], "<f4")
            to_search = tuple(feature for feature in features if feature not in known)
            if to_search:
                columns = {feature: record.columns[feature] for feature in to_search}
                add_search(db, run.run, terms.sites, _digest(settings), record.n_rows, columns)
        return CutPlan(known, to_search)

    def save_cuts(self, run: Reservation, cuts: Mapping[str, NDArray[np.float32]]) -> None:
        """Keep the cuts that this run's search agreed on.

        Args:
            run: the reserved run.
            cuts: exactly the features that ``plan_cuts`` gave to search -> float32[n].

        Raises:
            ValueError: other features than planned.
        """
        with self._memory.transaction() as db:
            search, columns = last_search_of(db, run.run)
            if search is None or set(cuts) != columns:
                raise ValueError("cuts must hold exactly the features of this run's planned search")
            for feature, found in cuts.items():
                kept = store_array(db, np.asarray(found, dtype="<f4"))
                key = (kept, search, feature)
                db.execute("UPDATE searched_columns SET cuts = ? WHERE (search, feature) = (?, ?)", key)

    def trees_complete(self, run: Reservation, n_trees: int) -> None:
        """Record a checkpoint: a lost job may resume from here (one durable write: call it per checkpoint)."""
        self._update(run, n_trees, "reserved")

    def complete(self, run: Reservation, n_trees: int) -> None:
        """Record that the run ended well."""
        self._update(run, n_trees, "complete")

    def complete_job(self, job_id: str) -> None:
        """Record that all runs of a job ended well, with as many trees as its last checkpoint has."""
        with self._memory.transaction() as db:
            db.execute("UPDATE runs SET state = 'complete' WHERE job_id = ?", (job_id,))

    def cancel(self, run: Reservation) -> None:
        """Take a reservation back; only for a run that sent nothing private.

        A resumed run stays: it stands for trees that the job before it has released. So does one of several attempts.

        Raises:
            ValueError: the run has recorded a release (a search or a tree).
        """
        if run.verdict is Verdict.RESUMED or run.is_again:
            return
        with self._memory.transaction() as db:
            this = run_of(db, run.run)
            if this.trees or this.state != "reserved" or last_search_of(db, run.run)[0] is not None:
                raise ValueError("a run that released something cannot be cancelled")
            db.execute("DELETE FROM runs WHERE id = ?", (run.run,))
            forget_unchecked(db, run.run)

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs, the oldest first, as values for programs."""
        with self._memory.reading() as db:
            rows = [_run(row) for row in db.execute(f"{_RUN} ORDER BY runs.id")]
            data = {number: data_of(db, number) for number in {run.terms.data for run in rows}}
            queues = {name: Queue.read(db, name) for name in {of.name for of in data.values()}}
        replaced = {
            (name, batch.replaces): batch.job
            for name, queue in queues.items()
            for batch in queue.batches
            if batch.state is Standing.FORGOTTEN
        }
        return [
            {
                "started": run.started,
                "job": run.job_id,
                "state": str(run.state),
                "trees": run.trees,
                "data_set": of.name,
                "rows": of.n_rows,
                "data": of.fingerprint,
                "sites": list(run.terms.sites),
                "replaced_by": replaced.get((of.name, run.job_id)),
            }
            for run in rows
            for of in [data[run.terms.data]]
        ]

    def describe(self) -> str:
        """Return the registry as a table that a person can read."""
        runs = self.runs()
        with self._memory.reading() as db:
            (n_searches,) = db.execute("SELECT COUNT(*) FROM searches").fetchone()
        lines = [f"{'started':<20} {'data set':<16} {'rows':>9} {'data':<8} {'state':<9} {'trees':>5}  sites, job"]
        for run in runs:
            lines.append(
                f"{run['started']:<20} {fitted(run['data_set'], 16)} {run['rows']:>9} {run['data'][:8]:<8} "
                f"{run['state']:<9} {run['trees']:>5}  {', '.join(run['sites'])}, {run['job']}"
                + (f"; forgotten: job {run['replaced_by']} replaces it" if run["replaced_by"] else "")
            )
        searches = counted(n_searches, "quantile search", "quantile searches")
        n_versions = len({(run["data_set"], run["data"]) for run in runs})
        lines.append(f"{counted(len(runs), 'run')}, {searches}, {counted(n_versions, 'version')} of data sets.")
        return "\n".join(lines)

    def _judge(
        self, fresh: Terms, version: _Version, own: tuple[int, ...], *, may_grow: bool, forgets: ToForget | None = None
    ) -> _Judged:
        verdict, message = Verdict.NEW, "no earlier run of this site concerns these rows."
        concerned: list[Terms] = []
        changed: list[tuple[Terms, str]] = []
        relations: dict[int, Relation] = {}
        for terms, job_id in earlier_terms(version.db, fresh.parameters, own):
            if terms.data not in relations:
                relations[terms.data] = version.relation(terms.data)
            relation = relations[terms.data]
            if relation is Relation.UNRELATED:
                continue
            concerned.append(terms)
            if relation is Relation.SAME and terms.sites == fresh.sites and not _is_redrawn(terms, fresh):
                verdict, message = _of_same_rows(verdict, message, terms, fresh, job_id)
                continue
            if may_grow and relation is Relation.CHANGED and (terms.sites, terms.draw) == (fresh.sites, fresh.draw):
                changed.append((terms, job_id))
                continue
            self._allow_difference(terms, job_id, relation, fresh, forgets)
            verdict = Verdict.CONSENTED
            message = f"differs from job {job_id} by its sites or rows; this site's policy consents."
        if verdict is Verdict.CONSENTED or not concerned:
            return _Judged(verdict, message)
        if forgets is not None and may_grow:
            return self._judge_forgetting(fresh, version, concerned, forgets, _Judged(verdict, message))
        return self._judge_growth(fresh, version, concerned, *changed[0]) if changed else _Judged(verdict, message)

    def _allow_difference(
        self, earlier: Terms, job_id: str, relation: Relation, fresh: Terms, forgets: ToForget | None
    ) -> None:
        """Allow other rows or sites by a consent; that a job which forgets lacks a site has one of its own.

        Raises:
            DataRefusal: there is none.
        """
        is_site = relation is Relation.SAME and set(fresh.sites) < set(earlier.sites)
        may_lack = forgets is not None and forgets.may_lack_sites and not _is_redrawn(earlier, fresh)
        if not (is_site and may_lack and self._consents.gives("continue_without_site")):
            self._refuse_difference(earlier, job_id, relation, fresh)

    def _judge_growth(
        self, fresh: Terms, version: _Version, concerned: Sequence[Terms], terms: Terms, job_id: str
    ) -> _Judged:
        """Tell added rows from changed ones; these are refused as ever. Args: terms, job_id: of those that changed."""
        n_added = version.added_since(concerned)
        if n_added is None:
            self._refuse_difference(terms, job_id, Relation.CHANGED, fresh)
            text = f"differs from job {job_id} by its sites or rows; this site's policy consents."
            return _Judged(Verdict.CONSENTED, text)
        text = f"holds the rows of job {job_id} and others, which were counted together with those of the other sites."
        refusal = self._refusal(
            "consents.recompute_with_changes",
            f"trained on an earlier version of these rows in job {job_id}, and the rows that the sites have added "
            "since are too few, or of too few sites: the difference of both runs would show them",
            f"wait until at least {ADDED_SITES} sites have added {ADDED_ROWS} rows together, or train on the unchanged "
            "rows",
        )
        return _Judged(Verdict.GROWN, text, n_added, refusal)

    def _judge_forgetting(
        self, fresh: Terms, version: _Version, concerned: Sequence[Terms], forgets: ToForget, same: _Judged
    ) -> _Judged:
        """Count the rows that a run leaves out, and those that stay; it may leave out nothing else.

        Args:
            same: what is said where none of this site's rows is left out.
        """
        job_id, split = forgets.replaces, version.parted(concerned, forgets)
        if split is None:
            self._refuse_difference(fresh, job_id, Relation.CHANGED, fresh)
            text = f"differs from job {job_id} by more than rows to forget; this site's policy consents."
            return _Judged(Verdict.CONSENTED, text)
        if not split.gone.size and same.verdict is not Verdict.NEW:
            return _Judged(same.verdict, same.message, split=split)
        text = f"is job {job_id} without rows to forget, which were counted together with those of the other sites."
        refusal = self._refusal(
            "consents.recompute_with_changes",
            f"would train again without rows that job {job_id} had, and the rows that the sites forget, or those that "
            "are left, are too few, or of too few sites: the difference of both runs would show them",
            f"wait until at least {ADDED_SITES} sites forget {ADDED_ROWS} rows together (veilboost forget status), and "
            "as many are left",
        )
        return _Judged(Verdict.SHRUNK, text, split.gone.size, refusal, split)

    def _check_new(self, version: _Version, continues: Sequence[str]) -> None:
        """Refuse rows that belong to the jobs whose model is continued. Raises: DataRefusal."""
        for job_id in continues:
            trained_on = (
                "SELECT data FROM runs JOIN terms ON terms.id = terms WHERE job_id = ? ORDER BY runs.id LIMIT 1"
            )
            (data,) = version.db.execute(trained_on, (job_id,)).fetchone() or (None,)  # the one that it named first
            if data is not None and version.relation(data) is not Relation.UNRELATED:
                name, n_alike = version.record.name, version.overlap(data)
                raise DataRefusal(
                    f"{self._site} trained on rows of data set {name!r} in job {job_id}, whose model this job "
                    f"continues (continue_from), which is for new rows only; alike in all columns: {n_alike} of "
                    f"{version.rows.size} (in the id too, where both versions have one). Policy key: data_sets.{name}."
                    "id. Remedy: new rows in a data set and a file of their own, without those that are alike by "
                    "chance; or, from the first job on, a column that names the rows, by which they are told apart; or "
                    "train on all rows without continue_from.",
                    REGISTRY_TEXT,
                )

    def _refuse_difference(self, earlier: Terms, job_id: str, relation: Relation, fresh: Terms) -> None:
        if self._consents.gives("recompute_with_changes"):
            return
        if relation is Relation.SAME:
            changed = sorted(set(earlier.sites) ^ set(fresh.sites))
            what = f"trained on these rows in job {job_id} with another site set (difference: {', '.join(changed)})"
            remedy = "train with the same sites"
            if not changed:
                what = f"trained on these rows in job {job_id} with other weights or another sample of the rows"
                remedy = f"train with the same weight and subsample ({earlier.draw or 'neither'})"
        else:
            what = f"trained on an earlier version of these rows in job {job_id}"
            remedy = (
                "train on the unchanged rows, or on all of them with rows added; other people's rows need a data set "
                "name and a file of their own"
            )
        raise self._refusal(
            "consents.recompute_with_changes", f"{what}: the difference of both runs would show the change", remedy
        )

    def _check_resume(
        self, db: sqlite3.Connection, fresh: Terms, record: DataRecord, resume: ResumePoint
    ) -> tuple[Verdict, str]:
        """Allow to continue an interrupted job with the same rows, sites and parameters only.

        Trees between the shared checkpoint and the last tree of the interrupted job are computed again from the same
        rows by the same sites, which is no new release.
        """
        last_of_job = f"{_RUN} WHERE job_id = ? AND name = ? ORDER BY runs.id DESC LIMIT 1"
        found = db.execute(last_of_job, (resume.job_id, record.name)).fetchone()
        if found is None:
            raise ConfigurationError(
                f"{self._site} has no record of a job {resume.job_id} on data set {record.name!r}."
            )
        last = _run(found)
        if last.state == "complete":
            raise ConfigurationError(
                f"job {resume.job_id} is complete: continue from its model instead (initial_model)."
            )
        for what, mine, theirs in (
            ("site set", fresh.sites, tuple(site for site in last.terms.sites if site not in resume.lost)),
            (_ROWS, fresh.fingerprint, last.terms.fingerprint),
            ("parameters", fresh.parameters, last.terms.parameters),
        ):
            if mine != theirs:
                text = f"{self._site}: job {resume.job_id} cannot be resumed with another {what}; start a new job."
                raise DataRefusal(text, REGISTRY_TEXT) if what == _ROWS else PolicyRefusal(text)
        if not 0 <= resume.trees <= last.trees:
            raise ConfigurationError(
                f"{self._site}: job {resume.job_id} left {last.trees} complete trees here, so it cannot be resumed "
                f"after {resume.trees}."
            )
        return Verdict.RESUMED, f"continues job {resume.job_id} after {resume.trees} trees."

    def _update(self, run: Reservation, trees: int, state: str) -> None:
        with self._memory.transaction() as db:
            run_of(db, run.run)
            db.execute("UPDATE runs SET trees = ?, state = ? WHERE id = ?", (trees, state, run.run))

    def _refusal(self, key: str, what: str, remedy: str) -> DataRefusal:
        # Whether data count as changed depends on every row, as a job reads it.
        return DataRefusal(
            f"{self._site} {what}. Policy key: {key}. Remedy: {remedy}, or let this site consent.", REGISTRY_TEXT
        )


def _released(db: sqlite3.Connection) -> list[int]:
    """Return the numbers of all versions over which a run has released something."""
    unchecked = _unchecked(db)
    rows = db.execute("SELECT data, runs.id FROM runs JOIN terms ON terms.id = terms").fetchall()
    return sorted({data for data, run in rows if run not in unchecked})


def _base(db: sqlite3.Connection, job_id: str, data_set: str) -> int | None:
    """Return the version of a data set that a complete job trained on."""
    of_job = (
        "SELECT data FROM runs JOIN terms ON terms.id = terms JOIN data_versions ON data_versions.id = data "
        "WHERE (job_id, name, state) = (?, ?, 'complete') ORDER BY runs.id DESC LIMIT 1"
    )
    found = db.execute(of_job, (job_id, data_set)).fetchone()
    return None if found is None else int(found[0])


def _of_same_rows(verdict: Verdict, message: str, terms: Terms, fresh: Terms, job_id: str) -> tuple[Verdict, str]:
    """Return what a run on the same rows with the same sites makes of the verdict so far."""
    if verdict is Verdict.CONSENTED:
        return verdict, message
    if terms.parameters == fresh.parameters and terms.fingerprint == fresh.fingerprint:
        return Verdict.IDENTICAL, f"repeats job {job_id} (same data, sites and parameters): the same release."
    if verdict is Verdict.NEW:
        return Verdict.OTHER_PARAMETERS, f"same rows and sites as job {job_id}, other parameters or columns."
    return verdict, message


def _is_redrawn(earlier: Terms, fresh: Terms) -> bool:
    """Tell whether a run takes other rows, or weighs them otherwise, than an earlier one over the same rows."""
    if earlier.fingerprint == fresh.fingerprint:
        # The same parameters are the same draw, also where the earlier record knows none.
        return earlier.draw != fresh.draw and earlier.parameters != fresh.parameters
    # Rows are drawn by what they hold in the job's columns: other columns draw other rows.
    return earlier.draw != fresh.draw or fresh.draw.startswith("subsample ")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# The tables as values: versions of data sets, runs over them, quantile searches.


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run releases about: the same terms are the same release.

    Attributes:
        data: number of the version of the data set.
        fingerprint: of its rows.
        sites: in order.
        parameters: hash of the agreed parameters.
        draw: which of the rows took part and how much, see ``registry.describe_draw``.
    """

    data: int
    fingerprint: str
    sites: tuple[str, ...]
    parameters: str
    draw: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: ``state`` is "reserved" from the reservation on, and "complete" at the end."""

    number: int
    job_id: str
    terms: Terms
    started: str
    state: str = "reserved"
    trees: int = 0


_RUN = (
    "SELECT runs.id, job_id, data, fingerprint, sites, parameters, draw, started, state, trees FROM runs "
    "JOIN terms ON terms.id = terms JOIN data_versions ON data_versions.id = data "
)


def add_data(db: sqlite3.Connection, record: DataRecord, rows: NDArray[np.uint64]) -> int:
    """Remember a version of a data set with the hashes of its rows, once; return its number."""
    key = (record.fingerprint, record.name, record.source)
    same_rows = db.execute("SELECT row_hashes FROM data_versions WHERE fingerprint = ?", key[:1]).fetchone()
    found = db.execute("SELECT id FROM data_versions WHERE (fingerprint, name, source) = (?, ?, ?)", key).fetchone()
    if found is not None:
        return int(found[0])
    stored = store_array(db, rows) if same_rows is None else same_rows[0]
    names = json.dumps(dict(record.columns)), json.dumps(record.identifying)
    return insert(
        db,
        "INSERT INTO data_versions (fingerprint, name, source, n_rows, columns, identifying, row_hashes) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*key, record.n_rows, *names, stored),
    )


def data_of(db: sqlite3.Connection, data: int) -> DataRecord:
    """Return a version of a data set by its number."""
    row = db.execute(
        "SELECT fingerprint, name, source, n_rows, columns, identifying FROM data_versions WHERE id = ?", (data,)
    ).fetchone()
    fingerprint, name, source, n_rows, columns, identifying = row
    return DataRecord(fingerprint, name, source, n_rows, json.loads(columns), tuple(json.loads(identifying)))


def rows_of(db: sqlite3.Connection, data: int) -> NDArray[np.uint64]:
    """Return the hashes of a version's rows, sorted. Raises: DamagedArray."""
    number, n_rows = db.execute("SELECT row_hashes, n_rows FROM data_versions WHERE id = ?", (data,)).fetchone()
    return load_array(db, number, "<u8", n_rows)


def runs_under(db: sqlite3.Connection, terms: Terms) -> set[int]:
    """Return the numbers of all runs over a version of a data set, evaluations too, among the same sites and draws."""
    key = (terms.data, json.dumps(terms.sites), terms.draw)
    all_runs = "SELECT runs.id FROM runs JOIN terms ON terms.id = terms"
    found = db.execute(f"{all_runs} WHERE (data, sites, draw) = (?, ?, ?)", key)
    return {number for (number,) in found}


def add_run(db: sqlite3.Connection, job_id: str, terms: Terms, started: str, trees: int) -> int:
    """Remember a run; return its number."""
    key = (terms.data, json.dumps(terms.sites), terms.parameters, terms.draw)
    db.execute("INSERT OR IGNORE INTO terms (data, sites, parameters, draw) VALUES (?, ?, ?, ?)", key)
    found = db.execute("SELECT id FROM terms WHERE (data, sites, parameters, draw) = (?, ?, ?, ?)", key).fetchone()
    run = (job_id, *found, started, trees)
    return insert(db, "INSERT INTO runs (job_id, terms, started, state, trees) VALUES (?, ?, ?, 'reserved', ?)", run)


def _reserved(db: sqlite3.Connection, job_id: str, terms: Terms, beside: tuple[int, ...]) -> int | None:
    """Return the run that an earlier attempt of a job has reserved under these very terms, and not begun to train."""
    key = (job_id, terms.data, json.dumps(terms.sites), terms.parameters, terms.draw)
    of_job = (
        "SELECT runs.id FROM runs INDEXED BY runs_by_job JOIN terms ON terms.id = terms "
        "WHERE (job_id, data, sites, parameters, draw) = (?, ?, ?, ?, ?) "
        "AND (state, trees) = ('reserved', 0) ORDER BY runs.id DESC"
    )
    return next((int(run) for (run,) in db.execute(of_job, key) if run not in beside), None)


def run_of(db: sqlite3.Connection, number: int) -> Run:
    """Return a run. Raises: ValueError: it is not there."""
    row = db.execute(f"{_RUN} WHERE runs.id = ?", (number,)).fetchone()
    if row is None:
        raise ValueError("the run is not in the registry (was it cancelled?)")
    return _run(row)


# Columns that stand beside MIN are those of the row that has it: SQLite says so.
_EARLIER_TERMS = """
SELECT data, fingerprint, sites, parameters, draw, job_id, MIN(first) AS oldest
FROM (
    SELECT terms.*, (
        SELECT id FROM runs WHERE terms = terms.id AND NOT instr(?, ',' || id || ',') ORDER BY id LIMIT 1
    ) AS first FROM terms
)
JOIN runs ON runs.id = first
JOIN data_versions ON data_versions.id = data
GROUP BY data, sites, draw, parameters = ?
ORDER BY oldest
"""


def earlier_terms(db: sqlite3.Connection, parameters: str, without: tuple[int, ...]) -> list[tuple[Terms, str]]:
    """Return under which terms runs took place, the oldest first, each with the job that was the first.

    Args:
        parameters: of all other parameters one stands for the rest, as none of them are these.
        without: numbers of runs that do not count.
    """
    listed = f",{','.join(map(str, without))},"
    return [(_terms(row[:5]), row[5]) for row in db.execute(_EARLIER_TERMS, (listed, parameters))]


def add_search(
    db: sqlite3.Connection,
    run: int | None,
    sites: tuple[str, ...],
    settings: str,
    n_rows: int,
    columns: Mapping[str, str],
) -> int:
    """Remember a quantile search over columns (name -> keyed hash) before it starts; return its number."""
    search = (run, json.dumps(sites), settings, n_rows)
    number = insert(db, "INSERT INTO searches (run, sites, settings, n_rows) VALUES (?, ?, ?, ?)", search)
    columns_of = [(number, feature, digest) for feature, digest in columns.items()]
    db.executemany("INSERT INTO searched_columns (search, feature, hash) VALUES (?, ?, ?)", columns_of)
    return number


def last_search_of(db: sqlite3.Connection, run: int) -> tuple[int | None, set[str]]:
    """Return the number and the columns of a run's last search; None if it planned none."""
    (search,) = db.execute("SELECT MAX(id) FROM searches WHERE run = ?", (run,)).fetchone()
    columns = db.execute("SELECT feature FROM searched_columns WHERE search = ?", (search,))
    return search, {feature for (feature,) in columns}


def earlier_searches(
    db: sqlite3.Connection, sites: tuple[str, ...], n_rows: int, feature: str, digest: str
) -> list[tuple[str, int | None]]:
    """Return the settings of all searches of a column among these sites, and the array of the cuts of each."""
    rows = db.execute(
        "SELECT settings, cuts FROM searched_columns JOIN searches ON searches.id = search "
        "WHERE (hash, feature, sites, n_rows) = (?, ?, ?, ?) ORDER BY search",
        (digest, feature, json.dumps(sites), n_rows),
    )
    return list(rows)


def _run(row: tuple[Any, ...]) -> Run:
    return Run(row[0], row[1], _terms(row[2:7]), *row[7:])


def _terms(row: tuple[Any, ...]) -> Terms:
    return Terms(row[0], row[1], tuple(json.loads(row[2])), *row[3:])


# Training again with added rows: how many rows of a data set no earlier job has used, and which runs were checked.
#
# The difference of two runs is the sum over the rows that only one of them had. Where a data set has only grown, and
# with it those of the other sites, all such differences together tell no more than the sums over the rows that each job
# was the first to use, be it for metrics: every earlier set is a sum of them. So a job may go on without a consent
# where these rows are as many, and of as many sites, as a job of their own would need (``horizontal.added_rows``). A
# row that went, or whose value changed, is another matter: of four large sets, each of which differs from the others by
# many rows, one row can remain.
#
# A run that is reserved and has not passed the count of its rows, added or not, has released nothing of them. Should it
# be broken off there, they are still added rows for the next job: the memory keeps the numbers of such runs until they
# have passed. Otherwise a job on one new row in a file of its own, broken off, would let that row join the earlier
# ones.
#
# Privacy: purely local; hashes of rows, and numbers of runs.


_ALL = ""  # numbers of runs belong to no data set


def count_added(
    rows: NDArray[np.uint64], earlier: Iterable[NDArray[np.uint64]], released: Iterable[NDArray[np.uint64]]
) -> int | None:
    """Return how many rows are in no released version; None where an earlier version has a row that is not here.

    Rows that are alike count as often as they stand there.

    Shapes: all: uint64[n_rows], hashes of rows.
    """
    keys, counts = np.unique(rows, return_counts=True)
    for version in earlier:
        places, times = _placed(keys, version)
        if places is None or (times > counts[places]).any():
            return None
    used = np.zeros_like(counts)
    for version in released:
        places, times = _placed(keys, version)
        if places is not None:
            used[places] = np.maximum(used[places], times)
    return int((counts - used).sum())


def _unchecked(db: sqlite3.Connection) -> set[int]:
    """Return the runs that have not passed the count of their rows."""
    return set(load_counts(db, UNCHECKED, _ALL)["runs"].tolist())


def note_unchecked(db: sqlite3.Connection, run: int) -> None:
    """Remember that a run has not passed the count of its rows."""
    found = load_counts(db, UNCHECKED, _ALL)["runs"]
    save_counts(db, UNCHECKED, _ALL, {"runs": np.append(found, np.int64(run))})


def forget_unchecked(db: sqlite3.Connection, run: int) -> None:
    """Remember that a run has passed, or is remembered no longer."""
    found = load_counts(db, UNCHECKED, _ALL)["runs"]
    if (found == run).any():
        save_counts(db, UNCHECKED, _ALL, {"runs": found[found != run]})


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    """A data set as a run reads it, beside earlier versions, which go by their numbers.

    Shapes: rows, named (None: not all rows have ids): uint64[n_rows], sorted.
    """

    db: sqlite3.Connection
    record: DataRecord
    rows: NDArray[np.uint64]
    named: NDArray[np.uint64] | None

    def relation(self, earlier: int) -> Relation:
        """Return how it relates to an earlier one."""
        record, other = self.record, data_of(self.db, earlier)
        has_same_columns = set(record.columns) == set(other.columns) and record.fingerprint != other.fingerprint
        return record.relation(other, self.overlap(earlier) if has_same_columns else 0)

    def overlap(self, earlier: int) -> int:
        """Return how many rows both share, if of the same columns: by their ids too, where all have one."""
        n_alike = overlap_of(self.rows, rows_of(self.db, earlier))
        named = load_counts(self.db, NAMED_ROWS, str(earlier))["keys"]  # none where not every row had an id
        return overlap_of(self.named, named) if n_alike and named.size and self.named is not None else n_alike

    def had(self, earlier: int, tags: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
        """Return which rows an earlier one has; None where it is about others. Shapes: tags, result: [n_rows]."""
        relation = self.relation(earlier)
        if relation is Relation.UNRELATED:
            return None
        comparable = None if relation is Relation.SAME else self._rows_of(earlier)
        if comparable is None:  # of other columns that have changed nothing is known
            return np.full(tags.size, relation is Relation.SAME)
        return np.isin(tags, comparable)

    def added_since(self, earlier: Sequence[Terms]) -> int | None:
        """Return how many rows no earlier job has used; None where that cannot be told, or rows went.

        Args:
            earlier: of all earlier runs that concern these rows, among the same sites.
        """
        unchecked = _unchecked(self.db)
        forgotten = Queue.read(self.db, self.record.name).rows_in(Standing.FORGOTTEN)  # in batches that were counted
        all_of, released = [], []
        for terms in earlier:
            comparable = self._rows_of(terms.data)
            if comparable is None:
                return None
            version = without(comparable, forgotten)
            all_of.append(version)
            if not runs_under(self.db, terms) <= unchecked:
                released.append(version)
        return count_added(self.rows, all_of, released)

    def parted(self, earlier: Sequence[Terms], forgets: ToForget) -> Split | None:
        """Return how a run that forgets divides earlier rows; None where that cannot be told, or is not one class.

        Args:
            earlier: as of ``added_since``.
        """
        base, unchecked = _base(self.db, forgets.replaces, self.record.name), _unchecked(self.db)
        versions = [base, *(terms.data for terms in earlier if not runs_under(self.db, terms) <= unchecked)]
        known = []
        for version in dict.fromkeys(versions):
            comparable = None if version is None else self._rows_of(version)
            if comparable is None:
                return None
            known.append(comparable)
        queue = Queue.read(self.db, self.record.name)
        forgotten, leaving = queue.rows_in(Standing.FORGOTTEN), queue.rows_in(Standing.LEAVING)
        return split_of(self.rows, known[0], known[1:], forgotten, leaving)

    def gone(self, forgets: ToForget, queue: Queue) -> NDArray[np.uint64]:
        """Return the rows that a run leaves out where they were not counted, because this site consents."""
        base = _base(self.db, forgets.replaces, self.record.name)
        comparable = None if base is None else self._rows_of(base)
        if comparable is None:
            return np.empty(0, dtype="<u8")
        return without(without(comparable, self.rows), queue.rows_in(Standing.FORGOTTEN))

    def _rows_of(self, earlier: int) -> NDArray[np.uint64] | None:
        """Return an earlier one's rows, hashed whole, so under these columns: of itself, or of one of the same rows."""
        version, known = (
            data_of(self.db, earlier),
            self.db.execute("SELECT id FROM data_versions ORDER BY id").fetchall(),
        )
        for number in (earlier, *(int(found) for (found,) in known)):
            other = data_of(self.db, number)
            if set(other.columns) == set(self.record.columns) and other.relation(version, 0) is Relation.SAME:
                return rows_of(self.db, number)
        return None


def _placed(
    keys: NDArray[np.uint64], version: NDArray[np.uint64]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """Return where the distinct rows of a version stand among ``keys``, and how often each is in it."""
    theirs, times = np.unique(version, return_counts=True)
    places = np.searchsorted(keys, theirs)
    if (places == keys.size).any() or (keys[places] != theirs).any():
        return None, times
    return places, times
