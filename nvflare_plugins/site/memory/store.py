"""A site's memory on disk: one database with its tables, arrays beside it, and the volume it lies on."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import sqlite3
import struct
import tempfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.base.checks import too_old
from nvflare_plugins.base.declared import values_of
from nvflare_plugins.base.errors import HeldElsewhere, PolicyRefusal
from nvflare_plugins.base.files import locked, make_folder, sync_folder, write_private
from nvflare_plugins.data.declaration import IdForm
from nvflare_plugins.site.policy import SitePolicy

# The tables of a site's memory, and the arrays in them.
#
# Arrays (hashes of rows, counts, cut points) are stored in parts, each with a hash of its bytes: SQLite notices damage
# to its own structures, but not to what it was given. Lists of names are JSON.

APPLICATION = int.from_bytes(b"VeiB", "big")
FORMAT = 3

# What standing scoring has shown of rows, per data set (a hash of its name), by keyed hashes: too many to be rewritten.
_SCORED_TABLES = (
    "CREATE TABLE scored_sets (id INTEGER PRIMARY KEY, data_set TEXT NOT NULL UNIQUE, day INTEGER NOT NULL, "
    "rows INTEGER NOT NULL)",
    "CREATE TABLE scored_answers (data_set INTEGER NOT NULL REFERENCES scored_sets, answer INTEGER NOT NULL, "
    "PRIMARY KEY (data_set, answer)) WITHOUT ROWID",
    "CREATE TABLE scored_rows (data_set INTEGER NOT NULL REFERENCES scored_sets, row INTEGER NOT NULL, "
    "bits INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (data_set, row)) WITHOUT ROWID",
)
STATEMENTS = (
    "CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    # Of versions up to 0.10, which copied files of versions before 0.3.
    "CREATE TABLE earlier_version (name TEXT PRIMARY KEY, digest BLOB NOT NULL)",
    "CREATE TABLE arrays (id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, length INTEGER NOT NULL)",
    "CREATE TABLE array_parts (array INTEGER NOT NULL REFERENCES arrays ON DELETE CASCADE, part INTEGER NOT NULL, "
    "digest BLOB NOT NULL, content BLOB NOT NULL, PRIMARY KEY (array, part))",
    # Runs: which data, with which sites, under which parameters.
    "CREATE TABLE data_versions (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, name TEXT NOT NULL, "
    "source TEXT NOT NULL, n_rows INTEGER NOT NULL, columns TEXT NOT NULL, identifying TEXT NOT NULL, "
    "row_hashes INTEGER NOT NULL REFERENCES arrays, UNIQUE (fingerprint, name, source))",
    "CREATE TABLE terms (id INTEGER PRIMARY KEY, data INTEGER NOT NULL REFERENCES data_versions, sites TEXT NOT NULL, "
    "parameters TEXT NOT NULL, draw TEXT NOT NULL, UNIQUE (data, sites, parameters, draw))",
    "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, "
    "terms INTEGER NOT NULL REFERENCES terms, started TEXT NOT NULL, "
    "state TEXT NOT NULL CHECK (state IN ('reserved', 'complete')), "
    "trees INTEGER NOT NULL CHECK (typeof(trees) = 'integer' AND trees >= 0))",
    "CREATE INDEX runs_by_terms ON runs (terms, id)",
    "CREATE INDEX runs_by_job ON runs (job_id, id)",
    # Quantile searches: the keyed hashes of their columns, and the cuts once they have ended.
    "CREATE TABLE searches (id INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER REFERENCES runs, sites TEXT NOT NULL, "
    "settings TEXT NOT NULL, n_rows INTEGER NOT NULL)",
    "CREATE INDEX searches_by_run ON searches (run)",
    "CREATE TABLE searched_columns (search INTEGER NOT NULL REFERENCES searches, feature TEXT NOT NULL, "
    "hash TEXT NOT NULL, cuts INTEGER REFERENCES arrays, PRIMARY KEY (search, feature))",
    "CREATE INDEX searched_columns_by_hash ON searched_columns (hash)",
    "CREATE TABLE alignments (id INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT NOT NULL, data_set TEXT NOT NULL, "
    "sites TEXT NOT NULL, started TEXT NOT NULL, is_sent INTEGER NOT NULL, ids INTEGER NOT NULL REFERENCES arrays)",
    # Released sums and counts of predictions: per data set (a hash of its name) some arrays.
    "CREATE TABLE row_counts (purpose TEXT NOT NULL, data_set TEXT NOT NULL, name TEXT NOT NULL, "
    "array INTEGER NOT NULL REFERENCES arrays, PRIMARY KEY (purpose, data_set, name))",
    "CREATE TABLE sent_rows (id INTEGER PRIMARY KEY, job_id TEXT NOT NULL, data_set TEXT, "
    "row_hashes INTEGER NOT NULL REFERENCES arrays)",
    "CREATE TABLE refusals (question TEXT NOT NULL, data_set TEXT NOT NULL, at REAL NOT NULL)",
    "CREATE INDEX refusals_by_data_set ON refusals (question, data_set, at)",
    "CREATE TABLE policy_keys (name TEXT PRIMARY KEY, hash TEXT NOT NULL)",
    *_SCORED_TABLES,
)

RELEASED_SUMS, TOLD_BITS, PREDICTIONS = "released sums", "told split bits", "predictions"
UNCHECKED, PERSONS = "runs whose added rows were not checked", "persons of budgets"
UNNAMED, NAMED_ROWS = "spent without noting on whom", "rows by values and id"  # the latter by version's number
FORGETTING = "persons to forget"
COUNTS: Mapping[str, Mapping[str, str]] = {
    RELEASED_SUMS: {
        "keys": "<u8",
        "sums": "<i4",
        "share": "<f4",
        "split_bits": "<i4",
        "sizes": "<i8",
        "fingerprints": "<i4",
    },
    TOLD_BITS: {"answers": "<u8"},
    PREDICTIONS: {"keys": "<u8", "counts": "<i8"},
    UNCHECKED: {"runs": "<i8"},
    PERSONS: {"keys": "<u8"},
    UNNAMED: {"is_spent": "<i8"},
    NAMED_ROWS: {"keys": "<u8"},
    FORGETTING: {
        "keys": "<u8",
        "since": "<i8",
        "members": "<u8",
        "batch": "<i4",
        "rows": "<u8",
        "row_batch": "<i4",
        "document": "|u1",
    },
}
"""The arrays that are kept for each data set, by purpose and name."""

_KINDS = ("<u8", "<i8", "<i4", "<f4", "|u1")
_PART_BYTES = 1 << 19  # SQLite takes no value beyond 10^9 bytes, and a changed part is written whole


class DamagedArray(ValueError):
    """An array is not what was stored."""


def insert(db: sqlite3.Connection, statement: str, values: Sequence[Any]) -> int:
    """Insert one row and return its number."""
    number = db.execute(statement, values).lastrowid
    if number is None:
        raise ValueError("nothing was inserted")
    return number


def store_array(db: sqlite3.Connection, values: NDArray[Any]) -> int:
    """Store a new array and return its number. Shapes: values: one dimension."""
    kind = values.dtype.str
    if kind not in _KINDS or values.ndim != 1:
        raise TypeError(f"arrays of {kind} with {values.ndim} dimensions are not stored")
    number = insert(db, "INSERT INTO arrays (kind, length) VALUES (?, 0)", (kind,))
    _write(db, number, values)
    return number


def load_array(db: sqlite3.Connection, number: int, kind: str, length: int | None = None) -> NDArray[Any]:
    """Return a stored array.

    Args:
        kind: what it must hold, as NumPy writes it.
        length: what it must have; None for any.

    Raises:
        DamagedArray: it is not there as it was stored, or is another one.
    """
    found = db.execute("SELECT kind, length FROM arrays WHERE id = ?", (number,)).fetchone()
    if found is None or found[0] != kind or length not in (None, found[1]):
        raise DamagedArray("an array is missing, or is not what belongs there")
    parts = []
    for position, (part, digest, content) in enumerate(
        db.execute("SELECT part, digest, content FROM array_parts WHERE array = ? ORDER BY part", (number,))
    ):
        if part != position or not isinstance(content, bytes) or _digest(content) != digest:
            raise DamagedArray("an array is damaged")
        parts.append(content)
    content = b"".join(parts)
    if len(content) != found[1] * np.dtype(kind).itemsize:
        raise DamagedArray("an array is damaged: it has another length")
    return np.frombuffer(content, dtype=kind)


def drop_array(db: sqlite3.Connection, number: int) -> None:
    """Forget an array; nothing may refer to it any more."""
    db.execute("DELETE FROM arrays WHERE id = ?", (number,))


def load_counts(db: sqlite3.Connection, purpose: str, data_set: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a data set by name, empty ones where nothing was counted; each may be changed.

    Args:
        data_set: see ``counted``.

    Raises:
        DamagedArray: an array is damaged, or another one than these.
    """
    rows = "SELECT name, array FROM row_counts WHERE purpose = ? AND data_set = ?"
    numbers, kinds = dict(db.execute(rows, (purpose, data_set))), COUNTS[purpose]
    if not numbers:
        return {name: np.empty(0, dtype=kind) for name, kind in kinds.items()}
    if numbers.keys() != kinds.keys():
        raise DamagedArray("an array is missing, or is not what belongs there")
    return {name: load_array(db, numbers[name], kind).copy() for name, kind in kinds.items()}


