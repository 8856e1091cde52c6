"""Folds: groups are whole, rows stay where they were, the secret decides, samples nest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.kinds.tuning.folds import chosen_draws, fold_of_rows, rows_needed
from nvflare_plugins.pooled.row_floors import RowDraws
from nvflare_plugins.site.policy_values import Floors

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
