from __future__ import annotations

import pytest

from nvflare_plugins.site.memory import store


@pytest.fixture(autouse=True)
def nothing_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may have the number of one that another test has deleted, where locks were tried already."""
    monkeypatch.setattr(store, "_tried", set())
