"""Apps that a hostile person or server would send, generated; and FLARE as it is before a guard stands in it."""

from __future__ import annotations

import functools
import io
import itertools
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator

import pytest
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.shell_cmd import SHELL_CMD_VALIDATORS
from nvflare.private.fed.client.training_cmds import DeployProcessor
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer

from nvflare_plugins.flare.loading import LAUNCHED_BY
from nvflare_plugins.site.flare_boundary import FILES

CLIENT, SERVER = "config/config_fed_client.json", "config/config_fed_server.json"
HONEST = {CLIENT: b'{"format_version": 2, "executors": []}', SERVER: b'{"format_version": 2, "workflows": []}'}
STEMS = (
    *("comm_config", "resources", "fed_client", "fed_server", "fed_admin", "relay__resources", "job_resources"),
    *("config_fed_client", "config_fed_server", "config_train", "environment", "log_config", "privacy"),
    *("authorization", "study_registry", "job_meta", "meta", "x", "__init__", "sitecustomize", "readme", ""),
)
ENDINGS = (
    *(".json", ".conf", ".yml", ".yaml", ".json.default", ".conf.default", ".yml.default", ".JSON", ".json "),
    *(".py", ".pyc", ".so", ".pth", ".txt", ".crt", ""),
)
PLACES = (
    *("", "config/", "custom/", "config/custom/", "config/config/", "local/", "startup/", "data/a/b/c/"),
    *("/", "/config/", "../", "../../local/", "config/../", "config/../config/", "./config/", "config//", "config/./"),
    *("CONFIG/", "Config/", "config\\", "c:/config/", "c\u043enfig/", "config\u200b/", "co\u0301nfig/", " config/"),
)


def hostile_names() -> Iterator[str]:
    """Yield names of files that no job may bring: every stem with every ending in every place."""
    for place, stem, ending in itertools.product(PLACES, STEMS, ENDINGS):
        name = f"{place}{stem}{ending}"
        if name not in FILES and not name.endswith("/") and name:
            yield name


def archive(members: Iterable[tuple[str | zipfile.ZipInfo, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip of these members, whatever they are."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as made:
        for name, data in members:
            made.writestr(name, data)
    return content.getvalue()


def app(*more: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    """Return an honest app with more members in it."""
    return archive([*HONEST.items(), *more])


def of_kind(name: str, kind: int) -> zipfile.ZipInfo:
    """Return a member that says of itself to be a link, device or the like."""
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (kind | 0o777) << 16
    return info


@functools.cache
def tricks() -> dict[str, object]:
    """Return archives that no job may be, by what is wrong with them. Their names alone are honest."""
    only_client = [(CLIENT, HONEST[CLIENT])]
    found: dict[str, object] = {
        f"a {kind} called {name}": archive([(of_kind(name, mode), b"../../local/veilboost.json")])
        for kind, mode in (
            ("link", stat.S_IFLNK),
            ("pipe", stat.S_IFIFO),
            ("device", stat.S_IFCHR),
            ("block device", stat.S_IFBLK),
            ("socket", stat.S_IFSOCK),
            ("folder", stat.S_IFDIR),
        )
        for name in (CLIENT, ".__nvfl_sig.json")
    }
    found["a folder that is a link"] = archive([(of_kind("config/", stat.S_IFLNK), b"/etc"), *only_client])
    found["a folder with content"] = archive([("config/", b"x"), *only_client])
    found["a folder that is not listed"] = archive([("custom/", b""), *only_client])
    found["a folder above"] = archive([("../x/", b""), *only_client])
    with pytest.warns(UserWarning, match="Duplicate"):
        found["one name twice"] = archive([*only_client, (CLIENT, HONEST[CLIENT])])
    found["a name that ends in the middle"] = app((f"{SERVER}XX.py", b"")).replace(b"XX.py", b"\0X.py")
    found["compressed as nothing else is"] = archive(only_client, zipfile.ZIP_LZMA)
    found["a bomb"] = archive([(CLIENT, b" " * (17 << 20))], zipfile.ZIP_DEFLATED)
    found["too many members"] = archive((f"config/{number}/", b"") for number in range(10_001))
    honest = app()
    found["a wrong checksum"] = honest.replace(b"executors", b"exeCutors", 1)
    found["a wrong checksum of a signature"] = app((".__nvfl_sig.json", b"signed")).replace(b"signed", b"sIgned", 1)
    found["encrypted"] = _with_flag(honest, 1)
    found["half of it"] = honest[: len(honest) // 2]
    found["no archive"], found["nothing"], found["no bytes"] = b"config_fed_client {}", b"", None
    found["another name inside"] = honest.replace(CLIENT.encode(), b"config/comm_config_xxx.json"[: len(CLIENT)], 1)
    return found


def _with_flag(content: bytes, flag: int) -> bytes:
    changed = bytearray(content)
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = changed.find(mark)
        changed[place + at] |= flag
    return bytes(changed)


def undo_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a test leave FLARE's classes as it found them, whatever a guard does to them."""
    monkeypatch.setenv(LAUNCHED_BY, str(os.getppid()))
    for owner, name in (
        (AppDeployer, "deploy"),
        (DeployProcessor, "process"),
        (JobMetaValidator, "validate"),
        (ClientEngine, "start_app"),
        (ServerEngine, "start_app_on_server"),
        (ServerEngine, "abort_app_on_server"),
        (FederatedServer, "_sync_client_jobs"),
        (JobRunner, "fail_run"),
        (ClientProcessJobLauncher, "launch_job"),
        (ServerProcessJobLauncher, "launch_job"),
        (CommConfigurator, "_configuration"),
        (CommConfigurator, "_config_loaded"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for command, validator in SHELL_CMD_VALIDATORS.items():
        monkeypatch.setitem(SHELL_CMD_VALIDATORS, command, validator)
    monkeypatch.setattr(Workspace, "_check_job_id", staticmethod(Workspace._check_job_id))
    monkeypatch.setattr(AppAuthzService, "validate_app", staticmethod(AppAuthzService.validate_app))
    monkeypatch.setattr(ConfigFactory, "search_config_format", staticmethod(ConfigFactory.search_config_format))
    monkeypatch.setattr(ConfigFactory, "_fmt2Loader", dict(ConfigFactory._fmt2Loader))
