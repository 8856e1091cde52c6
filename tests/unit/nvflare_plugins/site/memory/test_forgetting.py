"""Who asked to be forgotten, how a run divides the rows of those before it, and that no class of them gets small."""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.pooled import row_floors
from nvflare_plugins.site.memory.forgetting import Forgetting, Queue, Standing, ToForget, split_of, without
from nvflare_plugins.site.memory.registry import count_added
from nvflare_plugins.site.memory.store import NAME, STATEMENTS
from nvflare_plugins.site.policy import SitePolicy
from tests.support.examples import examples

SPEC = DataSet("people", Path("people.csv"), "csv", id="person")
ROWS = st.lists(st.integers(0, 5), max_size=10)


def hashes(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.sort(np.array(values, dtype=np.uint64))


@given(ROWS, ROWS)
def test_rows_less_others_are_those_of_multisets(rows: list[int], others: list[int]) -> None:
    expected = sorted((Counter(rows) - Counter(others)).elements())
    assert without(hashes(rows), hashes(others)).tolist() == expected


def units(values: Sequence[int]) -> set[tuple[int, int]]:
    """Return rows that are alike as the first, the second, ... of their kind."""
    return {(value, nth) for value, times in Counter(values).items() for nth in range(times)}


def split_slowly(
    fresh: list[int], base: list[int], released: list[list[int]], done: list[int], leaving: list[int]
) -> tuple[list[int], int] | None:
    sets = [units(one) for one in (base, *released)]
    most = {value: max(Counter(one)[value] for one in (base, *released)) for value in range(6)}
    alive = {u for u in sets[0] if u[1] < most[u[0]] - Counter(done)[u[0]]}
    stays = {u for u in sets[0] if u[1] < most[u[0]] - Counter(done)[u[0]] - Counter(leaving)[u[0]]}
    of_all, mine = set.intersection(*sets), units(fresh)
    if mine - sets[0] or any((u in mine) != (u in stays) for u in set.union(*sets) - of_all):
        return None
    return sorted(value for value, _ in alive - mine), len(of_all & mine)


@given(base=ROWS, released=st.lists(ROWS, max_size=2), done=ROWS, leaving=ROWS, keeps=st.data())
def test_a_split_equals_its_naive_twin(
    base: list[int], released: list[list[int]], done: list[int], leaving: list[int], keeps: st.DataObject
) -> None:
    fresh = keeps.draw(st.one_of(ROWS, st.lists(st.sampled_from(base or [0]), max_size=len(base), unique=True)))
    found = split_of(hashes(fresh), hashes(base), [hashes(one) for one in released], hashes(done), hashes(leaving))
    expected = split_slowly(fresh, base, released, done, leaving)
    assert (None if found is None else (sorted(found.gone.tolist()), found.n_left)) == expected


# Histories of a small consortium: what the rule lets through, and what it would have let through without it.

ENOUGH, OF_A_SITE, N_SITES = 9, 2, 3
_COUNTS = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5]), min_size=N_SITES, max_size=N_SITES)
_STEP = st.tuples(st.sampled_from(["add", "forget", "forget anybody"]), _COUNTS, st.integers(0, 99))


class Consortium:
    """Sites whose rows are numbers of their own, and all sets over which sums were released."""

    def __init__(self) -> None:
        self.rows = [set(range(100 * site, 100 * site + 6)) for site in range(N_SITES)]
        self.released = [[set(one)] for one in self.rows]
        self.done: list[set[int]] = [set() for _ in self.rows]
        self.number = 0

    def step(self, what: str, counts: Sequence[int], seed: int) -> None:
        fresh, pooled = [], np.zeros(4 if what == "add" else 6, dtype=np.int64)
        for site, n in enumerate(counts):
            rows = set(self.rows[site])
            if what == "add":
                rows |= {1000 * (site + 1) + self.number + i for i in range(n)}
            else:
                choice = sorted(rows if what == "forget anybody" else rows & set.intersection(*self.released[site]))
                rows -= set(Random(seed).sample(choice, min(n, len(choice))))
            fresh.append(rows)
            counted = self.counts(what, site, rows)
            if counted is None:
                return
            pooled += counted.counts()
        self.number += 10
        if not row_floors.are_enough(pooled, N_SITES):
            return
        for site, rows in enumerate(fresh):
            self.done[site] |= self.rows[site] - rows
            self.rows[site] = rows
            self.released[site].append(set(rows))

    def counts(self, what: str, site: int, rows: set[int]) -> row_floors.AddedRows | None:
        before = [hashes(sorted(one)) for one in self.released[site]]
        done = hashes(sorted(self.done[site]))
        if what == "add":
            stripped = [without(one, done) for one in before]
            n = count_added(hashes(sorted(rows)), stripped, stripped)
            return None if n is None else row_floors.AddedRows(asks=True, consents=False, is_new=False, n_rows=n)
        split = split_of(hashes(sorted(rows)), before[-1], before[:-1], done, hashes([]))
        if split is None:
            return None
        n_left = split.n_left
        return row_floors.AddedRows(asks=True, consents=False, is_new=False, n_rows=split.gone.size, n_left=n_left)

    def smallest(self) -> int:
        """Return how many rows of all sites the smallest class of rows has that were in the same runs."""
        classes = Counter(
            tuple(row in one for one in self.released[site])
            for site in range(N_SITES)
            for row in set.union(*self.released[site])
        )
        return min(classes.values())


