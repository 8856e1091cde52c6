"""How the native backend cuts its work: windows, segments, blocks of rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.bignum import interface as row_blocks
from he_processors.bignum.native import best_window, cut_segments, sliding_window
from he_processors.errors import ConfigurationError


@given(st.integers(0, 1 << 300))
def test_a_sliding_window_plan_is_the_exponent(exponent: int) -> None:
    steps, n_odd = sliding_window(exponent)
    total = 0
    for squarings, entry in steps.tolist():
        assert -1 <= entry < n_odd
        total = (total << squarings) + (2 * entry + 1 if entry >= 0 else 0)
    assert total == exponent


@given(st.lists(st.integers(0, 2000), max_size=20), st.integers(1, 600), st.integers(0, 5))
def test_cut_segments_keeps_every_row_once(lengths: list[int], chunk: int, first: int) -> None:
    starts = (first + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int64)
    tasks, task_starts = cut_segments(starts, chunk)
    assert tasks[:, 1].max(initial=0) <= chunk
    assert len(task_starts) == len(starts)
    for segment, (begin, end) in enumerate(pairwise(starts.tolist())):
        mine = tasks[task_starts[segment] : task_starts[segment + 1]]
        assert len(mine) >= 1
        rows = [i for start, length, _ in mine.tolist() for i in range(start, start + length)]
        assert rows == list(range(begin, end))
    assert tasks[:, 2].tolist() == list(range(len(tasks)))


def test_wider_windows_pay_for_larger_batches() -> None:
    windows = [best_window(1024, n, 328) for n in (1, 10, 100, 1000, 10_000, 1_000_000)]
    assert windows == sorted(windows)
    assert windows[0] <= 2
    assert windows[-1] >= 9
    limited = best_window(4096, 1_000_000, 1024)
    assert -(-4096 // limited) * 1024 << limited <= 100 << 20


def test_the_number_of_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(row_blocks.ENVIRONMENT_VARIABLE, "3")
    assert row_blocks.default_threads() == 3
    for text in ("0", "-1", "two", ""):
        monkeypatch.setenv(row_blocks.ENVIRONMENT_VARIABLE, text)
        with pytest.raises(ConfigurationError):
            row_blocks.default_threads()
    monkeypatch.delenv(row_blocks.ENVIRONMENT_VARIABLE)
    assert row_blocks.default_threads() >= 1


@given(n_rows=st.integers(0, 200), threads=st.integers(1, 9), multiple=st.integers(1, 8))
def test_row_blocks_cover_the_rows_once(n_rows: int, threads: int, multiple: int) -> None:
    blocks = row_blocks.row_blocks(n_rows, threads, multiple)
    assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(n_rows))
    assert len(blocks) <= threads
    assert all(block.start % multiple == 0 for block in blocks)


def test_an_error_in_one_block_is_raised() -> None:
    def fail(block: int) -> None:
        if block == 2:
            raise MemoryError

    with pytest.raises(MemoryError):
        row_blocks.run_blocks(fail, [0, 1, 2, 3], 2)
