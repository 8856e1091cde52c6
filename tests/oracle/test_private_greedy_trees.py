"""Greedy trees on noisy histograms: without noise they are centralized XGBoost's on the same cuts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.distributed_noise import NoiseShares
from he_processors.errors import ConfigurationError
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.greedy_training import greedy_matrix, greedy_parameters, train_greedy_trees
from nvflare_plugins.private_trees.methods import dp_gbm, feverless
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.training import PrivateTreesPlan, bounded_objective
from nvflare_plugins.wire.catalogue import Kind
from tests.oracle.test_private_trees import bounds, no_noise, table
from tests.support.private_trees import split_rows, train_in_process


def plan_for(method, data, trust: Trust = Trust(), mu: float = 1.0) -> PrivateTreesPlan:
    few = replace(method, n_trees=3, depth=3, n_candidates=8)
    return PrivateTreesPlan(few, bounds(data), NoisePlan.of(few, 6, mu), trust, 1)


@pytest.mark.parametrize("method", [feverless(), dp_gbm()], ids=lambda m: m.name)
def test_without_noise_it_is_centralized_xgboost(method) -> None:
    data = table()
    plan = plan_for(method, data)
    trained = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise, train=train_greedy_trees)
    matrix = greedy_matrix(public_candidates(plan.method, plan.bounds), data.columns, data.label, 1)
    central = xgb.Booster(greedy_parameters(plan, 1), [matrix])
    for number in range(plan.method.n_trees):
        central.update(matrix, number, fobj=bounded_objective(plan, data.label))
    ours, theirs = trained[0].trees_to_dataframe(), central.trees_to_dataframe()
    assert ours.Feature.tolist() == theirs.Feature.tolist() and ours.Split.equals(theirs.Split)
    leaves = (ours.Feature == "Leaf").to_numpy()
    assert np.allclose(ours.Gain[leaves], theirs.Gain[leaves], rtol=1e-5)
    assert len({bytes(b.save_raw("json")) for b in trained}) == 1


@pytest.mark.parametrize("trust", [Trust(), Trust(NoiseShares(3, 1))], ids=["trusted", "distributed"])
def test_with_noise_all_sites_agree_and_only_histograms_travel(trust: Trust) -> None:
    data, seen = table(), []
    plan = plan_for(feverless(), data, trust)
    parts = split_rows(data.columns, data.label, 3)
    trained = train_in_process(plan, parts, seen=seen, train=train_greedy_trees)
    assert len({bytes(b.save_raw("json")) for b in trained}) == 1
    assert {transfer.frame.kind for transfer in seen} == {Kind.HISTOGRAM}
    messages = {transfer.frame.counter for transfer in seen}
    assert len(messages) <= plan.method.n_trees * plan.method.depth  # what the plan pays for


def test_missing_values_are_refused_before_anything_is_sent() -> None:
    data, seen = table(missing=True), []
    parts = split_rows(data.columns, data.label, 3)
    with pytest.raises(ConfigurationError, match="missing"):
        train_in_process(plan_for(feverless(), data), parts, seen=seen, train=train_greedy_trees)
    assert not seen
