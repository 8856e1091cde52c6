"""Columns of any script go through every kind of job: the model names them as the site's file does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from nvflare_plugins.cli.main import main
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.kinds.private_trees.job import PrivateTreesJob
from nvflare_plugins.kinds.vertical.model import PASSIVE_FILE
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.scoring import ScoringError, load_model
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.continuation import recalibrated
from nvflare_plugins.xgb.model_json import CATEGORIES_ATTRIBUTE, CLASSES_ATTRIBUTE
from tests.support.federation import Federation, Parties, succeed
from tests.support.federation import succeed as all_succeed
from tests.support.private_federation import DATA, PrivateFederation
from tests.support.vertical_jobs import POLICY, give_columns, run
from tests.support.vertical_jobs import job as vertical_job

NAMES = ["Größe", '身長 "cm"', "🦊", "it's \\ {0} %s", "ß" * 200]
COLOUR, LABEL = "Farbe", "Übel"
COLOURS, CLASSES = ["rosé", "grün", "blau"], ["nein", "ja"]


def frame(n_rows: int = 600) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n_rows, len(NAMES))).astype(np.float32)
    colour = rng.integers(0, len(COLOURS), n_rows)
    label = (features[:, 0] + features[:, 4] + colour > 1).astype(int)
    table = pd.DataFrame(features, columns=NAMES)
    return table.assign(**{COLOUR: np.array(COLOURS)[colour], LABEL: np.array(CLASSES)[label]})


def check_model(model: bytes, folder: Path) -> None:
    """The model and a copy for others know columns, categories and classes; the report was written."""
    names = [*NAMES, COLOUR]
    booster = xgb.Booster(model_file=bytearray(model))
    assert booster.feature_names == names
    assert json.loads(booster.attr(CATEGORIES_ATTRIBUTE)) == {COLOUR: COLOURS}
    assert json.loads(booster.attr(CLASSES_ATTRIBUTE)) == CLASSES
    coded = frame()[NAMES].assign(**{COLOUR: pd.Categorical(frame()[COLOUR], categories=COLOURS).codes})
    matrix = xgb.DMatrix(coded.to_numpy(np.float32), feature_names=names)
    (folder / "model.json").write_bytes(model)
    assert main(["export", str(folder / "model.json"), str(folder / "copy.json")]) == 0
    copy = xgb.Booster(model_file=folder / "copy.json")
    assert copy.feature_names == names
    assert np.array_equal(copy.predict(matrix), booster.predict(matrix))
    scorer = load_model(folder / "copy.json")
    answers, clipped_at = booster.predict(matrix), scorer.model_.clipped_at
    wanted = answers if clipped_at is None else recalibrated(answers, clipped_at)
    assert np.array_equal(scorer.predict_proba(frame()[names[::-1]])[:, 0], wanted)
    assert scorer.classes_.tolist() == CLASSES[::-1]
    assert list(folder.rglob("report.html"))


def test_horizontal(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.give_data("train", frame())
    params = {"objective": "binary:logistic", "max_depth": 3, "monotone_constraints": {NAMES[0]: 1}}
    job = HorizontalJob("train", LABEL, params, 3, categories={COLOUR: COLOURS}, label_classes=CLASSES)
    succeed(federation.run(job))
    check_model(federation.model(), tmp_path)


def test_a_finished_model_with_lists_is_continued(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.give_data("train", frame())
    public = {"categories": {COLOUR: COLOURS}, "label_classes": CLASSES}
    params = {"objective": "binary:logistic", "max_depth": 3}
    succeed(federation.run(HorizontalJob("train", LABEL, params, 2, **public), "first"))
    first = federation.model("first")
    for site in federation.sites:
        federation.set_policy(site, consents={"recompute_with_changes": True, "second_quantile_search": True})
        inputs = federation.workspace(site) / "inputs"
        inputs.mkdir(exist_ok=True)
        (inputs / "first.json").write_bytes(first)
    succeed(federation.run(HorizontalJob("train", LABEL, params, 2, initial_model="first.json", **public), "second"))
    booster = xgb.Booster(model_file=bytearray(federation.model("second")))
    assert booster.num_boosted_rounds() == 4
    check_model(federation.model("second"), tmp_path)
    turned = {**public, "label_classes": CLASSES[::-1]}
    outcomes = federation.run(HorizontalJob("train", LABEL, params, 2, initial_model="first.json", **turned), "turned")
    assert "trained with other label_classes" in str(outcomes["site-1"])


@pytest.mark.parametrize("method", ["default", "dp_tr_newton", "feverless"])
def test_private_trees(tmp_path: Path, method: str) -> None:
    federation = PrivateFederation(tmp_path, frame())
    document = {
        "data_set": DATA,
        "label": LABEL,
        "epsilon": 1.0,
        "delta": 1e-5,
        "method": method,
        "feature_bounds": {name: [-3.0, 3.0] for name in NAMES},
        "categories": {COLOUR: COLOURS},
        "label_classes": CLASSES,
        "components": {"n_trees": 4},
    }
    federation.run_private(PrivateTreesJob.from_dict(document)).succeed()
    check_model(federation.model(), tmp_path)
    with pytest.raises(ScoringError, match="those of private trees are noised"):
        FinishedModel(federation.model(), "model.json").check_explainable()


def test_dpboost(tmp_path: Path) -> None:
    parties = Parties(tmp_path, policy={"unsigned_sessions": True, "data_sets": {}, "allowed_profiles": ["dp_trusted"]})
    table = frame().assign(id=range(600))
    budget = {"epsilon": 9.0, "delta": 1e-6, "pure_epsilon": 8.0}
    for number, site in enumerate(parties.sites):
        parties.give(site, "rows", table.iloc[number::3], id="id", privacy=budget)
    job = DpBoostJob.from_dict(
        {
            "data_set": "rows",
            "label": LABEL,
            "epsilon": 2.0,
            "feature_bounds": {name: [-3, 3] for name in NAMES},
            "categories": {COLOUR: COLOURS},
            "label_classes": CLASSES,
            "n_trees": 2,
            "trees_per_ensemble": 2,
            "depth": 2,
        }
    )
    server = DpBoostServer(job)
    all_succeed(
        parties.run(run_dpboost_site, job, on_sum=lambda frame, total: server.answer(frame, total, lambda *spend: None))
    )
    check_model((parties.run_folder("site-1", "job") / "model.json").read_bytes(), tmp_path)


def test_vertical_training_and_merging(tmp_path: Path) -> None:
    policy = {**POLICY, "consents": {**POLICY["consents"], "merge_model": True}}
    parties = Parties(tmp_path, 3, policy)
    table = frame()[NAMES].assign(y=(frame()[LABEL] == "ja").astype(np.float32), id=[f"p{i}" for i in range(600)])
    give_columns(parties, "data", table, (2, 2, 1))
    document = parties.policy_of("site-2")
    document["data_sets"]["data"]["aliases"] = {NAMES[2]: "Länge", NAMES[3]: "年齢"}
    parties.set_policy("site-2", **document)
    job = vertical_job(label_classes=[0, 1])
    assert not [o for o in run(parties, job, "train").values() if isinstance(o, Exception)]
    all_succeed(parties.run(run_inference, InferenceJob(model="train", action="merge"), "merged"))
    merged = xgb.Booster(model_file=parties.run_folder("site-1", "merged") / "merged_model.json")
    assert merged.feature_names[:2] == NAMES[:2]
    assert merged.feature_names[2:] == ["site-2.Länge", "site-2.年齢", "site-3.f0"]
    whole = load_model(parties.run_folder("site-1", "merged") / "merged_model.json")
    assert whole.classes_.tolist() == [0, 1]
    rows = table[NAMES].set_axis(merged.feature_names, axis=1)
    wanted = merged.predict(xgb.DMatrix(rows))
    assert np.array_equal(whole.predict_proba(rows[merged.feature_names[::-1]])[:, 1], wanted)
    assert np.isfinite(whole.model_.contributions(rows.to_numpy(np.float32))).all()
    for site, name in (("site-1", "vertical_model.json"), ("site-1", "masked_model.json"), ("site-2", PASSIVE_FILE)):
        with pytest.raises(ScoringError, match="one party's part of a vertical model"):
            load_model(parties.run_folder(site, "train") / name)