def save_counts(db: sqlite3.Connection, purpose: str, data_set: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Store the arrays of a data set in the place of those before; what is the same stays as it is."""
    for name, values in arrays.items():
        key = (purpose, data_set, name)
        found = db.execute("SELECT array FROM row_counts WHERE (purpose, data_set, name) = (?, ?, ?)", key).fetchone()
        if found is None:
            db.execute("INSERT INTO row_counts VALUES (?, ?, ?, ?)", (*key, store_array(db, values)))
        else:
            _write(db, found[0], values)


def keyed_hashes(key: bytes, items: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return what stands for rows, persons or ids in the memory, item by item, under a secret of the site."""
    digests = b"".join(hashlib.blake2b(one, digest_size=8, key=key).digest() for one in items)
    return np.frombuffer(digests, dtype="<u8")


def counted(data_set: str) -> str:
    """Return what stands for the name of a data set beside its counts."""
    return hashlib.sha256(data_set.encode()).hexdigest()[:32]


def _write(db: sqlite3.Connection, number: int, values: NDArray[Any]) -> None:
    content = np.ascontiguousarray(values).data.cast("B")
    known = dict(db.execute("SELECT part, digest FROM array_parts WHERE array = ?", (number,)))
    for part, start in enumerate(range(0, len(content), _PART_BYTES)):
        piece = content[start : start + _PART_BYTES]
        digest = _digest(piece)
        if known.pop(part, None) != digest:
            db.execute("INSERT OR REPLACE INTO array_parts VALUES (?, ?, ?, ?)", (number, part, digest, piece))
    for part in known:
        db.execute("DELETE FROM array_parts WHERE array = ? AND part = ?", (number, part))
    db.execute("UPDATE arrays SET length = ? WHERE id = ?", (len(values), number))


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


# Reading the array files (.npz) that a site keeps for itself, without trusting what lies on the disk.
#
# NumPy's own reader evaluates headers as Python expressions, which failed now and then in threads under Python 3.11,
# and lets through whatever zip, zlib and the interpreter raise about a damaged file. Here a file is what
# ``numpy.savez`` writes, of plain numbers, or a ``ValueError``.


_SUFFIX = ".npy"
_PREFIX = struct.Struct("<6s2BH")
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([<|][biuf]\d{1,2})', 'fortran_order': False, 'shape': \(((?:\d{1,12}, ?)*(?:\d{1,12})?)\), \} *\n"
)
_MAX_DIMENSIONS = 2
_DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not what ``numpy.savez`` writes, or cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names) or not all(name.endswith(_SUFFIX) for name in names):
                raise ValueError("not a file of arrays")
            return {name.removesuffix(_SUFFIX): _array(archive.read(name)) for name in names}
    except FileNotFoundError:
        raise
    except _DAMAGED:
        raise ValueError(f"{path.name} is not a file of arrays that this program wrote") from None


