"""The ledger on the disk: its identity, damage, a missing end, and what closing leaves. Crashes: tests/property."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from dp_components import ledger as ledger_module
from dp_components.accounting import compose, count_events
from dp_components.errors import LedgerDamaged, PrivacyRefusal
from dp_components.events import (
    LaplaceEvent,
    NeighbouringRelation,
    RepeatedEvent,
    event_document,
)
from dp_components.ledger import (
    ClosedJob,
    Head,
    Journal,
    Ledger,
    LedgerIdentity,
    ledger_files,
    summarise_closed,
)
from tests.support.ledgers import BUDGET, EVENT, IDENTITY, ROW, make, never


@pytest.mark.parametrize(
    "identity",
    [
        LedgerIdentity("site-1", "credit", NeighbouringRelation.REPLACE_ROW),
        LedgerIdentity("site-2", "credit", ROW),
    ],
)
def test_a_ledger_keeps_its_identity(ledger: Ledger, folder: Path, identity: LedgerIdentity) -> None:
    with pytest.raises(PrivacyRefusal, match="another"):
        Ledger.open(folder, identity, BUDGET)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\\b", "x" * 200])
def test_names_that_are_not_file_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name of a data set"):
        Ledger.open(folder, LedgerIdentity("site-1", name, ROW), BUDGET)


def test_closing_deletes_replies_and_keeps_the_costs_of_all_jobs(ledger: Ledger, folder: Path) -> None:
    for job in ("a", "b"):
        ledger.open_job(job, RepeatedEvent(EVENT, 2))
        ledger.release(job, "tree 0", make(123456789))
    ledger.close_job("a")
    records = [json.loads(line) for line in ledger_files(folder)[0].read_text().splitlines()]
    assert [(r["record"], r.get("job")) for r in records] == [
        ("ledger", None),
        ("budget", None),
        ("head", None),
        ("history", None),
        ("open", "b"),
        ("release", "b"),
    ]
    assert list(records[3]["jobs"]) == ["a"]
    np.testing.assert_array_equal(ledger.release("b", "tree 0", never), [123456789, -123456789])
    assert Ledger.open(folder, IDENTITY, BUDGET).spent().pure_epsilon == 0.5


def test_another_process_that_rewrote_the_file_is_followed(ledger: Ledger, folder: Path) -> None:
    other = Ledger.open(folder, IDENTITY, BUDGET)
    for round_number in range(3):
        job = f"job {round_number}"
        ledger.open_job(job, EVENT)
        other.release(job, "tree", make(round_number))
        np.testing.assert_array_equal(ledger.release(job, "tree", never), [round_number, -round_number])
        ledger.close_job(job)
        with pytest.raises(PrivacyRefusal, match="not open"):
            other.release(job, "tree", never)
        assert other.spent().pure_epsilon == ledger.spent().pure_epsilon == 0.25 * (round_number + 1)


def test_files_are_private_and_readable_by_a_person(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", EVENT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "heads").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    text = ledger.describe()
    assert "Data set credit at site-1" in text and "epsilon 1 at delta 1e-06" in text and "open" in text


def edited(lines: list[bytes], line: int, old: bytes, new: bytes) -> list[bytes]:
    assert old in lines[line]
    return [text.replace(old, new) if i == line else text for i, text in enumerate(lines)]


DAMAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a cheaper event": lambda lines: edited(lines, 3, b"0.25", b"0.05"),
    "a larger budget": lambda lines: edited(lines, 1, b'"epsilon": 1.0', b'"epsilon": 9.0'),
    "other spacing": lambda lines: edited(lines, 3, b'": ', b'":'),
    "a missing line": lambda lines: lines[:2] + lines[3:],
    "a missing first line": lambda lines: lines[1:],
    "lines in another order": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a line twice": lambda lines: [*lines, lines[-1]],
    "not JSON": lambda lines: [*lines, b"{]\n"],
    "not an object": lambda lines: [*lines, b"[]\n"],
    "an empty line": lambda lines: [*lines, b"\n"],
    "bytes that are no text": lambda lines: [*lines, b"\xff\xfe\n"],
    "deep nesting": lambda lines: [*lines, b"[" * 100_000 + b"\n"],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_stops_everything(ledger: Ledger, folder: Path, damage: str) -> None:
    ledger.open_job("a", EVENT)
    ledger.release("a", "tree 0", make())
    path = ledger_files(folder)[0]
    path.write_bytes(b"".join(DAMAGE[damage](path.read_bytes().splitlines(keepends=True))))
    for _ in range(2):
        with pytest.raises(LedgerDamaged):
            Ledger.open(folder, IDENTITY, BUDGET)
    reader = Ledger(path)
    for _ in range(2):
        with pytest.raises(LedgerDamaged):
            reader.describe()


def test_records_that_do_not_follow_are_refused_although_their_checks_are_right(ledger: Ledger, folder: Path) -> None:
    """A forger who recomputes the checks is outside the threat model; a fault in this program is not."""
    good = json.loads(ledger_files(folder)[0].read_text().splitlines()[1])
    del good["check"]
    for record in (
        {"record": "release", "job": "a", "query": "q", "events": [], "shape": [0], "value": "", "at": "now"},
        {"record": "gift", "at": "now"},
        {"record": "interrupt", "job": "a", "at": "now"},
        {"record": "resume", "job": "a", "at": "now"},
        {"record": "open", "job": "a", "plan": [], "can_resume": 1, "at": "now"},
        {"record": "ledger", "at": "now"},
        {**good, "extra": 1},
        {key: value for key, value in good.items() if key != "delta"},
        {**good, "epsilon": -1.0},
        {"record": "open", "job": "a", "plan": [{"count": -5, "event": "laplace"}], "at": "now"},
        {"record": "open", "job": "a", "plan": [{"count": 1, "event": "free"}], "at": "now"},
    ):
        other = Ledger.open(folder, LedgerIdentity("site-1", f"set{abs(hash(str(record)))}", ROW), BUDGET)
        with other._locked():
            other._journal.append(record)
        with pytest.raises(LedgerDamaged):
            Ledger(other._journal.path).describe()


@pytest.mark.parametrize("change", [{"record": "of the future"}, {"record": "budget", "new_field": 1}])
def test_what_a_newer_version_wrote_is_refused_by_name_and_nothing_is_lost(
    ledger: Ledger, folder: Path, change: dict
) -> None:
    ledger.open_job("a", EVENT)
    ledger.release("a", "tree 0", make(1))
    with ledger._locked():
        ledger._journal.append({"at": "2027-01-01T00:00:00+00:00", **change})
    (path,) = ledger_files(folder)
    newer = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerDamaged, match="a newer VeilBoost has written: then install that version again"):
            Ledger.open(folder, IDENTITY, BUDGET)
        assert path.read_bytes() == newer


def test_an_empty_or_missing_ledger_is_not_read_as_unspent(folder: Path) -> None:
    folder.mkdir()
    with pytest.raises(LedgerDamaged, match="empty"):
        Ledger(folder / "credit.ledger").describe()


def test_a_ledger_of_the_time_before_heads_is_read_gets_one_and_is_compacted(folder: Path) -> None:
    folder.mkdir()
    path = folder / "credit.ledger"
    events, journal = [{"count": 2, **event_document(EVENT)}], Journal(path)
    old = [
        {"record": "ledger", "version": 1, **asdict(IDENTITY), "relation": ROW.value, "at": "then"},
        {"record": "budget", **asdict(BUDGET), "at": "then"},
        {"record": "closed", "job": "a", "opened": "then", "spent": events, "n_releases": 2, "at": "then"},
        {"record": "open", "job": "b", "plan": events, "at": "then"},
    ]
    for record in old:
        journal.append(record)
    ledger = Ledger.open(folder, IDENTITY, BUDGET)
    assert ledger.spent().pure_epsilon == 0.5 and (folder / "heads" / "credit.head").exists()
    with pytest.raises(PrivacyRefusal, match="closed"):
        ledger.open_job("a", EVENT)
    ledger.close_job("b")
    kinds = [json.loads(line)["record"] for line in path.read_text().splitlines()]
    assert kinds == ["ledger", "budget", "head", "history"]
    again = Ledger.open(folder, IDENTITY, BUDGET)
    assert again.job_spent("a").pure_epsilon == 0.5 and again.job_spent("b").pure_epsilon == 0
    assert "closed" in again.describe()
    for job in ("a", "b"):
        with pytest.raises(PrivacyRefusal, match=r"is closed.*Submit it as a new job"):
            again.open_job(job, EVENT)


def test_a_cut_ledger_is_refused_and_the_loss_is_charged_once_accepted(ledger: Ledger, folder: Path) -> None:
    path = ledger_files(folder)[0]
    ledger.open_job("a", RepeatedEvent(EVENT, 2))
    whole = path.read_bytes()
    ledger.release("a", "tree 0", make())
    path.write_bytes(whole)
    for opened in (ledger, Ledger(path, folder / "heads")):
        with pytest.raises(LedgerDamaged, match=r"its end is missing.*--accept-cut"):
            opened.release("a", "tree 0", never)
    accepting = Ledger(path, folder / "heads")
    assert accepting.accept_cut().pure_epsilon == 0.25
    assert ledger.spent().pure_epsilon == 0.25
    ledger.release("a", "tree 0", make())
    assert Ledger.open(folder, IDENTITY, BUDGET).spent().pure_epsilon == 0.5
    with pytest.raises(PrivacyRefusal, match="lacks nothing"):
        accepting.accept_cut()


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{}",
        b"[]",
        b'{"position": [0, "x"], "following": null, "spent": []}',
        b'{"position": [9, "0123456789abcdef0123456789abcdef"], "following": null, "spent": [0, 0, -1, 0]}',
    ],
)
def test_a_lost_or_damaged_head_is_refused_and_then_costs_the_whole_budget(
    ledger: Ledger, folder: Path, content: bytes | None
) -> None:
    head, path = folder / "heads" / "credit.head", ledger_files(folder)[0]
    head.unlink() if content is None else head.write_bytes(content)
    with pytest.raises(LedgerDamaged, match=r"credit.head.*--accept-cut"):
        Ledger.open(folder, IDENTITY, BUDGET)
    Ledger(path, folder / "heads").accept_cut()
    again = Ledger.open(folder, IDENTITY, BUDGET)
    assert again.spent().pure_epsilon == 1.0 and not again.quote(EVENT).fits


def test_a_ledger_opened_without_its_head_can_be_read_but_not_written(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", EVENT)
    reader = Ledger(ledger_files(folder)[0])
    assert reader.spent().pure_epsilon == 0
    with pytest.raises(ValueError, match="head is kept elsewhere"):
        reader.close_job("a")
    ledger.close_job("a")


def test_a_charge_whose_head_cannot_be_written_is_handed_out_only_once_it_can(
    ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.open_job("a", EVENT)
    head = folder / "heads" / "credit.head"
    before = head.read_bytes()
    monkeypatch.setattr(Head, "write", lambda *arguments: (_ for _ in ()).throw(OSError("no space")))
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            ledger.release("a", "tree 0", make())
    monkeypatch.undo()
    assert head.read_bytes() == before
    np.testing.assert_array_equal(ledger.release("a", "tree 0", never), [7, -7])
    assert head.read_bytes() != before


def test_opening_costs_next_to_nothing_for_jobs_that_have_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 of them once took a third of a second; they are one record, and equal spendings are priced once."""
    ledger = Ledger.open(folder, IDENTITY, BUDGET)
    state = ledger._state
    number = state.closed.spending(count_events(LaplaceEvent(1e-5, ROW)))
    for i in range(10_000):
        state.closed.add(f"job-{i}", ClosedJob("then", "then", 1, number))
    with ledger._locked():
        position = ledger._journal.position
        records = summarise_closed(ledger._journal.read_all(), state)
        ledger._journal.rewrite(records, lambda after: ledger._write_head(position, after))
    priced = []
    monkeypatch.setattr(ledger_module, "compose", lambda events: priced.append(events) or compose(events))
    again = Ledger.open(folder, IDENTITY, BUDGET)
    assert again.spent().pure_epsilon == pytest.approx(0.1) and len(again._state.closed.jobs) == 10_000
    assert len(ledger_files(folder)[0].read_bytes().splitlines()) == 4
    assert again.quote(EVENT).fits and len(priced) == 2  # the spendings of all jobs once, and what is asked for


def test_a_ledger_removed_while_open_is_noticed(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", EVENT)
    os.unlink(ledger_files(folder)[0])
    with pytest.raises(LedgerDamaged, match="removed"):
        ledger.release("a", "tree 0", make())
