"""A site's ledger in one job: what is charged, what is replayed, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dp_components.accounting import compose
from dp_components.events import Release
from dp_components.ledger import Journal, Ledger
from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.training import Payment
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.site.policy import SitePolicy
from tests.support.private_federation import BUDGET, DATA, job_of
from tests.support.refusals import refused_for

SITES = ("site-1", "site-2", "site-3")
QUERY = "leaf sums of round 0; after 1234"


def place_in(folder: Path, job_id: str = "job") -> SiteContext:
    document = {"data_sets": {DATA: {"path": "rows.parquet", "privacy": BUDGET}}}
    policy = SitePolicy.from_dict(document, workspace=folder, site="site-1")
    return SiteContext("site-1", SITES, job_id, b"a" * 16, folder / "runs", policy, Identity.unsigned("site-1"))


def payment(folder: Path, job: PrivateTreesJob | None = None, job_id: str = "job", rows: bytes = b"rows") -> Payment:
    job = job or job_of(method="dp_tr_newton")
    return Payment(job, place_in(folder, job_id), JobPlan.of(job, 3), rows)


def ledger(folder: Path) -> Ledger:
    return Ledger(folder / "veilboost_ledgers" / "site-1" / f"{DATA}.ledger")


def maker(paid: Payment, value: int = 7):
    event = JobPlan.of(job_of(method="dp_tr_newton"), 3).releases.releases[0].event
    return lambda: Release(np.array([value]), event)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have no ledger be written from the call on."""

    def full(self: Journal, record: object) -> None:
        raise OSError("no space left")

    return lambda: monkeypatch.setattr(Journal, "append", full)


def test_a_query_is_charged_once_and_answered_alike(tmp_path: Path) -> None:
    first = payment(tmp_path)
    assert first.pay(QUERY, maker(first)).tolist() == [7]
    spent = ledger(tmp_path).spent()
    again = payment(tmp_path)  # the process died; the same job runs again
    assert again.pay(QUERY, maker(again, 8)).tolist() == [7]
    assert ledger(tmp_path).spent() == spent
    assert again.pay("leaf sums of round 1; after 5678", maker(again, 9)).tolist() == [9]
    assert ledger(tmp_path).spent().mu_squared == pytest.approx(2 * spent.mu_squared)


def test_the_quote_says_epsilon_at_the_jobs_delta_and_at_the_budgets(tmp_path: Path) -> None:
    job = job_of(method="dp_tr_newton")
    quote = payment(tmp_path, job).quote
    assert job.delta != BUDGET["delta"]
    at_budget, at_job = (quote.plan.epsilon(delta) for delta in (BUDGET["delta"], job.delta))
    assert f"it needs epsilon {at_budget:.4g};" in quote.message
    assert f"all at its delta {BUDGET['delta']:g}" in quote.message
    assert quote.message.endswith(f"At the job's delta {job.delta:g} it needs epsilon {at_job:.4g}.")
    assert at_job == pytest.approx(job.epsilon, rel=1e-3)


@pytest.mark.parametrize("job_id", ["job", "simulate_job"])
def test_a_second_job_of_a_name_is_told_what_helps(tmp_path: Path, job_id: str) -> None:
    """The simulator calls all jobs alike, so that submitting anew helps nobody there."""
    first = payment(tmp_path, job_id=job_id)
    first.pay(QUERY, maker(first))
    with refused_for("cannot be resumed") as of_rows:
        payment(tmp_path, job_id=job_id, rows=b"other")
    texts = [of_rows.value.reason]
    first.complete()
    for job in (job_of(method="dp_tr_newton"), job_of(method="dp_tr_newton", trust="trusted_aggregator")):
        with pytest.raises(PolicyRefusal, match=r"is closed.*Submit it as a new job|submit it anew") as refused:
            payment(tmp_path, job, job_id)
        texts.append(str(refused.value))
    assert {"takes one of that name: take a POC" in text for text in texts} == {job_id == "simulate_job"}


def test_a_job_on_other_rows_is_not_resumed(tmp_path: Path) -> None:
    first = payment(tmp_path)
    first.pay(QUERY, maker(first))
    with refused_for("are not those on which job job was begun"):
        payment(tmp_path, rows=b"other rows")


