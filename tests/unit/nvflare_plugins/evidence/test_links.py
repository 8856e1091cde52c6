"""Attempts that are left out of a job's evidence: each log names its party's log of the attempt before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvflare_plugins.evidence.format import SERVER, Earlier, export_name, read_chain
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.evidence.reader import before_attempt, earlier_log, read_log
from nvflare_plugins.evidence.verification import Verification, verify_files
from tests.support.evidence_attempts import SITES, Attempt, ToyAuthority, complete_attempt, rewrite

PARTIES = (*SITES, SERVER)


def check(*folders: Path) -> Verification:
    return verify_files(sorted(path for folder in folders for path in folder.rglob("*.jsonl")), ToyAuthority())


def links(folder: Path) -> Mapping[str, Earlier]:
    """Return what the parties find on their disks: their logs of the attempt before."""
    found = {party: list(read_chain(folder / export_name(party))) for party in PARTIES}
    return {party: Earlier(chain[0][0]["attempt"], chain[-1][1].hex()) for party, chain in found.items()}


def aborted(folder: Path, **options) -> Path:
    """Write the evidence of an attempt that ended after sums had been opened."""
    attempt = Attempt(folder, signed=True, **options)
    attempt.open_session()
    attempt.round(0)
    for log in attempt.logs.values():
        log.end("aborted", "site-2 was lost")
    return attempt.close()


def job(folder: Path, earlier=links) -> list[Path]:
    """Write a job of three attempts, of which the last completes it."""
    one = aborted(folder / "one", attempt="a1")
    two = aborted(folder / "two", attempt="a2", number=2, earlier=earlier(one))
    return [one, two, complete_attempt(folder / "three", signed=True, attempt="a3", number=3, earlier=earlier(two))]


def test_a_whole_job_of_several_attempts_holds_and_one_attempt_needs_no_other(tmp_path):
    folders = job(tmp_path)
    result = check(tmp_path)
    assert result.sound and not result.notes
    assert [log.number for attempt in result.attempts for log in attempt.logs] == [1] * 4 + [2] * 4 + [3] * 4
    alone = complete_attempt(tmp_path / "alone", job_id="other", signed=True)
    assert check(alone).sound and not check(alone).notes
    assert len(folders) == 3


@pytest.mark.parametrize(("shown", "missing"), [((1, 2), "a1"), ((0, 2), "a2"), ((2,), "a2")])
def test_an_attempt_that_is_left_out_is_named(tmp_path, shown, missing):
    folders = job(tmp_path)
    failures = check(*(folders[i] for i in shown)).failures
    assert len(failures) == 4  # of three sites and the server
    assert all("follows an attempt that is left out" in text and f"attempt {missing} " in text for text in failures)


@pytest.mark.parametrize("party", ["site-2", SERVER])
def test_a_log_of_one_party_that_is_left_out_is_named(tmp_path, party):
    folders = job(tmp_path)
    (folders[0] / export_name(party)).unlink()
    assert any(f"the log of {party} of attempt a1 is not here" in text for text in check(tmp_path).failures)


def test_a_tampered_link_breaks_the_signatures_and_a_rewritten_log_the_link(tmp_path):
    folders = job(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")

    def forget(records: list[dict]) -> None:
        records[0].update(number=1, earlier_attempt=None, earlier_digest=None)

    for path in folders[2].glob("*.jsonl"):
        rewrite(path, forget)
    result = check(folders[2])
    assert not result.sound and any("does not verify" in text for text in result.attempts[0].failures)
    # The log of the attempt before, written anew.
    rewrite(tmp_path / "copy" / "one" / export_name("site-2"), lambda records: records[-2].update(reason="another"))
    failures = check(tmp_path / "copy").failures
    assert len(failures) == 1 and "site-2 of attempt a1 than the one here" in failures[0]


def test_a_party_that_has_lost_its_log_says_so_and_the_others_still_name_the_attempt(tmp_path):
    def lost(folder: Path) -> Mapping[str, Earlier]:
        return {party: link for party, link in links(folder).items() if party != "site-3"}

    folders = job(tmp_path, lost)
    result = check(tmp_path)
    assert result.sound and len(result.notes) == 2
    assert all("site-3 says that it has no log of one before" in text for text in result.notes)
    assert len(check(folders[2]).failures) == 3


def test_a_log_that_was_cut_on_the_disk_is_named_as_such_and_one_that_was_cut_before_it_was_handed_in_fails(tmp_path):
    one = aborted(tmp_path / "one", attempt="a1")
    whole = links(one)
    chain = list(read_chain(one / export_name("site-1")))
    cut = {**whole, "site-1": Earlier("a1", chain[4][1].hex())}
    complete_attempt(tmp_path / "two", signed=True, attempt="a2", number=2, earlier=cut)
    result = check(tmp_path)
    assert result.sound and [text for text in result.notes if "site-1 has less of its log of attempt a1" in text]
    lines = (one / export_name("site-2")).read_bytes().splitlines(keepends=True)
    (one / export_name("site-2")).write_bytes(b"".join(lines[:5]))
    assert any("site-2 of attempt a1 than the one here" in text for text in check(tmp_path).failures)


def test_numbers_that_cannot_be_are_named(tmp_path):
    one = aborted(tmp_path / "one", attempt="a1")
    complete_attempt(tmp_path / "two", signed=True, attempt="a2")
    assert any("attempts a1 and a2 both have number 1" in text for text in check(tmp_path).failures)
    complete_attempt(tmp_path / "late" / "two", signed=True, attempt="a2", number=2, earlier=links(one))
    shutil.copytree(one, tmp_path / "late" / "one")
    for path in (tmp_path / "late" / "one").glob("*.jsonl"):
        rewrite(path, lambda records: records[0].update(number=2))
    assert any("both have number 2" in text for text in check(tmp_path / "late").failures)


def test_sites_that_were_told_different_numbers_are_not_of_one_attempt(tmp_path):
    folder = complete_attempt(tmp_path)
    rewrite(folder / export_name("site-2"), lambda records: records[0].update(number=2))
    assert any("different numbers" in text for attempt in check(folder).attempts for text in attempt.failures)


def test_another_job_that_goes_on_with_a_model_names_no_log(tmp_path):
    """A job that continues another one's model is a job of its own; its first attempt has none before."""
    job(tmp_path / "first")
    complete_attempt(tmp_path / "second", job_id="next", signed=True)
    files = sorted(tmp_path.rglob("*.jsonl"))
    assert verify_files(files, ToyAuthority(), "next").sound
    assert verify_files(files, ToyAuthority(), "job").sound


