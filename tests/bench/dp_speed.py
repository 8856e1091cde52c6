"""What private training costs beside one centralized refresh of the same forest, without noise.

python -m tests.bench.dp_speed
"""

from __future__ import annotations

import time

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.mechanisms.gaussian import add_gaussian_noise
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.private_trees.forest import initial_model
from nvflare_plugins.private_trees.methods import dp_tr_newton
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.training import PrivateTreesPlan, bounded_objective, refresh_parameters
from tests.bench.dp_runs import N_SITES
from tests.support.private_trees import Part, split_rows, train_in_process

N_ROWS, N_TEST_ROWS, N_FEATURES = 21_000, 9_000, 23  # credit2's
_EPSILON, _TIMES = 0.5, 3


def speed() -> dict[str, float | str]:
    """Compare CPU times; the medians of three runs of everything.

    Units: seconds of CPU time. ``xgboost_all_sites`` is what XGBoost and the objective take on the three sites' rows,
    run without a communicator; ``transport`` is the rest of a whole private training in one process: loopback calls,
    mediators, masks, frames, the server. ``ratio`` is (XGBoost of all sites + noise + prediction) over the centralized
    refresh with its prediction.
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
    method = dp_tr_newton()
    bounds = tuple(FeatureBounds(float(c.min()), float(c.max())) for c in train.columns)
    noise = NoisePlan.for_budget(method, N_FEATURES, _EPSILON, 1 / N_ROWS)
    plan = PrivateTreesPlan(method, bounds, noise, Trust(), seed)
    parts = split_rows(train.columns, train.label, N_SITES)

    started = time.process_time()
    trained = train_in_process(plan, parts)
    whole = time.process_time() - started
    started = time.process_time()
    trained[0].booster.predict(xgb.DMatrix(test.T, nthread=1))
    prediction = time.process_time() - started
    started = time.process_time()
    for tree in trained[0].forest.trees:
        sums = np.zeros((tree.leaves.size, 2), dtype=np.int64)
        add_gaussian_noise(sums, noise.leaves.sensitivity, noise.leaves.multiplier)
    noising = time.process_time() - started

    empty = initial_model(trained[0].forest, method)
    started = time.process_time()
    matrix = xgb.DMatrix(train.columns.T, label=train.label, nthread=1)
    booster = xgb.train(refresh_parameters(plan, 1), matrix, method.n_trees, xgb_model=bytearray(empty))
    booster.predict(xgb.DMatrix(test.T, nthread=1))
    central = time.process_time() - started
    local = sum(_local_refresh(plan, empty, part) for part in parts)
    computing = local + noising + prediction
    return {
        "xgboost_all_sites": local,
        "noise": noising,
        "prediction": prediction,
        "together": computing,
        "central_refresh": central,
        "ratio": computing / central,
        "transport": whole - local - noising,
    }


def _local_refresh(plan: PrivateTreesPlan, model: bytes, part: Part) -> float:
    """Return the CPU time of one site's rounds without the others."""
    objective = bounded_objective(plan, part.label)
    started = time.process_time()
    matrix = xgb.DMatrix(part.columns.T, label=part.label, nthread=1)
    booster = xgb.Booster(refresh_parameters(plan, 1), [matrix], model_file=bytearray(model))
    booster.set_param(refresh_parameters(plan, 1))
    for number in range(plan.method.n_trees):
        booster.update(matrix, number, fobj=objective)
    return time.process_time() - started


if __name__ == "__main__":
    print(speed())
