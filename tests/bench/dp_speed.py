"""What private training costs beside one centralized refresh of the same forest, without noise.

python -m tests.bench.dp_speed
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.mechanisms.gaussian import add_gaussian_noise
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.forest import draw_forest, initial_model
from nvflare_plugins.private_trees.forest_trainer import ForestGrower
from nvflare_plugins.private_trees.methods import Grower, dp_tr_newton
from nvflare_plugins.private_trees.training import OwnRows, PrivateTreesPlan
from nvflare_plugins.private_trees.xgboost_trainer import bounded_objective, refresh_parameters
from tests.bench.dp_runs import N_SITES
from tests.support.private_simulation import MechanismSums
from tests.support.private_trees import Part, mu_of, plan_with, split_rows, train_in_process

N_ROWS, N_TEST_ROWS, N_FEATURES = 21_000, 9_000, 23  # credit2's
_EPSILON, _TIMES = 0.5, 3


def speed() -> dict[str, float | str]:
    """Compare CPU times; the medians of three runs of everything.

    Units: seconds of CPU time. ``sites`` and ``xgboost`` are what each trainer takes on the three sites' rows, without
    protocol, the first with its noise; ``transport`` is the rest of a whole private training in one process: masks,
    frames, the server. ``ratio`` is (the sites' trainer + prediction) over the centralized refresh with its prediction.
    """
    runs = [_once(seed) for seed in range(_TIMES)]
    figures = {name: round(float(np.median([run[name] for run in runs])), 3) for name in runs[0]}
    shape = f"totally random, {dp_tr_newton().n_trees} trees, depth 4, {N_ROWS} x {N_FEATURES} generated rows"
    return {"what": shape, **figures}


def _table(seed: int) -> tuple[Part, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=(N_FEATURES, N_ROWS + N_TEST_ROWS)).astype(np.float32)
    label = (columns[0] + columns[1] * columns[2] + rng.normal(size=columns.shape[1]) > 1).astype(np.float32)
    return Part(np.ascontiguousarray(columns[:, :N_ROWS]), label[:N_ROWS]), columns[:, N_ROWS:]


def _once(seed: int) -> dict[str, float]:
    train, test = _table(seed)
    bounds = tuple(FeatureBounds(float(c.min()), float(c.max())) for c in train.columns)
    plan = plan_with(dp_tr_newton(), bounds, mu_of(_EPSILON, 1 / N_ROWS), seed=seed)
    parts = split_rows(train.columns, train.label, N_SITES)

    started = time.process_time()
    model = train_in_process(plan, parts)[0]
    whole = time.process_time() - started
    started = time.process_time()
    by_xgboost = replace(plan, method=replace(plan.method, grower=Grower.XGBOOST))
    train_in_process(by_xgboost, parts)
    whole_by_xgboost = time.process_time() - started
    started = time.process_time()
    xgb.Booster(model_file=bytearray(model)).predict(xgb.DMatrix(test.T, nthread=1))
    prediction = time.process_time() - started

    empty = initial_model(draw_forest(plan.method, public_candidates(plan.method, bounds), seed), plan.method)
    started = time.process_time()
    matrix = xgb.DMatrix(train.columns.T, label=train.label, nthread=1)
    booster = xgb.train(refresh_parameters(plan), matrix, plan.method.n_trees, xgb_model=bytearray(empty))
    booster.predict(xgb.DMatrix(test.T, nthread=1))
    central = time.process_time() - started
    local = sum(_local(plan, part) for part in parts)
    return {
        "sites": local,
        "xgboost": sum(_local_refresh(plan, empty, part) for part in parts),
        "prediction": prediction,
        "central_refresh": central,
        "ratio": (local + prediction) / central,
        "transport": whole - local,
        "protocol": whole,
        "protocol_by_xgboost": whole_by_xgboost,
    }


def _local(plan: PrivateTreesPlan, part: Part) -> float:
    """Return the CPU time of one site's rounds without the others, noise included."""
    started = time.process_time()
    sums = MechanismSums(plan, add_gaussian_noise)
    grower = ForestGrower(plan, OwnRows(part.columns, part.label), sums)
    grower.run(lambda number: None, lambda number, trees: None)
    return time.process_time() - started


def _local_refresh(plan: PrivateTreesPlan, model: bytes, part: Part) -> float:
    """Return the CPU time of one site's rounds of XGBoost's refresh without the others."""
    objective = bounded_objective(plan, OwnRows(part.columns, part.label))
    started = time.process_time()
    matrix = xgb.DMatrix(part.columns.T, label=part.label, nthread=1)
    booster = xgb.Booster(refresh_parameters(plan), [matrix], model_file=bytearray(model))
    booster.set_param(refresh_parameters(plan))
    for number in range(plan.method.n_trees):
        booster.update(matrix, number, fobj=objective)
    return time.process_time() - started


if __name__ == "__main__":
    print(speed())
