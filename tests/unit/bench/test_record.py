"""The record of benchmarks: figures of other code, or of unknown code, are stale, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import record, results, smoke
from tests.bench.smoke import Program
from tests.generated_tables import STALE, filled, unmarked


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two folders, and an empty record."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("1")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "KEPT", tmp_path / "measured.json")
    monkeypatch.setattr(record.kept, "__defaults__", (tmp_path / "measured.json",))
    return tmp_path


def test_figures_are_stale_once_a_module_of_their_lane_changes(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: Program, table: Path, data: Path, lanes: Path) -> dict[str, object]:
        lanes.write_text(json.dumps(["one"]))
        return {"elgamal": {"core_s_per_tree": 3.14}}

    monkeypatch.setattr(smoke, "run", run)
    monkeypatch.setattr(results, "HEADLINES", {"elgamal": results.HEADLINES["elgamal"]})
    smoke.keep(Program("bench_vertical", (), ()), kept)
    entry = record.kept()["bench_vertical"]
    assert {"figures", "cpu_s", "date", "commit", "machine", "lanes", "sha256"} == set(entry)
    assert "load" in entry["machine"] and not record.is_stale(entry) and STALE not in results.headlines()
    (kept / "other" / "code.py").write_text("2")
    (kept / "one" / "words.md").write_text("2")
    assert not record.is_stale(entry)
    (kept / "one" / "code.py").write_text("2")
    assert record.is_stale(entry) and f"| 3.1{STALE} |" in results.headlines()
    assert record.is_stale({**entry, "lanes": [], "sha256": ""})
    text = "takes <!-- figure: elgamal -->9<!-- end --> core-seconds"
    assert filled(text) == "takes <!-- figure: elgamal -->3.1<!-- end --> core-seconds"
    assert unmarked(results.headlines()) == results.headlines().replace(STALE, "") != results.headlines()


def test_only_a_release_fails_for_stale_figures(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"lanes": ["one"], "sha256": record.hash_of(["one"])}
    (kept / "measured.json").write_text(json.dumps({"bench_vertical": entry}))
    monkeypatch.setattr("sys.argv", ["results", "--stale"])
    assert results.main() == 0
    (kept / "one" / "more.c").write_text("2")
    assert results.main() == 1 and "bench_vertical" in capsys.readouterr().out


def test_a_full_run_notes_the_folders_that_it_has_loaded(tmp_path: Path) -> None:
    import he_processors.masks  # noqa: F401

    assert {"he_processors"} <= set(record.lanes()) and not any(Path(one).is_absolute() for one in record.lanes())


def test_the_headlines_are_those_of_the_record() -> None:
    for name in results.HEADLINES:
        assert unmarked(results.figure(name)) in results.headlines()
