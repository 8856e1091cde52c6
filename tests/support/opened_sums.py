"""Sums that sites open, in clear, and what one of them less another one gives away."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums


@dataclass
class Opened:
    """All sums of a run in clear: what each site gave, and what it got."""

    sums: dict[tuple[str, int], tuple[str, tuple[str, ...], dict[str, np.ndarray], np.ndarray]] = field(
        default_factory=dict
    )
    lock: Any = field(default_factory=threading.Lock)

    def found_by_subtraction(self) -> Iterator[tuple[str, str]]:
        """Yield (kind, sites) wherever one opened sum less another one is what the sites gave that it has more."""
        opened = list(self.sums.values())
        for (kind, sites, parts, total), (other_kind, others, _, other) in itertools.permutations(opened, 2):
            lost = set(sites) - set(others)
            if kind != other_kind or not lost or not set(others) < set(sites) or total.shape != other.shape:
                continue
            if lost <= set(parts):
                part = np.sum([parts[site] for site in lost], axis=0)
                # Where the others gave nothing, the first sum alone is the lost sites' own.
                counts = (part != 0) & (np.abs(total - part) > 1e-9)
                near = np.isclose(total - other, part, rtol=1e-9, atol=1e-9) & counts
                if near.sum() > 0.05 * counts.sum():
                    yield kind, ", ".join(sorted(lost))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Note the sums of this process."""
        with (
            patch.object(ProtectedSums, "sum", self._noting(ProtectedSums.sum)),
            patch.object(ProtectedSums, "sum_counts", self._noting(ProtectedSums.sum_counts)),
            patch.object(ProtectedSums, "add", self._noting(ProtectedSums.add)),
        ):
            yield

    def _noting(self, real: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def call(sums: ProtectedSums, kind: Kind, values: np.ndarray, *more: Any, **named: Any) -> np.ndarray:
            given, got = np.array(values, dtype=np.float64), real(sums, kind, values, *more, **named)
            channel, key = sums._channel, (sums._channel.attempt, sums._channel.counter)
            with self.lock:
                _, _, parts, _ = self.sums.setdefault(key, (kind.name, channel.sites, {}, np.array(got, np.float64)))
                parts[channel.site] = given
            return got

        return call
