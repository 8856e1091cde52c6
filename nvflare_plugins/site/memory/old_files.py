"""What a site's memory was before it was one file: read once, when that file is made.

Earlier versions kept ``registry.json`` with ``rows/`` and ``cuts/``, and the folders ``alignments``, ``released_bins``
and ``predictions``, each with a key and a lock; ``data_refusals.json``; beside the registry's folder the hashes of the
policy; and in the folder of the ledgers the rows whose buckets were sent.

All of it is copied in the transaction that makes the new file, together with hashes of what was read. Only afterwards
the files are renamed to ``*.migrated``, where nothing reads them, provided that they are still as they were read: an
earlier version may have run since. In the place of what an earlier version reads first lies then a text that it
refuses: it would take a folder without files for a site that has released nothing.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.ledger_journal import Alive
from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.identity import DataRecord
from nvflare_plugins.files import make_folder, sync_folder, write_private
from nvflare_plugins.site.memory.runs import Terms, add_data, add_run, add_search, set_cuts
from nvflare_plugins.site.memory.schema import COUNTS, PREDICTIONS, RELEASED_SUMS, save_counts, store_array
from nvflare_plugins.site.memory.stored_arrays import read_arrays

_MOVED = b"This site's memory has moved to veilboost_memory.sqlite, which older versions of VeilBoost cannot read.\n"
_DAMAGED = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Store:
    """One store of an earlier version.

    Attributes:
        what: its name, for people.
        place: what ``copy`` reads.
        paths: what is moved away.
        first: what an earlier version reads first, and refuses if it is no longer its own; None if it only warns.
    """

    what: str
    place: Path
    paths: tuple[Path, ...]
    first: Path | None
    copy: Callable[[sqlite3.Connection, Path], None]

    def found(self) -> list[str]:
        return [path.name for path in self.paths if _is_old(path)]


class OldFiles:
    """The files of earlier versions at one site."""

    def __init__(self, root: Path, ledgers: Path | None, site: str) -> None:
        """Args: root: folder of the registry. ledgers: folder of the ledgers, if it is known."""
        self._site = site
        in_root = tuple(root / name for name in ("registry.json", "key", "rows", "cuts"))
        refusals, policy = root / "data_refusals.json", root.with_name(f"{root.name}.policy")
        self._stores = [_Store("registry of runs", root, in_root, root / "key", _copy_registry)]
        for name, what, copy in (
            ("alignments", "registry of alignments", _copy_alignments),
            ("released_bins", "ledgers of released sums", _copy_released_sums),
            ("predictions", "counts of predictions", _copy_predictions),
        ):
            self._stores.append(_Store(what, root / name, (root / name,), root / name / "key", copy))
        lock = refusals.with_suffix(".lock")
        self._stores.append(_Store("count of refusals", refusals, (refusals, lock), refusals, _copy_refusals))
        self._stores.append(_Store("memory of the policy", policy, (policy,), None, _copy_policy))
        if ledgers is not None:
            sent = ledgers / "rows_of_buckets.jsonl"
            self._stores.append(_Store("list of rows whose buckets were sent", sent, (sent,), sent, _copy_sent_rows))

    def found(self) -> str:
        """Return the names of those that are there; nothing if there are none."""
        return ", ".join(name for store in self._stores for name in store.found())

    def moved(self) -> list[str]:
        """Return the names of what shows that they were copied to a memory before: it was there."""
        marks = [store.first for store in self._stores if store.first is not None]
        kept = [path for store in self._stores for before in store.paths for path in _moved_from(before)]
        return sorted({path.name for path in (*(m for m in marks if m.exists() and not _is_old(m)), *kept)})

    def copy_to(self, db: sqlite3.Connection) -> None:
        """Write all that they say into the tables of a new memory, and hashes of what was read.

        Raises:
            ConfigurationError: one of them is damaged, or changes meanwhile.
        """
        as_read = self.digests()
        for store in self._stores:
            if store.found():
                try:
                    store.copy(db, store.place)
                except _DAMAGED:
                    raise ConfigurationError(
                        f"{self._site}: the {store.what} that an earlier version left in {store.place.name!r} is "
                        "damaged or lacks a file. Restore it from a backup; without it the site would forget what was "
                        "released."
                    ) from None
        if changed := self._changed(as_read):
            raise ConfigurationError(
                f"{self._site}: files of an earlier version change while they are read ({changed}): it still runs. "
                "Remedy: end its jobs, and stop it."
            )
        note(db, as_read)

    def move_away(self, as_read: Mapping[str, bytes], memory: str) -> None:
        """Rename them, once the memory is on the disk. After a crash in between, call it again.

        Args:
            as_read: names and hashes that ``copy_to`` wrote.
            memory: the files of the memory that was made of them, for people.

        Raises:
            ConfigurationError: they are no longer what was read; none was moved.
        """
        if changed := self._changed(as_read):
            raise ConfigurationError(
                f"{self._site}: files of an earlier version have changed since they were read ({changed}): it has run "
                "since, and they may tell of releases that the new memory does not know. Remedy: stop that version, "
                f"give files named *.migrated their own names back, and delete {memory}, which no job has used yet: "
                "the files are then read again."
            )
        for store in self._stores:
            for path in store.paths:
                if _is_old(path):
                    path.rename(_free_name(path))
                    sync_folder(path.parent)
            if store.first is not None and any(map(_moved_from, store.paths)) and not store.first.exists():
                make_folder(store.first.parent)
                write_private(store.first, _MOVED)

    def digests(self) -> dict[str, bytes]:
        """Return hashes of those that are there, by name."""
        return {path.name: _digest(path) for store in self._stores for path in store.paths if _is_old(path)}

    def _changed(self, as_read: Mapping[str, bytes]) -> str:
        """Return the names of those that are there and not as they were read; those moved away are not there."""
        return ", ".join(name for name, digest in self.digests().items() if as_read.get(name) != digest)


def note(db: sqlite3.Connection, as_read: Mapping[str, bytes]) -> None:
    """Remember hashes of files whose content a memory holds now."""
    db.executemany("INSERT INTO earlier_version VALUES (?, ?)", as_read.items())


def _is_old(path: Path) -> bool:
    """Tell whether a file, or a file in a folder, was left by an earlier version."""
    return any(_begins_otherwise(file) for file in _files(path))


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or those in a folder in a fixed order; not what a write that was cut short has left."""
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            yield from _files(inner)
    elif path.exists() and not (path.name.startswith(".") and path.name.endswith(".partial")):
        yield path


