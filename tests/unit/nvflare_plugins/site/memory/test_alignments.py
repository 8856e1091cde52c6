"""One alignment per set of ids, unless the site consents."""

from __future__ import annotations

import multiprocessing
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import REGISTRY_TEXT, DataRefusal, PolicyRefusal
from nvflare_plugins.site.memory.alignments import MOST_FAILURES, AlignmentRegistry
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy_values import Consents
from tests.support.memories import changed, told

IDS = [f"person-{number}".encode() for number in range(20)]
SITES = ("a", "b")


def registry(folder: Path, **consents: bool) -> AlignmentRegistry:
    return AlignmentRegistry(Memory(folder, "a"), Consents(**consents))


@pytest.mark.parametrize(
    ("name", "ids", "sites"),
    [
        ("people", IDS, SITES),  # the same again
        ("people", IDS, ("a", "c")),  # with another party
        ("people", [b"someone else"], SITES),  # the data set's content was replaced
        ("others", IDS[::-1], SITES),  # under another name
        ("others", [*IDS[:1], b"x"], SITES),  # one person in common
    ],
)
def test_a_second_alignment_of_the_same_people_is_refused(tmp_path, name, ids, sites):
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    with pytest.raises((PolicyRefusal, DataRefusal)) as refused:
        registry(tmp_path).reserve({name: ids}, "job-2", sites)
    reason = str(refused.value)
    if name == "others":  # that the ids are known depends on the ids: others read no more than that
        assert reason == REGISTRY_TEXT
        reason = refused.value.reason
    assert "in job job-1" in reason and "Policy key: consents.recompute_with_changes" in reason
    assert "person-" not in reason


def test_other_people_may_be_aligned(tmp_path):
    registry(tmp_path).reserve({"people": IDS, "test": [b"p", b"q"]}, "job-1", SITES)
    registry(tmp_path).reserve({"others": [b"x", b"y"]}, "job-2", SITES)


def test_consent_allows_it(tmp_path):
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    registry(tmp_path, recompute_with_changes=True).reserve({"people": IDS}, "job-2", SITES)
    with pytest.raises(PolicyRefusal):
        registry(tmp_path).reserve({"people": IDS}, "job-3", SITES)


def test_what_was_cancelled_does_not_count_and_what_was_refused_is_not_remembered(tmp_path):
    one = registry(tmp_path)
    one.cancel(one.reserve({"people": IDS}, "job-1", SITES))
    runs = one.reserve({"people": IDS}, "job-2", SITES)
    with pytest.raises(PolicyRefusal):
        one.reserve({"new": [b"new"], "people": IDS}, "job-3", SITES)
    one.cancel(runs)
    one.reserve({"new": [b"new"], "people": IDS}, "job-4", SITES)


def reserve_until_killed(folder: Path, sends: bool, started: Connection) -> None:
    one = registry(folder)
    runs = one.reserve({"people": IDS}, "killed", SITES)
    if sends:
        one.mark_sent(runs)
    started.send(None)
    time.sleep(600)


@pytest.mark.parametrize("sends", [False, True])
def test_what_a_killed_process_leaves_counts_only_if_something_may_have_left(tmp_path, sends):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=reserve_until_killed, args=(tmp_path, sends, sender))
    process.start()
    assert receiver.poll(120)
    with pytest.raises(PolicyRefusal, match="in job killed"):  # while it runs, sent or not
        registry(tmp_path).reserve({"people": IDS}, "beside", SITES)
    process.kill()
    process.join()
    after = registry(tmp_path)
    if sends:
        with pytest.raises(PolicyRefusal, match="in job killed"):
            after.reserve({"people": IDS[1:]}, "other ids", SITES)
    runs = after.reserve({"people": IDS}, "after", SITES)
    after.mark_sent(runs)
    after.finish(runs, has_result=True)
    killed = [("killed", 2)] if sends else []
    assert told(Memory(tmp_path, "a"), "SELECT job_id, is_sent FROM alignments") == [*killed, ("after", 1)]
    assert not list(tmp_path.rglob("*.alive"))


def fail(one: AlignmentRegistry, job_id: str, standing: bool = False) -> None:
    runs = one.reserve({"people": IDS}, job_id, SITES, standing=standing)
    one.mark_sent(runs)
    one.finish(runs, has_result=False)


def test_a_failed_alignment_does_not_use_up_a_set(tmp_path):
    one = registry(tmp_path)
    fail(one, "job-1")
    with pytest.raises(PolicyRefusal, match="try again with the same ids and sites"):
        one.reserve({"people": IDS[1:]}, "fewer ids", SITES)
    with pytest.raises(PolicyRefusal):
        one.reserve({"people": IDS}, "other sites", ("a", "c"))
    with pytest.raises(DataRefusal):
        one.reserve({"others": IDS[:1]}, "other name", SITES)
    runs = one.reserve({"people": IDS}, "job-2", SITES)
    one.mark_sent(runs)
    with pytest.raises(PolicyRefusal, match="wait until that job has ended"):
        registry(tmp_path).reserve({"people": IDS}, "beside", SITES)
    one.finish(runs, has_result=True)
    with pytest.raises(PolicyRefusal, match=r"use the alignment of that job .alignment='job-2'"):
        one.reserve({"people": IDS}, "job-3", SITES)


