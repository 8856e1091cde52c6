#!/usr/bin/env python3
"""Installs this checkout into the environment that runs it: the package, compiled once, and what it depends on.

    python .ci/install.py                    the package, to be edited, and its dependencies
    python .ci/install.py test oracle        the dependencies of these extras, beside an installed package
    LOCK=.ci/demo.lock python .ci/install.py these versions in place of the newest that are taken

It takes uv, which needs a tenth of pip's processor time: that on the path, else one that pip fetches and that goes
again. Where pip is told what to install or from where, which uv would not know, or uv fails, pip does it all. NCCL
stays away: XGBoost's wheels ask for it, and load it for training on several GPUs alone, which is not used here; it has
half a gigabyte. Libraries are not compiled to bytecode beforehand: Python does that for what is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_HARMLESS = {
    *("disable-pip-version-check", "timeout", "default-timeout", "retries", "cache-dir", "no-cache-dir", "no-input"),
    *("progress-bar", "no-color", "quiet", "verbose", "root-user-action", "require-virtualenv"),
}
"""Settings of pip that do not say what is installed, nor from where."""
_PIP = [sys.executable, "-m", "pip"]
_QUIET = ["--quiet", "--disable-pip-version-check", "--progress-bar", "off"]


def requirements(extras: list[str]) -> list[str]:
    """Return what the package asks for, with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def pip_has_settings() -> bool:
    """Tell whether pip is told, by file or environment, what to install or from where: uv knows nothing of that."""
    said = subprocess.run([*_PIP, "config", "list"], check=False, capture_output=True, text=True)
    names = {line.partition("=")[0].partition(".")[2] for line in said.stdout.splitlines() if line.strip()}
    return said.returncode != 0 or not names <= _HARMLESS


def find_uv(folder: str) -> str | None:
    """Return uv: that on the path, else one that pip fetches into a folder; None where pip has settings, or cannot."""
    if pip_has_settings():
        return None
    if found := shutil.which("uv"):
        return found
    command = [*_PIP, "install", *_QUIET, "--no-compile", "--target", folder, "uv"]
    is_there = subprocess.run(command, check=False, capture_output=True).returncode == 0
    return shutil.which("uv", path=str(Path(folder) / "bin")) if is_there else None


def with_uv(uv: str, wanted: list[str], constraints: list[str]) -> bool:
    """Install with uv; tell whether it could."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("".join(f"{name}; python_version < '3'\n" for name in LEFT_OUT))
        overrides.flush()
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--override", overrides.name]
        return subprocess.run([*command, *constraints, *wanted], check=False).returncode == 0


def with_pip(wanted: list[str], constraints: list[str]) -> bool:
    """Install with pip, which is asked first what it would take; tell whether it could."""
    asked = [*_PIP, "install", *_QUIET, "--dry-run", "--report", "-", *constraints, *wanted]
    answer = subprocess.run(asked, check=False, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        return False
    found = [one["metadata"] for one in json.loads(answer.stdout)["install"]]
    taken = [f"{one['name']}=={one['version']}" for one in found if one["name"].lower() not in LEFT_OUT]
    print(f"  {len(taken)} packages", flush=True)
    command = [*_PIP, "install", *_QUIET, "--no-deps", "--no-compile"]
    # Two at a time: pip fetches and unpacks one package after the other. What two could not do, one tries again.
    halves = [subprocess.Popen([*command, *half]) for half in (taken[::2], taken[1::2]) if half]
    failed = [half.wait() for half in halves]
    return not any(failed) or subprocess.run([*command, *taken], check=False).returncode == 0


def start_package(constraints: list[str]) -> subprocess.Popen[str]:
    """Start the compilation and installation of the package itself, which needs setuptools alone."""
    subprocess.run([*_PIP, "install", *_QUIET, "--no-compile", *constraints, "setuptools>=77"], check=True)
    command = [*_PIP, "install", *_QUIET, "--no-deps", "--no-build-isolation", "--no-compile", "-e", str(ROOT)]
    # setuptools calls its way to declare extension modules experimental, at length and three times over.
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}
    return subprocess.Popen(command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(extras: list[str]) -> int:
    """Install; 0 if all is there."""
    lock = os.environ.get("LOCK")
    constraints = ["-c", lock] if lock else []
    package = None if extras else start_package(constraints)
    wanted = requirements(extras)
    with tempfile.TemporaryDirectory() as folder:
        uv = find_uv(folder)
        is_there = (uv is not None and with_uv(uv, wanted, constraints)) or with_pip(wanted, constraints)
    if package is not None:
        said, _ = package.communicate()
        if package.returncode:
            print(said, file=sys.stderr)
        is_there = is_there and package.returncode == 0
    return 0 if is_there else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