def _array(data: bytes) -> NDArray[Any]:
    magic, major, _, length = _PREFIX.unpack_from(data)
    header = _HEADER.fullmatch(data, _PREFIX.size, _PREFIX.size + length)
    if magic != _MAGIC or major != 1 or header is None:
        raise ValueError("not an array")
    kind = np.dtype(header[1].decode())
    shape = tuple(int(size) for size in re.findall(rb"\d+", header[2]))
    content = data[_PREFIX.size + length :]
    if len(shape) > _MAX_DIMENSIONS or len(content) != math.prod(shape) * kind.itemsize:
        raise ValueError("not an array")
    return np.frombuffer(content, dtype=kind).reshape(shape).copy()


# Whether a volume can hold a site's memory: file locks must work there, for all machines that mount it.
#
# SQLite keeps writers apart by locks of the system. Where these do nothing, two jobs could each release what only one
# of them may, and no error would tell. So a folder is tried before its first use in a process: a lock that one
# descriptor holds must keep another one out. What a trial on one machine cannot show, the volume's mount options say.


_MOUNTS = Path("/proc/self/mountinfo")
_NO_LOCKS = {  # by type of file system: options with which a lock stays on the machine that takes it
    "nfs": {"nolock", "local_lock=all", "local_lock=posix"},
    "nfs4": {"local_lock=all", "local_lock=posix"},
    "cifs": {"nobrl"},
    "smb3": {"nobrl"},
    "ceph": {"nolock"},
    "lustre": {"localflock"},
}
_ALWAYS_LOCAL = {  # where the kernel answers for the volume, on each machine for itself
    f"fuse.{name}" for name in ("sshfs", "s3fs", "mountpoint-s3", "gcsfuse", "goofys", "blobfuse2", "rclone")
}
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock, 64 bits
_HELD = (errno.EACCES, errno.EAGAIN)


