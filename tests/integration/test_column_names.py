"""Columns of any script go through every kind of job: the model names them as the site's file does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.cli.main import main
from nvflare_plugins.kinds.dpboost.job import DpBoostJob
from nvflare_plugins.kinds.dpboost.server import DpBoostServer
from nvflare_plugins.kinds.dpboost.training import run_dpboost_site
from nvflare_plugins.kinds.private_trees.job import PrivateTreesJob
from nvflare_plugins.kinds.vertical.model import PASSIVE_FILE
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.recipes.recipe import VerticalXGBRecipe
from nvflare_plugins.scoring import ScoringError, VeilBoostClassifier, load_model
from nvflare_plugins.scoring.model import FinishedModel
from nvflare_plugins.xgb.continuation import recalibrated
from nvflare_plugins.xgb.model_json import CATEGORIES_ATTRIBUTE, CLASSES_ATTRIBUTE
from tests.support.federation import Federation, Parties, succeed
from tests.support.federation import succeed as all_succeed
from tests.support.private_federation import DATA, PrivateFederation
from tests.support.vertical_federation import first_difference
from tests.support.vertical_jobs import POLICY, give_columns, job, merged, run
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
    federation = Federation.of(tmp_path, train=frame())
    params = {"objective": "binary:logistic", "max_depth": 3, "monotone_constraints": {NAMES[0]: 1}}
    job = HorizontalJob("train", LABEL, params, 3, categories={COLOUR: COLOURS}, label_classes=CLASSES)
    succeed(federation.run(job))
    check_model(federation.model(), tmp_path)


def test_a_finished_model_with_lists_is_continued(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path, train=frame())
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


# -- words in vertical jobs: lists of categories are public ------------------------------------------------------------


PARAMS_OF_WORDS = {"objective": "binary:logistic", "max_depth": 4, "max_bin": 16, "eval_metric": ["logloss", "auc"]}
CONSENTS = {**POLICY["consents"], "explain": True, "merge_model": True}
JOBS = ["Ärztin", "Bäcker", "Müller", "naïf", "東京", "never seen"]
SHOPS = [f"Straße {i}" for i in range(9)]
CARDS = ["ja", "nein", "früher"]
LISTS = {"site-1": {"job": JOBS}, "site-2": {"shop": SHOPS, "card": CARDS}}
COLUMNS = {"site-1": ["job", "age", "y"], "site-2": ["shop", "spent", "card"], "site-3": ["calls"]}
JOINED = ["job", "age", "site-2.f0", "site-2.f1", "site-2.f2", "site-3.f0"]


def table(n_rows: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, n, n_rows) for n in (len(JOBS) - 1, len(SHOPS), len(CARDS))]
    numbers = rng.normal(size=(n_rows, 3)).astype(np.float32)
    score = sum(rng.normal(size=9)[code] for code in codes) + numbers @ [1, -1, 0.5] + rng.normal(size=n_rows)
    frame = pd.DataFrame(numbers, columns=["age", "spent", "calls"])
    for name, listed, code in zip(("job", "shop", "card"), (JOBS, SHOPS, CARDS), codes, strict=True):
        frame[name] = np.array(listed, dtype=object)[code]
        frame.loc[rng.random(n_rows) < 0.05, name] = None
    return frame.assign(y=(score > 0).astype(np.float32))


TRAIN, HELD = table(500), table(120, 1)


def give(parties: Parties, name: str, frame: pd.DataFrame) -> None:
    for site, columns in COLUMNS.items():
        parties.give(site, name, frame[[c for c in columns if c in frame]])


@pytest.fixture
def parties(tmp_path) -> Parties:
    found = Parties(tmp_path, 3, {**POLICY, "consents": CONSENTS})
    give(found, "data", TRAIN)
    give(found, "held", HELD)
    return found


def training(**changes: object):
    return job(**{"params": PARAMS_OF_WORDS, "categories": LISTS, "eval_data_set": "held", "num_rounds": 4, **changes})


def positions(frame: pd.DataFrame) -> xgb.DMatrix:
    """Return the joined table as XGBoost sees it: places in the lists, columns in the order of the parties."""
    columns = []
    for site, names in COLUMNS.items():
        for name in names:
            listed = LISTS.get(site, {}).get(name)
            if name == "y":
                continue
            columns.append(
                frame[name] if listed is None else pd.Categorical(frame[name], listed).codes.astype(np.float32)
            )
    table = np.column_stack(columns).astype(np.float32)
    table[table == -1] = np.nan
    types = ["c", "float", "c", "float", "c", "float"]
    return xgb.DMatrix(table, label=frame.get("y"), feature_types=types, enable_categorical=True)


def central(num_rounds: int = 4) -> xgb.Booster:
    settings = {"tree_method": "hist", "nthread": 1, "seed": 0, **PARAMS_OF_WORDS}
    return xgb.train(settings, positions(TRAIN), num_rounds)


def words(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows under the merged model's names."""
    order = [name for names in COLUMNS.values() for name in names if name != "y"]
    return frame[order].set_axis(JOINED, axis=1)


