"""What a job may bring: FLARE's own deployer, processor and validator are given generated hostile jobs."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job
from nvflare.apis.workspace import Workspace
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.private.admin_defs import Message, MsgHeader, ReturnCode
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.client import training_cmds
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_engine_internal_spec import ClientEngineInternalSpec
from nvflare.private.fed.client.training_cmds import DeployProcessor
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.utils import app_deployer
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.privacy_manager import PrivacyManager, PrivacyService
from nvflare.security.security import FLAuthorizer

from he_processors.errors import ConfigurationError
from jobs import examples
from nvflare_plugins.flare.site_guard import close_process
from nvflare_plugins.site.flare_boundary import FILES, KEYS, RESOURCES, SIGNATURES, check_app, check_folder, check_job
from tests.support.hostile_apps import CLIENT, HONEST, SERVER, app, archive, hostile_names, tricks, undo_guard

JOB = "0d1b2c3d-0000-4000-8000-000000000001"
RIGHTS = {"format_version": "1.0", "permissions": {"project_admin": "any"}}
JOBS = Path(examples.__file__).parent


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLARE's process of a site, in which the guard stands; all is put back afterwards."""
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(AuthorizationService, "the_authorizer", FLAuthorizer("org", RIGHTS))
    monkeypatch.setattr(AppAuthzService, "app_validator", DefaultAppValidator("client"))
    monkeypatch.setattr(PrivacyService, "manager", None, raising=False)
    PrivacyService.initialize(PrivacyManager(None, "", set()))
    undo_guard(monkeypatch)
    return tmp_path


def let_flare_in(site: Path) -> None:
    (site / RESOURCES).write_text(json.dumps({"class_allow_list": list(DEFAULT_CLASS_ALLOW_LIST)}))


def deploy(site: Path, content: object) -> str | None:
    meta = {"submitter_name": "x", "submitter_org": "org", "submitter_role": "lead"}
    return AppDeployer().deploy(Workspace(str(site), "site-1"), JOB, meta, "app", content, FLContext())


class Engine(ClientEngineInternalSpec):
    """As much of a client's engine as FLARE's processor of deployments wants."""

    def __init__(self, site: Path) -> None:
        self.args = SimpleNamespace(workspace=str(site))

    def get_client_name(self) -> str:
        return "site-1"

    def deploy_app(self, app_name: str, job_id: str, job_meta: dict, client_name: str, app_data: bytes) -> str:
        return deploy(Path(self.args.workspace), app_data) or ""


Engine.__abstractmethods__ = frozenset()


def send(site: Path, content: object) -> tuple[str, str]:
    """Send an app as the server does; return what comes back: the code and the text."""
    message = Message(TrainingTopic.DEPLOY, content)
    for header, value in ((RequestHeader.JOB_ID, JOB), (RequestHeader.JOB_META, {"name": "x"})):
        message.set_header(header, value)
    message.set_header(RequestHeader.APP_NAME, "app")
    reply = DeployProcessor().process(message, Engine(site))
    return reply.get_header(MsgHeader.RETURN_CODE, ReturnCode.OK), str(reply.body)


