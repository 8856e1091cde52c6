"""Old runs of a site: what the retention rule lets go, and what stays; and the trail of its policy."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_plugins.cli.main import main
from nvflare_plugins.pages.run_record import DataFacts, RunRecord
from nvflare_plugins.pages.runs_page import due
from nvflare_plugins.site.policy import TRAIL_FILE, SitePolicy, note_policy, trail
from nvflare_plugins.site.policy_values import Retention

NOW = datetime(2031, 5, 1, tzinfo=UTC)
SITE = "site-1"


def record(job: str, days: float, data_set: str = "credit", **more: object) -> RunRecord:
    finished = (NOW - timedelta(days=days)).isoformat()
    return RunRecord(
        job,
        "a1",
        SITE,
        (SITE,),
        "masks",
        finished=finished,
        data=(DataFacts(data_set, "training", 100),),
        **more,  # type: ignore[arg-type]
    )


def write(runs: Path, run: RunRecord) -> Path:
    folder = runs / run.job_id
    (folder / "evidence").mkdir(parents=True)
    run.write(folder)
    for name in ("model.json", "report.html", "evidence/site-1.evidence.jsonl"):
        (folder / name).write_text(name)
    return folder


def workspace(tmp_path: Path, **policy: object) -> Path:
    (tmp_path / "local").mkdir(exist_ok=True)
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps({"data_sets": {}, **policy}))
    return tmp_path


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_goes_and_what_stays() -> None:
    rule = Retention(run_days=100, evidence_days=1000)
    runs = [
        record("ancient", 2000),
        record("old", 500),
        record("source", 400),
        record("built_on_it", 50, settings={"initial_model": "source"}),
        record("named", 900),
        record("newest", 10),
        record("alone", 5000, "other"),
        replace(record("no_date", 1), finished=""),
    ]
    found, stay = due([(Path("/nowhere") / one.job_id, one) for one in runs[:1]], rule, (), NOW)
    assert not found and stay == {"ancient": "it is the newest of its kind on its data set"}
    folders = [(Path("/nowhere") / one.job_id, one) for one in runs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvflare_plugins.pages.runs_page._beside_evidence", lambda folder: iter([folder / "model.json"]))
        patch.setattr("nvflare_plugins.pages.runs_page._size", lambda path: 1)
        found, stay = due(folders, rule, {"named"}, NOW)
    assert {one.folder.name: one.whole for one in found} == {"ancient": True, "old": False}
    assert stay == {
        "named": "its model has a name",
        "source": "a run that stays was built on it",
        "no_date": "its record does not say when it ended",
        "alone": "it is the newest of its kind on its data set",
    }


@given(
    st.lists(st.tuples(st.floats(0, 5000), st.sampled_from("ab"), st.none() | st.integers(0, 9)), max_size=10),
    st.sets(st.integers(0, 9)),
    st.integers(1, 2000),
    st.integers(0, 3000),
)
def test_nothing_goes_that_is_young_named_or_needed(
    jobs: list[tuple[float, str, int | None]], named: set[int], term: int, more: int
) -> None:
    runs = [
        (
            Path(f"/nowhere/{n}"),
            record(str(n), days, data_set, settings={} if of is None else {"initial_model": str(of)}),
        )
        for n, (days, data_set, of) in enumerate(jobs)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvflare_plugins.pages.runs_page._beside_evidence", lambda folder: iter([folder]))
        patch.setattr("nvflare_plugins.pages.runs_page._size", lambda path: 1)
        found, _ = due(runs, Retention(run_days=term, evidence_days=term + more), {str(n) for n in named}, NOW)
    gone = {int(one.folder.name): one.whole for one in found}
    assert not gone.keys() & named
    for n, whole in gone.items():
        assert jobs[n][0] >= term and whole == (jobs[n][0] >= term + more)
    for n, (_, _, of) in enumerate(jobs):
        assert of is None or n in gone or of not in gone
    assert {data_set for _, data_set, _ in jobs} == {d for n, (_, d, _) in enumerate(jobs) if n not in gone}


def test_prune_removes_run_folders_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = workspace(tmp_path, retention={"run_days": 100, "evidence_days": 1000})
    runs = tmp_path / "veilboost_runs"
    folders = {
        one.job_id: write(runs, one) for one in (record("ancient", 40_000), record("old", 500), record("new", 1))
    }
    (runs / ".removed-crashed").mkdir()
    outside = tmp_path / "precious"
    outside.write_text("x")
    os.symlink(outside, folders["old"] / "link")
    before = names(tmp_path)
    command = ["runs", "--workspace", str(place), "--site", SITE, "--prune"]

    class Then(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return NOW

    monkeypatch.setattr("nvflare_plugins.cli.runs.datetime", Then)
    assert main(command) == 0 and "add --yes" in capsys.readouterr().out and names(tmp_path) == before
    assert main([*command, "--yes"]) == 0
    assert "removed: old" in capsys.readouterr().out
    assert not folders["ancient"].exists() and names(folders["old"]) == {"run.json", "evidence/site-1.evidence.jsonl"}
    assert names(folders["new"]) > {"model.json"} and outside.read_text() == "x"
    assert not (runs / ".removed-crashed").exists()
    assert main([*command, "--yes"]) == 0 and "no run is old enough" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ({}, ["--prune"], "Policy key: retention"),
        ({"retention": {"run_days": 9, "evidence_days": 8}}, ["--prune"], "evidence_days must be run_days or more"),
        ({"retention": {"run_days": 0}}, ["--prune"], "from 1 to 36500"),
        ({}, ["--yes"], "--yes belongs to --prune"),
        ({}, ["--prune", "--policy-changes"], "give one of"),
    ],
)
def test_wrong_asks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: dict, options: list[str], said: str
) -> None:
    place = workspace(tmp_path, **policy)
    assert main(["runs", "--workspace", str(place), "--site", SITE, *options]) == 1
    assert said in capsys.readouterr().err


def test_the_trail_names_what_changed_and_notices_a_line_that_was_taken_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "veilboost_runs").mkdir()
    for minimum in (2, 2, 3, 4):
        place = workspace(tmp_path, min_sites=minimum)
        note_policy(SitePolicy.load(place, SITE), "job 7")
    policy = SitePolicy.load(place, SITE)
    changes = trail(policy.runs)
    assert [one.changed for one in changes] == [("data_sets", "min_sites"), ("min_sites",), ("min_sites",)]
    assert [one.policy["min_sites"] for one in changes] == [2, 3, 4] and changes[0].noticed_by == "job 7"
    command = ["runs", "--workspace", str(place), "--site", SITE, "--policy-changes"]
    assert main(command) == 0 and capsys.readouterr().out.count("min_sites") == 3
    path = policy.runs / TRAIL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"at": ')  # a crash in the middle of a line
    workspace(tmp_path, min_sites=5)
    note_policy(SitePolicy.load(place, SITE), "site-setup")
    assert len(trail(policy.runs)) == 4
    path.write_bytes(lines[0] + lines[2])
    assert main(command) == 1 and "line 2" in capsys.readouterr().err
