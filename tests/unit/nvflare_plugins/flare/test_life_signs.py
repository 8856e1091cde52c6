"""Silence is counted while one listens, and only then."""

from __future__ import annotations

from nvflare_plugins.flare.timeouts import LONGEST_STEP_S, LifeSigns
from tests.support.threads import in_threads


def signs() -> tuple[LifeSigns, list[float]]:
    now = [50.0]
    return LifeSigns(["a", "b"], lambda: now[0]), now


def test_silence_grows_until_a_sign_comes() -> None:
    life, now = signs()
    for second in range(1, 61):
        now[0] += 1.0
        assert life.silent_s("a") == second
    life.heard("a")
    assert life.silent_s("a") == 0.0 and life.silent_s("b") == 60.0
    assert life.has_begun("a") and not life.has_begun("b")


def test_a_pause_of_the_listener_does_not_count() -> None:
    life, now = signs()
    life.heard("a")
    now[0] += 10_000.0
    assert life.silent_s("a") == LONGEST_STEP_S


def test_many_threads_count_each_second_once() -> None:
    life, now = signs()
    for _ in range(20):
        now[0] += 1.0
        in_threads(life.silent_s, ["a"] * 8)
    assert life.silent_s("a") == 20.0
