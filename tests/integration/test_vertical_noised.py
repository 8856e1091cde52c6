"""Whole vertical jobs in the preset noised: what is paid, what is refused, and what the record says."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import veilboost as vb
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from dp_components.events import NeighbouringRelation
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.payment import open_ledger
from nvflare_plugins.base.errors import JobAborted, PolicyRefusal
from nvflare_plugins.kinds.vertical import active_party
from nvflare_plugins.kinds.vertical import site as vertical_site
from nvflare_plugins.kinds.vertical.key_owner import open_owner
from nvflare_plugins.kinds.vertical.noised import NoisePayment, NoiseSource
from nvflare_plugins.kinds.vertical.tree_growth import PartySums
from nvflare_plugins.site.policy import SitePolicy
from tests.support.federation import Parties, succeed
from tests.support.vertical_jobs import POLICY, give_columns, job, merged, run, table
from tests.support.workers_here import workers_here

BUDGET = {"epsilon": 8.0, "delta": 1e-5}
PARAMS = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 32, "eta": 0.3}
NOISED = {"preset": "noised", "epsilon": 4.0, "delta": 1e-5, "num_rounds": 6, "own_rounds": 3, "params": PARAMS}


def parties_with(folder, budget=BUDGET, n_rows=3000, n_sites=2, widths=(2, 4), **consents) -> Parties:
    given = {**POLICY["consents"], "split_bits": True, **consents}
    allowed = ["plain", "paillier", "elgamal"]
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
@pytest.mark.parametrize("profile", ["paillier", "elgamal"])
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
        *given, planned, numbers = arguments
        return open_owner(*given, dataclasses.replace(planned, fraction_bits=24), numbers)

    monkeypatch.setattr(active_party, "open_owner", finer)
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
        ({"on_lost_site": "wait"}, "on_lost_site=wait needs noised_repeats"),
        ({"noised_repeats": 2}, "noised_repeats is an option of on_lost_site=wait"),
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


# -- after a loss -----------------------------------------------------------------------------------------------------

WAITING = {"on_lost_site": "wait", "noised_repeats": 2}


def lose_tree(monkeypatch, tree: int, site: str, times: int = 1) -> None:
    """Have a party fail in a tree: the passive one when its noise is drawn, the active one when the sums are there."""
    left = [times]

    def fail(number: int) -> None:
        if number == tree and left[0]:
            left[0] -= 1
            raise JobAborted("the machine ends here")

    draw, receive = NoiseSource.draw, PartySums._take_in

    def failing_draw(self, number, n_nodes, layout):
        noise = draw(self, number, n_nodes, layout)
        fail(number)
        return noise

    def failing_receive(self, totals):
        was_asked = self._asked is not None
        receive(self, totals)
        if was_asked:
            fail(self._tree)

    if site == "site-2":
        monkeypatch.setattr(NoiseSource, "draw", failing_draw)
    else:
        monkeypatch.setattr(PartySums, "_take_in", failing_receive)


def fails(outcomes: dict) -> None:
    assert all(isinstance(outcome, Exception) for outcome in outcomes.values()), outcomes


def draws(monkeypatch) -> dict[int, list[np.ndarray]]:
    """Return what will hold all noise that any party draws, by tree."""
    drawn: dict[int, list[np.ndarray]] = {}
    honest = NoiseSource.draw

    def draw(self, tree, n_nodes, layout):
        noise = honest(self, tree, n_nodes, layout)
        drawn.setdefault(tree, []).append(noise.g)
        return noise

    monkeypatch.setattr(NoiseSource, "draw", draw)
    return drawn


@pytest.mark.parametrize("site", [pytest.param("site-1", marks=pytest.mark.slow), "site-2"])
def test_a_job_that_waits_pays_for_what_it_repeats_and_never_more_than_its_epsilon(tmp_path, monkeypatch, site):
    parties, training, drawn = parties_with(tmp_path), job(**NOISED, **WAITING), draws(monkeypatch)
    lose_tree(monkeypatch, 4, site)
    fails(run(parties, training))
    before = spent_of(parties, "site-2")
    assert 0 < before < 3
    succeed(run(parties, training, number=2))
    assert before < spent_of(parties, "site-2") <= 4.0
    roots = [noise for noise in drawn[4] if noise.size == drawn[4][0].size]
    assert len(roots) > 1 and not np.array_equal(roots[0], roots[1])  # no noise is added twice
    assert n_releases(parties) == 1 + 3 + 1  # cut points, three trees, and the one that was paid for twice
    assert auc_of(parties) > auc_alone() + 0.02


def n_releases(parties: Parties, job_id: str = "job") -> int:
    policy = SitePolicy.load(parties.workspace("site-2"), "site-2")
    ledger, _ = open_ledger(policy, "data", NeighbouringRelation.REPLACE_ROW)
    return next(entry.n_releases for entry in ledger.history().jobs if entry.job_id == job_id)


def test_cut_points_are_paid_for_once_in_all_attempts(tmp_path, monkeypatch):
    found, honest = [], NoisePayment.cut_points

    def cut_points(self, train):
        found.append(honest(self, train))
        return found[-1]

    monkeypatch.setattr(NoisePayment, "cut_points", cut_points)
    lose_tree(monkeypatch, 4, "site-1")
    parties, training = parties_with(tmp_path, n_rows=300), job(**NOISED, **WAITING)
    fails(run(parties, training))
    succeed(run(parties, training, number=2))
    assert all(np.array_equal(a, b) for a, b in zip(found[0].upper, found[1].upper, strict=True))
    text = "".join(path.read_text() for path in parties.run_folder("site-2").rglob("*evidence*") if path.is_file())
    assert "replayed: paid for before, no charge" in text


def test_a_party_that_dies_between_charge_and_release_pays_again(tmp_path, monkeypatch):
    parties, training, honest = parties_with(tmp_path, n_rows=300), job(**NOISED, **WAITING), NoisePayment.pay_tree

    def pay_tree(self, tree):
        honest(self, tree)
        if tree == 4:
            raise OSError("the machine ends here")

    monkeypatch.setattr(NoisePayment, "pay_tree", pay_tree)
    fails(run(parties, training))
    once = spent_of(parties, "site-2")
    monkeypatch.setattr(NoisePayment, "pay_tree", honest)
    succeed(run(parties, training, number=2))
    assert once < spent_of(parties, "site-2") <= 4.0 and n_releases(parties) == 1 + 3 + 1


def test_whoever_loses_the_sums_again_and_again_gets_no_more_of_them_than_are_paid_for(tmp_path, monkeypatch):
    parties, training = parties_with(tmp_path, n_rows=300), job(**NOISED, **{**WAITING, "noised_repeats": 1})
    lose_tree(monkeypatch, 4, "site-1", times=2)
    for number in (1, 2):
        fails(run(parties, training, number=number))
    spent = spent_of(parties, "site-2")
    refused = run(parties, training, number=3)["site-2"]
    assert isinstance(refused, PolicyRefusal) and "noised_repeats" in str(refused) and "resume_from=job" in str(refused)
    assert spent_of(parties, "site-2") == spent <= 4.0


def test_an_active_party_that_lost_its_checkpoints_begins_anew_only_where_that_is_paid_for(tmp_path, monkeypatch):
    parties, training = parties_with(tmp_path, n_rows=300), job(**NOISED, **{**WAITING, "noised_repeats": 1})
    lose_tree(monkeypatch, 5, "site-1")
    fails(run(parties, training))
    for path in parties.run_folder("site-1").glob("checkpoint-*"):
        path.unlink()
    refused = run(parties, training, number=2)["site-2"]
    assert isinstance(refused, PolicyRefusal) and "noised_repeats" in str(refused)


@pytest.mark.slow
def test_a_job_that_resumes_another_pays_for_the_rest_beside_it(tmp_path, monkeypatch):
    parties, training = parties_with(tmp_path), job(**NOISED)
    lose_tree(monkeypatch, 4, "site-2")
    fails(run(parties, training))
    before = spent_of(parties, "site-2")
    succeed(run(parties, job(**NOISED, resume_from="job"), "resumed"))
    assert n_releases(parties) == n_releases(parties, "resumed") == 1 + 2  # of trees 3 and 4, and of trees 4 and 5
    assert before + 1 < spent_of(parties, "site-2") < before + 4
    assert auc_of(parties, "resumed") > auc_alone() + 0.02


def test_a_budget_that_does_not_pay_for_the_rest_resumes_nothing(tmp_path, monkeypatch):
    parties, training = parties_with(tmp_path, n_rows=300, budget={"epsilon": 4.0, "delta": 1e-5}), job(**NOISED)
    lose_tree(monkeypatch, 5, "site-1")
    fails(run(parties, training))
    before = spent_of(parties, "site-2")
    refused = run(parties, job(**NOISED, resume_from="job"), "resumed")["site-2"]
    assert isinstance(refused, PolicyRefusal) and "budget" in str(refused)
    assert spent_of(parties, "site-2") == before


# -- sealed sums -------------------------------------------------------------------------------------------------------


SEALED_PARAMS = {"objective": "binary:logistic", "max_depth": 2, "max_bin": 16, "eta": 0.3}
SEALED = {"preset": "sealed", "profile": "paillier", "key_bits": 2048, "num_rounds": 3, "params": SEALED_PARAMS}
N_ROWS = 300


def sealed_parties(folder, n_rows: int = N_ROWS, n_sites: int = 2, widths=(2, 4)) -> Parties:
    parties = Parties(folder, n_sites, {**POLICY, "allowed_profiles": ["paillier"], "min_key_bits": 2048})
    give_columns(parties, "data", table(n_rows, sum(widths)), widths)
    return parties


def auc_of_the_parts(model: bytes, n_rows: int = N_ROWS) -> float:
    frame = table(n_rows, 6)
    booster = xgb.Booster(model_file=bytearray(model))
    rows = xgb.DMatrix(frame.drop(columns="y").to_numpy())
    return roc_auc_score(frame.y, booster.predict(rows, validate_features=False))


def test_a_job_trains_as_well_as_in_the_open_and_says_what_it_is(tmp_path):
    parties = sealed_parties(tmp_path)
    succeed(run(parties, job(**SEALED)))
    frame = table(N_ROWS, 6)
    central = xgb.train({**SEALED_PARAMS, "seed": 0}, xgb.DMatrix(frame.drop(columns="y").to_numpy(), label=frame.y), 3)
    assert abs(auc_of_the_parts(merged(parties)) - auc_of_the_parts(bytes(central.save_raw("json")))) < 0.01
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
    parties, stopped = sealed_parties(tmp_path), job(**SEALED)

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
    assert np.isclose(auc_of_the_parts(merged(parties, "resumed")), auc_of_the_parts(merged(parties, "whole")))


@pytest.mark.parametrize(
    ("n_sites", "widths", "cluster", "words"),
    [
        (3, (2, 2, 2), None, "exactly two parties"),
        (2, (2, 4), {"scheduler": "tcp://127.0.0.1:1", "workers": 2}, "has a cluster"),
    ],
)
def test_more_parties_and_clusters_are_refused(tmp_path, n_sites, widths, cluster, words):
    parties = sealed_parties(tmp_path, 60, n_sites, widths)
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
