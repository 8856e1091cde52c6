"""The ledger in one process: budgets, plans, replays, refusals and its file. Crashes: tests/property."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dp_components import ledger_records
from dp_components.accounting import second_opinion
from dp_components.accounting.composition import compose, count_events
from dp_components.errors import LedgerDamaged, PrivacyRefusal, SecondOpinionDiffers, UnknownEvent
from dp_components.events import (
    ConcentratedEvent,
    DisjointPartEvent,
    Event,
    ExponentialEvent,
    GaussianEvent,
    LaplaceEvent,
    LocalRandomisedResponseEvent,
    Release,
    RepeatedEvent,
    event_document,
)
from dp_components.ledger import Budget, Ledger, LedgerIdentity, ledger_files
from dp_components.ledger_journal import Head, Journal
from dp_components.ledger_records import ClosedJob, budget_record, ledger_record, summarise_closed
from dp_components.mechanisms.gaussian import gaussian_event
from dp_components.neighbouring import NeighbouringRelation
from dp_components.sensitivity import clip_logistic_rows
from tests.support.calibration import noise_multiplier_for

ROW = NeighbouringRelation.ADD_OR_REMOVE_ROW
IDENTITY = LedgerIdentity("site-1", "credit", ROW)
EVENT = LaplaceEvent(0.25, ROW)
BUDGET = Budget(1.0, 1e-6, pure_epsilon=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "privacy"


@pytest.fixture
def ledger(folder: Path) -> Ledger:
    return Ledger.open(folder, IDENTITY, BUDGET)


def make(value: int = 7, event: Event = EVENT) -> Callable[[], Release]:
    return lambda: Release(np.array([value, -value]), event)


def never() -> Release:
    raise AssertionError("drawn although a reply was cached, or the job was refused")


def test_spending_adds_up_over_jobs_and_survives(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", RepeatedEvent(EVENT, 2))
    ledger.release("a", "tree 0", make())
    ledger.release("a", "tree 1", make())
    ledger.close_job("a")
    again = Ledger.open(folder, IDENTITY, BUDGET)
    assert again.spent().pure_epsilon == 0.5
    again.open_job("b", RepeatedEvent(EVENT, 2))
    with pytest.raises(PrivacyRefusal, match="would overdraw"):
        again.open_job("c", EVENT)
    assert ledger.job_spent("a").pure_epsilon == 0.5 and ledger.job_spent("b").pure_epsilon == 0


def test_a_refusal_names_the_part_that_is_too_much(folder: Path) -> None:
    """The whole epsilon of a total may be small although one part of the budget is overdrawn."""
    identity = LedgerIdentity("site-1", "large", ROW)
    ledger = Ledger.open(folder, identity, Budget(9.0, 1e-6, pure_epsilon=0.5))
    with pytest.raises(PrivacyRefusal, match=r"Too much: the Gaussian part \(mu\^2\) would be 4 of 2\.") as refusal:
        ledger.open_job("gaussian", GaussianEvent(0.5, ROW))
    assert "pure part" not in str(refusal.value)
    with pytest.raises(PrivacyRefusal, match=r"Too much: the pure part \(pure_epsilon\) would be 0.75 of 0.5\."):
        ledger.open_job("pure", RepeatedEvent(EVENT, 3))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 10.0, 30.0, 64.0])
def test_a_larger_budget_allows_whatever_a_smaller_one_does(folder: Path, epsilon: float) -> None:
    """Discrete noise once had a slack that counted 1 + e^epsilon times.

    A budget of 10 refused a job of 8, and raising it, as the refusal advised, made it worse.
    """
    multiplier = noise_multiplier_for(200, epsilon, 1e-6) * (1 + 1e-8)
    event = gaussian_event(128, clip_logistic_rows([0.5], [0.25]).sensitivity, multiplier, 2)
    for budget in (epsilon, min(1.25 * epsilon, 64.0), 64.0):
        ledger = Ledger.open(folder, LedgerIdentity("site-1", f"set{budget:g}", ROW), Budget(budget, 1e-6))
        assert ledger.quote(RepeatedEvent(event, 200)).fits


def test_an_open_job_holds_its_whole_plan_and_a_closed_one_what_it_spent(ledger: Ledger) -> None:
    ledger.open_job("a", RepeatedEvent(EVENT, 4))
    ledger.release("a", "tree 0", make())
    assert not ledger.quote(EVENT).fits
    ledger.close_job("a")
    assert ledger.quote(RepeatedEvent(EVENT, 3)).fits and not ledger.quote(RepeatedEvent(EVENT, 4)).fits


def test_a_quote_writes_nothing(ledger: Ledger, folder: Path) -> None:
    before = ledger_files(folder)[0].read_bytes()
    quote = ledger.quote(RepeatedEvent(EVENT, 5))
    assert not quote.fits and "epsilon 1.25" in quote.message and quote.plan.pure_epsilon == 1.25
    assert ledger_files(folder)[0].read_bytes() == before


def test_a_retry_gets_the_same_reply_at_no_charge(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", EVENT)
    first = ledger.release("a", "tree 0", make(11))
    first[0] = 99
    for other in (ledger, Ledger.open(folder, IDENTITY, BUDGET)):
        np.testing.assert_array_equal(other.release("a", "tree 0", never), [11, -11])
    assert ledger.spent().pure_epsilon == 0.25


def test_shapes_and_extremes_of_replies_are_kept(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", RepeatedEvent(EVENT, 3))
    values = {"deep": np.arange(24).reshape(2, 3, 4) - (1 << 62), "none": np.zeros((0, 3), int), "one": np.array(5)}
    for query, value in values.items():
        ledger.release("a", query, lambda value=value: Release(value, EVENT))
    for query, value in values.items():
        cached = Ledger.open(folder, IDENTITY, BUDGET).release("a", query, never)
        np.testing.assert_array_equal(cached, value)
        assert cached.shape == value.shape


def test_a_job_cannot_spend_more_than_its_plan(ledger: Ledger) -> None:
    ledger.open_job("a", EVENT)
    ledger.release("a", "tree 0", make())
    with pytest.raises(PrivacyRefusal, match="spent its plan"):
        ledger.release("a", "tree 0, drawn afresh after a crash", make())
    assert ledger.spent().pure_epsilon == 0.25
    with pytest.raises(PrivacyRefusal, match="would overdraw"):
        ledger.open_job("b", RepeatedEvent(EVENT, 4))


def test_a_dearer_release_than_planned_is_refused_before_it_is_handed_out(ledger: Ledger) -> None:
    ledger.open_job("a", EVENT)
    with pytest.raises(PrivacyRefusal, match="spent its plan"):
        ledger.release("a", "tree 0", make(event=LaplaceEvent(0.26, ROW)))
    assert ledger.spent().pure_epsilon == 0


def test_jobs_are_opened_once(ledger: Ledger) -> None:
    ledger.open_job("a", EVENT)
    ledger.open_job("a", EVENT)
    with pytest.raises(PrivacyRefusal, match="another plan"):
        ledger.open_job("a", RepeatedEvent(EVENT, 2))
    ledger.close_job("a")
    for refused in (
        lambda: ledger.open_job("a", EVENT),
        lambda: ledger.close_job("a"),
        lambda: ledger.release("a", "tree 0", never),
        lambda: ledger.release("unknown", "tree 0", never),
        lambda: ledger.job_spent("unknown"),
    ):
        with pytest.raises(PrivacyRefusal):
            refused()


def test_an_interrupted_job_holds_what_it_spent_and_goes_on_once_it_is_opened_again(
    ledger: Ledger, folder: Path
) -> None:
    plan = RepeatedEvent(EVENT, 4)
    ledger.open_job("a", plan, can_resume=True)
    ledger.release("a", "tree 0", make())
    ledger.interrupt_job("a")
    again = Ledger.open(folder, IDENTITY, BUDGET)
    assert again.quote(RepeatedEvent(EVENT, 3)).fits and not again.quote(RepeatedEvent(EVENT, 4)).fits
    assert "interrupted" in again.describe()
    for refused in (
        lambda: again.release("a", "tree 0", never),
        lambda: again.interrupt_job("a"),
        lambda: again.open_job("a", EVENT, can_resume=True),
    ):
        with pytest.raises(PrivacyRefusal):
            refused()
    again.open_job("b", EVENT)
    with pytest.raises(PrivacyRefusal, match="would overdraw"):
        again.open_job("a", plan, can_resume=True)
    again.close_job("b")
    again.open_job("a", plan, can_resume=True)
    assert again.release("a", "tree 0", never).tolist() == [7, -7]
    assert not again.quote(EVENT).fits
    again.interrupt_job("a")
    again.close_job("a")
    assert again.spent().pure_epsilon == 0.25


def test_interrupted_jobs_that_released_nothing_do_not_pile_up(ledger: Ledger) -> None:
    for number in range(20):
        ledger.open_job(f"job-{number}", RepeatedEvent(EVENT, 4), can_resume=True)
        ledger.interrupt_job(f"job-{number}")
    assert ledger.describe().count(" interrupted ") == 9
    assert "the latest 8 of such are kept. The next ones close the oldest, job-11: resume it" in ledger.describe()
    with pytest.raises(PrivacyRefusal, match=r"job-3 is closed.*only the latest 8 interrupted.*Submit it as a new job"):
        ledger.open_job("job-3", RepeatedEvent(EVENT, 4), can_resume=True)
    with pytest.raises(ValueError, match="does not end with its process"):
        ledger.open_job("both", EVENT, can_resume=True, ends_with_process=True)


def test_a_few_interrupted_jobs_are_kept_without_a_word(ledger: Ledger) -> None:
    for number in range(7):
        ledger.open_job(f"job-{number}", EVENT, can_resume=True)
        ledger.interrupt_job(f"job-{number}")
    assert "are kept" not in ledger.describe()


def test_interrupting_says_whether_it_was_done(ledger: Ledger, folder: Path) -> None:
    """Another process may go on with the job: whoever only looks on must not say that it was interrupted."""
    ledger.open_job("a", EVENT, can_resume=True)
    other = Ledger.open(folder, IDENTITY, BUDGET)
    assert other.interrupt_job("a") is False and " open " in other.describe()
    assert ledger.interrupt_job("a") is True and " interrupted " in other.describe()


def test_parts_of_the_budget_do_not_pay_for_each_other(folder: Path) -> None:
    ledger = Ledger.open(folder, IDENTITY, Budget(1.0, 1e-6, pure_epsilon=0.3))
    assert ledger.quote(LaplaceEvent(0.3, ROW)).fits and not ledger.quote(LaplaceEvent(0.31, ROW)).fits
    assert not ledger.quote(ConcentratedEvent(1e-6, ROW)).fits
    assert ledger.quote(GaussianEvent(8.0, ROW)).fits and not ledger.quote(GaussianEvent(4.0, ROW)).fits
    assert not ledger.quote([RepeatedEvent(EVENT, 1), ExponentialEvent(0.1, ROW)]).fits


def test_discrete_noise_on_too_coarse_a_grid_cannot_be_priced(folder: Path) -> None:
    fine = clip_logistic_rows([0.5], [0.25]).sensitivity
    coarse = clip_logistic_rows([0.5], [0.25], grid_bits=2).sensitivity
    gaussian = Ledger.open(folder, LedgerIdentity("site-1", "other", ROW), Budget(8.0, 1e-6))
    assert gaussian.quote(gaussian_event(32, fine, 3.0)).fits
    with pytest.raises(ValueError, match="finer grid"):
        gaussian.quote(gaussian_event(32, coarse, 3.0))


def test_a_person_with_several_rows(folder: Path) -> None:
    ledger = Ledger.open(folder, LedgerIdentity("site-1", "credit", ROW, rows_per_person=3), BUDGET)
    ledger.open_job("a", EVENT)
    ledger.release("a", "tree 0", make())
    assert ledger.spent().pure_epsilon == 0.75
    assert not ledger.quote(EVENT).fits
    assert "3 row(s) per person" in ledger.describe()


def test_rows_per_person_can_be_raised_and_price_the_past_but_not_lowered(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", EVENT)
    ledger.release("a", "tree 0", make())
    ledger.close_job("a")
    raised = Ledger.open(folder, LedgerIdentity("site-1", "credit", ROW, rows_per_person=3), BUDGET)
    assert ledger.spent().pure_epsilon == raised.spent().pure_epsilon == 0.75
    assert not raised.quote(EVENT).fits
    for n_rows in (1, 2):
        with pytest.raises(PrivacyRefusal, match=r"rows_per_person. Remedy: state 3"):
            Ledger.open(folder, LedgerIdentity("site-1", "credit", ROW, rows_per_person=n_rows), BUDGET)
    assert Ledger(ledger_files(folder)[0]).identity.rows_per_person == 3


def test_a_plan_on_which_two_accountants_disagree_is_not_opened(
    ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaussian = Ledger.open(folder, LedgerIdentity("site-1", "other", ROW), Budget(1.0, 1e-6))
    monkeypatch.setattr(second_opinion, "_autodp_epsilon", lambda *arguments: 0.1)
    with pytest.raises(SecondOpinionDiffers):
        gaussian.open_job("a", GaussianEvent(20.0, ROW))
    ledger.open_job("a", EVENT)
    monkeypatch.undo()
    gaussian.open_job("a", GaussianEvent(20.0, ROW))
    monkeypatch.setattr(second_opinion, "_autodp_epsilon", lambda *arguments: 10.0)
    with pytest.raises(SecondOpinionDiffers):
        gaussian.open_job("b", GaussianEvent(20.0, ROW))


def test_trees_on_disjoint_parts_are_charged_once(ledger: Ledger) -> None:
    parts = [DisjointPartEvent(EVENT, "ensemble 1", tree) for tree in range(8)]
    ledger.open_job("a", parts)
    for tree, event in enumerate(parts):
        ledger.release("a", f"tree {tree}", make(event=event))
    assert ledger.spent().pure_epsilon == 0.25
    with pytest.raises(PrivacyRefusal, match="spent its plan"):
        ledger.release("a", "tree 7 again", make(event=parts[7]))


def test_partitions_of_different_jobs_are_different_partitions(ledger: Ledger) -> None:
    for part, job in enumerate(("a", "b")):
        event = DisjointPartEvent(EVENT, "ensemble 1", part)
        ledger.open_job(job, event)
        ledger.release(job, "tree", make(event=event))
    assert ledger.spent().pure_epsilon == 0.5 and ledger.quote([]).held.pure_epsilon == 0.5


def test_a_release_that_is_not_of_integers_is_refused(ledger: Ledger) -> None:
    ledger.open_job("a", EVENT)
    with pytest.raises(TypeError, match="integers"):
        ledger.release("a", "tree 0", lambda: Release(np.array([0.5]), EVENT))  # type: ignore[arg-type]
    assert ledger.spent().pure_epsilon == 0


def test_unknown_events_and_other_relations_are_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownEvent):
        ledger.open_job("a", object())  # type: ignore[arg-type]
    other = LocalRandomisedResponseEvent(0.1, 2, NeighbouringRelation.CHANGE_VALUE)
    with pytest.raises(PrivacyRefusal, match="relation"):
        ledger.open_job("a", other)
    ledger.open_job("a", EVENT)
    with pytest.raises(PrivacyRefusal, match="relation"):
        ledger.release("a", "tree 0", make(event=other))
    with pytest.raises(UnknownEvent):
        ledger.release("a", "tree 0", make(event=object()))  # type: ignore[arg-type]
    assert ledger.spent().pure_epsilon == 0


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


def test_a_lowered_budget_stops_open_jobs_and_a_raised_one_lets_them_go_on(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", RepeatedEvent(EVENT, 3))
    ledger.release("a", "tree 0", make())
    Ledger.open(folder, IDENTITY, Budget(0.3, 1e-6, pure_epsilon=0.3))
    with pytest.raises(PrivacyRefusal, match="lowered"):
        ledger.release("a", "tree 1", make())
    Ledger.open(folder, IDENTITY, BUDGET)
    ledger.release("a", "tree 1", make())


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


def test_an_empty_or_missing_ledger_is_not_read_as_unspent(folder: Path) -> None:
    folder.mkdir()
    with pytest.raises(LedgerDamaged, match="empty"):
        Ledger(folder / "credit.ledger").describe()


def test_a_ledger_of_the_time_before_heads_is_read_gets_one_and_is_compacted(folder: Path) -> None:
    folder.mkdir()
    path = folder / "credit.ledger"
    events, journal = [{"count": 2, **event_document(EVENT)}], Journal(path)
    old = [
        {**ledger_record(IDENTITY), "at": "then"},
        {**budget_record(BUDGET), "at": "then"},
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
    monkeypatch.setattr(ledger_records, "compose", lambda events: priced.append(events) or compose(events))
    again = Ledger.open(folder, IDENTITY, BUDGET)
    assert again.spent().pure_epsilon == pytest.approx(0.1) and len(again._state.closed.jobs) == 10_000
    assert len(ledger_files(folder)[0].read_bytes().splitlines()) == 4
    assert again.quote(EVENT).fits and len(priced) == 1


def test_a_ledger_removed_while_open_is_noticed(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", EVENT)
    os.unlink(ledger_files(folder)[0])
    with pytest.raises(LedgerDamaged, match="removed"):
        ledger.release("a", "tree 0", make())


@pytest.mark.parametrize("query", ["", "line\nbreak", "x" * 301, "ü"])
def test_queries_are_printable(ledger: Ledger, query: str) -> None:
    ledger.open_job("a", EVENT)
    with pytest.raises(ValueError, match="printable"):
        ledger.release("a", query, never)
