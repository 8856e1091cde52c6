"""What whole jobs begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.federation import Federation
from tests.support.hostile_jobs import small_table


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Three sites with the rows of ``small_table``."""
    federation = Federation(tmp_path)
    federation.give_data("train", small_table())
    return federation
