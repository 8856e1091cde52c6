"""Rounds of a training: records, metrics, early stopping, and the model that they end with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from nvflare_plugins.wire.envelope import is_larger_better

# Rounds of a training: their records and metrics, and the model that they end with.


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


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A trained model, in XGBoost's JSON form, and how it came about.

    Attributes:
        best_round, best_score: where a training may stop early.
    """

    model: bytes
    rounds: list[RoundRecord]
    best_round: int | None = None
    best_score: float | None = None


def parse_metrics(text: str) -> dict[str, float]:
    r"""Read XGBoost's evaluation line ``[0]\ttrain-auc:0.9\t...`` into {"train-auc": 0.9}."""
    metrics = {}
    for part in text.split("\t")[1:]:
        name, _, value = part.rpartition(":")
        metrics[name] = float(value)
    return metrics


# Early stopping, as XGBoost's own callback does it, for loops that resume and continue models.


class Attributes(Protocol):
    """What remembers the best round: a Booster, or a model that grows without one."""

    def attr(self, key: str) -> str | None:
        """Return an attribute."""

    def set_attr(self, **kwargs: str) -> None:
        """Set attributes."""


class EarlyStopping:
    """Watches the last metric of the last set, and ends training that no longer improves it.

    The best round and its score are also in the model, as ``best_iteration`` and ``best_score``: a checkpoint remembers
    them, and stock XGBoost finds them. All that it decides by is known to every site alike.
    """

    def __init__(self, patience: int | None, rounds_before: int = 0):
        """Watch from the first round on.

        Args:
            patience: rounds without improvement after which training is over; None never ends it.
            rounds_before: rounds of the model that were there before the first round counted here; XGBoost's
                ``best_iteration`` counts them too.
        """
        self._patience = patience
        self._rounds_before = rounds_before
        self.best_round: int | None = None
        self.best_score: float | None = None

    def take_up(self, booster: Attributes) -> None:
        """Go on from what a checkpoint of the same training remembers."""
        score = booster.attr("best_score")
        if self._patience is not None and score is not None:
            self.best_round = int(str(booster.attr("best_iteration"))) - self._rounds_before
            self.best_score = float(score)

    def note(self, booster: Attributes, number: int, metrics: Mapping[str, float]) -> None:
        """Compare a round's metrics, by "set-metric" in XGBoost's order, with the best so far."""
        if self._patience is None or not metrics:
            return
        name, score = list(metrics.items())[-1]
        maximise = is_larger_better(name)
        best = self.best_score
        if best is None or (score > best if maximise else score < best):
            self.best_round, self.best_score = number, score
            booster.set_attr(best_iteration=str(self._rounds_before + number), best_score=str(score))

    def is_over(self, last_round: int) -> bool:
        """Tell whether training is over after that round; a resumed job may find that it had ended already."""
        if self._patience is None or self.best_round is None:
            return False
        return last_round - self.best_round >= self._patience
