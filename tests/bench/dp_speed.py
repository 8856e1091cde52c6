"""What private training costs beside one centralized refresh of the same forest, without noise.

python -m tests.bench.dp_speed
"""

from __future__ import annotations

import json
import time

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.mechanisms import add_gaussian_noise
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.kinds.private_trees.forest import ForestGrower
from nvflare_plugins.kinds.private_trees.methods import dp_tr_newton
from nvflare_plugins.kinds.private_trees.plan import OwnRows, PrivateTreesPlan
from tests.bench.dp_runs import N_SITES
from tests.support.private_simulation import MechanismSums
from tests.support.private_trees import Part, mu_of, plan_with, split_rows, train_in_process
from tests.support.refreshed import empty_forest, refresh_parameters

N_ROWS, N_TEST_ROWS, N_FEATURES = 21_000, 9_000, 23  # credit2's
_EPSILON, _TIMES = 0.5, 3


def speed() -> dict[str, float | str]:
    """Compare CPU times; the medians of three runs of everything.

    Units: seconds of CPU time. ``sites`` is what the trainer takes on the three sites' rows, with its noise, without
    protocol; ``transport`` is the rest of a whole private training in one process: masks, frames, the server. ``ratio``
    is (the sites' trainer + prediction) over the centralized refresh with its prediction.
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
    xgb.Booster(model_file=bytearray(model)).predict(xgb.DMatrix(test.T, nthread=1))
    prediction = time.process_time() - started

    empty = empty_forest(plan)
    started = time.process_time()
    matrix = xgb.DMatrix(train.columns.T, label=train.label, nthread=1)
    booster = xgb.train(refresh_parameters(plan), matrix, plan.method.n_trees, xgb_model=bytearray(empty))
    booster.predict(xgb.DMatrix(test.T, nthread=1))
    central = time.process_time() - started
    local = sum(_local(plan, part) for part in parts)
    return {
        "sites": local,
        "prediction": prediction,
        "central_refresh": central,
        "ratio": (local + prediction) / central,
        "transport": whole - local,
        "protocol": whole,
    }


def _local(plan: PrivateTreesPlan, part: Part) -> float:
    """Return the CPU time of one site's rounds without the others, noise included."""
    started = time.process_time()
    sums = MechanismSums(plan, add_gaussian_noise)
    grower = ForestGrower(plan, OwnRows(part.columns, part.label), sums)
    grower.run(lambda number: None, lambda number, trees: None)
    return time.process_time() - started


def main() -> None:
    """Print the figures as one JSON object."""
    print(json.dumps(speed()))


if __name__ == "__main__":
    main()
