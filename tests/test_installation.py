"""What .ci/install.py asks whom: a setting of pip is never passed by, and a lock holds for all that is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Asked:
    """Takes the place of ``subprocess.run`` and ``Popen``. Args: settings: what ``pip config list`` prints."""

    def __init__(self, settings: str) -> None:
        self.settings, self.commands = settings, list[list[str]]()
        self.returncode = 0

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        said = self.settings if command[-2:] == ["config", "list"] else '{"install": []}'
        return subprocess.CompletedProcess(command, 0, stdout=said, stderr="")

    def popen(self, command: list[str], **options: Any) -> Asked:
        self.commands.append(command)
        return self

    def wait(self) -> int:
        return 0

    def communicate(self) -> tuple[str, str]:
        return "", ""


def installed(install: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: str) -> list[list[str]]:
    asked = Asked(settings)
    monkeypatch.setattr(install.subprocess, "run", asked)
    monkeypatch.setattr(install.subprocess, "Popen", asked.popen)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: "/opt/uv")
    monkeypatch.setenv("LOCK", "a.lock")
    assert install.main([]) == 0
    return asked.commands


@pytest.mark.parametrize(
    "setting",
    [
        "global.index-url='https://mirror.example/simple'",
        ":env:.extra-index-url='https://mirror.example/simple'",
        ":env:.require-hashes='1'",
        "global.constraint='/etc/pip/constraints.txt'",
        "install.only-binary=':all:'",
        "global.timeout='9'\nglobal.find-links='/opt/wheels'",
    ],
)
def test_uv_on_the_path_is_not_asked_where_pip_is_told_what_to_install_or_from_where(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    assert not any(command[0] == "/opt/uv" for command in installed(install, monkeypatch, setting))


@pytest.mark.parametrize("setting", ["", ":env:.disable-pip-version-check='1'\nglobal.timeout='180'\n"])
def test_uv_is_taken_where_pip_has_no_such_settings(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    assert any(command[0] == "/opt/uv" for command in installed(install, monkeypatch, setting))


def test_the_compiler_is_held_to_the_lock_as_all_else(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = (one for one in installed(install, monkeypatch, "") if "setuptools>=77" in one)
    assert command[command.index("-c") + 1] == "a.lock"