def test_a_job_among_other_sites_is_not_resumed(tmp_path: Path) -> None:
    """As many as before: the plan is the same. The server names the sites of an attempt."""
    job = job_of(method="dp_tr_newton")
    first = payment(tmp_path, job)
    first.pay(QUERY, maker(first))
    elsewhere = dataclasses.replace(place_in(tmp_path), sites=("site-1", "site-2", "site-4"))
    with refused_for("or the sites of the job, are not those on which job job was begun"):
        Payment(job, elsewhere, JobPlan.of(job, 3), b"rows")
    assert payment(tmp_path, job).pay(QUERY, maker(first, 8)).tolist() == [7]


def test_a_query_is_not_drawn_afresh_in_the_place_of_a_replay(tmp_path: Path) -> None:
    first = payment(tmp_path)
    first.pay(QUERY, maker(first))
    spent = ledger(tmp_path).spent()
    again = payment(tmp_path)
    with pytest.raises(JobAborted, match="asks for something else"):
        again.pay("leaf sums of round 0; after 5678", maker(again, 8))
    assert ledger(tmp_path).spent() == spent


def history_after(folder: Path, *states: str) -> bytes:
    """What a site tells whose ledger answered so many queries. Rows and shares are its own."""
    paid = payment(folder, rows=folder.name.encode())
    for number, state in enumerate(states):
        paid.pay(f"leaf sums of round {number}; after {state}", maker(paid))
    return payment(folder, rows=folder.name.encode()).history()


def test_sites_go_on_only_where_all_replay_the_same(tmp_path: Path) -> None:
    paid = payment(tmp_path / "mine")
    states = {"none": (), "one": ("a",), "two": ("a", "b"), "three": ("a", "b", "c"), "other": ("a", "x")}
    told = {name: history_after(tmp_path / name, *of_site) for name, of_site in states.items()}
    assert told["two"] == history_after(tmp_path / "elsewhere", *states["two"])
    for alike in (["none"] * 3, ["two"] * 3, ["two", "three", "two"], ["none", "one", "none"]):
        paid.begin([told[name] for name in alike])
    for mixed in (
        ["one", "three", "three"],
        ["none", "two", "two"],
        ["two", "other", "two"],
        ["one", "two", "other"],
        ["other", "three", "three"],
        ["one", "two", "three"],
    ):
        with pytest.raises(PolicyRefusal, match="drawn afresh at one site and replayed"):
            paid.begin([told[name] for name in mixed])
    with pytest.raises(ProtocolError):
        paid.begin([told["none"], b""])


def test_nothing_is_replayed_where_the_server_adds_the_noise(tmp_path: Path) -> None:
    job = job_of(method="dp_tr_newton", trust="trusted_aggregator")
    first = payment(tmp_path, job)
    first.pay(QUERY, maker(first))
    with pytest.raises(PolicyRefusal, match="noise is gone"):
        payment(tmp_path, job)
    assert " closed " in ledger(tmp_path).describe()
    anew = payment(tmp_path, job, "another")
    assert anew.pay(QUERY, maker(anew, 8)).tolist() == [8]


def test_an_unknown_event_is_never_free(tmp_path: Path) -> None:
    paid = payment(tmp_path)
    with pytest.raises(PolicyRefusal, match="not a known privacy event"):
        paid.pay(QUERY, lambda: Release(np.array([7]), "free"))  # type: ignore[arg-type]
    assert not any(ledger(tmp_path).spent().parts())


def test_no_more_is_paid_than_the_plan_reserved(tmp_path: Path) -> None:
    paid = payment(tmp_path)
    for number in range(8):
        paid.pay(f"leaf sums of round {number}; after 1", maker(paid))
    with pytest.raises(PolicyRefusal, match="has spent its plan"):
        paid.pay("leaf sums of round 8; after 1", maker(paid))


