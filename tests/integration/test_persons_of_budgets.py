"""New persons are a data set with a budget of its own, and nobody is counted twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.kinds.private_trees import training as site_module
from nvflare_plugins.kinds.private_trees.plan import OwnRows
from nvflare_plugins.site.memory import store
from nvflare_plugins.site.memory.budgets import PersonsOfBudgets
from nvflare_plugins.site.memory.store import PERSONS, UNNAMED, Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.site.setup import budget_gaps
from tests.support.private_federation import BUDGET, DATA, PrivateFederation, frame_of, job_of

NEXT = "patients_09"


def two_months(folder: Path, returning: int, id_of_next: str | None = "person") -> PrivateFederation:
    """Give each site a second month, whose first persons are those of the first month."""
    frame = frame_of().assign(person=np.arange(900))
    federation = PrivateFederation(folder, frame)
    parts = np.array_split(np.arange(900), 3)
    later = pd.concat(
        [frame.iloc[rows].assign(person=rows + np.where(np.arange(300) < returning, 0, 10_000)) for rows in parts]
    )
    federation.give_data(NEXT, later)
    federation.set_policies(
        data_sets={
            DATA: {"path": f"{DATA}.parquet", "id": "person", "privacy": BUDGET},
            NEXT: {"path": f"{NEXT}.parquet", "privacy": BUDGET, **({"id": id_of_next} if id_of_next else {})},
        }
    )
    return federation


def rows_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list into which every site's number of rows goes."""
    found: list[int] = []

    def heard(columns: np.ndarray, label: np.ndarray, weights: np.ndarray | None) -> OwnRows:
        found.append(label.size)
        return OwnRows(columns, label, weights)

    monkeypatch.setattr(site_module, "OwnRows", heard)
    return found


def policy_of(federation: PrivateFederation, site: str = "site-1") -> SitePolicy:
    return SitePolicy.load(federation.workspace(site), site)


def features(**changes: object) -> dict:
    return {"features": ["x0", "x1", "x2", "x3", "colour"], **changes}


def test_persons_of_the_first_month_are_left_out_of_the_second(tmp_path: Path, monkeypatch) -> None:
    federation, used = two_months(tmp_path, returning=40), rows_used(monkeypatch)
    federation.run_private(job_of(**features()), "august").succeed()
    federation.run_private(job_of(**features(data_set=NEXT)), "september").succeed()
    assert used == [300] * 3 + [260] * 3
    # Nor does the first month take in those whom the second has paid for.
    federation.give_data(
        DATA, pd.read_parquet(federation.workspace("site-1") / f"{NEXT}.parquet"), [np.arange(300)] * 3
    )
    federation.set_policies(data_sets={DATA: {"path": f"{DATA}.parquet", "id": "person", "privacy": BUDGET}})
    federation.run_private(job_of(**features()), "again").succeed()
    assert sorted(used[6:]) == [40, 300, 300], "site-1 knows them, the others have never seen them"


def test_without_an_id_column_a_second_set_is_refused_before_it_is_read(tmp_path: Path) -> None:
    federation = two_months(tmp_path, returning=40, id_of_next=None)
    federation.run_private(job_of(**features()), "august").succeed()
    run = federation.run_private(job_of(**features(data_set=NEXT)), "september")
    assert isinstance(run.error("site-1"), PolicyRefusal) and f"data_sets.{NEXT}.id" in str(run.error("site-1"))
    assert not run.frames and not (federation.workspace("site-1") / "veilboost_ledgers" / "site-1" / NEXT).exists()


def test_what_a_job_reads_and_is_refused_belongs_to_nobody(tmp_path: Path) -> None:
    """Persons are noted when the price is reserved, so that a job beyond the budget moves nobody to its data set."""
    federation = two_months(tmp_path, returning=40)
    run = federation.run_private(job_of(**features(epsilon=50.0)), "dear")
    assert isinstance(run.error("site-1"), PolicyRefusal)
    policy = SitePolicy.load(federation.workspace("site-1"), "site-1")
    persons = PersonsOfBudgets(policy, policy.data_set(NEXT))
    assert persons.are_new(["1", "2", None]).all()


def test_rows_without_an_id_may_be_anybody(tmp_path: Path) -> None:
    federation = two_months(tmp_path, returning=40)
    policy = SitePolicy.load(federation.workspace("site-1"), "site-1")
    PersonsOfBudgets(policy, policy.data_set(DATA)).note(["1", "1", None, "2"])
    persons = PersonsOfBudgets(policy, policy.data_set(NEXT))
    assert persons.are_new(["1", "3", None]).tolist() == [False, True, False]
    assert PersonsOfBudgets(policy, policy.data_set(DATA)).are_new(["1", "3", None]).all()


