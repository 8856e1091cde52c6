"""Invented times with events, in each form in which a job may name them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

_BOUNDS = ("label_lower_bound", "label_upper_bound")
FORMS = {
    "events": {"time": "days", "event": "death"},
    "signed": {"signed": "days"},
    "bounds": {"lower": "from", "upper": "to"},
}


def as_fields(label: np.ndarray, objective: str = "") -> dict[str, np.ndarray]:
    """Return labels as XGBoost's matrices take them: one each, of Cox regression signed, or two bounds of times."""
    if objective == "survival:cox":
        return {"label": np.where(np.isinf(label[:, 1]), -label[:, 0], label[:, 0])}
    return {"label": label} if label.ndim == 1 else dict(zip(_BOUNDS, label.T, strict=True))


def label_of(params: dict[str, Any]) -> str | dict[str, str]:
    """Return a label of the form that an objective takes."""
    return FORMS["signed"] if str(params.get("objective")).startswith("survival:") else "label"


AFT = {"objective": "survival:aft"}


def times(form: str, n_rows: int = 1_500, n_features: int = 8, seed: int = 0) -> pd.DataFrame:
    """Return features with gaps and the columns of a label: right-censored, or of ``bounds`` of all four kinds."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n_rows, n_features)).astype(np.float32)
    noise = np.log(random.exponential(size=n_rows))
    true = np.exp(3 + x[:, 0] - 0.5 * x[:, 1] * (x[:, 2] > 0) + 0.7 * noise).astype(np.float32)
    until = random.exponential(40, n_rows).astype(np.float32)
    x[random.random(x.shape) < 0.1] = np.nan
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(n_features)])
    time, event = np.minimum(true, until), (true <= until).astype(np.float32)
    if form == "events":
        return frame.assign(days=time, death=event)
    if form == "signed":
        return frame.assign(days=np.where(event == 1, time, -time))
    kind = random.integers(0, 4, n_rows)
    lower = np.select([kind == 0, kind == 1, kind == 2], [true, until, np.nan], np.floor(true))
    upper = np.select([kind == 0, kind == 1, kind == 2], [true, np.nan, true + 1], np.floor(true) + 1)
    return frame.assign(**{"from": lower.astype(np.float32), "to": upper.astype(np.float32)})


def concordance(time: np.ndarray, event: np.ndarray, predicted: np.ndarray) -> float:
    """Return Harrell's index: of the pairs that an event orders, how many are predicted so."""
    is_first = (time[:, None] < time) & (event[:, None] == 1)
    order = np.sign(predicted - predicted[:, None])[is_first]
    return float((1 + order.mean()) / 2)
