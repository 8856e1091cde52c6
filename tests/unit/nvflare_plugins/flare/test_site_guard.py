"""The guard in FLARE's process: no role that a server names gets a shell, custom code or a foreign folder.

FLARE's own agent, processors and deployer answer the messages that a hostile server would send.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, new_cell_message
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.client import shell_cmd
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.privacy_manager import PrivacyManager, PrivacyService
from nvflare.security.security import FLAuthorizer

from nvflare_plugins.flare.site_guard import ClosedAuthorizer, SiteGuard
from nvflare_plugins.site.flare_boundary import GUARD_STARTED, without_denied
from tests.support.hostile_apps import undo_guard

RIGHTS = {"format_version": "1.0", "permissions": {"project_admin": "any", "member": {"view": "any"}}}
JOB_ID = "0d1b2c3d-0000-4000-8000-000000000001"
SECRET = "age,income\n4711,123"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLARE's process of a site, with rights as set-up writes them and no guard; all is put back afterwards."""
    for folder in ("startup", "local", "veilboost_ledgers"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data.csv").write_text(SECRET)
    (tmp_path / "veilboost_ledgers" / "credit.ledger").write_text("spent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("org", without_denied(RIGHTS)))
    monkeypatch.setattr(AppAuthzService, "app_validator", DefaultAppValidator("client"))
    monkeypatch.setattr(ClientProcessJobLauncher, "launch_job", ClientProcessJobLauncher.launch_job)
    monkeypatch.setattr(AuditService, "the_auditor", None)
    AuditService.initialize(str(tmp_path / "audit.log"))
    monkeypatch.setattr(PrivacyService, "manager", None, raising=False)
    PrivacyService.initialize(PrivacyManager(None, "", set()))
    undo_guard(monkeypatch)
    return tmp_path


def start_guard(site: Path) -> None:
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(site), "site-1"), private=True)
    SiteGuard().handle_event(EventType.SYSTEM_BOOTSTRAP, context)


class Engine:
    """What the agent needs of FLARE's engine."""

    @contextmanager
    def new_context(self) -> Iterator[FLContext]:
        yield FLContext()

    def fire_event(self, event_type: str, context: FLContext) -> None: ...


def shell(command: str, role: str | None) -> str:
    """Send a shell command as the server does; return what comes back. ``role`` None leaves out what FLARE checks."""
    agent = FedAdminAgent("agent", SimpleNamespace(register_request_cb=lambda **_: None), Engine())
    agent.register_processor(shell_cmd.ShellCommandProcessor())
    message = Message(SysCommandTopic.SHELL, command)
    if role is not None:
        message.set_header(RequestHeader.ADMIN_COMMAND, command.split()[0])
        message.set_header(RequestHeader.REQUIRE_AUTHZ, "true")
        message.set_header(RequestHeader.USER_ROLE, role)
    return str(agent._dispatch_request(new_cell_message({}, message)).payload.body)


ROLES = ["project_admin", "member", "super", None]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "command", ["cat data.csv", "head -c 100 data.csv", "tail data.csv", "grep -n 4711 data.csv", "ls"]
)
def test_no_role_that_a_server_names_runs_a_shell_command(site: Path, role: str | None, command: str) -> None:
    start_guard(site)
    answer = shell(command, role)
    answer = answer.replace(command, "")
    assert "4711" not in answer and "data.csv" not in answer


def test_rights_alone_do_not_stop_a_hostile_server(site: Path) -> None:
    assert "4711" not in shell("cat data.csv", "project_admin")
    assert "4711" in shell("cat data.csv", "super") and "4711" in shell("cat data.csv", None)


def app(with_code: bool) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("config/config_fed_client.json", '{"format_version": 2}')
        if with_code:
            archive.writestr("custom/evil.py", "print(1)")
    return content.getvalue()


def deploy(site: Path, job_id: str, role: str, with_code: bool, **meta: object) -> str | None:
    workspace = Workspace(str(site), "site-1")
    job = {"submitter_name": "x", "submitter_org": "org", "submitter_role": role, **meta}
    return AppDeployer().deploy(workspace, job_id, job, "app", app(with_code), FLContext())


def test_custom_code_is_refused_for_every_role_and_other_jobs_are_not(site: Path) -> None:
    assert deploy(site, JOB_ID, "project_admin", True) == "BYOC not permitted"
    assert deploy(site, JOB_ID, "super", True) is None  # FLARE's own back door
    start_guard(site)
    docker = {"launcher_spec": {"default": {"docker": {"image": "evil"}}}}
    for role in ("project_admin", "super", ""):
        assert "this job brings 'custom/evil.py'" in str(deploy(site, JOB_ID, role, True))
        assert not (site / JOB_ID).exists()
        assert deploy(site, JOB_ID, role, False, **docker) == "BYOC not permitted"
    assert deploy(site, JOB_ID, "project_admin", False) is None and (site / JOB_ID).exists()


@pytest.mark.parametrize("name", ["veilboost_ledgers", "local", "startup", ".", "data.csv"])
def test_folders_that_are_no_jobs_cannot_be_deleted_as_if_they_were(site: Path, name: str) -> None:
    start_guard(site)
    engine = SimpleNamespace(args=SimpleNamespace(workspace=str(site)))
    with pytest.raises(ValueError, match="job"):
        ClientEngine.delete_run(engine, name)
    with pytest.raises(Exception, match="job"):
        deploy(site, name, "project_admin", False)
    assert (site / "veilboost_ledgers" / "credit.ledger").read_text() == "spent" and (site / "local").is_dir()
    deploy(site, JOB_ID, "project_admin", False)
    ClientEngine.delete_run(engine, JOB_ID)
    assert not (site / JOB_ID).exists()


def test_without_the_guard_a_server_can_delete_a_ledger(site: Path) -> None:
    ClientEngine.delete_run(SimpleNamespace(args=SimpleNamespace(workspace=str(site))), "veilboost_ledgers")
    assert not (site / "veilboost_ledgers").exists()


def test_guard_says_that_it_started_and_starts_once(site: Path) -> None:
    start_guard(site)
    inner = AuthorizationService.the_authorizer
    start_guard(site)
    assert AuthorizationService.the_authorizer is inner and isinstance(inner, ClosedAuthorizer)
    assert json.loads((site / GUARD_STARTED).read_text())["pid"] and (site / GUARD_STARTED).stat().st_mode & 0o077 == 0
    assert inner.get_policy().get_roles() == ["member", "project_admin"]


def test_a_guard_that_cannot_start_stops_flare(site: Path) -> None:
    (site / GUARD_STARTED).mkdir()
    with pytest.raises(UnsafeComponentError, match="guard"):
        start_guard(site)
