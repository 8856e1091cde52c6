"""FederBoost's vertical job in the FLARE simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dp_components.ledger import Ledger
from jobs import examples
from nvflare_plugins.cli.verify import verify
from nvflare_plugins.kinds.vertical.model_files import ActivePart, PassivePart, read_part
from nvflare_plugins.recipes.examples import PARTS
from nvflare_plugins.site.policy import SitePolicy
from tests.support.simulator import SITES, run_example


def test_the_script_prepares_all_that_the_job_needs(tmp_path: Path) -> None:
    workspace = examples.prepare("federboost_vertical", tmp_path)
    for site in SITES:
        policy = SitePolicy.load(workspace, site)
        data_set = policy.data_sets[PARTS]
        assert data_set.path.is_file() and data_set.privacy is not None and policy.unsigned_sessions
        assert (policy.inputs / "bucket_features.json").is_file() == (site != "site-1")
    assert policy.allowed_profiles == ("dp_local",)


@pytest.mark.sim
@pytest.mark.slow
def test_job_folder_as_it_stands(tmp_path: Path) -> None:
    done = run_example("federboost_vertical", tmp_path)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "dp_local"
    active = read_part(done.site("site-1") / "vertical_model.json", "site-1", ActivePart)
    passive = [read_part(done.site(s) / "private_table.json", s, PassivePart) for s in SITES[1:]]
    assert len({part.identity.model_id for part in (active, *passive)}) == 1
    assert all(len(part.part.table) for part in passive)
    outcome = verify([done.result / "evidence"])
    assert outcome.sound, outcome.failures
    for site in SITES[1:]:
        ledger = Ledger(done.workspace / site / "veilboost_ledgers" / site / f"{PARTS}.ledger")
        assert 3.99 < ledger.spent().pure_epsilon <= 4
    assert "no record-level privacy" in done.log("site-2")


@pytest.mark.sim
@pytest.mark.slow
def test_without_the_sites_consent_nothing_leaves(tmp_path: Path) -> None:
    done = run_example("federboost_vertical", tmp_path, allowed_profiles=["masks"])
    assert done.code != 0 and "dp_local" in done.summary["reason"]
    records = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    assert not [record for record in records if record["type"] == "message"]
