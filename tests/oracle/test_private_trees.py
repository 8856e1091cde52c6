"""Private trees against independent ways to the same model.

Without noise a model of random trees must be that of a centralized refresh of the same forest on the pooled rows. With
noise a job that names XGBoost gets the same bytes given the same draws, and three sites the model of the pooled rows.
All are equalities: row statistics are integers on a grid, so sums do not depend on order, and the trainer follows
XGBoost's float32 arithmetic.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.events import GaussianEvent, NeighbouringRelation, Release
from dp_components.leaf_weights import LeafQuery
from dp_components.mechanisms import NoiseShares
from dp_components.sensitivity import Sensitivity
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.kinds.private_trees.forest import public_candidates
from nvflare_plugins.kinds.private_trees.methods import (
    PURE_2026_11,
    CandidateSource,
    Grower,
    Interactions,
    Method,
    SplitMethod,
    WeightUpdate,
    batch_iterative_hessian_ebm,
    dp_ebm_newton,
    dp_gbm,
    dp_rf,
    dp_tr_newton,
    feverless,
)
from nvflare_plugins.kinds.private_trees.plan import TRUSTED_SERVER, OwnRows, PrivateTreesPlan, Trust
from tests.support.examples import quick
from tests.support.private_simulation import Simulation, Table
from tests.support.private_trees import plan_with, split_rows, train_in_process
from tests.support.refreshed import bounded_objective, refreshed

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
RANDOM_TREES = {
    "newton": dp_tr_newton(),
    "one_feature": dp_ebm_newton(),
    "gradient": replace(dp_tr_newton(), weight_update=WeightUpdate.GRADIENT),
    "batches": replace(dp_tr_newton(), batch_size=4),
    "random_3_way": replace(dp_tr_newton(), interactions=Interactions.RANDOM, n_features_per_tree=3),
    "logarithmic": replace(dp_tr_newton(), candidates=CandidateSource.LOGARITHMIC),
    "unclipped": replace(dp_tr_newton(), clip=0.0),
    "clipped_gradients": replace(dp_tr_newton(), query=LeafQuery.CLIPPED, noise_ridge=1.0),
    "averaging": dp_rf(N_TREES),
    "mixed": OURS,
}
REFINED = {"candidates": CandidateSource.ITERATIVE_HESSIAN}
PARTIALLY = replace(feverless(), split_method=SplitMethod.PARTIALLY_RANDOM)
AVERAGING = {"weight_update": WeightUpdate.AVERAGING, "batch_size": 6, "ridge": 0.0, "clip": 1.0, "learning_rate": 1.0}
OTHERS = {
    "informed": replace(OURS, interactions=Interactions.INFORMED, query=LeafQuery.CLIPPED),
    "pure": replace(PURE_2026_11, batch_size=2),
    "informed_batches": replace(OURS, interactions=Interactions.INFORMED, batch_size=3),
    "partially_random": PARTIALLY,
    "partially_random_joint": replace(PARTIALLY, query=LeafQuery.JOINT, noise_ridge=3.0),
    "partially_random_refined": replace(PARTIALLY, **REFINED),
    "refined": replace(dp_tr_newton(), **REFINED),
    "refined_batches": batch_iterative_hessian_ebm(0.5, 6),
    "greedy_averaging": replace(feverless(6), **AVERAGING),
    "last_batch_is_smaller": replace(dp_tr_newton(), batch_size=4),
    "histograms": feverless(),
    "histograms_refined": replace(feverless(), **REFINED),
    "histograms_of_one_feature": replace(feverless(), n_features_per_tree=1, query=LeafQuery.JOINT),
    "histograms_of_one_feature_refined": replace(dp_gbm(), n_features_per_tree=1, batch_size=4, **REFINED),
    "greedy_two_features": replace(dp_gbm(), n_features_per_tree=2, interactions=Interactions.RANDOM),
    "greedy_private_quantiles": replace(feverless(), candidates=CandidateSource.DP_QUANTILE, batch_size=3),
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


def plan_for(method: Method, data: Table, trust: Trust = TRUSTED_SERVER, mu: float = 1.0) -> PrivateTreesPlan:
    few = replace(method, n_trees=N_TREES, batch_size=min(method.batch_size, N_TREES))
    return plan_with(few, bounds(data), mu, trust, SEED)


def small_plan(name: str, trust: Trust = TRUSTED_SERVER) -> PrivateTreesPlan:
    few = replace(OTHERS[name], n_trees=6, depth=3, n_candidates=10)
    return plan_with(few, bounds(table()), 2.0, trust, SEED)


def predict(model: bytes, data: Table) -> np.ndarray:
    booster = xgb.Booster(model_file=bytearray(model))
    return booster.predict(xgb.DMatrix(data.columns.T, nthread=1), output_margin=True)


@pytest.mark.parametrize("name", [n for n in RANDOM_TREES if n not in ("mixed", "averaging")])
@pytest.mark.parametrize("grower", Grower)
def test_without_noise_federated_equals_centralized_refresh(name: str, grower: Grower) -> None:
    data = table(missing=name == "newton")
    plan = plan_for(replace(RANDOM_TREES[name], grower=grower), data)
    models = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    assert set(models) == {refreshed(plan, OwnRows(data.columns, data.label))}


@pytest.mark.parametrize("name", RANDOM_TREES)
def test_with_noise_whoever_a_job_names_the_bytes_are_the_same(name: str) -> None:
    data = table(missing=name == "batches")
    models = set()
    for grower in Grower:
        plan = plan_for(replace(RANDOM_TREES[name], grower=grower), data)
        models |= set(train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(5)))
    assert len(models) == 1 and np.ptp(predict(models.pop(), data)) > 0


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("missing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_three_sites_make_the_model_of_the_pooled_rows(name: str, missing: bool) -> None:
    data, test = table(missing=missing), table(300, missing=True)
    plan = small_plan(name)
    models = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(5))
    assert len(set(models)) == 1
    ours = predict(models[0], test)
    assert np.array_equal(ours, Simulation(plan, data, test, drawn(5)).run()) and np.ptp(ours) > 0


TRUST = {"trusted": Trust(), "distributed": Trust(NoiseShares(3, 1))}


@pytest.mark.parametrize(
    ("trust", "name"),
    quick(itertools.product(TRUST, OTHERS), *zip(itertools.cycle(TRUST), OTHERS, strict=False)),
)
def test_what_travels_is_what_the_plan_lists(name: str, trust: str) -> None:
    """A tree that ends early skips releases; nothing else is missing, and nothing is there besides."""
    data, seen, plan = table(), [], small_plan(name, TRUST[trust])
    train_in_process(plan, split_rows(data.columns, data.label, 3), seen=seen)
    sent = {t.frame.counter: t.frame for t in seen if t.direction == "received"}
    listed = iter(plan.releases.releases)
    for counter in sorted(sent):
        kind, n_values = sent[counter].kind, sent[counter].n_values
        assert any(planned.kind is kind and n_values <= sum(planned.sizes) for planned in listed)


def test_histogram_trees_without_noise_are_xgboosts() -> None:
    """The same splits as XGBoost's own grower takes, but for ties between equally good ones."""
    data, plan = table(), plan_with(replace(feverless(3), depth=3, n_candidates=8), bounds(table()), 1.0)
    ours = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)[0]
    cuts = [np.nextafter(c, np.float32(np.inf)) for c in public_candidates(plan.method, plan.bounds).of_feature]
    binned = np.stack([np.searchsorted(c, column, side="right") for c, column in zip(cuts, data.columns, strict=True)])
    parameters = {
        "max_depth": 3,
        "learning_rate": plan.method.learning_rate,
        "lambda": plan.ridge,
        "max_delta_step": plan.method.clip,
        "min_child_weight": 0,
        "base_score": 0.5,
        "objective": "binary:logistic",
        "tree_method": "exact",
        "nthread": 1,
    }
    matrix = xgb.DMatrix(binned.T, label=data.label, nthread=1)
    booster = xgb.Booster(parameters, [matrix])
    objective = bounded_objective(plan, OwnRows(data.columns, data.label))
    for number in range(3):
        booster.update(matrix, number, fobj=objective)
    theirs = booster.predict(matrix, output_margin=True)
    assert np.allclose(predict(ours, data), theirs, atol=1e-4)


