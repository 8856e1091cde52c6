"""Records what stock XGBoost says to its tracker in column split, knowing nothing of our catalogue.

Three real XGBoost ranks meet at a plain tracker; the calls of rank 0, which has the label, are written down.
``python -m tests.support.vertical_recorder`` writes the golden traces again.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import xgboost as xgb
from xgboost.core import DataSplitMode

from tests.support.recorder import WORLD, _Tracker, data, write_traces

ROUNDS, N_VALID = 2, 61
COLUMNS = ([0, 1], [2], [3, 4])

CASES: dict[str, dict] = {
    "logistic": {"objective": "binary:logistic", "eval_metric": ["auc", "logloss"]},
    "base_score": {"objective": "binary:logistic", "base_score": 0.5},
    "hinge": {"objective": "binary:hinge"},
    "scale_pos_weight": {"objective": "binary:logistic", "scale_pos_weight": 2.0},
    "softprob": {"objective": "multi:softprob", "num_class": 3, "eval_metric": ["mlogloss", "auc"]},
    "softmax": {"objective": "multi:softmax", "num_class": 3},
    "squared_error": {"objective": "reg:squarederror", "eval_metric": ["rmse", "mae"]},
    "pseudo_huber": {"objective": "reg:pseudohubererror"},
    "absolute_error": {"objective": "reg:absoluteerror"},
    "absolute_error_forest": {"objective": "reg:absoluteerror", "num_parallel_tree": 2},
    "quantile_error": {"objective": "reg:quantileerror", "quantile_alpha": 0.3},
    "poisson": {"objective": "count:poisson"},
    "lossguide": {"objective": "binary:logistic", "grow_policy": "lossguide", "max_leaves": 6, "max_depth": 0},
    "forest": {"objective": "binary:logistic", "num_parallel_tree": 2},
    "sampled": {"objective": "binary:logistic", "subsample": 0.5, "colsample_bylevel": 0.5},
    "deep": {"objective": "binary:logistic", "max_depth": 7, "min_child_weight": 0},
    "stump": {"objective": "binary:logistic", "max_depth": 1},
    "synchronized": {"objective": "binary:logistic", "debug_synchronize": True},
    "continued": {"objective": "binary:logistic", "continued": True},
}


def record(case: dict) -> dict:
    """Run one case and return its trace: the calls of rank 0 of each phase in order."""
    params = {"max_bin": 16, "max_depth": 3, "nthread": 1, "tree_method": "hist", **case}
    continued = params.pop("continued", False)
    regression = not params["objective"].startswith(("binary", "multi"))
    features, labels, _ = data(5 if regression else params.get("num_class", 2))
    labels = labels + 1 if regression else labels
    initial = xgb.train(params, xgb.DMatrix(features, label=labels), 1).save_raw("json") if continued else None
    tracker, phases = _Tracker(), []
    address = tracker.start()

    def site(rank: int) -> None:
        def announced(phase: str, number: int, step):
            start = len(tracker.calls)
            value = step()
            if rank == 0:
                phases.append([phase, number, tracker.calls[start:]])
            return value

        def matrix(rows: slice) -> xgb.DMatrix:
            label = labels[rows] if rank == 0 else None
            part = np.ascontiguousarray(features[rows][:, COLUMNS[rank]])
            return xgb.DMatrix(part, label=label, data_split_mode=DataSplitMode.COL)

        with xgb.collective.CommunicatorContext(
            dmlc_communicator="federated",
            federated_server_address=address,
            federated_world_size=WORLD,
            federated_rank=rank,
        ):
            train = announced("setup", 0, lambda: matrix(slice(None)))
            valid = announced("setup", 0, lambda: matrix(slice(N_VALID)))
            booster = xgb.Booster(params, [train, valid], model_file=initial)
            for number in range(ROUNDS):
                announced("update", number, partial(booster.update, train, number))
                sets = [(train, "train"), (valid, "valid")]
                announced("evaluate", number, partial(booster.eval_set, sets, number))

    threads = [threading.Thread(target=site, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracker.stop()
    return {"xgboost": xgb.__version__, "case": case, "phases": phases}


if __name__ == "__main__":
    write_traces("vertical", {name: record(case) for name, case in CASES.items()})
