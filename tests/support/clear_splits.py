"""Splits of the preset sealed compared in the clear, by the function that circuits have to equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from he_processors.fixed_point import PairFormat
from he_processors.histogram.sums import BinSums
from he_processors.two_party.split_argmax import NO_SPLIT, score
from nvflare_plugins.kinds.vertical import sealed, sealed_growth
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner
from nvflare_plugins.kinds.vertical.sealed import FRACTION_BITS, SealedPassive, SealedPlan
from tests.support.clear_maker import ClearHistogramMaker


class ClearActiveLevel:
    """The active half of a twin that compares in the clear, with what the passive half has left for it."""

    def __init__(self, terms, nodes, n_candidates, chooser, owner) -> None:
        self._terms, self._nodes = terms, nodes

    def ask(self) -> bytes:
        return b""

    def garble(self, offer: bytes, shares_g, shares_h) -> bytes:
        self._left = [
            (a + b).view(np.int64) for a, b in zip((shares_g, shares_h), ClearPassiveLevel.shares, strict=True)
        ]
        return b""

    def decide(self, message: bytes, own) -> bytes:
        found = []
        for node, g, h, may, key in zip(self._nodes, *self._left, ClearPassiveLevel.allowed, own, strict=True):
            keys = np.where(may, score(self._terms.widths(node.n_rows), node, g, h), 0)
            best = int(np.argmax(keys))
            found.append(best if keys[best] > max(key, NO_SPLIT) else -1)
        return np.array(found).tobytes()


class ClearPassiveLevel:
    shares: Any = None
    allowed: Any = None

    def __init__(self, terms, n_rows, n_candidates, chooser, owner) -> None:
        pass

    def offer(self, ask: bytes, shares_g, shares_h, allowed) -> bytes:
        ClearPassiveLevel.shares, ClearPassiveLevel.allowed = (shares_g, shares_h), allowed
        return b""

    def score(self, garbled: bytes) -> bytes:
        return b""

    def winners(self, decided: bytes):
        return np.frombuffer(decided, dtype=np.int64)


@contextmanager
def compared_in_the_clear() -> Iterator[None]:
    """Have the trainings of this process compare splits in the clear."""
    with (
        patch.object(sealed_growth, "ActiveLevel", ClearActiveLevel),
        patch.object(sealed, "PassiveLevel", ClearPassiveLevel),
    ):
        yield


class _OpenOwner(ClearGradientOwner):
    def open_sums(self, sums, layout, totals):
        return [BinSums(one.g[0], one.h[0]) for one in super().open_sums(sums, layout, totals)]


class _Unmasked(SealedPassive):
    def mask(self, n_nodes, layout):
        zeros = np.zeros((n_nodes, layout.n_slots), dtype=np.uint64)
        self._blocks.append((zeros, zeros))


def clear_scheme(n_rows: int):
    """Return both halves without encryption (``vertical_federation.federate``)."""
    pairs = PairFormat(FRACTION_BITS, n_rows, g_bound=1.0, h_low=0.0, h_high=1.0)
    return _OpenOwner(pairs), ClearHistogramMaker


def unmasked(plan: SealedPlan, n_features: int) -> SealedPassive:
    """Return a passive half whose shares are zero."""
    return _Unmasked(plan, 1)
