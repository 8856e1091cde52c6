"""Works over shards in step: every one is answered, the first that fails is named, none is left waiting."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.base.errors import PolicyRefusal, WorkerFailure
from nvflare_plugins.workers import shards, worker_connection
from nvflare_plugins.workers.shards import Ask, Conversation, lead, one_model, runs_of, said_of_model
from tests.support.workers_here import workers_here

HERE = f"{__name__}:Adder"


class Adder(Conversation):
    """Asks for the sum of all shards' numbers, twice; a shard may misbehave."""

    def __init__(self, number: int, what: str = "") -> None:
        def work(ask: Ask) -> int:
            first = ask("add", number)
            if what == "leaves":
                return int(first)
            if what == "refuses":
                raise PolicyRefusal("it may not")
            if what == "breaks":
                raise KeyError("the value 17 of somebody")
            return int(ask("other" if what == "strays" else "add", first))

        super().__init__(work)


@pytest.fixture(autouse=True)
def parts_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_connection, "_PACKAGE", "tests.")


def added(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
    return [sum(number for (number,) in asked)] * len(asked)


def n_works() -> int:
    return sum(thread.name == "veilboost_shard" for thread in threading.enumerate())


def no_work_is_left() -> bool:
    until = time.monotonic() + 20
    while n_works() and time.monotonic() < until:
        time.sleep(0.01)
    return n_works() == 0


def test_all_ask_and_all_are_answered_in_order() -> None:
    seen: list[list[tuple[Any, ...]]] = []

    def answer(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        seen.append(asked)
        return added(word, asked)

    with workers_here(3) as workers:
        assert lead(workers, HERE, [(1,), (2,), (3,)], answer) == [18, 18, 18]
    assert seen == [[(1,), (2,), (3,)], [(6,), (6,), (6,)]]


@pytest.mark.parametrize(
    ("what", "words"),
    [("refuses", "worker 1 of this site's cluster: it may not"), ("breaks", "worker 1 .*: unexpected KeyError$")],
)
def test_the_worker_whose_work_fails_is_named_without_what_it_held(what: str, words: str) -> None:
    with workers_here(3) as workers, pytest.raises(WorkerFailure, match=words):
        lead(workers, HERE, [(1,), (2, what), (3,)], added)
    assert no_work_is_left()


@pytest.mark.parametrize("what", ["leaves", "strays"])
def test_shards_that_are_not_in_step_end_the_work(what: str) -> None:
    with workers_here(2) as workers, pytest.raises(ProtocolError, match="not in step"):
        lead(workers, HERE, [(1,), (2, what)], added)
    assert no_work_is_left()


def test_what_ends_the_leader_ends_every_work() -> None:
    def answer(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        raise PolicyRefusal("a peer has left")

    with workers_here(2) as workers, pytest.raises(PolicyRefusal, match="a peer has left"):
        lead(workers, HERE, [(1,), (2,)], answer)
    assert no_work_is_left()


def test_all_works_have_one_time_to_end_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, float]] = []
    monkeypatch.setattr(shards, "wait", lambda ends, within: waited.append((len(ends), within)))
    with workers_here(3) as workers, pytest.raises(ProtocolError, match="not in step"):
        lead(workers, HERE, [(1,), (2, "leaves"), (3,)], added)
    assert waited == [(3, shards._GRACE_S)]
    assert no_work_is_left()


def test_a_work_ends_with_the_last_who_knows_of_it() -> None:
    conversation = Adder(1)
    assert conversation.listen() == ("asks", ("add", 1))
    del conversation
    assert no_work_is_left()


def test_rows_are_cut_into_runs_of_like_length() -> None:
    runs = runs_of(10, 3)
    assert [list(range(10))[run] for run in runs] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [run.stop - run.start for run in runs_of(1, 3)] == [0, 0, 1]


def test_shards_that_end_with_other_models_have_none() -> None:
    same = [said_of_model(number, b"model") for number in range(3)]
    assert one_model(same) == b"model"
    with pytest.raises(ProtocolError, match="different models"):
        one_model([*same, said_of_model(3, b"other")])
    with pytest.raises(ProtocolError, match="different models"):
        one_model(same[1:])
