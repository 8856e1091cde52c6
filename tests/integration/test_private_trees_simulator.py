"""The private job folders as they stand: kept as their recipe exports them, and run in the FLARE simulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

from jobs import examples
from nvflare_plugins.recipes.examples import CREDIT_BOUNDS, invented_credit
from tests.support.simulator import SITES, Run, completed, simulate

NAME = ["private_trees_default"]
CREDIT2 = Path(__file__).parents[3] / "shared" / "data" / "credit2.parquet"


@pytest.mark.parametrize("file", [[], ["--file", "rows.csv"], ["--file", "rows.parquet"]], ids=str)
def test_the_script_writes_the_sites_files(tmp_path: Path, file: list[str], monkeypatch) -> None:
    frame = invented_credit(90)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(examples.main, [*NAME, "--data", "data", *file])
    assert done.exit_code == 0 and '"epsilon": 2.0' in done.output and "dp_distributed" in done.output
    assert {path.parent.name for path in (tmp_path / "data").glob("*/credit2.parquet")} == {*SITES}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*NAME, "--data", "data", "--file", "rows.csv"], "lacks the columns AGE, label"),
        ([*NAME, "--data", "data", "--file", "none.csv"], "there is no file none.csv"),
        ([*NAME, "--data", "data", "--parties", "2"], "belong to vertical trainings"),
        (["dpboost", "--data", "data", "--file", "rows.csv"], "dpboost has rows of its own"),
        (["vertical_plain", "--data", "data", "--label", "y"], "no column 'y'"),
        (["vertical_predict", "--workspace", "ws"], "holds no trained model"),
        (["horizontal_masks"], "--workspace DIR"),
        ([], "name a job, or give --write"),
    ],
)
def test_the_script_says_what_it_lacks(tmp_path: Path, arguments: list[str], said: str, monkeypatch) -> None:
    invented_credit(90).drop(columns=["AGE", "label"]).to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(examples.main, arguments)
    assert done.exit_code == 2 and said in " ".join(done.output.split()) and not (tmp_path / "data").exists()


def rows() -> pd.DataFrame:
    """Return credit2 where it is at hand, else rows of the same columns."""
    if CREDIT2.exists():
        return pd.read_parquet(CREDIT2)
    return invented_credit()


def run(name: str, root: Path) -> Run:
    for _ in range(2):  # the simulator's start fails now and then
        workspace = examples.prepare(name, root, examples.Table(rows()))
        done = simulate(examples.FOLDER / name, workspace)
        if done.code == 0:
            break
    assert done.code == 0, done.output[-4000:]
    return done


def check(done: Run, epsilon: float = 0.5) -> None:
    completed(done)
    models = {(done.site(site) / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1
    frame, names = rows(), list(CREDIT_BOUNDS)
    matrix = xgb.DMatrix(frame[names].to_numpy(np.float32), feature_names=names)
    booster = xgb.Booster(model_file=bytearray(models.pop()))
    assert roc_auc_score(frame.label, booster.predict(matrix)) > 0.7
    for site in SITES:
        lines = (done.site(site) / "evidence" / f"{site}.evidence.jsonl").read_text().splitlines()
        spends = [r for r in map(json.loads, lines) if r["type"] == "spend"]
        assert 0.99 * epsilon < float(spends[-1]["epsilon"]) <= epsilon
        assert (done.site(site) / "report.html").exists()


@pytest.mark.sim
@pytest.mark.slow
def test_distributed_noise(tmp_path: Path) -> None:
    done = run("private_trees_default", tmp_path)
    check(done)
    workspace = str(done.workspace / "site-1")
    command = [sys.executable, "-m", "nvflare_plugins.cli.main", "ledger", workspace, "--site", "site-1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "closed" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.sim
@pytest.mark.slow
def test_trusted_server(tmp_path: Path) -> None:
    done = run("private_trees_dp_ebm", tmp_path)
    check(done)
    lines = (done.result / "evidence" / "server.evidence.jsonl").read_text().splitlines()
    spends = [r for r in map(json.loads, lines) if r["type"] == "spend"]
    assert len(spends) == 100 and all("n_shares 1" in spend["event"] for spend in spends)
