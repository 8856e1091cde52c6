"""The ledger in one process: budgets, plans, replays and refusals. Its file: test_ledger_file.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dp_components import accounting
from dp_components.errors import PrivacyRefusal, SecondOpinionDiffers, UnknownEvent
from dp_components.events import (
    ConcentratedEvent,
    DisjointPartEvent,
    ExponentialEvent,
    GaussianEvent,
    LaplaceEvent,
    LocalRandomisedResponseEvent,
    NeighbouringRelation,
    Release,
    RepeatedEvent,
)
from dp_components.ledger import Budget, Ledger, LedgerIdentity, ledger_files
from dp_components.mechanisms import gaussian_event
from dp_components.sensitivity import Norm, Sensitivity, clip_logistic_rows
from tests.support.calibration import noise_multiplier_for
from tests.support.ledgers import BUDGET, EVENT, IDENTITY, ROW, make, never


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
    coarse = Sensitivity(4.0, Norm.L2, ROW, (1.0, 3.33))
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
    monkeypatch.setattr(accounting, "_opinions", lambda *arguments: (0.1, 0.1))
    with pytest.raises(SecondOpinionDiffers):
        gaussian.open_job("a", GaussianEvent(20.0, ROW))
    ledger.open_job("a", EVENT)
    monkeypatch.undo()
    gaussian.open_job("a", GaussianEvent(20.0, ROW))
    monkeypatch.setattr(accounting, "_opinions", lambda *arguments: (10.0, 10.0))
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


def test_a_lowered_budget_stops_open_jobs_and_a_raised_one_lets_them_go_on(ledger: Ledger, folder: Path) -> None:
    ledger.open_job("a", RepeatedEvent(EVENT, 3))
    ledger.release("a", "tree 0", make())
    Ledger.open(folder, IDENTITY, Budget(0.3, 1e-6, pure_epsilon=0.3))
    with pytest.raises(PrivacyRefusal, match="lowered"):
        ledger.release("a", "tree 1", make())
    Ledger.open(folder, IDENTITY, BUDGET)
    ledger.release("a", "tree 1", make())


@pytest.mark.parametrize("query", ["", "line\nbreak", "x" * 301, "ü"])
def test_queries_are_printable(ledger: Ledger, query: str) -> None:
    ledger.open_job("a", EVENT)
    with pytest.raises(ValueError, match="printable"):
        ledger.release("a", query, never)
