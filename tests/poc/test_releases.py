"""Two releases side by side: server and two sites run this one, a site a later one from an environment of its own."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from jobs import examples
from nvflare_plugins.flare.kinds import read_job
from nvflare_plugins.recipes.recipe import JobRecipe
from poc_workspace.run_poc import ADMIN, SITES, Poc, verify
from tests.support.federation import Parties
from tests.support.flare_job import run_flare_job

ROOT = Path(examples.__file__).parents[1]
LATER = "99.0.0"
RAISED = {"horizontal": "Span(1, 2)", "bagging": "Span(2, 2)"}
"""What the later release speaks where it is not what this one does."""

pytestmark = [pytest.mark.poc, pytest.mark.slow]


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of commands of an environment with a later release; dependencies are those from here."""
    folder = tmp_path_factory.mktemp("later")
    tree = folder / "tree"
    for name in ("he_processors", "dp_components", "nvflare_plugins"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    table = tree / "nvflare_plugins" / "site" / "protocols.py"
    source = table.read_text()
    for kind, span in RAISED.items():
        source, n = re.subn(rf'"{kind}": Span\(1, 1\)', f'"{kind}": {span}', source)
        assert n == 1
    table.write_text(source)
    facts = tree / f"veilboost-{LATER}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: veilboost\nVersion: {LATER}\n")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "later.pth").write_text(f"{tree}\n{Path(pytest.__file__).parents[1]}\n")
    said = subprocess.run(
        [environment / "bin" / "python", "-m", "nvflare_plugins", "--version"],
        cwd=folder,
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == f"veilboost {LATER}"
    return environment / "bin"


class TwoReleases(Poc):
    """A proof of concept whose second site runs another environment."""

    commands: Path

    def _prepare(self) -> None:
        Poc._prepare(self)
        for start in (self.kits / "site-2" / "startup").glob("*.sh"):
            first, rest = start.read_text().split("\n", 1)
            # `python -m` looks for modules where it is started.
            own = f"cd /\nunset PYTHONPATH\nexport PATH={self.commands}:$PATH"
            start.write_text(f"{first}\n{own}\n{rest}")
        for site in SITES:
            self.change_policy(site, consents={"share_own_trees": True, "recompute_with_changes": True})

    def change_policy(self, site: str, **keys: object) -> None:
        path = self.kits / site / "local" / "veilboost.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def reason(result: Path) -> str:
    return str(json.loads(next(result.rglob("veilboost/summary.json")).read_text())["reason"])


def test_sites_of_two_releases_train_the_same_model_and_refuse_what_they_do_not_share(
    later: Path, tmp_path: Path
) -> None:
    job = examples.FOLDER / "horizontal_masks"
    poc = TwoReleases(tmp_path / "two")
    poc.commands = later
    with poc:
        refused, status, result = poc.run_job(job)
        text = reason(result)
        assert status != "FINISHED:COMPLETED" and f"and site-2 (VeilBoost {LATER}) protocol 2: update VeilBoost" in text
        assert "Policy key: least_protocol.horizontal" in text
        assert not list(poc.kits.glob(f"*/veilboost_runs/{refused}/model.json"))
        poc.change_policy("site-2", least_protocol={"horizontal": 1})
        job_id, status, result = poc.run_job(job)
        assert status == "FINISHED:COMPLETED", reason(result)
        assert verify(result, poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
        runs = {site: poc.kits / site / "veilboost_runs" / job_id for site in SITES}
        (model,) = {(run / "model.json").read_bytes() for run in runs.values()}
        records = {site: json.loads((run / "run.json").read_text()) for site, run in runs.items()}
        releases = {site: record["versions"]["veilboost"] for site, record in records.items()}
        assert releases["site-2"] == LATER and releases["site-1"] == releases["site-3"] != LATER
        for site, run in runs.items():
            log = [json.loads(line) for line in next(run.rglob(f"{site}.evidence.jsonl")).read_text().splitlines()]
            facts = next(record for record in log if record["type"] == "session")["protection"]
            assert facts["protocol"] == 1
            assert facts["protocols that the sites speak"] == "site-1 1-1, site-2 1-2, site-3 1-1"
        _, status, result = poc.run_job(examples.FOLDER / "bagging")
        text = reason(result)
        assert status != "FINISHED:COMPLETED" and "protocol 2: update VeilBoost at site-1" in text
        assert f"speaks protocol 1 of bagging jobs, and site-2 (VeilBoost {LATER})" in text
    assert model == model_of_one_release(tmp_path / "one", poc.folder / "data")


def model_of_one_release(folder: Path, data: Path) -> bytes:
    """Return what sites of this release alone train of the same rows."""
    parties = Parties(folder)
    for site in SITES:
        for name in ("breast_train", "breast_test"):
            parties.give(site, name.removesuffix("_train"), pd.read_csv(data / site / f"{name}.csv"))
    job = dataclasses.replace(read_job(examples.FOLDER / "horizontal_masks"), tracking=False)
    finished = run_flare_job(JobRecipe("job", job), parties)
    assert finished.reason is None
    return (finished.folder("site-1") / "model.json").read_bytes()
