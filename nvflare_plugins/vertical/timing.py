"""Where the time of a round goes, stage by stage."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.fixed_pairs import PairFormat
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import BinSums, NodeTotal
from nvflare_plugins.report.run_record import Span
from nvflare_plugins.vertical.protocol.gradient_scheme import GradientOwner

MOST_SPANS = 200
_VISIBLE_S = 1e-4


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the time between two calls of ``take`` went. Units: seconds.

    Attributes:
        stages: seconds of each stage; those of threads beside one another add up.
        spans: when stages ran, (stage, begin, end) from the first call on; neighbours are joined where there are many.
    """

    seconds: float
    stages: dict[str, float]
    spans: tuple[Span, ...]


class Stages:
    """Seconds per stage since the last ``take``; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = defaultdict(float)
        self._spans: list[Span] = []
        self._since = time.perf_counter()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._seconds[stage] += ended - started
                self._spans.append((stage, started, ended))

    def take(self) -> RoundTimes:
        """Return the times since the last call."""
        now = time.perf_counter()
        with self._lock:
            since, self._since = self._since, now
            stages, self._seconds = dict(self._seconds), defaultdict(float)
            spans, self._spans = self._spans, []
        relative = [
            (stage, max(begin - since, 0.0), end - since) for stage, begin, end in spans if end - begin >= _VISIBLE_S
        ]
        return RoundTimes(now - since, stages, joined(relative))


def joined(spans: Sequence[Span], most: int = MOST_SPANS) -> tuple[Span, ...]:
    """Join spans of a stage with little between them, until there are no more than ``most``; in order of their begin.

    Stages are few: where each is one span, nothing more is joined.
    """
    gap, found = 0.0, sorted(spans, key=lambda span: span[1])
    while len(found) > most:
        gap = 2 * gap or max(end for _, _, end in found) / 1000
        last: dict[str, int] = {}
        kept: list[Span] = []
        for stage, begin, end in found:
            place = last.get(stage)
            if place is not None and begin - kept[place][2] <= gap:
                kept[place] = (stage, kept[place][1], max(end, kept[place][2]))
            else:
                last[stage] = len(kept)
                kept.append((stage, begin, end))
        found = kept
        if len(found) == len(last):
            break
    return tuple(found)


class TimedOwner:
    """A gradient owner whose encryption and decryption are timed."""

    def __init__(self, owner: GradientOwner, stages: Stages):
        self._owner, self._stages = owner, stages
        self.pair_format: PairFormat = owner.pair_format
        self.is_streamed = owner.is_streamed

    def begin_tree(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> None:
        """Begin a tree."""
        with self._stages.measure("encrypt"):
            self._owner.begin_tree(g, h)

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
