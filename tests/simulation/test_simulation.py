"""Jobs of all kinds through what a seed lets befall them: the same each time, and the invariants hold."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.simulation import run
from tests.simulation.cases import FOUND, JOBS, job_of
from tests.simulation.faults import Plan
from tests.simulation.invariants import broken
from tests.simulation.mutants import MUTANTS, numbers_are_answered_again, survived
from tests.simulation.run import drawn, play, simulate
from tests.simulation.scheduler import Deadlock, Scheduler, Stopped, WaitsWithMemory
from tests.simulation.stand_ins import _connect_of
from tests.simulation.watchdog import StandsStill, guarded
from tests.simulation.world import SERVER, Loss, Machines

SEEDS = 300
QUICK = (*range(20), 31, 79, 159)  # jobs once, and each fault; further seeds run with the slow tests
DEAR = {"horizontal_ckks", "vertical_paillier"}  # beside one encrypted job of each kind of data


@pytest.fixture(scope="module", autouse=True)
def undisturbed_runs_are_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the processes that share a run of the tests do each undisturbed run once."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    run.shared_folder = tmp_path_factory.getbasetemp().parent / "undisturbed"
    run.shared_folder.mkdir(exist_ok=True)
    yield
    run.shared_folder = None


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(SEEDS)]
)
def test_what_must_hold_holds(seed: int) -> None:
    kind = job_of(seed)
    plan, _, broken = simulate(kind, seed)
    assert not broken, f"{kind}: {plan}: {broken}"


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_what_was_found_once_is_mended(kind: str, seed: int) -> None:
    plan, _, broken = simulate(kind, seed)
    assert not broken, f"{plan}: {broken}"


def test_every_job_has_seeds() -> None:
    assert {job_of(seed) for seed in QUICK} == set(JOBS) - DEAR
    assert {job_of(seed) for seed in range(SEEDS)} == set(JOBS)


@pytest.mark.parametrize(
    "kind", ["dpboost", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("horizontal", "horizontal_continue"))]
)
def test_a_seed_gives_the_same_run_each_time_to_the_last_byte(tmp_path: Path, kind: str) -> None:
    def traced(seed: int, folder: str) -> list[tuple[object, ...]]:
        story = play(kind, drawn(kind, seed), tmp_path / folder)
        return [
            (m.seconds, m.origin, m.target, m.topic, m.label, m.payload)
            for outcome in story.jobs + story.later
            for m in outcome.messages
        ]

    first = traced(5, "one")
    assert len(first) > 50 and first == traced(5, "two")
    assert first != traced(6, "other")


OLD = (Loss(SERVER, 40, 1.0, loses_power=False), Loss(SERVER, 120, 1.0, loses_power=False, is_old=True))


@pytest.mark.parametrize("is_planted", [False, True])
def test_two_servers_never_both_lead(tmp_path: Path, is_planted: bool) -> None:
    plan = Plan(1, is_harmless=False, losses=OLD, machines=Machines(losses=list(OLD)))
    with numbers_are_answered_again() if is_planted else nullcontext():
        outcome = play("horizontal_wait", plan, tmp_path).jobs[0]
    told = [fault for fault in broken("horizontal_wait", plan, outcome, {}) if "answered attempt" in fault]
    assert bool(told) is is_planted
    if not is_planted:
        assert "this site has answered attempt 2" in (outcome.reason or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_defects_are_found(name: str) -> None:
    assert survived(name) is not None


# -- the scheduler ----------------------------------------------------------------------------------------------------


def test_time_jumps_to_what_is_due_and_nothing_else_passes() -> None:
    scheduler, said = Scheduler(1), []
    began = scheduler.now

    def sleeper(seconds: float) -> None:
        scheduler.wait(lambda: False, seconds)
        said.append((seconds, scheduler.now - began))

    for seconds in (5.0, 1000.0, 0.25):
        scheduler.spawn(lambda seconds=seconds: sleeper(seconds), "sleeper", "site-1")
    assert scheduler.wait(lambda: len(said) == 3, 5000.0)
    assert said == [(0.25, 0.25), (5.0, 5.0), (1000.0, 1000.0)]
    scheduler.stop()


def test_whoever_died_never_goes_on_and_whoever_stands_still_goes_on_later() -> None:
    scheduler, said = Scheduler(1), []
    for owner in ("dead", "still", "well"):
        scheduler.spawn(lambda owner=owner: scheduler.wait(lambda: False, 1.0) or said.append(owner), owner, owner)
    scheduler.at(0.5, lambda: scheduler.kill("dead"))
    scheduler.at(0.5, lambda: scheduler.stall("still", 60.0))
    assert not scheduler.wait(lambda: len(said) == 3, 100.0)
    assert said == ["well", "still"]
    scheduler.stop()


def test_a_wait_without_end_is_a_deadlock() -> None:
    scheduler = Scheduler(1)
    with pytest.raises(Stopped):
        scheduler.wait(lambda: False)
    assert isinstance(scheduler.failure, Deadlock) and "observer" in str(scheduler.failure)


def test_a_wait_in_real_time_ends_the_run_and_is_named() -> None:
    scheduler, released = Scheduler(1), threading.Event()

    def waits_for_the_system() -> None:
        released.wait(600.0)

    scheduler.spawn(waits_for_the_system, "hasty", "site-1")
    try:
        with pytest.raises(Stopped), guarded(scheduler, most_s=1, tick_s=0.05):
            scheduler.wait(lambda: False, 10.0)
    finally:
        released.set()
    assert isinstance(scheduler.failure, StandsStill) and "waits_for_the_system" in str(scheduler.failure)


def test_a_database_that_another_holds_is_waited_for_in_virtual_time(tmp_path: Path) -> None:
    scheduler, path = Scheduler(1), tmp_path / "memory.sqlite"
    began = scheduler.now
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    mine = _connect_of(scheduler)(str(path), timeout=120.0, isolation_level=None)
    scheduler.at(100.0, lambda: holder.execute("COMMIT") and None)
    mine.execute("BEGIN IMMEDIATE")
    assert 100.0 <= scheduler.now - began < 101.0 and scheduler.failure is None
    scheduler.wait(lambda: False, 1.0)
    assert isinstance(scheduler.failure, WaitsWithMemory), "nobody may wait while he holds it"
    mine.close()
    scheduler.stop()
