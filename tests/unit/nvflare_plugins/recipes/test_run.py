"""What a job leaves for whoever started it, in the simulator and beyond it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from nvflare.recipe import ProdEnv, SimEnv
from nvflare.recipe import Run as FlareRun

from he_processors.errors import ConfigurationError
from nvflare_plugins.flare.attempt import SiteReport
from nvflare_plugins.pages.run_record import RoundRow, RunRecord
from nvflare_plugins.recipes import VerticalXGBRecipe
from nvflare_plugins.recipes.run import Run, SiteRun, SitesRefused, reasons_of

ROOT = Path(__file__).parents[4]
HOSTILE = "<script>alert(1)</script>"


def record(folder: Path, **more: Any) -> SiteRun:
    metrics = ((0.6, 0.5), (0.8, 0.9), (0.9, 0.9), (0.95, 0.7))
    rounds = tuple(RoundRow(n, 0.5, {"train-auc": a, "eval-auc": b}) for n, (a, b) in enumerate(metrics))
    facts: dict[str, Any] = {"rounds": rounds, "profile": "masks", **more}
    folder.mkdir(parents=True)
    RunRecord("job", "a" * 32, "ulm", ("berlin", "ulm"), **facts).write(folder)
    return SiteRun(folder)


def test_the_history_is_a_table_and_the_best_round_that_of_the_last_metric(tmp_path: Path) -> None:
    run = record(tmp_path / "a")
    assert list(run.history.columns) == ["train-auc", "eval-auc", "seconds"] and list(run.history.index) == [0, 1, 2, 3]
    assert run.best_round == 1  # the earliest of equal ones
    assert record(tmp_path / "b", best_round=3).best_round == 3
    losses = (RoundRow(0, 1.0, {"eval-logloss": 0.3}), RoundRow(1, 1.0, {"eval-logloss": 0.4}))
    assert record(tmp_path / "c", rounds=losses).best_round == 0
    bare = record(tmp_path / "d", rounds=(RoundRow(0, 1.0),))
    assert bare.best_round is None and "<svg" not in bare.shown("x")
    with pytest.raises(ConfigurationError, match="left no model at ulm"):
        _ = bare.model


def test_a_notebook_gets_the_curve_the_best_round_and_who_saw_what(tmp_path: Path) -> None:
    html = record(tmp_path / "a", title=HOSTILE).shown(HOSTILE)
    start, end = html.index("<svg"), html.rindex("</svg>") + 6
    assert ET.fromstring(html[start:end]).tag.endswith("svg")
    assert "<script" not in html and "&lt;script&gt;" in html
    assert (
        "<b>0.9</b><span>eval-auc, best in round 2<" in html and "train-auc 0.8" in html and "the server alone" in html
    )
    style = html.partition("<style>")[2].partition("</style>")[0]
    depths = list(accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in style))
    assert style.startswith(".veilboost {") and depths.index(0, 12) == len(style) - 1, (
        "a style counts in the whole notebook"
    )


def summary(folder: Path, reason: str | None, **errors: str) -> Path:
    path = folder / "server" / "veilboost" / "summary.json"
    path.parent.mkdir(parents=True)
    status = "completed" if reason is None else "failed"
    sites = {site: {"status": status, "error": error, "summary": {}} for site, error in errors.items()}
    path.write_text(json.dumps({"status": status, "reason": reason, "sites": sites}))
    return folder


def test_reasons_are_those_of_sites_that_ended_the_job(tmp_path: Path) -> None:
    told = "the job was ended: ulm: no such column"
    assert reasons_of(summary(tmp_path / "a", "ulm: no such column", ulm="no such column", kiel=told)) == {
        "ulm": ["no such column"]
    }
    both = summary(tmp_path / "b", "ulm: no such column", ulm="no such column", kiel="no rows")
    assert reasons_of(both) == {"ulm": ["no such column"], "kiel": ["no rows"]}
    assert reasons_of(summary(tmp_path / "c", "no result from kiel")) == {"server": ["no result from kiel"]}
    assert reasons_of(summary(tmp_path / "d", None, ulm="")) == {}
    error = SitesRefused({"ulm": "a", "kiel": ["b", "c"]})
    assert str(error).splitlines()[1:] == ["  kiel: b", "  kiel: c", "  ulm: a"]
    assert isinstance(error, RuntimeError) and isinstance(error, ConfigurationError)


def test_beyond_the_simulator_a_run_holds_what_the_server_hands_over_and_nothing_else(tmp_path: Path) -> None:
    env = ProdEnv.__new__(ProdEnv)
    run = Run(env, "job-1", "credit", None)
    assert isinstance(run, FlareRun) and run.get_job_id() == "job-1"
    with pytest.raises(ConfigurationError, match="handed over nothing yet"):
        _ = run.reasons
    record(tmp_path / "ulm" / "veilboost_runs" / "simulate_job")  # of some site's, which happens to lie there
    run._cached_result = str(summary(tmp_path, "ulm: it failed; the reason stays there", ulm="it failed"))
    assert run.sites == {} and run.reasons == {"ulm": ["it failed"]}
    for ask in ("history", "model", "report", "best_round"):
        with pytest.raises(ConfigurationError, match="stay at the sites"):
            getattr(run, ask)


def test_nothing_of_the_interface_runs_at_a_site_and_its_report_is_as_before() -> None:
    code = (
        "import sys, nvflare_plugins.flare.executor, nvflare_plugins.flare.controller\n"
        "ours = ('nvflare_plugins.recipes', 'nvflare_plugins.api', 'veilboost')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    fields = {one.name for one in dataclasses.fields(SiteReport)}
    assert fields == {"status", "model_hmac", "summary", "evidence", "error", "earlier"}


def test_named_sites_are_those_of_the_simulator(tmp_path: Path) -> None:
    made = VerticalXGBRecipe("v", active="bank", data_set="d", label="y", sites=["bank", "shop", "telco"])
    assert made._with_names(SimEnv(num_clients=3)).clients == ["bank", "shop", "telco"]
    given = SimEnv(clients=["bank", "shop", "telco"])
    assert made._with_names(given) is given
    with pytest.raises(ConfigurationError, match="num_clients=2"):
        made._with_names(SimEnv(num_clients=2))
