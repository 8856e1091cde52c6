"""How many rows of a data set no earlier job has used, and when that cannot be said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table
from nvflare_plugins.site.memory.registry import Registry, Reservation, Verdict, Wanted, count_added
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy_values import Consents

SITES = ("a", "b", "c")
SPEC = DataSet("train", Path("train.csv"), "csv")
_RNG = np.random.default_rng(5)
_VALUES = _RNG.normal(size=(300, 3)).astype(np.float32)
_LABEL = _RNG.integers(0, 2, 300).astype(np.float32)


def table(*parts: slice, columns: int = 3) -> Table:
    rows = np.concatenate([np.arange(300)[part] for part in parts])
    names = tuple(f"f{i}" for i in range(columns))
    return Table(np.ascontiguousarray(_VALUES[rows, :columns]), names, ("float",) * columns, _LABEL[rows], "y")


FIRST, SECOND, BOTH = slice(0, 100), slice(100, 150), slice(0, 150)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Memory(tmp_path, "a"), Consents())


def ask(registry: Registry, rows: Table, job_id: str, spec: DataSet = SPEC, **options: object) -> Reservation:
    of_job = {name: options.pop(name) for name in ("sites", "parameters", "resume", "beside") if name in options}
    wanted = Wanted(rows, spec, **{"may_grow": True, **options})  # type: ignore[arg-type]
    return registry.reserve(wanted, job_id=job_id, **{"sites": SITES, "parameters": b"p", **of_job})  # type: ignore[arg-type]


def pass_(registry: Registry, run: Reservation) -> Reservation:
    registry.grown(run, is_enough=True)
    registry.complete(run, 3)
    return run


def train(registry: Registry, *args: object, **options: object) -> Reservation:
    """A job that has counted its rows and ended well."""
    return pass_(registry, ask(registry, *args, **options))  # type: ignore[arg-type]


ROWS = st.lists(st.integers(0, 6), max_size=12)


@given(rows=ROWS, earlier=st.lists(ROWS, max_size=3), n_released=st.integers(0, 3))
def test_counts_equal_those_of_multisets(rows: list[int], earlier: list[list[int]], n_released: int) -> None:
    released = earlier[:n_released]
    here, used = Counter(rows), Counter()
    for version in released:
        used |= Counter(version)
    expected = None if any(Counter(version) - here for version in earlier) else sum((here - used).values())
    as_hashes = lambda values: np.sort(np.array(values, dtype=np.uint64))  # noqa: E731
    found = count_added(as_hashes(rows), [as_hashes(v) for v in earlier], [as_hashes(v) for v in released])
    assert found == expected


def test_added_rows_are_those_that_no_job_has_used(registry: Registry) -> None:
    assert train(registry, table(FIRST), "one").verdict is Verdict.NEW
    grown = ask(registry, table(BOTH), "two")
    assert grown.verdict is Verdict.GROWN and grown.n_added == 50
    pass_(registry, grown)
    again = ask(registry, table(BOTH), "three", parameters=b"other")
    assert again.verdict is Verdict.GROWN and again.n_added == 0, "the first version is still another one"
    assert ask(registry, table(slice(0, 160)), "four").n_added == 10


def test_too_few_are_refused_as_changed_rows_are(registry: Registry) -> None:
    train(registry, table(FIRST), "one")
    grown = ask(registry, table(BOTH), "two")
    with pytest.raises(DataRefusal) as refused:
        registry.grown(grown, is_enough=False)
    assert "consents.recompute_with_changes" in refused.value.reason and "one" in refused.value.reason


def test_rows_of_a_run_that_died_before_its_check_are_still_added(registry: Registry) -> None:
    """Otherwise a job that is broken off would let the next one pass with nothing added."""
    train(registry, table(FIRST), "one")
    ask(registry, table(BOTH), "dead")
    assert ask(registry, table(BOTH), "two").n_added == 50


def test_no_run_that_was_broken_off_lets_its_rows_join_those_of_others(registry: Registry) -> None:
    """A file of new rows alone, too few of them: their job ends where it counts them, by a lost site or a server."""
    train(registry, table(FIRST), "one")
    options: dict = {"spec": DataSet("second", Path("second.csv"), "csv")}
    assert ask(registry, table(slice(100, 101)), "broken off", **options).verdict is Verdict.NEW
    evaluated = ask(registry, table(FIRST), "also broken off", parameters=b"q")
    options = {"spec": DataSet("third", Path("third.csv"), "csv"), "may_grow": False, "is_settled": True}
    ask(registry, table(slice(101, 102)), "also broken off", beside=[evaluated], **options)
    assert ask(registry, table(slice(0, 102)), "both").n_added == 2


def test_rows_that_were_evaluated_are_not_added(registry: Registry) -> None:
    """Metrics are sums over them: with one row more, those of a model that hardly changes differ by that row's."""
    trained = train(registry, table(FIRST), "one")
    options: dict = {"spec": DataSet("second", Path("second.csv"), "csv"), "may_grow": False, "is_settled": True}
    train(registry, table(SECOND), "one", beside=[trained], **options)
    assert ask(registry, table(BOTH), "both").n_added == 0
    assert ask(registry, table(slice(0, 151)), "one more").n_added == 1


