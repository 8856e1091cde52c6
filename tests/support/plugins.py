"""Installs the example of a plugin's package as far as Python's metadata go: files in a folder, without a network."""

from __future__ import annotations

import importlib
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "plugin_package"
PIN = {"distribution": "acme-veil", "version": "1.2.0"}
POLICY = {"plugins": {"acme_masks": PIN}}
PROFILE = "plugin.acme_masks"
NOISE_PACKAGE = PACKAGE.with_name("noise_package")
SCHEME_PACKAGE = PACKAGE.with_name("scheme_package")


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None = None,
    package: Path = PACKAGE,
    **entries: str,
) -> Path:
    """Install the package into a folder that Python looks in while the test runs.

    Args:
        version: another one than its project says.
        package: folder of its project, which has one module beside it.
        entries: further entry points.
    """
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module = project["name"].replace("-", "_")
    shutil.copytree(package / module, folder / module, ignore=shutil.ignore_patterns("__pycache__"))
    for group, points in project["entry-points"].items():
        describe(folder, project["name"], version or project["version"], {**points, **entries}, group)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "pycache_prefix", sys.pycache_prefix)
    forget()
    return folder


def describe(folder: Path, name: str, version: str, entries: dict[str, str], group: str) -> None:
    """Write the metadata of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{point} = {target}" for point, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


def imported() -> list[str]:
    """Return the modules of the package that were imported."""
    return sorted(name for name in sys.modules if name.split(".")[0] in ("acme_veil", "acme_noise", "acme_numbers"))


def forget() -> None:
    """Let the next import find the package anew."""
    for name in imported():
        del sys.modules[name]
    importlib.invalidate_caches()
