"""Distinct bits of a row are counted before they leave, and what is on the record costs nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.site.memory.budgets import PredictionBudget, ScoringBudget
from nvflare_plugins.site.memory.released import SentRows
from nvflare_plugins.site.memory.store import PREDICTIONS, Memory, counted, load_counts, save_counts
from nvflare_plugins.site.policy import SitePolicy, template
from tests.support.memories import changed, told
from tests.support.refusals import refused_for
from tests.support.threads import in_threads

NAMES = ["ann", "bob", "cem"]
VALUES = np.array([[1, 2], [3, np.nan], [5, 6]], dtype=np.float32)
DAY = 24 * 3600.0
QUERY = "SELECT bits FROM scored_rows WHERE data_set = (SELECT id FROM scored_sets WHERE data_set = ?) ORDER BY bits"


def policy(folder: Path, **rules: int) -> SitePolicy:
    limits = {"scoring_bits_per_row": 25, "scoring_rows_per_day": 100, **rules}
    return SitePolicy.from_dict({"vertical": limits}, workspace=folder, site="site-2")


def budget(folder: Path, model: str = "m1", n_bits: int = 10, day: float = 0.0, data_set: str = "people", **rules: int):
    return ScoringBudget(policy(folder, **rules), data_set, model, n_bits, clock=lambda: day * DAY + 5)


def bits(folder: Path) -> list[int]:
    with Memory.open(policy(folder)).reading() as db:
        return [n for (n,) in db.execute(QUERY, (counted("people"),))]


def test_the_same_model_row_and_values_are_free(tmp_path: Path) -> None:
    for _ in range(5):
        budget(tmp_path).charge(NAMES, VALUES)
    assert bits(tmp_path) == [10, 10, 10]
    reordered = budget(tmp_path, day=3)
    reordered.charge(NAMES[::-1], VALUES[::-1])
    reordered.charge(["ann", "ann"], VALUES[[0, 0]])
    assert bits(tmp_path) == [10, 10, 10]
    # Another zero and another NaN are the same value.
    budget(tmp_path, data_set="other").charge(["x"], np.array([[0.0, np.nan]], np.float32))
    before = told(Memory.open(policy(tmp_path)), "SELECT COUNT(*) FROM scored_answers")
    budget(tmp_path, data_set="other").charge(["x"], np.array([[-0.0, -np.nan]], np.float32))
    assert told(Memory.open(policy(tmp_path)), "SELECT COUNT(*) FROM scored_answers") == before


def test_other_models_and_values_are_charged_up_to_the_cap_of_a_lifetime(tmp_path: Path) -> None:
    budget(tmp_path).charge(NAMES, VALUES)
    budget(tmp_path, "m2").charge(NAMES[:1], VALUES[:1])
    assert bits(tmp_path) == [10, 10, 20]
    with pytest.raises(PolicyRefusal, match=r"vertical.scoring_bits_per_row") as refused:
        budget(tmp_path, "m3", day=400).charge(NAMES, VALUES)
    assert "ann" not in str(refused.value)
    assert bits(tmp_path) == [10, 10, 20], "nothing is charged if one row must not be answered for"
    moved = VALUES + 1
    budget(tmp_path, day=2).charge(NAMES[1:], moved[1:])
    assert bits(tmp_path) == [20, 20, 20]
    budget(tmp_path, day=2).charge(NAMES, VALUES)  # what is on the record stays free


def test_a_clock_that_is_set_back_gives_no_day_again(tmp_path: Path) -> None:
    rules = {"scoring_rows_per_day": 3, "scoring_bits_per_row": 10**6}
    budget(tmp_path, "m0", day=10, **rules).charge(NAMES, VALUES)
    for model, day in (("m1", 9), ("m2", 0), ("m3", 10)):
        with pytest.raises(PolicyRefusal, match=r"scoring_rows_per_day"):
            budget(tmp_path, model, day=day, **rules).charge(NAMES[:1], VALUES[:1])
    budget(tmp_path, "m4", day=11, **rules).charge(NAMES, VALUES)


@pytest.mark.parametrize("seed", range(5))
def test_however_a_clock_goes_no_more_rows_than_days_that_it_has_first_shown(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    latest, n_days, n_charged = -1, 0, 0
    for number in range(60):
        day = int(random.integers(0, 12))
        try:
            budget(tmp_path, f"m{number}", 1, day, scoring_rows_per_day=5, scoring_bits_per_row=10**6).charge(
                NAMES[:2], VALUES[:2]
            )
        except PolicyRefusal:
            continue
        n_charged += 2
        if day > latest:
            latest, n_days = day, n_days + 1
        assert n_charged <= 5 * n_days


def test_rows_of_a_day_are_bounded_and_free_ones_do_not_count(tmp_path: Path) -> None:
    rules = {"scoring_rows_per_day": 4, "scoring_bits_per_row": 1000}
    budget(tmp_path, **rules).charge(NAMES, VALUES)
    budget(tmp_path, **rules).charge(NAMES, VALUES)
    with pytest.raises(PolicyRefusal, match=r"vertical.scoring_rows_per_day.*tomorrow"):
        budget(tmp_path, "m2", **rules).charge(NAMES, VALUES)
    budget(tmp_path, "m2", **rules).charge(NAMES[:1], VALUES[:1])
    budget(tmp_path, "m2", day=1, **rules).charge(NAMES, VALUES)


def test_checking_charges_nothing(tmp_path: Path) -> None:
    budget(tmp_path).check(NAMES, VALUES)
    assert bits(tmp_path) == []
    with pytest.raises(PolicyRefusal, match="predictions_per_job"):
        budget(tmp_path, predictions_per_job=2).check(NAMES, VALUES)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE scored_rows SET bits = bits - 5",
        "UPDATE scored_rows SET row = row - 1",
        "UPDATE scored_rows SET digest = zeroblob(8)",
        "UPDATE scored_rows SET bits = 'x'",
        "UPDATE scored_sets SET rows = -1",
    ],
)
def test_the_file_holds_no_name_and_damage_is_refused(tmp_path: Path, damage: str) -> None:
    budget(tmp_path).charge(NAMES, VALUES)
    memory = Memory.open(policy(tmp_path))
    assert not any(name.encode() in memory.path.read_bytes() for name in NAMES)
    open_one = budget(tmp_path, "m2")
    changed(memory, damage)
    with pytest.raises(ConfigurationError, match="Restore it from a backup"):
        budget(tmp_path, "m2")
    if "row -" not in damage:
        with pytest.raises(ConfigurationError, match="Restore it from a backup"):
            open_one.check(NAMES, VALUES)


def test_a_charge_writes_its_own_rows_alone(tmp_path: Path) -> None:
    """So that a million rows that were asked for before do not count: no statement touches their records."""
    names = [f"r{number}" for number in range(3000)]
    values = np.arange(6000, dtype=np.float32).reshape(-1, 2)
    ours = budget(tmp_path, scoring_rows_per_day=10_000)
    ours.charge(names, values)
    memory = Memory.open(policy(tmp_path))
    with memory.transaction() as db:
        before = db.total_changes
        ours._keep(db, ours._price(db, ["another"], VALUES[:1]))
        assert db.total_changes - before == 3  # an answer, a row, the day


def test_callers_at_the_same_time_spend_each_row_once(tmp_path: Path) -> None:
    many = [budget(tmp_path, f"m{number % 2}", scoring_bits_per_row=25) for number in range(8)]
    threads = [threading.Thread(target=one.charge, args=(NAMES, VALUES)) for one in many]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert bits(tmp_path) == [20, 20, 20]


# -- rows whose buckets were sent: two jobs at once send them under one name, or one does not --------------------------


ROWS = {"one": ["Größe", "p1", "p2"], "two": ["p2", "p3"]}


@pytest.fixture
def usual_policy(tmp_path: Path) -> SitePolicy:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "veilboost.json").write_text(template())
    return SitePolicy.load(tmp_path, "site-1")


def at_once(usual_policy: SitePolicy, jobs: dict[str, tuple[str, list[str]]]) -> dict[str, VeilBoostError | None]:
    """Let jobs (name -> data set, rows) note their rows once all of them were allowed; return how each ended."""
    barrier = threading.Barrier(len(jobs))

    def take_part(job: str) -> VeilBoostError | None:
        data_set, ids = jobs[job]
        sent = SentRows(usual_policy)
        sent.refuse(ids, data_set)
        barrier.wait()
        try:
            sent.note(job, ids, data_set)
        except VeilBoostError as error:
            return error
        return None

    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(take_part, jobs), strict=True))


def noted(usual_policy: SitePolicy) -> set[str]:
    return {job for (job,) in told(Memory.open(usual_policy), "SELECT job_id FROM sent_rows")}


def test_of_two_jobs_at_once_on_a_row_under_two_names_one_sends(usual_policy: SitePolicy) -> None:
    outcomes = at_once(usual_policy, {"a": ("one", ROWS["one"]), "b": ("two", ROWS["two"])})
    losers = [job for job, outcome in outcomes.items() if outcome is not None]
    assert len(losers) == 1 and isinstance(outcomes[losers[0]], DataRefusal), outcomes
    assert noted(usual_policy) == set(outcomes) - set(losers)
    assert (
        not SentRows(usual_policy).sent(["p3" if losers == ["b"] else "p1"]).any()
    )  # nothing of the loser is remembered


@pytest.mark.parametrize(
    "jobs",
    [
        {"a": ("one", ["p1", "p2"]), "b": ("one", ["p2", "p3"])},
        {"a": ("one", ["p1"]), "b": ("two", ["p2"])},
        {"a": ("one", []), "b": ("two", ["p2"])},
    ],
    ids=["one name", "other rows", "no rows"],
)
def test_jobs_that_do_not_meet_both_send(usual_policy: SitePolicy, jobs: dict) -> None:
    assert at_once(usual_policy, jobs) == {"a": None, "b": None}
    assert noted(usual_policy) == {"a", "b"}


def test_the_refusal_is_that_of_a_row_and_tells_no_id(usual_policy: SitePolicy) -> None:
    SentRows(usual_policy).note("first", ["Größe"], "one")
    with refused_for("more of them than was paid for") as refusal:
        SentRows(usual_policy).note("second", ["p1", "Größe"], "two")
    assert "Größe" not in refusal.value.reason


# -- predictions -------------------------------------------------------------------------------------------------------


def policy_of_predictions(folder, **rules) -> SitePolicy:
    limits = {"predictions_per_row": 2, "predictions_per_job": 5, **rules}
    return SitePolicy.from_dict({"vertical": limits}, workspace=folder, site="site-2")


def budget_of_predictions(folder, data_set: str = "people", **rules) -> PredictionBudget:
    """Open it anew, as every job does."""
    return PredictionBudget(policy_of_predictions(folder, **rules), data_set)


def test_rows_are_counted_over_jobs_in_any_order(tmp_path):
    budget_of_predictions(tmp_path).charge(["ann", "bob"])
    budget_of_predictions(tmp_path).charge(["cid", "ann"])
    with pytest.raises(PolicyRefusal, match=r"vertical\.predictions_per_row"):
        budget_of_predictions(tmp_path).charge(["dan", "ann"])
    budget_of_predictions(tmp_path).charge(["bob", "dan"])  # dan was not charged by the refused job
    budget_of_predictions(tmp_path).charge(["dan"])
    with pytest.raises(PolicyRefusal):
        budget_of_predictions(tmp_path).charge(["dan"])


def test_a_check_refuses_what_a_charge_would_and_spends_nothing(tmp_path):
    for _ in range(5):
        budget_of_predictions(tmp_path).check(["ann", "bob"])
    budget_of_predictions(tmp_path).charge(["ann", "ann"])
    budget_of_predictions(tmp_path).check(["bob"])
    for rows in (["ann"], [str(i) for i in range(6)]):
        with pytest.raises(PolicyRefusal):
            budget_of_predictions(tmp_path).check(rows)


def test_rows_of_one_job_are_limited(tmp_path):
    with pytest.raises(PolicyRefusal, match=r"vertical\.predictions_per_job"):
        budget_of_predictions(tmp_path).charge([str(i) for i in range(6)])
    budget_of_predictions(tmp_path).charge([str(i) for i in range(5)])


def test_a_row_that_comes_twice_counts_twice(tmp_path):
    budget_of_predictions(tmp_path).charge(["ann", "ann"])
    with pytest.raises(PolicyRefusal):
        budget_of_predictions(tmp_path).charge(["ann"])


def test_data_sets_have_budgets_of_their_own(tmp_path):
    budget_of_predictions(tmp_path).charge(["ann", "ann"])
    budget_of_predictions(tmp_path, "others").charge(["ann"])


def test_a_refusal_names_no_row_and_no_number(tmp_path):
    budget_of_predictions(tmp_path).charge(["ann-4711"] * 2)
    with pytest.raises(PolicyRefusal) as caught:
        budget_of_predictions(tmp_path).charge(["ann-4711", "bob", "cid"])
    assert "4711" not in str(caught.value) and "bob" not in str(caught.value)
    assert not any(digit in str(caught.value).replace("site-2", "") for digit in "0123456789")


def test_no_id_is_stored(tmp_path):
    budget_of_predictions(tmp_path).charge(["a-very-secret-person"])
    assert b"a-very-secret-person" not in Memory.open(policy_of_predictions(tmp_path)).path.read_bytes()


def test_simultaneous_jobs_lose_no_charge(tmp_path):
    outcomes = []

    def charge() -> None:
        try:
            budget_of_predictions(tmp_path, predictions_per_row=7).charge(["ann", "bob"])
            outcomes.append(True)
        except PolicyRefusal:
            outcomes.append(False)

    in_threads(lambda _: charge(), range(10))
    assert sorted(outcomes) == [False] * 3 + [True] * 7


@pytest.mark.parametrize("damage", ["one number more", "a count below none", "rows twice", "an array lost"])
def test_damage_is_noticed(tmp_path, damage):
    budget_of_predictions(tmp_path).charge(["ann", "bob"])
    memory = Memory.open(policy_of_predictions(tmp_path))
    with memory.transaction() as db:
        stored = load_counts(db, PREDICTIONS, counted("people"))
        if damage == "one number more":
            stored["counts"] = np.append(stored["counts"], 1)
        elif damage == "a count below none":
            stored["counts"][0] = -1
        elif damage == "rows twice":
            stored["keys"][:] = 7
        save_counts(db, PREDICTIONS, counted("people"), stored)
        if damage == "an array lost":
            db.execute("DELETE FROM row_counts WHERE name = 'counts'")
    with pytest.raises(ConfigurationError, match="Restore it from a backup"):
        budget_of_predictions(tmp_path).charge(["cid"])
