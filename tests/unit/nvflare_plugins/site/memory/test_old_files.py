"""What earlier versions left at a site is copied once, and means the same afterwards; damage is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dp_components.ledger_journal import Alive
from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.cli.main import main
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.site.memory import old_files, runs
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.schema import FORMAT, load_array
from nvflare_plugins.site.memory.sent_rows import SentRows
from nvflare_plugins.site.memory.store import MADE, NAME, Memory
from nvflare_plugins.site.memory.stored_arrays import read_arrays
from nvflare_plugins.site.policy.policy import SitePolicy
from tests.support.memories import told

SITE = "site-2"
GOLDEN = Path(__file__).parents[5] / "tests" / "golden" / "site_1"
STORES = {  # a file that an earlier version reads first, by store
    "registry": "veilboost_registry/site-2/key",
    "alignments": "veilboost_registry/site-2/alignments/key",
    "released sums": "veilboost_registry/site-2/released_bins/key",
    "predictions": "veilboost_registry/site-2/predictions/key",
    "refusals": "veilboost_registry/site-2/data_refusals.json",
    "sent rows": "veilboost_ledgers/site-2/rows_of_buckets.jsonl",
}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / SITE))


def registry_in(workspace: Path) -> Path:
    return workspace / "veilboost_registry" / SITE


def policy_in(workspace: Path) -> SitePolicy:
    return SitePolicy.load(workspace, SITE)


def test_all_that_was_stored_is_there_to_the_byte(workspace: Path) -> None:
    old, memory = registry_in(GOLDEN), Memory.open(policy_in(workspace))
    document = json.loads((old / "registry.json").read_text())
    with memory.reading() as db:
        stored = runs.all_runs(db)
        data = {run.terms.fingerprint: runs.data_of(db, run.terms.data) for run in stored}
        rows = {run.terms.fingerprint: runs.rows_of(db, run.terms.data) for run in stored}
    assert [(run.job_id, run.started, run.state, run.trees) for run in stored] == [
        (job_id, started, state, trees) for _, job_id, _, started, state, trees in document["runs"]
    ]
    for (_, _, number, *_), run in zip(document["runs"], stored, strict=True):
        fingerprint, sites, parameters, *draw = document["terms"][number]
        assert (run.terms.fingerprint, list(run.terms.sites), run.terms.parameters) == (fingerprint, sites, parameters)
        assert [run.terms.draw] == (draw or [""])
    assert {name: record.n_rows for name, record in data.items()} == {
        name: record["n_rows"] for name, record in document["data"].items()
    }
    for fingerprint, hashes in rows.items():
        assert hashes.tobytes() == (old / "rows" / f"{fingerprint}.u64").read_bytes()
    secrets = dict(told(memory, "SELECT name, value FROM secrets"))
    keys = {name: STORES[name] for name in ("registry", "alignments", "released sums", "predictions")}
    assert {name: secrets[name] for name in keys} == {name: (GOLDEN / path).read_bytes() for name, path in keys.items()}
    for purpose, folder in (("released sums", "released_bins"), ("predictions", "predictions")):
        (path,) = (old / folder).glob("*.npz")
        with memory.reading() as db:
            for name, values in read_arrays(path).items():
                query = "SELECT array FROM row_counts WHERE (purpose, data_set, name) = (?, ?, ?)"
                (number,) = db.execute(query, (purpose, path.stem, name)).fetchone()
                assert np.array_equal(load_array(db, number, values.dtype.str), values.ravel())
    (search,) = document["searches"]
    cuts = read_arrays(old / "cuts" / search["file"])
    with memory.reading() as db:
        for position, (feature, digest) in enumerate(search["columns"].items()):
            ((settings, number),) = runs.earlier_searches(db, tuple(search["sites"]), search["n_rows"], feature, digest)
            assert settings == search["settings"]
            assert np.array_equal(load_array(db, number, "<f4"), cuts[f"arr_{position}"])


def test_it_happens_once_and_older_versions_are_kept_out(workspace: Path) -> None:
    memory = Memory.open(policy_in(workspace))
    before = memory.path.read_bytes()
    assert Memory.open(policy_in(workspace)).path.read_bytes() == before
    for store, path in STORES.items():
        text = (workspace / path).read_bytes()
        # Older versions want 32 bytes of a key, and JSON on every line that ends.
        assert b"has moved to" in text and len(text) != 32 and text.endswith(b"\n"), store
        assert (workspace / path).stat().st_mode & 0o777 == 0o600
    root = registry_in(workspace)
    assert (root / "registry.json.migrated").read_bytes() == (registry_in(GOLDEN) / "registry.json").read_bytes()
    assert (root / "alignments.migrated" / "ids").is_dir() and not (root / "registry.json").exists()


def test_the_command_moves_them_too(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", str(workspace), "--site", SITE]) == 0
    told_of = capsys.readouterr().out
    assert "horizontal" in told_of and "aligned" in told_of and (registry_in(workspace) / NAME).exists()


@pytest.mark.parametrize("store", STORES)
def test_files_that_come_back_are_not_ignored(workspace: Path, store: str) -> None:
    """An earlier version ran in between, or a backup was restored: they may know what the memory does not."""
    Memory.open(policy_in(workspace))
    shutil.copy(GOLDEN / STORES[store], workspace / STORES[store])
    with pytest.raises(ConfigurationError, match="files of an earlier version") as refused:
        Memory.open(policy_in(workspace))
    assert "Remedy: move away" in str(refused.value)
    assert any(part in str(refused.value) for part in Path(STORES[store]).parts[-2:])


@pytest.mark.parametrize("left", ["all", "files in the old places", "kept files"])
def test_a_memory_that_is_lost_after_the_move_is_not_begun_anew(workspace: Path, left: str) -> None:
    """The mark tells, and without it what was moved away, or what lies in its place."""
    memory, root = Memory.open(policy_in(workspace)), registry_in(workspace)
    memory.path.unlink()
    if left != "all":
        (root / MADE).unlink()
        kept = [path for path in workspace.rglob("*.migrated*") if path.exists()]
        for path in kept if left != "kept files" else [workspace / place for place in STORES.values()]:
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    with pytest.raises(ConfigurationError, match=r"no longer there.*Restore it from a backup") as refused:
        Memory.open(policy_in(workspace))
    assert Memory.is_there(policy_in(workspace)) and not memory.path.exists()
    names = {"all": MADE, "files in the old places": "key", "kept files": "registry.json.migrated"}
    assert names[left] in str(refused.value)


def test_moved_files_may_be_taken_again(workspace: Path) -> None:
    """Whoever goes back to the old files, from a backup, and forward again has both under names of their own."""
    Memory.open(policy_in(workspace)).path.unlink()
    (registry_in(workspace) / MADE).unlink()
    for folder in ("veilboost_registry", "veilboost_ledgers"):
        shutil.copytree(GOLDEN / folder, workspace / folder, dirs_exist_ok=True)
    assert told(Memory.open(policy_in(workspace)), "SELECT 1 FROM runs")
    assert len(list(registry_in(workspace).glob("registry.json.migrated*"))) == 2


def test_old_files_do_not_stand_in_for_a_memory_that_is_lost(workspace: Path) -> None:
    """They know nothing of what was released since."""
    Memory.open(policy_in(workspace)).path.unlink()
    shutil.copytree(GOLDEN / "veilboost_registry", workspace / "veilboost_registry", dirs_exist_ok=True)
    with pytest.raises(ConfigurationError, match=rf"no longer there.*\({MADE}\)"):
        Memory.open(policy_in(workspace))


# -- a migration that is broken off ------------------------------------------------------------------------------------


def break_off(workspace: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """End the process after so many files have been moved away."""
    rename, left = Path.rename, iter(range(renames + 1))  # the memory itself is renamed by another function

    def one_less(path: Path, target: Path) -> Path:
        if next(left) == renames:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", one_less)
        Memory.open(policy_in(workspace))


@pytest.mark.parametrize("renames", range(8))
def test_a_migration_that_was_broken_off_goes_on(
    workspace: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(workspace, monkeypatch, renames)
    memory = Memory.open(policy_in(workspace))
    assert told(memory, "SELECT * FROM earlier_version") == []
    kept = {path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    assert all(path.read_bytes() in kept for path in GOLDEN.glob("veilboost_*/**/*") if path.is_file())
    Memory.open(policy_in(workspace))


@pytest.mark.parametrize("renames", [0, 3])
def test_one_of_the_first_format_goes_on_too(workspace: Path, renames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_off(workspace, monkeypatch, renames)
    with contextlib.closing(sqlite3.connect(registry_in(workspace) / NAME)) as db:
        for table in ("scored_answers", "scored_rows", "scored_sets", "earlier_version"):
            db.execute(f"DROP TABLE {table}")
        db.execute("CREATE TABLE earlier_version (is_moved_away INTEGER NOT NULL)")
        db.execute("INSERT INTO earlier_version VALUES (0)")
        db.execute("PRAGMA user_version = 1")
        db.commit()
    (registry_in(workspace) / MADE).unlink(missing_ok=True)
    memory = Memory.open(policy_in(workspace))
    assert told(memory, "SELECT * FROM earlier_version") == [] and told(memory, "PRAGMA user_version") == [(FORMAT,)]
    assert not (registry_in(workspace) / "rows").exists() and (registry_in(workspace) / MADE).exists()


CHANGES = {
    "a file with one more run": lambda root: (root / "registry.json").write_bytes(b'{"version": 2, "runs": ["new"]}'),
    "a file more in a folder": lambda root: (root / "rows" / "new.u64").write_bytes(b"12345678"),
    "a file under another name": lambda root: next(iter(root.glob("rows/*.u64"))).rename(root / "rows" / "other"),
    "a file of its own": lambda root: (root.parent / f"{SITE}.policy").write_text("{}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_changed_since_they_were_read_are_not_moved(
    workspace: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version ran between a crash and the next start: what it released is in its files alone."""
    break_off(workspace, monkeypatch, 0)
    root = registry_in(workspace)
    CHANGES[change](root)
    before = {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="have changed since they were read") as refused:
            Memory.open(policy_in(workspace))
    assert f"delete {NAME} and {MADE}, which no job has used yet" in str(refused.value)
    assert {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()} == before


