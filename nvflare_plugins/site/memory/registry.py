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
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.key_agreement import derive_key
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.base.failures import REGISTRY_TEXT, DataRefusal
from nvflare_plugins.base.formatting import counted, fitted
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import DataRecord, Relation, identify, named_rows, overlap_of
from nvflare_plugins.data.table import Table
from nvflare_plugins.site.memory import runs
from nvflare_plugins.site.memory.released import added_since, forget_unchecked, note_unchecked
from nvflare_plugins.site.memory.runs import Terms
from nvflare_plugins.site.memory.schema import load_array
from nvflare_plugins.site.memory.store import KEY_BYTES, Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.policy_values import Consents

_ROWS = "rows or columns"
ADDED_SITES, ADDED_ROWS = 3, 1000
"""How many sites must have added rows since earlier runs, and how many in all, for training again without consents."""


def describe_draw(fraction: float = 1.0, weight: str | None = None) -> str:
    """Return which of the rows a run trains on and how much each counts, for ``Registry.reserve``.

    Args:
        fraction: of the rows that each round draws.
        weight: column of weights.
    """
    return ", ".join([f"subsample {fraction!r}"] * (fraction < 1) + [f"weight {weight!r}"] * (weight is not None))


class Verdict(Enum):
    """Why a run may take place."""

    NEW = "new data"
    IDENTICAL = "the same run again: the same release"
    OTHER_PARAMETERS = "the same data and sites with other parameters"
    RESUMED = "resumed"
    GROWN = "added rows, if the sites' counts of them together allow it"
    CONSENTED = "another site set or changed rows, with this site's consent"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A run that may send: its number in the site's memory; ``message`` is for the log and the report.

    Attributes:
        n_added: rows that no earlier job has used, where the verdict is ``GROWN``.
        refusal: what ends such a run where the sites' counts do not allow it.
    """

    run: int
    verdict: Verdict
    message: str
    n_added: int = 0
    refusal: DataRefusal | None = None


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


@dataclass(frozen=True, slots=True, eq=False)
class _Version:
    """A data set as a run reads it. Shapes: rows, named (None: not all rows have ids): uint64[n_rows], sorted."""

    record: DataRecord
    rows: NDArray[np.uint64]
    named: NDArray[np.uint64] | None


class Registry:
    """The registry of one site.

    Privacy: purely local. Holds no row, value or sum except the agreed cuts, which are in every model anyway.
    """

    def __init__(self, memory: Memory, consents: Consents, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._memory, self._site, self._consents = memory, memory.site, consents
        self._key = memory.secret("registry", randomness.bytes(KEY_BYTES))

    @classmethod
    def open(cls, policy: SitePolicy) -> Registry:
        """Open the registry of the site whose policy this is."""
        return cls(Memory.open(policy), policy.consents)

    def reserve(
        self,
        table: Table,
        spec: DataSet,
        *,
        job_id: str,
        sites: Sequence[str],
        parameters: bytes,
        resume: ResumePoint | None = None,
        beside: Sequence[Reservation] = (),
        ids: Sequence[bytes] | None = None,
        draw: str = "",
        may_grow: bool = False,
        is_settled: bool = False,
        continues: Sequence[str] = (),
    ) -> Reservation:
        """Decide whether a run may take place and, if so, record it durably.

        Args:
            table: the rows of the run.
            spec: the data set they come from.
            job_id: FLARE's job id.
            sites: the data-bearing sites of the job.
            parameters: the agreed canonical document of the job, without rounds, ids and resumption; kept as a hash.
            resume: the interrupted job to continue; None for a fresh start.
            beside: reservations of the same job for its other data sets, with which it is not compared.
            ids: what names the rows, where something does: rows of few columns are alike by chance.
            draw: see ``describe_draw``. Another one is a change of the rows.
            may_grow: the job has the sites count the rows that were added since earlier runs, before anything else of
                rows leaves.
            is_settled: the job calls ``grown`` or ``cancel`` once its rows have been counted; as one with ``may_grow``.
            continues: jobs whose model the run continues: it must be about none of their rows.

        Raises:
            DataRefusal: the run would recompute a released quantity with another site set or changed rows.
            ConfigurationError: there is no such interrupted job or checkpoint, or the site's memory is damaged.
        """
        version = _Version(*identify(table, spec, self._key, ids), named_rows(table, spec, self._key))
        record = version.record
        with self._memory.transaction() as db:
            data = runs.add_data(db, record, version.rows)
            if version.named is not None:
                runs.add_named_rows(db, data, version.named)
            terms = Terms(data, record.fingerprint, tuple(sorted(sites)), _digest(parameters), draw)
            n_added, refusal = 0, None
            if resume is None:
                own = tuple(reservation.run for reservation in beside)
                self._check_new(db, version, continues)
                verdict, message, grown = self._judge(db, terms, version, own, may_grow)
                if grown is not None:
                    n_added, refusal = grown
            else:
                verdict, message = self._check_resume(db, terms, record, resume)
                if resume.lost:
                    self._judge(db, terms, version, runs.of_job(db, resume.job_id), may_grow=False)
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            run = runs.add_run(db, job_id, terms, now, 0 if resume is None else resume.trees)
            if resume is None and (may_grow or is_settled):
                note_unchecked(db, run)
        return Reservation(run, verdict, message, n_added, refusal)

    def grown(self, run: Reservation, is_enough: bool) -> None:
        """Settle a run once the sites have counted added rows; before anything else of rows leaves.

        Args:
            is_enough: what all sites have found alike.

        Raises:
            DataRefusal: there are too few, and this site's rows are among those that grew.
            PolicyRefusal: there are too few for another site.
        """
        if not is_enough:
            raise run.refusal or PolicyRefusal(
                "too few rows were added since earlier jobs, or at too few sites, for a site that trained on an "
                "earlier version of its rows and does not consent. Policy key: consents.recompute_with_changes. "
                f"Remedy: wait until at least {ADDED_SITES} sites have added {ADDED_ROWS} rows together, train on the "
                "unchanged rows, or ask that site to consent."
            )
        with self._memory.transaction() as db:
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
            terms = runs.run_of(db, run.run).terms
            record = runs.data_of(db, terms.data)
            known: dict[str, NDArray[np.float32]] = {}
            for feature in features:
                found = runs.earlier_searches(db, terms.sites, record.n_rows, feature, record.columns[feature])
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
                runs.add_search(db, run.run, terms.sites, _digest(settings), record.n_rows, columns)
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
            search, columns = runs.last_search_of(db, run.run)
            if search is None or set(cuts) != columns:
                raise ValueError("cuts must hold exactly the features of this run's planned search")
            for feature, found in cuts.items():
                runs.set_cuts(db, search, feature, found)

    def trees_complete(self, run: Reservation, n_trees: int) -> None:
        """Record a checkpoint: a lost job may resume from here (one durable write: call it per checkpoint)."""
        self._update(run, n_trees, "reserved")

    def complete(self, run: Reservation, n_trees: int) -> None:
        """Record that the run ended well."""
        self._update(run, n_trees, "complete")

    def cancel(self, run: Reservation) -> None:
        """Take a reservation back; only for a run that sent nothing private.

        A resumed run stays: it stands for trees that the job before it has released.

        Raises:
            ValueError: the run has recorded a release (a search or a tree).
        """
        if run.verdict is Verdict.RESUMED:
            return
        with self._memory.transaction() as db:
            this = runs.run_of(db, run.run)
            if this.trees or this.state != "reserved" or runs.last_search_of(db, run.run)[0] is not None:
                raise ValueError("a run that released something cannot be cancelled")
            runs.drop_run(db, run.run)
            forget_unchecked(db, run.run)

    def describe(self) -> str:
        """Return the registry as a table that a person can read."""
        with self._memory.reading() as db:
            all_runs = runs.all_runs(db)
            data = {number: runs.data_of(db, number) for number in {run.terms.data for run in all_runs}}
            (n_searches,) = db.execute("SELECT COUNT(*) FROM searches").fetchone()
        lines = [f"{'started':<20} {'data set':<16} {'rows':>9} {'data':<8} {'state':<9} {'trees':>5}  sites, job"]
        for run in all_runs:
            of_run = data[run.terms.data]
            lines.append(
                f"{run.started:<20} {fitted(of_run.name, 16)} {of_run.n_rows:>9} {of_run.fingerprint[:8]:<8} "
                f"{run.state:<9} {run.trees:>5}  {', '.join(run.terms.sites)}, {run.job_id}"
            )
        searches = counted(n_searches, "quantile search", "quantile searches")
        lines.append(f"{counted(len(all_runs), 'run')}, {searches}, {counted(len(data), 'version')} of data sets.")
        return "\n".join(lines)

    def _judge(
        self,
        db: sqlite3.Connection,
        fresh: Terms,
        version: _Version,
        own: tuple[int, ...],
        may_grow: bool,
    ) -> tuple[Verdict, str, tuple[int, DataRefusal] | None]:
        verdict, message = Verdict.NEW, "no earlier run of this site concerns these rows."
        concerned: list[Terms] = []
        changed: list[tuple[Terms, str]] = []
        relations: dict[int, Relation] = {}
        for terms, job_id in runs.earlier_terms(db, fresh.parameters, own):
            if terms.data not in relations:
                relations[terms.data] = _relation(db, version, terms.data)
            relation = relations[terms.data]
            if relation is Relation.UNRELATED:
                continue
            concerned.append(terms)
            if relation is Relation.SAME and terms.sites == fresh.sites and not _is_redrawn(terms, fresh):
                if verdict is Verdict.CONSENTED:
                    continue
                if terms.parameters == fresh.parameters and terms.fingerprint == fresh.fingerprint:
                    verdict = Verdict.IDENTICAL
                    message = f"repeats job {job_id} (same data, sites and parameters): the same release."
                elif verdict is Verdict.NEW:
                    verdict = Verdict.OTHER_PARAMETERS
                    message = f"same rows and sites as job {job_id}, other parameters or columns."
                continue
            if may_grow and relation is Relation.CHANGED and (terms.sites, terms.draw) == (fresh.sites, fresh.draw):
                changed.append((terms, job_id))
                continue
            self._refuse_difference(terms, job_id, relation, fresh)
            verdict = Verdict.CONSENTED
            message = f"differs from job {job_id} by its sites or rows; this site's policy consents."
        if changed and verdict is not Verdict.CONSENTED:
            return self._judge_growth(db, fresh, version, concerned, changed[0])
        return verdict, message, None

    def _judge_growth(
        self,
        db: sqlite3.Connection,
        fresh: Terms,
        version: _Version,
        concerned: Sequence[Terms],
        changed: tuple[Terms, str],
    ) -> tuple[Verdict, str, tuple[int, DataRefusal] | None]:
        """Tell added rows from changed ones; these are refused as ever."""
        terms, job_id = changed
        n_added = added_since(db, version.record, version.rows, concerned)
        if n_added is None:
            self._refuse_difference(terms, job_id, Relation.CHANGED, fresh)
            text = f"differs from job {job_id} by its sites or rows; this site's policy consents."
            return Verdict.CONSENTED, text, None
        text = f"holds the rows of job {job_id} and others, which were counted together with those of the other sites."
        return Verdict.GROWN, text, (n_added, self._too_few_added(job_id))

    def _too_few_added(self, job_id: str) -> DataRefusal:
        return self._refusal(
            "consents.recompute_with_changes",
            f"trained on an earlier version of these rows in job {job_id}, and the rows that the sites have added "
            "since are too few, or of too few sites: the difference of both runs would show them",
            f"wait until at least {ADDED_SITES} sites have added {ADDED_ROWS} rows together, or train on the unchanged "
            "rows",
        )

    def _check_new(self, db: sqlite3.Connection, version: _Version, continues: Sequence[str]) -> None:
        """Refuse rows that belong to the jobs whose model is continued. Raises: DataRefusal."""
        for job_id in continues:
            data = runs.trained_on(db, job_id)
            if data is not None and _relation(db, version, data) is not Relation.UNRELATED:
                name, n_alike = version.record.name, _overlap(db, version, data)
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
        last = runs.last_run_of(db, resume.job_id, record.name)
        if last is None:
            raise ConfigurationError(
                f"{self._site} has no record of a job {resume.job_id} on data set {record.name!r}."
            )
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
            runs.run_of(db, run.run)
            db.execute("UPDATE runs SET trees = ?, state = ? WHERE id = ?", (trees, state, run.run))

    def _refusal(self, key: str, what: str, remedy: str) -> DataRefusal:
        # Whether data count as changed depends on every row, as a job reads it.
        return DataRefusal(
            f"{self._site} {what}. Policy key: {key}. Remedy: {remedy}, or let this site consent.", REGISTRY_TEXT
        )


def _relation(db: sqlite3.Connection, version: _Version, earlier: int) -> Relation:
    """Return how a version of a data set relates to an earlier one."""
    record, other = version.record, runs.data_of(db, earlier)
    has_same_columns = set(record.columns) == set(other.columns) and record.fingerprint != other.fingerprint
    return record.relation(other, _overlap(db, version, earlier) if has_same_columns else 0)


def _overlap(db: sqlite3.Connection, version: _Version, earlier: int) -> int:
    """Return how many rows two versions of the same columns share: by their ids too, where all have one."""
    n_alike = overlap_of(version.rows, runs.rows_of(db, earlier))
    named = runs.named_rows_of(db, earlier)
    return overlap_of(version.named, named) if n_alike and named.size and version.named is not None else n_alike


def _is_redrawn(earlier: Terms, fresh: Terms) -> bool:
    """Tell whether a run takes other rows, or weighs them otherwise, than an earlier one over the same rows."""
    if earlier.fingerprint == fresh.fingerprint:
        # The same parameters are the same draw, also where the earlier record knows none.
        return earlier.draw != fresh.draw and earlier.parameters != fresh.parameters
    # Rows are drawn by what they hold in the job's columns: other columns draw other rows.
    return earlier.draw != fresh.draw or fresh.draw.startswith("subsample ")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
