"""``veilboost runs``: all jobs of a site, whatever became of them, the newest first; as text, as JSON, on a page."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.format import export_name
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.pages.run_record import DataFacts, RoundRow, RunRecord, TrafficRow
from nvflare_plugins.scoring.versions import ModelVersions


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps({"data_sets": {"rows": {"path": "rows.csv"}}}))
    scores = {"job-a": (0.7, 0.9, 0.8), "job-b": (0.6, 0.65), "job-c": ()}
    for day, (job, values) in enumerate(scores.items(), start=1):
        folder = tmp_path / "veilboost_runs" / job
        folder.mkdir(parents=True)
        RunRecord(
            job,
            "00",
            "site-1",
            ("site-1", "site-2"),
            "masks",
            status="aborted" if job == "job-c" else "completed",
            params={"eta": 0.1 * day, "max_depth": 3},
            rounds=tuple(RoundRow(n, 1.0, {"eval-auc": value}) for n, value in enumerate(values)),
            traffic=(TrafficRow("HISTOGRAM", "MASKED", True, 1, 1000 * day, 7),),
            model="model.json",
            started=f"2026-08-0{day}T10:00:00+00:00",
            finished=f"2026-08-0{day}T10:01:30+00:00",
            data=(DataFacts("rows", "training", 4711),),
            name="outcome <b>" if job == "job-a" else "",
        ).write(folder)
        (folder / "model.json").write_text('{"learner": {}}')
    (tmp_path / "veilboost_runs" / "job-a" / "report.html").write_text("the report")
    (tmp_path / "veilboost_runs" / "broken").mkdir()
    (tmp_path / "veilboost_runs" / "broken" / "run.json").write_text("{}")
    return tmp_path


def runs(site: Path, *options: str) -> int:
    return main(["runs", "--workspace", str(site), "--site", "site-1", *options])


def test_runs_are_listed_the_newest_first(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(site) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines[1:4]] == ["2026-08-03", "2026-08-02", "2026-08-01"]
    assert "aborted" in lines[1] and "eval-auc 0.9 in round 2   completed" in lines[3] and "outcome <b>" in lines[3]
    assert lines[4].startswith("left out: broken: ")


def test_a_job_whose_process_was_killed_is_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = site / "veilboost_runs" / "job-d" / "evidence" / export_name("site-1")
    log = EvidenceLog(path, "site-1", "job-d", "aa", "masks")
    assert runs(site) == 0 and "job-d" not in capsys.readouterr().out, "it runs"
    log._file.close()  # as if the process had died
    assert runs(site) == 0
    assert "left out: job-d: its process died, and the next job here ends its evidence" in capsys.readouterr().out


def test_json_has_what_a_program_compares_and_no_counts_of_rows(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvflare_plugins.scoring.model.FinishedModel.read", lambda path: None)
    ModelVersions(site / "veilboost_runs").add("outcome", "job-a")
    assert runs(site, "--json") == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "4711" not in text and [one["job"] for one in found["runs"]] == ["job-c", "job-b", "job-a"]
    last = found["runs"][2]
    assert (last["metric"], last["best"], last["best_round"], last["metrics"]) == (
        "eval-auc",
        0.9,
        2,
        {"eval-auc": 0.8},
    )
    assert (last["seconds"], last["bytes_sent"], last["models"]) == (90.0, 1000, ["outcome@1*"])
    assert found["runs"][0]["best"] is None and len(found["left_out"]) == 1


def test_the_page_compares_runs_and_leads_to_their_reports(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = site / "veilboost_runs" / "runs.html"
    assert runs(site, "--html", str(page)) == 0 and "sent nowhere" in capsys.readouterr().out
    html = page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600 and "4711" not in html
    assert re.findall(r'<a href="([^"]+)">([^<]+)</a>', html) == [("job-a/report.html", "outcome &lt;b&gt;")]
    assert len(re.findall(r'<g data-run="r\d">', html)) == 2, "a curve of each run that has one"
    assert re.search(r'<tr><th>eta<td data-run="r0">0.3<td data-run="r1">0.2<td data-run="r2">0.1</tr>', html)
    assert runs(site, "--html", str(site / "runs.txt")) == 1 and "must end in .html" in capsys.readouterr().err


def test_a_site_without_runs_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps({"data_sets": {"rows": {"path": "rows.csv"}}}))
    assert runs(tmp_path, "--html", str(tmp_path / "runs.html")) == 0
    assert "0 runs" in (tmp_path / "runs.html").read_text()
