"""What centralized XGBoost ranks, one thread, given cuts: the oracle of nvflare_plugins/growth/ranking.py.

python tests/oracle/ranking_trees.py FILE     rank all settings with the XGBoost of this interpreter, write the trees

It imports XGBoost and numpy alone, as growth_trees.py, so that any release can run it in an environment of its own.
"""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

N_FEATURES, CUTS, MAX_BIN, ROUNDS, SITES = 4, 14, 16, 4, 3
_MEAN = {"objective": "rank:ndcg", "lambdarank_pair_method": "mean", "eval_metric": "ndcg"}
_GIVEN = {"base_score": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "ndcg": {"objective": "rank:ndcg", **_GIVEN},
    "pairwise": {"objective": "rank:pairwise", **_GIVEN},
    "map": {"objective": "rank:map", "eval_metric": ["map", "map@5", "pre@3"], **_GIVEN},
    "weights": {"objective": "rank:ndcg", "eval_metric": ["ndcg@3", "ndcg"], **_GIVEN},
    "map_weights": {"objective": "rank:map", "eval_metric": ["map@2", "pre"], **_GIVEN},
    "few_pairs": {"objective": "rank:ndcg", "lambdarank_num_pair_per_sample": 3, **_GIVEN},
    "not_normalized": {"objective": "rank:ndcg", "lambdarank_normalization": False, **_GIVEN},
    "not_by_score": {"objective": "rank:pairwise", "lambdarank_score_normalization": False, **_GIVEN},
    "linear_gain": {"objective": "rank:ndcg", "ndcg_exp_gain": False, "eval_metric": "ndcg@4", **_GIVEN},
    "mean": {**_MEAN, **_GIVEN},
    "mean_pairs": {**_MEAN, "lambdarank_num_pair_per_sample": 3, "lambdarank_normalization": False, **_GIVEN},
    "mean_first": {**_MEAN},
    "mean_columns": {**_MEAN, "colsample_bynode": 0.5, "seed": 3, **_GIVEN},
    "mean_seeds": {**_MEAN, "colsample_bytree": 0.5, "seed_per_iteration": True, "seed": 5},
    "first": {"objective": "rank:pairwise"},
}
"""Parameters of each training; ``weights`` are read where its name says so, and labels are 0 or 1 in ``map``."""


def parameters(name: str) -> dict[str, Any]:
    """Return XGBoost's parameters."""
    return {"max_depth": 3, "max_bin": MAX_BIN, "min_child_weight": 1.5, "eta": 0.5, **SETTINGS[name]}


def rows(name: str, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return rows by column, those of one site after the other: features, label, query (of a site), site, weight."""
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([rng.integers(1, 40, 24), [1, 2, 60]])
    site = np.repeat(np.sort(np.concatenate([[0] * 8, [1] * 12, [2] * 7])), sizes)
    query = np.repeat(np.concatenate([np.arange(8), np.arange(12), np.arange(7)]), sizes)
    features = rng.integers(0, CUTS + 1, (site.size, N_FEATURES)).astype(np.float32)
    relevance = features[:, 0] / 5 - np.abs(features[:, 1] - 7) / 6 + rng.normal(size=site.size)
    label = np.clip(np.floor(relevance), 0, 1 if "map" in name else 4).astype(np.float32)
    label[(site == 1) & (query == 2)] = 1  # a query without pairs
    weight = np.repeat(rng.integers(1, 9, sizes.size).astype(np.float32) / 2, sizes)
    return {"features": features, "label": label, "query": query, "site": site, "weight": weight}


def cut_points() -> list[NDArray[np.float32]]:
    """Return the inner cut points of each feature. Shapes: float32[CUTS] each."""
    return [np.arange(CUTS, dtype=np.float32) + np.float32(0.5)] * N_FEATURES


def _matrix(name: str, of: dict[str, NDArray[Any]], ref: xgb.DMatrix | None = None) -> xgb.DMatrix:
    number = of["site"] * 1000 + of["query"]
    first = np.unique(number, return_index=True)[1]
    weight = of["weight"][first] if "weights" in name else None
    options = {"label": of["label"], "qid": number, "weight": weight}
    if ref is None:
        return xgb.DMatrix(of["features"], **options)
    return xgb.QuantileDMatrix(of["features"], ref=ref, max_bin=MAX_BIN, **options)


def rank(name: str) -> dict[str, Any]:
    """Return base score, trees and metrics of a training."""
    edges = np.concatenate([[-1e38], cut_points()[0], [1e38]]).astype(np.float32)
    given = xgb.QuantileDMatrix(np.tile(edges[:, None], N_FEATURES), max_bin=MAX_BIN)
    train, held_out = _matrix(name, rows(name), given), _matrix(name, rows(name, 1))
    told: dict[str, Any] = {}
    sets = [(train, "train"), (held_out, "eval")]
    params = {**parameters(name), "tree_method": "hist", "nthread": 1}
    booster = xgb.train(params, train, ROUNDS, evals=sets, evals_result=told, verbose_eval=False)
    learner = json.loads(booster.save_raw("json"))["learner"]
    return {
        "base_score": learner["learner_model_param"]["base_score"],
        "objective": learner["objective"],
        "trees": learner["gradient_booster"]["model"]["trees"],
        "metrics": {f"{one}-{metric}": values for one, some in told.items() for metric, values in some.items()},
    }


def main() -> int:
    """Write all trainings."""
    document = {"xgboost": xgb.__version__, "rankings": {name: rank(name) for name in SETTINGS}}
    written = json.dumps(document, separators=(",", ":"))
    with open(sys.argv[1], "wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        packed.write(written.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
