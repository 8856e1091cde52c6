"""The file of a site's memory: durable, private, shared by processes."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.site.memory import store
from nvflare_plugins.site.memory import store as volume
from nvflare_plugins.site.memory.store import MADE, NAME, Memory, load_array, store_array
from tests.support.memories import KEY, changed, names, note, refusal, told
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
