"""Ledgers to test: one data set, one event, and where they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dp_components.events import (
    Event,
    LaplaceEvent,
    NeighbouringRelation,
    Release,
)
from dp_components.ledger import Budget, LedgerIdentity

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
IDENTITY = LedgerIdentity("site-1", "credit", ROW)
EVENT = LaplaceEvent(0.25, ROW)
BUDGET = Budget(1.0, 1e-6, pure_epsilon=1.0)


def make(value: int = 7, event: Event = EVENT) -> Callable[[], Release]:
    return lambda: Release(np.array([value, -value]), event)


def never() -> Release:
    raise AssertionError("drawn although a reply was cached, or the job was refused")
