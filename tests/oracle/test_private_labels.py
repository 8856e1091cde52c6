"""Private trees on numbers and on several classes, against stock XGBoost and against a twin without numpy's tricks.

Without noise a model of random trees must be that of XGBoost's own refresh of the same forest on the pooled rows; with
noise the model file, read by stock XGBoost, must answer what the sites' trainer has answered, bit by bit.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import xgboost as xgb

from dp_components.events import Release
from dp_components.leaf_weights import LeafQuery, Number, SeveralClasses, Target, Times
from dp_components.mechanisms import NoiseShares
from dp_components.split_candidates.candidates import FeatureBounds, by_rule, uniform_candidates
from nvflare_plugins.growth.survival import DISTRIBUTIONS, AftLoss
from nvflare_plugins.kinds.private_trees import noisy_sums
from nvflare_plugins.kinds.private_trees.methods import (
    CandidateSource,
    Interactions,
    Method,
    SplitMethod,
    WeightUpdate,
    dp_ebm_newton,
    dp_gbm,
    dp_rf,
    dp_tr_newton,
    feverless,
)
from nvflare_plugins.kinds.private_trees.plan import TRUSTED_SERVER, OwnRows, PrivateTreesPlan, ReleasePlan, Trust
from tests.oracle.test_private_trees import OURS, PARTIALLY, REFINED, bounds, drawn, no_noise, table
from tests.support.examples import quick
from tests.support.private_simulation import Simulation, Table
from tests.support.private_trees import split_rows, train_in_process
from tests.support.refreshed import refresh_parameters

NUMBER = Number(FeatureBounds(-4.0, 8.0))
TIMES = {noise: Times(FeatureBounds(0.25, 64.0), AftLoss(noise, 0.75)) for noise in DISTRIBUTIONS}
SCALES = {"plain": 1.0, "large": 1e6, "small": 1e-9}
DEFAULT = replace(OURS, interactions=Interactions.INFORMED, query=LeafQuery.CLIPPED)
OF_ALL = {
    "default": DEFAULT,
    "batches": replace(DEFAULT, batch_size=3),
    "a_smaller_last_batch": replace(DEFAULT, batch_size=4),
    "joint": OURS,
    "newton": dp_tr_newton(),
    "one_feature": dp_ebm_newton(),
    "gradient": replace(dp_tr_newton(), weight_update=WeightUpdate.GRADIENT, batch_size=2),
    "averaging": dp_rf(6),
    "histograms": feverless(),
    "partially_random": PARTIALLY,
    "refined": replace(dp_tr_newton(), **REFINED),
}
OF_CLASSES = {
    **OF_ALL,
    "averaged_histograms": replace(dp_rf(6), split_method=SplitMethod.HISTOGRAM),
    "gradient_histograms": dp_gbm(),
    "refined_histograms": replace(dp_gbm(), **REFINED),
    "one_feature_histograms": replace(feverless(), n_features_per_tree=1),
    "refined_gradient": replace(dp_tr_newton(), weight_update=WeightUpdate.GRADIENT, **REFINED),
    "refined_averaging": replace(dp_rf(6), **REFINED),
}
OF_NUMBERS = {**OF_ALL, "scalar": replace(dp_tr_newton(), query=LeafQuery.SCALAR)}


def labelled(target: Target, n_rows: int = 900, scale: float = 1.0) -> Table:
    """Return rows with labels of a kind; nobody has the last class."""
    data = table(n_rows, missing=True)
    score = np.nan_to_num(data.columns[0]) + np.nan_to_num(data.columns[1]) * np.nan_to_num(data.columns[2])
    if isinstance(target, Times):
        times = np.exp(score + 1).astype(np.float32)[:, None] * np.ones(2, np.float32)
        times[::3, 1], times[1::7, 0], times[2::5, 1] = np.inf, 0, 1.5 * times[2::5, 0]  # of every kind of censoring
        return Table(data.columns, times)
    if isinstance(target, Number):
        return Table(data.columns, (scale * (2 * score + 1)).astype(np.float32))  # some lie beyond the bounds
    return Table(data.columns, np.digitize(score, [-0.5, 0.5]).astype(np.float32))


def plan_of(
    method: Method, target: Target, data: Table, trust: Trust = TRUSTED_SERVER, n_trees: int = 6
) -> PrivateTreesPlan:
    few = replace(method, n_trees=n_trees, depth=3, n_candidates=10)
    few = replace(few, batch_size=6 if method.weight_update is WeightUpdate.AVERAGING else method.batch_size)
    releases = ReleasePlan.of(few, bounds(data), 2.0, trust.n_honest, target=target)
    return PrivateTreesPlan(few, bounds(data), releases, trust, 11, (), target)


def predict(model: bytes, data: Table) -> np.ndarray:
    booster = xgb.Booster(model_file=bytearray(model))
    return booster.predict(xgb.DMatrix(data.columns.T, nthread=1), output_margin=True)


class Scores(Simulation):
    """The scores that the trainer itself goes on with, for rows of which it is told nothing."""

    def __init__(self, plan: PrivateTreesPlan, *rest: object) -> None:
        super().__init__(plan, *rest)
        target, n_rows = plan.target, self._scores.size
        shape = (n_rows,) if target.n_outputs == 1 else (n_rows, target.n_outputs)
        self._scores = np.full(shape, target.start, dtype=np.float32)


CASES = [(SeveralClasses(4), name, method) for name, method in OF_CLASSES.items()]
CASES += [(NUMBER, name, method) for name, method in OF_NUMBERS.items()]
CASES += [(TIMES["normal"], name, method) for name, method in OF_NUMBERS.items() if name != "averaging"]
CASES += [(TIMES[noise], "default", DEFAULT) for noise in ("logistic", "extreme")]
OF_METHOD = {name: [case for case in CASES if case[1] == name] for name in (OF_CLASSES | OF_NUMBERS)}
QUICK = [cases[number % len(cases)] for number, cases in enumerate(OF_METHOD.values())]  # labels of all kinds in turn


@pytest.mark.parametrize(
    ("target", "name", "method"),
    quick(CASES, *QUICK, *OF_METHOD["default"]),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_stock_xgboost_answers_what_the_sites_trained(target: Target, name: str, method: Method) -> None:
    data, test = labelled(target), labelled(target, 300)
    plan = plan_of(method, target, data)
    models = train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(5))
    assert len(set(models)) == 1
    ours = predict(models[0], test)
    assert np.array_equal(ours, Scores(plan, data, test, drawn(5)).run()) and np.ptp(ours) > 0


def stock_refresh(plan: PrivateTreesPlan, model: bytes, data: Table) -> np.ndarray:
    """Let XGBoost refresh the leaves of a model's trees on all rows, and return its scores.

    XGBoost weighs a regression's leaves by its learning rate, in which the unit of residuals is put here.
    """
    parameters = {**refresh_parameters(plan), "learning_rate": plan.method.learning_rate * plan.leaf_unit}
    rows, n_outputs = OwnRows(data.columns, data.label), plan.target.n_outputs

    def objective(margin: np.ndarray, _: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray]:
        values = np.ldexp(rows.statistics(margin, plan), -20).astype(np.float32)
        return values[:, :n_outputs].squeeze(), values[:, n_outputs:].squeeze()

    matrix = xgb.DMatrix(data.columns.T, label=np.zeros(len(data.label)), nthread=1)
    booster = xgb.Booster(parameters, [matrix], model_file=bytearray(model))
    booster.set_param(parameters)
    for number in range(plan.method.n_trees // plan.method.batch_size):
        booster.update(matrix, number, fobj=objective)
    return booster.predict(matrix, output_margin=True)


@pytest.mark.parametrize("name", ["newton", "one_feature", "joint", "default"])
@pytest.mark.parametrize("target", [SeveralClasses(4), NUMBER, TIMES["normal"]], ids=["classes", "numbers", "times"])
def test_without_noise_it_is_stock_xgboosts_refresh(target: Target, name: str) -> None:
    """But for the classes' mean, which is 0 up to the truncation of rows and is taken away here."""
    data = labelled(target)
    plan = plan_of(replace(OF_CLASSES[name], candidates=CandidateSource.UNIFORM), target, data)
    [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    ours, theirs = predict(model, data), stock_refresh(plan, model, data)
    assert np.ptp(ours) > 0.01
    assert np.array_equal(ours, theirs) if target.n_outputs == 1 else np.allclose(ours, theirs, atol=2e-5)


def naive_classes(data: Table, plan: PrivateTreesPlan, model: bytes) -> np.ndarray:
    """Boost the model's own trees row by row, from the loss's definition; nothing is shared with the trainer."""
    document = json.loads(model)["learner"]["gradient_booster"]["model"]
    k, n_rows = plan.target.n_outputs, data.label.size
    scores = np.zeros((n_rows, k))
    for round_number in range(plan.method.n_trees):
        trees = document["trees"][round_number * k : (round_number + 1) * k]
        assert all(tree["split_indices"] == trees[0]["split_indices"] for tree in trees), (
            "one structure for all classes"
        )
        sums: dict[int, np.ndarray] = {}
        places = []
        for row in range(n_rows):
            node = 0
            while trees[0]["left_children"][node] >= 0:
                value = data.columns[trees[0]["split_indices"][node], row]
                is_left = value < np.float32(trees[0]["split_conditions"][node])
                node = trees[0]["left_children" if is_left else "right_children"][node]
            places.append(node)
            p = np.exp(scores[row]) / np.exp(scores[row]).sum()
            vector = np.concatenate([p - (np.arange(k) == data.label[row]), 1.5 * p * (1 - p)])
            vector *= min(1.0, 0.85 / np.linalg.norm(vector))
            sums[node] = sums.get(node, 0) + vector
        for row, node in enumerate(places):
            g, h = sums[node][:k], sums[node][k:] / 1.5
            scores[row] += 0.3 * np.clip(-g / (h + plan.ridge), -2, 2)
    return scores


def test_several_classes_equal_a_naive_twin() -> None:
    target = SeveralClasses(4)
    data = labelled(target, 200)
    plan = plan_of(replace(DEFAULT, candidates=CandidateSource.UNIFORM), target, data)
    [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    assert np.allclose(predict(model, data), naive_classes(data, plan, model), atol=1e-4)


def brute_split(data: Table, rows: np.ndarray, cuts: list[np.ndarray], method: Method) -> tuple[float, int, float]:
    """Return gain, feature and threshold of the best split of some rows at scores of 0, class by class."""

    def gain_of(some: np.ndarray) -> float:
        p, total = np.full(4, 0.25), 0.0
        for k in range(4):
            g, h = np.sum(p[k] - (data.label[some] == k)), some.sum() * p[k] * (1 - p[k])
            if h > 0:
                w = np.clip(-g / (h + method.ridge), -method.clip, method.clip)
                total -= 2 * g * w + (h + method.ridge) * w * w
        return total

    found = []
    for feature, of_feature in enumerate(cuts):
        for cut in of_feature:
            left = rows & (data.columns[feature] < cut)
            found.append((0.5 * (gain_of(left) + gain_of(rows & ~left) - gain_of(rows)), feature, float(cut)))
    return max(found)


def test_greedy_trees_of_several_classes_take_the_best_split_of_all_classes() -> None:
    """The first tree, without noise, against every split of every node tried row by row."""
    target = SeveralClasses(4)
    data = labelled(target, 300)
    plan = plan_of(feverless(), target, data)
    [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    tree = json.loads(model)["learner"]["gradient_booster"]["model"]["trees"][0]
    cuts = by_rule(uniform_candidates, plan.bounds, plan.method.n_candidates).of_feature
    nodes, n_splits = [(0, np.ones(300, dtype=bool))], 0
    while nodes:
        node, rows = nodes.pop()
        if tree["left_children"][node] < 0:
            continue
        feature, threshold = tree["split_indices"][node], tree["split_conditions"][node]
        left = rows & (data.columns[feature] < np.float32(threshold))
        best = brute_split(data, rows, cuts, plan.method)
        taken = brute_split(data, rows, [np.array([threshold]) if f == feature else () for f in range(9)], plan.method)
        assert taken[0] == pytest.approx(best[0], rel=1e-4, abs=1e-3)
        nodes += [(tree["left_children"][node], left), (tree["right_children"][node], rows & ~left)]
        n_splits += 1
    assert n_splits > 3


def test_averaging_of_several_classes_answers_shares() -> None:
    """Without noise a leaf's score is the number of classes times the share of each, counted row by row."""
    target = SeveralClasses(4)
    data = labelled(target, 300)
    plan = plan_of(dp_rf(6), target, data)
    [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    leaves = xgb.Booster(model_file=bytearray(model)).predict(xgb.DMatrix(data.columns.T), pred_leaf=True)
    of_tree = leaves[:, :6].astype(int)  # of a round, the trees of the first class come first
    shares = np.zeros((300, 4))
    for tree in range(6):
        for leaf in np.unique(of_tree[:, tree]):
            rows = of_tree[:, tree] == leaf
            shares[rows] += np.bincount(data.label[rows].astype(int), minlength=4) / rows.sum() / 6
    assert np.allclose(predict(model, data), 4 * shares, atol=1e-5)


def test_a_class_that_nobody_has_is_learnt_to_be_rare() -> None:
    target = SeveralClasses(4)
    data = labelled(target)
    plan = plan_of(replace(DEFAULT, noise_ridge=0.0), target, data)
    [model, *_] = train_in_process(plan, split_rows(data.columns, data.label, 3), no_noise)
    booster = xgb.Booster(model_file=bytearray(model))
    p = booster.predict(xgb.DMatrix(data.columns.T))
    assert p.shape == (900, 4) and p[:, 3].max() < 0.25 and p[:, 3].mean() < 0.15
    assert json.loads(booster.save_config())["learner"]["objective"]["name"] == "multi:softprob"


@pytest.mark.parametrize("scale", ["large", "small"])
def test_a_regression_does_not_depend_on_the_labels_scale(scale: str) -> None:
    factor, models = SCALES[scale], {}
    for name in ("plain", scale):
        target = Number(FeatureBounds(-4.0 * SCALES[name], 8.0 * SCALES[name]))
        data = labelled(target, scale=SCALES[name])
        plan = plan_of(DEFAULT, target, data)
        models[name] = predict(train_in_process(plan, split_rows(data.columns, data.label, 3), drawn(5))[0], data)
    assert np.allclose(models[scale] / factor, models["plain"], atol=1e-3)


@pytest.mark.parametrize("target", [SeveralClasses(4), NUMBER], ids=["classes", "numbers"])
def test_noise_of_shares_has_its_size(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean square of all noises on leaf sums over its expectation, coordinate by coordinate.

    Over 1,000 values of each coordinate in one round; false alarm below 1e-6 outside (0.75, 1.3).
    """
    data, noises = labelled(target), []
    plan = plan_of(replace(DEFAULT, batch_size=60), target, data, Trust(NoiseShares(3, 1)), 60)
    real = noisy_sums.add_noise_share

    def recorded(sums: np.ndarray, *rest: object) -> Release:
        release = real(sums, *rest)
        noises.append(release.value - sums)
        return release

    monkeypatch.setattr(noisy_sums, "add_noise_share", recorded)
    train_in_process(plan, split_rows(data.columns, data.label, 3))
    of_share = np.array(plan.releases.tree_noise.std) * 2**20 / np.sqrt(2)  # two honest sites make up the noise
    ratios = np.concatenate([noise for noise in noises if noise.shape[1] == of_share.size]) / of_share
    assert len(ratios) > 1000 and np.all(np.abs(np.log(np.mean(ratios**2, axis=0))) < np.log(1.3))
