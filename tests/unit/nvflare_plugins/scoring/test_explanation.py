"""What a model makes of a site's rows, as figures: of all rows, in the classes' names, or why there are none."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.scoring.comparison import scores_of
from nvflare_plugins.scoring.explanation import row_figures
from nvflare_plugins.scoring.export import strip_sum_hessian
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.model_json import with_lists

CLASSES = {"binary:logistic": ("well", "ill"), "multi:softprob": ("a", "b", "c")}


def trained(folder: Path, objective: str) -> tuple[bytes, Table]:
    names = CLASSES.get(objective)
    random = np.random.default_rng(2)
    frame = pd.DataFrame({"x": random.random(300), "town": random.choice(["Ulm", "Kiel"], 300)})
    score = frame.x + 0.3 * (frame.town == "Ulm")
    frame["y"] = score if names is None else np.array(names)[(score * len(names) / 1.31).astype(int)]
    frame.to_csv(folder / "rows.csv", index=False)
    lists = {"town": ("Ulm", "Kiel")}
    table = load_table(
        DataSet(name="rows", path=folder / "rows.csv", format="csv"), label="y", categories=lists, label_classes=names
    )
    params = {"objective": objective, "nthread": 1, "max_depth": 3, "num_class": 3 if len(names or ()) == 3 else None}
    columns = {"feature_names": list(table.feature_names), "feature_types": list(table.feature_types)}
    matrix = xgb.DMatrix(table.features, table.label, **columns, enable_categorical=True)
    booster = xgb.train({key: value for key, value in params.items() if value is not None}, matrix, 3)
    return with_lists(bytes(booster.save_raw("json")), table.feature_names, lists, names), table


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_figures_are_of_all_rows_under_the_names_of_the_classes(tmp_path: Path, objective: str) -> None:
    content, table = trained(tmp_path, objective)
    model = FinishedModel(content, "model")
    found = row_figures(model, table, scores_of(model, table.features))
    assert "town Ulm: " in found.swarm and re.search("town = (Ulm|Kiel)", found.row)
    if objective == "binary:logistic":
        assert found.classes is not None and sum(found.classes.thresholds[0][2]) == 300
        assert found.classes.name == "ill" and found.words.endswith("margin of ill.")
    elif objective == "multi:softprob":
        assert [name for name, _ in found.confusion] == ["a", "b", "c"]
        assert [sum(counts) for _, counts in found.confusion] == np.bincount(table.label.astype(int)).tolist()
        assert all(max(counts) == counts[place] for place, (_, counts) in enumerate(found.confusion))
    else:
        assert found.classes is None and not found.confusion and found.words.endswith("of the prediction.")


def test_a_model_that_cannot_be_explained_still_has_curves(tmp_path: Path) -> None:
    content, table = trained(tmp_path, "binary:logistic")
    model = FinishedModel(strip_sum_hessian(content), "model")
    found = row_figures(model, table, scores_of(model, table.features))
    assert found.classes is not None and not found.swarm and not found.row and "cannot be explained" in found.words
