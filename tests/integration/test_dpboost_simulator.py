"""The DPBoost job in the FLARE simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xgboost as xgb

from dp_components.ledger import Ledger
from jobs import examples
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.recipes.examples import PATIENTS
from nvflare_plugins.site.policy import SitePolicy
from tests.support.simulator import SITES, run_example


def test_the_script_prepares_all_that_the_job_needs(tmp_path: Path) -> None:
    workspace = examples.prepare("dpboost", tmp_path)
    for site in SITES:
        policy = SitePolicy.load(workspace, site)
        data_set = policy.data_sets[PATIENTS]
        assert data_set.path.is_file() and data_set.privacy is not None and policy.unsigned_sessions
    assert policy.allowed_profiles == ("dp_trusted",)


@pytest.mark.sim
@pytest.mark.slow
def test_job_folder_as_it_stands(tmp_path: Path) -> None:
    done = run_example("dpboost", tmp_path)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "dp_trusted"
    models = {(done.site(site) / "model.json").read_bytes() for site in SITES}
    assert len(models) == 1 and xgb.Booster(model_file=bytearray(models.pop())).num_boosted_rounds() == 10
    outcome = verify([done.result / "evidence"])
    assert outcome.sound, outcome.failures
    for site in SITES:
        ledger = Ledger(done.workspace / site / "veilboost_ledgers" / site / f"{PATIENTS}.ledger")
        assert 3.99 < ledger.spent().pure_epsilon <= 4
    server = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    assert len([record for record in server if record["type"] == "spend"]) == 10


@pytest.mark.sim
@pytest.mark.slow
def test_without_the_sites_consent_nothing_leaves(tmp_path: Path) -> None:
    done = run_example("dpboost", tmp_path, allowed_profiles=["masks"])
    assert done.code != 0 and "dp_trusted" in done.summary["reason"]
    records = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    assert not [record for record in records if record["type"] == "message"]
