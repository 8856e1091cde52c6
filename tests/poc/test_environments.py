"""Recipes in FLARE's environments with real processes and certificates: VeilPocEnv, and ProdEnv as in production."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvflare.recipe import ProdEnv

from he_processors.errors import ConfigurationError
from nvflare_plugins.evidence.verification import Verdict
from nvflare_plugins.recipes import AlignmentRecipe, PrivateTreesRecipe, VeilPocEnv
from nvflare_plugins.site.setup import SetupOptions
from poc_workspace.run_poc import ADMIN, SITES, Poc, verify, write_invented_credit
from tests.integration.test_job_folders import RECIPES

pytestmark = [pytest.mark.poc, pytest.mark.slow]
COMPLETED = "FINISHED:COMPLETED"


def spent(kept: Path, site: str) -> int:
    return len((kept / site / "veilboost_ledgers" / "credit2.ledger").read_text().splitlines())


def test_what_sites_have_spent_outlives_the_proof_of_concept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget allows one of the two jobs: a POC that forgot the first would run the second."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))
    kept = tmp_path / "kept"
    write_invented_credit([tmp_path / "data" / site for site in SITES])
    options = SetupOptions(
        {"credit2": str(tmp_path / "data" / "{site}" / "credit2.parquet")},
        budgets={"credit2": {"epsilon": 0.5, "delta": 1e-5}},
    )
    job = next(recipe for recipe in RECIPES if isinstance(recipe, PrivateTreesRecipe))
    env = VeilPocEnv(num_clients=3, kept=kept, set_up=options)
    try:
        run = job.execute(env)
        result = run.get_result(timeout=300)  # which stops the POC and deletes its workspace
        assert result is not None and run.get_status() == COMPLETED and not (tmp_path / "poc").exists()
        assert (
            list(Path(result).rglob("veilboost/evidence"))
            and (kept / "site-1" / "veilboost_runs" / run.get_job_id() / "model.json").is_file()
        )
        assert run.sites == {} and run.reasons == {} and run.evidence.verify().verdict is Verdict.SIGNED
        with pytest.raises(ConfigurationError, match="stay at the sites"):  # a model reaches no submitter
            _ = run.model
        before = spent(kept, "site-1")
        second = job.execute(env)
        assert second.get_result(timeout=300) is not None and second.get_status() != COMPLETED
        assert spent(kept, "site-1") == before
        assert set(second.reasons) <= set(SITES) and second.sites == {}
    finally:
        env.stop(clean_up=True)


def test_a_recipe_runs_against_a_provisioned_server(tmp_path: Path) -> None:
    with Poc(tmp_path / "poc", scenario="vertical") as poc:
        env = ProdEnv(startup_kit_location=str(poc.kits / ADMIN), username=ADMIN, login_timeout=30.0)
        data_sets = next(recipe for recipe in RECIPES if isinstance(recipe, AlignmentRecipe)).job.data_sets
        run = AlignmentRecipe("align", data_sets=data_sets).execute(env)
        result = run.get_result(timeout=300)
        assert result is not None and run.get_status() == COMPLETED
        assert verify(Path(result), poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
    assert poc.pids() == []
