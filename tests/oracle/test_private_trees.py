"""Private trees against independent ways to the same model.

Without noise the federated model must be the one of a centralized refresh of the same forest on the pooled rows, and
with noise the one of the numpy twin given the same draws. Both are equalities: row statistics are integers on a grid,
so sums do not depend on order, and the twin follows XGBoost's float32 arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.distributed_noise import NoiseShares
from dp_components.events import GaussianEvent, Release
from dp_components.leaf_weights.query import UNIT, LeafQuery
from dp_components.neighbouring import NeighbouringRelation
from dp_components.sensitivity import Sensitivity
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.forest import draw_forest, initial_model
from nvflare_plugins.private_trees.methods import (
    CandidateSource,
    Interactions,
    Method,
    SplitMethod,
    WeightUpdate,
    dp_ebm_newton,
    dp_rf,
    dp_tr_newton,
)
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.training import PrivateTreesPlan, refresh_parameters
from tests.support.private_simulation import Simulation, Table
from tests.support.private_trees import split_rows, train_in_process

N_TREES, SEED = 12, 11
OURS = Method(
    "mixed",
    SplitMethod.TOTALLY_RANDOM,
    WeightUpdate.NEWTON,
    candidates=CandidateSource.MIXED,
    interactions=Interactions.ALTERNATING,
    noise_ridge=3.0,
    query=LeafQuery.JOINT,
)
METHODS = {
    "newton": dp_tr_newton(),
    "one_feature": dp_ebm_newton(),
    "gradient": replace(dp_tr_newton(), weight_update=WeightUpdate.GRADIENT),
    "batches": replace(dp_tr_newton(), batch_size=4),
    "random_3_way": replace(dp_tr_newton(), interactions=Interactions.RANDOM, n_features_per_tree=3),
    "logarithmic": replace(dp_tr_newton(), candidates=CandidateSource.LOGARITHMIC),
    "mixed": OURS,
}


def table(n_rows: int = 900, missing: bool = False) -> Table:
    rng = np.random.default_rng(2)
    columns = rng.normal(size=(6, n_rows)).astype(np.float32)
    columns[3] = rng.integers(0, 4, n_rows)
    label = (columns[0] + columns[1] * columns[2] + rng.normal(size=n_rows) > 0).astype(np.float32)
    if missing:
        columns[rng.random(columns.shape) < 0.1] = np.nan
    return Table(columns, label)


def bounds(data: Table) -> tuple[FeatureBounds, ...]:
    return tuple(FeatureBounds(float(np.nanmin(c)), float(np.nanmax(c))) for c in data.columns)


def event() -> GaussianEvent:
    return GaussianEvent(1.0, NeighbouringRelation.ADD_OR_REMOVE_ROW)


def no_noise(sums: np.ndarray, sensitivity: Sensitivity, multiplier: float) -> Release:
    return Release(sums, event())


def drawn(seed: int):
    """A mechanism that draws row by row, so that it does not matter how many trees one message holds."""
    rng = np.random.default_rng(seed)

    def mechanism(sums: np.ndarray, sensitivity: Sensitivity, multiplier: float) -> Release:
        std = multiplier * sensitivity.bound / np.array(sensitivity.weights)
        noise = rng.normal(size=sums.shape) * std
        return Release(sums + np.rint(noise).astype(np.int64).reshape(sums.shape), event())

    return mechanism


def plan_for(method: Method, data: Table, trust: Trust = Trust(), mu: float = 1.0) -> PrivateTreesPlan:
    few = replace(method, n_trees=N_TREES, batch_size=min(method.batch_size, N_TREES))
    return PrivateTreesPlan(few, bounds(data), NoisePlan.of(few, 6, mu), trust, SEED)


def central_refresh(plan: PrivateTreesPlan, data: Table) -> bytes:
    """Refresh the forest on all rows, with XGBoost alone."""
    forest = draw_forest(plan.method, public_candidates(plan.method, plan.bounds), plan.structure_seed)
    weights = plan.method.weight_update.weights()

    def objective(margin: np.ndarray, _: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray]:
        pairs = (weights.row_statistics(margin, data.label, plan.method.query).values / UNIT).astype(np.float32)
        return pairs[:, 0], pairs[:, 1]

    matrix = xgb.DMatrix(data.columns.T, label=data.label, nthread=1)
    parameters = refresh_parameters(plan, 1)
    booster = xgb.Booster(parameters, [matrix], model_file=bytearray(initial_model(forest, plan.method)))
    booster.set_param(parameters)
    for number in range(forest.n_rounds):
        booster.update(matrix, number, fobj=objective)
    return bytes(booster.save_raw("json"))


@pytest.mark.parametrize("name", [n for n in METHODS if n != "mixed"])
def test_without_noise_federated_equals_centralized_refresh(name: str) -> None:
    data = table(missing=name == "newton")
    plan = plan_for(METHODS[name], data)
    trained = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    models = {bytes(t.booster.save_raw("json")) for t in trained}
    assert models == {central_refresh(plan, data)}


@pytest.mark.parametrize("name", [*METHODS, "averaging"])
def test_with_noise_federated_equals_the_numpy_twin(name: str) -> None:
    data, test = table(), table(300, missing=True)
    method = dp_rf(N_TREES) if name == "averaging" else METHODS[name]
    plan = plan_for(method, data)
    trained = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(5))[0]
    ours = trained.booster.predict(xgb.DMatrix(test.columns.T, nthread=1), output_margin=True)
    twin = Simulation(plan.method, data, test, plan.bounds, plan.noise, SEED, drawn(5)).run()
    assert np.array_equal(ours, twin)
    assert np.ptp(ours) > 0


def test_noise_of_sites_and_of_a_trusted_server_have_their_sizes() -> None:
    """Leaf sums in the models minus the exact ones: all 120 trees answer one message, so none depends on another.

    Statistic: mean square of about 500 noises over its expectation; false alarm below 1e-4 outside (0.75, 1.3).
    """
    data, n_trees = table(3000), 120
    method = replace(dp_rf(n_trees), clip=0.0)
    for trust, factor in ((Trust(), 1.0), (Trust(NoiseShares(3, 1)), 1.5)):
        plan = PrivateTreesPlan(method, bounds(data), NoisePlan.of(method, 6, 600.0), trust, SEED)
        forest = train_in_process(plan, split_rows(data.columns, data.label, 3))[0].booster.trees_to_dataframe()
        exact = xgb.Booster(model_file=bytearray(central_refresh(plan, data))).trees_to_dataframe()
        leaves = (exact.Feature == "Leaf").to_numpy()
        noise = (forest.Cover - exact.Cover).to_numpy()[leaves & (exact.Cover > 50).to_numpy()]
        assert noise.size > 400
        ratio = np.mean(noise**2) / (plan.noise.gradient_std**2 * factor)
        assert 0.75 < ratio < 1.3


def test_no_exact_inner_sum_reaches_a_model_file() -> None:
    """With noise on leaves, every inner node's Hessian is the sum of its noisy leaves, and none is the exact one."""
    data = table()
    plan = plan_for(METHODS["newton"], data, mu=0.5)
    trained = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(1))[0]
    noisy = trained.booster.trees_to_dataframe()
    exact = xgb.Booster(model_file=bytearray(central_refresh(plan, data))).trees_to_dataframe()
    first = noisy.Tree == 0  # later trees start from other margins
    assert not np.isin(noisy.Cover[first].to_numpy(), exact.Cover[first].to_numpy()).any()
    cover = dict(zip(noisy.ID, noisy.Cover, strict=True))
    for row in noisy[first & (noisy.Feature != "Leaf")].itertuples():
        assert cover[row.ID] == pytest.approx(cover[row.Yes] + cover[row.No], rel=1e-5, abs=1e-4)
