"""What a party's workers do, in lines: with rounds, in silences, on one for which the others wait."""

from __future__ import annotations

import threading

import pytest

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import Silent
from nvflare_plugins.attempt.worker_progress import WorkersProgress, watched
from nvflare_plugins.pages.run_record import RoundRow
from nvflare_plugins.workers.shards import BINS, READS, TELLS, Ask, Conversation, lead_on
from nvflare_plugins.workers.workers import TRIAL, Work, begin, note_rows, work_section
from tests.support.workers_here import workers_here


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Watched:
    """Workers that a test keeps busy, seconds of its own clock."""

    def __init__(self, n_workers: int) -> None:
        self.now = 0.0
        self.work = [Work() for _ in range(n_workers)]
        self.said = Lines()
        self.progress = WorkersProgress(self.work, self.said, lambda: self.now)

    def busy(self, seconds: float, *of_workers: float) -> None:
        """Let time pass, of which each worker was busy so long."""
        self.now += seconds
        for one, own in zip(self.work, of_workers, strict=True):
            one._clock = (one.seconds + own, "", 0.0)

    def asks(self, number: int, method: str) -> None:
        self.work[number]._clock = (self.work[number].seconds, method, self.now)

    def round(self, number: int, of: int = 100) -> list[str]:
        before = len(self.said.lines)
        self.progress(RoundRow(number, 1.0), of)
        return self.said.lines[before:]

    def look(self) -> list[str]:
        before = len(self.said.lines)
        self.progress.look()
        return self.said.lines[before:]


def test_rounds_come_with_what_each_worker_did_every_ten_seconds() -> None:
    sites = Watched(2)
    sites.work[0].rows["encrypted"] = 500
    sites.busy(4, 3, 2)
    assert sites.round(0) == []
    sites.work[0].rows["encrypted"] += 1500
    sites.busy(8, 6, 7.5)
    assert sites.round(1) == [
        "workers in rounds 1 to 2 (12.0 s): 0 busy 9.0 s (75 %), 2,000 rows encrypted; 1 busy 9.5 s (79 %); the "
        "slowest is 1"
    ]
    sites.busy(1, 1, 0.5)
    assert sites.round(2, of=3) == [
        "workers in round 3 (1.0 s): 0 busy 1.0 s (100 %); 1 busy 0.5 s (50 %); the slowest is 0"
    ]


def test_a_long_silence_tells_what_each_is_doing_and_ever_more_seldom() -> None:
    sites = Watched(2)
    sites.asks(0, "sum_bins")
    sites.now += 9
    assert sites.look() == []
    sites.now += 1
    assert sites.look() == [
        "workers now, and in the last 10 s: 0 adds pairs into bins (busy 100 %), 1 waits (busy 0 %)"
    ]
    sites.now += 10
    assert sites.look() == []
    sites.now += 10
    assert len(sites.look()) == 1
    sites.busy(40, 0, 0)
    assert sites.look() == [], "who waits for other sites has nothing to tell"


def test_a_worker_that_reads_says_how_far_it_is() -> None:
    sites = Watched(1)
    sites.asks(0, "listen")
    sites.work[0].told = (READS, 120_000, 400_000)
    sites.now += 10
    assert sites.look() == ["workers now, and in the last 10 s: 0 reads its rows, 120,000 of 400,000 (busy 100 %)"]


def test_of_many_workers_only_the_slowest_is_named() -> None:
    sites = Watched(64)
    for number in range(64):
        sites.asks(number, "listen")
        sites.work[number].told = (READS, 10, 100) if number < 60 else None
    sites.now += 20
    (line,) = sites.look()
    assert line.startswith("workers now: 60 x reads its rows, 4 x trains; 600 of 6,000 rows; 64 busy 20.0 to 20.0 s")
    sites.busy(10, *[5.0] * 63, 9.0)
    (line,) = sites.round(0)
    assert line == "workers in round 1 (30.0 s): 64 busy 5.0 to 9.0 s, usually 5.0 s; the slowest is 63 (30 %)"


def test_a_straggler_is_named_once_with_the_remedy() -> None:
    sites = Watched(3)
    said = []
    for number in range(6):
        sites.busy(10, 4, 9.5, 5)
        said += sites.round(number)[1:]
    (line,) = said
    assert line.startswith("worker 1 of this site's cluster is much slower than the others, which wait for it")
    assert "9.5 s of the last 10.0 s, they for 4.5 s" in line and "VEILBOOST_THREADS" in line


@pytest.mark.parametrize("busy", [(8, 9.5, 7), (0.1, 1.0, 0.2)], ids=["hardly slower", "hardly any time"])
def test_who_costs_little_is_no_straggler(busy: tuple[float, ...]) -> None:
    sites = Watched(3)
    for number in range(6):
        sites.busy(10, *busy)
        assert len(sites.round(number)) == 1


def test_one_that_is_slow_now_and_then_is_no_straggler() -> None:
    sites = Watched(2)
    for number in range(9):
        sites.busy(10, 9 if number % 3 == 0 else 4, 9 if number % 3 else 4)
        assert len(sites.round(number)) == 1


def test_it_is_told_of_real_workers_and_the_thread_ends() -> None:
    noted: list[object] = []

    class Noted(Lines):
        def note_workers(self, work: object) -> None:
            noted.append(work)

    with workers_here(2) as workers, watched(workers, Noted()) as progress:
        begin(workers, TRIAL, [()] * 2)
        note_rows(workers, [slice(0, 3), slice(3, 7)])
        assert isinstance(progress, WorkersProgress) and noted == [workers.work]
        section = work_section(workers.work)
    assert [row[1] for row in section.rows] == ["3 held", "4 held"]
    assert "veilboost_workers" not in {thread.name for thread in threading.enumerate()}
    silent = Silent()
    with watched(None, silent) as progress:
        assert progress is silent


class Telling(Conversation):
    """Says twice how far it is before it asks."""

    def __init__(self, *told: object) -> None:
        def work(ask: Ask) -> int:
            ask(TELLS, *told)
            ask(TELLS, BINS, 0, 0)
            return int(ask("sum", 1))

        super().__init__(work)


def test_shards_say_how_far_they_are_without_a_reply() -> None:
    seen: list[object] = []
    with workers_here(2) as workers:
        for number in range(2):
            workers._links[number]._host._part = Telling(READS, 5, 10)  # type: ignore[attr-defined]

        def answer(word: str, asked: list[tuple[int]]) -> list[int]:
            seen.extend(work.told for work in workers.work)
            return [sum(one for (one,) in asked)] * 2

        assert lead_on(workers, answer) == [2, 2]
    assert seen == [None, None], "how far it was goes once it asks"


@pytest.mark.parametrize("told", [("reveals a value", 1, 2), (READS, "x", 2), (READS, 1)])
def test_a_shard_says_nothing_but_known_words_and_numbers(told: tuple[object, ...]) -> None:
    with workers_here(1) as workers:
        workers._links[0]._host._part = Telling(*told)  # type: ignore[attr-defined]
        with pytest.raises(ProtocolError, match="not known"):
            lead_on(workers, lambda word, asked: [0])