def test_noise_of_sites_and_of_a_trusted_server_have_their_sizes() -> None:
    """Leaf sums in the models minus the exact ones: all 120 trees answer one message, so none depends on another.

    Statistic: mean square of about 500 noises over its expectation; false alarm below 1e-4 outside (0.75, 1.3).
    """
    data, n_trees = table(3000), 120
    method = replace(dp_rf(n_trees), clip=0.0)
    for trust, factor in ((Trust(), 1.0), (Trust(NoiseShares(3, 1)), 1.5)):
        plan = plan_with(method, bounds(data), 600.0, trust, SEED)
        [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3))
        forest = xgb.Booster(model_file=bytearray(model)).trees_to_dataframe()
        exact = xgb.Booster(
            model_file=bytearray(refreshed(plan, OwnRows(data.columns, data.label)))
        ).trees_to_dataframe()
        leaves = (exact.Feature == "Leaf").to_numpy()
        noise = (forest.Cover - exact.Cover).to_numpy()[leaves & (exact.Cover > 50).to_numpy()]
        assert noise.size > 400
        ratio = np.mean(noise**2) / (plan.releases.tree_noise.std[0] ** 2 * factor)
        assert 0.75 < ratio < 1.3


@pytest.mark.parametrize("grower", Grower)
def test_no_exact_inner_sum_reaches_a_model_file(grower: Grower) -> None:
    """With noise on leaves, every inner node's Hessian is the sum of its noisy leaves, and none is the exact one."""
    data = table()
    plan = plan_for(replace(RANDOM_TREES["newton"], grower=grower), data, mu=0.5)
    [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(1))
    noisy = xgb.Booster(model_file=bytearray(model)).trees_to_dataframe()
    exact = xgb.Booster(model_file=bytearray(refreshed(plan, OwnRows(data.columns, data.label)))).trees_to_dataframe()
    first = noisy.Tree == 0  # later trees start from other margins
    assert not np.isin(noisy.Cover[first].to_numpy(), exact.Cover[first].to_numpy()).any()
    cover = dict(zip(noisy.ID, noisy.Cover, strict=True))
    for row in noisy[first & (noisy.Feature != "Leaf")].itertuples():
        assert cover[row.ID] == pytest.approx(cover[row.Yes] + cover[row.No], rel=1e-5, abs=1e-4)
