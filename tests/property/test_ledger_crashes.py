"""Whatever is interrupted wherever: no answer leaves uncharged, none is given twice with different noise, no overdraft.

The disk of the first test loses power at every single operation and keeps any part of what was not yet synced. The
other tests use real processes, one of them killed.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_components import ledger as ledger_journal
from dp_components.errors import LedgerDamaged, PrivacyRefusal
from dp_components.events import LaplaceEvent, NeighbouringRelation, Release, RepeatedEvent
from dp_components.ledger import Budget, Ledger, LedgerIdentity
from tests.support import ledger_workers
from tests.support.crashing_disk import CrashingDisk, PowerLoss
from tests.support.examples import examples
from tests.support.processes import processes

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
EVENT = LaplaceEvent(0.25, ROW)
IDENTITY = LedgerIdentity("site-1", "credit", ROW)
BUDGET = Budget(2.0, 0.0, pure_epsilon=2.0)
JOBS, QUERIES = ("a", "b", "c"), ("q0", "q1", "q2")

STEPS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(JOBS), st.integers(1, 5)),
    st.tuples(st.just("release"), st.sampled_from(JOBS), st.sampled_from(QUERIES)),
    st.tuples(st.just("release"), st.sampled_from(JOBS), st.sampled_from(QUERIES)),
    st.tuples(st.just("close"), st.sampled_from(JOBS), st.none()),
    st.tuples(st.just("interrupt"), st.sampled_from(JOBS), st.none()),
    st.tuples(st.just("reopen"), st.none(), st.none()),
)


class World:
    """The ledger under test and what left it so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "credit.ledger"
        self.head = folder / "heads" / "credit.head"
        self.handed_out: dict[tuple[str, str], int] = {}
        self.closed: set[str] = set()
        self._fresh = itertools.count()
        self.ledger: Ledger | None = None

    def disk(self, crash_at: int | None, kept: tuple[float, float], is_late: bool) -> CrashingDisk:
        """Give the ledger and its head a disk; they may lie on two, so that each keeps its own share."""
        return CrashingDisk(dict(zip((self.path, self.head), kept, strict=True)), crash_at, is_late)

    def reopen(self) -> Ledger:
        self.ledger = Ledger.open(self.folder, IDENTITY, BUDGET)
        return self.ledger

    def step(self, action: str, job: str, argument: object) -> None:
        """Take one step; refusals are part of the game."""
        ledger = self.ledger or self.reopen()
        was_closed = job in self.closed
        try:
            match action:
                case "open":
                    ledger.open_job(job, RepeatedEvent(EVENT, argument))
                case "close":
                    self.closed.add(job)  # also if the power goes while it happens
                    ledger.close_job(job)
                case "interrupt":
                    ledger.interrupt_job(job)
                case "release":
                    self.release(ledger, job, argument)
                case "reopen":
                    self.reopen()
        except PrivacyRefusal:
            if action == "close" and not was_closed:
                self.closed.discard(job)

    def release(self, ledger: Ledger, job: str, query: str) -> None:
        value = int(ledger.release(job, query, lambda: Release(np.array([next(self._fresh)]), EVENT))[0])
        assert self.handed_out.setdefault((job, query), value) == value, "another noise for the same question"

    def check(self) -> None:
        """What must hold at every moment, seen from a process that has just started."""
        ledger = Ledger.open(self.folder, IDENTITY, BUDGET)
        n_charged = round(ledger.spent().pure_epsilon / EVENT.epsilon)
        assert len(self.handed_out) <= n_charged <= BUDGET.pure_epsilon / EVENT.epsilon
        assert ledger.quote([]).held.fits(BUDGET.limit)
        for (job, query), value in self.handed_out.items():
            if job not in self.closed:
                with ledger._locked() as state:
                    is_interrupted = state.jobs[job].is_interrupted
                    assert state.jobs[job].replies[query][0] == value
                if is_interrupted:
                    continue  # it may have no budget left to go on
                assert ledger.release(job, query, self._must_not_draw)[0] == value

    def _must_not_draw(self) -> Release:
        raise AssertionError("an answer that had left was forgotten")


@settings(max_examples=examples(150))
@given(
    st.lists(STEPS, min_size=3, max_size=14),
    st.integers(1, 120),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.booleans(),
    st.integers(1, 24),
)
def test_power_loss_at_any_operation(
    steps: list[tuple[str, str, object]], crash_at: int, kept: tuple[float, float], is_late: bool, second: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name) / "privacy")
        for crash in (crash_at, second, None):
            disk = world.disk(crash, kept, is_late)
            world.ledger = None  # a new process
            with mock.patch.object(ledger_journal, "os", disk):
                run(world, steps)
            world.check()


