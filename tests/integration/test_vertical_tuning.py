"""The vertical tuning's job folder in FLARE's simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import examples
from nvflare_plugins.cli.verify import verify
from tests.support.simulator import SITES, simulate


@pytest.mark.sim
@pytest.mark.slow
def test_job_folder_as_it_stands(tmp_path: Path) -> None:
    done = simulate(examples.FOLDER / "vertical_tuning", examples.prepare("vertical_tuning", tmp_path))
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "elgamal"
    found = json.loads((done.site("site-1") / "tuning.json").read_text())
    assert len(found["trials"]) == 3 and all(0 < one["mean"] < 0.7 for one in found["trials"])
    assert "trial 3 of 3: logloss" in done.log("site-1")
    assert not any((done.site(site) / "tuning.json").exists() for site in SITES[1:])
    assert verify([done.result / "evidence"]).sound
    assert not list(done.result.rglob("tuning.*")), "scores stay at the active party"
