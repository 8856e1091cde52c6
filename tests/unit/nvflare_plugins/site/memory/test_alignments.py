"""One alignment per set of ids, unless the site consents."""

from __future__ import annotations

import json
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
from nvflare_plugins.site.policy.values import Consents

IDS = [f"person-{number}".encode() for number in range(20)]
SITES = ("a", "b")


def registry(folder: Path, **consents: bool) -> AlignmentRegistry:
    return AlignmentRegistry(folder / "alignments", "a", Consents(**consents))


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
    document = json.loads((tmp_path / "alignments" / "alignments.json").read_text())
    assert [(run["job_id"], run["sent"]) for run in document["runs"]] == [("after", True)]
    assert not list(tmp_path.rglob("*.alive"))


@pytest.mark.parametrize("said", [None, 0, "", "no", True])
def test_only_what_says_that_it_sent_nothing_is_taken_back(tmp_path, said):
    """Entries of older versions say nothing; a damaged one must not be forgotten."""
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    path = tmp_path / "alignments" / "alignments.json"
    document = json.loads(path.read_text())
    document["runs"][0]["sent"] = said
    if said is None:
        del document["runs"][0]["sent"]
    path.write_text(json.dumps(document))
    for mark in tmp_path.rglob("*.alive"):
        mark.unlink()
    with pytest.raises(PolicyRefusal, match="in job job-1"):
        registry(tmp_path).reserve({"people": IDS}, "job-2", SITES)


@pytest.mark.parametrize("change", [lambda b: b[:-8], lambda b: b[:-3], lambda b: b + b"\0", lambda b: b + b[:8]])
def test_hashes_of_another_length_are_damage(tmp_path, change):
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    (file,) = (tmp_path / "alignments" / "ids").iterdir()
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigurationError, match="is damaged"):
        registry(tmp_path).reserve({"others": [b"x"]}, "job-2", SITES)


def test_files_are_private_and_hold_no_id(tmp_path):
    one = registry(tmp_path)
    runs = one.reserve({"people": IDS}, "job-1", SITES)
    (mark,) = tmp_path.rglob("*.alive")
    assert mark.stat().st_mode & 0o777 == 0o600 and not mark.read_bytes()
    one.mark_sent(runs)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in tmp_path.rglob("*") if path.is_dir())
    assert not any(b"person-" in path.read_bytes() for path in files)


def test_hashes_differ_between_sites(tmp_path):
    for site in ("one", "two"):
        registry(tmp_path / site).reserve({"people": IDS}, "job-1", SITES)
    hashes = {path.read_bytes() for path in tmp_path.rglob("*.u64")}
    assert len(hashes) == 2


@settings(deadline=None)  # it writes files
@given(st.lists(st.binary(max_size=3), max_size=5), st.lists(st.binary(max_size=3), max_size=5))
def test_fingerprints_are_equal_for_equal_rows_only(tmp_path_factory, one, other):
    kept = registry(tmp_path_factory.getbasetemp() / "fingerprints")
    assert (kept.fingerprint(one) == kept.fingerprint(other)) == (one == other)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"version": 2, "runs": []}', '{"version": 1, "runs": [{"job_id": "x"}]}']
)
def test_a_damaged_registry_is_not_taken_for_an_empty_one(tmp_path, content):
    one = registry(tmp_path)
    one.reserve({"people": IDS}, "job-1", SITES)
    (tmp_path / "alignments" / "alignments.json").write_text(content)
    with pytest.raises(ConfigurationError, match="Restore it from a backup"):
        one.reserve({"others": [b"x"]}, "job-2", SITES)


@pytest.mark.parametrize("lost", ["key", "ids"])
def test_lost_files_are_noticed(tmp_path, lost):
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    folder = tmp_path / "alignments"
    for path in [folder / "key"] if lost == "key" else (folder / "ids").iterdir():
        path.unlink()
    with pytest.raises(ConfigurationError, match="missing"):
        registry(tmp_path).reserve({"others": [b"x"]}, "job-2", SITES)


def test_the_file_can_be_read_by_a_person(tmp_path):
    registry(tmp_path).reserve({"people": IDS}, "job-1", SITES)
    run = json.loads((tmp_path / "alignments" / "alignments.json").read_text())["runs"][0]
    assert run["job_id"] == "job-1" and run["data_set"] == "people"
    assert run["n_ids"] == 20 and run["sites"] == ["a", "b"]
