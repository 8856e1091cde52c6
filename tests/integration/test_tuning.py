"""The tuning's job folder in FLARE's simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import examples
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.recipes.recipe import TuningRecipe, write_folder
from tests.support.simulator import SITES, simulate


@pytest.mark.sim
@pytest.mark.slow
def test_a_tuning_in_the_simulator(tmp_path: Path) -> None:
    """As the job folder, but for two trials, three folds and three rounds."""
    workspace = examples.prepare("tuning", tmp_path)
    kept = examples.recipe("tuning").job
    changes = {"n_trials": 2, "folds": 3, "num_rounds": 3, "early_stopping_rounds": None}
    folder = write_folder(TuningRecipe("tuning", **{**kept.to_dict(), **changes}), tmp_path / "jobs")
    done = simulate(folder, workspace)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "masks"
    tables = {(done.site(site) / "tuning.csv").read_text().split("seconds")[0] for site in SITES}
    assert len(tables) == 1
    found = json.loads((done.site("site-1") / "tuning.json").read_text())
    assert len(found["trials"]) == 2 and all(0 < one["mean"] < 0.7 for one in found["trials"])
    assert "trial 2 of 2: logloss" in done.log("site-1") and "trial 2 of 2: logloss" not in done.log("server")
    assert verify([done.result / "evidence"]).sound
    assert not list(done.result.rglob("tuning.*")), "scores stay at the sites"
