"""Job folders of kinds in FLARE's simulator, as they stand, with what the examples prepare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xgboost as xgb

from dp_components.ledger import Ledger
from jobs import examples
from nvflare_plugins.kinds.vertical.model import ActivePart, PassivePart, read_part
from nvflare_plugins.recipes.examples import PARTS, PATIENTS
from nvflare_plugins.recipes.recipe import TuningRecipe, write_folder
from nvflare_plugins.site.policy import SitePolicy
from tests.support.simulator import SITES, Run, completed, run_example, simulate


def spent(done: Run, data_set: str, site: str) -> float:
    """Return what of a site's budget is gone."""
    ledger = Ledger(done.workspace / site / "veilboost_ledgers" / site / f"{data_set}.ledger")
    return ledger.spent().pure_epsilon


def of_server(done: Run, kind: str) -> list[dict]:
    """Return the records of a type in the server's evidence."""
    records = [json.loads(line) for line in (done.result / "evidence" / "server.evidence.jsonl").open()]
    return [record for record in records if record["type"] == kind]


PRIVATE = [("dpboost", PATIENTS, "dp_trusted"), ("federboost_vertical", PARTS, "dp_local")]


@pytest.mark.parametrize(("name", "data_set", "profile"), PRIVATE)
def test_an_example_prepares_all_that_the_job_needs(tmp_path: Path, name: str, data_set: str, profile: str) -> None:
    workspace = examples.prepare(name, tmp_path)
    for site in SITES:
        policy = SitePolicy.load(workspace, site)
        declared = policy.data_sets[data_set]
        assert declared.path.is_file() and declared.privacy is not None and policy.unsigned_sessions
        assert policy.allowed_profiles == (profile,)
        if data_set == PARTS:
            assert (policy.inputs / "bucket_features.json").is_file() == (site != "site-1")


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize(("name", "data_set", "profile"), PRIVATE)
def test_without_the_sites_consent_nothing_leaves(tmp_path: Path, name: str, data_set: str, profile: str) -> None:
    done = run_example(name, tmp_path, allowed_profiles=["masks"])
    assert done.code != 0 and profile in done.summary["reason"]
    assert not of_server(done, "message")


@pytest.mark.sim
@pytest.mark.slow
def test_dpboost(tmp_path: Path) -> None:
    done = completed(run_example("dpboost", tmp_path), "dp_trusted")
    (model,) = {(done.site(site) / "model.json").read_bytes() for site in SITES}
    assert xgb.Booster(model_file=bytearray(model)).num_boosted_rounds() == 10
    assert all(3.99 < spent(done, PATIENTS, site) <= 4 for site in SITES)
    assert len(of_server(done, "spend")) == 10


@pytest.mark.sim
@pytest.mark.slow
def test_federboost(tmp_path: Path) -> None:
    done = completed(run_example("federboost_vertical", tmp_path), "dp_local")
    active = read_part(done.site("site-1") / "vertical_model.json", "site-1", ActivePart)
    passive = [read_part(done.site(s) / "private_table.json", s, PassivePart) for s in SITES[1:]]
    assert len({part.identity.model_id for part in (active, *passive)}) == 1
    assert all(len(part.part.table) for part in passive)
    assert all(3.99 < spent(done, PARTS, site) <= 4 for site in SITES[1:])
    assert "no record-level privacy" in done.log("site-2")


@pytest.mark.sim
@pytest.mark.slow
def test_bagging(tmp_path: Path) -> None:
    done = completed(run_example("bagging", tmp_path), "own_trees")
    assert len({(done.site(site) / "model.json").read_bytes() for site in SITES}) == 1


@pytest.mark.sim
@pytest.mark.slow
def test_a_profile(tmp_path: Path) -> None:
    done = completed(run_example("profile", tmp_path), "masks")
    pages = {(done.site(site) / "profile.html").read_bytes() for site in SITES}
    assert len(pages) == 1 and len({(done.site(site) / "local.html").read_bytes() for site in SITES}) == 3
    found = json.loads((done.site("site-1") / "profile.json").read_text())
    assert found["rows"] == 569 and len(found["ranking"]) == 30
    assert not list(done.result.rglob("local.html")), "nothing of one site is uploaded"


@pytest.mark.sim
@pytest.mark.slow
def test_a_tuning(tmp_path: Path) -> None:
    """As the job folder, but for two trials, three folds and three rounds."""
    workspace = examples.prepare("tuning", tmp_path)
    changes = {"n_trials": 2, "folds": 3, "num_rounds": 3, "early_stopping_rounds": None}
    recipe = TuningRecipe("tuning", **{**examples.recipe("tuning").job.to_dict(), **changes})
    done = completed(simulate(write_folder(recipe, tmp_path / "jobs"), workspace), "masks")
    assert len({(done.site(site) / "tuning.csv").read_text().split("seconds")[0] for site in SITES}) == 1
    check_scores(done, 2)
    assert "trial 2 of 2: logloss" not in done.log("server")


@pytest.mark.sim
@pytest.mark.slow
def test_a_vertical_tuning(tmp_path: Path) -> None:
    done = completed(run_example("vertical_tuning", tmp_path), "elgamal")
    check_scores(done, 3)
    assert not any((done.site(site) / "tuning.json").exists() for site in SITES[1:])


def check_scores(done: Run, n_trials: int) -> None:
    """Assert that site 1 has the scores of all trials, and that nothing of them was uploaded."""
    found = json.loads((done.site("site-1") / "tuning.json").read_text())
    assert len(found["trials"]) == n_trials and all(0 < one["mean"] < 0.7 for one in found["trials"])
    assert f"trial {n_trials} of {n_trials}: logloss" in done.log("site-1")
    assert not list(done.result.rglob("tuning.*")), "scores stay at the sites"
