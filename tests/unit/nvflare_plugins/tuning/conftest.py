"""What tests of tunings share."""

from __future__ import annotations

from typing import Any

import pytest

from nvflare_plugins.kinds.tuning import site
from nvflare_plugins.kinds.tuning.result import FoldScore


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, int]:
    """Return the models of all trainings as they come, how often each was made."""
    made: dict[bytes, int] = {}
    score_of = site.score_of

    def noting(result: Any) -> FoldScore:
        model = result.model
        made[model] = made.get(model, 0) + 1
        return score_of(result)

    monkeypatch.setattr(site, "score_of", noting)
    return made
