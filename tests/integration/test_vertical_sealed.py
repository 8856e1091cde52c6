"""Whole vertical jobs in the preset sealed: trained, resumed, refused, and what is recorded."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import veilboost as vb
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.kinds.vertical import active_party
from tests.support.federation import Parties, succeed
from tests.support.vertical_jobs import POLICY, give_columns, job, merged, run, table

PARAMS = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 16, "eta": 0.3}
SEALED = {"preset": "sealed", "profile": "paillier", "key_bits": 2048, "num_rounds": 3, "params": PARAMS}
N_ROWS = 300


def parties_with(folder, n_rows: int = N_ROWS, n_sites: int = 2, widths=(2, 4)) -> Parties:
    parties = Parties(folder, n_sites, {**POLICY, "allowed_profiles": ["paillier"], "min_key_bits": 2048})
    give_columns(parties, "data", table(n_rows, sum(widths)), widths)
    return parties


def auc_of(model: bytes, n_rows: int = N_ROWS) -> float:
    frame = table(n_rows, 6)
    booster = xgb.Booster(model_file=bytearray(model))
    rows = xgb.DMatrix(frame.drop(columns="y").to_numpy())
    return roc_auc_score(frame.y, booster.predict(rows, validate_features=False))


def test_a_job_trains_as_well_as_in_the_open_and_says_what_it_is(tmp_path):
    parties = parties_with(tmp_path)
    succeed(run(parties, job(**SEALED)))
    frame = table(N_ROWS, 6)
    central = xgb.train({**PARAMS, "seed": 0}, xgb.DMatrix(frame.drop(columns="y").to_numpy(), label=frame.y), 3)
    assert abs(auc_of(merged(parties)) - auc_of(bytes(central.save_raw("json")))) < 0.01
    active = json.loads((parties.run_folder("site-1") / "run.json").read_text())
    assert any("compared under seal" in note for note in active["notes"])
    importance = (parties.run_folder("site-1") / "importance.csv").read_text()
    assert "(any column)" in importance and "site-2,x" not in importance
    text = "".join(path.read_text() for path in parties.run_folder("site-2").rglob("*evidence*") if path.is_file())
    assert "who wins each node" in text and "TWO_PARTY" in text


def test_a_lost_job_is_resumed_under_new_transfers_and_masks(tmp_path, monkeypatch):
    offers, made = [], active_party.SealedTraining

    def noted(plan, party, deadline_s):
        found = made(plan, party, deadline_s)
        offers.append(found.owner.offset.tobytes())
        return found

    monkeypatch.setattr(active_party, "SealedTraining", noted)
    parties, stopped = parties_with(tmp_path), job(**SEALED)

    def stop(self, number):
        if number == 2:
            raise JobAborted("stopped by the test")
        return turn(self, number)

    turn = active_party.VerticalTraining._grow_round
    with monkeypatch.context() as patch:
        patch.setattr(active_party.VerticalTraining, "_grow_round", stop)
        outcomes = run(parties, stopped, "lost")
    assert isinstance(outcomes["site-1"], JobAborted)
    succeed(run(parties, job(**SEALED, resume_from="lost"), "resumed"))
    succeed(run(parties, stopped, "whole"))
    assert len(set(offers)) == 3
    assert np.isclose(auc_of(merged(parties, "resumed")), auc_of(merged(parties, "whole")))


@pytest.mark.parametrize(
    ("n_sites", "widths", "cluster", "words"),
    [
        (3, (2, 2, 2), None, "exactly two parties"),
        (2, (2, 4), {"scheduler": "tcp://127.0.0.1:1", "workers": 2}, "has a cluster"),
    ],
)
def test_more_parties_and_clusters_are_refused(tmp_path, n_sites, widths, cluster, words):
    parties = parties_with(tmp_path, 60, n_sites, widths)
    if cluster is not None:
        parties.set_policy("site-2", **parties.policy_of("site-2"), cluster=cluster)
    refused = run(parties, job(**SEALED))["site-2"]
    assert isinstance(refused, ConfigurationError) and words in str(refused)


@pytest.mark.sim
@pytest.mark.slow
def test_a_job_over_flare_finds_common_rows_and_trains(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 6)).astype(np.float32)
    label = (x[:, 0] + x[:, 4] + 0.5 * rng.normal(size=2000) > 0).astype(int)
    ids = [f"p{i}" for i in range(2000)]
    bank = pd.DataFrame(x[:, :3], columns=list("abc")).assign(id=ids, y=label)
    shop = pd.DataFrame(x[:, 3:], columns=list("def")).assign(id=ids)
    fed = vb.simulate({"bank": bank, "shop": shop}, "y", folder=tmp_path / "fed", consents=["sealed_splits"])
    trained = fed.train(vb.vertical(id="id", preset="sealed", max_depth=4, max_bin=16), rounds=2)
    scores = fed.predict(trained, {"bank": bank.drop(columns="y"), "shop": shop})
    assert roc_auc_score(bank.set_index("id").loc[scores.index, "y"], scores["margin"]) > 0.85
