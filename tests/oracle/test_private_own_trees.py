"""Methods that XGBoost cannot train: three sites together are the simulation of the pooled rows, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.distributed_noise import NoiseShares
from dp_components.leaf_weights.query import LeafQuery
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.job_plan import JobPlan, Trainer, planned_messages
from nvflare_plugins.private_trees.methods import (
    CandidateSource,
    Interactions,
    Method,
    SplitMethod,
    batch_iterative_hessian_ebm,
    dp_gbm,
    dp_tr_newton,
    feverless,
)
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.own_training import train_own_trees
from nvflare_plugins.private_trees.presets import resolve_method
from nvflare_plugins.private_trees.training import PrivateTreesPlan
from nvflare_plugins.wire.catalogue import Kind
from tests.oracle.test_private_trees import SEED, bounds, drawn, no_noise, table
from tests.support.private_simulation import Simulation
from tests.support.private_trees import split_rows, train_in_process

JOB = PrivateTreesJob("data", "label", 1.0, 1e-5, {"x": [0, 1]})
REFINED = {"candidates": CandidateSource.ITERATIVE_HESSIAN}
METHODS = {
    "partially_random": replace(feverless(), split_method=SplitMethod.PARTIALLY_RANDOM),
    "partially_random_joint": replace(
        feverless(), split_method=SplitMethod.PARTIALLY_RANDOM, query=LeafQuery.JOINT, noise_ridge=3.0
    ),
    "partially_random_refined": replace(feverless(), split_method=SplitMethod.PARTIALLY_RANDOM, **REFINED),
    "refined": replace(dp_tr_newton(), **REFINED),
    "refined_batches": batch_iterative_hessian_ebm(0.5, 6),
    "greedy_averaging": resolve_method(
        "feverless",
        {
            "weight_update": "averaging",
            "batch_size": 6,
            "n_trees": 6,
            "ridge": 0,
            "clip": 1,
            "learning_rate": 1,
        },
        6,
    ),
    "histograms": feverless(),
    "greedy_two_features": replace(dp_gbm(), n_features_per_tree=2, interactions=Interactions.RANDOM),
    "greedy_private_quantiles": replace(feverless(), candidates=CandidateSource.DP_QUANTILE, batch_size=3),
}


def plan_for(method: Method, trust: Trust = Trust(), mu: float = 2.0) -> JobPlan:
    few = replace(method, n_trees=6, depth=3, n_candidates=10)
    training = PrivateTreesPlan(few, bounds(table()), NoisePlan.of(few, 6, mu), trust, SEED)
    return JobPlan(JOB, training, 3, tuple(planned_messages(training)))


def train(plan: JobPlan, data, **options) -> list[xgb.Booster]:
    def own(training, channel, sums, columns, label):
        return train_own_trees(plan, channel, sums, columns, label)

    return train_in_process(plan.training, split_rows(data.columns, data.label, 3), train=own, **options)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("missing", [False, True])
def test_three_sites_are_the_simulation_of_the_pooled_rows(name: str, missing: bool) -> None:
    data, test = table(missing=missing), table(300, missing=True)
    plan = plan_for(METHODS[name])
    assert plan.trainer is Trainer.OWN
    boosters = train(plan, data, server_noise=drawn(5))
    assert len({bytes(b.save_raw("json")) for b in boosters}) == 1
    ours = boosters[0].predict(xgb.DMatrix(test.columns.T, nthread=1), output_margin=True)
    training = plan.training
    twin = Simulation(training.method, data, test, training.bounds, training.noise, SEED, drawn(5)).run()
    assert np.array_equal(ours, twin) and np.ptp(ours) > 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("trust", [Trust(), Trust(NoiseShares(3, 1))], ids=["trusted", "distributed"])
def test_no_more_travels_than_the_plan_pays_for(name: str, trust: Trust) -> None:
    data, seen, plan = table(), [], plan_for(METHODS[name], trust)
    train(plan, data, seen=seen)
    sent = {t.frame.counter: t.frame for t in seen if t.direction == "received"}
    assert len(sent) <= len(plan.messages)
    assert {f.kind for f in sent.values()} <= {m.kind for m in plan.messages} and Kind.ROOT_SUM not in sent
    paid = sum(len(m.sizes) for m in plan.messages if m.kind is not Kind.CELL_COUNTS)
    assert paid == plan.training.method.n_queries(6)


def test_histogram_trees_without_noise_are_those_of_the_other_trainer() -> None:
    """XGBoost's own grower asks for the same splits, but for ties between equally good ones."""
    from nvflare_plugins.private_trees.greedy_training import train_greedy_trees

    data, plan = table(), plan_for(feverless())
    parts = split_rows(data.columns, data.label, 3)
    theirs = train_in_process(plan.training, parts, no_noise, train=train_greedy_trees)[0]
    ours = train(plan, data, server_noise=no_noise)[0]
    matrix = xgb.DMatrix(data.columns.T, nthread=1)
    assert np.allclose(ours.predict(matrix), theirs.predict(matrix), atol=1e-4)