def test_after_the_remedy_changed_files_are_read_again(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_off(workspace, monkeypatch, 2)
    root = registry_in(workspace)
    path = root / "data_refusals.json"
    in_json(path.name, lambda of: of["refusals"].update(late=[1.5]))(root)
    with pytest.raises(ConfigurationError, match=r"changed since.*\(data_refusals.json\)"):
        Memory.open(policy_in(workspace))
    for kept in root.glob("*.migrated"):
        kept.rename(kept.with_suffix(""))
    for name in (NAME, MADE):
        (root / name).unlink()
    memory = Memory.open(policy_in(workspace))
    assert told(memory, "SELECT at FROM refusals WHERE data_set = 'late'") == [(1.5,)]
    assert told(memory, "SELECT 1 FROM runs")


def test_files_that_change_while_they_are_read_are_refused(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = registry_in(workspace)
    copy = old_files._copy_sent_rows

    def meanwhile(*arguments: object) -> None:
        copy(*arguments)
        in_json("data_refusals.json", lambda of: of["refusals"].update(late=[1.5]))(root)

    monkeypatch.setattr(old_files, "_copy_sent_rows", meanwhile)
    with pytest.raises(ConfigurationError, match=r"change while they are read \(data_refusals.json\).*Remedy"):
        Memory.open(policy_in(workspace))
    assert not (root / NAME).exists() and (root / "registry.json").exists()


def in_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        document = json.loads((root / name).read_text())
        change(document)
        (root / name).write_text(json.dumps(document))

    return damage


def cut(pattern: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = next(iter(root.glob(pattern)))
        path.write_bytes(change(path.read_bytes()))

    return damage


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda root: next(iter(root.glob(pattern))).unlink()


SENT = "../../veilboost_ledgers/site-2/rows_of_buckets.jsonl"
DAMAGE: dict[str, Callable[[Path], None]] = {
    "text": cut("registry.json", lambda content: content[:-20]),
    "a version of the future": in_json("registry.json", lambda of: of.update(version=3)),
    "an unknown state": in_json("registry.json", lambda of: of["runs"][0].__setitem__(4, "cancelled")),
    "terms that are not there": in_json("registry.json", lambda of: of["runs"][0].__setitem__(2, 99)),
    "terms before the first": in_json("registry.json", lambda of: of["runs"][0].__setitem__(2, -1)),
    "terms with more facts": in_json("registry.json", lambda of: of["terms"][0].extend(["", ""])),
    "fields too few": in_json("registry.json", lambda of: of["runs"][0].pop()),
    "trees below none": in_json("registry.json", lambda of: of["runs"][0].__setitem__(5, -1)),
    "trees beyond all": in_json("registry.json", lambda of: of["runs"][0].__setitem__(5, 10**30)),
    "a number in place of a text": in_json("registry.json", lambda of: of["runs"][0].__setitem__(1, {"a": 1})),
    "a list": cut("registry.json", lambda content: b"[]"),
    "key lost": remove("key"),
    "key short": cut("key", lambda content: content[:31]),
    "rows lost": remove("rows/*.u64"),
    "rows cut": cut("rows/*.u64", lambda content: content[:-8]),
    "rows torn": cut("rows/*.u64", lambda content: content[:-3]),
    "rows added": cut("rows/*.u64", lambda content: content + content[:8]),
    "cuts lost": remove("cuts/*.npz"),
    "cuts torn": cut("cuts/*.npz", lambda content: content[:-40]),
    "alignments in other words": cut("alignments/alignments.json", lambda content: b'{"version": 2, "runs": []}'),
    "an alignment of nothing": cut("alignments/alignments.json", lambda content: b'{"version": 1, "runs": [{}]}'),
    "ids cut": cut("alignments/ids/*", lambda content: content[:-8]),
    "ids lost": remove("alignments/ids/*"),
    "key of alignments lost": remove("alignments/key"),
    "sums torn": cut("released_bins/*.npz", lambda content: content[:-40]),
    "key of sums lost": remove("released_bins/key"),
    "predictions emptied": cut("predictions/*.npz", lambda content: b""),
    "sums in the place of predictions": lambda root: shutil.copy(
        next(root.glob("released_bins/*.npz")), next(root.glob("predictions/*.npz"))
    ),
    "refusals in other words": cut("data_refusals.json", lambda content: b'{"version": 1, "refusals": ["one"]}'),
    "rows sent without a key": cut(SENT, lambda content: b"{}\n"),
    "rows sent in other words": cut(SENT, lambda content: content.replace(b'"rows": [', b'"rows": ["no hash", ')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_and_nothing_is_moved(workspace: Path, damage: str) -> None:
    DAMAGE[damage](registry_in(workspace))
    before = {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="Restore it from a backup") as refused:
            Memory.open(policy_in(workspace))
        assert str(workspace) not in str(refused.value)
    assert not (registry_in(workspace) / NAME).exists()
    assert {path: path.read_bytes() for path in before} == before


def test_runs_of_the_first_format_are_read(workspace: Path) -> None:
    def whole(document: dict) -> None:
        terms = document.pop("terms")
        names = ("run_id", "job_id", "number", "started", "state", "trees")
        document["version"] = 1
        document["runs"] = [dict(zip(names, run, strict=True)) for run in document["runs"]]
        for run in document["runs"]:
            run["fingerprint"], run["sites"], run["parameters"], *_ = terms[run.pop("number")]

    with_terms = Path(shutil.copytree(workspace, workspace.with_name("other")))
    in_json("registry.json", whole)(registry_in(workspace))
    query = "SELECT job_id, state, trees, sites, parameters, draw FROM runs JOIN terms ON terms.id = terms"
    found, expected = (told(Memory.open(policy_in(one)), query) for one in (workspace, with_terms))
    assert found == expected and found


@pytest.mark.parametrize("said", [None, 0, "", "no", True, False])
@pytest.mark.parametrize("is_running", [True, False])
def test_only_an_alignment_that_says_that_it_sent_nothing_is_taken_back(
    workspace: Path, said: object, is_running: bool
) -> None:
    """Entries of older versions say nothing; and one whose process still runs may send."""

    def change(document: dict) -> None:
        (run,) = document["runs"]
        run["sent"] = said
        if said is None:
            del run["sent"]

    path = registry_in(workspace) / "alignments" / "alignments.json"
    in_json(path.name, change)(path.parent)
    alive = Alive(path)
    if is_running:
        alive.hold("aligned")
    registry = AlignmentRegistry.open(policy_in(workspace))
    if said is False and not is_running:
        registry.reserve({"people": [b"x"]}, "later", ("a",))
    else:
        with pytest.raises(PolicyRefusal, match="in job aligned"):
            registry.reserve({"people": [b"x"]}, "later", ("a",))
    alive.release("aligned")


def test_a_line_of_rows_sent_that_a_crash_cut_short_is_dropped(workspace: Path) -> None:
    path = workspace / STORES["sent rows"]
    path.write_bytes(path.read_bytes() + b'{"job": "two", "ro')
    with pytest.raises(DataRefusal):
        SentRows(policy_in(workspace)).refuse(["debtor-1"])


def test_notes_of_rows_without_a_data_set_count_as_those_of_the_same(workspace: Path) -> None:
    path = workspace / STORES["sent rows"]
    first, *notes = path.read_text().splitlines()
    notes = [json.dumps({k: v for k, v in json.loads(line).items() if k != "data_set"}) for line in notes]
    path.write_text("\n".join([first, *notes]) + "\n")
    sent = SentRows(policy_in(workspace))
    sent.refuse(["debtor-1"], "other")
    with pytest.raises(DataRefusal):
        sent.refuse(["debtor-1"])


def test_a_spoilt_memory_of_the_policy_is_forgotten(workspace: Path) -> None:
    registry_in(workspace).with_name(f"{SITE}.policy").write_bytes(b"\xff{")
    assert told(Memory.open(policy_in(workspace)), "SELECT * FROM policy_keys") == []


@pytest.mark.parametrize("demands", [None, {"rows": [1.5, 2.5]}])
def test_counts_of_one_question_or_of_both_are_read(workspace: Path, demands: dict | None) -> None:
    in_json("data_refusals.json", lambda of: demands and of.update(demands=demands))(registry_in(workspace))
    found = told(Memory.open(policy_in(workspace)), "SELECT question, data_set, at FROM refusals ORDER BY 1, 2, 3")
    assert [row[:2] for row in found if row[0] == "refusals"] == [("refusals", "patients"), ("refusals", "rows")]
    assert [row[1:] for row in found if row[0] == "demands"] == ([("rows", 1.5), ("rows", 2.5)] if demands else [])


def test_a_registry_that_was_only_opened_keeps_its_key(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "key").write_bytes(b"k" * 32)
    assert Memory(tmp_path, SITE).secret("registry", b"l" * 32) == b"k" * 32
