"""The command that shows a site's privacy ledgers."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from dp_components.accounting import PrivacyCost
from dp_components.events import LaplaceEvent, NeighbouringRelation, Release, RepeatedEvent
from dp_components.ledger import Budget, JobSpending, Ledger, LedgerHistory, LedgerIdentity
from nvflare_plugins.cli.main import main
from nvflare_plugins.pages.runs_page import ledger_html
from nvflare_plugins.site.policy import SitePolicy, template

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template({"credit": "credit.csv"}))
    return tmp_path


def begin(workspace: Path, data_set: str) -> Ledger:
    policy = SitePolicy.load(workspace, "site-1")
    event, budget = LaplaceEvent(0.1, ROW), Budget(1.0, 1e-6, pure_epsilon=0.5)
    identity = LedgerIdentity("site-1", data_set, ROW)
    ledger = Ledger.open(policy.ledgers, identity, budget, policy.ledger_heads)
    ledger.open_job("job-17", RepeatedEvent(event, 5))
    ledger.release("job-17", "tree 0", lambda: Release(np.array([1]), event))
    return ledger


def test_it_shows_all_data_sets_or_one(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(workspace), "--site", "site-1"]) == 1
    assert "spent nothing" in capsys.readouterr().err
    begin(workspace, "credit")
    begin(workspace, "bank")
    assert main(["ledger", str(workspace), "--site", "site-1"]) == 0
    output = capsys.readouterr().out
    assert "Data set bank" in output and "Data set credit" in output and "job-17" in output
    assert main(["ledger", str(workspace), "--site", "site-1", "--data-set", "bank"]) == 0
    assert "credit" not in capsys.readouterr().out


def test_a_simulator_workspace_is_searched_for_the_site(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = workspace / "site-1"
    (own / "local").mkdir(parents=True)
    (own / "local" / "veilboost.json").write_text(template({"credit": "credit.csv"}))
    begin(own, "credit")
    for folder in (workspace, own):
        assert main(["ledger", str(folder), "--site", "site-1"]) == 0
        assert "job-17" in capsys.readouterr().out
    assert main(["ledger", str(workspace), "--site", "site-2"]) == 1
    error = capsys.readouterr().err
    assert f"no privacy ledger in {workspace}" in error and "or its workspace or name is another" in error


def test_it_closes_a_job_that_will_not_go_on(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = begin(workspace, "credit")
    assert not ledger.quote(LaplaceEvent(0.1, ROW)).fits
    assert main(["ledger", str(workspace), "--site", "site-1", "--close", "job-17"]) == 0
    assert "closed" in capsys.readouterr().out
    assert ledger.quote(LaplaceEvent(0.4, ROW)).fits


def test_a_ledger_that_lacks_its_end_is_refused_until_the_loss_is_charged(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal cut at the end of a line was once taken as it was: what had been spent was free again."""
    begin(workspace, "credit")
    [path] = (workspace / "veilboost_ledgers").rglob("credit.ledger")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    arguments = ["ledger", str(workspace), "--site", "site-1"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "its end is missing" in error and "--accept-cut" in error
    assert main([*arguments, "--data-set", "credit", "--accept-cut"]) == 0
    assert "pure epsilon 0.1," in capsys.readouterr().out
    assert main([*arguments, "--data-set", "credit", "--accept-cut"]) == 1
    assert "lacks nothing" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "(records that are missing)" in capsys.readouterr().out
    [head] = (workspace / "veilboost_registry").rglob("credit.head")
    head.unlink()
    assert main(arguments) == 1
    assert main([*arguments, "--data-set", "credit", "--accept-cut"]) == 0
    assert "epsilon 0.5 of 0.5" in capsys.readouterr().out


def test_it_writes_a_page_of_spending_over_time_without_ids(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, event = begin(workspace, "credit"), LaplaceEvent(0.1, ROW)
    ledger.close_job("job-17")
    ledger.open_job("a job of tomorrow", RepeatedEvent(event, 2))
    begin(workspace, "bank")
    out = workspace / "spent.html"
    assert main(["ledger", str(workspace), "--site", "site-1", "--html", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    html = out.read_text()
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o600 and [*workspace.glob("*.partial"), *workspace.glob(".*")] == []
    assert "Data set credit" in html and "Data set bank" in html and html.count("<svg") == 2
    assert "job-17" not in html and "tomorrow" not in html
    assert "0.1 of 1 spent" in html and "With what open jobs may still spend: 0.3." in html
    assert html.count("<td>closed") == 1 and html.count("<td>open") == 2
    assert "@page" in html and "<script" not in html and "default-src 'none'" in html
    assert main(["ledger", str(workspace), "--site", "site-1", "--data-set", "bank", "--html", str(out)]) == 0
    assert "credit" not in out.read_text()


def test_a_page_takes_the_place_of_no_ledger(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(workspace, "credit")
    (ledger,) = workspace.rglob("*.ledger")
    before = ledger.read_bytes()
    for out, words in (
        (ledger, "must end in .html"),
        (workspace / "no" / "x.html", "make it first"),
        (workspace, "must end"),
    ):
        assert main(["ledger", str(workspace), "--site", "site-1", "--close", "job-17", "--html", str(out)]) == 1
        assert words in capsys.readouterr().err and ledger.read_bytes() == before


def test_the_page_adds_up_what_jobs_have_spent_as_the_ledger_does() -> None:
    identity, budget = LedgerIdentity("site-1", "credit", ROW), Budget(2.0, 1e-5)
    cost = PrivacyCost(mu_squared=0.01)
    jobs = tuple(
        JobSpending(f"j{n}", f"2026-11-{n + 1:02}T10:00:00+00:00", f"2026-11-{n + 1:02}T10:01:00+00:00", "closed", 3,
                    cost, None, ())
        for n in range(3)
    )  # fmt: skip
    lost = PrivacyCost(mu_squared=0.02)
    spent = PrivacyCost(mu_squared=0.05)
    history = LedgerHistory(identity, budget, jobs, spent, spent, lost)
    html = ledger_html([history], "site-1", datetime(2026, 11, 22, tzinfo=UTC))
    assert "days since 2026-11-01 10:00 UTC" in html and "records of the ledger that are missing" in html
    together = [PrivacyCost(mu_squared=0.02 + 0.01 * (n + 1)).epsilon(1e-5) for n in range(3)]
    assert all(f"<td class=n>{value:.4g}</tr>" in html for value in together)
    assert f"{together[-1]:.4g} of 2 spent" in html
    empty = ledger_html([replace(history, jobs=(), lost=PrivacyCost())], "<b>", datetime(2026, 11, 22, tzinfo=UTC))
    assert "No job was opened" in empty and "<b>" not in empty.partition("<h1>")[2].partition("</h1>")[0]


def test_mistakes_are_named(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(workspace, "credit")
    begin(workspace, "bank")
    for arguments in (["--data-set", "other"], ["--close", "job-17"], ["--data-set", "bank", "--close", "job-99"]):
        assert main(["ledger", str(workspace), "--site", "site-1", *arguments]) == 1
        assert "veilboost ledger:" in capsys.readouterr().err
