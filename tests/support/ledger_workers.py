"""What the processes of the ledger's concurrency tests do; a module of its own, so that those processes find it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from dp_components.errors import PrivacyRefusal
from dp_components.events import LaplaceEvent, NeighbouringRelation, Release, RepeatedEvent
from dp_components.ledger import Budget, Ledger, LedgerIdentity

EVENT = LaplaceEvent(0.0625, NeighbouringRelation.ADD_OR_REMOVE_ROW)
IDENTITY = LedgerIdentity("site-1", "shared", NeighbouringRelation.ADD_OR_REMOVE_ROW)
BUDGET = Budget(2.0, 0.0, pure_epsilon=2.0)
N_AFFORDABLE = 32


def draw() -> Release:
    """Draw something that no one else draws."""
    return Release(np.frombuffer(os.urandom(8), dtype="<i8") >> 2, EVENT)


def spend_all(folder: Path, name: str, results: Connection) -> None:
    """Open jobs of one release each until the budget is refused; report how many, and one answer all share."""
    ledger = Ledger.open(folder, IDENTITY, BUDGET)
    shared = ledger.release("common", "the same question", draw).tolist()
    n_paid = 0
    with contextlib.suppress(PrivacyRefusal):
        for i in itertools.count():
            ledger.open_job(f"{name}-{i}", EVENT)
            ledger.release(f"{name}-{i}", "question", draw)
            n_paid += 1
            if i % 3 == 0:
                ledger.close_job(f"{name}-{i}")
    results.send((n_paid, shared))


def run_until_killed(folder: Path, ends_with_process: bool, started: Connection, can_resume: bool = False) -> None:
    """Reserve half of the budget, release once, and wait to be killed."""
    ledger = Ledger.open(folder, IDENTITY, BUDGET)
    plan = RepeatedEvent(EVENT, N_AFFORDABLE // 2)
    ledger.open_job(f"once {ends_with_process}", plan, ends_with_process=ends_with_process, can_resume=can_resume)
    ledger.release(f"once {ends_with_process}", "question", draw)
    started.send(None)
    time.sleep(600)


def release_until_killed(folder: Path, results: Connection) -> None:
    """Hand out answer after answer, over and over opening and closing other jobs, until killed from outside."""
    ledger = Ledger.open(folder, IDENTITY, BUDGET)
    for i in range(N_AFFORDABLE):
        value = ledger.release("long", f"question {i}", draw)
        results.send((i, value.tolist()))
        ledger.open_job(f"other {i} of {os.getpid()}", [])
        ledger.close_job(f"other {i} of {os.getpid()}")
