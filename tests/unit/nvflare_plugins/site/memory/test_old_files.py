"""What versions before 0.7 left is refused by name, with the version that reads it, and never taken for nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.cli.main import main
from nvflare_plugins.site.memory.store import MADE, NAME, Memory
from nvflare_plugins.site.policy import SitePolicy
from tests.support.memories import told

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
