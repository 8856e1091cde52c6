"""What whole jobs begin with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dp_components import accounting
from nvflare_plugins.pages import report
from nvflare_plugins.pages.run_record import RunRecord
from nvflare_plugins.pooled import growing
from tests.support.federation import Federation
from tests.support.hostile_jobs import small_table


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Three sites with the rows of ``small_table``."""
    return Federation.of(tmp_path, train=small_table())


_opinions = accounting._opinions
_REPORTS = {"of all jobs": False}


@pytest.fixture(scope="module", autouse=True)
def _reports_of_first_jobs() -> Iterator[None]:
    """Have only the first job of a file build reports: they are a fifth of a small job, and conformance has all."""
    build, attempts = report.build_report, []

    def build_first(run: RunRecord, folder: Path) -> str:
        attempts.append(run.attempt)
        return build(run, folder) if run.attempt == attempts[0] or _REPORTS["of all jobs"] else ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "build_report", build_first)
        yield


@cache
def _opinions_once(gaussians: tuple[tuple[float, int], ...], delta: float) -> tuple[float, float]:
    return _opinions([*gaussians], delta)


_predicts_alike = cache(growing.check_predictor)


@pytest.fixture(scope="module", autouse=True)
def _checks_once() -> Iterator[None]:
    """Have the second accountant price a plan, and this wheel predict, once and not anew at all sites of every job."""
    with pytest.MonkeyPatch.context() as patch:
        once = lambda gaussians, delta: _opinions_once(tuple(gaussians), delta)  # noqa: E731
        patch.setattr(accounting, "_opinions", once)
        patch.setattr(growing, "check_predictor", _predicts_alike)
        yield


@pytest.fixture(scope="module")
def every_report() -> Iterator[None]:
    """Have all jobs build their reports, in a file with tests that read them or look for what must not be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_REPORTS, "of all jobs", True)
        yield
