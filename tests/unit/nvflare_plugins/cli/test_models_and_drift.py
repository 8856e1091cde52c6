"""``veilboost models`` and ``veilboost drift``: names of models, the way back, and rows that are no longer the same."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import re
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import cells
from nvflare_plugins.cli.main import main
from nvflare_plugins.pages.run_record import DataFacts, RoundRow, RunRecord
from nvflare_plugins.scoring.drift import features_of, scores_of
from nvflare_plugins.scoring.model import Feature, FinishedModel
from nvflare_plugins.scoring.rows import RowReader, Rows
from nvflare_plugins.scoring.versions import NAMES_FILE, ModelVersions
from nvflare_plugins.xgb.model_json import with_lists
from tests.support.threads import in_threads

COLUMNS = ["age", "ward", "value"]
WARDS = ["A", "B", "C"]


def rows(n: int, seed: int, shift: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"age": rng.normal(50 + shift, 10, n), "ward": rng.choice(WARDS, n), "value": rng.normal(size=n)}
    )
    return frame.assign(y=((frame.age > 52) ^ (frame.ward == "B")).astype(int))


def model_of(frame: pd.DataFrame, rounds: int = 3) -> bytes:
    features = frame[COLUMNS].assign(ward=frame.ward.map(WARDS.index))
    matrix = xgb.DMatrix(
        features.to_numpy(np.float32),
        label=frame.y,
        feature_names=COLUMNS,
        feature_types=["float", "c", "float"],
        enable_categorical=True,
    )
    params = {"objective": "binary:logistic", "max_depth": 2, "base_score": 0.5}
    booster = xgb.train(params, matrix, rounds)
    return with_lists(bytes(booster.save_raw("json")), COLUMNS, {"ward": WARDS}, ["no", "yes"])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a workspace with three jobs: two months' models, and a run that left none."""
    frame = rows(600, 1)
    frame.to_csv(tmp_path / "august.csv", index=False)
    (tmp_path / "local").mkdir()
    policy = {"data_sets": {"patients": {"path": str(tmp_path / "august.csv")}}}
    (tmp_path / "local" / "veilboost.json").write_text(json.dumps(policy))
    for number, job in enumerate(["job-a", "job-b"], start=1):
        folder = tmp_path / "veilboost_runs" / job
        folder.mkdir(parents=True)
        (folder / "model.json").write_bytes(model_of(frame, number))
        facts = DataFacts("patients", "training", 600, tuple(COLUMNS), label="y")
        rounds = tuple(RoundRow(i, 1.0, {"eval-auc": 0.7 + 0.01 * i}) for i in range(number))
        record = RunRecord(
            job, "00", "site-1", ("site-1",), "masks", rounds=rounds, model="model.json", data=(facts,),
            finished=f"2026-0{7 + number}-01T00:00:00+00:00",
        )  # fmt: skip
        record.write(folder)
    (tmp_path / "veilboost_runs" / "broken").mkdir()
    (tmp_path / "veilboost_runs" / "broken" / "run.json").write_text("{}")
    return tmp_path


def models(site: Path, *arguments: str) -> int:
    return main(["models", *arguments, "--workspace", str(site), "--site", "site-1"])


def predict(site: Path, name: str, out: str = "out.csv") -> int:
    options = ["--out", str(site / out), "--ignore", "y", "--workspace", str(site), "--site", "site-1"]
    return main(["predict", name, str(site / "august.csv"), *options])


def drift(site: Path, new: pd.DataFrame, *options: str, model: str = "job-a") -> int:
    new.to_csv(site / "new.csv", index=False)
    return main(["drift", model, str(site / "new.csv"), "--workspace", str(site), "--site", "site-1", *options])


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_run_that_another_user_has_kept_to_himself_hides_no_other(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "veilboost_runs" / "job-0").mkdir()
    exists = Path.exists

    def denied(path: Path) -> bool:
        if path.parent.name == "job-0":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    assert models(site) == 0
    told = capsys.readouterr().out
    assert "job-b, eval-auc 0.71\n" in told and "left out: job-0: a file or folder may not be used" in told


