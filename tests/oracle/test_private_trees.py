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

from dp_components.leaf_weights.row_bounds import UNIT
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.private_trees.forest import draw_forest, initial_model
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.methods import (
    CandidateSource, Interactions, Method, SplitMethod, WeightUpdate, dp_ebm_newton, dp_rf, dp_tr_newton,
)  # fmt: skip
from dp_components.leaf_weights.query import LeafQuery
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust, TrustModel
from nvflare_plugins.private_trees.simulation import Simulation, Table
from nvflare_plugins.private_trees.training import PrivateTreesPlan, refresh_parameters
from tests.support.private_trees import split_rows, train_in_process

N_TREES, SEED = 12, 11
OURS = Method(
    "mixed", SplitMethod.TOTALLY_RANDOM, WeightUpdate.NEWTON, candidates=CandidateSource.MIXED,
    interactions=Interactions.ALTERNATING, noise_ridge=3.0, query=LeafQuery.JOINT,
)  # fmt: skip
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


def zero(std: np.ndarray) -> np.ndarray:
    return np.zeros(std.shape, dtype=np.int64)


def drawn(seed: int):
    rng = np.random.default_rng(seed)
    return lambda std: np.rint(rng.normal(size=std.shape) * std).astype(np.int64)


def plan_for(method: Method, data: Table, trust: TrustModel = TrustModel.TRUSTED, mu: float = 1.0) -> PrivateTreesPlan:
    few = replace(method, n_trees=N_TREES, batch_size=min(method.batch_size, N_TREES))
    return PrivateTreesPlan(few, bounds(data), NoisePlan.of(few, 6, mu), Trust(trust, 3), SEED)


def central_refresh(plan: PrivateTreesPlan, data: Table) -> bytes:
    """Refresh the forest on all rows, with XGBoost alone."""
    forest = draw_forest(plan.method, public_candidates(plan.method, plan.bounds), plan.structure_seed)
    weights = plan.method.weight_update.weights()

    def objective(margin: np.ndarray, _: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray]:
        rows = weights.row_statistics(margin, data.label)
        return rows.gradients / np.float32(UNIT), rows.hessians / np.float32(UNIT)

    matrix = xgb.DMatrix(data.columns.T, label=data.label, nthread=1)
    parameters = refresh_parameters(plan, 1)
    booster = xgb.Booster(parameters, [matrix], model_file=bytearray(initial_model(forest, plan.method)))
    booster.set_param(parameters)
    for number in range(forest.n_rounds):
        booster.update(matrix, number, fobj=objective)
    return bytes(booster.save_raw("json"))


@pytest.mark.parametrize("name", [n for n in METHODS if n != "mixed"])
@pytest.mark.parametrize("trust", list(TrustModel))
def test_without_noise_federated_equals_centralized_refresh(name: str, trust: TrustModel) -> None:
    data = table(missing=name == "newton")
    plan = plan_for(METHODS[name], data, trust)
    models = {bytes(t.booster.save_raw("json")) for t in train_in_process(
        plan, split_rows(data.columns, data.label, 3), zero, lambda _: zero)}  # fmt: skip
    assert models == {central_refresh(plan, data)}


@pytest.mark.parametrize("name", [*METHODS, "averaging"])
def test_with_noise_federated_equals_the_numpy_twin(name: str) -> None:
    data, test = table(), table(300, missing=True)
    method = dp_rf(N_TREES) if name == "averaging" else METHODS[name]
    plan = plan_for(method, data)
    trained = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(5), lambda _: zero)[0]
    ours = trained.booster.predict(xgb.DMatrix(test.columns.T, nthread=1), output_margin=True)
    twin = Simulation(plan.method, data, test, plan.bounds, 1.0, SEED, drawn(5)).run()
    assert np.array_equal(ours, twin)
    assert np.ptp(ours) > 0


def test_distributed_noise_has_the_promised_size() -> None:
    """Leaf sums of a model without ridge and clip on labels whose exact leaf sums are known: g = -y, h = 1."""
    data = table(3000)
    method = replace(dp_rf(N_TREES), clip=0.0)
    plan = plan_for(method, data, TrustModel.DISTRIBUTED, mu=2.0)
    shares: list[np.ndarray] = []

    def site_noise(rank: int):
        draw = drawn(rank)

        def noise(std: np.ndarray) -> np.ndarray:
            shares.append(std[:1])
            return draw(std)

        return noise

    train_in_process(plan, split_rows(data.columns, data.label, 3), zero, site_noise)
    expected = plan.noise.leaf.gradient * UNIT / np.sqrt(2)  # three sites, one colluder: each adds 1 / (3 - 1) of sigma^2
    assert np.allclose(shares, expected) and len(shares) == 3


def test_no_exact_inner_sum_reaches_a_model_file() -> None:
    """With noise on leaves, every inner node's Hessian is the sum of its noisy leaves, and none is the exact one."""
    data = table()
    plan = plan_for(METHODS["newton"], data, mu=0.5)
    trained = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(1), lambda _: zero)[0]
    noisy = trained.booster.trees_to_dataframe()
    exact = xgb.Booster(model_file=bytearray(central_refresh(plan, data))).trees_to_dataframe()
    first = noisy.Tree == 0  # later trees start from other margins
    assert not np.isin(noisy.Cover[first].to_numpy(), exact.Cover[first].to_numpy()).any()
    cover = dict(zip(noisy.ID, noisy.Cover, strict=True))
    for row in noisy[first & (noisy.Feature != "Leaf")].itertuples():
        assert cover[row.ID] == pytest.approx(cover[row.Yes] + cover[row.No], rel=1e-5, abs=1e-4)
