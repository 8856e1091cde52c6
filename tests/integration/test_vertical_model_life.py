"""From a vertical training job to predictions with what it left at the sites, beside centralized XGBoost."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xgboost as xgb

from he_processors.errors import AuthenticationError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.kinds.vertical_inference.job import InferenceJob
from nvflare_plugins.kinds.vertical_inference.site import run_inference
from nvflare_plugins.wire.envelope import Kind, unpack
from tests.support.examples import slow
from tests.support.federation import Parties, succeed
from tests.support.vertical_federation import first_difference
from tests.support.vertical_jobs import PARAMS, POLICY, central, federation, give_columns, job, run, table

FRAME = table(390)
TRAIN, HELD = FRAME.iloc[:300], FRAME.iloc[300:]


def use(parties: Parties, job_id: str = "use", tamper=None, **fields):
    wanted = InferenceJob(**{"model": "job", "data_set": "held", **fields})
    return parties.run(run_inference, wanted, job_id, tamper=tamper)


def predictions(parties: Parties, job_id: str = "use", site: str = "site-1") -> np.ndarray:
    path = parties.run_folder(site, job_id) / "predictions.parquet"
    return pd.read_parquet(path)["prediction"].to_numpy(np.float32)


def expected(reference: xgb.Booster, frame: pd.DataFrame = HELD, **options) -> np.ndarray:
    return reference.predict(xgb.DMatrix(frame[[c for c in frame if c.startswith("c")]].to_numpy()), **options)


def test_train_then_predict_then_merge(tmp_path):
    parties = federation(tmp_path)
    succeed(run(parties, job()))
    reference = central(TRAIN, 4)
    gains = pd.read_csv(parties.run_folder("site-1") / "importance.csv")["total_gain"]
    assert sorted(gains[gains > 0]) == sorted(reference.get_score(importance_type="total_gain").values())
    succeed(use(parties))
    np.testing.assert_array_equal(predictions(parties), expected(reference))
    parties.set_policies(consents={**POLICY["consents"], "merge_model": True, "explain": True})
    succeed(use(parties, "merge", action="merge", data_set=None))
    merged = (parties.run_folder("site-1", "merge") / "merged_model.json").read_bytes()
    assert first_difference(merged, bytes(reference.save_raw("json"))) == ""
    succeed(use(parties, "explain", action="explain"))
    shown = pd.read_parquet(parties.run_folder("site-1", "explain") / "contributions.parquet").drop(columns="row")
    np.testing.assert_array_equal(shown.to_numpy(np.float32), expected(reference, pred_contribs=True))


def test_the_best_rounds_of_a_continued_model(tmp_path):
    parties = federation(tmp_path)
    params = {**PARAMS, "eta": 1.0}
    succeed(run(parties, job(num_rounds=2, params=params), "first"))
    succeed(
        run(
            parties,
            job(num_rounds=30, params=params, initial_model="first", eval_data_set="held", early_stopping_rounds=3),
        )
    )
    first = central(TRAIN, 2, params)
    reference = central(TRAIN, 30, params, held=HELD, xgb_model=first, early_stopping_rounds=3)
    assert reference.num_boosted_rounds() < 32
    succeed(use(parties, rounds="best"))
    kept = (0, reference.best_iteration + 1)
    np.testing.assert_array_equal(predictions(parties), expected(reference, iteration_range=kept))


def test_alignment_of_the_training_job_is_used_again(tmp_path):
    frame = FRAME.assign(id=[f"person-{i:04}" for i in range(390)])
    parties = Parties(tmp_path, 2, {**POLICY, "vertical": {"min_intersection": 20}})
    for name, rows in (("data", frame.iloc[:300]), ("held", frame.iloc[300:])):
        give_columns(parties, name, rows, (2, 4))
        for seed, site in enumerate(parties.sites):
            path = parties.workspace(site) / f"{name}.parquet"
            pd.read_parquet(path).iloc[5 * seed :].sample(frac=1, random_state=seed).to_parquet(path, index=False)
    succeed(run(parties, job(alignment="first", eval_data_set="held")))
    succeed(use(parties, alignment="job"))
    reference = central(frame.iloc[5:300], 4)
    np.testing.assert_array_equal(predictions(parties), expected(reference, frame.iloc[305:]))
    ids = pd.read_parquet(parties.run_folder("site-1", "use") / "predictions.parquet")["id"].tolist()
    assert ids == frame["id"].tolist()[305:]


def test_a_guarded_model_predicts_as_its_merged_form(tmp_path):
    parties = federation(tmp_path)
    succeed(run(parties, job(preset="guarded")))
    parties.set_policies(consents={**POLICY["consents"], "merge_model": True})
    succeed(use(parties))
    succeed(use(parties, "merge", action="merge", data_set=None))
    booster = xgb.Booster(model_file=parties.run_folder("site-1", "merge") / "merged_model.json")
    booster.feature_names = booster.feature_types = None
    np.testing.assert_array_equal(predictions(parties), expected(booster))


def test_an_active_party_with_the_label_alone(tmp_path):
    parties = federation(tmp_path, 3, (0, 2, 1))
    succeed(run(parties, job()))
    succeed(use(parties))
    frame = table(390, 3)
    np.testing.assert_array_equal(predictions(parties), expected(central(frame.iloc[:300], 4), frame.iloc[300:]))


def test_any_party_may_be_the_active_one(tmp_path):
    parties = Parties(tmp_path, 2, dict(POLICY))
    for name, rows in (("data", TRAIN), ("held", HELD)):
        parties.give("site-1", name, rows[["c0", "c1", "c2"]])
        parties.give("site-2", name, rows[["c3", "c4", "c5", "y"]])
    # The party with the label hands out no sums, and needs no consent to that.
    parties.set_policy("site-2", consents={"plain_profile": True, "recompute_with_changes": True})
    succeed(run(parties, job(active="site-2", num_rounds=2), "first"))
    succeed(run(parties, job(active="site-2", num_rounds=2, initial_model="first")))
    succeed(use(parties))
    order = ["c3", "c4", "c5", "c0", "c1", "c2"]
    reference = central(TRAIN[[*order, "y"]], 2, xgb_model=central(TRAIN[[*order, "y"]], 2))
    np.testing.assert_array_equal(predictions(parties, site="site-2"), expected(reference, HELD[order]))


def at_conversation(n: int, act):
    """Return a tamper that acts on a site's n-th frame of the conversation."""
    seen = []

    def tamper(frame: bytes) -> bytes:
        if unpack(frame).kind is Kind.CONVERSATION:
            seen.append(frame)
            if len(seen) == n:
                return act(frame)
        return frame

    return tamper


def fails(frame: bytes) -> bytes:
    raise JobAborted("this site's process ends")


def flips(frame: bytes) -> bytes:
    return frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:]


@pytest.mark.parametrize(
    ("act", "kind", "site"),
    [
        *((fails, JobAborted, "site-1"), (flips, AuthenticationError, "site-3")),
        *slow((fails, JobAborted, "site-3"), (flips, AuthenticationError, "site-1")),
    ],
)
def test_a_party_that_fails_midway_leaves_no_result(tmp_path, site, act, kind):
    parties = federation(tmp_path)
    succeed(run(parties, job()))
    outcomes = use(parties, tamper={site: at_conversation(2, act)})
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values())
    assert any(isinstance(outcome, kind) for outcome in outcomes.values())
    assert not list(parties.run_folder("site-1", "use").glob("predictions*"))
    assert not (parties.run_folder("site-1", "use") / "run.json").exists()
