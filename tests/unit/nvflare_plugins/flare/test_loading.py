"""A job's process that cannot load its part, or has too little: who says so, and in which words."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import CellMessageAuthHeaderKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.class_utils import instantiate_class

from he_processors.errors import BackendUnavailable
from nvflare_plugins.flare import components, loading
from nvflare_plugins.flare.attempt import FAILED, SiteReport
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.start_check import start_faults
from nvflare_plugins.site.flare_boundary import CONTROLLER, EXECUTOR, GUARD_STARTED

SECRET = "/opt/secret/4711"
BROKEN = [
    (ModuleNotFoundError("No module named xgboost", name="xgboost.core"), "xgboost: it is not installed"),
    (ImportError(f"{SECRET}/lib.so: undefined symbol: PyX"), "broken: its build does not fit"),
    (ImportError("libgomp.so.1: cannot open shared object file: No such file"), "broken: a library of the system"),
    (
        OSError(f"{SECRET}/libxgboost.so: failed to map segment from shared object"),
        "broken: there is not enough memory",
    ),
    (MemoryError(), "broken: there is not enough memory"),
    (RuntimeError("can't start new thread"), "broken: the system gives no more threads"),
    (ValueError("numpy.dtype size changed"), "broken: its build does not fit"),
    (BackendUnavailable("the native part has interface 3, and 4 is needed"), "interface 3, and 4 is needed"),
    (KeyError(SECRET), "broken: KeyError"),
]


@pytest.mark.parametrize("launched_by", [None, str(os.getppid()), "0"])
def test_a_process_whose_flare_ended_while_it_was_being_loaded_ends(
    monkeypatch: pytest.MonkeyPatch, launched_by: str | None
) -> None:
    """FLARE itself would watch over the process that has taken the place of its own."""
    if launched_by is None:
        monkeypatch.delenv(loading.LAUNCHED_BY, raising=False)
    else:
        monkeypatch.setenv(loading.LAUNCHED_BY, launched_by)
    codes: list[int] = []
    monkeypatch.setattr(loading.os, "_exit", codes.append)
    monkeypatch.setattr(components, "load_or_stand_in", lambda: None)
    monkeypatch.setattr(components, "close_search", lambda: None)
    components.JobGuard()
    assert codes == ([JobReturnCode.ABORTED] if launched_by == "0" else [])


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what makes a package that raises an error when it is imported."""
    (tmp_path / "broken.py").write_text("import sys\nraise sys.error_of_broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "_NEEDED", ())

    def make(error: BaseException) -> str:
        monkeypatch.setattr(sys, "error_of_broken", error, raising=False)
        return "broken"

    return make


@pytest.mark.parametrize(("error", "words"), BROKEN)
def test_a_fault_names_the_package_and_no_path(broken, error: BaseException, words: str) -> None:
    said = loading.load_fault(broken(error))
    assert said is not None and words in said and "4711" not in said and len(said) < loading.MOST_CHARS


def test_what_loads_has_no_fault_and_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.load_fault("json") is None
    soft = {"RLIMIT_NOFILE": 64, "RLIMIT_AS": 1 << 30}
    wanted = {getattr(loading.resource, name): value for name, value in soft.items()}
    monkeypatch.setattr(loading.resource, "getrlimit", lambda one: (wanted.get(one, -1), -1))
    assert loading.limits() == ". Limits that stand there: RLIMIT_AS, RLIMIT_NOFILE"
    monkeypatch.setattr(loading, "_FILES", 1 << 24)
    assert "too little of what any job takes: too many files are open" in str(loading.load_fault("json"))


@pytest.mark.parametrize(("module", "path"), [(loading.AT_SITE, EXECUTOR), (loading.AT_SERVER, CONTROLLER)])
def test_a_component_takes_the_place_of_one_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch, module: str, path: str
) -> None:
    monkeypatch.setitem(sys.modules, module, importlib.import_module(module))
    role = "server" if module == loading.AT_SERVER else "client"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=f"nvflare.app.{role}.process"))
    monkeypatch.setattr(loading, "load_fault", lambda name: f"cannot load {name}")
    monkeypatch.setattr(loading, "_own_run", lambda: tmp_path)
    loading.load_or_stand_in()
    assert loading.died_early(tmp_path)
    arguments = {"kind": "horizontal"} | ({"job": {}, "min_clients": 3} if module == loading.AT_SERVER else {})
    component = instantiate_class(path, arguments)
    if module == loading.AT_SERVER:
        said = []
        component.system_panic = lambda reason, fl_ctx: said.append(reason)
        component.control_flow(Signal(), FLContext())
        assert said == [f"VeilBoost job failed: the server could not go on: cannot load {module}"]
        assert loading.died_early(tmp_path) is None
        return
    report = SiteReport.from_dict(component.execute("any", Shareable(), FLContext(), Signal()))
    assert (report.status, report.error) == (FAILED, f"cannot load {module}")
    assert loading.died_early(tmp_path) is None


def test_the_server_believes_a_sites_own_process_alone() -> None:
    controller, reports = JobController({}, kind="horizontal"), []
    controller._site_of_parent = {"site-1": "site-1"}

    def hears(origin: str, client: str, payload: object = b"why") -> str:
        headers = {MessageHeaderKey.ORIGIN: origin, CellMessageAuthHeaderKey.CLIENT_NAME: client}
        return controller._on_fault(Message(headers, payload)).get_header(MessageHeaderKey.RETURN_CODE)

    assert hears("site-1", "site-1") == "service_unavailable"
    controller._attempt = SimpleNamespace(missing=["site-1"], add_report=lambda *report: reports.append(report))
    for wrong in (("site-1", "site-2"), ("site-2", "site-2"), ("site-1.job", "site-1"), ("site-1", "site-1", "text")):
        assert hears(*wrong) == "invalid_request"
    assert not reports and hears("site-1", "site-1") == "ok"
    assert reports == [("site-1", {"status": FAILED, "error": "why"})]


def test_the_server_believes_its_own_process_alone_that_a_machine_lives() -> None:
    controller, alive = JobController({}, kind="horizontal"), []
    hears = lambda origin, payload: controller._on_life(Message({MessageHeaderKey.ORIGIN: origin}, payload))  # noqa: E731
    hears("server", b"site-1")
    controller._attempt = SimpleNamespace(sites=["site-1"], lives=alive.append)
    for wrong in (("site-1", b"site-1"), ("server.job", b"site-1"), ("server", b"site-9"), ("server", None)):
        hears(*wrong)
    assert not alive
    hears("server", b"site-1")
    assert alive == ["site-1"]


def test_the_check_takes_environment_and_limits_of_flares_process(tmp_path: Path, monkeypatch) -> None:
    """A process that looks like FLARE's has another path of packages and few open files; this one has not."""
    (tmp_path / "xgboost.py").write_text("raise ImportError('undefined symbol')")
    command = "import sys, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); print(); sys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = [sys.executable, "-u", "-c", command, "nvflare.private.fed.app.client.client_train"]
    (tmp_path / "local").mkdir()
    with subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / GUARD_STARTED).write_text(json.dumps({"pid": process.pid}))
        (said,) = start_faults(tmp_path, at_server=False)
        process.communicate()
    assert "cannot load xgboost: its build does not fit" in said and "RLIMIT_NOFILE" in said
