"""The site's memory of what was released, against differencing.

Two runs that differ by one site or by some rows reveal the difference, so a site remembers across jobs: which data,
with which sites, under which parameters. The kind of parameters does not matter for a refusal, because the first
histogram of a run hardly depends on them.

Protocol: ``reserve`` before the first private byte leaves; it is durable, and from then on the run counts as
released, also if the process dies. ``trees_complete`` at every checkpoint, ``complete`` at the end. ``cancel`` takes
the reservation back and is for a run that ended before anything private was sent.

Files, all of mode 0600 in a folder of mode 0700, each written whole and renamed: ``registry.json`` (readable by a
person), ``key``, ``rows/`` (keyed row hashes), ``cuts/`` (agreed cut points for reuse), ``lock``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, PolicyRefusal
from he_processors.key_agreement import derive_key
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.data_sets.identity import DataRecord, Relation, identify, overlap_of
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.failures import REGISTRY_TEXT, DataRefusal
from nvflare_plugins.files import write_private
from nvflare_plugins.site.memory.registry_store import RegistryState, Run, Search, read_ledger, write_ledger
from nvflare_plugins.site.memory.stored_arrays import read_arrays
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.site.policy.values import Consents

_ROWS = "rows or columns"
_HASH_BYTES = 8


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
    CONSENTED = "another site set or changed rows, with this site's consent"


@dataclass(frozen=True, slots=True)
class Reservation:
    """A run that may send; ``message`` is for the log and the report."""

    run_id: str
    verdict: Verdict
    message: str


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The interrupted job that a new one continues, and the complete trees of the checkpoint all sites share."""

    job_id: str
    trees: int


@dataclass(frozen=True, slots=True, eq=False)
class CutPlan:
    """Cuts already known from an earlier search (feature -> float32[n]), and the features still to search."""

    known: Mapping[str, NDArray[np.float32]]
    to_search: tuple[str, ...]


