"""Grids of times: enough events in every bin against a naive count, edges that are no row's time, and joined bins."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.pooled import spans
from nvflare_plugins.pooled.spans import search_times
from nvflare_plugins.wire.envelope import Kind
from tests.support.threads import in_threads


class Together:
    """Sums of sites that are threads of this process; what is opened is kept."""

    def __init__(self, n_sites: int) -> None:
        self._barrier, self._given = threading.Barrier(n_sites, timeout=60), list[np.ndarray]()
        self.opened: list[np.ndarray] = []

    def _gather(self, values: np.ndarray) -> list[np.ndarray]:
        self._given.append(values)
        self._barrier.wait()
        found = list(self._given)
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return found

    def any_site(self, kind: Kind, is_set: np.ndarray) -> np.ndarray:
        return np.any(self._gather(is_set), axis=0)

    def sum_counts(self, kind: Kind, counts: np.ndarray) -> np.ndarray:
        total = np.sum(self._gather(counts), axis=0)
        self.opened.append(total)
        return total


def grid_of(tables: list, least: int, most: int = 256, largest: float = 1.0) -> tuple[np.ndarray, Together]:
    """Return the grid that sites agree on. Args: tables: (times, events, weights) of each site."""
    together, found = Together(len(tables)), [None] * len(tables)

    def search(number: int) -> None:
        time, event, weight = tables[number]
        label = np.stack([time, np.where(event, time, np.inf)], axis=1).astype(np.float32)
        table = SimpleNamespace(label=label, weight=weight)
        try:
            found[number] = search_times(together, table, least, most, largest, len(tables))
        except Exception as error:
            found[number] = error

    in_threads(search, range(len(tables)))
    for one in found:
        if isinstance(one, Exception):
            raise one
    assert all(one.tobytes() == found[0].tobytes() for one in found)
    return found[0], together


def drawn(seed: int, n_sites: int = 3, scale: float = 1.0, n: int = 200, weighted: bool = False) -> list:
    rng = np.random.default_rng(seed)
    return [
        (
            (scale * rng.gamma(1.5, size=n)).astype(np.float32),
            rng.random(n) < 0.6,
            rng.uniform(0, 1, n).astype(np.float32) if weighted else None,
        )
        for _ in range(n_sites)
    ]


@settings(max_examples=25)
@given(
    st.integers(0, 1000),
    st.sampled_from([2, 3, 5]),
    st.sampled_from([1e-30, 1.0, 365.0, 1e30]),
    st.sampled_from([2, 10, 25]),
    st.booleans(),
)
def test_every_bin_holds_enough_events(seed: int, n_sites: int, scale: float, least: int, weighted: bool) -> None:
    tables = drawn(seed, n_sites, scale, weighted=weighted)
    edges, together = grid_of(tables, least)
    time, event, weight = (
        np.concatenate([np.ones(200) if one[i] is None else one[i] for one in tables]) for i in range(3)
    )
    bins = np.searchsorted(edges, time[event].astype(np.float32), side="right")
    held = np.bincount(bins, weight[event] if weighted else None, minlength=edges.size + 1)
    assert held.min() >= least and min(counts.min() for counts in together.opened) >= least
    assert (np.diff(edges) > 0).all() and edges.size >= 1
    assert np.isin(edges, time).mean() < 0.1  # edges are ends of parts


def test_with_more_rows_there_are_more_bins_and_of_these_no_more_than_wanted() -> None:
    sizes = [grid_of(drawn(1, n=n), 10)[0].size for n in (60, 600, 6000)]
    assert sizes[0] < sizes[1] < sizes[2] and sizes[2] > 100
    for most in (2, 7, 50):
        edges, _ = grid_of(drawn(1, n=6000), 10, most)
        assert most // 2 <= edges.size + 1 <= most


def test_a_site_without_events_hides_none_of_the_others_and_changes_no_floor() -> None:
    tables = drawn(3)
    tables[1] = (tables[1][0], np.zeros(200, dtype=bool), None)
    edges, together = grid_of(tables, 10)
    assert edges.size >= 3 and together.opened[0].min() >= 10


@pytest.mark.parametrize("n_events", [0, 3, 12])
def test_too_few_events_have_no_grid_and_nothing_is_opened(n_events: int) -> None:
    tables = [
        (time, np.arange(200) < (n_events if number == 0 else 0), None) for number, (time, *_) in enumerate(drawn(4))
    ]
    with pytest.raises(PolicyRefusal, match="too coarse"):
        grid_of(tables, 10)


def test_a_site_that_lies_in_its_bits_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spans.local_bits
    monkeypatch.setattr(spans, "local_bits", lambda rows, least, world: real(rows * 0 + least, least, world))
    with pytest.raises(ProtocolError, match="contradict"):
        grid_of(drawn(5, n=30), 10)


def test_one_heavy_row_is_no_bin() -> None:
    tables = drawn(6, weighted=True)
    heavy = tables[0][2].copy()
    heavy[:5] = 64.0
    tables[0] = (tables[0][0], tables[0][1], heavy)
    with pytest.raises(PolicyRefusal, match="too coarse"):
        grid_of(tables, 10, largest=64.0)


def test_the_source_says_how_wide_parts_are() -> None:
    text = Path(spans.__file__).read_text(encoding="utf-8")
    assert f"{spans.PARTS[1]:,} equal parts" in text