def why_no_locks(lock_file: Path) -> str | None:
    """Return what keeps locks from working in a file's folder, in words for its operator; None if they work.

    Args:
        lock_file: exists, and may be locked for a moment.
    """
    found = _local_only(lock_file.parent)
    if found is not None:
        return found
    try:
        return None if _keeps_others_out(lock_file) else "two may hold the same lock"
    except OSError as error:
        return f"locks fail with {errno.errorcode.get(error.errno or 0, 'an error')}"


def _keeps_others_out(lock_file: Path) -> bool:
    """Tell whether a lock keeps another one out; one that somebody holds already has done so."""
    with lock_file.open("r+b") as one, lock_file.open("r+b") as other:
        for file in (one, other):
            try:
                _lock(file.fileno())
            except OSError as error:
                if error.errno in _HELD:
                    return True
                raise
    return False


def _lock(descriptor: int) -> None:
    # SQLite's own locks belong to processes, so one process cannot try them; these are of the same kind otherwise.
    if hasattr(fcntl, "F_OFD_SETLK"):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _local_only(folder: Path) -> str | None:
    """Return the type and option of a folder's mount that keep locks on this machine; None if nothing says so."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # a system that has no such list
        return None
    kind, options = _mount_of(folder.resolve(), lines)
    if kind in _ALWAYS_LOCAL:
        return kind
    local = _NO_LOCKS.get(kind, set()) & options
    return f"{kind} with {', '.join(sorted(local))}" if local else None


def _mount_of(folder: Path, lines: list[str]) -> tuple[str, set[str]]:
    """Return the type and the options of the mount in which a folder lies. See proc(5), mountinfo."""
    best, found = 0, ("", set[str]())
    for line in lines:
        place, described = (part.split(" ") for part in f"{line} - ".split(" - ")[:2])
        if len(place) < 6 or len(described) < 3:
            continue
        mount = place[4].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
        if folder.is_relative_to(mount) and len(mount) >= best:  # the later of two on one place lies on top
            best, found = len(mount), (described[0], {*place[5].split(","), *described[2].split(",")})
    return found


# The one file in which a site remembers, between its jobs, what these have released and refused.
#
# ``Memory`` is an SQLite file in the folder of the site's registry. Its users (``Registry``, ``AlignmentRegistry``,
# ``ReleasedSums``, ``PredictionBudget``, ``SentRows``, ``RefusalCount``, ``policy_changes``) keep their tables in it.
# What belongs together, such as a reservation and the hashes of its rows, is one transaction: after a crash or on a
# full disk all of it is there, or none. Once it was made, a file beside it says so: a memory that is lost is not begun
# anew, which would forget all that was released.
#
# Durability: a transaction is on the disk when ``transaction`` has ended (``synchronous=EXTRA``: FULL, and the folder
# is synced after the journal is gone; else a loss of power could bring the journal back, and with it the time before).
# The journal is a rollback journal: a write-ahead log needs memory that machines of a network volume do not share.
# Concurrency: any number of processes and threads. Each transaction has a connection of its own and takes the write
# lock when it begins, so that what it reads stays true until it has written. Privacy: purely local, mode 0600 in a
# folder of mode 0700. Rows and ids are hashes under keys that lie in the same file: with it a guessed row or id can be
# tested, which is why it stays at the site. No value, gradient or sum of a row.


NAME = "veilboost_memory.sqlite"
MADE = "veilboost_memory.made"
KEY_BYTES = 32
_LOCK = "lock"
_MADE_TEXT = (
    f"{NAME} beside this file remembers what this site has released. While this file is here, VeilBoost refuses to "
    "begin a new one in its place.\n"
)
_PAGE_BYTES = 4096
_JOURNAL_MAGIC = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
_JOURNAL_HEAD = struct.Struct(">16sI4xI")  # SQLite's file format, section 3: pages of the file before, bytes of a page
_WAIT_S = 120.0  # for other jobs of the site; each holds the file for a moment
_SETTINGS = (
    "PRAGMA synchronous=EXTRA",
    "PRAGMA foreign_keys=ON",
    "PRAGMA trusted_schema=OFF",
    "PRAGMA cell_size_check=ON",
    "PRAGMA secure_delete=ON",
    "PRAGMA temp_store=MEMORY",
)
_tried: set[tuple[int, int]] = set()  # folders of which this process knows that locks work there


class Memory:
    """The memory of one site. See the module."""

    def __init__(self, folder: Path, site: str, ledgers: Path | None = None) -> None:
        """Open the memory, or make it.

        Args:
            folder: of the site's registry.
            ledgers: folder of the privacy ledgers, where versions before 0.3 kept the rows whose buckets were sent.

        Raises:
            ConfigurationError: the file is damaged, lost or of another version's format, file locks do not work in the
                folder, or files of a version before 0.3 lie there.
            OSError: the folder cannot be written, or its disk is full.
        """
        self.site, self.path = site, folder / NAME
        make_folder(folder)
        self._require_locks(folder / _LOCK)
        made = folder / MADE
        old = not_copied(folder, ledgers)
        if self.path.exists() and self.path.with_name(f"{NAME}-journal").exists():
            self._check_journal()
        if old or not (made.exists() and self.path.exists()):
            with locked(folder / _LOCK):
                if not self.path.exists() and (made.exists() or not old):
                    self._make(copied(folder, ledgers))
                if old:
                    raise self._too_old(", ".join(old))
                if not made.exists():
                    write_private(made, _MADE_TEXT.encode())
        with self.reading():  # which refuses what is no memory, or one of another format
            pass
        if self.path.stat().st_mode & 0o077:  # as copied back from a backup
            self.path.chmod(0o600)

    @classmethod
    def open(cls, policy: SitePolicy) -> Memory:
        """Open the memory of the site whose policy this is."""
        return cls(policy.registry, policy.site, policy.ledgers)

    @staticmethod
    def is_there(policy: SitePolicy) -> bool:
        """Return whether the site remembers anything, or has lost what it remembered; makes nothing."""
        is_there = any((policy.registry / name).exists() for name in (NAME, MADE))
        return is_there or bool(copied(policy.registry, policy.ledgers))

    @contextlib.contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Read and write: durable when the block ends, and nothing of it happened if it raises.

        Within the block no other transaction of the same memory may be begun: it would wait for this one.

        Raises:
            ConfigurationError: the file is damaged, or another process holds it and does not let go.
            OSError: the disk is full or fails, or the file may not be written.
        """
        if not self.path.exists():
            raise self._lost()
        with self._in_words(), contextlib.closing(_connect(self.path)) as db:
            db.execute(begin)
            self._check(db)
            yield db
            db.execute("COMMIT")  # without it, closing rolls back

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Read one state of the memory. Raises: as ``transaction``."""
        return self.transaction("BEGIN")

    def secret(self, name: str, fresh: bytes | None = None) -> bytes:
        """Return the site's secret of this name, 32 bytes; drawn, or ``fresh``, where there is none yet.

        Security: never leaves the site; hashes of rows and ids are kept under such secrets.
        """
        with self.reading() as db:
            found = db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
        if found is None:
            with self.transaction() as db:
                drawn = OS_RANDOMNESS.bytes(KEY_BYTES) if fresh is None else fresh
                db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, drawn))
                found = db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
        if not isinstance(found[0], bytes) or len(found[0]) != KEY_BYTES:
            raise self.damaged(f"its secret for {name} is damaged")
        return found[0]

    def back_up(self, target: Path) -> None:
        """Copy the memory, as it is between two transactions, to a new file of mode 0600, and check the copy.

        Raises:
            FileExistsError: there is such a file.
            ConfigurationError: the memory is damaged.
        """
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with self.reading() as db, contextlib.closing(_connect(target)) as copy:
                db.backup(copy)
                if copy.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                    raise self.damaged("it does not fit together")
        except BaseException:
            target.unlink()
            raise

    def damaged(self, what: str) -> ConfigurationError:
        """Return the refusal of a damaged memory."""
        return ConfigurationError(
            f"{self.site}: {what}, in {NAME} of the registry's folder, which remembers what was released. Restore it "
            "from a backup; without it the site would forget what was released."
        )

    def _lost(self, old: Iterable[str] = ()) -> ConfigurationError:
        """Return the refusal of a memory that was there once. ``old``: what else than the mark tells of it."""
        names = ", ".join([MADE, *old])
        return ConfigurationError(
            f"{self.damaged('it is no longer there')} Where no backup is left, only whoever answers for the site's "
            f"rows can accept that it forgets them: by moving what tells of it out of its folder ({names})."
        )

    def _too_old(self, what: str) -> ConfigurationError:
        remedy = "let `veilboost registry DIR` bring it to the present format"
        return too_old(f"{self.site}: its memory ({what})", "0.7", remedy)

    def _require_locks(self, lock: Path) -> None:
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600))
        facts = lock.parent.stat()
        if (facts.st_dev, facts.st_ino) in _tried:
            return
        why = why_no_locks(lock)
        if why is not None:
            raise ConfigurationError(
                f"{self.site}: the registry's folder lies on a volume where file locks do not work ({why}), so that "
                "jobs at the same time could release what only one of them may. Policy key: registry. Remedy: a folder "
                "on a local disk (site-setup --keep-in DIR), or a volume mounted with locks (NFS without nolock and "
                "local_lock)."
            )
        _tried.add((facts.st_dev, facts.st_ino))

    def _make(self, copied_before: list[str]) -> None:
        """Write the file under another name, and then give it its own: one of no bytes has lost its content.

        Args:
            copied_before: what shows that there was a memory.
        """
        if copied_before or self.path.with_name(MADE).exists():
            raise self._lost(copied_before)
        partial = self.path.with_name(f".{NAME}.partial")
        for left in (partial, partial.with_name(f"{partial.name}-journal")):  # by a process that was killed
            left.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with self._in_words(), contextlib.closing(_connect(partial)) as db:
            db.execute("BEGIN IMMEDIATE")
            for statement in STATEMENTS:
                db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION}")
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
        os.rename(partial, self.path)
        sync_folder(self.path.parent)

    def _check_journal(self) -> None:
        """Refuse a journal that belongs to another file.

        A process that was killed leaves one, and SQLite brings the file back to what it was before. Where a backup has
        been put in the file's place, it would write pages of another time into that, without a word. Such a journal
        tells of a file of more pages, because a memory grows; what it has spoilt all the same does not fit together.
        """
        journal = self.path.with_name(f"{NAME}-journal")
        with contextlib.suppress(FileNotFoundError):  # of a process that is writing
            with journal.open("rb") as file:
                head = file.read(_JOURNAL_HEAD.size)
            if len(head) == _JOURNAL_HEAD.size and head.startswith(_JOURNAL_MAGIC):
                _, n_pages, page_bytes = _JOURNAL_HEAD.unpack(head)
                if self.path.stat().st_size < n_pages * page_bytes:
                    raise ConfigurationError(
                        f"{self.site}: {journal.name} in the registry's folder belongs to a larger {NAME} than the one "
                        "beside it, into which it must not be written: was a backup put in its place? Remedy: move "
                        f"{journal.name} away, or put the file that it belongs to back."
                    )
        with self._in_words(), contextlib.closing(_connect(self.path)) as db:
            is_whole = db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            if not is_whole or db.execute("PRAGMA foreign_key_check").fetchall():
                raise self.damaged("it does not fit together")

    def _check(self, db: sqlite3.Connection) -> None:
        facts = ("application_id", "user_version", "page_count", "page_size")
        application, version, n_pages, page_bytes = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in facts)
        if application != APPLICATION:
            raise self.damaged("there is no memory of VeilBoost")
        if version > FORMAT:
            raise ConfigurationError(
                f"{self.site}: {NAME} in the registry's folder has format {version}, of a newer VeilBoost; this one "
                f"reads format {FORMAT}. Remedy: install that version again."
            )
        if 0 < version < FORMAT:
            raise self._too_old(f"{NAME} of format {version}")
        found = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")}
        if self.path.stat().st_size < n_pages * page_bytes:  # SQLite reads what is missing of a page as zeros
            raise self.damaged("its end is missing")
        if version != FORMAT or found != set(STATEMENTS):
            raise self.damaged("its tables are not those of VeilBoost")

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Say what an error of SQLite means to the operator."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._told(error) from None
        except DamagedArray as error:
            raise self.damaged(str(error)) from None
        except (UnicodeDecodeError, json.JSONDecodeError):  # text of the file, or SQLite's words about it
            raise self.damaged("it cannot be read") from None

    def _told(self, error: sqlite3.Error) -> Exception:
        if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError | sqlite3.IntegrityError):
            return error  # a defect of this program
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return HeldElsewhere(
                f"{self.site}: another process holds {NAME} in the registry's folder for more than {_WAIT_S:.0f} "
                "seconds. Remedy: end what hangs there (a job, a backup, an editor of databases), and submit the job "
                "again."
            )
        if code == sqlite3.SQLITE_NOMEM:
            return MemoryError()
        number = _NUMBERS.get(code)
        if number == errno.EIO:
            number = self._why_not_written()
        if number is not None:
            return OSError(number, os.strerror(number))
        return self.damaged("it cannot be read")

    def _why_not_written(self) -> int:
        """Return the error that a write at the end of such a file gives: SQLite knows one for all."""
        try:
            # Never the memory itself: closing it would drop SQLite's locks.
            with tempfile.TemporaryFile(dir=self.path.parent) as file:
                os.pwrite(file.fileno(), bytes(_PAGE_BYTES), self.path.stat().st_size)
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno or errno.EIO
        return errno.EIO


_NUMBERS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
}


def _connect(path: Path) -> sqlite3.Connection:
    """Open a file that exists; SQLite would make one that is missing, readable by others."""
    name = urllib.parse.quote(os.fsencode(path.absolute()))
    db = sqlite3.connect(f"file:{name}?mode=rw", uri=True, timeout=_WAIT_S, isolation_level=None)
    try:
        for setting in _SETTINGS:
            db.execute(setting)
        db.execute("PRAGMA journal_mode=DELETE").fetchone()
    except BaseException:
        db.close()
        raise
    return db


# Where versions before 0.3 kept what is one file now. They are read no more, and never taken for nothing.
#
# They had ``registry.json`` with ``rows``, ``cuts`` and a key, the folders ``alignments``, ``released_bins`` and
# ``predictions``, ``data_refusals.json``, and beside the ledgers the rows whose buckets were sent. Versions from 0.3 to
# 0.10 copied all of it into the memory, renamed it to ``*.migrated``, and left a text in the place of some files.


_IN_REGISTRY = (
    "registry.json",
    "key",
    "rows",
    "cuts",
    "alignments",
    "released_bins",
    "predictions",
    "data_refusals.json",
)
_BESIDE_LEDGERS = "rows_of_buckets.jsonl"
_COPIED = b"This site's memory has moved to veilboost_memory.sqlite, which older versions of VeilBoost cannot read.\n"


def not_copied(registry: Path, ledgers: Path | None) -> list[str]:
    """Return the names of files and folders that tell of releases and that no memory holds."""
    return [place.name for place in _places(registry, ledgers) if any(map(_tells, _files(place)))]


def copied(registry: Path, ledgers: Path | None) -> list[str]:
    """Return the names of what shows that a memory was made of such files: it was there."""
    places = _places(registry, ledgers)
    kept = [found for place in places for found in place.parent.glob(f"{glob.escape(place.name)}.migrated*")]
    return sorted(path.name for path in (*kept, *(place for place in places if any(_files(place)))))


def _places(registry: Path, ledgers: Path | None) -> list[Path]:
    found = [registry / name for name in _IN_REGISTRY]
    return found if ledgers is None else [*found, ledgers / _BESIDE_LEDGERS]


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or those in a folder; not what a write that was cut short has left."""
    if path.is_dir():
        for inner in path.iterdir():
            yield from _files(inner)
    elif path.exists() and not (path.name.startswith(".") and path.name.endswith(".partial")):
        yield path


