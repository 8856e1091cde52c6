"""Labels of times: what each form says of a row, and what is refused in words that name no row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.failures import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.labels import columns_of, words_of_label
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.pooled.job import HorizontalJob, check_horizontal_early

INF, NAN = np.inf, np.nan
EVENTS, SIGNED, BOUNDS = {"time": "t", "event": "e"}, {"signed": "t"}, {"lower": "t", "upper": "u"}


def loaded(folder, label, columns, repair=False, **facts) -> Table:
    n_rows = len(next(iter(columns.values())))
    frame = pd.DataFrame({"x": np.arange(n_rows, dtype=float), **columns})
    frame.to_parquet(folder / "rows.parquet", index=False)
    spec = DataSet("train", folder / "rows.parquet", "parquet", **facts)
    return load_table(spec, label=label, may_lack_rows=True, repair=repair)


@pytest.mark.parametrize(
    ("label", "columns", "bounds"),
    [
        (EVENTS, {"t": [3.0, 4.0, 0.0], "e": [1, 0, 1]}, [[3, 3], [4, INF], [0, 0]]),
        (SIGNED, {"t": [3.0, -4.0]}, [[3, 3], [4, INF]]),
        (BOUNDS, {"t": [3.0, 4, NAN, 5, 0], "u": [3.0, NAN, 2, 6, INF]}, [[3, 3], [4, INF], [0, 2], [5, 6], [0, INF]]),
    ],
)
def test_each_form_becomes_bounds(tmp_path, label, columns, bounds):
    table = loaded(tmp_path, label, columns)
    assert table.label.tolist() == bounds
    assert table.label.dtype == np.float32
    assert table.feature_names == ("x",)
    assert table.label_name == words_of_label(label)
    assert table.part(np.arange(table.n_rows) == 1).label.tolist() == bounds[1:2]


@pytest.mark.parametrize(
    ("label", "columns", "text"),
    [
        (EVENTS, {"t": [1.0, -2], "e": [1, 0]}, "times 't' are below 0"),
        (EVENTS, {"t": [1.0, INF], "e": [1, 0]}, "or not finite"),
        (EVENTS, {"t": [1.0, 1e300], "e": [1, 0]}, "beyond float32"),
        (EVENTS, {"t": [1.0, 2], "e": [1, 2]}, "event column 'e' holds more than 0 and 1"),
        (EVENTS, {"t": [1.0, NAN], "e": [1, 1]}, "have an event in 'e' and no time in 't'"),
        (EVENTS, {"t": [1.0, NAN], "e": [1, 0]}, "lacks values"),
        (EVENTS, {"t": [1.0, 2], "e": [1, NAN]}, "lacks values"),
        (SIGNED, {"t": [1.0, 0]}, "hold 0, which has no sign"),
        (SIGNED, {"t": [1.0, -INF]}, "not finite"),
        (BOUNDS, {"t": [1.0, 3], "u": [1.0, 2]}, "bounds 'u' are below those of 't'"),
        (BOUNDS, {"t": [1.0, NAN], "u": [1.0, -2]}, "are below 0"),
        (BOUNDS, {"t": [1.0, NAN], "u": [1.0, NAN]}, "lacks values"),
    ],
)
def test_what_is_no_time_is_refused_and_repaired(tmp_path, label, columns, text):
    with pytest.raises(DataRefusal) as refused:
        loaded(tmp_path, label, columns)
    assert text in refused.value.reason
    assert np.isnan(loaded(tmp_path, label, columns, repair=True).label).any(axis=1).tolist() == [False, True]


def test_rows_without_times_are_left_out_where_the_policy_says_so(tmp_path):
    table = loaded(tmp_path, EVENTS, {"t": [1.0, NAN, 3.0], "e": [1, 0, NAN]}, drop_unlabelled=True)
    assert table.label.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("label", "params", "text"),
    [
        ({"time": "t", "event": "e", "entry": "s"}, {}, "left truncation"),
        ({"time": "t", "events": "e"}, {}, "did you mean event"),
        ({"time": "t"}, {}, "label must be"),
        ({"time": "t", "event": "t"}, {}, "one column for two"),
        ({"time": "t", "event": 1}, {}, "label must be"),
        ("t", {}, "needs times in place of a label"),
        (EVENTS, {"objective": "reg:squarederror"}, "takes one column as label"),
        (EVENTS, {"aft_loss_distribution": "gamma"}, "normal or logistic or extreme"),
        (EVENTS, {"aft_loss_distribution_scale": 0}, "outside"),
        (EVENTS, {"base_score": 0}, "above 0"),
        (EVENTS, {"eval_metric": "rmse"}, "supported are: aft-nloglik"),
        (EVENTS, {"objective": "survival:cox"}, "survival:cox"),
    ],
)
def test_what_no_job_of_times_is_is_refused(label, params, text):
    with pytest.raises(ConfigurationError, match=text):
        check_horizontal_early(HorizontalJob("train", label, {"objective": "survival:aft", **params}, 2), None, 3)


def test_columns_of_a_label_stand_in_one_order():
    assert columns_of({"event": "e", "time": "t"}) == ("t", "e")
    with pytest.raises(ConfigurationError, match="label_classes"):
        HorizontalJob("train", EVENTS, {"objective": "survival:aft"}, 2, label_classes=["a", "b"])