def test_models_are_listed_named_and_used(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(site) == 0
    listed = capsys.readouterr().out
    assert "job-a, eval-auc 0.7\n" in listed and "job-b, eval-auc 0.71\n" in listed and "left out: broken: " in listed
    assert models(site, "add", "outcome", "job-a") == models(site, "add", "outcome", "job-b") == 0
    assert predict(site, "outcome") == predict(site, "outcome@1", "one.csv") == 0
    two, one = pd.read_csv(site / "out.csv"), pd.read_csv(site / "one.csv")
    assert not two.equals(one)
    before = {path: path.read_bytes() for path in site.rglob("model.json")}
    assert models(site, "rollback", "outcome", "1") == 0
    assert "before it was outcome@2" in capsys.readouterr().out
    assert predict(site, "outcome") == 0 and pd.read_csv(site / "out.csv").equals(one)
    assert {path: path.read_bytes() for path in site.rglob("model.json")} == before, "nothing is deleted"
    assert models(site) == 0
    listed = capsys.readouterr().out
    assert "outcome@1*" in listed and "outcome@2 " in listed
    assert stat.S_IMODE((site / "veilboost_runs" / NAMES_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "outcome", "nothing"), "`veilboost models` lists"),
        (("add", "../x", "job-a"), "can be no name"),
        (("add", "outcome", "job-a"), "rollback outcome 1"),
        (("rollback", "outcome", "2"), "no version 2"),
        (("rollback", "other", "1"), "no such name"),
        (("rollback", "outcome", "0"), "no version 0"),
        (("add", "outcome"), "NAME JOB_ID"),
        (("rollback", "outcome", "one"), "NAME VERSION"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    site: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert models(site, "add", "outcome", "job-a") == 0
    before = (site / "veilboost_runs" / NAMES_FILE).read_bytes()
    assert models(site, *arguments) == 1 and said in capsys.readouterr().err
    assert (site / "veilboost_runs" / NAMES_FILE).read_bytes() == before


def test_a_model_that_changed_since_it_was_named_is_not_used(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models(site, "add", "outcome", "job-a")
    models(site, "add", "outcome", "job-b")
    path = site / "veilboost_runs" / "job-b" / "model.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert predict(site, "outcome") == 1 and "use another version" in capsys.readouterr().err
    assert models(site, "rollback", "outcome", "1") == 0 and predict(site, "outcome") == 0
    assert models(site, "rollback", "outcome", "2") == 1


def test_a_name_needs_to_know_whose(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "outcome", str(site / "august.csv"), "--out", str(site / "out.csv")]) == 1
    assert "--workspace and --site" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"format": 2, "names": {}}', b'{"format": 1, "names": {"a": {"versions": [], "current": 1}}}'],
)
def test_damaged_names_are_refused(site: Path, content: bytes) -> None:
    (site / "veilboost_runs" / NAMES_FILE).write_bytes(content)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ModelVersions(site / "veilboost_runs").names()


def test_names_given_at_the_same_time_are_all_there(site: Path) -> None:
    versions = ModelVersions(site / "veilboost_runs")
    in_threads(lambda name: versions.add(name, "job-a"), [f"name{i}" for i in range(8)])
    assert len(versions.names()) == 8


# -- drift ------------------------------------------------------------------------------------------------------------


