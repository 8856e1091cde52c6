"""One table says which kinds of jobs there are, and what sites let FLARE build follows it."""

from __future__ import annotations

from typing import Any

import pytest
from nvflare.fuel.utils.class_loader import load_class

from he_processors.errors import ConfigurationError
from nvflare_plugins.flare.components import kind_of_controller
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.flare.kinds import KINDS, kind_of
from nvflare_plugins.site.flare_boundary import CONTROLLER, CONTROLLERS, EXECUTOR, EXECUTORS


def test_sites_let_in_the_components_of_every_kind_and_no_others() -> None:
    aliases = [kind.alias for kind in KINDS.values() if kind.alias]
    assert set(EXECUTORS) == {EXECUTOR, *(f"nvflare_plugins.flare.{alias}Executor" for alias in aliases)}
    assert set(CONTROLLERS) == {CONTROLLER, *(f"nvflare_plugins.flare.{alias}Controller" for alias in aliases)}


@pytest.mark.parametrize(("path", "at_server"), list(zip(EXECUTORS, CONTROLLERS, strict=True)))
def test_one_class_serves_all_kinds(path: str, at_server: str) -> None:
    executor, controller = load_class(path), load_class(at_server)
    assert issubclass(executor, JobExecutor) and issubclass(controller, JobController)
    assert executor.execute is JobExecutor.execute and controller.control_flow is JobController.control_flow
    assert f"{executor.__module__}.{executor.__name__}" == path
    assert executor.kind == controller.kind and (path == EXECUTOR or executor.kind in KINDS)


@pytest.mark.parametrize("name", ["", "Horizontal", 7, None, {"a": 1}, ["horizontal"], "\x1b[2J"])
def test_other_kinds_are_refused_in_words(name: object) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no kind of job .*; there are alignment, ") as caught:
        kind_of(name)
    assert str(caught.value).isprintable()


ALIASED = [paths for paths in zip(EXECUTORS, CONTROLLERS, strict=True) if paths != (EXECUTOR, CONTROLLER)]


@pytest.mark.parametrize(("path", "at_server"), ALIASED)
@pytest.mark.parametrize("given", ["", "bagging", "horizontal", "vertical", 7, "\x1b[2J"])
def test_a_class_named_after_a_kind_takes_no_other_from_a_hostile_job_folder(
    path: str, at_server: str, given: Any
) -> None:
    executor, controller = load_class(path), load_class(at_server)
    if given == executor.kind:
        assert executor(kind=given).kind == controller({}, kind=given).kind == given
        return
    for build in (lambda: executor(kind=given), lambda: controller({}, kind=given)):
        with pytest.raises(ConfigurationError, match=f"of kind '{executor.kind}'.*leave the argument") as caught:
            build()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", [path for pair in ALIASED for path in pair])
def test_a_class_named_after_a_kind_warns_that_it_goes(path: str, caplog: pytest.LogCaptureFixture) -> None:
    named = load_class(path)
    built = named({}) if path.endswith("Controller") else named()
    assert built.kind == named.kind
    assert "goes with the next version" in caplog.text and "names JobController and JobExecutor" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_pair_of_all_kinds_warns_of_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert JobController({}, kind=kind).kind == JobExecutor(kind).kind == kind and not caplog.text


def test_a_job_folder_tells_its_kind() -> None:
    assert kind_of_controller("nvflare_plugins.flare.bucket_ldp.BucketController", {}) is KINDS["federboost_vertical"]
    assert kind_of_controller(CONTROLLER, {"kind": "dpboost"}) is KINDS["dpboost"]
    assert kind_of_controller("x.HorizontalController", {}) is None
    with pytest.raises(ConfigurationError):
        kind_of_controller(CONTROLLER, {})
