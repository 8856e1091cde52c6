"""Distinct bits of a row are counted before they leave, and what is on the record costs nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from he_processors.errors import ConfigurationError, PolicyRefusal
from nvflare_plugins.site.memory.schema import SCORED, counted, load_counts
from nvflare_plugins.site.memory.scoring_budget import ScoringBudget
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy.policy import SitePolicy
from tests.support.memories import changed, told

NAMES = ["ann", "bob", "cem"]
VALUES = np.array([[1, 2], [3, np.nan], [5, 6]], dtype=np.float32)
DAY = 24 * 3600.0


def policy(folder: Path, **rules: int) -> SitePolicy:
    limits = {"scoring_bits_per_row": 25, "scoring_rows_per_day": 100, **rules}
    return SitePolicy.from_dict({"vertical": limits}, workspace=folder, site="site-2")


def budget(folder: Path, model: str = "m1", n_bits: int = 10, day: float = 0.0, data_set: str = "people", **rules: int):
    return ScoringBudget(policy(folder, **rules), data_set, model, n_bits, clock=lambda: day * DAY + 5)


def bits(folder: Path) -> list[int]:
    with Memory.open(policy(folder)).reading() as db:
        return sorted(load_counts(db, SCORED, counted("people"))["bits"].tolist())


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
    before = told(Memory.open(policy(tmp_path)), "SELECT COUNT(*) FROM array_parts")
    budget(tmp_path, data_set="other").charge(["x"], np.array([[-0.0, -np.nan]], np.float32))
    assert told(Memory.open(policy(tmp_path)), "SELECT COUNT(*) FROM array_parts") == before


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


def test_the_file_holds_no_name_and_damage_is_refused(tmp_path: Path) -> None:
    budget(tmp_path).charge(NAMES, VALUES)
    memory = Memory.open(policy(tmp_path))
    assert not any(name.encode() in memory.path.read_bytes() for name in NAMES)
    changed(memory, "UPDATE array_parts SET content = zeroblob(length(content))")
    with pytest.raises(ConfigurationError, match="damaged"):
        budget(tmp_path).check(NAMES, VALUES)