def put(run: Path, number: int, attempt: str, content: bytes | None = None) -> bytes:
    """Write a log where it is put aside before an attempt; return its bytes."""
    path = run / before_attempt(number) / export_name("site-1")
    log = EvidenceLog(path, "site-1", "job", attempt, "masks")
    log.end("aborted", "another site")
    log.close()
    if content is not None:
        path.write_bytes(content)
    return path.read_bytes()


def test_a_site_finds_its_last_log_whatever_attempts_it_missed(tmp_path):
    assert earlier_log(tmp_path, "site-1") is None
    put(tmp_path, 2, "a1")
    put(tmp_path, 10, "a9")
    digest = read_log(tmp_path / before_attempt(10) / export_name("site-1")).digests[-1].hex()
    assert earlier_log(tmp_path, "site-1") == Earlier("a9", digest)
    assert earlier_log(tmp_path, "site-2") is None


@pytest.mark.parametrize("tail", [b"", b'{"type":"se', b"\x00" * 70])
def test_of_a_file_that_was_cut_the_last_whole_line_counts(tmp_path, tail):
    whole = put(tmp_path, 2, "a1")
    lines = whole.splitlines(keepends=True)
    path = tmp_path / before_attempt(2) / export_name("site-1")
    path.write_bytes(b"".join(lines[:2]) + tail)
    chain = list(read_chain_of(lines[:2], tmp_path))
    assert earlier_log(tmp_path, "site-1") == Earlier("a1", chain[-1][1].hex())


def read_chain_of(lines: list[bytes], folder: Path):
    (folder / "lines").write_bytes(b"".join(lines))
    return read_chain(folder / "lines")


@pytest.mark.parametrize("content", [b"", b"\n", b"no log\n", b'{"n":0}\n', b"\x00" * 5000])
def test_a_file_of_which_nothing_can_be_read_is_as_good_as_lost(tmp_path, content):
    put(tmp_path, 3, "a2", content)
    assert earlier_log(tmp_path, "site-1") is None
    put(tmp_path, 2, "a1")
    assert earlier_log(tmp_path, "site-1").attempt == "a1"
