"""Rounds of a training: their records and metrics, and the model that they end with."""

from __future__ import annotations

from dataclasses import dataclass, field

import xgboost as xgb

MAX_LEVEL_BATCH = 256  # XGBoost handles at most so many nodes of a level at once


def widest_batch(depth: int) -> int:
    """Return how many histograms the largest message of a tree carries that grows level by level.

    XGBoost builds one node of every pair of siblings. Args: depth: most levels of the tree; 0 is no limit.
    """
    return min(MAX_LEVEL_BATCH, 1 << max(depth - 2, 0)) if depth else MAX_LEVEL_BATCH


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What happened in one boosting round. Units: seconds; metrics by "set-metric".

    Where the sites grow the trees, times run from when the round before was told to when this one's metrics were there.
    """

    round: int
    metrics: dict[str, float]
    seconds: float
    xgboost_s: float
    protect_s: float
    network_s: float


@dataclass(slots=True)
class TrainingResult:
    """A trained model and how it came about.

    Attributes:
        grown: the model as the sites have written it themselves, the same bytes under any XGBoost; None where XGBoost
            has grown it.
    """

    booster: xgb.Booster
    rounds: list[RoundRecord] = field(default_factory=list)
    best_round: int | None = None
    best_score: float | None = None
    grown: bytes | None = None

    @property
    def model(self) -> bytes:
        """Return the model in XGBoost's JSON form."""
        return bytes(self.booster.save_raw("json")) if self.grown is None else self.grown


def parse_metrics(text: str) -> dict[str, float]:
    r"""Read XGBoost's evaluation line ``[0]\ttrain-auc:0.9\t...`` into {"train-auc": 0.9}."""
    metrics = {}
    for part in text.split("\t")[1:]:
        name, _, value = part.rpartition(":")
        metrics[name] = float(value)
    return metrics