def test_power_loss_at_every_operation_of_one_job() -> None:
    """Every operation in turn, with nothing, half and all of the unsynced bytes kept, of the ledger and of its head."""
    steps = [
        ("open", "a", 2),
        ("release", "a", "q0"),
        ("open", "b", 2),
        ("close", "a", None),
        ("release", "b", "q0"),
        ("release", "b", "q1"),
    ]
    for kept, is_late in (
        ((0.0, 0.0), False),
        ((0.0, 0.0), True),
        ((0.0, 1.0), True),
        ((1.0, 0.0), False),
        ((0.5, 0.5), False),
        ((1.0, 1.0), True),
    ):
        for crash_at in itertools.count(1):
            with tempfile.TemporaryDirectory() as name:
                world = World(Path(name) / "privacy")
                disk = world.disk(crash_at, kept, is_late)
                with mock.patch.object(ledger_journal, "os", disk):
                    is_complete = run(world, steps)
                world.check()
            if is_complete:
                break
        assert crash_at > 60, "the job has fewer operations than it must have"


def test_a_ledger_cut_anywhere_is_refused_whatever_crash_went_before() -> None:
    """Once all that was begun is over, no line that had counted can be missing at the end: not one of any job."""
    steps = [("open", "a", 2), ("release", "a", "q0"), ("open", "b", 2), ("close", "a", None), ("release", "b", "q0")]
    for crash_at in range(1, 90, 4):
        with tempfile.TemporaryDirectory() as name:
            world = World(Path(name) / "privacy")
            with mock.patch.object(ledger_journal, "os", world.disk(crash_at, (0.5, 0.5), False)):
                run(world, steps)
            world.check()
            run(world, [("reopen", "", None), *steps])
            lines = world.path.read_bytes().splitlines(keepends=True)
            for n_kept in range(len(lines)):
                world.path.write_bytes(b"".join(lines[:n_kept]))
                with pytest.raises(LedgerDamaged, match="its end is missing"):
                    world.reopen()
            world.path.unlink()
            with pytest.raises(LedgerDamaged, match="its end is missing"):
                world.reopen()
            world.path.write_bytes(b"".join(lines))
            world.check()


def run(world: World, steps: Iterable[tuple[str, str, object]]) -> bool:
    """Take the steps; say whether they were all taken before the power went."""
    try:
        for step in steps:
            world.step(*step)
    except PowerLoss:
        return False
    return True


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_full_or_failing_disk_hands_nothing_out_and_the_ledger_goes_on(operation: str, tmp_path: Path) -> None:
    world = World(tmp_path / "privacy")
    world.step("open", "a", 2)
    world.step("release", "a", "q0")
    assert world.ledger is not None
    failing = mock.patch.object(ledger_journal.os, operation, side_effect=OSError(28, "no space"))
    with failing, pytest.raises(OSError, match="no space"):
        world.release(world.ledger, "a", "q1")
    world.release(world.ledger, "a", "q1")
    world.check()


def test_the_planted_fault_of_an_answer_before_its_charge_is_caught(tmp_path: Path) -> None:
    """The invariants can fail: a ledger that does not sync loses an answer that had left."""
    world = World(tmp_path / "privacy")
    world.step("open", "a", 2)
    disk = world.disk(None, (0.0, 0.0), False)
    with mock.patch.object(ledger_journal, "os", disk), mock.patch.object(disk, "fsync"):
        world.step("release", "a", "q0")
        with pytest.raises(PowerLoss):
            disk._lose_power()
    with pytest.raises(AssertionError):
        world.check()


def test_processes_together_spend_no_more_than_the_budget(tmp_path: Path) -> None:
    """Three processes race for 31 releases, and ask one question in common: one charge, one answer."""
    ledger = Ledger.open(tmp_path, ledger_workers.IDENTITY, ledger_workers.BUDGET)
    ledger.open_job("common", ledger_workers.EVENT)
    context = processes()
    pipes = [context.Pipe() for _ in range(3)]
    racing = [
        context.Process(target=ledger_workers.spend_all, args=(tmp_path, f"p{i}", pipe[1]))
        for i, pipe in enumerate(pipes)
    ]
    for process in racing:
        process.start()
    results = []
    for pipe in pipes:
        assert pipe[0].poll(120)
        results.append(pipe[0].recv())
    for process in racing:
        process.join()
    assert sum(n_paid for n_paid, _ in results) == ledger_workers.N_AFFORDABLE - 1
    assert len({tuple(shared) for _, shared in results}) == 1
    assert ledger.spent().pure_epsilon == ledger_workers.BUDGET.pure_epsilon


