"""What one release of XGBoost makes of rows: gradients, base scores, metrics and the frames of its models.

python tests/support/xgboost_rows.py FOLDER    writes them, in an environment that has xgboost and numpy alone

No interface returns XGBoost's gradients. A tree of one row shows them: its hessian as it is, and its gradient in the
leaf, where lambda is so large a power of two that the leaf is the gradient divided by it.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb

N_ROWS, N_MANY = 12, 3000
LAMBDA = 2**60  # as a whole number: XGBoost's reader takes its decimals for a neighbour
CLASSES = 3
_BINARY = ("auc", "aucpr", "logloss", "error", "error@0.3", "rmse", "mae")
_SEVERAL = ("mlogloss", "merror", "auc", "aucpr")
_NUMBERS = (
    *("rmse", "mae", "rmsle", "mape", "poisson-nloglik", "gamma-nloglik", "gamma-deviance"),
    *("tweedie-nloglik@1.3", "tweedie-nloglik@1.9"),
)
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "logistic": ({"objective": "binary:logistic"}, _BINARY),
    "logistic, weighted positives": ({"objective": "binary:logistic", "scale_pos_weight": 1.527247277}, ("logloss",)),
    "probabilities": ({"objective": "reg:logistic"}, _BINARY),
    "raw": ({"objective": "binary:logitraw", "scale_pos_weight": 3.0}, _BINARY),
    "hinge": ({"objective": "binary:hinge"}, ("error", "logloss")),
    "softprob": ({"objective": "multi:softprob", "num_class": CLASSES}, _SEVERAL),
    "softmax": ({"objective": "multi:softmax", "num_class": CLASSES}, _SEVERAL),
    "squared": ({"objective": "reg:squarederror"}, _NUMBERS),
    "squared logarithms": ({"objective": "reg:squaredlogerror"}, _NUMBERS),
    "huber": ({"objective": "reg:pseudohubererror", "huber_slope": 1.7}, (*_NUMBERS, "mphe")),
    "absolute": ({"objective": "reg:absoluteerror"}, _NUMBERS),
    "quantile": ({"objective": "reg:quantileerror", "quantile_alpha": 0.7}, (*_NUMBERS, "quantile")),
    "poisson": ({"objective": "count:poisson"}, _NUMBERS),
    "poisson, smaller steps": ({"objective": "count:poisson", "max_delta_step": 0.4}, _NUMBERS),
    "gamma": ({"objective": "reg:gamma"}, _NUMBERS),
    **{
        f"times, {noise}, scale {scale}": (
            {"objective": "survival:aft", "aft_loss_distribution": noise, "aft_loss_distribution_scale": scale},
            ("aft-nloglik",),
        )
        for noise, scale in (("normal", 1.0), ("logistic", 0.5), ("extreme", 1.375))
    },
    "tweedie": ({"objective": "reg:tweedie", "tweedie_variance_power": 1.3}, _NUMBERS),
}


def rows(name: str, n: int, weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return margins float32[n, n_outputs], labels and weights float32[n], the same with every numpy.

    Labels of times are float32[n, 2]: events, and rows that are censored in each of three ways.
    """
    params, _ = CASES[name]
    rng = np.random.default_rng([n, weighted, *params["objective"].encode()])

    def uniform(shape: Any = n) -> np.ndarray:
        return rng.integers(1, 2**24, shape) / 2.0**24

    n_outputs = params.get("num_class", 1)
    margins = (6 * uniform((n, n_outputs)) - 3).astype(np.float32)
    labels = (4 * uniform() + 0.01).astype(np.float32)
    if n_outputs > 1:
        labels = rng.integers(0, n_outputs, n).astype(np.float32)
    elif params["objective"] in ("binary:logistic", "binary:logitraw", "binary:hinge"):
        labels = (uniform() < 0.3).astype(np.float32)
    elif params["objective"] == "reg:logistic":
        labels = np.where(uniform() < 0.5, uniform(), uniform() < 0.5).astype(np.float32)
    elif params["objective"] == "count:poisson":
        labels = np.floor(3 * labels)
    elif params["objective"] == "survival:aft":
        margins *= np.float32(8)  # the limits far away, and what is clipped, are among them
        kind = np.arange(n) % 4
        lower = np.where(kind == 2, np.float32(0), labels)
        labels = np.stack([lower, np.select([kind == 0, kind == 1], [labels, np.float32(np.inf)], 2 * labels)], axis=1)
    return margins, labels, (3 * uniform() + 0.1).astype(np.float32) if weighted else None


