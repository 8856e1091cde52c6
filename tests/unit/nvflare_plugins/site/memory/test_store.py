"""The file of a site's memory: durable, private, shared by processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import sqlite3
import stat
import threading
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
from nvflare_plugins.site.memory import store as volume
from nvflare_plugins.site.memory.store import FORMAT, MADE, NAME, Memory, load_array, store_array
from tests.support.memories import KEY, changed, names, note, policy_of, refusal, told
from tests.support.processes import processes as processes_of_tests


def test_what_is_written_is_there_and_what_fails_is_not(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "site-1")
    note(memory, "kept")
    with pytest.raises(sqlite3.IntegrityError), memory.transaction() as db:
        db.executemany("INSERT INTO policy_keys VALUES (?, 'hash')", [("lost",), ("kept",)])
    assert names(Memory(tmp_path, "site-1")) == ["kept"]


def test_a_transaction_is_on_the_disk_before_it_is_over(tmp_path: Path) -> None:
    """EXTRA syncs the folder too, from which the journal has gone."""
    with Memory(tmp_path, "site-1").reading() as db:
        settings = {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")}
        assert settings == {"synchronous": 3, "journal_mode": "delete"}
        assert db.execute("PRAGMA foreign_keys").fetchone() == db.execute("PRAGMA secure_delete").fetchone() == (1,)


@pytest.mark.parametrize("folder", ["plain", "mit Umläuten/ünd Leerzeichen", "a?b#c%20d", "日本"])
def test_any_folder_will_do(tmp_path: Path, folder: str) -> None:
    note(Memory(tmp_path / folder, "site-1"), "here")
    assert names(Memory(tmp_path / folder, "site-1")) == ["here"]
    assert {path.name for path in (tmp_path / folder).iterdir()} == {NAME, MADE, "lock"}


def test_a_folder_whose_name_is_no_text_will_do(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    note(Memory(folder, "site-1"), "here")
    assert names(Memory(folder, "site-1")) == ["here"]


def test_the_file_is_private_also_where_the_mask_is_not(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        memory = Memory(tmp_path / "r", "site-1")
        with memory.transaction() as db:
            db.execute("INSERT INTO policy_keys VALUES ('x', 'y')")
            db.execute("UPDATE policy_keys SET hash = 'z'")
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "r").iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600} and f"{NAME}-journal" in modes
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o700
    memory.path.chmod(0o644)  # as copied back from a backup
    Memory(tmp_path / "r", "site-1")
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o600


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    assert Memory(tmp_path, "site-1").secret("rows", KEY) == KEY
    assert Memory(tmp_path, "site-1").secret("rows", b"l" * 32) == KEY
    changed(Memory(tmp_path, "site-1"), "UPDATE secrets SET value = x'00'")
    with pytest.raises(ConfigurationError, match="secret for rows is damaged"):
        Memory(tmp_path, "site-1").secret("rows", KEY)


# -- several at a time -------------------------------------------------------------------------------------------------


def test_processes_and_threads_lose_no_write_of_each_other(tmp_path: Path) -> None:
    """Each reads a number and writes the next one; all of them make the memory."""
    context = processes_of_tests()
    processes = [context.Process(target=_count, args=(tmp_path, 12)) for _ in range(3)]
    threads = [threading.Thread(target=_count, args=(tmp_path, 12)) for _ in range(3)]
    for one in (*processes, *threads):
        one.start()
    for one in (*processes, *threads):
        one.join(300)
    assert all(process.exitcode == 0 for process in processes)
    assert told(Memory(tmp_path, "site-1"), "SELECT hash FROM policy_keys") == [(str(6 * 12),)]


def _count(folder: Path, times: int) -> None:
    for _ in range(times):
        with Memory(folder, "site-1").transaction() as db:
            row = db.execute("SELECT hash FROM policy_keys WHERE name = 'n'").fetchone()
            number = 1 + (int(row[0]) if row else 0)
            db.execute("INSERT OR REPLACE INTO policy_keys VALUES ('n', ?)", (str(number),))


def test_who_does_not_let_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_WAIT_S", 0.05)
    memory = Memory(tmp_path, "site-1")
    with memory.transaction(), pytest.raises(ConfigurationError, match=r"another process holds.*Remedy"):
        note(Memory(tmp_path, "site-1"), "x")
    note(memory, "x")


# -- volumes whose locks do nothing ------------------------------------------------------------------------------------


def mounts(folder: Path, line: str) -> str:
    place = str(folder.resolve()).replace(" ", "\\040")
    return f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {place} rw shared:1 - {line}\n3 1 0:6 / /else rw - x y z\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nfs server:/x rw,vers=3,nolock,local_lock=none", "nfs with nolock"),
        ("nfs4 server:/x rw,vers=4.2,local_lock=all", "nfs4 with local_lock=all"),
        ("cifs //server/x rw,nobrl", "cifs with nobrl"),
        ("fuse.sshfs me@server:/x rw", "fuse.sshfs"),
        ("nfs4 server:/x rw,vers=4.2,local_lock=none", None),
        ("cifs //server/x rw", None),
        ("ext4 /dev/sdb rw", None),
        ("", None),
    ],
)
def test_network_volumes_without_locks_are_refused(
    tmp_path: Path, line: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a volume"
    folder.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(mounts(folder, line))
    monkeypatch.setattr(volume, "_MOUNTS", table)
    if why is None:
        Memory(folder / "r", "site-1")
        return
    text = refusal(folder / "r")
    assert f"({why})" in text and "Policy key: registry. Remedy:" in text and not (folder / "r" / NAME).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_locks_that_fail_or_keep_nobody_out_are_refused(
    tmp_path: Path, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(descriptor: int) -> None:
        if number is not None:
            raise OSError(number, "no locks")

    monkeypatch.setattr(volume, "_lock", lock)
    assert "file locks do not work" in refusal(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_locks_are_tried_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(tmp_path, "site-1")
    monkeypatch.setattr(volume, "_lock", lambda descriptor: pytest.fail("tried again"))
    Memory(tmp_path, "site-1")


def test_a_lock_that_somebody_holds_works(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("r+b") as held:
        volume._lock(held.fileno())
        assert volume.why_no_locks(tmp_path / "lock") is None


# -- arrays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 65_536, 200_000])
def test_arrays_come_back(tmp_path: Path, n: int) -> None:
    memory, values = Memory(tmp_path, "site-1"), np.arange(n, dtype=np.uint64)
    with memory.transaction() as db:
        number = store_array(db, values)
    with memory.reading() as db:
        found = load_array(db, number, "<u8", n)
    assert found.dtype == values.dtype and np.array_equal(found, values)


@pytest.mark.parametrize("values", [np.array(["a"]), np.zeros((2, 2)), np.array([object()]), np.zeros(1, ">u8")])
def test_no_other_arrays_are_stored(tmp_path: Path, values: np.ndarray) -> None:
    with Memory(tmp_path, "site-1").transaction() as db, pytest.raises(TypeError):
        store_array(db, values)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM array_parts WHERE part = 1",
        "DELETE FROM array_parts WHERE part = 3",
        "DELETE FROM arrays",
        "UPDATE arrays SET length = length - 1",
        "UPDATE arrays SET kind = '<i8'",
        "UPDATE array_parts SET content = zeroblob(524288) WHERE part = 2",
        "UPDATE array_parts SET content = 'text' WHERE part = 2",
        "UPDATE array_parts SET part = 9 WHERE part = 3",
    ],
)
def test_damaged_arrays_are_refused(tmp_path: Path, damage: str) -> None:
    memory = Memory(tmp_path, "site-1")
    with memory.transaction() as db:
        number = store_array(db, np.arange(200_000, dtype=np.uint64))
    changed(memory, damage)
    with pytest.raises(ConfigurationError, match="Restore it from a backup"), memory.reading() as db:
        load_array(db, number, "<u8")


# -- a file that cannot be used ----------------------------------------------------------------------------------------


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
