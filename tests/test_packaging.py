"""What is shipped: sdist and wheel, with and without a C compiler or x86; dependencies, their ranges and licences."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_SPEC = importlib.util.spec_from_file_location("dependencies", ROOT / ".ci" / "dependencies.py")
assert _SPEC is not None and _SPEC.loader is not None
dependencies = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(dependencies)
LOCK = (ROOT / ".ci" / "demo.lock").read_text().splitlines()


def test_every_dependency_is_under_a_licence_that_is_allowed_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert dependencies.main(["licences"]) == 0, capsys.readouterr().out
    listed = capsys.readouterr().out
    assert all(re.search(rf"(?m)^{name} ", listed) for name in ("nvflare", "xgboost", "numpy", "tenseal"))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("Apache Software License", True),
        ("MIT OR GPL-3.0-only", True),
        ("LGPL-3.0-or-later", True),
        ("GNU Lesser General Public License v3 (LGPLv3)", True),
        ("GPL-3.0-only", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("AGPL-3.0", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
        ("", False),
    ],
)
def test_what_is_allowed(text: str, allowed: bool) -> None:
    assert dependencies.is_allowed(text) is allowed


def test_the_lock_of_the_demo_is_within_the_ranges_and_complete() -> None:
    locked = dict(line.split("==") for line in LOCK if not line.startswith("#"))
    for requirement in dependencies.declared():
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement
    if LOCK[0].startswith(f"# Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform}"):
        assert set(dependencies.closure(dependencies.declared())) <= set(locked)


def test_the_lowest_ends_are_one_version_each_and_within_the_ranges() -> None:
    lowest = {Requirement(line).name: Requirement(line).specifier for line in dependencies.lowest()}
    declared = {requirement.name: requirement.specifier for requirement in dependencies.declared()}
    assert set(lowest) == set(declared)
    for name, pin in lowest.items():
        (one,) = pin
        assert one.operator == "==" and declared[name].contains(one.version.replace(".*", ".0")), name


def test_wheels_are_built_for_the_pythons_that_the_package_takes() -> None:
    pythons = SpecifierSet(PROJECT["project"]["requires-python"])
    wheels = PROJECT["tool"]["cibuildwheel"]
    built = [f"{major}.{minor}" for major, minor in re.findall(r"cp(\d)(\d+)-\*", wheels["build"])]
    assert built == [f"3.{minor}" for minor in range(30) if f"3.{minor}.0" in pythons]
    assert wheels["linux"]["archs"].split() == ["x86_64", "aarch64"] and "macos" in wheels
    command = wheels["test-command"].removeprefix("python {project}/")
    assert (ROOT / command).is_file()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {
        path.parent
        for name in ("he_processors", "dp_components", "nvflare_plugins")
        for path in (ROOT / name).rglob("*.py")
    }
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_import_veilboost_has_one_name_and_is_quick() -> None:
    import veilboost

    assert Path(veilboost.__file__).parent == ROOT / "nvflare_plugins" / "veilboost"
    assert {name for name in veilboost.__all__ if getattr(veilboost, name) is None} == set()
    with pytest.raises(ImportError, match="one name"):
        importlib.import_module("nvflare_plugins.veilboost")
    code = (
        "import importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('veilboost', {str(veilboost.__file__)!r})\n"
        "spec.loader.exec_module(u.module_from_spec(spec))\n"
        "print([name for name in ('numpy', 'nvflare', 'nvflare_plugins', 'pandas', 'xgboost') if name in sys.modules])"
    )
    assert run(sys.executable, "-I", "-c", code, cwd=ROOT).strip() == "[]"


def test_a_wheel_has_the_package_under_its_name_alone() -> None:
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    found = {where: find_packages(str(ROOT / where), find["exclude"], find["include"]) for where in find["where"]}
    assert found["nvflare_plugins"] == ["veilboost"] and "nvflare_plugins.api" in found["."]
    assert not any("veilboost" in name for name in found["."])
    assert PROJECT["tool"]["setuptools"]["package-data"]["veilboost"] == ["py.typed"]


def test_every_template_of_a_page_is_shipped() -> None:
    report = ROOT / "nvflare_plugins" / "pages"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["nvflare_plugins.pages"]
    shipped = {path for pattern in patterns for path in report.glob(pattern)}
    assert shipped >= {path for path in (report / "templates").rglob("*") if path.is_file()} != set()


def copy_of_the_sources(folder: Path) -> Path:
    kept_out = (".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache", "runs", "shared")
    return Path(shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(*kept_out)))


def build(sources: Path, what: str, target: Path, **environment: str) -> Path:
    """Build an sdist or a wheel with the setuptools that is installed, and return it."""
    target.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(target)!r}))"
    run(sys.executable, "-c", code, cwd=sources, **environment)
    (found,) = target.iterdir()
    return found


def run(*command: str, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel alone in an empty environment that borrows the dependencies from here; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    python = folder / "bin" / "python"
    place = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    (place / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    command = ("-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    run(sys.executable, *command, cwd=folder)
    return python


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {re.sub(r"\.dist-info/.*", "", name) for name in archive.namelist()}


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
@pytest.mark.parametrize("change", ["", "a file", "the sums", "both", "another key", "another purpose"])
def test_release_files_are_signed_and_a_change_of_any_is_noticed(tmp_path: Path, change: str) -> None:
    """By the commands of jobs/RUNNING.md, as a site runs them."""
    block = re.search(r"```console\n(ssh-keygen -Y verify.*?)```", (ROOT / "jobs" / "RUNNING.md").read_text(), re.S)
    assert block is not None
    for name in ("key", "other"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name), cwd=tmp_path)
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in ("veilboost-1.tar.gz", "veilboost-1-cp311-cp311-linux_x86_64.whl"):
        (dist / name).write_text(name)
    run(
        str(ROOT / ".ci" / "sign"), str(dist), str(tmp_path / ("other" if change == "another key" else "key")), cwd=ROOT
    )
    (dist / "release_keys").write_text(f"release {(tmp_path / 'key.pub').read_text()}")
    file, sums = dist / "veilboost-1.tar.gz", dist / "SHA256SUMS"
    if change in ("a file", "both"):
        file.write_text("other")
    if change in ("the sums", "both"):
        sums.write_text(sums.read_text().replace("0", "1"))
    commands = block[1].replace("veilboost-release", "mail") if change == "another purpose" else block[1]
    done = [
        subprocess.run(["/bin/bash", "-c", line], cwd=dist, capture_output=True, check=False).returncode == 0
        for line in commands.strip().splitlines()
    ]
    assert len(done) == 2 and all(done) == (change == "")


def test_a_folder_without_release_files_is_not_signed(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / ".ci" / "sign", tmp_path, "key"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no release files" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_wheels_from_checkout_and_sdist_are_alike_and_whole(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path)
    sdist = build(sources, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheels = [build(sources, "wheel", tmp_path / "one"), build(unpacked, "wheel", tmp_path / "other")]
    assert contents(wheels[0]) == contents(wheels[1])
    python = install(wheels[1], tmp_path / "environment")
    said = run(str(python), str(ROOT / ".ci" / "check_wheel.py"), cwd=tmp_path)
    assert str(tmp_path / "environment") in said and "veilboost 0." in said


@pytest.mark.slow
def test_without_x86_the_portable_kernels_agree_with_the_references(tmp_path: Path) -> None:
    """As on aarch64 and on Apple's machines: the sources are compiled as if x86 did not exist."""
    wheel = build(copy_of_the_sources(tmp_path), "wheel", tmp_path / "wheel", CFLAGS="-DVEILBOOST_PORTABLE")
    python = install(wheel, tmp_path / "environment")
    shutil.copytree(ROOT / "tests", tmp_path / "run" / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "run")
    variants = run(
        str(python), "-c", "from he_processors import field61; print(field61.variants())", cwd=tmp_path / "run"
    )
    assert variants.strip() == "('portable', 'numpy')"
    suites = ("unit/he_processors/test_field61.py", "conformance/test_bignum_backends.py")
    suites += ("conformance/test_curve_backends.py", "unit/he_processors/test_masks.py")
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *(f"tests/{suite}" for suite in suites),
    )
    assert " passed" in run(str(python), *command, cwd=tmp_path / "run")


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_says_once_what_runs(tmp_path: Path) -> None:
    nothing = tmp_path / "no-compiler"
    wheel = build(copy_of_the_sources(tmp_path), "wheel", tmp_path / "wheel", CC=str(nothing), CXX=str(nothing))
    assert not any(name.endswith(".so") for name in contents(wheel))
    python = install(wheel, tmp_path / "environment")
    code = (
        "import logging, numpy; logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "from he_processors import field61\nfrom he_processors.bignum.interface import open_backend\n"
        "from he_processors.curve.interface import open_curve\n"
        "for _ in range(3):\n"
        "    open_backend('auto', 2**2048 - 1); open_curve()\n"
        "    words, none = numpy.ones((2, 2), numpy.uint64), numpy.zeros(0, numpy.int64)\n"
        "    field61.combine(words[0].view(numpy.int64), none, words, words[:, :1].copy())\n"
    )
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, env={}, check=True)
    warnings = done.stderr.splitlines()
    assert len(warnings) == 3 and all(line.startswith("WARNING") for line in warnings)
    assert "big-number backend gmpy2 runs" in done.stderr and "was not built" in done.stderr
    assert "curve backend reference runs" in done.stderr and "without a C compiler" in done.stderr