@pytest.fixture
def small_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_floors, "ADDED_ROWS", ENOUGH)
    monkeypatch.setattr(row_floors, "_LEAST_OF_A_SITE", OF_A_SITE)


@pytest.mark.usefixtures("small_rule")
@settings(max_examples=examples(300))
@given(steps=st.lists(_STEP, min_size=1, max_size=8))
def test_no_class_of_rows_alike_is_ever_smaller_than_a_batch(steps: list[tuple[str, list[int], int]]) -> None:
    """So no sum or difference of whatever was released shows fewer rows: each holds a class whole, or not at all."""
    consortium = Consortium()
    for step in steps:
        consortium.step(*step)
        assert consortium.smallest() >= ENOUGH


@pytest.mark.usefixtures("small_rule")
def test_four_large_differences_can_leave_one_row_where_classes_are_not_looked_at() -> None:
    """The control: batches of six each, taken from where one likes, whose sets come down to single rows."""
    rows = np.arange(24)
    sets = [set(rows), set(rows) - set(range(6)), set(rows) | set(range(100, 106))]
    sets.append(sets[2] - {0, 1, 2, 100, 101, 102})
    assert all(len(a ^ b) >= 6 for a, b in itertools.combinations(sets, 2))
    classes = Counter(tuple(row in one for one in sets) for row in set.union(*sets))
    assert min(classes.values()) < ENOUGH
    assert (
        split_of(
            hashes(sorted(sets[3])), hashes(sorted(sets[2])), [hashes(sorted(s)) for s in sets[:2]], *[hashes([])] * 2
        )
        is None
    )


def policy_in(folder: Path, **keys: object) -> SitePolicy:
    return SitePolicy.from_dict({"registry": "registry", **keys}, workspace=folder, site="site-1")


def test_a_queue_keeps_who_asked_and_no_id(tmp_path: Path) -> None:
    forgetting = Forgetting(policy_in(tmp_path), clock=lambda: 1e9)
    assert forgetting.add("people", ["Grete-Marlene", "42"]) == 2
    assert forgetting.add("people", ["42", "43"]) == 1
    again = Forgetting(policy_in(tmp_path))
    assert again.are_free(["42", None, "44", "Grete-Marlene"], "people").tolist() == [False, True, True, False]
    assert again.are_free(["42"], "others").all()
    assert again.queue("people").standing.tolist() == [Standing.WAITING] * 3
    assert again.withdraw("people", ["42", "nobody"]) == 1
    assert [one.data_set for one in again.queues()] == ["people"] and again.queue("people").keys.size == 2
    content = (tmp_path / "registry" / NAME).read_bytes()
    assert b"Grete" not in content and (tmp_path / "registry" / NAME).stat().st_mode & 0o077 == 0


def test_a_data_set_that_names_its_ids_no_more_is_refused(tmp_path: Path) -> None:
    forgetting = Forgetting(policy_in(tmp_path))
    without_ids = DataSet("people", Path("people.csv"), "csv")
    assert not forgetting.asks_for_ids(without_ids)
    forgetting.add("people", ["42"])
    assert forgetting.asks_for_ids(SPEC)
    with pytest.raises(PolicyRefusal, match=r"data_sets\.people\.id"):
        forgetting.asks_for_ids(without_ids)
    with pytest.raises(DataRefusal):
        forgetting.refuse([b"41", b"42"], SPEC)
    forgetting.refuse([b"41"], SPEC)