def test_a_ledger_that_cannot_be_written_lets_nothing_go(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    paid = payment(tmp_path)
    full_disk()
    with pytest.raises(JobAborted, match="cannot be written"):
        paid.pay(QUERY, maker(paid))


@pytest.mark.parametrize("end", [Payment.complete, Payment.abandon])
def test_a_job_whose_end_cannot_be_written_keeps_its_reservation_and_says_so(
    tmp_path: Path, full_disk: Callable[[], None], caplog: pytest.LogCaptureFixture, end: Callable[[Payment], None]
) -> None:
    paid = payment(tmp_path)
    paid.begin([paid.history()] * 3)
    full_disk()
    end(paid)
    assert "stays open in the ledger, which cannot be written (OSError)" in caplog.text
    assert " open " in ledger(tmp_path).describe()


def test_what_a_failed_attempt_leaves(tmp_path: Path) -> None:
    before = payment(tmp_path, job_id="before")  # a refusal elsewhere, before anything was released
    before.abandon()
    begun = payment(tmp_path, job_id="begun")
    begun.begin([begun.history()] * 3)
    begun.abandon()
    states = {line.split()[0]: line.split()[1] for line in ledger(tmp_path).describe().splitlines()[-2:]}
    assert states == {"before": "closed", "begun": "interrupted"}


def broken_off(folder: Path, job_id: str, n_released: int = 0, **changes: object) -> Payment:
    """A job that a submitter begins and aborts."""
    paid = payment(folder, job_of(method="dp_tr_newton", epsilon=2.9, **changes), job_id)
    paid.begin([paid.history()] * 3)
    for number in range(n_released):
        paid.pay(f"leaf sums of round {number}; after {number}", maker(paid))
    paid.abandon()
    return paid


def test_jobs_that_are_begun_and_broken_off_take_no_budget(tmp_path: Path) -> None:
    """Each held its whole plan, nearly all that the site's budget has, until somebody at the site gave it back."""
    for number in range(12):
        broken_off(tmp_path, f"attack-{number}")
    assert not any(ledger(tmp_path).spent().parts())
    assert sum(" interrupted " in line for line in ledger(tmp_path).describe().splitlines()) <= 9
    honest = payment(tmp_path, job_of(method="dp_tr_newton", epsilon=2.9), "honest")
    assert honest.pay(QUERY, maker(honest)).tolist() == [7]


def test_what_was_released_before_the_end_is_charged_and_nothing_else(tmp_path: Path) -> None:
    broken_off(tmp_path, "attack", 2)
    one = JobPlan.of(job_of(method="dp_tr_newton"), 3).releases.releases[0].event
    held = ledger(tmp_path).quote([]).held
    assert held == ledger(tmp_path).spent() == ledger(tmp_path).job_spent("attack")
    assert held.mu_squared == pytest.approx(2 * compose([one]).mu_squared)


def test_resuming_asks_for_the_rest_of_the_budget_anew(tmp_path: Path) -> None:
    broken_off(tmp_path, "first", 1)
    resumed = payment(tmp_path, job_of(method="dp_tr_newton", epsilon=2.9, resume_from="first"), "second")
    assert len(resumed._replays) == 1 and ledger(tmp_path).quote([]).held != ledger(tmp_path).spent()
    resumed.abandon()
    other = payment(tmp_path, job_of(method="dp_tr_newton", epsilon=2.0), "other")
    with pytest.raises(PolicyRefusal, match="would overdraw"):
        payment(tmp_path, job_of(method="dp_tr_newton", epsilon=2.9, resume_from="first"), "third")
    other.abandon()
    again = payment(tmp_path, job_of(method="dp_tr_newton", epsilon=2.9, resume_from="first"), "fourth")
    assert again.pay("leaf sums of round 0; after 0", lambda: pytest.fail("drawn afresh")).tolist() == [7]


def test_a_job_that_is_refused_for_its_rows_holds_nothing(tmp_path: Path) -> None:
    broken_off(tmp_path, "first", 1)
    for _ in range(2):
        with refused_for("are not those on which job first was begun"):
            payment(tmp_path, job_of(method="dp_tr_newton", epsilon=2.9, resume_from="first"), rows=b"other rows")
        assert ledger(tmp_path).quote([]).held == ledger(tmp_path).spent()


def test_a_failed_resumption_does_not_stop_the_job_that_runs(tmp_path: Path) -> None:
    running = payment(tmp_path, job_id="running")
    running.begin([running.history()] * 3)
    beside = payment(tmp_path, job_of(method="dp_tr_newton", resume_from="running"), "beside")
    beside.abandon()
    assert running.pay(QUERY, maker(running)).tolist() == [7]
