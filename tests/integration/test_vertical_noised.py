"""Whole vertical jobs in the preset noised: what is paid, what is refused, and what the record says."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from dp_components.neighbouring import NeighbouringRelation
from he_processors.errors import ConfigurationError, PolicyRefusal, ProtocolError
from nvflare_plugins.attempt.payment import open_ledger
from nvflare_plugins.cluster.workers import workers_here
from nvflare_plugins.site.policy.policy import SitePolicy
from nvflare_plugins.vertical import site as vertical_site
from nvflare_plugins.vertical.active import site as active_site
from nvflare_plugins.vertical.active.key_owner import open_owner
from tests.support.parties import Parties, succeed
from tests.support.vertical_jobs import POLICY, give_columns, job, merged, run, table

BUDGET = {"epsilon": 8.0, "delta": 1e-5}
PARAMS = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 32, "eta": 0.3}
NOISED = {"preset": "noised", "epsilon": 4.0, "delta": 1e-5, "num_rounds": 6, "own_rounds": 3, "params": PARAMS}


def parties_with(folder, budget=BUDGET, n_rows=3000, n_sites=2, widths=(2, 4), **consents) -> Parties:
    given = {**POLICY["consents"], "split_bits": True, **consents}
    allowed = ["plain", "paillier", "elgamal", "okamoto_uchiyama"]
    parties = Parties(folder, n_sites, {"allowed_profiles": allowed, "consents": given})
    frame = table(n_rows, sum(widths))
    give_columns(parties, "data", frame, widths)
    if budget is not None:
        for site in parties.sites[1:]:
            document = parties.policy_of(site)
            document["data_sets"]["data"]["privacy"] = budget
            parties.set_policy(site, **document)
    return parties


def spent_of(parties: Parties, site: str) -> float:
    policy = SitePolicy.load(parties.workspace(site), site)
    ledger, delta = open_ledger(policy, "data", NeighbouringRelation.REPLACE_ROW)
    return ledger.spent().epsilon(delta)


def auc_of(parties: Parties, job_id: str = "job") -> float:
    frame = table(3000, 6)
    model = xgb.Booster(model_file=bytearray(merged(parties, job_id)))
    rows = xgb.DMatrix(frame.drop(columns="y").to_numpy())
    return roc_auc_score(frame.y, model.predict(rows, validate_features=False))


def auc_alone() -> float:
    """Return what the active party reaches without the others."""
    frame = table(3000, 6)
    own = frame[["c0", "c1"]].to_numpy()
    alone = xgb.train({**PARAMS, "seed": 0}, xgb.DMatrix(own, label=frame.y), 6)
    return roc_auc_score(frame.y, alone.predict(xgb.DMatrix(own)))


def test_a_job_pays_trains_and_says_so(tmp_path):
    parties = parties_with(tmp_path)
    succeed(run(parties, job(**NOISED)))
    assert 3.9 < spent_of(parties, "site-2") <= 4.0
    assert auc_of(parties) > auc_alone() + 0.03
    passive = json.loads((parties.run_folder("site-2") / "run.json").read_text())
    section = next(s for s in passive["sections"] if s["title"] == "Noised sums")
    assert dict(map(tuple, section["rows"]))["epsilon, planned"] == "4"
    text = "".join(path.read_text() for path in parties.run_folder("site-2").rglob("*evidence*") if path.is_file())
    assert "sums per bin of tree 3" in text and "cut points" in text and "split bits, counted and capped" in text


def test_parties_on_workers_add_the_noise_of_a_party_once(tmp_path, monkeypatch):
    monkeypatch.setattr(vertical_site, "open_workers", lambda cluster: workers_here(cluster.workers))
    parties = parties_with(tmp_path)
    for site, n_workers in (("site-1", 2), ("site-2", 3)):
        cluster = {"scheduler": "tcp://127.0.0.1:8786", "workers": n_workers}
        parties.set_policy(site, **{**parties.policy_of(site), "cluster": cluster})
    succeed(run(parties, job(**NOISED)))
    assert 3.9 < spent_of(parties, "site-2") <= 4.0
    assert auc_of(parties) > auc_alone() + 0.03


def test_rows_of_weight_count_as_much_and_cost_the_same(tmp_path):
    parties = parties_with(tmp_path)
    frame = table(3000, 6)
    light = np.where(frame.c1 > 0, 0.25, 1.0).astype(np.float32)
    parties.give("site-1", "data", frame[["c0", "c1", "y"]].assign(w=light))
    succeed(run(parties, job(**NOISED, weight="w")))
    assert 3.9 < spent_of(parties, "site-2") <= 4.0
    assert auc_of(parties) > auc_alone() + 0.03


@pytest.mark.parametrize("least", [1e-4, 1e-2])
def test_weights_too_light_for_the_grid_of_noised_gradients_are_refused(tmp_path, least):
    parties = parties_with(tmp_path, n_rows=200)
    frame = table(200, 6)
    params = {**PARAMS, "min_child_weight": 0, "lambda": 0}
    parties.give("site-1", "data", frame[["c0", "c1", "y"]].assign(w=np.where(frame.c1 > 0, least, 1.0)))
    outcome = run(parties, job(**{**NOISED, "params": params}, weight="w"))["site-1"]
    assert ("the weights differ too much" in str(outcome)) == (least == 1e-4), outcome


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["paillier", "okamoto_uchiyama", "elgamal"])
def test_a_job_under_encryption(tmp_path, profile):
    parties = parties_with(tmp_path, n_rows=400)
    options = {"fraction_bits": 14} if profile == "elgamal" else {"key_bits": 2048}
    changes = {**NOISED, "num_rounds": 2, "own_rounds": 1, "epsilon": 8.0, "profile": profile, **options}
    parties.set_policy("site-2", **{**parties.policy_of("site-2"), "min_key_bits": 2048})
    parties.set_policy("site-1", **{**parties.policy_of("site-1"), "min_key_bits": 2048})
    succeed(run(parties, job(**changes)))
    assert 7.8 < spent_of(parties, "site-2") <= 8.0


def test_a_budget_pays_once_and_what_is_not_used_is_free_again(tmp_path):
    parties = parties_with(tmp_path, budget={"epsilon": 5.0, "delta": 1e-5})
    succeed(run(parties, job(**NOISED)))
    outcomes = run(parties, job(**NOISED), "again")
    assert isinstance(outcomes["site-2"], PolicyRefusal) and "budget" in str(outcomes["site-2"])
    stopped = job(**{**NOISED, "epsilon": 0.5, "num_rounds": 5})
    succeed(run(parties, stopped, "small"))
    assert spent_of(parties, "site-2") <= 5.0


def test_a_party_without_budget_or_consent_takes_no_part(tmp_path):
    without = run(parties_with(tmp_path / "a", budget=None), job(**NOISED))["site-2"]
    assert isinstance(without, PolicyRefusal) and "gives data set 'data' no privacy budget" in str(without)
    silent = run(parties_with(tmp_path / "b", split_bits=False), job(**NOISED))["site-2"]
    assert isinstance(silent, PolicyRefusal) and "consents.split_bits" in str(silent)
    exact = run(parties_with(tmp_path / "c"), job(preset="guarded"))["site-2"]
    assert isinstance(exact, PolicyRefusal) and "exact_use_of_budgeted_data" in str(exact)


def test_gradients_finer_than_the_noise_are_refused_before_anything_is_paid(tmp_path, monkeypatch):
    def finer(*arguments):
        return open_owner(*arguments[:-1], dataclasses.replace(arguments[-1], fraction_bits=24))

    monkeypatch.setattr(active_site, "open_owner", finer)
    parties = parties_with(tmp_path, n_rows=200)
    refused = run(parties, job(**NOISED))["site-2"]
    assert isinstance(refused, ProtocolError) and "another number of fraction bits" in str(refused)
    assert spent_of(parties, "site-2") == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": None}, "needs epsilon and delta"),
        ({"own_rounds": 6}, "lower own_rounds"),
        ({"weight": "w", "profile": "elgamal", "fraction_bits": 14}, "weight is refused"),
        ({"initial_model": "old"}, "initial_model is refused"),
        ({"resume_from": "old"}, "resume_from is refused"),
        ({"on_lost_site": "wait"}, "on_lost_site=wait is refused"),
        ({"profile": "elgamal"}, "fraction_bits 14"),
        ({"categories": {"site-2": {"c2": ["a", "b"]}}}, "categories of a passive party"),
        ({"preset": "guarded"}, "options of preset noised"),
    ],
)
def test_what_a_job_cannot_ask_for(changes, named):
    with pytest.raises(ConfigurationError, match=named):
        job(**{**NOISED, **changes})


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"max_depth": 0, "max_leaves": 8}, "max_depth from 1 to 8"),
        ({"grow_policy": "lossguide"}, "level by level"),
        ({"monotone_constraints": {"c0": 1}}, "monotone_constraints"),
    ],
)
def test_trees_whose_noise_cannot_be_planned(tmp_path, params, named):
    outcomes = run(parties_with(tmp_path, n_rows=200), job(**{**NOISED, "params": {**PARAMS, **params}}))
    assert all(isinstance(error, ConfigurationError) and named in str(error) for error in outcomes.values())
    assert spent_of(Parties(tmp_path, 2), "site-2") == 0


def test_a_party_of_many_features_shows_few_in_a_tree_and_empty_nodes_do_not_stop_it(tmp_path):
    parties = parties_with(tmp_path, n_rows=60, widths=(1, 5))
    changes = {"num_rounds": 8, "own_rounds": 0, "epsilon": 8.0, "noised_features": 2, "noised_bins": 4}
    params = {**PARAMS, "min_child_weight": 0, "lambda": 0.1}
    succeed(run(parties, job(**{**NOISED, **changes, "params": params})))
    assert 7.8 < spent_of(parties, "site-2") <= 8.0
