"""Declared search spaces: every site draws the same sets, in their ranges, no two alike; what is none is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.kinds.tuning.folds import chosen_draws, fold_of_rows, rows_needed
from nvflare_plugins.kinds.tuning.job import TuningJob, drawn, listed
from nvflare_plugins.pooled.row_floors import RowDraws
from nvflare_plugins.site.policy_values import Floors

SEARCH = {
    "eta": {"low": 0.01, "high": 0.5, "log": True},
    "max_depth": {"low": 2, "high": 8, "whole": True},
    "max_leaves": {"low": 2, "high": 512, "whole": True, "log": True},
    "lambda": {"low": 0.0, "high": 5.0},
    "grow_policy": ["depthwise", "lossguide"],
}

KNOWN = (
    {"eta": 0.1705, "grow_policy": "lossguide", "lambda": 3.03044, "max_depth": 5, "max_leaves": 3},
    {"eta": 0.358838, "grow_policy": "depthwise", "lambda": 1.68493, "max_depth": 7, "max_leaves": 2},
    {"eta": 0.248571, "grow_policy": "depthwise", "lambda": 3.36392, "max_depth": 4, "max_leaves": 16},
)


def job(**changes: object) -> TuningJob:
    document = {"data_set": "d", "label": "y", "trials": [{"eta": 0.1}], **changes}
    return TuningJob.from_dict({name: value for name, value in document.items() if value is not None})


def test_a_draw_is_the_declared_one() -> None:
    digest = hashlib.sha256(b"veilboost/tuning/7/0/max_depth").digest()
    u = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
    (first, *_) = drawn({"max_depth": [3, 4, 5, 6]}, 2, 7)
    assert first == {"max_depth": [3, 4, 5, 6][int(4 * u)]}
    # Known answers: another machine, another release, and every site draw these.
    assert drawn(SEARCH, 3, 1) == KNOWN


@given(seed=st.integers(0, 2**62), n=st.integers(1, 20))
def test_draws_keep_their_ranges_and_differ(seed: int, n: int) -> None:
    trials = drawn(SEARCH, n, seed)
    assert trials == drawn(dict(reversed(SEARCH.items())), n, seed) and len(trials) == n
    assert len({repr(sorted(one.items())) for one in trials}) == n
    for one in trials:
        assert 0.01 <= one["eta"] <= 0.5 and 2 <= one["max_depth"] <= 8 and 2 <= one["max_leaves"] <= 512
        assert isinstance(one["max_depth"], int) and isinstance(one["max_leaves"], int)
        assert 0 <= one["lambda"] <= 5 and float(f"{one['lambda']:.6g}") == one["lambda"]
        assert one["grow_policy"] in SEARCH["grow_policy"]


def test_all_sets_of_a_small_space_are_found_and_no_more() -> None:
    small = {"max_depth": [2, 3], "eta": [0.1, 0.2]}
    assert len(drawn(small, 4, 0)) == 4
    with pytest.raises(ConfigurationError, match=r"fewer than n_trials=5 different parameter sets \(found 4\)"):
        drawn(small, 5, 0)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([{"eta": 0.1}, {"max_depth": 3}, {"learning_rate": 0.1}], "entries 1 and 3 are the same"),
        ([{"max_depth": 3}, {"max_depth": 3.0}], "entries 1 and 2 are the same"),
        ([{}], "entry 1 must be an object"),
        ([{"max_bin": 64}], "'max_bin' cannot be tuned: all trials share one cut search"),
        ([{"objective": "reg:squarederror"}], "'objective' cannot be tuned"),
        ([{"seed": 1}], "the luckiest"),
        ([{"max_dept": 3}], "trials may differ in learning_rate"),
    ],
)
def test_lists_that_are_none_are_refused(trials: list, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        listed(trials)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trials": None}, "either trials or search"),
        ({"search": {"eta": [0.1]}, "n_trials": 1}, "either trials or search"),
        ({"n_trials": 3}, "n_trials is for search"),
        ({"trials": None, "search": {"eta": [0.1]}}, "needs n_trials"),
        (
            {"trials": None, "search": {"eta": [0.1]}, "n_trials": 10**9},
            "n_trials must be a whole number from 1 to 1000",
        ),
        ({"trials": [{"eta": i / 2000} for i in range(1, 1002)]}, "a list of 1 to 1000 parameter sets"),
        ({"trials": [{"eta": float("nan")}]}, "must be a finite number"),
        ({"trials": None, "search": {"eta": {"low": 0.3, "high": 0.1}}, "n_trials": 2}, "low below high"),
        ({"trials": None, "search": {"eta": {"low": 0, "high": 1, "log": True}}, "n_trials": 2}, "above 0 on a log"),
        ({"trials": None, "search": {"max_depth": {"low": 1.5, "high": 3, "whole": True}}, "n_trials": 2}, "whole num"),
        ({"trials": None, "search": {"eta": []}, "n_trials": 2}, "at least one value"),
        ({"trials": None, "search": {"eta": {"low": 1}}, "n_trials": 2}, "must be a list of values, or an object"),
        ({"params": {"learning_rate": 0.3}}, "'eta' is in params and in a trial"),
        ({"params": {"max_bin": 2}}, "max_bin=2"),
        ({"folds": 11}, "folds must be a whole number from 2 to 10"),
        ({"folds": 1}, "folds must be a whole number from 2 to 10"),
        ({"group": "y"}, "group must not be the label"),
        ({"profile": "ckks"}, "profile=ckks lets the server"),
        ({"profile": "plain"}, "profile=plain would show the server"),
        ({"profile": "paillier"}, "profile=paillier is of vertical jobs: .* the kind vertical_tuning"),
        ({"profile": "elgamal"}, "the kind vertical_tuning"),
        ({"profile": "dp_distributed"}, "every trial would be paid for"),
        ({"profile": "plugin.acme"}, "a plugin says nothing of many sums"),
        ({"profile": "xyz"}, "choose one of masks, bfv"),
        ({"preset": "guarded"}, "preset is refused in a tuning: vertical jobs have a kind of their own"),
        ({"epsilon": 1.0}, "pay for every trial"),
        ({"weight": "w"}, "weight is refused in a tuning"),
        ({"on_lost_site": "wait"}, "on_lost_site is refused"),
        ({"resume_from": "x"}, "without the trials that the log shows as done"),
    ],
)
def test_jobs_that_are_none_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        job(**changes)


# -- folds -------------------------------------------------------------------------------------------------------------


SECRET, OTHER = bytes(range(32)), bytes(32)


def frame(n_rows: int = 3000, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    table = pd.DataFrame(random.normal(size=(n_rows, 3)), columns=list("abc"))
    table["y"] = random.integers(0, 2, n_rows)
    table["person"] = [f"P{number}" for number in random.integers(0, n_rows // 4, n_rows)]
    table["key"] = np.arange(n_rows)
    return table


def loaded(folder: Path, rows: pd.DataFrame, group: str | None = None, features: str = "abc", **facts: object) -> Table:
    path = folder / "rows.parquet"
    rows.to_parquet(path, index=False)
    spec = DataSet(name="d", path=path, format="parquet", **facts)
    return load_table(
        spec, label="y", group=group, features=list(features), with_ids=spec.id is not None, may_lack_rows=True
    )


def folds(folder: Path, rows: pd.DataFrame, secret: bytes = SECRET, n_folds: int = 5, **how: object) -> np.ndarray:
    table = loaded(folder, rows, **how)
    facts = {"id": how["id"]} if "id" in how else {}
    spec = DataSet(name="d", path=folder / "rows.parquet", format="parquet", **facts)
    return fold_of_rows(table, spec, secret, n_folds)


def test_a_group_is_never_split_and_folds_are_about_alike(tmp_path: Path) -> None:
    rows = frame()
    found = folds(tmp_path, rows, group="person")
    assert pd.Series(found).groupby(rows.person).nunique().max() == 1
    sizes = np.bincount(found, minlength=5)
    assert sizes.sum() == 3000 and sizes.min() > 400
    # The control: by content the same persons are split.
    assert pd.Series(folds(tmp_path, rows)).groupby(rows.person).nunique().max() > 1


@pytest.mark.parametrize("how", [{"group": "person"}, {"id": "key"}, {}], ids=["group", "id", "content"])
def test_rows_stay_in_their_fold_next_month_and_in_any_order(how: dict, tmp_path: Path) -> None:
    rows = frame()
    before = folds(tmp_path, rows, **how)
    more = pd.concat([frame(500, 1).assign(key=lambda f: f.key + 10_000), rows], ignore_index=True)
    order = np.random.default_rng(2).permutation(len(more))
    after = folds(tmp_path, more.iloc[order], **how)
    back = np.empty_like(after)
    back[order] = after
    assert (back[500:] == before).all()


def test_the_secret_and_the_number_of_folds_decide_and_nothing_of_a_job(tmp_path: Path) -> None:
    rows = frame()
    before = folds(tmp_path, rows)
    for other in (folds(tmp_path, rows, OTHER), folds(tmp_path, rows, n_folds=4)):
        assert abs((other == before).mean() - 1 / 5) < 0.05  # six standard errors: drawn anew
    # By ids and groups other columns are the same folds.
    assert (folds(tmp_path, rows, id="key") == folds(tmp_path, rows, id="key", features="ab")).all()
    assert (folds(tmp_path, rows, group="person") == folds(tmp_path, rows, group="person", features="a")).all()


def test_a_group_is_the_same_as_text_and_as_a_number_and_a_row_without_one_stands_alone(tmp_path: Path) -> None:
    rows = frame(400).assign(person=lambda f: f.key % 40)
    whole = folds(tmp_path, rows, group="person")
    assert (whole == folds(tmp_path, rows.assign(person=rows.person.astype(str)), group="person")).all()
    gaps = rows.assign(person=rows.person.where(rows.person > 0).astype("Int64"))
    found = folds(tmp_path, gaps, group="person")
    assert (found == whole)[rows.person > 0].all() and len(set(found[rows.person == 0])) > 1


def test_a_column_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="its column of groups must hold texts or whole numbers"):
        folds(tmp_path, frame(50).assign(person=True), group="person")


def test_the_rows_of_a_round_are_those_of_a_training_on_all_rows(tmp_path: Path) -> None:
    table = loaded(tmp_path, frame(1000))
    draws, chosen = RowDraws(SECRET, table, 0.5), np.arange(1000) % 5 != 2
    assert (chosen_draws(draws.of_round, chosen)(3) == draws.of_round(3)[chosen]).all()


def test_how_many_rows_a_fold_needs() -> None:
    assert rows_needed(Floors(100, 0, 3), [1.0]) == 1000
    assert rows_needed(Floors(2500, 0, 3), [1.0]) == 2500
    assert rows_needed(Floors(100, 0, 3), [1.0, 0.75]) == 4000
    assert rows_needed(Floors(100, 0, 3), [0.5]) == 2000
