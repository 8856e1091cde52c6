"""The one file in which a site remembers, between its jobs, what these have released and refused.

``Memory`` is an SQLite file in the folder of the site's registry. Its users (``Registry``, ``AlignmentRegistry``,
``ReleasedSums``, ``PredictionBudget``, ``SentRows``, ``RefusalCount``, ``policy_changes``) keep their tables in it.
What belongs together, such as a reservation and the hashes of its rows, is one transaction: after a crash or on a full
disk all of it is there, or none.

Durability: a transaction is on the disk when ``transaction`` has ended (``synchronous=EXTRA``: FULL, and the folder is
    synced after the journal is gone; else a loss of power could bring the journal back, and with it the time before).
    The journal is a rollback journal: a write-ahead log needs memory that machines of a network volume do not share.
Concurrency: any number of processes and threads. Each transaction has a connection of its own and takes the write lock
    when it begins, so that what it reads stays true until it has written.
Privacy: purely local, mode 0600 in a folder of mode 0700. Rows and ids are hashes under keys that lie in the same file:
    with it a guessed row or id can be tested, which is why it stays at the site. No value, gradient or sum of a row.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.files import sync_folder
from nvflare_plugins.site.memory.old_files import OldFiles
from nvflare_plugins.site.memory.schema import APPLICATION, FORMAT, STATEMENTS, DamagedArray
from nvflare_plugins.site.memory.volume import why_no_locks
from nvflare_plugins.site.policy.policy import SitePolicy

NAME = "veilboost_memory.sqlite"
KEY_BYTES = 32
_LOCK = "lock"
_PAGE_BYTES = 4096
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
        """Open the memory, or make it: of the files of earlier versions, where there are such.

        Args:
            folder: of the site's registry.
            ledgers: folder of the privacy ledgers, where earlier versions kept the rows whose buckets were sent.

        Raises:
            ConfigurationError: the file is damaged or of a newer version, file locks do not work in the folder, or
                what an earlier version left cannot be read.
            OSError: the folder cannot be written, or its disk is full.
        """
        self.site, self.path = site, folder / NAME
        old = OldFiles(folder, ledgers, site)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_locks(folder / _LOCK)
        if not self.path.exists() or self._left_behind() == 0 or old.found():
            with _alone(folder / _LOCK):
                if not self.path.exists():
                    self._make(old)
                self._leave_behind(old)
        if self.path.stat().st_mode & 0o077:  # as copied back from a backup
            self.path.chmod(0o600)

    @classmethod
    def open(cls, policy: SitePolicy) -> Memory:
        """Open the memory of the site whose policy this is."""
        return cls(policy.registry, policy.site, policy.ledgers)

    @staticmethod
    def is_there(policy: SitePolicy) -> bool:
        """Return whether the site remembers anything, of this version or an earlier one; makes nothing."""
        old = OldFiles(policy.registry, policy.ledgers, policy.site)
        return (policy.registry / NAME).exists() or bool(old.found())

    @contextlib.contextmanager
    def transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Read and write: durable when the block ends, and nothing of it happened if it raises.

        Within the block no other transaction of the same memory may be begun: it would wait for this one.

        Raises:
            ConfigurationError: the file is damaged, or another process holds it and does not let go.
            OSError: the disk is full or fails, or the file may not be written.
        """
        if not self.path.exists():
            raise self.damaged("it is no longer there")
        with self._in_words(), contextlib.closing(_connect(self.path)) as db:
            db.execute(begin)
            self._check(db)
            yield db
            db.execute("COMMIT")  # without it, closing rolls back

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Read one state of the memory. Raises: as ``transaction``."""
        return self.transaction("BEGIN")

    def secret(self, name: str, fresh: bytes) -> bytes:
        """Return the site's secret of this name, which becomes ``fresh`` where there is none yet.

        Security: never leaves the site; hashes of rows and ids are kept under such secrets.
        """
        with self.reading() as db:
            found = db.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()
        if found is None:
            with self.transaction() as db:
                db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, fresh))
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

    def _make(self, old: OldFiles) -> None:
        """Write the file under another name, with all that an earlier version left, and then give it its own.

        So the file is never there without its content: one of no bytes has lost it.
        """
        if old.were_moved() and not old.found():
            raise self.damaged("it is no longer there")
        partial = self.path.with_name(f".{NAME}.partial")
        for left in (partial, partial.with_name(f"{partial.name}-journal")):  # by a process that was killed
            left.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with self._in_words(), contextlib.closing(_connect(partial)) as db:
            db.execute("BEGIN IMMEDIATE")
            for statement in STATEMENTS:
                db.execute(statement)
            if old.found():
                old.copy_to(db)
                db.execute("INSERT INTO earlier_version VALUES (0)")
            db.execute(f"PRAGMA application_id={APPLICATION}")
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
        os.rename(partial, self.path)
        sync_folder(self.path.parent)

    def _leave_behind(self, old: OldFiles) -> None:
        """Move the files of an earlier version out of the way, once the memory holds what they say."""
        if self._left_behind() == 0:
            old.move_away()
            with self.transaction() as db:
                db.execute("UPDATE earlier_version SET is_moved_away = 1")
        if names := old.found():
            raise ConfigurationError(
                f"{self.site}: files of an earlier version lie where they did not before ({names}): it has run since "
                f"{NAME} was made, or a backup of it was restored. They may tell of releases that {NAME} does not "
                f"know. Remedy: move away either these files or {NAME}, whichever knows less."
            )

    def _left_behind(self) -> int | None:
        """Return 1 or 0 if the memory was made of an earlier version's files: whether they were moved away since."""
        with self.reading() as db:
            row = db.execute("SELECT is_moved_away FROM earlier_version").fetchone()
        return None if row is None else row[0]

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
            return ConfigurationError(
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
            with tempfile.TemporaryFile(
                dir=self.path.parent
            ) as file:  # never the file: closing it drops SQLite's locks
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


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock that earlier versions hold while they write."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