def _tells(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_COPIED) + 1) != _COPIED


# What a site remembers of its policy between jobs, so that a change does not go unnoticed.


_NOT_POLICY = ("site", "workspace")


_LAST_BACKUP = "last_backup"


def note_backup(policy: SitePolicy) -> None:
    """Note that a backup was made just now, for ``last_backup``; where a site remembers nothing, nothing is noted."""
    if Memory.is_there(policy):
        write_private(policy.registry / _LAST_BACKUP, b"")


def last_backup(policy: SitePolicy) -> float | None:
    """Return when a backup was made last, in seconds since 1970; None if never."""
    try:
        return (policy.registry / _LAST_BACKUP).stat().st_mtime
    except FileNotFoundError:
        return None


def policy_changes(policy: SitePolicy) -> list[str]:
    """Return the keys of the policy that have changed since this was last asked, and remember what they are now.

    The site's memory holds hashes. The first time there is nothing to compare with. A key that a later version knows,
    and that is left out, has not changed.

    Raises:
        ConfigurationError: the memory is damaged.
    """
    now, left_out = _hashes(policy), _hashes(type(policy)(policy.site, policy.workspace))
    with Memory.open(policy).transaction() as db:
        before = dict(db.execute("SELECT name, hash FROM policy_keys"))
        if before != now:
            db.execute("DELETE FROM policy_keys")
            db.executemany("INSERT INTO policy_keys VALUES (?, ?)", now.items())
    return sorted(key for key in {*before, *now} if before and before.get(key, left_out.get(key)) != now.get(key))


