"""What attempts of one job may say of their sites, and whose log may be missing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nvflare_plugins.evidence.reader import SITES_FACT, contradictions, ended_early, excused, lost_of, named

ALL, LEFT = ("site-1", "site-2", "site-3"), ("site-1", "site-3")


def logs(
    sites: tuple[str, ...],
    completed: bool,
    lost: tuple[str, ...] = (),
    of: tuple[str, ...] | None = None,
    codec: str = "MASKED",
    parts: tuple[str, ...] = (),
):
    message = SimpleNamespace(kind="AGREEMENT", private=True, codec=codec)
    rest = {"completed": completed, "messages": [message], "parts": parts}
    session = {"sites": sites, "protection": named(lost)}
    mine = [SimpleNamespace(site=one, session=session, **rest) for one in (of or sites)]
    return [*mine, SimpleNamespace(site="server", session=None, **rest)]


def test_the_lost_site_may_lack_a_log_of_what_was_not_completed_and_nobody_else() -> None:
    attempts = {("job", "a"): logs(ALL, False, of=LEFT), ("job", "b"): logs(LEFT, True, ("site-2",))}
    assert excused(attempts, "job") == {"site-2"} and not list(contradictions(attempts))
    assert not excused(attempts, "other")
    assert lost_of(attempts["job", "b"]) == {"site-2"} and named(()) == {} and SITES_FACT in named(("a",))


def test_an_attempt_that_was_not_completed_excuses_nobody() -> None:
    attempts = {("job", "a"): logs(ALL, False), ("job", "b"): logs(LEFT, False, ("site-2",))}
    assert not excused(attempts, "job")


@pytest.mark.parametrize(
    ("attempts", "match"),
    [
        ({("job", "b"): logs(LEFT, True, ("site-3",))}, "a site of its own"),
        ({("job", "a"): logs(ALL, False), ("job", "b"): logs(LEFT, True)}, "does not say that it went on without"),
        ({("job", "b"): [*logs(LEFT, True, ("site-2",)), *logs(LEFT, True)]}, "do not say alike"),
        (
            {("job", "a"): logs(LEFT, False), ("job", "b"): logs(LEFT, True, ("site-9",))},
            "without sites that no attempt had",
        ),
    ],
)
def test_what_cannot_be_together_is_named(attempts, match) -> None:
    (text,) = contradictions(attempts)
    assert match in text


def test_a_job_that_waited_says_nothing() -> None:
    attempts = {("job", "a"): logs(ALL, False), ("job", "b"): logs(ALL, True)}
    assert not list(contradictions(attempts)) and not excused(attempts, "job")


def test_an_attempt_that_ended_before_any_sum_binds_no_later_one() -> None:
    later = {("job", "b"): logs(LEFT, True)}
    assert not list(contradictions({("job", "a"): logs(ALL, False, codec="SEALED"), **later}))
    assert list(contradictions({("job", "a"): logs(ALL, False), **later}))


def test_logs_of_an_attempt_may_be_missing_only_before_any_sum_and_beside_one_that_completed_the_job() -> None:
    early, begun, whole = logs(ALL, False, codec="SEALED"), logs(ALL, False), logs(ALL, True)
    assert ended_early({("job", "a"): early, ("job", "b"): whole}, "job", "a")
    assert not ended_early({("job", "a"): begun, ("job", "b"): whole}, "job", "a")
    told = logs(ALL, False, codec="SEALED", parts=("SCHEMA",))
    assert not ended_early({("job", "a"): told, ("job", "b"): whole}, "job", "a")
    assert not ended_early({("job", "a"): early, ("other", "b"): whole}, "job", "a")
    assert not ended_early({("job", "a"): logs(ALL, True, codec="SEALED")}, "job", "a")
