"""One table says which kinds of jobs there are, and what sites let FLARE build follows it."""

from __future__ import annotations

import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.flare.controller import JobController
from nvflare_plugins.flare.executor import JobExecutor
from nvflare_plugins.flare.kinds import KINDS, kind_of, kind_of_controller
from nvflare_plugins.site.flare_boundary import CONTROLLER


@pytest.mark.parametrize("name", ["", "Horizontal", 7, None, {"a": 1}, ["horizontal"], "\x1b[2J"])
def test_other_kinds_are_refused_in_words(name: object) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no kind of job .*; there are alignment, ") as caught:
        kind_of(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", KINDS)
def test_one_pair_serves_every_kind(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert JobController({}, kind=kind).kind == JobExecutor(kind).kind == kind and not caplog.text


def test_a_job_folder_tells_its_kind() -> None:
    assert kind_of_controller(CONTROLLER, {"kind": "dpboost"}) is KINDS["dpboost"]
    assert kind_of_controller("x.HorizontalController", {}) is None
    with pytest.raises(ConfigurationError):
        kind_of_controller(CONTROLLER, {})


def test_a_class_that_was_removed_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"bucket_ldp\.BucketController, which version 0\.12 .*export the"):
        kind_of_controller("nvflare_plugins.flare.bucket_ldp.BucketController", {})