def test_rows_of_the_same_kind_do_not_drift(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift(site, rows(600, 2)) == 0 and "no drift" in capsys.readouterr().out


def test_what_changed_is_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = rows(600, 2, shift=15)
    new.loc[:199, "ward"] = "Neu"
    new.loc[:4, "ward"] = "Einzelfall"
    new.loc[300:, "value"] = np.nan
    assert drift(site, new, "--out", str(site / "drift.html")) == 3
    out, page = capsys.readouterr().out, (site / "drift.html").read_text()
    assert "drift: " in out and "Neu (195)" in out and "Einzelfall" not in out + page, "few rows are not shown by name"
    document = json.loads((site / "drift.json").read_text())
    assert set(document["drifted"]) >= {"age", "ward", "value", "probability.yes"}
    found = {one["name"]: one for one in document["features"]}
    assert found["value"]["missing_now"] == 0.5 and found["ward"]["unknown"] == 200
    assert stat.S_IMODE((site / "drift.html").stat().st_mode) == 0o600
    assert "<script" not in page and "http" not in page.partition("</title>")[2]
    # The exit code follows the threshold.
    assert drift(site, new, "--threshold", "50") == 0


@pytest.mark.parametrize("hours", [24, 6])
def test_bins_of_dates_are_named_by_dates(site: Path, hours: int) -> None:
    times = pd.date_range("2024-01-01", periods=200, freq=f"{hours}h")
    frame = rows(200, 1).assign(age=times.strftime("%Y-%m-%d %H:%M"))
    frame.to_csv(site / "august.csv", index=False)
    days = pd.Series((times - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1))
    dated = frame.assign(age=days, y=(days > days[100]).astype(int))
    (site / "veilboost_runs" / "job-a" / "model.json").write_bytes(model_of(dated, 1))
    policy = json.loads((site / "local" / "veilboost.json").read_text())
    policy["data_sets"]["patients"]["dates"] = {"age": "YYYY-MM-DD hh:mm"}
    (site / "local" / "veilboost.json").write_text(json.dumps(policy))
    assert drift(site, frame[:60], "--out", str(site / "drift.html")) == 3
    column = next(one for one in json.loads((site / "drift.json").read_text())["features"] if one["name"] == "age")
    cut = str(times[101])[: 10 if hours == 24 else 16]
    first = re.fullmatch(r"below (\d{4}-\d\d-\d\d( \d\d:\d\d)?)", column["labels"][0])
    assert first is not None and (first[1] == cut if hours == 24 else str(times[100])[:16] < first[1] <= cut)
    assert column["labels"][0] in (site / "drift.html").read_text()


def test_folders_of_files_drift_as_one_file_does(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvflare_plugins.scoring.rows.BLOCK_VALUES", 240)
    new = rows(400, 9, shift=5.0).assign(ward=lambda frame: frame.ward.where(frame.index > 30, "D"))
    found = {}
    for mode in ("file", "folder"):
        options = ["--out", str(site / f"{mode}.html"), "--workspace", str(site), "--site", "site-1"]
        if mode == "file":
            new.to_csv(site / "new.csv", index=False)
            assert main(["drift", "job-a", str(site / "new.csv"), *options]) == 3
        else:
            for name, frame in (("old", rows(600, 1)), ("new", new)):
                (site / name).mkdir()
                for number, part in enumerate(np.array_split(np.arange(len(frame)), 3)):
                    frame.iloc[part].to_parquet(site / name / f"{number}.parquet", index=False)
            policy = {"data_sets": {"patients": {"path": str(site / "old")}}}
            (site / "local" / "veilboost.json").write_text(json.dumps(policy))
            monkeypatch.setattr(RowReader, "read", None)  # holds them all
            assert main(["drift", "job-a", str(site / "new"), *options]) == 3
        found[mode] = json.loads((site / f"{mode}.json").read_text())
    assert found["file"] == found["folder"] and found["file"]["new_rows"] == 400
    assert {one["name"]: one["unknown"] for one in found["file"]["features"]}["ward"] == 31


def test_a_training_file_that_changed_is_said_so(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(500, 1).to_csv(site / "august.csv", index=False)
    assert drift(site, rows(300, 2)) == 0
    assert "500 rows, of which the job used 600" in capsys.readouterr().out


def test_a_column_that_is_not_there_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift(site, rows(300, 2).drop(columns="age")) == 1 and "lacks 1 of the model's 3" in capsys.readouterr().err


def test_the_index_is_that_of_its_definition() -> None:
    """Counted by hand on the model's own thresholds, as trees send values: below a threshold to the left."""
    frame = rows(400, 3)
    model = FinishedModel(model_of(frame), "m")
    old = frame[COLUMNS].assign(ward=frame.ward.map(WARDS.index)).to_numpy(np.float32)
    later = rows(300, 4, shift=5)
    new = later[COLUMNS].assign(ward=later.ward.map(WARDS.index)).to_numpy(np.float32)
    found = {one.name: one for one in features_of(model, Rows(old, None), Rows(new, None))}
    trees = model.document()["learner"]["gradient_booster"]["model"]["trees"]
    cuts = sorted(
        {
            float(np.float32(t))
            for tree in trees
            for left, f, t in zip(tree["left_children"], tree["split_indices"], tree["split_conditions"], strict=True)
            if left != -1 and f == 0
        }
    )
    assert cuts
    edges = [-np.inf, *cuts, np.inf]
    p, q = (
        np.array([((v[:, 0] >= a) & (v[:, 0] < b)).sum() for a, b in itertools.pairwise(edges)], float)
        for v in (old, new)
    )
    p, q = (p + 0.5) / (400 + 0.5 * p.size), (q + 0.5) / (300 + 0.5 * q.size)
    assert found["age"].index == pytest.approx(((q - p) * np.log(q / p)).sum())
    assert [one.name for one in scores_of(model, Rows(old, None), Rows(new, None))] == ["probability.yes"]


def test_equal_batches_have_an_index_of_zero() -> None:
    frame = rows(400, 3)
    model = FinishedModel(model_of(frame), "m")
    values = Rows(frame[COLUMNS].assign(ward=frame.ward.map(WARDS.index)).to_numpy(np.float32), None)
    assert all(one.index == 0 for one in (*features_of(model, values, values), *scores_of(model, values, values)))
    assert model.features[1] == Feature("ward", tuple(WARDS))


@pytest.mark.parametrize(
    "names", [["x"], {"a": {"versions": {"x": 1}, "current": 1}}, {"a": {"versions": ["x"], "current": 1}}, {"a": []}]
)
def test_a_damaged_file_of_names_is_refused_in_words(site: Path, capsys, names: object) -> None:
    (site / "veilboost_runs" / NAMES_FILE).write_text(json.dumps({"format": 1, "names": names}))
    assert models(site) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_numbers_of_versions_that_cannot_be_are_refused_in_words(site: Path, capsys) -> None:
    assert models(site, "add", "outcome", "job-a") == 0
    assert predict(site, "outcome@" + "9" * 200) == 1 and drift(site, rows(50, 2), model="outcome@" + "9" * 5000) == 1
    assert models(site, "rollback", "outcome", "9" * 5000) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_page_of_drift_overwrites_no_file_of_a_run(site: Path, capsys) -> None:
    """The JSON stands beside the page: model.html would bring a model.json."""
    run = site / "veilboost_runs" / "job-a"
    for name in ("model", "run"):
        before = (run / f"{name}.json").read_bytes()
        assert drift(site, rows(50, 2), "--out", str(run / f"{name}.html")) == 1
        assert "would overwrite" in capsys.readouterr().err and (run / f"{name}.json").read_bytes() == before
    for _ in range(2):  # its own of yesterday it may
        assert drift(site, rows(600, 2), "--out", str(site / "drift.html")) == 0
    assert drift(site, rows(600, 2), "--out", str(site / "nowhere" / "drift.html")) == 1
    assert "make it first" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\n", b"\xff\xfe", b"\0" * 100])
def test_who_has_the_file_is_told_why_it_cannot_be_read(site: Path, capsys, content: bytes) -> None:
    (site / "odd.csv").write_bytes(content)
    assert main(["drift", "job-a", str(site / "odd.csv"), "--workspace", str(site), "--site", "site-1"]) == 1
    told = capsys.readouterr().err
    assert "odd.csv" in told and "own log" not in told and "data_sets./" not in told
    assert_options_are_those_of_drift(told)


def assert_options_are_those_of_drift(told: str) -> None:
    there = ("--out", "--threshold", "--training", "--ignore", "--workspace", "--site")
    named = re.findall(r"--[a-z-]+", re.sub(r"veilboost site-setup[^,;)]*", "", told))
    assert set(named) <= set(there), told


def test_a_text_that_is_no_number_is_refused_with_what_drift_has(site: Path, capsys) -> None:
    frame = rows(50, 3).astype(dict.fromkeys(COLUMNS, object))
    frame.loc[0, COLUMNS[0]] = "n/a?"
    assert drift(site, frame) == 1
    told = capsys.readouterr().err
    assert "site-setup DIR --missing" in told
    assert_options_are_those_of_drift(told)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": True},
        {"model": ["model.json"]},
        {"site": None},
        {"rounds": "x"},
        {"rounds": [{"metrics": {"auc": "x"}}]},
        {"rounds": [{"round": 0, "seconds": 1.0, "metrics": {"eval-auc": 10**400}}]},
    ],
)
def test_a_damaged_record_hides_its_own_model_alone(site: Path, capsys, changes: dict) -> None:
    path = site / "veilboost_runs" / "job-a" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert models(site) == 0
    assert "job-b" in (told := capsys.readouterr().out) and told.count("job-a") == told.count("left out: job-a: ") == 1
    assert models(site, "add", "outcome", "job-a") == 1
    assert "2 runs cannot be read: broken: " in (said := capsys.readouterr().err) and "; job-a: " in said
    assert drift(site, rows(50, 2)) == 1
    assert main(["compare", str(path.parent), "--data-set", "patients", "--workspace", str(site)]) == 1


def test_a_metric_that_was_no_number_is_listed_as_such(site: Path, capsys) -> None:
    """An evaluation set of one class has no AUC."""
    folder = site / "veilboost_runs" / "job-a"
    record = RunRecord.read(folder)
    dataclasses.replace(record, rounds=(RoundRow(0, 1.0, {"eval-auc": float("nan")}),)).write(folder)
    assert models(site) == 0 and "eval-auc nan" in capsys.readouterr().out


def test_tables_stay_aligned_whatever_names_are_written_in(site: Path, capsys) -> None:
    """A terminal gives a wide character two columns, and a decomposed accent none."""
    names = {"age": "\u8840\u5727", "value": "U\u0308bung"}
    for path in [*site.rglob("run.json"), *site.rglob("model.json")]:
        text = json.dumps(json.loads(path.read_text()))
        path.write_text(text.replace(json.dumps(COLUMNS), json.dumps([names.get(name, name) for name in COLUMNS])))
    rows(600, 1).rename(columns=names).to_csv(site / "august.csv", index=False)
    assert drift(site, rows(600, 2).rename(columns=names)) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if "% to " in line]
    assert all(any(line.startswith(name) for line in table) for name in names.values())
    assert len({cells(line[: line.index("% to ")]) for line in table}) == 1
