"""What whole jobs begin with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dp_components import accounting
from nvflare_plugins.pages import report
from tests.support.federation import Federation
from tests.support.hostile_jobs import small_table


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Three sites with the rows of ``small_table``."""
    return Federation.of(tmp_path, train=small_table())


_opinions = accounting._opinions
_REPORTS = {"of all sites": False}


@pytest.fixture(scope="module", autouse=True)
def _reports_of_first_sites() -> Iterator[None]:
    """Have only the first site of a job build its report: three are a fifth of a small job, and conformance has all."""
    build = report.build_report
    with pytest.MonkeyPatch.context() as patch:
        is_built = lambda run: run.site == run.sites[0] or _REPORTS["of all sites"]  # noqa: E731
        patch.setattr(report, "build_report", lambda run, folder: build(run, folder) if is_built(run) else "")
        yield


@cache
def _opinions_once(gaussians: tuple[tuple[float, int], ...], delta: float) -> tuple[float, float]:
    return _opinions([*gaussians], delta)


@pytest.fixture(scope="module", autouse=True)
def _second_opinions_once() -> Iterator[None]:
    """Have the second accountant price each plan once, and not anew at all sites of every job."""
    with pytest.MonkeyPatch.context() as patch:
        once = lambda gaussians, delta: _opinions_once(tuple(gaussians), delta)  # noqa: E731
        patch.setattr(accounting, "_opinions", once)
        yield


@pytest.fixture(scope="module")
def every_report() -> Iterator[None]:
    """Have all sites build their reports, in a file with tests that read them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_REPORTS, "of all sites", True)
        yield
