"""The private job folders as they stand: kept as their recipe exports them, and run in the FLARE simulator."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from jobs import private_trees
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.recipes.examples import invented_credit
from tests.support.simulator import SITES, Run, simulate

JOBS = Path(private_trees.__file__).parent
CREDIT2 = Path(__file__).parents[3] / "shared" / "data" / "credit2.parquet"


@pytest.mark.parametrize("file", [[], ["rows.csv"], ["rows.parquet"]], ids=str)
def test_the_script_prepares_a_workspace(tmp_path: Path, file: list[str], monkeypatch, capsys) -> None:
    frame = invented_credit(90)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    workspace = tmp_path / "ws"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["x", "--prepare", *file, "--workspace", str(workspace)])
    runpy.run_path(private_trees.__file__, run_name="__main__")
    assert "a budget of epsilon 2 at delta 1e-05" in capsys.readouterr().out
    assert {path.name for path in (workspace / "local" / "data").iterdir()} == {f"{site}.parquet" for site in SITES}


def test_the_script_names_columns_that_a_file_lacks(tmp_path: Path, monkeypatch, capsys) -> None:
    invented_credit(90).drop(columns=["AGE", "label"]).to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.setattr("sys.argv", ["x", "--prepare", str(tmp_path / "rows.csv"), "--workspace", str(tmp_path / "ws")])
    with pytest.raises(SystemExit):
        runpy.run_path(private_trees.__file__, run_name="__main__")
    assert "lacks the columns AGE, label" in capsys.readouterr().err and not (tmp_path / "ws").exists()


def rows() -> pd.DataFrame:
    """Return credit2 where it is at hand, else rows of the same columns."""
    if CREDIT2.exists():
        return pd.read_parquet(CREDIT2)
    return invented_credit()


def run(name: str, workspace: Path) -> Run:
    for _ in range(2):  # the simulator's start fails now and then
        private_trees.prepare(rows(), workspace)
        done = simulate(JOBS / f"private_trees_{name}", workspace)
        if done.code == 0:
            break
    assert done.code == 0, done.output[-4000:]
    return done


def check(done: Run, epsilon: float = 0.5) -> None:
    assert done.summary["status"] == "completed" and set(done.summary["sites"]) == set(SITES)
    models = {(done.site(site) / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1
    frame, names = rows(), list(private_trees.BOUNDS)
    matrix = xgb.DMatrix(frame[names].to_numpy(np.float32), feature_names=names)
    booster = xgb.Booster(model_file=bytearray(models.pop()))
    assert roc_auc_score(frame.label, booster.predict(matrix)) > 0.7
    outcome = verify([done.result / "evidence"])
    assert outcome.sound, outcome
    for site in SITES:
        lines = (done.site(site) / "evidence" / f"{site}.evidence.jsonl").read_text().splitlines()
        spends = [r for r in map(json.loads, lines) if r["type"] == "spend"]
        assert 0.99 * epsilon < float(spends[-1]["epsilon"]) <= epsilon
        assert (done.site(site) / "report.html").exists()


@pytest.mark.sim
@pytest.mark.slow
def test_distributed_noise(tmp_path: Path) -> None:
    done = run("default", tmp_path / "ws")
    check(done)
    workspace = str(done.workspace / "site-1")
    command = [sys.executable, "-m", "nvflare_plugins.cli.main", "ledger", workspace, "--site", "site-1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "closed" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.sim
@pytest.mark.slow
def test_trusted_server(tmp_path: Path) -> None:
    done = run("dp_ebm", tmp_path / "ws")
    check(done)
    lines = (done.result / "evidence" / "server.evidence.jsonl").read_text().splitlines()
    spends = [r for r in map(json.loads, lines) if r["type"] == "spend"]
    assert len(spends) == 100 and all("n_shares 1" in spend["event"] for spend in spends)
