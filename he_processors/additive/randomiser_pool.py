"""A stock of randomisers made ahead, each handed out once.

Randomisers do not depend on the data, so the key owner makes them while other parties compute. One randomiser on two
plaintexts reveals their difference, so taking is erasing, under a lock, and a forked process starts empty.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import RandomiserSource, StaysInProcess
from he_processors.bignum.interface import Residues

# Enough rows to keep the lanes busy and to spread the cost of a batch's check, few enough to stay in cache; a GPU
# needs more.
BLOCK_ROWS = 1 << 13
_DEVICE_BLOCK_ROWS = 1 << 18


class Batches(Protocol):
    """What a pool needs to know of the batches that it hands out: a backend's residues, or rows of points."""

    name: str

    def take(self, batch: Any, index: NDArray[np.int64]) -> Any:
        """Gather rows. Shapes: index: int64[m]."""

    def concat(self, parts: list[Any]) -> Any:
        """Join batches in order."""


def default_block_rows(arithmetic: Batches) -> int:
    """Return how many rows suit the backend."""
    return _DEVICE_BLOCK_ROWS if arithmetic.name == "cuda" else BLOCK_ROWS


class RandomiserPool(StaysInProcess):
    """Randomisers in blocks, in memory only.

    Security: a randomiser leaves the pool before it is returned, and never comes back, also when the encryption that
        took it fails. The pool is emptied in a forked child, and again checks the process id at every use, for forks
        that run no Python hooks. Threads take disjoint rows. Pools are not shared between keys or devices. Python
        does not overwrite memory that it frees: whoever reads the process's memory is outside the threat model.
    """

    def __init__(self, arithmetic: Batches, source: RandomiserSource, block_rows: int | None = None) -> None:
        """Open an empty pool that makes ``block_rows`` randomisers at a time, by default what suits the backend."""
        if block_rows is None:
            block_rows = default_block_rows(arithmetic)
        if block_rows < 1:
            raise ValueError("block_rows must be at least 1")
        self._arithmetic = arithmetic
        self._source = source
        self._block_rows = block_rows
        self._forget()
        _POOLS.add(self)

    def __len__(self) -> int:
        """Return the randomisers ready now."""
        with self._guard():
            return sum(len(block) for block in self._blocks)

    def fill(self, n: int) -> None:
        """Make randomisers until at least ``n`` are ready; callers may fill from a thread of their own."""
        while True:
            missing = n - len(self)
            if missing <= 0:
                return
            owner = os.getpid()
            block = self._source.draw(min(missing, self._block_rows))
            with self._guard():
                if os.getpid() == owner:
                    self._blocks.append(block)

    def draw(self, n: int) -> Residues:
        """Take ``n`` randomisers out of the pool, making those that are missing.

        Shapes: result: Residues[n].
        """
        taken = self._take(n)
        missing = n - sum(len(block) for block in taken)
        while missing > 0 or not taken:  # also for no rows: a batch needs one part
            taken.append(self._source.draw(min(missing, self._block_rows)))
            missing -= len(taken[-1])
        return taken[0] if len(taken) == 1 else self._arithmetic.concat(taken)

    def clear(self) -> None:
        """Drop all randomisers."""
        with self._guard():
            self._blocks.clear()

    def _take(self, n: int) -> list[Residues]:
        taken: list[Residues] = []
        with self._guard():
            while n > 0 and self._blocks:
                block = self._blocks.popleft()
                if len(block) > n:
                    rows = np.arange(len(block), dtype=np.int64)
                    self._blocks.appendleft(self._arithmetic.take(block, rows[n:]))
                    block = self._arithmetic.take(block, rows[:n])
                taken.append(block)
                n -= len(block)
        return taken

    def _guard(self) -> threading.Lock:
        """Return the lock, after dropping what a parent process made."""
        if os.getpid() != self._process_id:
            self._forget()
        return self._lock

    def _forget(self) -> None:
        # The lock is new as well: in a forked child the old one may be held by a thread that no longer exists.
        self._lock = threading.Lock()
        self._blocks: deque[Residues] = deque()
        self._process_id = os.getpid()


_POOLS: weakref.WeakSet[RandomiserPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_POOLS):
        pool._forget()


os.register_at_fork(after_in_child=_forget_all)
