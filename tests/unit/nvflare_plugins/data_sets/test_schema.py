"""Schemas: canonical documents, and differences named by column."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.schema import Column, Schema, compare
from nvflare_plugins.data.table import Table

BASE = Schema((Column("age", "float"), Column("sex", "c", ("f", "m")), Column("bmi", "float")), "y", ("no", "yes"), "w")


def test_schema_of_a_table_and_round_trip() -> None:
    table = Table(
        features=np.zeros((2, 3), np.float32),
        feature_names=("age", "sex", "bmi"),
        feature_types=("float", "c", "float"),
        label=np.zeros(2, np.float32),
        label_name="y",
        weight=np.ones(2, np.float32),
        weight_name="w",
        categories={"sex": ("f", "m")},
        label_classes=("no", "yes"),
    )
    assert Schema.of(table) == BASE
    assert Schema.from_bytes(BASE.to_bytes()) == BASE
    compare(BASE, Schema.from_bytes(BASE.to_bytes()), "site-2")


def columns(*changed: Column) -> tuple[Column, ...]:
    by_name = {column.name: column for column in changed}
    return tuple(by_name.get(column.name, column) for column in BASE.columns)


DIFFERENCES = [
    (replace(BASE, columns=(Column("age2", "float"), *BASE.columns[1:])), "'age2' where this site has 'age'"),
    (replace(BASE, columns=BASE.columns[::-1]), "order differs"),
    (replace(BASE, columns=BASE.columns[:2]), "only this site has column 'bmi'"),
    (replace(BASE, columns=(*BASE.columns, Column("hb", "float"))), "only site-2 has column 'hb'"),
    (replace(BASE, columns=columns(Column("sex", "float"))), "'sex' as numbers, this site as categories"),
    (replace(BASE, columns=columns(Column("sex", "c", ("f", "x")))), "category 'x' at place 2 where this site has 'm'"),
    (replace(BASE, columns=columns(Column("sex", "c", ("f", "m", "x")))), "'sex': site-2 has a category list of 3"),
    (replace(BASE, label="z"), "label 'z'"),
    (replace(BASE, label_classes=("yes", "no")), "label class 'yes' at place 1"),
    (replace(BASE, label_classes=None), "label class list of 0"),
    (replace(BASE, weight=None), "no row weights where this site has weights 'w'"),
]


@pytest.mark.parametrize(("theirs", "said"), DIFFERENCES)
def test_the_first_difference_is_named(theirs: Schema, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        compare(BASE, theirs, "site-2")
    with pytest.raises(ConfigurationError):
        compare(theirs, BASE, "site-1")
    assert theirs.to_bytes() != BASE.to_bytes()
