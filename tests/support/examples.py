"""How much a property is tried on: few examples and cells in the quick suite, all with the slow tests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

_QUICK_SHARE = 4


def examples(n: int) -> int:
    """Return a quarter of ``n``, or ``n`` under HYPOTHESIS_PROFILE=thorough, as `make test-all` sets it."""
    return n if os.environ.get("HYPOTHESIS_PROFILE") in ("thorough", "explore") else max(n // _QUICK_SHARE, 10)


def slow(*cells: Any) -> list[Any]:
    """Return cells of a matrix that repeat what its other cells show: they run with the slow tests."""
    return [pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=pytest.mark.slow) for cell in cells]


def quick(cells: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return all cells of a matrix; those that are not chosen run with the slow tests."""
    return [one for cell in cells for one in ([cell] if cell in chosen else slow(cell))]
