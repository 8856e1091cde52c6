"""One alignment per set of ids, unless the site consents."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.failures import REGISTRY_TEXT, DataRefusal
from nvflare_plugins.site.memory.alignments import AlignmentRegistry
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy.values import Consents
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
    if sends:
        with pytest.raises(PolicyRefusal, match="in job killed"):
            registry(tmp_path).reserve({"people": IDS}, "after", SITES)
        return
    after = registry(tmp_path)
    after.mark_sent(after.reserve({"people": IDS}, "after", SITES))
    assert told(Memory(tmp_path, "a"), "SELECT job_id, is_sent FROM alignments") == [("after", 1)]
    assert not list(tmp_path.rglob("*.alive"))


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