def test_the_list_is_what_flare_signs_and_reads() -> None:
    assert SIGNATURES == (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
    assert {*KEYS} == {CLIENT, SERVER} and len(FILES) == 6


@pytest.mark.parametrize("is_foreign", [False, True])
def test_no_name_but_the_listed_ones_comes_in(is_foreign: bool) -> None:
    check_app(app(), is_foreign=is_foreign)
    names = list(hostile_names())
    assert len(names) > 5000
    for name in names[:: 7 if is_foreign else 1]:
        with pytest.raises(ConfigurationError, match="this job brings"):
            check_app(app((name, b"{}")), is_foreign=is_foreign)


@given(st.text(max_size=60), st.sampled_from(["", "config/", "config"]))
def test_any_name_is_listed_or_refused(name: str, place: str) -> None:
    whole = f"{place}{name}"
    if whole in {*FILES, "config/"}:
        return
    try:
        content = app((whole, b"{}"))
    except (UnicodeEncodeError, ValueError, UserWarning, IndexError):  # no zip can be made of it
        return
    with pytest.raises(ConfigurationError):
        check_app(content)


@pytest.mark.parametrize("name", ["config/comm_config.json", "x.py", "config/config_fed_client.conf", "custom/a.py"])
def test_a_deployment_ends_refused_and_leaves_nothing(site: Path, name: str) -> None:
    hostile = app((name, b"{}"))
    if name != "custom/a.py":
        assert deploy(site, hostile) is None and (site / JOB).is_dir()  # FLARE alone takes it
    close_process(site)
    for is_foreign in (False, True):
        if is_foreign:
            let_flare_in(site)
        assert f"this job brings '{name}'" in str(deploy(site, hostile)) and not (site / JOB).exists()
        code, text = send(site, hostile)
        assert code == ReturnCode.ERROR and name in text and "Remedy" in text and not (site / JOB).exists()
        assert deploy(site, app()) is None and send(site, app()) == (ReturnCode.OK, "deployed app to site-1")


def test_hocon_alone_is_not_read(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "4711")
    hocon = archive([("config/config_fed_client.conf", b'format_version = 2\nx = ${?SECRET}\ninclude file("a.json")')])
    assert deploy(site, hocon) is None  # FLARE reads it when it validates
    close_process(site)
    assert "config_fed_client.conf" in str(deploy(site, hocon)) and not (site / JOB).exists()
    assert "Missing required config" in str(deploy(site, archive([(SERVER, HONEST[SERVER]), ("config/", b"")])))
    assert not (site / JOB).exists()


@pytest.mark.parametrize("trick", tricks())
def test_archives_with_a_trick_are_never_unpacked(site: Path, trick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("FLARE unpacked it")

    close_process(site)
    assert deploy(site, app()) is None
    for module in (training_cmds, app_deployer):
        monkeypatch.setattr(module, "unzip_all_from_bytes", refuse)
    content = tricks()[trick]
    assert "VeilBoost" in str(deploy(site, content)) and not (site / JOB).exists()
    code, text = send(site, content)
    assert code == ReturnCode.ERROR and "VeilBoost" in text


def test_without_the_guard_a_wrong_checksum_leaves_files_behind(site: Path) -> None:
    spoilt = archive([("x.py", b"run()"), ("config/comm_config.json", b"{}"), (CLIENT, b"checked")])
    spoilt = spoilt.replace(b"checked", b"cHecked", 1)
    with pytest.raises(Exception, match="CRC"):
        deploy(site, spoilt)
    assert {path.name for path in (site / JOB).rglob("*.*")} >= {"x.py", "comm_config.json"}
    close_process(site)
    assert deploy(site, spoilt) and not (site / JOB).exists()


def test_whatever_ends_a_deployment_its_folder_goes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_process(site)
    for end in (OSError("disk full"), KeyboardInterrupt()):

        def half(data: bytes, folder: str, end: BaseException = end) -> None:
            Path(folder, "half").write_text("x")
            raise end

        monkeypatch.setattr(app_deployer, "unzip_all_from_bytes", half)
        with pytest.raises((Exception, KeyboardInterrupt)):
            deploy(site, app())
        assert not (site / JOB).exists()
    monkeypatch.undo()


def spoil(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.mkdir()
        (outside / "secret").write_text("4711")
        config = folder / "config"
        if kind == "a link to a file":
            (folder / ".__nvfl_sig.json").symlink_to(outside / "secret")
        elif kind == "a link to a folder":
            (config / "config_fed_client.json").unlink()
            config.rmdir()
            config.symlink_to(outside)
        elif kind == "a link that leads nowhere":
            (config / ".__nvfl_sig.json").symlink_to("nowhere")
        elif kind == "a pipe":
            os.mkfifo(folder / ".__nvfl_sig.json")
        elif kind == "a folder of a file's name":
            (folder / ".__nvfl_submitter.crt").mkdir()
        elif kind == "an unlisted folder":
            (folder / "custom").mkdir()
        elif kind == "an unlisted file":
            (config / "comm_config.json").write_text("{}")
        elif kind == "a file of a folder's name":
            (config / "config_fed_client.json").unlink()
            config.rmdir()
            config.write_text("{}")
        else:
            folder.rename(folder.parent / "moved")
            folder.symlink_to(folder.parent / "moved")

    return make


@pytest.mark.parametrize(
    "kind",
    [
        *("a link to a file", "a link to a folder", "a link that leads nowhere", "a pipe", "an unlisted folder"),
        *("a folder of a file's name", "an unlisted file", "a file of a folder's name", "the folder is a link"),
    ],
)
def test_the_unpacked_folder_is_looked_at_again_before_flare_reads_it(site: Path, kind: str) -> None:
    folder = site / JOB / "app_site-1"
    (folder / "config").mkdir(parents=True)
    (folder / CLIENT).write_bytes(HONEST[CLIENT])
    close_process(site)
    assert AppAuthzService.validate_app(str(folder))[0] == ""
    spoil(kind)(folder)
    assert "this job brings" in AppAuthzService.validate_app(str(folder))[0]


@pytest.mark.parametrize("role", ["site-1", "server"])
def test_what_an_earlier_version_let_in_does_not_start(site: Path, role: str) -> None:
    """Nor does it after a restart, where a job's process is started again without a deployment."""
    started: list[str] = []
    folder = site / JOB / f"app_{role}"
    (folder / "config").mkdir(parents=True)
    (folder / CLIENT).write_bytes(HONEST[CLIENT])
    close_process(site)
    args, executor = SimpleNamespace(workspace=str(site)), SimpleNamespace(get_status=lambda job: "", start_app=None)
    executor.start_app = lambda client, job, *_, **__: started.append(job)
    engine = SimpleNamespace(
        args=args,
        client=SimpleNamespace(client_name=role),
        client_executor=executor,
        logger=logging.getLogger(),
        rank=0,
        new_context=FLContext,
        run_processes={},
        engine_info=SimpleNamespace(),
        _start_runner_process=lambda job, *_: started.append(job.job_id),
    )

    def start() -> None:
        if role == "server":
            ServerEngine.start_app_on_server(engine, FLContext(), Job(JOB, "", {}, {}))
        else:
            ClientEngine.start_app(engine, JOB, {})

    start()
    assert started == [JOB]
    for hostile in ({"components": [{"id": "{$HOME}"}]}, {"nvflare_decomposers": "os"}):
        (folder / CLIENT).write_text(json.dumps(hostile))
        with pytest.raises(ValueError, match="VeilBoost"):
            start()
    (folder / CLIENT).write_bytes(HONEST[CLIENT])
    (folder / "config" / "config_fed_client.conf").touch()
    with pytest.raises(ValueError, match="this job brings"):
        start()
    assert started == [JOB]


# -- what the two files say --------------------------------------------------------------------------------------------


def saying(document: object, name: str = CLIENT) -> bytes:
    return archive([(name, json.dumps(document).encode())])


REFERENCES = [
    "{$HOME}",
    "a{$HOME}b",
    "{@x:y=z}",
    "${secret:HOME}",
    "${secret:file:/etc/passwd}",
    "{a.b}",
    "{",
    "}",
    "{}",
]


@pytest.mark.parametrize("text", [*REFERENCES, "{SITE_NAME}", "{WORKSPACE}/x"])
def test_no_text_refers_to_anything(site: Path, text: str) -> None:
    places = [
        {"executors": [{"tasks": ["*"], "executor": {"path": "a.B", "args": {"a": {"b": [text]}}}}]},
        {"components": [{"id": text, "path": "a.B"}]},
        {"format_version": text},
    ]
    for document in places:
        with pytest.raises(ConfigurationError, match="brace"):
            check_app(saying(document))
        if text in REFERENCES:
            with pytest.raises(ConfigurationError, match="brace"):
                check_app(saying(document), is_foreign=True)
        else:
            check_app(saying(document), is_foreign=True)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("key", ["max_reg_duration", "nvflare_decomposers", "x", "server", "handlers", "@x", "a.b", ""])
def test_no_further_key_is_taken_for_a_setting(name: str, key: str) -> None:
    for other in {key for keys in KEYS.values() for key in keys} - KEYS[name] | {key}:
        with pytest.raises(ConfigurationError, match="setting of its own"):
            check_app(saying({"format_version": 2, other: 1}, name))
    if key.isidentifier():
        check_app(saying({"format_version": 2, key: 1}, name), is_foreign=True)
    else:
        with pytest.raises(ConfigurationError, match="setting"):
            check_app(saying({"format_version": 2, key: 1}, name), is_foreign=True)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"1", b'{"a": 1', b"[" * 100_000, b"\xff\xfe{", b'\xef\xbb\xbf{"format_version": 2}']
)
def test_what_is_no_object_of_json_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigurationError, match="JSON"):
        check_app(archive([(CLIENT, content)]))


