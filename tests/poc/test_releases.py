"""Two releases side by side: server and two sites run this one, a site a later one from an environment of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import examples
from poc_workspace.run_poc import ADMIN, SITES, Poc, verify

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
    policy: dict

    def _prepare(self) -> None:
        Poc._prepare(self)
        kit = self.kits / "site-2"
        for start in (kit / "startup").glob("*.sh"):
            first, rest = start.read_text().split("\n", 1)
            start.write_text(f"{first}\nunset PYTHONPATH\nexport PATH={self.commands}:$PATH\n{rest}")
        path = kit / "local" / "veilboost.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **self.policy}))
        for site in SITES:
            path = self.kits / site / "local" / "veilboost.json"
            policy = json.loads(path.read_text())
            policy["consents"] = {**policy.get("consents", {}), "share_own_trees": True, "recompute_with_changes": True}
            path.write_text(json.dumps(policy))


def federation(folder: Path, commands: Path, **policy: object) -> TwoReleases:
    poc = TwoReleases(folder)
    poc.commands, poc.policy = commands, policy
    return poc


def models(poc: Poc, job_id: str) -> set[bytes]:
    return {(poc.kits / site / "veilboost_runs" / job_id / "model.json").read_bytes() for site in SITES}


def reason(result: Path) -> str:
    return str(json.loads(next(result.rglob("veilboost/summary.json")).read_text())["reason"])


def test_sites_of_two_releases_train_the_same_model_and_refuse_what_they_do_not_share(
    later: Path, tmp_path: Path
) -> None:
    with Poc(tmp_path / "one") as poc:
        alone, status, _ = poc.run_job(examples.FOLDER / "horizontal_masks")
        assert status == "FINISHED:COMPLETED"
        (expected,) = models(poc, alone)
    with federation(tmp_path / "two", later, least_protocol={"horizontal": 1}) as poc:
        job_id, status, result = poc.run_job(examples.FOLDER / "horizontal_masks")
        assert status == "FINISHED:COMPLETED", reason(result)
        assert models(poc, job_id) == {expected}
        assert verify(result, poc.kits / ADMIN / "startup" / "rootCA.pem") == 0
        runs = {site: poc.kits / site / "veilboost_runs" / job_id for site in SITES}
        releases = {
            site: json.loads((run / "run.json").read_text())["versions"]["veilboost"] for site, run in runs.items()
        }
        assert releases["site-2"] == LATER and releases["site-1"] == releases["site-3"] != LATER
        for site, run in runs.items():
            log = [json.loads(line) for line in next(run.rglob(f"{site}.evidence.jsonl")).read_text().splitlines()]
            facts = next(record for record in log if record["type"] == "session")["protection"]
            assert facts["protocol"] == 1
            assert facts["protocols that the sites speak"] == "site-1 1-1, site-2 1-2, site-3 1-1"
        _, status, result = poc.run_job(examples.FOLDER / "bagging")
        assert status != "FINISHED:COMPLETED"
        text = reason(result)
        assert re.search(
            rf"site-1 \(VeilBoost 0\.\d+\.\d+\) speaks protocol 1 of bagging jobs, and site-2 \(VeilBoost {LATER}\)",
            text,
        )
        assert "protocol 2: update VeilBoost at site-1" in text


def test_without_the_word_of_its_policy_the_later_release_takes_no_lower_protocol(later: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "two", later) as poc:
        job_id, status, result = poc.run_job(examples.FOLDER / "horizontal_masks")
        assert status != "FINISHED:COMPLETED" and "Policy key: least_protocol.horizontal" in reason(result)
        assert not list(poc.kits.glob(f"*/veilboost_runs/{job_id}/model.json"))