def test_what_cannot_be_resumed_is_free_again_once_its_process_is_gone(tmp_path: Path) -> None:
    """A killed job that nobody can resume once held its reservation for ever."""
    ledger = Ledger.open(tmp_path, ledger_workers.IDENTITY, ledger_workers.BUDGET)
    context = processes()
    for ends_with_process in (True, False):
        receiver, sender = context.Pipe()
        process = context.Process(target=ledger_workers.run_until_killed, args=(tmp_path, ends_with_process, sender))
        process.start()
        assert receiver.poll(120)
        ledger.open_job(f"beside {ends_with_process}", ledger_workers.EVENT)
        n_free = ledger_workers.N_AFFORDABLE // 2 - 2 - (not ends_with_process)
        assert ledger.quote(RepeatedEvent(ledger_workers.EVENT, n_free)).fits
        assert not ledger.quote(RepeatedEvent(ledger_workers.EVENT, n_free + 2)).fits, "a job that goes on was closed"
        process.kill()
        process.join()
        ledger.open_job(f"after {ends_with_process}", [])
    for name, n_kept in (("once True", 1), ("once False", 1)):
        assert ledger.job_spent(name).pure_epsilon == n_kept * ledger_workers.EVENT.epsilon
    with pytest.raises(PrivacyRefusal, match="closed"):
        ledger.open_job("once True", [], ends_with_process=True)
    assert ledger.answered("once False") == ("question",)
    assert not list(tmp_path.glob("*.alive"))


def test_what_can_be_resumed_holds_no_more_than_it_spent_once_its_process_is_gone(tmp_path: Path) -> None:
    """A killed job once held its reservation until somebody at the site gave it back."""
    ledger = Ledger.open(tmp_path, ledger_workers.IDENTITY, ledger_workers.BUDGET)
    context = processes()
    receiver, sender = context.Pipe()
    process = context.Process(target=ledger_workers.run_until_killed, args=(tmp_path, False, sender, True))
    process.start()
    assert receiver.poll(120)
    with pytest.raises(PrivacyRefusal, match="would overdraw"):
        ledger.open_job("too much", RepeatedEvent(ledger_workers.EVENT, ledger_workers.N_AFFORDABLE // 2 + 1))
    process.kill()
    process.join()
    rest = RepeatedEvent(ledger_workers.EVENT, ledger_workers.N_AFFORDABLE - 1)
    ledger.open_job("after", rest)
    with pytest.raises(PrivacyRefusal, match="was interrupted"):
        ledger.release("once False", "question", ledger_workers.draw)
    plan = RepeatedEvent(ledger_workers.EVENT, ledger_workers.N_AFFORDABLE // 2)
    with pytest.raises(PrivacyRefusal, match="would overdraw"):
        ledger.open_job("once False", plan, can_resume=True)
    ledger.close_job("after")
    ledger.open_job("once False", plan, can_resume=True)
    assert ledger.answered("once False") == ("question",)
    ledger.release("once False", "question", lambda: pytest.fail("drawn afresh"))
    ledger.interrupt_job("once False")
    assert not list(tmp_path.glob("*.alive"))


def test_a_killed_process_leaves_a_ledger_that_knows_all_that_left_it(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path, ledger_workers.IDENTITY, ledger_workers.BUDGET)
    ledger.open_job("long", RepeatedEvent(ledger_workers.EVENT, ledger_workers.N_AFFORDABLE))
    context = processes()
    results: dict[int, list[int]] = {}
    for delay_s in (0.0, 0.011, 0.023):
        receiver, sender = context.Pipe()
        process = context.Process(target=ledger_workers.release_until_killed, args=(tmp_path, sender))
        process.start()
        assert receiver.poll(120)
        time.sleep(delay_s)
        process.kill()
        process.join()
        sender.close()
        try:
            while True:
                i, value = receiver.recv()
                assert results.setdefault(i, value) == value
        except EOFError:
            pass
        for i, value in results.items():
            assert ledger.release("long", f"question {i}", lambda: pytest.fail("forgotten")).tolist() == value
        assert len(results) * ledger_workers.EVENT.epsilon <= ledger.spent().pure_epsilon <= 2.0
