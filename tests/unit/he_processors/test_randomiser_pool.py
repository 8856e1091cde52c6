from __future__ import annotations

import itertools
import os
import pickle
import threading

import numpy as np
import pytest

from he_processors.bignum.interface import ints_from_rows
from he_processors.bignum.reference import ReferenceBatch
from he_processors.paillier import ArithmeticFault, RandomiserPool
from tests.support.threads import in_threads

ARITHMETIC = ReferenceBatch(2**61 - 1)


class Counter:
    """A source whose randomisers are 1, 2, 3, ...: any reuse shows."""

    def __init__(self) -> None:
        self.n_drawn = 0
        self._lock = threading.Lock()

    def draw(self, n: int) -> list[int]:
        with self._lock:
            first = self.n_drawn + 1
            self.n_drawn += n
        return list(range(first, first + n))


def values(residues: list[int]) -> list[int]:
    return ints_from_rows(ARITHMETIC.to_wire(residues))


def test_each_randomiser_is_handed_out_once() -> None:
    source = Counter()
    pool = RandomiserPool(ARITHMETIC, source, block_rows=7)
    pool.fill(20)
    taken = [values(pool.draw(n)) for n in (3, 5, 1, 11, 30)]
    assert [len(part) for part in taken] == [3, 5, 1, 11, 30]
    flat = list(itertools.chain.from_iterable(taken))
    assert len(set(flat)) == len(flat)
    assert len(pool) == 0


def test_filling_stops_at_the_target_and_taking_erases() -> None:
    pool = RandomiserPool(ARITHMETIC, Counter(), block_rows=8)
    pool.fill(20)
    assert len(pool) == 20
    pool.draw(15)
    assert len(pool) == 5
    pool.fill(3)
    assert len(pool) == 5
    pool.clear()
    assert len(pool) == 0


def test_threads_take_disjoint_randomisers() -> None:
    pool = RandomiserPool(ARITHMETIC, Counter(), block_rows=16)
    taken: list[list[int]] = [[] for _ in range(8)]

    def work(worker: int) -> None:
        for n in range(1, 30):
            if worker % 4 == 0:
                pool.fill(40)
            taken[worker] += values(pool.draw(n))

    in_threads(work, range(8))
    flat = list(itertools.chain.from_iterable(taken))
    assert len(flat) == 8 * sum(range(1, 30))
    assert len(set(flat)) == len(flat)


def _length_in_child(pool: RandomiserPool) -> int:
    """Fork, and return the pool's length as the child sees it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, bytes([min(len(pool), 255)]))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        return pipe.read()[0]


def test_a_forked_child_starts_empty_and_the_parent_keeps_its_stock() -> None:
    pool = RandomiserPool(ARITHMETIC, Counter())
    pool.fill(10)
    assert _length_in_child(pool) == 0
    assert len(pool) == 10


def test_a_fork_while_the_lock_is_held_does_not_block_the_child() -> None:
    pool = RandomiserPool(ARITHMETIC, Counter())
    pool.fill(10)
    with pool._guard():
        assert _length_in_child(pool) == 0


def test_a_process_id_that_changed_without_a_hook_empties_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RandomiserPool(ARITHMETIC, Counter())
    pool.fill(10)
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    assert len(pool) == 0


def test_a_failing_source_leaves_nothing_half_done() -> None:
    class Failing(Counter):
        def draw(self, n: int) -> list[int]:
            if self.n_drawn >= 8:
                raise ArithmeticFault("a batch of randomisers failed its check")
            return super().draw(n)

    pool = RandomiserPool(ARITHMETIC, Failing(), block_rows=4)
    with pytest.raises(ArithmeticFault):
        pool.fill(12)
    with pytest.raises(ArithmeticFault):
        pool.draw(12)
    assert len(pool) == 0, "what a failed request took is gone, not put back"


def test_pools_are_not_pickled_and_have_positive_blocks() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(RandomiserPool(ARITHMETIC, Counter()))
    with pytest.raises(ValueError):
        RandomiserPool(ARITHMETIC, Counter(), block_rows=0)


def test_order_of_rows_survives_a_split_block() -> None:
    pool = RandomiserPool(ARITHMETIC, Counter(), block_rows=100)
    pool.fill(10)
    assert np.concatenate([values(pool.draw(4)), values(pool.draw(6))]).tolist() == list(range(1, 11))