def _begins_otherwise(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MOVED) + 1) != _MOVED


def _digest(path: Path) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for file in _files(path):
        content = file.read_bytes()
        whole.update(b"%d %d " % (len(name := os.fsencode(file.relative_to(path.parent))), len(content)))
        whole.update(name + content)
    return whole.digest()


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.migrated{number or ''}") for number in range(1000))
    return next(name for name in names if not name.exists())


def _moved_from(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{glob.escape(path.name)}.migrated*"))


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _copy_key(db: sqlite3.Connection, folder: Path, name: str) -> None:
    _add_secret(db, name, (folder / "key").read_bytes())


def _add_secret(db: sqlite3.Connection, name: str, key: bytes) -> None:
    if len(key) != _KEY_BYTES:
        raise ValueError("not a key")
    db.execute("INSERT INTO secrets VALUES (?, ?)", (name, key))


def _hashes(path: Path, n: int) -> NDArray[np.uint64]:
    content = path.read_bytes()
    if len(content) != 8 * n:  # a row that it lacks would be unknown, without a word
        raise ValueError("more or fewer rows than were released")
    return np.frombuffer(content, dtype="<u8")


def _copy_registry(db: sqlite3.Connection, root: Path) -> None:
    _copy_key(db, root, "registry")
    path = root / "registry.json"
    if not path.exists():  # it was opened, and no run came
        return
    document = _json(path)
    versions: dict[str, int] = {}
    for fingerprint, fields in document["data"].items():
        record = DataRecord(**{**fields, "identifying": tuple(fields["identifying"])})
        versions[fingerprint] = add_data(db, record, _hashes(root / "rows" / f"{fingerprint}.u64", record.n_rows))
    numbers: dict[str, int] = {}
    for run in _runs_of(document):
        terms = Terms(versions[run["fingerprint"]], "", tuple(run["sites"]), run["parameters"], run.get("draw", ""))
        numbers[run["run_id"]] = add_run(db, run["job_id"], terms, run["started"], run["trees"], run["state"])
    for search in document["searches"]:
        _copy_search(db, root / "cuts", search, numbers.get(search["run_id"]))


def _runs_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of either format: whole, or each with the number of terms that it shares with others."""
    if document["version"] == 1:
        return list(document["runs"])
    if document["version"] != 2:
        raise ValueError("unknown version")
    runs = []
    for run_id, job_id, number, started, state, trees in document["runs"]:
        if type(number) is not int or type(trees) is not int or number < 0:
            raise TypeError("a run's terms and trees are integers")
        fingerprint, sites, parameters, *draw = document["terms"][number]
        run = {"run_id": run_id, "job_id": job_id, "started": started, "state": state, "trees": trees}
        run |= {"fingerprint": fingerprint, "sites": sites, "parameters": parameters}
        runs.append(run | {"draw": _only(draw) if draw else ""})
    return runs


def _only(values: list[Any]) -> Any:
    (value,) = values
    return value


def _copy_search(db: sqlite3.Connection, folder: Path, search: dict[str, Any], run: int | None) -> None:
    columns = search["columns"]
    number = add_search(db, run, tuple(search["sites"]), search["settings"], search["n_rows"], columns)
    if search["file"] is not None:
        stored = read_arrays(folder / search["file"])
        for position, feature in enumerate(columns):
            set_cuts(db, number, feature, stored[f"arr_{position}"])


def _copy_alignments(db: sqlite3.Connection, folder: Path) -> None:
    _copy_key(db, folder, "alignments")
    path = folder / "alignments.json"
    if not path.exists():
        return
    document = _json(path)
    if document["version"] != 1:
        raise ValueError("unknown version")
    alive = Alive(path)
    for run in document["runs"]:
        # Older ones do not say whether anything was sent, and one whose process goes on may send yet: they count.
        is_sent = run.get("sent", True) is not False or alive.is_held(run["job_id"])
        ids = store_array(db, _hashes(folder / "ids" / run["ids"], run["n_ids"]))
        db.execute(
            "INSERT INTO alignments (job_id, data_set, sites, started, is_sent, ids) VALUES (?, ?, ?, ?, ?, ?)",
            (run["job_id"], run["data_set"], json.dumps(run["sites"]), run["started"], is_sent, ids),
        )


def _copy_counts(db: sqlite3.Connection, folder: Path, purpose: str) -> None:
    _copy_key(db, folder, purpose)
    for path in sorted(folder.glob("*.npz")):
        stored = read_arrays(path)
        if {name: values.dtype.str for name, values in stored.items()} != COUNTS[purpose]:
            raise ValueError("other arrays than belong there")
        save_counts(db, purpose, path.stem, {name: values.ravel() for name, values in stored.items()})


def _copy_released_sums(db: sqlite3.Connection, folder: Path) -> None:
    _copy_counts(db, folder, RELEASED_SUMS)


def _copy_predictions(db: sqlite3.Connection, folder: Path) -> None:
    _copy_counts(db, folder, PREDICTIONS)


def _copy_refusals(db: sqlite3.Connection, path: Path) -> None:
    document = _json(path)
    if document["version"] != 1:
        raise ValueError("unknown version")
    for question in ("refusals", "demands"):
        # A file of the time before there were two questions has one.
        for data_set, times in document[question].items() if question in document or question == "refusals" else ():
            rows = [(question, data_set, float(at)) for at in times]
            db.executemany("INSERT INTO refusals VALUES (?, ?, ?)", rows)


def _copy_policy(db: sqlite3.Connection, path: Path) -> None:
    try:
        document = _json(path)
    except ValueError:  # nothing depends on it but a line in the log
        return
    if isinstance(document, dict):
        hashes = [(name, value) for name, value in document.items() if isinstance(value, str)]
        db.executemany("INSERT INTO policy_keys VALUES (?, ?)", hashes)


def _copy_sent_rows(db: sqlite3.Connection, path: Path) -> None:
    *lines, _ = path.read_bytes().split(b"\n")  # nothing was sent on the strength of a line that a crash cut short
    if not lines:
        return
    first, *records = map(json.loads, lines)
    _add_secret(db, "sent rows", bytes.fromhex(first["key"]))
    for record in records:
        digests = [bytes.fromhex(digest) for digest in record["rows"]]
        if any(len(digest) != 12 for digest in digests):
            raise ValueError("not a hash of a row")
        number = store_array(db, np.frombuffer(b"".join(digests), dtype="|u1"))
        db.execute(
            "INSERT INTO sent_rows (job_id, data_set, row_hashes) VALUES (?, ?, ?)",
            (record["job"], record.get("data_set"), number),
        )