def evaluated_rows(name: str, weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return many rows; margins that are predictions of numbers are not negative, so that all metrics are numbers."""
    margins, labels, weights = rows(name, N_MANY, weighted)
    return (np.abs(margins) if CASES[name][1][: len(_NUMBERS)] == _NUMBERS else margins), labels, weights


def _matrix(
    columns: np.ndarray, margins: np.ndarray | None, labels: np.ndarray, weights: np.ndarray | None
) -> xgb.DMatrix:
    if margins is not None and margins.shape[1] == 1:
        margins = margins[:, 0]
    bounds = ("label_lower_bound", "label_upper_bound")
    fields = {"label": labels} if labels.ndim == 1 else dict(zip(bounds, labels.T, strict=True))
    return xgb.DMatrix(columns, **fields, weight=weights, base_margin=margins)


def _base_score(params: dict[str, Any]) -> Any:
    return [0.5] * params["num_class"] if "num_class" in params else 0.5


def _document(booster: xgb.Booster) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(bytes(booster.save_raw("json")))
    return document


def pairs(name: str, weighted: bool) -> np.ndarray:
    """Return gradients, where the hessian vanishes beside lambda, and hessians.

    Shapes: float32[n_outputs, n_rows, 2].
    """
    params, _ = CASES[name]
    fixed = {"reg_lambda": LAMBDA, "min_child_weight": 0, "learning_rate": 1, "nthread": 1, "max_depth": 1}
    found = []
    for margin, label, weight in zip(*_each(*rows(name, N_ROWS, weighted)), strict=True):
        matrix = _matrix(np.zeros((1, 1)), margin, label, weight)
        booster = xgb.train({**params, **fixed, "base_score": _base_score(params)}, matrix, 1)
        trees = _document(booster)["learner"]["gradient_booster"]["model"]["trees"]
        found.append([[-np.float32(t["base_weights"][0]) * np.float32(LAMBDA), t["sum_hessian"][0]] for t in trees])
    return np.array(found, np.float32).transpose(1, 0, 2)


def _each(
    margins: np.ndarray, labels: np.ndarray, weights: np.ndarray | None
) -> tuple[list[Any], list[Any], list[Any]]:
    each = range(len(labels))
    return (
        [margins[i : i + 1] for i in each],
        [labels[i : i + 1] for i in each],
        [None if weights is None else weights[i : i + 1] for i in each],
    )


def leaves(name: str, weighted: bool) -> np.ndarray:
    """Return -g/h and h of rows whose losses share a scale, from a tree with a leaf for each; no number elsewhere.

    Shapes: float32[n_rows, 2].
    """
    params, _ = CASES[name]
    margins, labels, weights = rows(name, N_ROWS, weighted)
    matrix = _matrix(np.arange(N_ROWS).reshape(-1, 1), margins, labels, weights)
    fixed = {"reg_lambda": 0, "min_child_weight": 0, "learning_rate": 1, "nthread": 1, "max_depth": 30}
    booster = xgb.train({**params, **fixed, "base_score": 0.5}, matrix, 1)
    tree = _document(booster)["learner"]["gradient_booster"]["model"]["trees"][0]
    at = booster.predict(matrix, pred_leaf=True).reshape(-1).astype(int)
    found = np.array([[tree["base_weights"][leaf], tree["sum_hessian"][leaf]] for leaf in at], np.float32)
    found[np.bincount(at)[at] > 1] = np.nan
    return found


def trained(name: str, weighted: bool, **more: Any) -> dict[str, Any]:
    """Return the document of a small model of XGBoost's own."""
    params, _ = CASES[name]
    margins, labels, weights = rows(name, N_MANY, weighted)
    matrix = _matrix(margins, None, labels, weights)
    return _document(xgb.train({**params, "nthread": 1, "max_depth": 2, **more}, matrix, more.pop("rounds", 1)))


def metrics(name: str, weighted: bool) -> list[float]:
    """Return the metrics of margins that an empty model is given."""
    params, names = CASES[name]
    matrix = _matrix(np.zeros((N_MANY, 1)), *evaluated_rows(name, weighted))
    given = {**params, "nthread": 1, "base_score": _base_score(params), "eval_metric": list(names)}
    line = xgb.Booster({**given, "disable_default_eval_metric": True}, [matrix]).eval(matrix)
    return [float(part.rpartition(":")[2]) for part in line.split("\t")[1:]]


def frame(document: dict[str, Any]) -> dict[str, Any]:
    """Return a model's document without its trees."""
    document["learner"]["gradient_booster"]["model"]["trees"] = []
    return document


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def facts() -> dict[str, Any]:
    """Return everything, as JSON."""
    found: dict[str, Any] = {"version": xgb.__version__}
    for name in CASES:
        for weighted in (False, True):
            found[f"{name}, {'weighted' if weighted else 'plain'}"] = {
                "pairs": _text(pairs(name, weighted)),
                "metrics": metrics(name, weighted),
                "frame": frame(trained(name, weighted)),
            }
            if name in ("absolute", "quantile") and xgb.__version__ >= "3.4":
                found[f"{name}, {'weighted' if weighted else 'plain'}"]["leaves"] = _text(leaves(name, weighted))
    return found


def small_model() -> tuple[np.ndarray, xgb.Booster]:
    """Return rows with missing values and categories, and a model of two rounds that XGBoost trained on them."""
    rng = np.random.default_rng(4)
    columns = rng.integers(-400, 400, (N_MANY, 3)).astype(np.float32) / np.float32(128)
    columns[:, 2] = rng.integers(0, 9, N_MANY)
    columns[rng.integers(0, 10, columns.shape) == 0] = np.nan
    names = {"feature_names": ["Größe", "b", "c"], "feature_types": ["float", "float", "c"]}
    label = rng.integers(0, CLASSES, N_MANY)
    matrix = xgb.DMatrix(columns, label=label, enable_categorical=True, **names)
    params = {"objective": "multi:softprob", "num_class": CLASSES, "max_depth": 2, "nthread": 1}
    return columns, xgb.train({**params, "max_cat_to_onehot": 1}, matrix, 2)


def write(folder: Path) -> None:
    """Write what this release's files hold."""
    release = xgb.__version__[:3]
    text = json.dumps(facts(), sort_keys=True, separators=(",", ":")).replace('},"', '},\n"')
    (folder / f"rows_{release}.json").write_text(text + "\n")
    _, booster = small_model()
    (folder / f"model_{release}.ubj").write_bytes(bytes(booster.save_raw("ubj")))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
