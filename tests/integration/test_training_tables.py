"""Tables of all kinds and any number of sites, in whole federations, against what stock XGBoost does centrally."""

from __future__ import annotations

import json
import logging

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import PolicyRefusal
from tests.support.examples import slow
from tests.support.federation import Federation, central_model, leaf_difference, succeed
from tests.support.horizontal_jobs import LABEL_MEAN_TOLERANCE, LOGISTIC, federate, job, spaced, table

COLOURS = [f"colour {i}" for i in range(9)]


def coloured() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a table with a column of texts, and the same with codes of the public list."""
    frame = table(600)
    codes = np.random.default_rng(1).integers(0, len(COLOURS), len(frame))
    frame["y"] = ((codes % 3 == 1) ^ (frame.y == 1)).astype(np.float32)
    texts = frame.assign(colour=np.array(COLOURS)[codes])[["f0", "colour", "f1", "y"]]
    numbers = frame.assign(colour=codes.astype(np.float32))[["f0", "colour", "f1", "y"]]
    texts.loc[5:9, "colour"], numbers.loc[5:9, "colour"] = None, np.nan
    return texts, numbers


@pytest.mark.parametrize(
    "params", [{"max_cat_to_onehot": 2}, {"max_cat_to_onehot": 100}, *slow({"max_cat_threshold": 3})]
)
def test_categories_equal_central_training_on_their_codes(tmp_path, params):
    texts, numbers = coloured()
    # Sorted by category: no site holds them all.
    parts = np.array_split(np.argsort(numbers.colour.to_numpy(), kind="stable"), 3)
    federation = federate(tmp_path, texts, job(params, categories={"colour": COLOURS}), parts=parts)
    settings = {**LOGISTIC, **params}
    central = central_model(numbers, "y", settings, federation.cuts(), 4, n_categories={1: len(COLOURS)})
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE
    trees = json.loads(federation.model())["learner"]["gradient_booster"]["model"]["trees"]
    assert any(tree["categories"] for tree in trees), "no split used the categories"


def test_unknown_categories_are_refused_or_missing_by_choice(tmp_path):
    texts, numbers = coloured()
    known = COLOURS[:-1]
    federation = Federation.of(tmp_path, train=texts)
    outcomes = federation.run(job(categories={"colour": known}), "refused")
    refused = [e for e in outcomes.values() if isinstance(e, ConfigurationError)]
    assert refused and all("'colour'" in str(e) and COLOURS[-1] not in str(e) for e in refused)
    succeed(federation.run(job(categories={"colour": known}, unknown_category_is_missing=True)))
    numbers.loc[numbers.colour == len(known), "colour"] = np.nan
    central = central_model(numbers, "y", LOGISTIC, federation.cuts(), 4, n_categories={1: len(known)})
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


def test_label_classes_are_positions_in_the_public_list(tmp_path):
    frame = table()
    named = frame.assign(y=np.where(frame.y == 1, "ill", "well"))
    federation = federate(tmp_path, named, job(label_classes=["well", "ill"]))
    central = central_model(frame, "y", LOGISTIC, federation.cuts(), 4)
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


ODD_TABLES = {
    "one_feature": lambda f: f[["f0", "y"]],
    "constant_column": lambda f: f.assign(f1=np.float32(7)),
    "all_missing_column": lambda f: f.assign(f1=np.float32(np.nan)),
    "only_constant": lambda f: f.assign(f0=np.float32(1))[["f0", "y"]],
    "only_missing": lambda f: f.assign(f0=np.float32(np.nan))[["f0", "y"]],
    "huge": lambda f: f.assign(f0=f.f0 * np.float32(1e20), f3=f.f3 * np.float32(-3e37 / 5)),
    "tiny": lambda f: f.assign(f0=f.f0 * np.float32(1e-30)),
    "integers": lambda f: f.assign(f0=np.arange(len(f)) * 7919 % 100_000, f1=np.arange(len(f)) % 3),
    "booleans": lambda f: f.assign(f0=f.f0 > 0),
    "one_class": lambda f: f.assign(y=np.float32(1)),
}


NEAR = ("only_constant", "only_missing", "booleans")  # to those of several columns, and to integers


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        pytest.param(
            name,
            cuts,
            id=f"{name}-{cuts}",
            marks=[pytest.mark.slow] if name in NEAR or (cuts == "exact" and name != "huge") else [],
        )
        for name in ODD_TABLES
        for cuts in ("quantile", "exact")
    ],
)
def test_odd_tables_equal_central(tmp_path, name, cuts):
    frame = ODD_TABLES[name](table(200))
    params = {"base_score": 0.5} if name == "one_class" else {}
    federation = federate(tmp_path, frame, job(params, 2, cuts=cuts))
    central = central_model(frame.astype(np.float32), "y", {**LOGISTIC, **params}, federation.cuts(), 2)
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE


def test_values_beyond_the_outermost_cut_are_refused_before_anything_is_sent(tmp_path):
    federation = Federation.of(tmp_path, train=table(90).assign(f2=np.float32(2e38)))
    frames: list = []
    outcomes = federation.run(job(), frames=frames)
    assert all("'f2'" in str(e) for e in outcomes.values() if isinstance(e, ConfigurationError))
    assert any(isinstance(e, ConfigurationError) for e in outcomes.values()) and not frames


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"objective": "reg:absoluteerror"},
        *slow({"objective": "reg:quantileerror", "quantile_alpha": 0.3}, {"objective": "count:poisson"}),
        *slow({"objective": "multi:softprob", "num_class": 2}, {"subsample": 0.5}),
    ],
)
def test_a_site_of_one_row(tmp_path, params):
    frame = table(200)
    parts = [np.arange(1), np.arange(1, 60), np.arange(60, 200)]
    training = spaced(params, evaluate_training=True, finest_exponent=-30)
    masked = federate(tmp_path / "masks", frame, training, parts=parts)
    plain = federate(tmp_path / "plain", frame, spaced(params, profile="plain", finest_exponent=-30), parts=parts)
    assert masked.model() == plain.model()


@pytest.mark.parametrize("profile", ["masks", *slow("bfv", "ckks")])
def test_ten_sites(tmp_path, profile):
    frame = table(600)
    federation = federate(tmp_path, frame, job(num_rounds=2, profile=profile), n_sites=10)
    central = central_model(frame, "y", LOGISTIC, federation.cuts(), 2)
    assert leaf_difference(federation.model(), central) <= (1e-6 if profile == "ckks" else LABEL_MEAN_TOLERANCE)


def test_two_sites_only_by_consent(tmp_path):
    federation = Federation(tmp_path, n_sites=2)
    frame = table(100)
    federation.give_data("train", frame)
    frames: list = []
    outcomes = federation.run(job(), frames=frames)
    assert any(isinstance(e, PolicyRefusal) and "fewer_than_three_sites" in str(e) for e in outcomes.values())
    assert not frames
    federation.set_policies(min_sites=2, max_colluders=0, consents={"fewer_than_three_sites": True})
    succeed(federation.run(job(), "consented"))
    central = central_model(frame, "y", LOGISTIC, federation.cuts("consented"), 4)
    assert leaf_difference(federation.model("consented"), central) <= LABEL_MEAN_TOLERANCE


@pytest.mark.parametrize("profiles", [("plain", "masks", "bfv"), *slow((("plain", "masks", "ckks"),))], ids="-".join)
def test_growing_gradients_find_new_scales(tmp_path, profiles):
    """A learning rate far too high: gradients outgrow every scale agreed at the start, several times."""
    frame = table(200)
    params = {"objective": "reg:squarederror", "learning_rate": 30.0, "max_depth": 2}
    fields = {"finest_exponent": -10, "evaluate_training": True}
    jobs = {profile: spaced(params, 5, profile=profile, **fields) for profile in profiles}
    models = [federate(tmp_path / profile, frame, one).model() for profile, one in jobs.items()]
    assert len(set(models)) == 1
    prediction = xgb.Booster(model_file=bytearray(models[0])).predict(xgb.DMatrix(frame.drop(columns="y")))
    assert np.abs(prediction).max() > 1e6


def test_the_model_is_equal_everywhere_and_stock_xgboost_reads_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    frame = table(200)
    federation = federate(tmp_path, frame, job(evaluate_training=True))
    booster = xgb.Booster(model_file=bytearray(federation.model()))
    assert booster.feature_names == ["f0", "f1", "f2", "f3"]
    assert booster.predict(xgb.DMatrix(frame.drop(columns="y"))).shape == (200,)
    assert "agreed on" in caplog.text


def test_tuples_and_lists_in_a_job_mean_the_same(tmp_path):
    params = {"monotone_constraints": (1, 0, 0, 0), "interaction_constraints": (("f0", "f1"), ("f2", "f3"))}
    frame = table(150)
    federation = federate(tmp_path, frame, job(params))
    plain = {**LOGISTIC, "monotone_constraints": "(1,0,0,0)", "interaction_constraints": "[[0, 1], [2, 3]]"}
    central = central_model(frame, "y", plain, federation.cuts(), 4)
    assert leaf_difference(federation.model(), central) <= LABEL_MEAN_TOLERANCE
