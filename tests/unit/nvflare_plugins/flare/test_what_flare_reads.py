"""What FLARE's own processes open, ask for and import, held against the table in its README.md.

Provisioned kits; an old job has left hostile files of every name, format and depth in the workspace. A new FLARE that
reads a further file is noticed here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.utils.config_factory import ConfigFactory

from jobs import examples
from nvflare_plugins.flare.components import close_search, ignore_settings_here
from nvflare_plugins.site.flare_boundary import COMM_CONFIG, GUARD_FILE, JOB_GUARD_FILE
from nvflare_plugins.site.setup import set_up
from tests.support.flare_reads import PROCESSES, report
from tests.support.hostile_apps import ENDINGS, STEMS, undo_guard
from tests.support.processes import processes
from tests.support.provisioning import provision

ROOT = Path(__file__).resolve().parents[4]
JOBS = Path(examples.__file__).parent
JOB, OLD = "0d1b2c3d-0000-4000-8000-000000000001", "0d1b2c3d-0000-4000-8000-000000000002"
FOLDERS = {"local", "startup"}
_PLACES = ("", "app_SITE", "app_SITE/config", "app_SITE/config/deep/er", "app_SITE/local", "site-2")


def table() -> Iterator[tuple[set[str], str]]:
    """Yield the rows of the table: the paths that it names, with ``JOB`` and ``SITE``, and the tests."""
    text = (ROOT / "nvflare_plugins" / "flare" / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"(?m)^\| (`.*) \|$", text):
        cells = line.split(" | ")
        yield set(re.findall(r"`([^`]+)`", cells[0])), cells[-1]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kits = provision(ROOT / "poc_workspace" / "project.yml", tmp_path_factory.mktemp("kits"))
    for name in ("site-1", "server"):
        set_up(kits / name)
        app = kits / name / JOB / f"app_{name}"
        shutil.copytree(JOBS / "horizontal_masks" / "app", app)
        (app.parent / "meta.json").write_text("{}")
    return kits


def leave(workspace: Path, site: str, mark: Path) -> set[str]:
    """Leave hostile files where an old job, or another party's log, could have left them; return their paths."""
    ran = f"open({str(mark)!r}, 'w')\n"
    contents = {
        "comm_config": json.dumps({"comm_driver_path": "."}),
        "resources": json.dumps({"class_allow_list": ["*"]}),
    }
    left = set()
    for job in (OLD, JOB):
        for place in _PLACES if job == OLD else ("site-2",):
            folder = workspace / job / place.replace("SITE", site)
            folder.mkdir(parents=True, exist_ok=True)
            for stem in (stem for stem in STEMS if stem not in ("meta", "")):
                for ending in (
                    ending for ending in ENDINGS if ending not in (".so", ".pyc")
                ):  # broken, they stop Python
                    path = folder / f"{stem}{ending}"
                    path.write_text(ran if ending == ".py" else contents.get(stem, '{"x": 1}'))
                    left.add(str(path.relative_to(workspace)))
    return left


def read(kits: Path, process: str, mark: Path) -> tuple[dict, set[str]]:
    """Start a process in a copy of its workspace; return what it read, and what was left there."""
    site = "server" if process.startswith("server") else "site-1"
    workspace = mark.parent / "workspace"
    shutil.copytree(kits / site, workspace)
    left = leave(workspace, site, mark)
    context = processes()
    results, sender = context.Pipe(duplex=False)
    started = context.Process(target=report, args=(process, str(workspace), JOB, sender))
    started.start()
    sender.close()
    found = results.recv()
    started.join()
    assert found["ended"] == "", found["ended"]
    return found, left


@pytest.mark.parametrize("process", PROCESSES)
def test_flare_reads_what_the_table_names_and_nothing_that_a_job_left(kits: Path, tmp_path: Path, process: str) -> None:
    found, left = read(kits, process, tmp_path / "ran")
    named = {path for paths, _ in table() for path in paths}
    touched = {path for path in [*found["opened"], *found["asked"]] if not path.startswith("<")}
    plain = {re.sub("/app_[a-z0-9-]+", "/app_SITE", path.replace(JOB, "JOB")) for path in touched}
    assert plain - named - FOLDERS == set()
    assert set(found["searched"]) <= {Path(name).name for name in named}
    assert not left & touched and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("process", ["site", "site's job"])
@pytest.mark.parametrize(
    "still", ["nothing", *(pytest.param(each, marks=pytest.mark.slow) for each in (COMM_CONFIG, "the guards"))]
)
def test_without_guard_and_copy_what_a_job_left_runs(kits: Path, tmp_path: Path, process: str, still: str) -> None:
    """The control: with neither, FLARE runs it; each of the two alone keeps FLARE from the code."""
    open_kits = tmp_path / "kits"
    shutil.copytree(kits / "site-1", open_kits / "site-1")
    for file in {"nothing": (GUARD_FILE, JOB_GUARD_FILE, COMM_CONFIG), COMM_CONFIG: (GUARD_FILE, JOB_GUARD_FILE)}.get(
        still, (COMM_CONFIG,)
    ):
        (open_kits / "site-1" / file).unlink()
    found, left = read(open_kits, process, tmp_path / "ran")
    assert (tmp_path / "ran").exists() == (still == "nothing")
    if still == "nothing":
        assert {Path(path).name for path in left & set(found["opened"])} >= {"comm_config.json", "x.py"}


def test_each_row_of_the_table_names_tests_that_are_there() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"(?m)^def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }
    rows = list(table())
    assert len(rows) >= 12
    for names, tests in rows:
        assert names and set(re.findall(r"`(test_\w+)`", tests)) and set(re.findall(r"`(test_\w+)`", tests)) <= there, (
            names
        )


@pytest.mark.parametrize("is_closed", [False, True])
def test_settings_are_looked_for_in_the_sites_own_folders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    undo_guard(monkeypatch)
    for place in ("startup", "local", f"{OLD}/app_site-1/config"):
        (tmp_path / place).mkdir(parents=True)
    theirs = tmp_path / OLD / "app_site-1" / "config"
    for name in ("resources.json", "comm_config.conf", "fed_client.conf", "privacy.json.default"):
        (theirs / name).write_text("{}")
    if is_closed:
        close_search()
    for name in ("resources.json", "comm_config.json", "fed_client.json", "privacy.json"):
        assert (ConfigFactory.load_config(name, [str(tmp_path)]) is None) == is_closed, name
    for place, name in (("startup", "fed_client.json"), ("local", "resources.json.default"), ("", "comm_config.json")):
        (tmp_path / place / name).write_text('{"own": 1}')
    for name in ("resources.json", "comm_config.json", "fed_client.json"):
        assert not is_closed or ConfigFactory.load_config(name, [str(tmp_path)]).to_dict() == {"own": 1}
    assert (ConfigFactory.load_config("fed_client.conf", [str(theirs)]) is None) == is_closed


@pytest.mark.parametrize("ignores", [False, True])
def test_a_session_of_ours_reads_no_settings_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    undo_guard(monkeypatch)
    CommConfigurator.reset()
    (tmp_path / "downloads" / "job").mkdir(parents=True)
    (tmp_path / "downloads" / "job" / COMM_CONFIG).write_text('{"comm_driver_path": "."}')
    monkeypatch.chdir(tmp_path)
    if ignores:
        ignore_settings_here()
    assert CommConfigurator().get_config() == (None if ignores else {"comm_driver_path": "."})
