"""The page for a data-protection officer: the site's words, escaped; what was done, and no claim beyond."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from unittest import mock

import pytest

from nvflare_plugins.cli.main import main
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.pages.report import build_summary
from nvflare_plugins.pages.run_record import EVALUATION, TRAINING, DataFacts, RunRecord, Spending, TrafficRow
from tests.support.evidence_attempts import Attempt

HOSTILE = '<script>alert("x")</script>\u202e'
STATEMENT = {
    "controller": f"St. Example {HOSTILE}",
    "contact": "",
    "purpose": "plan care",
    "legal_basis": "Art. 9(2)(j)",
    "retention": "five years",
}


def record_of(**changes: object) -> RunRecord:
    values: dict[str, object] = {
        "job_id": "job",
        "attempt": "a1",
        "site": "site-1",
        "sites": ("site-1", "site-2", "site-3"),
        "profile": "masks",
        "traffic": (TrafficRow("HISTOGRAM", "MASKED", True, 5, 1_500_000, 1_000, 0.3),),
        "evidence": "site-1.evidence.jsonl",
        "started": "2026-11-22T10:00:00+00:00",
        "finished": "2026-11-22T10:01:00+00:00",
        "policy_hash": "ab" * 32,
        "consents": ("exact_cuts",),
        "statement": STATEMENT,
        "data": (
            DataFacts("patients", TRAINING, 1234, (HOSTILE, "age"), label="out", label_classes=("home", "back")),
            DataFacts("later", EVALUATION, 56, (HOSTILE, "age"), label="out"),
        ),
    }
    return RunRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    attempt = Attempt(tmp_path)
    attempt.open_session()
    attempt.round(0)
    attempt.finish()
    return tmp_path


def test_it_says_what_was_done_in_whose_words(folder: Path) -> None:
    html = build_summary(record_of(), folder)
    for expected in (
        "plan care",
        "Art. 9(2)(j)",
        "five years",
        "data_protection.contact",
        "1234 rows of this site",
        "as above",
        "home, back",
        "1.5 MB",
        "pairwise masks".capitalize(),
        "W-1 sites together",
        "Consent exact_cuts",
        "they disclose single real values",
        "2026-11-22 10:00:00 to 10:01:00 UTC",
        "ab" * 32,
        "complete and unbroken",
        "not compared here",
        "no bound on what is learnt of a person is claimed",
    ):
        assert expected in html, expected


def test_foreign_text_is_escaped(folder: Path) -> None:
    html = build_summary(record_of(title=HOSTILE, job_id=HOSTILE, site=HOSTILE, consents=(HOSTILE,)), folder, [HOSTILE])
    assert "<script" not in html and "\u202e" not in html
    assert html.count("&lt;script&gt;") >= 6
    assert "default-src 'none'" in html


def test_budgets_and_verdicts_are_repeated(folder: Path) -> None:
    spending = (Spending("patients", 2.0, 1e-6, 0.75), Spending("later", 1.0, 1e-6))
    html = build_summary(record_of(spending=spending), folder, ["VERIFIED: job job"])
    assert "epsilon 0.75 spent over all jobs, of epsilon 2 at delta 1e-06" in html
    assert "the ledger could not be read" in html and "VERIFIED: job job" in html
    assert "no bound on what is learnt" not in html and "not compared here" not in html


def test_sealed_contents_and_noise_of_others_are_told(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, profile="dp_local")
    attempt.open_session()
    for site, log in attempt.logs.items():
        if site == "site-1":
            log.content("sent", "site-2", Content.BUCKETS, Protection.LOCAL_DP, 1000)
    attempt.finish()
    html = build_summary(record_of(profile="dp_local"), tmp_path)
    assert "Sealed, for site-2" in html and Protection.LOCAL_DP.value in html
    assert "nothing of this site had to be charged" in html and "no noise was added" not in html


def test_what_is_readable_or_missing_is_said(tmp_path: Path) -> None:
    bare = (TrafficRow("HISTOGRAM", "PLAIN", True, 5, 1_500_000, 1_000, 0.3),)
    html = build_summary(record_of(profile="plain", traffic=bare), tmp_path)
    assert "Some private messages were readable by the server" in html
    assert "<span class='chip bad'>missing</span>" in html


def test_the_command_writes_for_its_owner_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_of().write(folder)
    out = folder / "page.html"
    assert main(["report", "--summary", str(folder), "--out", str(out)]) == 0
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o600
    assert not (folder / "report.html").exists() and capsys.readouterr().out.strip() == str(out)
    assert main(["report", "--summary", str(folder), "--out", str(out), "--evidence", str(folder)]) == 0
    assert "the records of job job agree, but anyone could have written them" in out.read_text()
    missing = folder / "none"
    missing.mkdir()
    assert main(["report", "--summary", str(folder), "--out", str(out), "--evidence", str(missing)]) == 0
    assert "NOT FOUND: there is no evidence here" in out.read_text()


def test_wrong_usage_names_the_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_of().write(folder)
    assert main(["report", "--summary", str(folder)]) == 1
    assert "--out FILE.html" in capsys.readouterr().err
    assert main(["report", str(folder), "--evidence", str(folder)]) == 1
    assert "--summary" in capsys.readouterr().err
    assert main(["report", "--summary", str(folder), "--out", str(folder / "no" / "page.html")]) == 1
    assert "page.html" in capsys.readouterr().err
    with mock.patch("nvflare_plugins.pages.report.write_report", side_effect=OSError(errno.ENOSPC, "No space")):
        assert main(["report", str(folder)]) == 1
    assert "the disk is full" in capsys.readouterr().err
    for options in (["--summary"], []):
        assert main(["report", *options, str(folder), "--out", str(folder / "run.json")]) == 1
        assert "must end in .html" in capsys.readouterr().err
