"""A ledger to test, and where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dp_components.ledger import Ledger
from tests.support.ledgers import BUDGET, IDENTITY


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "privacy"


@pytest.fixture
def ledger(folder: Path) -> Ledger:
    return Ledger.open(folder, IDENTITY, BUDGET)