_BY_ID = tuple(f"SELECT 1 FROM {table} LIMIT 1" for table in ("alignments", "sent_rows", "row_counts"))  # noqa: S608


def hold_id_form(policy: SitePolicy) -> None:
    """Refuse a job where ids are not read as when something was first remembered by them.

    What was released of a row, and whose budget is spent, is known by ids in their form: in another one, rows and
    persons would be new. So all data sets of a site have one form, and it stays. A memory of before there were forms
    knows ids as they are written.

    Raises:
        PolicyRefusal: the data sets differ in it, or it has changed.
        ConfigurationError: the memory is damaged.
    """
    forms = {name: spec.id_form for name, spec in sorted(policy.data_sets.items()) if spec.id is not None}
    if not forms:
        return
    form, *others = dict.fromkeys(forms.values())
    if others:
        raise PolicyRefusal(
            f"the data sets {', '.join(forms)} of {policy.site} do not have one id_form, so that a person could be two "
            "for what this site remembers. Policy key: data_sets.<name>.id_form. Remedy: the same for all that have ids"
        )
    memory = Memory.open(policy)
    with memory.reading() as db:
        is_used = any(db.execute(question).fetchone() for question in _BY_ID)
    if memory.secret("id_form", _form_hash(IdForm() if is_used else form)) != _form_hash(form):
        raise PolicyRefusal(
            f"id_form of the data sets of {policy.site} is not what it was when this site first remembered ids: rows "
            "and persons would be new to caps and budgets. Policy key: data_sets.<name>.id_form. Remedy: as it was then"
        )


def _form_hash(form: IdForm) -> bytes:
    return hashlib.sha256(json.dumps(dataclasses.asdict(form), sort_keys=True).encode()).digest()


def _hashes(policy: SitePolicy) -> dict[str, str]:
    """Return a hash for each key; each consent, rule and data set counts as a key, so that the log can name it."""
    values: dict[str, object] = {}
    for key, value in values_of(policy, _NOT_POLICY).items():
        inner = values_of(value) if dataclasses.is_dataclass(value) else value
        values |= {f"{key}.{name}": item for name, item in inner.items()} if isinstance(inner, dict) else {key: inner}
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=_as_json).encode()).hexdigest()
        for key, value in values.items()
    }


def _as_json(value: object) -> object:
    return values_of(value) if dataclasses.is_dataclass(value) else str(value)
