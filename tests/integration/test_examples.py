"""Every job folder of this project runs as it stands in a simulator's workspace after ``site-setup --example``."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import examples as jobs
from nvflare_plugins.recipes import examples
from tests.support.simulator import simulate

JOBS = Path(jobs.__file__).parent
WANT_A_MODEL = ["vertical_predict", "vertical_explain", "vertical_merge"]
OTHERS = sorted({path.parent.name for path in JOBS.glob("*/meta.json")} - set(WANT_A_MODEL) - {"vertical_plain"})

pytestmark = [pytest.mark.sim, pytest.mark.slow]


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    examples.prepare(tmp_path / "ws")
    run = simulate(JOBS / name, tmp_path / "ws")
    assert run.code == 0, run.output[-4000:]


def test_folders_that_want_a_model_say_which_and_run_once_it_is_there(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    examples.prepare(workspace)
    run = simulate(JOBS / "vertical_predict", workspace)
    assert run.code != 0 and "holds no part of the model of job simulate_job" in run.output
    assert "--example` again after the training" in run.output
    assert simulate(JOBS / "vertical_plain", workspace).code == 0
    assert any("trained here last" in line for line in examples.prepare(workspace))
    for name in WANT_A_MODEL:
        run = simulate(JOBS / name, workspace)
        assert run.code == 0, run.output[-4000:]