# -- a whole job, as it is submitted -----------------------------------------------------------------------------------


def job(*more: tuple[str, bytes], app_name: str = "app") -> bytes:
    members = {"meta.json": b'{"name": "j", "deploy_map": {"app": ["@ALL"]}, "resource_spec": {}}'}
    members |= {f"{app_name}/{name}": content for name, content in HONEST.items()}
    folders = [("j/", b""), (f"j/{app_name}/", b""), (f"j/{app_name}/config/", b"")]
    return archive([*folders, *((f"j/{name}", content) for name, content in members.items()), *more])


def test_the_servers_own_look_at_a_job_is_held_to_the_list(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "4711")
    hocon = b'name = ${?SECRET}\ndeploy_map { app = ["@ALL"] }\nresource_spec {}'
    hostile = archive([("j/meta.conf", hocon), *((f"j/app/{n}", c) for n, c in HONEST.items()), ("j/app/config/", b"")])
    valid, _, meta = JobMetaValidator().validate("j", hostile)
    assert valid and meta["name"] == "4711"  # FLARE alone puts the server's environment there
    close_process(site)
    assert JobMetaValidator().validate("j", job())[:2] == (True, "")
    valid, text, meta = JobMetaValidator().validate("j", hostile)
    assert not valid and "meta.conf" in text and meta == {}
    upload = site / "upload.zip"
    upload.write_bytes(hostile)
    assert JobMetaValidator().validate("j", str(upload))[0] is False


def test_a_job_may_bring_no_name_but_the_listed_ones() -> None:
    for app_name in ("app", "app_site-1", "app_hospital of A.b@c"):
        check_job(job(app_name=app_name))
    for name in (f"j/{name}" for name in SIGNATURES):
        check_job(job((name, b"{}")))
    for name in [*hostile_names()][::7]:
        for whole in (f"j/app/{name}", f"j/{name}"):
            if whole == "j/meta.json" or whole.removeprefix("j/config/") in FILES:  # an app called config
                continue
            with pytest.raises(ConfigurationError):
                check_job(job((whole, b"{}")))
    for name in ("k/meta.json", "meta.json", "../meta.json", "j/../meta.json", "j/./config/config_fed_client.json"):
        with pytest.raises(ConfigurationError):
            check_job(job((name, b"{}")))


def test_the_job_folders_that_are_kept_come_in(tmp_path: Path) -> None:
    folders = [path.parent for path in JOBS.glob("*/meta.json")]
    assert len(folders) > 10
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        content = [(f"{folder.name}/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in files]
        packed = tmp_path / f"{folder.name}.zip"
        packed.write_bytes(archive(content, zipfile.ZIP_DEFLATED))
        check_job(str(packed))
        check_folder(folder / "app")