def test_ids_that_are_spelled_otherwise_than_in_the_queue_are_refused(tmp_path: Path) -> None:
    sets = {"path": "people.csv", "id": "person"}
    Forgetting(policy_in(tmp_path, data_sets={"people": sets})).add("people", ["42"])
    for change in ({"id": "visit"}, {"id_form": {"ignore_padding": True}}):
        policy = policy_in(tmp_path, data_sets={"people": {**sets, **change}})
        forgetting, spec = Forgetting(policy), policy.data_set("people")
        for asked in (lambda: forgetting.asks_for_ids(spec), lambda: forgetting.add("people", ["43"])):  # noqa: B023
            with pytest.raises(PolicyRefusal, match=r"another id column or id_form.*set both back"):
                asked()
    policy = policy_in(tmp_path, data_sets={"people": sets})
    assert Forgetting(policy).asks_for_ids(policy.data_set("people"))
    assert Forgetting(policy).withdraw("people", ["42"]) == 1
    assert Forgetting(policy_in(tmp_path, data_sets={"people": {**sets, "id": "visit"}})).add("people", ["7"]) == 1


def test_a_request_that_is_taken_back_while_a_job_runs_ends_it(tmp_path: Path) -> None:
    forgetting = Forgetting(policy_in(tmp_path))
    forgetting.add("people", ["42", "43"])
    queue = forgetting.queue("people")
    queue.take("job", 1, ToForget("old", queue.keys), hashes([7, 8]))
    assert queue.settled_beside(1) == 0
    queue.keys = queue.keys[:1]  # as ``withdraw`` leaves it
    assert queue.settled_beside(1) is None and queue.settled_beside(2) is None


def kept(queue: Queue) -> Queue:
    """Return a queue as the next process reads it."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        for statement in STATEMENTS:
            db.execute(statement)
        queue.write(db)
        return Queue.read(db, queue.data_set)


def test_two_jobs_at_a_time_share_a_batch_or_the_first_that_counts_goes_on(tmp_path: Path) -> None:
    forgetting = Forgetting(policy_in(tmp_path))
    forgetting.add("people", ["42", "43"])
    queue = forgetting.queue("people")
    both, one = ToForget("old", queue.keys), ToForget("old", queue.keys[:1])
    queue.take("first", 1, one, hashes([7]))
    queue.take("second", 2, both, hashes([7, 8]))
    queue.take("third", 3, both, hashes([7, 8]))
    queue = kept(queue)
    assert [batch.runs for batch in queue.batches] == [[(1, "first")], [(2, "second"), (3, "third")]]
    queue.batches[0].state = queue.batches[1].state = Standing.WAITING
    assert queue.settled_beside(1) == queue.settled_beside(3) == 0 and queue.settled_beside(9) is None
    queue.batches[1].state = Standing.LEAVING
    assert queue.settled_beside(1) == 1 and queue.settled_beside(2) == 0
    assert queue.standing.tolist() == [Standing.LEAVING] * 2
    queue.take("again", 4, both, hashes([]))
    assert len(queue.batches) == 2 and queue.batches[1].runs[-1] == (4, "again")
    queue.take("of another", 5, ToForget("older", queue.keys), hashes([7, 8, 8]))
    assert queue.batches[2].replaces == "older" and queue.batches[2].rows == 1, "the others are counted already"
    with pytest.raises(PolicyRefusal, match="submit this one again"):
        queue.take("late", 6, ToForget("old", queue.keys[1:]), hashes([]))
    queue.batches[0].state, queue.batches[1].state = Standing.FORGOTTEN, Standing.WAITING  # released nothing
    assert queue.standing.tolist() == [Standing.FORGOTTEN, Standing.WAITING]


def test_a_damaged_queue_is_refused_in_words(tmp_path: Path) -> None:
    policy = policy_in(tmp_path)
    forgetting = Forgetting(policy)
    forgetting.add("people", ["42"])
    with forgetting._memory.transaction() as db:
        queue = Queue.read(db, "people")
        db.execute("DELETE FROM row_counts WHERE name = 'document'")
    assert queue.keys.size == 1
    with pytest.raises(ConfigurationError, match="Restore it from a backup"):
        forgetting.queue("people")