def uses(parties: Parties, job_id: str, **fields: object):
    fields = {"model": "trained", "data_set": "new", **fields}
    return parties.run(run_inference, InferenceJob(**fields), job_id)


def test_from_words_to_a_merged_model_that_reads_words(parties):
    succeed(run(parties, training(), "trained"))
    reference = central()
    assert first_difference(merged(parties, "trained"), bytes(reference.save_raw("json"))) == ""
    record = json.loads((parties.run_folder("site-2", "trained") / "run.json").read_text())
    assert record["data"][0]["categories"]["shop"] == SHOPS
    importance = pd.read_csv(parties.run_folder("site-1", "trained") / "importance.csv")
    assert set(importance[importance.weight > 0].feature) > {"job", "f0"}

    rows = HELD.drop(columns="y")
    rows.loc[3, "job"] = "never seen"  # of the list, but in no training row
    give(parties, "new", rows)
    succeed(uses(parties, "predicted"))
    found = pd.read_parquet(parties.run_folder("site-1", "predicted") / "predictions.parquet")
    expected = reference.predict(positions(rows))
    value = next(name for name in found if name.startswith(("probability", "value", "prediction")))
    np.testing.assert_array_equal(found[value].to_numpy(np.float32), expected)
    succeed(uses(parties, "explained", action="explain"))
    told = pd.read_parquet(parties.run_folder("site-1", "explained") / "contributions.parquet")
    shap = reference.predict(positions(rows), pred_contribs=True)
    np.testing.assert_array_equal(told[[f"shap_{name}" for name in JOINED]].to_numpy(np.float32), shap[:, :-1])

    succeed(uses(parties, "merged", action="merge", data_set=None))
    model = parties.run_folder("site-1", "merged") / "merged_model.json"
    assert first_difference(model.read_bytes(), bytes(reference.save_raw("json"))) == ""
    scored = VeilBoostClassifier.load(model).predict_proba(words(rows))[:, 1]
    np.testing.assert_array_equal(scored, expected)


def test_a_word_outside_the_list_is_refused_or_missing(parties):
    succeed(run(parties, training(num_rounds=2), "trained"))
    rows = HELD.drop(columns="y").assign(shop=lambda f: f["shop"].where(f.index != 7, "Straße 99"))
    give(parties, "new", rows)
    refused = uses(parties, "refused")
    assert "public list of 9" in str(refused["site-2"]) and "99" not in str(refused)
    succeed(uses(parties, "missing", unknown_category_is_missing=True))
    found = pd.read_parquet(parties.run_folder("site-1", "missing") / "predictions.parquet")
    rows.loc[7, "shop"] = None
    value = next(name for name in found if name.startswith(("probability", "value", "prediction")))
    np.testing.assert_array_equal(found[value].to_numpy(np.float32), central(2).predict(positions(rows)))


def test_continued_and_resumed(parties):
    succeed(run(parties, training(num_rounds=2), "first"))
    succeed(run(parties, training(num_rounds=2, initial_model="first"), "second"))
    assert first_difference(merged(parties, "second"), bytes(central().save_raw("json"))) == ""
    shorter = {**LISTS, "site-2": {**LISTS["site-2"], "shop": [*SHOPS, "new"]}}
    other = run(parties, training(num_rounds=1, initial_model="first", categories=shorter), "other")
    assert all("other columns or categories" in str(error) for error in other.values()), other


def test_a_guarded_job_puts_rare_categories_together(parties):
    frame = table(1_200, 3)
    frame.loc[:6, "shop"] = "rare"
    give(parties, "data", frame)
    lists = {**LISTS, "site-2": {"card": CARDS, "shop": [*SHOPS, "rare", "rarer"]}}
    succeed(run(parties, training(preset="guarded", categories=lists), "guarded"))
    part = json.loads((parties.run_folder("site-2", "guarded") / "private_table.json").read_text())["part"]
    sets = [set(split[6]) for split in part["splits"] if split[2] == 0 and len(split) > 6]
    least = SHOPS.index(frame["shop"].value_counts()[SHOPS].idxmin())
    assert sets and all((9 in one) == (least in one) for one in sets)  # too few rows go where others go: never alone


def test_refusals_name_the_remedy(parties):
    long = {"site-2": {"shop": [f"s{i}" for i in range(33)]}}
    outcome = run(parties, training(preset="guarded", categories=long), "long")["site-2"]
    assert isinstance(outcome, PolicyRefusal) and "vertical.max_bins" in str(outcome) and "fewer names" in str(outcome)
    strange = run(parties, training(categories={"site-9": {"a": ["b"]}}), "strange")
    assert all("'site-9', which is not a site of this job" in str(error) for error in strange.values())
    with pytest.raises(ConfigurationError, match="categories names 'c'"):
        VerticalXGBRecipe("x", active="a", data_set="d", label="y", sites=["a", "b"], categories={"c": {"d": ["e"]}})


def test_text_without_a_list_is_refused_by_name(parties, tmp_path: Path):
    outcome = run(parties, training(categories={}), "none")["site-2"]
    assert isinstance(outcome, ConfigurationError) and "'shop'" in str(outcome) and "categor" in str(outcome)