def test_a_further_attempt_uses_the_reservation_of_the_one_before(registry: Registry) -> None:
    """Its rows have passed the count already: as another run it would add none, and be refused."""
    train(registry, table(FIRST), "one")
    first = ask(registry, table(BOTH), "two")
    registry.grown(first, is_enough=True)
    again = ask(registry, table(BOTH), "two")
    assert (again.run, again.verdict, again.n_added, again.is_again) == (first.run, Verdict.GROWN, 50, True)
    registry.cancel(again)  # the attempt before may have sent what it allows
    assert [run["job"] for run in registry.runs()] == ["one", "two"]
    for changes in ({"parameters": b"q"}, {"sites": SITES[:2]}, {"draw": "subsample 0.5"}):
        with pytest.raises(DataRefusal):
            found = ask(registry, table(BOTH), "two", **changes)
            assert found.run != first.run
            registry.grown(found, is_enough=found.n_added > 0)
    assert ask(registry, table(BOTH), "three").n_added == 0


def test_data_sets_of_one_attempt_do_not_share_a_reservation(registry: Registry) -> None:
    first = [ask(registry, table(FIRST), "one")]
    first.append(ask(registry, table(FIRST), "one", beside=first))
    assert first[0].run != first[1].run and not first[1].is_again
    again = [ask(registry, table(FIRST), "one")]
    again.append(ask(registry, table(FIRST), "one", beside=again))
    assert {one.run for one in again} == {one.run for one in first}


def test_a_cancelled_run_leaves_nothing(registry: Registry) -> None:
    train(registry, table(FIRST), "one")
    registry.cancel(ask(registry, table(BOTH), "two"))
    assert ask(registry, table(BOTH), "three").n_added == 50


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (table(slice(1, 150)), {}),
        (table(SECOND), {}),
        (table(BOTH), {"sites": ("a", "b")}),
        (table(BOTH), {"draw": "subsample 0.5"}),
        (table(BOTH), {"may_grow": False}),
        (table(BOTH, columns=2), {}),
    ],
    ids=["a row went", "other rows", "other sites", "a sample", "another kind of job", "other columns"],
)
def test_what_is_not_only_grown_is_refused(registry: Registry, rows: Table, options: dict) -> None:
    train(registry, table(FIRST), "one")
    with pytest.raises(DataRefusal):
        ask(registry, rows, "two", **options)


def test_a_corrected_value_is_a_row_that_went(registry: Registry) -> None:
    train(registry, table(FIRST), "one")
    corrected = table(BOTH)
    corrected.features[7, 1] += 1
    with pytest.raises(DataRefusal):
        ask(registry, corrected, "two")


def test_two_months_trained_apart_are_no_added_rows_together(registry: Registry) -> None:
    """Both were released: their union tells nothing new, and one row more would stand alone."""
    train(registry, table(FIRST), "one")
    train(registry, table(SECOND), "two", DataSet("second", Path("second.csv"), "csv"))
    assert ask(registry, table(BOTH), "union").n_added == 0
    assert ask(registry, table(slice(0, 151)), "one more").n_added == 1


def test_jobs_with_fewer_columns_in_between_do_not_matter(registry: Registry) -> None:
    train(registry, table(FIRST), "one")
    train(registry, table(FIRST, columns=2), "narrow")
    assert ask(registry, table(BOTH), "two").n_added == 50


def test_continuing_takes_rows_that_no_job_of_the_chain_has_trained_on(registry: Registry) -> None:
    train(registry, table(FIRST), "one")
    other = DataSet("second", Path("second.csv"), "csv")
    assert ask(registry, table(SECOND), "two", other, continues=("one",)).verdict is Verdict.NEW
    third = DataSet("third", Path("third.csv"), "csv")
    with pytest.raises(DataRefusal) as refused:
        ask(registry, table(slice(149, 200)), "three", third, continues=("two", "one"))
    assert "continue_from" in refused.value.reason and "job two" in refused.value.reason
    ask(registry, table(SECOND), "again", other, parameters=b"q", continues=("one",))  # another trial of the month
