"""Budgets of predictions: charged before anything is answered, remembered by the disk, silent about rows."""

from __future__ import annotations

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.memory.store import PREDICTIONS, Memory, counted, load_counts, save_counts
from nvflare_plugins.site.policy import SitePolicy
from tests.support.threads import in_threads


def policy(folder, **rules) -> SitePolicy:
    limits = {"predictions_per_row": 2, "predictions_per_job": 5, **rules}
    return SitePolicy.from_dict({"vertical": limits}, workspace=folder, site="site-2")


def budget(folder, data_set: str = "people", **rules) -> PredictionBudget:
    """Open it anew, as every job does."""
    return PredictionBudget(policy(folder, **rules), data_set)


def test_rows_are_counted_over_jobs_in_any_order(tmp_path):
    budget(tmp_path).charge(["ann", "bob"])
    budget(tmp_path).charge(["cid", "ann"])
    with pytest.raises(PolicyRefusal, match=r"vertical\.predictions_per_row"):
        budget(tmp_path).charge(["dan", "ann"])
    budget(tmp_path).charge(["bob", "dan"])  # dan was not charged by the refused job
    budget(tmp_path).charge(["dan"])
    with pytest.raises(PolicyRefusal):
        budget(tmp_path).charge(["dan"])


def test_a_check_refuses_what_a_charge_would_and_spends_nothing(tmp_path):
    for _ in range(5):
        budget(tmp_path).check(["ann", "bob"])
    budget(tmp_path).charge(["ann", "ann"])
    budget(tmp_path).check(["bob"])
    for rows in (["ann"], [str(i) for i in range(6)]):
        with pytest.raises(PolicyRefusal):
            budget(tmp_path).check(rows)


def test_rows_of_one_job_are_limited(tmp_path):
    with pytest.raises(PolicyRefusal, match=r"vertical\.predictions_per_job"):
        budget(tmp_path).charge([str(i) for i in range(6)])
    budget(tmp_path).charge([str(i) for i in range(5)])


def test_a_row_that_comes_twice_counts_twice(tmp_path):
    budget(tmp_path).charge(["ann", "ann"])
    with pytest.raises(PolicyRefusal):
        budget(tmp_path).charge(["ann"])


def test_data_sets_have_budgets_of_their_own(tmp_path):
    budget(tmp_path).charge(["ann", "ann"])
    budget(tmp_path, "others").charge(["ann"])


def test_a_refusal_names_no_row_and_no_number(tmp_path):
    budget(tmp_path).charge(["ann-4711"] * 2)
    with pytest.raises(PolicyRefusal) as caught:
        budget(tmp_path).charge(["ann-4711", "bob", "cid"])
    assert "4711" not in str(caught.value) and "bob" not in str(caught.value)
    assert not any(digit in str(caught.value).replace("site-2", "") for digit in "0123456789")


def test_no_id_is_stored(tmp_path):
    budget(tmp_path).charge(["a-very-secret-person"])
    assert b"a-very-secret-person" not in Memory.open(policy(tmp_path)).path.read_bytes()


def test_simultaneous_jobs_lose_no_charge(tmp_path):
    outcomes = []

    def charge() -> None:
        try:
            budget(tmp_path, predictions_per_row=7).charge(["ann", "bob"])
            outcomes.append(True)
        except PolicyRefusal:
            outcomes.append(False)

    in_threads(lambda _: charge(), range(10))
    assert sorted(outcomes) == [False] * 3 + [True] * 7


@pytest.mark.parametrize("damage", ["one number more", "a count below none", "rows twice", "an array lost"])
def test_damage_is_noticed(tmp_path, damage):
    budget(tmp_path).charge(["ann", "bob"])
    memory = Memory.open(policy(tmp_path))
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
        budget(tmp_path).charge(["cid"])
