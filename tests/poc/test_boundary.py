"""What jobs and the console can do at sites that are set up, under a server that is as FLARE provisions it.

Its rights let the project's administrator do anything, and it has no guard: what is refused, the sites refuse.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvflare.fuel.flare_api.flare_api import Session

from jobs import horizontal
from nvflare_plugins.site.flare_boundary import AUTHORIZATION, GUARD_FILE
from poc_workspace.run_poc import SITES, Poc
from tests.soundness.test_what_jobs_can_start import rewriting

JOBS = Path(horizontal.__file__).parent

pytestmark = [pytest.mark.poc, pytest.mark.slow]


class OpenServer(Poc):
    """A proof of concept whose server nobody set up beyond its components."""

    def _prepare(self) -> None:
        super()._prepare()
        for file in (AUTHORIZATION, GUARD_FILE):
            (self.kits / "server" / file).unlink()


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poc]:
    poc = OpenServer(tmp_path_factory.mktemp("poc") / "poc")
    with poc:
        yield poc
    assert poc.pids() == []


@pytest.fixture
def policies(poc: Poc) -> Iterator[None]:
    """Whatever a test tries, the sites' policies stay as they are."""
    paths = [poc.kits / site / "local" / "veilboost.json" for site in SITES]
    before = [path.read_bytes() for path in paths]
    yield
    assert [path.read_bytes() for path in paths] == before


def attack(folder: Path) -> Path:
    job = folder / "attack"
    shutil.copytree(JOBS / "horizontal_masks", job)
    return job


def log_of(poc: Poc, site: str, job_id: str) -> str:
    return "".join(path.read_text() for path in (poc.kits / site).rglob("*log.txt") if job_id in str(path))


@pytest.mark.parametrize("module", ["nvflare_plugins.site.setup", "nvflare_plugins.flare.site_setup"])
def test_a_job_cannot_rewrite_the_policies(poc: Poc, policies: None, tmp_path: Path, module: str) -> None:
    job = attack(tmp_path)
    path = job / "app" / "config" / "config_fed_client.json"
    config = json.loads(path.read_text())
    config["executors"][0]["executor"]["args"] = {"anything": rewriting(module)}
    path.write_text(json.dumps(config))
    with poc.session() as session:
        job_id = session.submit_job(str(job))
        _, meta = session.monitor_job_and_return_job_meta(job_id, timeout=180, poll_interval=1.0)
    assert meta["status"] != "FINISHED:COMPLETED"
    assert any("not in allow_list" in log_of(poc, site, job_id) for site in SITES)


def test_a_job_with_code_of_its_own_reaches_no_site(poc: Poc, policies: None, tmp_path: Path) -> None:
    job = attack(tmp_path)
    (job / "app" / "custom").mkdir()
    mark = tmp_path / "ran"
    (job / "app" / "custom" / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w')")
    (job / "app" / "custom" / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n\n\ndef run():\n    pass\n")
    path = job / "app" / "config" / "config_fed_client.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "components": [{"id": "x", "path": "evil.run"}]}))
    with poc.session() as session:
        job_id = session.submit_job(str(job))
        _, meta = session.monitor_job_and_return_job_meta(job_id, timeout=180, poll_interval=1.0)
    assert meta["status"] != "FINISHED:COMPLETED" and "BYOC not permitted" in json.dumps(meta)
    assert not mark.exists() and not any((poc.kits / site / job_id).exists() for site in SITES)


@pytest.mark.parametrize("site", SITES)
def test_the_console_reads_nothing_at_a_site(poc: Poc, site: str) -> None:
    def every_command(session: Session) -> Iterator[str]:
        for file in ("local/veilboost.json", "local/authorization.json", "startup/fed_client.json", "log.txt"):
            yield f"cat {site} {file}"
            yield f"head {site} {file}"
            yield f"tail {site} {file}"
        yield f"grep {site} allowed_profiles local/veilboost.json"
        yield f"ls {site} local"
        yield f"pwd {site}"

    with poc.session() as session:
        for command in every_command(session):
            try:
                answer = json.dumps(session.do_command(command))
            except Exception as error:  # whatever it is, it must not hold what was asked for
                answer = str(error)
            assert "allowed_profiles" not in answer.replace(command, ""), command
            assert "veilboost.json" not in answer.replace(command, "") and str(poc.kits) not in answer, command
            assert "denied to every role here" in answer, (command, answer)
