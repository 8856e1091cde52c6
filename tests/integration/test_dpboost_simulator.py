"""The DPBoost job in the FLARE simulator, and its kept job folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import xgboost as xgb

from dp_components.ledger import Ledger
from jobs import dpboost
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.site.policy.policy import SitePolicy
from tests.support.simulator import SITES, Run, simulate


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and ".__nvfl_" not in path.name]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_kept_folder_is_what_its_recipe_exports(tmp_path: Path) -> None:
    exported = contents(dpboost.write(tmp_path))
    assert exported and contents(dpboost.FOLDER / dpboost.NAME) == exported


def test_the_script_prepares_all_that_the_job_needs(tmp_path: Path) -> None:
    dpboost.prepare(tmp_path)
    for site in SITES:
        policy = SitePolicy.load(tmp_path / dpboost.NAME, site)
        data_set = policy.data_sets[dpboost.DATA_SET]
        assert data_set.path.is_file() and data_set.privacy is not None and policy.unsigned_sessions
    assert policy.allowed_profiles == ("dp_trusted",)


def run(tmp_path: Path, **changes: object) -> Run:
    """Set a workspace up as the job needs it; once more if the simulator stumbles at its start."""
    workspace = tmp_path / dpboost.NAME
    for _ in range(2):
        shutil.rmtree(workspace, ignore_errors=True)
        dpboost.prepare(tmp_path)
        path = workspace / "local" / "veilboost.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        done = simulate(dpboost.FOLDER / dpboost.NAME, workspace)
        if "Errno 104" not in done.output and "Could not connect" not in done.output:
            break
    return done


@pytest.mark.sim
@pytest.mark.slow
def test_job_folder_as_it_stands(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "dp_trusted"
    models = {(done.site(site) / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1 and xgb.Booster(model_file=bytearray(models.pop())).num_boosted_rounds() == 10
    outcome = verify([done.result / "evidence"])
    assert outcome.sound, outcome.failures
    for site in SITES:
        ledger = Ledger(done.workspace / site / "veilboost_ledgers" / site / f"{dpboost.DATA_SET}.ledger")
        assert 3.99 < ledger.spent().pure_epsilon <= 4
    server = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    assert len([record for record in server if record["type"] == "spend"]) == 10


@pytest.mark.sim
@pytest.mark.slow
def test_without_the_sites_consent_nothing_leaves(tmp_path: Path) -> None:
    done = run(tmp_path, allowed_profiles=["masks"])
    assert done.code != 0 and "dp_trusted" in done.summary["reason"]
    records = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    assert not [record for record in records if record["type"] == "message"]