def test_trials_of_a_failing_alignment_come_to_an_end(tmp_path):
    """Each is a question: others may bring other ids to it."""
    one = registry(tmp_path)
    for number in range(MOST_FAILURES):
        fail(one, f"job-{number}")
    with pytest.raises(PolicyRefusal, match=r"has failed 3 times. Remedy: ask a to consent"):
        one.reserve({"people": IDS}, "once more", SITES)


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 11, 1, 3, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def test_a_standing_alignment_is_refreshed_once_a_day(tmp_path):
    clock = Clock()
    one = AlignmentRegistry(Memory(tmp_path, "a"), Consents(scoring=True), per_day=1, clock=clock)
    for night in range(3):
        ids = [*IDS[night:], f"new in night {night}".encode()]  # returning ones, too
        runs = one.reserve({"people": ids}, f"night-{night}", SITES, standing=True)
        one.mark_sent(runs)
        one.finish(runs, has_result=True)
        with pytest.raises(PolicyRefusal, match=r"scoring_alignments_per_day.*wait a day"):
            one.reserve({"people": ids}, "again", SITES, standing=True)
        clock.now += timedelta(days=1, seconds=1)
    with pytest.raises(PolicyRefusal):
        one.reserve({"people": IDS}, "training", SITES, standing=False)


def test_a_refresh_that_failed_may_be_tried_again_on_the_same_day(tmp_path):
    clock = Clock()
    one = AlignmentRegistry(Memory(tmp_path, "a"), Consents(scoring=True), per_day=1, clock=clock)
    one.finish(one.reserve({"people": IDS[1:]}, "yesterday", SITES, standing=True), has_result=True)
    clock.now += timedelta(days=1, seconds=1)
    fail(one, "night", standing=True)
    for ids, sites in ((IDS[2:], SITES), (IDS, ("a", "c"))):
        with pytest.raises(PolicyRefusal, match="scoring_alignments_per_day"):
            one.reserve({"people": ids}, "another question", sites, standing=True)
    for number in range(1, MOST_FAILURES):
        fail(one, f"trial-{number}", standing=True)
    with pytest.raises(PolicyRefusal, match="scoring_alignments_per_day"):
        one.reserve({"people": IDS}, "once more", SITES, standing=True)
    clock.now += timedelta(days=1, seconds=1)
    runs = one.reserve({"people": IDS}, "the next night", SITES, standing=True)
    one.mark_sent(runs)
    one.finish(runs, has_result=True)


def test_without_the_consent_there_is_no_standing_alignment(tmp_path):
    one = registry(tmp_path)
    one.finish(one.reserve({"people": IDS}, "job-1", SITES, standing=True), has_result=True)
    with pytest.raises(PolicyRefusal, match=r"consents.recompute_with_changes, consents.scoring"):
        one.reserve({"people": IDS}, "job-2", SITES, standing=True)


def test_a_reservation_whose_memory_was_replaced_is_not_sent(tmp_path):
    one = registry(tmp_path)
    runs = one.reserve({"people": IDS}, "job-1", SITES)
    changed(Memory(tmp_path, "a"), "DELETE FROM alignments")
    with pytest.raises(ConfigurationError, match="was replaced"):
        one.mark_sent(runs)


def test_the_mark_of_a_running_job_is_private_and_goes_with_it(tmp_path):
    one = registry(tmp_path)
    runs = one.reserve({"people": IDS}, "job-1", SITES)
    (mark,) = tmp_path.rglob("*.alive")
    assert mark.stat().st_mode & 0o777 == 0o600 and not mark.read_bytes()
    one.mark_sent(runs)
    one.finish(runs, has_result=True)
    assert not list(tmp_path.rglob("*.alive"))
    assert b"person-" not in Memory(tmp_path, "a").path.read_bytes()


def test_what_was_cancelled_leaves_no_hashes(tmp_path):
    one = registry(tmp_path)
    one.cancel(one.reserve({"people": IDS}, "job-1", SITES))
    assert told(Memory(tmp_path, "a"), "SELECT * FROM array_parts") == []


def test_hashes_differ_between_sites(tmp_path):
    found = set()
    for site in ("one", "two"):
        registry(tmp_path / site).reserve({"people": IDS}, "job-1", SITES)
        found |= set(told(Memory(tmp_path / site, "a"), "SELECT content FROM array_parts"))
    assert len(found) == 2


@settings(deadline=None)  # it writes files
@given(st.lists(st.binary(max_size=3), max_size=5), st.lists(st.binary(max_size=3), max_size=5))
def test_fingerprints_are_equal_for_equal_rows_only(tmp_path_factory, one, other):
    kept = registry(tmp_path_factory.getbasetemp() / "fingerprints")
    assert (kept.fingerprint(one) == kept.fingerprint(other)) == (one == other)


def test_a_person_can_read_it(tmp_path):
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    described = registry(tmp_path).describe()
    assert all(word in described for word in ("people", "20 ids", "reserved", "a, b, job-1", "1 alignment."))
