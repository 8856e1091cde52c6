"""One round of XGBoost: its record and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LEVEL_BATCH = 256  # XGBoost handles at most so many nodes of a level at once


def widest_batch(depth: int) -> int:
    """Return how many histograms the largest message of a tree carries that grows level by level.

    XGBoost builds one node of every pair of siblings. Args: depth: most levels of the tree; 0 is no limit.
    """
    return min(MAX_LEVEL_BATCH, 1 << max(depth - 2, 0)) if depth else MAX_LEVEL_BATCH


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What happened in one boosting round. Units: seconds; metrics by "set-metric"."""

    round: int
    metrics: dict[str, float]
    seconds: float
    xgboost_s: float
    protect_s: float
    network_s: float


def parse_metrics(text: str) -> dict[str, float]:
    r"""Read XGBoost's evaluation line ``[0]\ttrain-auc:0.9\t...`` into {"train-auc": 0.9}."""
    metrics = {}
    for part in text.split("\t")[1:]:
        name, _, value = part.rpartition(":")
        metrics[name] = float(value)
    return metrics
