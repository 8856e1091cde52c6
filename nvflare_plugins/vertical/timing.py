"""Where the time of a round goes, stage by stage."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from he_processors.fixed_pairs import PairFormat
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.vertical.protocol.gradient_scheme import GradientOwner


class Stages:
    """Seconds per stage since the last ``take``; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def add(self, stage: str, seconds: float) -> None:
        """Add time to a stage."""
        with self._lock:
            self._seconds[stage] += seconds

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the time since the last call, and the stages' part of it. Units: seconds."""
        now = time.perf_counter()
        with self._lock:
            seconds, self._since = now - self._since, now
            stages, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds, stages


class TimedOwner:
    """A gradient owner whose encryption and decryption are timed."""

    def __init__(self, owner: GradientOwner, stages: Stages):
        self._owner, self._stages = owner, stages
        self.pair_format: PairFormat = owner.pair_format
        self.is_streamed = owner.is_streamed

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        """Protect pairs."""
        with self._stages.measure("encrypt"):
            return self._owner.encrypt(g, h)

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        """Open histograms."""
        with self._stages.measure("decrypt"):
            return self._owner.open_sums(sums, layout, totals)

    def finish_sums(self, since_s: float) -> None:
        """Take note that all sums of a level were opened."""
        with self._stages.measure("decrypt"):
            self._owner.finish_sums(since_s)
