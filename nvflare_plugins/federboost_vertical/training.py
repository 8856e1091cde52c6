"""The active party's part: stock XGBoost on its own features and the others' randomised buckets."""

from __future__ import annotations

import logging
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
    columns = np.concatenate([own, *(block.ids.astype(np.float32) for block in parties)])
    is_usable = parameters.objective.accepts(label)
    if not is_usable.any():
        raise DataRefusal("no row has a label that the objective takes")
    if not is_usable.all():
        _log.warning("rows left out, whose label the objective does not take: %d", int(np.count_nonzero(~is_usable)))
        columns, label = columns[:, is_usable], label[is_usable]
    settings = parameters.for_booster(cores)
    matrix = xgb.QuantileDMatrix(
        np.ascontiguousarray(columns.T), label=label, max_bin=parameters.max_bin, nthread=settings["nthread"]
    )
    return bytes(xgb.train(settings, matrix, num_rounds).save_raw("json"))
