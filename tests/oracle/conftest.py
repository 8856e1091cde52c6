"""Settings of these tests."""

from __future__ import annotations

from functools import cache

import pytest

from nvflare_plugins.pages import report
from nvflare_plugins.pooled import growing

_predicts_alike = cache(growing.check_predictor)


@pytest.fixture(autouse=True)
def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no report of the many runs: models and records are compared here, and a page takes a tenth of a run."""
    monkeypatch.setattr(report, "write_report", lambda folder: folder)
    monkeypatch.setattr(growing, "check_predictor", _predicts_alike)
