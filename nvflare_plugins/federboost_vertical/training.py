"""The active party's part: stock XGBoost on its own features and the others' randomised buckets."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.failures import DataRefusal
from nvflare_plugins.federboost_vertical.buckets import BucketBlock
from nvflare_plugins.vertical.parameters import check_vertical_parameters
from nvflare_plugins.xgb.parameters import TrainingParameters

_log = logging.getLogger(__name__)
N_FOLDS = 5
_FOLD_SEED = 0  # public: which rows are held out tells nothing
_NOT_FOR_BUCKETS = ("monotone_constraints", "interaction_constraints")


def check_bucket_parameters(params: dict[str, object], n_buckets: int) -> TrainingParameters:
    """Check XGBoost's parameters before anything is sent.

    Raises:
        ConfigurationError: a parameter that vertical jobs do not support, or one that names columns: the columns of
            the others have no names; or a ``max_bin`` below the number of buckets, which would merge some.
    """
    for name in _NOT_FOR_BUCKETS:
        if name in params:
            raise ConfigurationError(f"{name} names columns, and buckets of other parties have no names")
    parameters = check_vertical_parameters(params, ["any"], [])
    if parameters.max_bin < n_buckets:
        raise ConfigurationError(f"max_bin={parameters.max_bin} would merge the {n_buckets} buckets of other parties")
    return parameters


def train_on_buckets(
    own: NDArray[np.float32],
    label: NDArray[np.float32],
    parties: Sequence[BucketBlock],
    parameters: TrainingParameters,
    num_rounds: int,
    cores: int | None = None,
) -> bytes:
    """Train on own features and buckets; rows whose label the objective does not take are left out here alone.

    Shapes:  own: float32[n_own, n_rows]; label: float32[n_rows].
    Privacy: post-processing of the released buckets; nothing is sent meanwhile.

    Args:
        cores: cores that XGBoost may use; None asks the operating system.

    Returns:
        The model in XGBoost's JSON form; columns of other parties split at numbers of buckets.
    """
    columns, label = _usable(own, label, parties, parameters)
    settings = parameters.for_booster(cores)
    matrix = xgb.QuantileDMatrix(
        np.ascontiguousarray(columns.T), label=label, max_bin=parameters.max_bin, nthread=settings["nthread"]
    )
    return bytes(xgb.train(settings, matrix, num_rounds).save_raw("json"))


def cross_validated(
    own: NDArray[np.float32],
    label: NDArray[np.float32],
    parties: Sequence[BucketBlock],
    parameters: TrainingParameters,
    num_rounds: int,
    cores: int | None = None,
) -> dict[str, tuple[float, float]]:
    """Return the objective's own metric, and AUC, in five-fold cross validation: name -> (mean, sd over folds).

    Empty for fewer rows than folds.

    Shapes, Privacy: as ``train_on_buckets``; what is returned stays at the active party.
    """
    columns, label = _usable(own, label, parties, parameters)
    if label.size < N_FOLDS:
        return {}
    settings, found = parameters.for_booster(cores), defaultdict(list)
    for name in ("eval_metric", "disable_default_eval_metric"):
        del settings[name]
    if str(settings["objective"]).startswith("binary:"):
        settings["eval_metric"] = ["logloss", "auc"]
    fold = np.random.default_rng(_FOLD_SEED).permutation(label.size) % N_FOLDS
    for held in range(N_FOLDS):
        kept, out = fold != held, fold == held
        how = {"max_bin": parameters.max_bin, "nthread": settings["nthread"]}
        train = xgb.QuantileDMatrix(np.ascontiguousarray(columns[:, kept].T), label=label[kept], **how)
        test = xgb.QuantileDMatrix(np.ascontiguousarray(columns[:, out].T), label=label[out], ref=train, **how)
        of_fold: dict[str, dict[str, list[float]]] = {}
        xgb.train(settings, train, num_rounds, evals=[(test, "test")], evals_result=of_fold, verbose_eval=False)
        for name, values in of_fold.get("test", {}).items():
            found[name].append(float(values[-1]))
    return {name: (float(np.mean(values)), float(np.std(values, ddof=1))) for name, values in found.items()}


def _usable(
    own: NDArray[np.float32], label: NDArray[np.float32], parties: Sequence[BucketBlock], parameters: TrainingParameters
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return columns and label of the rows whose label the objective takes."""
    columns = np.concatenate([own, *(block.ids.astype(np.float32) for block in parties)])
    is_usable = parameters.objective.accepts(label)
    if not is_usable.any():
        raise DataRefusal("no row has a label that the objective takes")
    if not is_usable.all():
        _log.warning("rows left out, whose label the objective does not take: %d", int(np.count_nonzero(~is_usable)))
        columns, label = columns[:, is_usable], label[is_usable]
    return columns, label
