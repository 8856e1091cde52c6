"""A memory's file that cannot be used: damaged, of other tables, not to be written, on a full disk or gone."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import machine_failure
from nvflare_plugins.cli.main import main
from nvflare_plugins.site.memory import store
from nvflare_plugins.site.memory.store import FORMAT, MADE, NAME, Memory, store_array
from tests.support.memories import KEY, names, note, policy_of, refusal, told

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "a header only": lambda content: content[:100],
    "a page less": lambda content: content[:-4096],
    "half": lambda content: content[: len(content) // 2],
    "some bytes less": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "text": lambda content: b'{"version": 2}' * 1000,
    "first page lost": lambda content: bytes(4096) + content[4096:],
    "tables lost": lambda content: content[:4096] + bytes(len(content) - 4096),
    "schema in other bytes": lambda content: content.replace(b"CREATE TABLE secrets", b"CREATE TABLE s\xff\xffrets"),
    "oversized": lambda content: b"VeilBoost" * 500_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_and_stays_as_it_is(tmp_path: Path, damage: str) -> None:
    memory = Memory(tmp_path, "site-1")
    memory.secret("rows", KEY)
    content = DAMAGE[damage](memory.path.read_bytes())
    memory.path.write_bytes(content)
    text = refusal(tmp_path)
    assert "Restore it from a backup" in text and NAME in text and str(tmp_path) not in text
    assert memory.path.read_bytes() == content


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    Memory(tmp_path, "site-1").path.unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises((ConfigurationError, OSError)):
        Memory(tmp_path, "site-1")


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE refusals",
        "CREATE TABLE more (a)",
        "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END",
        "CREATE VIEW v AS SELECT * FROM secrets",
        "PRAGMA application_id = 5",
        "PRAGMA user_version = 0",
    ],
)
def test_a_database_with_other_tables_is_refused(tmp_path: Path, statement: str) -> None:
    with closing(sqlite3.connect(Memory(tmp_path, "site-1").path)) as db:
        db.execute(statement)
        db.commit()
    assert "Restore it from a backup" in refusal(tmp_path)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """As after a step back to an older release; the newer one then finds all as it left it."""
    memory = Memory(tmp_path, "site-1")
    note(memory, "before")
    with closing(sqlite3.connect(memory.path)) as db:
        db.execute(f"PRAGMA user_version = {FORMAT + 1}")
        db.execute("CREATE TABLE of_the_future (a)")
        db.commit()
    content, files = memory.path.read_bytes(), sorted(tmp_path.iterdir())
    for _ in range(2):
        text = refusal(tmp_path)
        assert f"format {FORMAT + 1}" in text and "newer VeilBoost" in text and "install that version" in text
    assert memory.path.read_bytes() == content and sorted(tmp_path.iterdir()) == files
    with closing(sqlite3.connect(memory.path)) as db:
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("DROP TABLE of_the_future")
        db.commit()
    assert names(Memory(tmp_path, "site-1")) == ["before"]


def test_a_log_of_writes_to_come_is_turned_off(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "site-1")
    with closing(sqlite3.connect(memory.path)) as db:
        assert db.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    note(memory, "x")
    with memory.reading() as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_folder_that_may_not_be_written_is_told_as_that(tmp_path: Path) -> None:
    read_only = mock.patch.object(os, "open", side_effect=OSError(errno.EROFS, "Read-only file system"))
    with read_only, pytest.raises(OSError, match="Read-only") as failed:
        Memory(tmp_path / "r", "site-1")
    assert "read-only" in str(machine_failure(failed.value))


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "setresuid"), reason="needs another user")
def test_a_file_that_may_not_be_written_is_told_as_that(tmp_path: Path) -> None:
    """In a process of an ordinary user: the superuser may write everything."""
    memory = Memory(tmp_path, "site-1")
    note(memory, "before")
    memory.path.chmod(0o444)
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_write_as_nobody, args=(memory, sender))
    process.start()
    assert receiver.poll(60)
    assert receiver.recv() == errno.EACCES
    process.join()
    tmp_path.chmod(0o700)
    assert names(memory) == ["before"]


def _write_as_nobody(memory: Memory, answer: Connection) -> None:
    if os.geteuid() == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    try:
        note(memory, "after")
        answer.send(0)
    except OSError as error:
        answer.send(error.errno)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "site-1")
    note(memory, "before")
    connect = store._connect

    def full(path: Path) -> sqlite3.Connection:
        db = connect(path)
        (n_pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {n_pages}")  # SQLite then says what it says where no page more fits
        return db

    def remember_more() -> None:
        with memory.transaction() as db:
            db.execute("INSERT INTO policy_keys VALUES ('after', 'hash')")
            store_array(db, np.arange(200_000))

    with mock.patch.object(store, "_connect", full), pytest.raises(OSError, match="No space left") as failed:
        remember_more()
    assert failed.value.errno == errno.ENOSPC and "the disk is full" in str(machine_failure(failed.value))
    assert names(memory) == ["before"] and told(memory, "SELECT * FROM arrays") == []


def test_a_limit_of_file_sizes_is_told_as_that(tmp_path: Path) -> None:
    """SQLite knows it as an error of the disk, whose health an operator would then look at."""
    memory = Memory(tmp_path, "site-1")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_write_beyond_a_limit, args=(memory, sender))
    process.start()
    assert receiver.poll(60)
    assert receiver.recv() == errno.EFBIG
    process.join()
    assert told(memory, "SELECT * FROM arrays") == []


def _write_beyond_a_limit(memory: Memory, answer: Connection) -> None:
    size = memory.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        with memory.transaction() as db:
            store_array(db, np.arange(100_000))
        answer.send(0)
    except OSError as error:
        answer.send(error.errno)


def test_a_disk_too_full_to_begin_on_leaves_nothing_behind_that_counts(tmp_path: Path) -> None:
    connect = store._connect

    def full(path: Path) -> sqlite3.Connection:
        db = connect(path)
        db.execute("PRAGMA max_page_count = 3")
        return db

    with mock.patch.object(store, "_connect", full), pytest.raises(OSError, match="No space left") as failed:
        Memory(tmp_path, "site-1")
    assert failed.value.errno == errno.ENOSPC and not (tmp_path / NAME).exists()
    note(Memory(tmp_path, "site-1"), "begun")
    assert {path.name for path in tmp_path.iterdir()} == {NAME, MADE, "lock"}


def test_a_missing_file_is_not_made_again_in_the_middle(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "site-1")
    memory.path.unlink()
    with pytest.raises(ConfigurationError, match="no longer there"):
        note(memory, "x")
    assert not memory.path.exists()


def test_a_memory_that_is_lost_is_not_begun_anew_until_somebody_accepts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rolled away, on a volume that is not mounted again, or deleted: it would forget what was released."""
    policy = policy_of(tmp_path)
    memory = Memory.open(policy)
    assert stat.S_IMODE((memory.path.parent / MADE).stat().st_mode) == 0o600
    memory.path.rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="no longer there") as refused:
            Memory.open(policy)
    text = str(refused.value)
    assert "Restore it from a backup" in text and text.endswith(f"moving what tells of it out of its folder ({MADE}).")
    assert Memory.is_there(policy) and main(["registry", str(tmp_path), "--site", "site-1"]) == 1
    assert "no longer there" in capsys.readouterr().err and not memory.path.exists()
    (memory.path.parent / MADE).unlink()
    assert not Memory.is_there(policy)
    note(Memory.open(policy), "anew")


def test_a_memory_without_its_mark_gets_it(tmp_path: Path) -> None:
    """A crash came between the two, or a backup brought the memory alone."""
    memory = Memory(tmp_path, "site-1")
    note(memory, "kept")
    (tmp_path / MADE).unlink()
    assert names(Memory(tmp_path, "site-1")) == ["kept"] and (tmp_path / MADE).exists()
