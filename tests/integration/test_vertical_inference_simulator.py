"""A vertical model in the FLARE simulator: the job folders as they stand, training and then prediction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from jobs import examples
from nvflare_plugins.kinds.vertical.model import ACTIVE_FILE, PASSIVE_FILE, ActivePart, PassivePart, merge, read_part
from nvflare_plugins.recipes.examples import ID, LABEL
from nvflare_plugins.site.setup import SetupOptions
from tests.support.simulator import SITES, Run, completed, run_simulator

JOBS = examples.FOLDER

pytestmark = [pytest.mark.sim, pytest.mark.slow]


def merged(training: Run) -> xgb.Booster:
    active = read_part(training.site("site-1") / ACTIVE_FILE, "site-1", ActivePart).part
    tables, column = [], len(active.columns)
    for party in active.parties:
        part = read_part(training.site(party.site) / PASSIVE_FILE, party.site, PassivePart).part
        tables.append((column, part.table))
        column += len(party.aliases)
    booster = xgb.Booster(model_file=bytearray(merge(active.booster, len(active.columns), tables)))
    booster.feature_names = booster.feature_types = None
    return booster


def joined_rows(data: Path, ids: pd.Series) -> np.ndarray:
    """Return the parties' columns side by side, rows by id."""
    parts = []
    for site in SITES:
        frame = pd.read_csv(data / site / "breast_columns_test.csv")
        frame.index = frame.pop(ID).str.strip()
        parts.append(frame.drop(columns=LABEL, errors="ignore").loc[ids])
    return np.column_stack(parts).astype(np.float32)


def test_prediction_with_what_a_training_job_left(tmp_path: Path) -> None:
    data = tmp_path / "data"
    wishes = SetupOptions(policy=examples.write_data("vertical_plain", data))
    training = completed(run_simulator(JOBS / "vertical_plain", tmp_path / "training", wishes))
    workspace = tmp_path / "prediction"
    run = run_simulator(
        JOBS / "vertical_predict",
        workspace,
        SetupOptions(policy=examples.write_data("vertical_predict", data)),
        lambda: examples.place_parts(training.workspace, workspace / "local" / "inputs"),
    )
    completed(run)
    table = pd.read_parquet(run.site("site-1") / "predictions.parquet")
    expected = merged(training).predict(xgb.DMatrix(joined_rows(data, table["id"])))
    np.testing.assert_array_equal(table["prediction"].to_numpy(np.float32), expected)
    assert len(table) > 100
    for site in SITES[1:]:
        left = {path.name for path in run.site(site).iterdir()}
        assert left == {"alignment.npz", "evidence", "policy.json", "report.html", "run.json"}
    for place in (*SITES, "server"):
        log = run.log(place)
        assert "P-0" not in log and not [name for name in table["id"] if name in log]
