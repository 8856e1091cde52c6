"""What joining is worth to a site: measured on its own rows, honest about few rows, and written for it alone."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from nvflare_plugins.cli.main import main
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, load_table
from nvflare_plugins.pages.profile_page import Compared, Comparison, comparison_html
from nvflare_plugins.pages.run_record import EVALUATION, DataFacts, RunRecord
from nvflare_plugins.scoring import comparison
from nvflare_plugins.xgb.model_json import with_lists

PARAMS = {"objective": "binary:logistic", "max_depth": 3, "seed": 0, "learning_rate": 0.3}
WARDS = ["surgery", "other"]
ROUNDS = 8


@pytest.fixture(autouse=True)
def few_resamplings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_RESAMPLINGS", 40)


def rows(n: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(n, 3)), columns=["age", "dose", "noise"])
    frame["ward"] = np.array(WARDS)[random.integers(0, 2, n)]
    score = frame.age + frame.dose * (frame.ward == "surgery") + 0.5 * random.normal(size=n)
    return frame.assign(outcome=np.where(score > 0, "ill", "well"))


def workspace(folder: Path, n_training: int = 120, n_evaluation: int = 400, n_others: int = 4000) -> tuple[Path, Path]:
    """Make a site's workspace with a finished run, whose model has seen the rows of others too."""
    own, evaluation, others = rows(n_training, 1), rows(n_evaluation, 2), rows(n_others, 3)
    own.to_csv(folder / "train.csv", index=False)
    evaluation.to_csv(folder / "test.csv", index=False)
    pd.concat([own, others]).to_csv(folder / "all.csv", index=False)
    (folder / "local").mkdir()
    sets = {name: {"path": f"{name}.csv"} for name in ("train", "test")}
    (folder / "local" / "veilboost.json").write_text(json.dumps({"data_sets": sets}))
    lists = {"label": "outcome", "categories": {"ward": WARDS}, "label_classes": ["well", "ill"]}
    table = load_table(DataSet(name="all", path=folder / "all.csv", format="csv"), **lists)
    matrix = xgb.DMatrix(
        table.features,
        label=table.label,
        feature_names=list(table.feature_names),
        feature_types=list(table.feature_types),
        enable_categorical=True,
    )
    model = bytes(xgb.train({**PARAMS, "nthread": 1}, matrix, ROUNDS).save_raw("json"))
    run = folder / "veilboost_runs" / "job"
    run.mkdir(parents=True)
    (run / "model.json").write_bytes(with_lists(model, table.feature_names, {"ward": WARDS}, ["well", "ill"]))
    facts = replace(DataFacts.of(table, "train"), rows=n_training)
    RunRecord(
        job_id="job",
        attempt="a",
        site="site-1",
        sites=("site-1", "site-2", "site-3"),
        profile="masks",
        params=PARAMS,
        model="model.json",
        data=(facts, replace(facts, name="test", use=EVALUATION, rows=n_evaluation)),
    ).write(run)
    return run, folder


def test_a_site_with_few_rows_gains_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = workspace(tmp_path)
    before = sorted(path.name for path in folder.rglob("*"))
    assert main(["compare", str(run)]) == 0
    said = capsys.readouterr().out
    assert "AUC" in said and "federated is better" in said.splitlines()[0]
    page = run / "local.html"
    assert stat.S_IMODE(os.stat(page).st_mode) == 0o600
    assert sorted(path.name for path in folder.rglob("*")) == sorted([*before, "local.html"])
    html = page.read_text()
    assert (
        "120 rows of data set train" in html
        and "400 evaluation rows" in html
        and "sent nowhere" in html
        and "<svg" in html
    )
    # The number of the page is that of the model, scored by XGBoost itself on positions worked out by hand.
    test = rows(400, 2)
    values = test[["age", "dose", "noise"]].assign(ward=[float(WARDS.index(w)) for w in test.ward])
    booster = xgb.Booster(model_file=run / "model.json")
    types = ["float", "float", "float", "c"]
    positions = xgb.DMatrix(
        values.to_numpy(np.float32), feature_names=list(values), feature_types=types, enable_categorical=True
    )
    wanted = roc_auc_score(test.outcome == "ill", booster.predict(positions))
    assert f"federated {wanted:.4g}" in said


def test_a_site_whose_rows_are_enough_gains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = workspace(tmp_path, n_training=4000, n_others=4)
    assert main(["compare", str(run)]) == 0
    assert "no difference that these rows could show" in capsys.readouterr().out.splitlines()[0]


def test_what_cannot_be_compared_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = workspace(tmp_path, n_others=50)

    def refused(*arguments: str) -> str:
        assert main(["compare", str(run), *arguments]) == 1
        return capsys.readouterr().err

    record = RunRecord.read(run)
    assert "trained on data set 'train'" in refused("--data-set", "train")
    assert "data_sets" in refused("--data-set", "unknown")
    assert "veilboost.json" in refused("--workspace", str(folder / "veilboost_runs"))
    replace(record, data=record.data[:1]).write(run)
    assert "--data-set NAME" in refused()
    replace(record, profile="paillier").write(run)
    assert "no horizontal training" in refused()
    replace(record, data=()).write(run)
    assert "no horizontal training" in refused()
    record.write(run)
    table = pd.read_csv(folder / "train.csv")
    table[table.outcome == "ill"].to_csv(folder / "train.csv", index=False)
    assert "all of one class" in refused()
    table[:0].to_csv(folder / "train.csv", index=False)
    assert "0 training rows" in refused()
    table.assign(ward="attic").to_csv(folder / "train.csv", index=False)
    assert "ward" in refused() and not (run / "local.html").exists()


