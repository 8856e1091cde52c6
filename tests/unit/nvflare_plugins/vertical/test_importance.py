"""The file of feature importance; its numbers are compared with centralized XGBoost in tests/oracle."""

from __future__ import annotations

import csv

from nvflare_plugins.kinds.vertical.model import KINDS, FeatureImportance, write_importance


def test_the_file_holds_every_number_exactly(tmp_path):
    rows = [
        FeatureImportance("site-2", "f0", 3.0, 0.1, 1e20, 5.5, 1 / 3),
        FeatureImportance("", "age, in years", 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    path = write_importance(tmp_path, rows)
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["party"], row["feature"]) for row in read] == [("site-2", "f0"), ("", "age, in years")]
    assert [[float(row[kind]) for kind in KINDS] for row in read] == [[3.0, 0.1, 1e20, 5.5, 1 / 3], [0.0] * 5]