def test_once_a_set_without_names_is_spent_on_all_others_are_refused(tmp_path: Path) -> None:
    """Whoever was in the first might be in the second, and the column of the second tells nobody who they are."""
    federation = two_months(tmp_path, returning=40, id_of_next=None)
    federation.run_private(job_of(**features(data_set=NEXT)), "august").succeed()
    run = federation.run_private(job_of(**features()), "september")
    assert isinstance(run.error("site-1"), PolicyRefusal) and f"data_sets.{DATA}.privacy" in str(run.error("site-1"))
    assert not run.frames
    federation.run_private(job_of(**features(data_set=NEXT)), "more").succeed()
    vouched = {DATA: {"path": f"{DATA}.parquet", "id": "person", "privacy": {**BUDGET, "own_persons": True}}}
    federation.set_policies(data_sets={**vouched, NEXT: {"path": f"{NEXT}.parquet", "privacy": BUDGET}})
    federation.run_private(job_of(**features()), "vouched").succeed()


def test_a_ledger_whose_persons_an_earlier_version_did_not_note_counts_as_without_names(tmp_path: Path) -> None:
    federation = two_months(tmp_path, returning=0)
    federation.run_private(job_of(**features()), "august").succeed()
    for site in federation.sites:
        with Memory.open(policy_of(federation, site)).transaction() as db:
            db.execute("DELETE FROM row_counts WHERE purpose IN (?, ?)", (PERSONS, UNNAMED))
    with pytest.raises(PolicyRefusal, match="does not know on whom"):
        PersonsOfBudgets(policy_of(federation), policy_of(federation).data_set(NEXT))
    federation.run_private(job_of(**features()), "again").succeed()
    with pytest.raises(PolicyRefusal, match="does not know on whom"):  # noting some now does not tell who was before
        PersonsOfBudgets(policy_of(federation), policy_of(federation).data_set(NEXT))


def test_one_person_of_another_set_is_known_whatever_the_hash(tmp_path: Path) -> None:
    """A single hash above 2^63 overflowed in NumPy 2.0, and every other key gives one."""
    for number in range(8):
        policy = policy_of(two_months(tmp_path / str(number), returning=0))
        PersonsOfBudgets(policy, policy.data_set(DATA)).note(["a"])
        assert PersonsOfBudgets(policy, policy.data_set(NEXT)).are_new(["a", "b"]).tolist() == [False, True]


def test_two_jobs_at_once_on_sets_without_names(tmp_path: Path) -> None:
    federation = two_months(tmp_path, returning=0, id_of_next=None)
    policy = policy_of(federation)
    named, unnamed = (PersonsOfBudgets(policy, policy.data_set(name)) for name in (DATA, NEXT))
    unnamed.note([])
    with pytest.raises(PolicyRefusal):
        named.note(["1"])
    PersonsOfBudgets(policy, policy.data_set(NEXT)).note([])


def test_a_set_without_rows_at_a_site_keeps_nobody_out(tmp_path: Path) -> None:
    federation = two_months(tmp_path, returning=0)
    policy = policy_of(federation)
    PersonsOfBudgets(policy, policy.data_set(DATA)).note([])
    assert PersonsOfBudgets(policy, policy.data_set(NEXT)).are_new(["1"]).all()


def test_set_up_says_which_budgets_will_shut_each_other_out(tmp_path: Path) -> None:
    federation = two_months(tmp_path, returning=0, id_of_next=None)
    policy = policy_of(federation)
    assert any(NEXT in line and "own_persons" in line for line in budget_gaps(policy))
    assert not list(budget_gaps(policy_of(two_months(tmp_path / "named", returning=0))))


def test_a_budget_under_a_name_that_no_ledger_can_have_is_said_at_once(tmp_path: Path) -> None:
    data_sets = {"Größe": {"path": "a.csv", "privacy": BUDGET}, "plain": {"path": "b.csv"}}
    policy = SitePolicy.from_dict({"data_sets": data_sets}, workspace=tmp_path, site="site-1")
    assert [line for line in budget_gaps(policy) if "'Größe' has a budget" in line]


def test_no_ledger_is_read_while_the_memory_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job holds a ledger as long as its disk takes: all jobs of the site would wait for it with this one."""
    federation = two_months(tmp_path, returning=0)
    federation.run_private(job_of(**features()), "august").succeed()
    policy, asked = policy_of(federation), []
    with Memory.open(policy).transaction() as db:
        db.execute("DELETE FROM row_counts WHERE purpose IN (?, ?)", (PERSONS, UNNAMED))
    monkeypatch.setattr(store, "_WAIT_S", 0.1)
    has_spent = PersonsOfBudgets._has_spent

    def read(persons: PersonsOfBudgets, name: str) -> bool:
        with Memory.open(policy).transaction():
            asked.append(name)
        return has_spent(persons, name)

    monkeypatch.setattr(PersonsOfBudgets, "_has_spent", read)
    PersonsOfBudgets(policy, policy.data_set(DATA)).note(["1"])
    assert DATA in asked