def test_a_changed_file_is_said_to_be_one(tmp_path: Path) -> None:
    run, folder = workspace(tmp_path, n_others=50)
    pd.read_csv(folder / "train.csv")[:100].to_csv(folder / "train.csv", index=False)
    assert main(["compare", str(run)]) == 0
    assert "Data set train had 120 rows in the run and has 100 now" in (run / "local.html").read_text()


def test_verdicts_follow_the_interval_and_the_direction() -> None:
    up = Compared("AUC", True, 0.7, 0.8, 0.9, 0.05, 0.15)
    assert (up.best_alone, up.verdict) == (0.8, "federated is better")
    assert replace(up, low=-0.1).verdict == "no difference that these rows could show"
    down = Compared("RMSE", False, 3.0, None, 4.0, 0.5, 1.5)
    assert (down.best_alone, down.verdict) == (3.0, "this site alone is better")


def test_foreign_text_is_escaped() -> None:
    hostile = "<script>x</script>"
    metric = Compared(hostile, True, 0.7, None, 0.9, 0.05, 0.15)
    html = comparison_html(Comparison(hostile, hostile, hostile, 1, 1, 2, None, (metric,), notes=(hostile,)))
    assert "<script" not in html and "&lt;script&gt;" in html


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outcome": 0.9}, "none of the model's 2 classes"),
        ({"outcome": 7.0}, "none of the model's 2 classes"),
        ({"w": 0.0}, "0 evaluation rows that count"),
        ({"outcome": 1.0}, "all of one class"),
    ],
    ids=str,
)
def test_rows_that_no_metric_takes_are_refused_in_words(
    change: dict[str, float], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels between the classes pass binary:logistic; scikit-learn's own errors were tracebacks."""
    run, folder = workspace(tmp_path)
    record = json.loads((run / "run.json").read_text())
    for name in ("train", "test"):
        frame = pd.read_csv(folder / f"{name}.csv")
        frame = frame.assign(outcome=(frame.outcome == "ill").astype(float), w=1.0)
        frame.assign(**(change if name == "test" else {})).to_csv(folder / f"{name}.csv", index=False)
    data = [{**facts, "label_classes": [], "weight": "w"} for facts in record["data"]]
    (run / "run.json").write_text(json.dumps({**record, "data": data}))
    assert main(["compare", str(run)]) == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.startswith("veilboost compare: ") and not (run / "local.html").exists()


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_a_table_that_is_read_in_passes_is_compared_as_a_held_one(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table.blocks, "__defaults__", (60,))
    run, folder = workspace(tmp_path, n_training=150)
    frames = {name: pd.read_csv(folder / f"{name}.csv") for name in ("train", "test")}
    document = json.loads((run / "run.json").read_text())
    for number, (name, frame) in enumerate(frames.items()):
        frame.loc[number::7, ["age", "ward"]] = None
        frame["Gewicht in größen"] = np.random.default_rng(number).random(len(frame))
        if task == "numbers":
            frame["outcome"] = np.nan_to_num(frame.age) + frame.dose
        frame.to_parquet(folder / f"{name}.parquet", index=False)
        (folder / name).mkdir()
        for part, rows in enumerate(np.array_split(np.arange(len(frame)), 3)):
            frame.iloc[rows].to_parquet(folder / name / f"{part}.parquet", index=False, row_group_size=17)
    for facts in document["data"]:
        facts["weight"] = "Gewicht in größen"
        facts["label_classes"] = [] if task == "numbers" else facts["label_classes"]
    if task == "numbers":
        document["params"]["objective"] = "reg:squarederror"
        model = json.loads((run / "model.json").read_text())
        model["learner"]["objective"] = {"name": "reg:squarederror", "reg_loss_param": {"scale_pos_weight": "1"}}
        model["learner"]["attributes"] = {
            name: value for name, value in model["learner"]["attributes"].items() if "class" not in name
        }
        (run / "model.json").write_text(json.dumps(model))
    (run / "run.json").write_text(json.dumps(document))
    found = []
    for ending in (".parquet", ""):
        policy = {"data_sets": {name: {"path": f"{name}{ending}"} for name in frames}}
        (folder / "local" / "veilboost.json").write_text(json.dumps(policy))
        assert main(["compare", str(run)]) == 0
        found.append((capsys.readouterr().out, (run / "local.html").read_text()))
    assert found[0] == found[1]


def test_rounds_are_chosen_and_trees_trained_as_xgboost_does_on_held_rows(tmp_path: Path) -> None:
    _, folder = workspace(tmp_path, n_training=300)
    table = load_table(
        DataSet(name="train", path=folder / "train.csv", format="csv"),
        label="outcome",
        categories={"ward": WARDS},
        label_classes=["well", "ill"],
    )
    matrix = xgb.DMatrix(
        table.features,
        label=table.label,
        feature_names=list(table.feature_names),
        feature_types=list(table.feature_types),
        enable_categorical=True,
    )
    options = {**PARAMS, "nthread": 1}
    alone = xgb.train(options, matrix, ROUNDS)
    assert comparison.train_alone(PARAMS, table, ROUNDS).save_raw("json") == alone.save_raw("json")
    options["eval_metric"] = "logloss"
    history = xgb.cv(options, matrix, 30, nfold=5, stratified=True, seed=0, as_pandas=False)
    assert comparison.best_rounds(PARAMS, table, 30) == int(np.argmin(history["test-logloss-mean"])) + 1 < 30