class Registry:
    """The registry of one site.

    Privacy: purely local. Holds no row, value or sum except the agreed cuts, which are in every model anyway.
    """

    def __init__(self, root: Path, site: str, consents: Consents, randomness: RandomSource = OS_RANDOMNESS) -> None:
        self._root, self._site, self._consents = root, site, consents
        self._last: tuple[tuple[int, ...], RegistryState] = ((), RegistryState())
        for folder in (root, root / "rows", root / "cuts"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._key = self._load_key(randomness)

    @classmethod
    def open(cls, policy: SitePolicy) -> Registry:
        """Open the registry that a site's policy names."""
        return cls(policy.registry, policy.site, policy.consents)

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

        Raises:
            DataRefusal: the run would recompute a released quantity with another site set or changed rows.
            ConfigurationError: there is no such interrupted job or checkpoint, or the registry is damaged.
        """
        record, rows = identify(table, spec, self._key, ids)
        with self._locked():
            ledger = self._read()
            fresh = Run(
                run_id=f"{len(ledger.runs) + 1}-{_digest(job_id.encode())[:8]}-{_now()}",
                job_id=job_id,
                fingerprint=record.fingerprint,
                sites=tuple(sorted(sites)),
                parameters=_digest(parameters),
                started=_now(),
                draw=draw,
            )
            if resume is None:
                own = {reservation.run_id for reservation in beside}
                earlier = replace(ledger, runs=tuple(run for run in ledger.runs if run.run_id not in own))
                verdict, message = self._judge(earlier, fresh, record, rows)
            else:
                verdict, message = self._check_resume(ledger, fresh, record, resume)
                fresh = replace(fresh, trees=resume.trees)
            write_private(self._root / "rows" / f"{record.fingerprint}.u64", rows.tobytes())
            data = {**ledger.data, record.fingerprint: record}
            self._write(replace(ledger, data=data, runs=(*ledger.runs, fresh)))
        return Reservation(fresh.run_id, verdict, message)

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
        with self._locked():
            ledger = self._read()
            this = _find_run(ledger, run.run_id)
            record = ledger.data[this.fingerprint]
            earlier = [search for search in ledger.searches if search.concerns(this.sites, record.n_rows)]
            known: dict[str, NDArray[np.float32]] = {}
            for feature in features:
                found = [search for search in earlier if search.columns.get(feature) == record.columns[feature]]
                same = [search for search in found if search.settings == _digest(settings)]
                if found and not same and not self._consents.second_quantile_search:
                    raise self._refusal(
                        "consents.second_quantile_search",
                        f"was searched for quantiles of column {feature!r} before, with other settings",
                        "use the earlier number of bins and rows per cut",
                    )
                for search in same:
                    if search.file is not None:
                        known[feature] = self._load_cuts(search, feature)
            to_search = tuple(feature for feature in features if feature not in known)
            if to_search:
                search = Search(
                    run.run_id,
                    this.sites,
                    _digest(settings),
                    record.n_rows,
                    {feature: record.columns[feature] for feature in to_search},
                    None,
                )
                self._write(replace(ledger, searches=(*ledger.searches, search)))
        return CutPlan(known, to_search)

    def save_cuts(self, run: Reservation, cuts: Mapping[str, NDArray[np.float32]]) -> None:
        """Keep the cuts that this run's search agreed on.

        Args:
            run: the reserved run.
            cuts: exactly the features that ``plan_cuts`` gave to search -> float32[n].

        Raises:
            ValueError: other features than planned.
        """
        with self._locked():
            ledger = self._read()
            searches = list(ledger.searches)
            position = max((i for i, s in enumerate(searches) if s.run_id == run.run_id), default=None)
            if position is None or set(cuts) != set(searches[position].columns):
                raise ValueError("cuts must hold exactly the features of this run's planned search")
            stored = io.BytesIO()
            arrays = [np.asarray(cuts[name], dtype=np.float32) for name in searches[position].columns]
            np.savez(stored, *arrays)
            name = f"{_digest(run.run_id.encode())[:32]}.npz"
            write_private(self._root / "cuts" / name, stored.getvalue())
            searches[position] = replace(searches[position], file=name)
            self._write(replace(ledger, searches=tuple(searches)))

    def trees_complete(self, run: Reservation, n_trees: int) -> None:
        """Record a checkpoint: a lost job may resume from here (one durable write: call it per checkpoint)."""
        self._update(run, trees=n_trees)

    def complete(self, run: Reservation, n_trees: int) -> None:
        """Record that the run ended well."""
        self._update(run, trees=n_trees, state="complete")

    def cancel(self, run: Reservation) -> None:
        """Take a reservation back; only for a run that sent nothing private.

        A resumed run stays: it stands for trees that the job before it has released.

        Raises:
            ValueError: the run has recorded a release (a search or a tree).
        """
        if run.verdict is Verdict.RESUMED:
            return
        with self._locked():
            ledger = self._read()
            this = _find_run(ledger, run.run_id)
            if this.trees or this.state != "reserved" or any(s.run_id == run.run_id for s in ledger.searches):
                raise ValueError("a run that released something cannot be cancelled")
            self._write(replace(ledger, runs=tuple(other for other in ledger.runs if other != this)))

    def describe(self) -> str:
        """Return the registry as a table that a person can read."""
        with self._locked():
            ledger = self._read()
        lines = [f"{'started':<20} {'data set':<16} {'rows':>9} {'data':<8} {'state':<9} {'trees':>5}  sites, job"]
        for run in ledger.runs:
            data = ledger.data[run.fingerprint]
            lines.append(
                f"{run.started:<20} {data.name[:16]:<16} {data.n_rows:>9} {data.fingerprint[:8]:<8} {run.state:<9} "
                f"{run.trees:>5}  {', '.join(run.sites)}, {run.job_id}"
            )
        lines.append(f"{len(ledger.runs)} runs, {len(ledger.searches)} quantile searches, {len(ledger.data)} versions.")
        return "\n".join(lines)

    def _judge(
        self, ledger: RegistryState, fresh: Run, record: DataRecord, rows: NDArray[np.uint64]
    ) -> tuple[Verdict, str]:
        verdict, message = Verdict.NEW, "no earlier run of this site concerns these rows."
        relations = {
            fingerprint: record.relation(earlier, self._overlap(record, rows, earlier))
            for fingerprint in {run.fingerprint: None for run in ledger.runs}
            for earlier in (ledger.data[fingerprint],)
        }
        for run in ledger.runs:
            relation = relations[run.fingerprint]
            if relation is Relation.UNRELATED:
                continue
            if relation is Relation.SAME and run.sites == fresh.sites and not _is_redrawn(run, fresh):
                if verdict is Verdict.CONSENTED:
                    continue
                if run.parameters == fresh.parameters and run.fingerprint == fresh.fingerprint:
                    verdict = Verdict.IDENTICAL
                    message = f"repeats job {run.job_id} (same data, sites and parameters): the same release."
                elif verdict is Verdict.NEW:
                    verdict = Verdict.OTHER_PARAMETERS
                    message = f"same rows and sites as job {run.job_id}, other parameters or columns."
                continue
            self._refuse_difference(run, relation, fresh)
            verdict = Verdict.CONSENTED
            message = f"differs from job {run.job_id} by its sites or rows; this site's policy consents."
        return verdict, message

    def _refuse_difference(self, run: Run, relation: Relation, fresh: Run) -> None:
        if self._consents.recompute_with_changes:
            return
        if relation is Relation.SAME:
            changed = sorted(set(run.sites) ^ set(fresh.sites))
            what = f"trained on these rows in job {run.job_id} with another site set (difference: {', '.join(changed)})"
            remedy = "train with the same sites"
            if not changed:
                what = f"trained on these rows in job {run.job_id} with other weights or another sample of the rows"
                remedy = f"train with the same weight and subsample ({run.draw or 'neither'})"
        else:
            what = f"trained on an earlier version of these rows in job {run.job_id}"
            remedy = "train on the unchanged rows; other people's rows need a data set name and a file of their own"
        raise self._refusal(
            "consents.recompute_with_changes", f"{what}: the difference of both runs would show the change", remedy
        )

    def _check_resume(
        self, ledger: RegistryState, fresh: Run, record: DataRecord, resume: ResumePoint
    ) -> tuple[Verdict, str]:
        """Allow to continue an interrupted job with the same rows, sites and parameters only.

        Trees between the shared checkpoint and the last tree of the interrupted job are computed again from the same
        rows by the same sites, which is no new release.
        """
        attempts = [
            run
            for run in ledger.runs
            if run.job_id == resume.job_id and ledger.data[run.fingerprint].name == record.name
        ]
        if not attempts:
            raise ConfigurationError(
                f"{self._site} has no record of a job {resume.job_id} on data set {record.name!r}."
            )
        last = attempts[-1]
        if last.state == "complete":
            raise ConfigurationError(f"job {resume.job_id} is complete: continue from its model instead.")
        for what, mine, theirs in (
            ("site set", fresh.sites, last.sites),
            (_ROWS, fresh.fingerprint, last.fingerprint),
            ("parameters", fresh.parameters, last.parameters),
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

    def _overlap(self, record: DataRecord, rows: NDArray[np.uint64], earlier: DataRecord) -> int:
        if set(record.columns) != set(earlier.columns) or record.fingerprint == earlier.fingerprint:
            return 0
        path = self._root / "rows" / f"{earlier.fingerprint}.u64"
        try:
            content = path.read_bytes()
        except OSError:
            raise self._damaged(f"rows/{path.name} is missing") from None
        if len(content) != _HASH_BYTES * earlier.n_rows:  # a row that it lacks would be unknown, without a word
            raise self._damaged(f"rows/{path.name} is damaged: it holds more or fewer rows than were released")
        return overlap_of(rows, np.frombuffer(content, dtype="<u8"))

    def _load_cuts(self, search: Search, feature: str) -> NDArray[np.float32]:
        try:
            stored = read_arrays(self._root / "cuts" / str(search.file))
            cuts: NDArray[np.float32] = stored[f"arr_{list(search.columns).index(feature)}"]
        except (OSError, ValueError, KeyError):
            raise self._damaged(f"cuts/{search.file} cannot be read") from None
        return cuts

    def _update(self, run: Reservation, **changes: object) -> None:
        with self._locked():
            ledger = self._read()
            this = _find_run(ledger, run.run_id)
            changed = replace(this, **changes)  # type: ignore[arg-type]
            self._write(replace(ledger, runs=tuple(changed if other is this else other for other in ledger.runs)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _load_key(self, randomness: RandomSource) -> bytes:
        path = self._root / "key"
        if not path.exists():
            if (self._root / "registry.json").exists():
                raise self._damaged("its key is missing")
            write_private(path, randomness.bytes(32))
        key = path.read_bytes()
        if len(key) != 32:
            raise self._damaged("its key is damaged")
        return key

    def _read(self) -> RegistryState:
        """Return the content, parsed anew only if the file is another than at the last time: it is always replaced."""
        identity = self._identity()
        if not identity or identity != self._last[0]:
            try:
                self._last = (identity, read_ledger(self._root / "registry.json"))
            except (LookupError, TypeError, ValueError, AttributeError):
                raise self._damaged("registry.json cannot be read") from None
        return self._last[1]

    def _write(self, ledger: RegistryState) -> None:
        write_ledger(self._root / "registry.json", ledger)
        self._last = (self._identity(), ledger)

    def _identity(self) -> tuple[int, ...]:
        try:
            facts = (self._root / "registry.json").stat()
        except FileNotFoundError:
            return ()
        return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns

    def _damaged(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._site}: {what}, in the registry of released quantities. Restore it from a backup; starting an "
            "empty one forgets what was released."
        )

    def _refusal(self, key: str, what: str, remedy: str) -> DataRefusal:
        # Whether data count as changed depends on every row, as a job reads it.
        return DataRefusal(
            f"{self._site} {what}. Policy key: {key}. Remedy: {remedy}, or let this site consent.", REGISTRY_TEXT
        )


def _is_redrawn(run: Run, fresh: Run) -> bool:
    """Tell whether a run takes other rows, or weighs them otherwise, than an earlier one over the same rows."""
    if run.fingerprint == fresh.fingerprint:
        # The same parameters are the same draw, also where the earlier record knows none.
        return run.draw != fresh.draw and run.parameters != fresh.parameters
    # Rows are drawn by what they hold in the job's columns: other columns draw other rows.
    return run.draw != fresh.draw or fresh.draw.startswith("subsample ")


def _find_run(ledger: RegistryState, run_id: str) -> Run:
    for run in reversed(ledger.runs):
        if run.run_id == run_id:
            return run
    raise ValueError("the run is not in the registry (was it cancelled?)")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
