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
from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.site.memory.store import MADE, NAME, Memory, load_array, store_array
from nvflare_plugins.site.policy import SitePolicy
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


# -- files of earlier versions -----------------------------------------------------------------------------------------


SITE = "site-2"
COPIED = b"This site's memory has moved to veilboost_memory.sqlite, which older versions of VeilBoost cannot read.\n"
BEFORE_0_3 = (
    "registry/registry.json",
    "registry/key",
    "registry/rows/0f.u64",
    "registry/cuts/1.npz",
    "registry/alignments/key",
    "registry/alignments/alignments.json",
    "registry/released_bins/0f.npz",
    "registry/predictions/0f.npz",
    "registry/data_refusals.json",
    "ledgers/rows_of_buckets.jsonl",
)
REMEDY = r"before 0\.7 wrote it, .*Remedy: .*veilboost registry DIR.* with VeilBoost 0\.10\."


def policy_in(folder: Path) -> SitePolicy:
    return SitePolicy.from_dict({"registry": "registry", "ledgers": "ledgers"}, workspace=folder, site=SITE)


def leave(folder: Path, name: str, content: bytes = b"{}") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize("name", BEFORE_0_3)
def test_files_of_versions_before_0_3_are_refused_and_stay(tmp_path: Path, name: str, with_memory: bool) -> None:
    """They may tell of releases: a memory that is begun beside them, or was there, does not know these."""
    if with_memory:
        Memory.open(policy_in(tmp_path))
    leave(tmp_path, name)
    there = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=REMEDY) as refused:
            Memory.open(policy_in(tmp_path))
        assert Path(name).parts[1] in str(refused.value) and str(tmp_path) not in str(refused.value)
    found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    assert found == there
    assert Memory.is_there(policy_in(tmp_path))


def test_what_was_copied_before_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("registry/key.migrated", "registry/alignments.migrated/key", "ledgers/rows_of_buckets.jsonl.migrated"):
        leave(tmp_path, name)
    memory = Memory(tmp_path / "elsewhere", SITE)
    (tmp_path / "elsewhere" / NAME).rename(tmp_path / "registry" / NAME)
    for name in ("registry/key", "registry/alignments/key", "ledgers/rows_of_buckets.jsonl"):
        leave(tmp_path, name, COPIED)
    assert told(Memory.open(policy_in(tmp_path)), "SELECT * FROM runs") == [] and not memory.path.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("registry/key", COPIED), ("registry/registry.json.migrated", b"{}"), (f"registry/{MADE}", b"")],
)
def test_a_memory_that_is_lost_is_not_begun_anew(tmp_path: Path, name: str, content: bytes) -> None:
    """The mark tells that it was there, and without it what was copied, or what lies in its place."""
    leave(tmp_path, name, content)
    with pytest.raises(ConfigurationError, match=r"no longer there.*Restore it from a backup") as refused:
        Memory.open(policy_in(tmp_path))
    assert Path(name).name in str(refused.value)
    assert Memory.is_there(policy_in(tmp_path)) and not (tmp_path / "registry" / NAME).exists()


def test_old_files_do_not_stand_in_for_a_memory_that_is_lost(tmp_path: Path) -> None:
    """They know nothing of what was released since."""
    leave(tmp_path, f"registry/{MADE}")
    leave(tmp_path, "registry/registry.json")
    with pytest.raises(ConfigurationError, match=rf"no longer there.*{MADE}"):
        Memory.open(policy_in(tmp_path))


@pytest.mark.parametrize("version", [1, 2])
def test_formats_of_before_0_7_are_refused_and_stay(
    tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, "local/veilboost.json", b'{"registry": "registry"}')
    memory = Memory.open(SitePolicy.load(tmp_path, SITE))
    with closing(sqlite3.connect(memory.path)) as db:
        for table in ("scored_answers", "scored_rows", "scored_sets"):
            db.execute(f"DROP TABLE {table}")
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()
    before = memory.path.read_bytes()
    with pytest.raises(ConfigurationError, match=rf"{NAME} of format {version}.*{REMEDY}"):
        Memory.open(policy_in(tmp_path))
    assert main(["registry", str(tmp_path), "--site", SITE]) != 0
    assert f"format {version}" in capsys.readouterr().err
    assert memory.path.read_bytes() == before
