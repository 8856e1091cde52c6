"""FederBoost's vertical job in the FLARE simulator, and its kept job folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dp_components.ledger import Ledger
from jobs import federboost_vertical
from nvflare_plugins.site_setup import Wishes, set_up
from nvflare_plugins.verify import verify
from nvflare_plugins.vertical.model_files import ActivePart, PassivePart, read_part
from tests.support.simulator import SITES, Run, simulate


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and ".__nvfl_" not in path.name]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_kept_folder_is_what_its_recipe_exports(tmp_path: Path) -> None:
    exported = contents(federboost_vertical.write(tmp_path))
    assert exported and contents(federboost_vertical.FOLDER / federboost_vertical.NAME) == exported


def run(tmp_path: Path, **changes: object) -> Run:
    """Set a workspace up as the job needs it; once more if the simulator stumbles at its start."""
    federboost_vertical.write_data(tmp_path / "data")
    workspace = tmp_path / "ws"
    for _ in range(2):
        shutil.rmtree(workspace, ignore_errors=True)
        set_up(workspace, Wishes())
        path = workspace / "local" / "veilboost.json"
        policy = json.loads(path.read_text()) | federboost_vertical.policy(tmp_path / "data") | changes
        path.write_text(json.dumps(policy))
        done = simulate(federboost_vertical.FOLDER / federboost_vertical.NAME, workspace)
        if "Errno 104" not in done.output and "Could not connect" not in done.output:
            break
    return done


@pytest.mark.sim
@pytest.mark.slow
def test_job_folder_as_it_stands(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["status"] == "completed" and done.summary["profile"] == "dp_local"
    active = read_part(done.site("site-1") / "vertical_model.json", "site-1", ActivePart)
    passive = [read_part(done.site(s) / "private_table.json", s, PassivePart) for s in SITES[1:]]
    assert len({part.identity.model_id for part in (active, *passive)}) == 1
    assert all(len(part.part.table) for part in passive)
    outcome = verify([done.result / "evidence"])
    assert outcome.sound, outcome.failures
    for site in SITES[1:]:
        ledger = Ledger(done.workspace / site / "veilboost_ledgers" / site / f"{federboost_vertical.DATA_SET}.ledger")
        assert 3.99 < ledger.spent().pure_epsilon <= 4
    assert "no record-level privacy" in done.log("site-2")


@pytest.mark.sim
@pytest.mark.slow
def test_without_the_sites_consent_nothing_leaves(tmp_path: Path) -> None:
    done = run(tmp_path, allowed_profiles=["masks"])
    assert done.code != 0 and "dp_local" in done.summary["reason"]
    records = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    assert not [record for record in records if record["type"] == "message"]
