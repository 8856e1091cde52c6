"""Rows whose buckets were sent: two jobs at once send them under one name, or one of the jobs does not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from he_processors.errors import VeilBoostError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy, template
from tests.support.memories import told
from tests.support.refusals import refused_for

ROWS = {"one": ["Größe", "p1", "p2"], "two": ["p2", "p3"]}


@pytest.fixture
def policy(tmp_path: Path) -> SitePolicy:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template())
    return SitePolicy.load(tmp_path, "site-1")


def at_once(policy: SitePolicy, jobs: dict[str, tuple[str, list[str]]]) -> dict[str, VeilBoostError | None]:
    """Let jobs (name -> data set, rows) note their rows once all of them were allowed; return how each ended."""
    barrier = threading.Barrier(len(jobs))

    def take_part(job: str) -> VeilBoostError | None:
        data_set, ids = jobs[job]
        sent = SentRows(policy)
        sent.refuse(ids, data_set)
        barrier.wait()
        try:
            sent.note(job, ids, data_set)
        except VeilBoostError as error:
            return error
        return None

    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(take_part, jobs), strict=True))


def noted(policy: SitePolicy) -> set[str]:
    return {job for (job,) in told(Memory.open(policy), "SELECT job_id FROM sent_rows")}


def test_of_two_jobs_at_once_on_a_row_under_two_names_one_sends(policy: SitePolicy) -> None:
    outcomes = at_once(policy, {"a": ("one", ROWS["one"]), "b": ("two", ROWS["two"])})
    losers = [job for job, outcome in outcomes.items() if outcome is not None]
    assert len(losers) == 1 and isinstance(outcomes[losers[0]], DataRefusal), outcomes
    assert noted(policy) == set(outcomes) - set(losers)
    assert not SentRows(policy).sent(["p3" if losers == ["b"] else "p1"]).any()  # nothing of the loser is remembered


@pytest.mark.parametrize(
    "jobs",
    [
        {"a": ("one", ["p1", "p2"]), "b": ("one", ["p2", "p3"])},
        {"a": ("one", ["p1"]), "b": ("two", ["p2"])},
        {"a": ("one", []), "b": ("two", ["p2"])},
    ],
    ids=["one name", "other rows", "no rows"],
)
def test_jobs_that_do_not_meet_both_send(policy: SitePolicy, jobs: dict) -> None:
    assert at_once(policy, jobs) == {"a": None, "b": None}
    assert noted(policy) == {"a", "b"}


def test_the_refusal_is_that_of_a_row_and_tells_no_id(policy: SitePolicy) -> None:
    SentRows(policy).note("first", ["Größe"], "one")
    with refused_for("more of them than was paid for") as refusal:
        SentRows(policy).note("second", ["p1", "Größe"], "two")
    assert "Größe" not in refusal.value.reason
