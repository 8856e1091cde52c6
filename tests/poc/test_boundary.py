"""What jobs and the console can do at sites that are set up, under a server that is as FLARE provisions it.

Its rights let the project's administrator do anything, and it has no guard: what is refused, the sites refuse.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from nvflare.fuel.flare_api.flare_api import Session

from jobs import examples
from nvflare_plugins.site.flare_boundary import AUTHORIZATION, COMM_CONFIG, GUARD_FILE, JOB_GUARD_FILE
from poc_workspace.run_poc import SITES, Poc
from tests.soundness.test_what_jobs_can_start import rewriting

JOBS = Path(examples.__file__).parent

pytestmark = [pytest.mark.poc, pytest.mark.slow]


class OpenServer(Poc):
    """A proof of concept whose server nobody set up beyond its components."""

    def _prepare(self) -> None:
        super()._prepare()
        for file in (AUTHORIZATION, GUARD_FILE, JOB_GUARD_FILE, COMM_CONFIG):
            (self.kits / "server" / file).unlink()
        # The server itself would run what the jobs bring: it is to be hostile, and not in this test's way.
        (self.kits / "server" / COMM_CONFIG).write_text("{}")


SECRET = "a-secret-of-the-site-4711"


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """What every process of the proofs of concept has in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_SITE", SECRET)
        yield


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory, environment: None) -> Iterator[Poc]:
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


@pytest.mark.parametrize("module", ["nvflare_plugins.site.setup", "nvflare_plugins.cli.sites.site_setup"])
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
    assert meta["status"] != "FINISHED:COMPLETED" and "this job brings" in json.dumps(meta)
    assert not mark.exists() and not any((poc.kits / site / job_id).exists() for site in SITES)


@pytest.fixture
def requests() -> Iterator[tuple[int, list[str]]]:
    """A listener on this machine: its port, and what was asked of it."""
    asked: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()
    thread.join()


def with_driver(job: Path, mark: Path, port: int) -> None:
    """Python beside the configuration, found by FLARE's search for drivers of its messages; no folder of that name."""
    config = job / "app" / "config"
    (config / COMM_CONFIG).write_text(json.dumps({"comm_driver_path": "."}))
    (config / "x.py").write_text(f"open({str(mark)!r}, 'w')\n")


def with_hocon(job: Path, mark: Path, port: int) -> None:
    """The configuration in another format, which reads the environment, files and addresses."""
    config = job / "app" / "config" / "config_fed_client.json"
    document = json.loads(config.read_text())
    document["executors"][0]["executor"]["args"] = {"kind": "HERE"}
    lines = [
        json.dumps(document)[1:-1].replace('"HERE"', "${?SECRET_OF_THE_SITE}"),
        f'include url("http://127.0.0.1:{port}/")',
        f'include file("{mark.parent}/local/veilboost.json")',
    ]
    config.with_suffix(".conf").write_text("\n".join(lines))
    config.unlink()


def with_references(job: Path, mark: Path, port: int) -> None:
    """The same in JSON: FLARE puts the environment's values there, and a refusal tells them."""
    config = job / "app" / "config" / "config_fed_client.json"
    document = json.loads(config.read_text())
    document["executors"][0]["executor"]["args"] = {"kind": "{$SECRET_OF_THE_SITE}"}
    config.write_text(json.dumps(document))


EXPLOITS = {"driver": with_driver, "hocon": with_hocon, "references": with_references}


def nothing_came_of_it(poc: Poc, mark: Path, asked: list[str], told: str) -> None:
    assert not mark.exists() and asked == [] and SECRET not in told
    for site in SITES:
        assert not list((poc.kits / site).rglob("x.py")) and not list((poc.kits / site).glob("*/**/comm_config.json"))
        assert SECRET not in "".join(path.read_text() for path in (poc.kits / site).rglob("*log*.txt"))


@pytest.mark.parametrize("exploit", EXPLOITS)
def test_an_exploit_ends_at_the_sites_own_guard(
    poc: Poc, policies: None, requests: tuple[int, list[str]], tmp_path: Path, exploit: str
) -> None:
    """The server lets it pass, as a hostile one would send it."""
    job, mark = attack(tmp_path), tmp_path / "ran"
    EXPLOITS[exploit](job, mark, requests[0])
    with poc.session() as session:
        job_id = session.submit_job(str(job))
        _, meta = session.monitor_job_and_return_job_meta(job_id, timeout=180, poll_interval=1.0)
    assert meta["status"] == "FINISHED:FAILED_TO_RUN" and "VeilBoost" in json.dumps(meta)
    assert not any((poc.kits / site / job_id).exists() for site in SITES)
    nothing_came_of_it(poc, mark, requests[1], json.dumps(meta))


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


def test_an_exploit_ends_at_the_servers_guard(
    tmp_path_factory: pytest.TempPathFactory, environment: None, requests: tuple[int, list[str]], tmp_path: Path
) -> None:
    with Poc(tmp_path_factory.mktemp("guarded") / "poc") as poc:
        for name, exploit in EXPLOITS.items():
            (tmp_path / name).mkdir()
            job, mark = attack(tmp_path / name), tmp_path / name / "ran"
            exploit(job, mark, requests[0])
            with poc.session() as session, pytest.raises(Exception, match="VeilBoost") as refusal:
                session.submit_job(str(job))
            nothing_came_of_it(poc, mark, requests[1], str(refusal.value))
        assert poc.run_job(JOBS / "horizontal_masks")[1] == "FINISHED:COMPLETED"
    assert poc.pids() == []
