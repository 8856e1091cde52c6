"""Labels of times: what each form says of a row, and what is refused in words that name no row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.cli.check import use_of
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.labels import columns_of, label_of_words, words_of_label
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.kinds.bagging.job import BaggingJob
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.federboost_vertical.job import BucketJob
from nvflare_plugins.kinds.profile.job import ProfileJob
from nvflare_plugins.pooled.growing import check_words, is_grown
from nvflare_plugins.pooled.job import HorizontalJob, check_horizontal_early
from nvflare_plugins.survey.agreement import SiteDraft, agree
from nvflare_plugins.survey.columns import Use
from nvflare_plugins.survey.survey import survey
from nvflare_plugins.xgb.parameters import check_parameters

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
    ],
)
def test_what_no_job_of_times_is_is_refused(label, params, text):
    with pytest.raises(ConfigurationError, match=text):
        check_horizontal_early(HorizontalJob("train", label, {"objective": "survival:aft", **params}, 2), None, 3)


@pytest.mark.parametrize(
    ("fields", "params", "text"),
    [
        ({"engine": "xgboost"}, {}, "where the sites grow the trees"),
        ({}, {"booster": "dart"}, "where the sites grow the trees"),
        ({"word_bits": 32}, {}, "word_bits=32 is refused for survival:aft"),
    ],
)
def test_what_no_training_of_times_does_is_refused(fields, params, text):
    job = HorizontalJob("train", EVENTS, {"objective": "survival:aft", **params}, 2, **fields)
    parameters = check_parameters(job.params, ["x"], label=job.label)
    with pytest.raises(ConfigurationError, match=text):
        is_grown(job, parameters)
        check_words(job, parameters)


def test_columns_of_a_label_stand_in_one_order():
    assert columns_of({"event": "e", "time": "t"}) == ("t", "e")
    with pytest.raises(ConfigurationError, match="label_classes"):
        HorizontalJob("train", EVENTS, {"objective": "survival:aft"}, 2, label_classes=["a", "b"])


@pytest.mark.parametrize("label", ["t", EVENTS, SIGNED, BOUNDS])
def test_a_label_is_read_from_its_words(label):
    assert label_of_words(words_of_label(label)) == label


def test_words_that_are_no_label_of_times_are_refused_or_name_a_column():
    assert label_of_words("a=b") == "a=b"
    with pytest.raises(ConfigurationError, match="label must be"):
        label_of_words("time=t")
    with pytest.raises(ConfigurationError, match="which separate its parts"):
        HorizontalJob("train", {"time": "t,u", "event": "e"}, {"objective": "survival:aft"}, 2)


def surveyed(folder, label, columns) -> list[tuple[str, bool, int | None]]:
    frame = pd.DataFrame({"x": np.arange(60) % 7, **columns})
    frame.to_csv(folder / "rows.csv", index=False)
    found = survey(DataSet("train", folder / "rows.csv", "csv"), Use(label=label))
    assert found.draft.features == ("x",)
    return [(one.kind, one.is_problem, one.count) for one in found.findings]


TIMES = np.arange(60) + 0.5


@pytest.mark.parametrize(
    ("label", "columns", "findings"),
    [
        (EVENTS, {"t": TIMES, "e": np.arange(60) % 2}, []),
        (EVENTS, {"t": TIMES - 3, "e": np.arange(60) % 2}, [("label_value", True, 3)]),
        (EVENTS, {"t": TIMES, "e": 0}, [("no_events", False, None)]),
        (EVENTS, {"t": TIMES, "e": np.where(np.arange(60) % 2, "yes", "no")}, [("label_text", True, None)]),
        (EVENTS, {"t": TIMES, "e": np.where(np.arange(60) % 2, "dead", "alive")}, [("label_text", True, None)]),
        (SIGNED, {"t": np.where(TIMES < 5, np.nan, TIMES)}, [("label_missing", True, 5)]),
        (EVENTS, {"t": TIMES}, [("no_such_column", True, None)]),
    ],
)
def test_a_look_at_a_table_finds_what_its_times_lack(tmp_path, label, columns, findings):
    assert surveyed(tmp_path, label, columns) == findings


@pytest.mark.parametrize(
    ("objective", "data_set", "columns", "findings"),
    [
        ("cox", "train", {"t": np.maximum(TIMES - 3.5, 0), "e": np.arange(60) % 2}, [("label_value", True, 4)]),
        ("cox", "train", {"t": TIMES, "e": 0}, [("no_events", True, None)]),
        ("cox", "later", {"t": TIMES, "e": 0}, [("no_events", False, None)]),
        ("aft", "train", {"t": np.maximum(TIMES - 3.5, 0), "e": 0}, [("no_events", False, None)]),
    ],
)
def test_a_look_for_a_job_finds_times_that_its_objective_does_not_take(
    tmp_path, objective, data_set, columns, findings
):
    params = {"objective": f"survival:{objective}"}
    use = use_of(HorizontalJob("train", EVENTS, params, 2, eval_data_set="later"), None, "ulm", data_set)
    pd.DataFrame({"x": np.arange(60) % 7, **columns}).to_csv(tmp_path / "rows.csv", index=False)
    found = survey(DataSet(data_set, tmp_path / "rows.csv", "csv"), use).findings
    assert [(one.kind, one.is_problem, one.count) for one in found] == findings
    assert all("half a day" in one.text for one in found if one.kind == "label_value")


def test_the_answer_that_a_look_proposes_reads_the_events(tmp_path):
    pd.DataFrame({"x": [1.0, 2], "t": [3.0, 4], "e": ["yes", "no"]}).to_csv(tmp_path / "rows.csv", index=False)
    spec = DataSet("train", tmp_path / "rows.csv", "csv", columns={"e": "yes/no"})
    assert load_table(spec, label=EVENTS).label.tolist() == [[3, 3], [4, INF]]


@pytest.mark.parametrize("job", [BaggingJob, DpBoostJob, ProfileJob, BucketJob])
def test_kinds_that_take_one_column_refuse_times_by_name(job):
    with pytest.raises(ConfigurationError, match="label names times, and this kind of job takes one column"):
        job.from_dict({"data_set": "train", "label": EVENTS})


def test_drafts_of_one_label_agree_whatever_the_site_calls_its_columns():
    def draft(label: str) -> SiteDraft:
        document = {"features": ["x"], "dates": [], "ids": {}, "categories": {}, "label_classes": None, "data_set": {}}
        return SiteDraft.from_dict({**document, "label": label, "feature_bounds": {"bounds": {}}})

    found = agree(
        {site: draft(f"time={days},event=e") for site, days in (("ulm", "Days"), ("b", "days"), ("k", "days"))}
    )
    assert (found.label, found.features) == ({"time": "days", "event": "e"}, ["x"])
    assert found.options["ulm"] == {"rename": {"Days": "days"}}
    with pytest.raises(ConfigurationError, match="different labels"):
        agree({"ulm": draft("time=days,event=e"), "kiel": draft("days")})
