"""Budgets of predictions: charged before anything is answered, remembered by the disk, silent about rows."""

from __future__ import annotations

import stat
import threading

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.site.memory.prediction_budget import FOLDER, PredictionBudget
from nvflare_plugins.site.policy.policy import SitePolicy


def policy(folder, **rules) -> SitePolicy:
    limits = {"predictions_per_row": 2, "predictions_per_job": 5, **rules}
    return SitePolicy.from_dict({"vertical": limits}, workspace=folder, site="site-2")


def budget(folder, data_set: str = "people", **rules) -> PredictionBudget:
    """Open it anew, as every job does."""
    return PredictionBudget(policy(folder, **rules), data_set)


def test_rows_are_counted_over_jobs_in_any_order(tmp_path):
    budget(tmp_path).charge(["ann", "bob"])
    budget(tmp_path).charge(["cid", "ann"])
    with pytest.raises(PolicyRefusal, match=r"vertical.predictions_per_row"):
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
    with pytest.raises(PolicyRefusal, match=r"vertical.predictions_per_job"):
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


def test_files_are_private_and_hold_no_id(tmp_path):
    budget(tmp_path).charge(["a-very-secret-person"])
    folder = policy(tmp_path).registry / FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert len(files) == 3
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"a-very-secret-person" not in path.read_bytes()


def test_simultaneous_jobs_lose_no_charge(tmp_path):
    outcomes = []

    def charge() -> None:
        try:
            budget(tmp_path, predictions_per_row=7).charge(["ann", "bob"])
            outcomes.append(True)
        except PolicyRefusal:
            outcomes.append(False)

    threads = [threading.Thread(target=charge) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 3 + [True] * 7


def test_damage_is_noticed(tmp_path):
    budget(tmp_path).charge(["ann"])
    folder = policy(tmp_path).registry / FOLDER
    counts = next(folder.glob("*.npz"))
    content = counts.read_bytes()
    for damaged in (b"", b"nonsense", content[:-40]):
        counts.write_bytes(damaged)
        with pytest.raises(ConfigurationError):
            budget(tmp_path).charge(["bob"])
    np.savez(counts, keys=np.zeros(3, np.uint64), counts=np.zeros(2, np.int64))
    with pytest.raises(ConfigurationError):
        budget(tmp_path).charge(["bob"])
    counts.write_bytes(content)
    (folder / "key").write_bytes(b"short")
    with pytest.raises(ConfigurationError):
        budget(tmp_path)
    (folder / "key").unlink()
    with pytest.raises(ConfigurationError):
        budget(tmp_path)
