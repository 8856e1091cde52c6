"""Backups of a site's memory, made while a job writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dp_components.errors import LedgerDamaged, PrivacyRefusal
from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from dp_components.ledger import Budget, Ledger, LedgerIdentity, ledger_files
from nvflare_plugins.cli.main import main
from nvflare_plugins.site.memory.store import Memory, load_array, store_array
from tests.support.memories import names, note, policy_of, refusal, told


def test_a_backup_is_made_while_a_job_writes_and_restores_what_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, folder = Memory.open(policy_of(tmp_path)), tmp_path / "backups" / "monday"
    note(memory, "before")
    command, copy = ["backup", str(tmp_path), str(folder), "--site", "site-1"], folder / memory.path.name
    with memory.transaction() as db:
        db.execute("INSERT INTO policy_keys VALUES ('unfinished', 'hash')")
        assert main(command) == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600 and str(memory.path) in capsys.readouterr().out
    hashes = json.loads((folder / "backup.json").read_text())["sha256"]
    assert hashes == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("veilb*")}
    assert set(hashes) == {memory.path.name, "veilboost.json"}
    note(memory, "later")
    os.replace(copy, memory.path)
    assert names(Memory.open(policy_of(tmp_path))) == ["before"]
    copy.write_text("somebody's")
    assert main(command) == 1 and "is there already" in capsys.readouterr().err
    assert copy.read_text() == "somebody's"


def test_a_damaged_memory_gives_no_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = Memory.open(policy_of(tmp_path))
    content = memory.path.read_bytes()
    memory.path.write_bytes(content[:4096] + bytes(len(content) - 4096))
    assert main(["backup", str(tmp_path), str(tmp_path / "copy"), "--site", "site-1"]) == 1
    assert "Restore it from a backup" in capsys.readouterr().err and not list(tmp_path.glob("*copy*"))


def test_a_ledger_restored_from_a_backup_is_refused_until_somebody_accepts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its head, and, as on a new machine, without: then the whole budget counts as spent."""
    policy = policy_of(tmp_path)
    event = GaussianEvent(2.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)
    identity = LedgerIdentity("site-1", "credit", NeighbouringRelation.ADD_OR_REMOVE_ROW)

    def ledger() -> Ledger:
        return Ledger.open(policy.ledgers, identity, Budget(8.0, 1e-5), policy.ledger_heads)

    def spend(job: str) -> None:
        ledger().open_job(job, event)
        ledger().release(job, "q", lambda: Release(np.zeros(1, np.int64), event))
        ledger().close_job(job)

    spend("before")
    folder = tmp_path / "backup"
    assert main(["backup", str(tmp_path), str(folder), "--site", "site-1"]) == 0
    spend("later")
    (path,) = ledger_files(policy.ledgers)
    accept = ["ledger", str(tmp_path), "--site", "site-1", "--data-set", "credit", "--accept-cut"]
    shutil.copy(folder / path.name, path)
    with pytest.raises(LedgerDamaged):
        spend("next")
    for head in policy.ledger_heads.iterdir():
        head.unlink()
    with pytest.raises(LedgerDamaged):
        spend("next")
    capsys.readouterr()
    assert main(accept) == 0
    with pytest.raises(PrivacyRefusal):
        spend("next")


def grown(memory: Memory, n: int) -> None:
    with memory.transaction() as db:
        for number in range(n):
            store_array(db, np.full(4000, number, dtype="<i8"))


def write_cut_short(path: Path, db_copy: Path, journal_copy: Path) -> None:
    """Copy a file and its journal as they are in the middle of a write, of which pages have reached the disk."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size=1")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE array_parts SET content = zeroblob(length(content))")
        store_array(db, np.ones(100_000, dtype="<i8"))  # the file grows, which its first page says
        shutil.copy(path, db_copy)
        shutil.copy(f"{path}-journal", journal_copy)
        db.execute("ROLLBACK")


@pytest.mark.parametrize("is_backup", [True, False])
def test_a_journal_beside_a_backup_is_not_written_into_it(tmp_path: Path, is_backup: bool) -> None:
    """SQLite plays it back into whatever lies there. The control: beside the file that it belongs to it helps."""
    memory = Memory(tmp_path, "site-1")
    note(memory, "early")
    shutil.copy(memory.path, tmp_path / "backup")
    grown(memory, 30)
    note(memory, "late")
    journal = Path(f"{memory.path}-journal")
    write_cut_short(memory.path, tmp_path / "middle", tmp_path / "journal")
    shutil.copy(tmp_path / ("backup" if is_backup else "middle"), memory.path)
    shutil.copy(tmp_path / "journal", journal)
    if is_backup:
        before = memory.path.read_bytes()
        assert f"move {journal.name} away" in refusal(tmp_path)
        assert memory.path.read_bytes() == before == (tmp_path / "backup").read_bytes() and journal.exists()
        with closing(sqlite3.connect(memory.path)) as db, contextlib.suppress(sqlite3.DatabaseError):
            db.execute("SELECT COUNT(*) FROM arrays").fetchone()
        assert memory.path.read_bytes() != before, "without the check another time's pages are in it"
        shutil.copy(tmp_path / "backup", memory.path)  # once more, now without the journal
        assert names(Memory(tmp_path, "site-1")) == ["early"]
        return
    assert names(Memory(tmp_path, "site-1")) == ["early", "late"]
    for number, kind in told(memory, "SELECT id, kind FROM arrays"):
        with memory.reading() as db:
            assert load_array(db, number, kind).any() or number == 1
