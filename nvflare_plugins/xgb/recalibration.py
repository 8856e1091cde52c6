"""From the answers of a model that was trained on clipped gradients to probabilities.

Training with |g| <= C balances clipped gradients: where a share q of like rows is positive, it ends at a p with
q min(1 - p, C) = (1 - q) min(p, C). So q = p / (p + C) for p below 1 - C, q = C / (1 - p + C) for p above C, and q = p
in between. A model file of XGBoost has no place for that, so the model carries C as an attribute, which stock XGBoost
reads over: its own answers are p. The order of rows, and which side of 1/2 they are on, is the same for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.xgb.model_json import model_bytes

CLIPPING_ATTRIBUTE = "veilboost_gradients_clipped_at"


def with_clipping(model: bytes, clipped_at: float) -> bytes:
    """Return a model that says where the gradients of its training were clipped. Privacy: it stands in the job."""
    document = json.loads(model)
    document["learner"].setdefault("attributes", {})[CLIPPING_ATTRIBUTE] = f"{clipped_at:g}"
    return model_bytes(document)


def clipping_of(attributes: Mapping[str, str]) -> float | None:
    """Return C as a model carries it; None if it carries none. Raises: ValueError: it is no such number."""
    if CLIPPING_ATTRIBUTE not in attributes:
        return None
    clipped_at = float(attributes[CLIPPING_ATTRIBUTE])
    if not (math.isfinite(clipped_at) and 0.5 <= clipped_at <= 1.0):  # below 1/2 p would not follow from q
        raise ValueError("gradients are clipped at 1/2 to 1")
    return clipped_at


def recalibrated(p: NDArray[np.float32], clipped_at: float) -> NDArray[np.float32]:
    """Return probabilities for answers p. Shapes: float32[n] -> float32[n]."""
    low = p / (p + np.float32(clipped_at))
    high = np.float32(clipped_at) / (np.float32(1.0) - p + np.float32(clipped_at))
    result: NDArray[np.float32] = np.where(
        p < np.float32(1.0 - clipped_at), low, np.where(p > np.float32(clipped_at), high, p)
    ).astype(np.float32)
    return result
