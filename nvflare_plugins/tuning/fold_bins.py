"""The bins of a tuning's folds, made once for all trials, and a training over them in the site's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.horizontal.matrices import evaluation_matrix, training_matrix
from nvflare_plugins.horizontal.mediated.grammar import TrainingShape
from nvflare_plugins.horizontal.mediated.training import TrainingHandler, train
from nvflare_plugins.horizontal.row_floors import check_leaves, leaf_counts
from nvflare_plugins.horizontal.row_sampling import SampledWeights
from nvflare_plugins.tuning.folds import FoldDraws
from nvflare_plugins.wire.catalogue import BaseScoreSource
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.rounds import TrainingResult

EVALUATED = "eval"


@dataclass(frozen=True, slots=True, repr=False)
class FoldTraining:
    """One training on all folds but one.

    Attributes:
        params: for the Booster.
        draws: which rows take part in each round; None for all.
        rows_per_node: least rows in a leaf, where they are counted; None where they need not be.
    """

    params: dict[str, object]
    shape: TrainingShape
    settings: LoopSettings
    draws: FoldDraws | None
    rows_per_node: int | None
    handler: TrainingHandler

    @property
    def estimates(self) -> bool:
        """Whether XGBoost begins with an estimate from all rows."""
        return self.shape.base_score is not BaseScoreSource.GIVEN


class Folds(Protocol):
    """The rows of a site, in bins, wherever they are."""

    def train(self, fold: int, training: FoldTraining, channel: Channel, sums: ProtectedSums) -> TrainingResult:
        """Train on all rows but those of a fold, with the other sites, and score these."""


def bins_of(
    table: Table, folds: NDArray[np.int64] | NDArray[np.int8], fold: int, cuts: Cuts, max_bin: int
) -> tuple[xgb.DMatrix, xgb.DMatrix]:
    """Return the rows of all folds but one by the agreed cuts, and those of that one, to be scored.

    Shapes: folds: of each row, from 0, [n_rows].
    """
    kept, held_out = (table.taken(np.flatnonzero(chosen)) for chosen in (folds != fold, folds == fold))
    matrix = training_matrix(kept, cuts, max_bin)
    return matrix, evaluation_matrix(held_out, matrix, max_bin)


class FoldsHere:
    """All rows in the site's own process."""

    def __init__(self, table: Table, folds: NDArray[np.int64], n_folds: int, cuts: Cuts, max_bin: int) -> None:
        self._bins = [bins_of(table, folds, fold, cuts, max_bin) for fold in range(n_folds)]

    def train(self, fold: int, training: FoldTraining, channel: Channel, sums: ProtectedSums) -> TrainingResult:
        """See ``Folds``."""
        matrix, held_out = self._bins[fold]
        rows = SampledWeights(matrix, None, training.draws, training.estimates)
        training.handler.on_base_score = rows.base_score_known
        return train(
            training.params,
            training.shape,
            channel,
            training.handler,
            matrix,
            [(held_out, EVALUATED)],
            training.settings,
            row_weights=rows,
            on_tree=_leaf_check(sums, training.rows_per_node, matrix, rows),
        )


def _leaf_check(
    sums: ProtectedSums, floor: int | None, matrix: xgb.DMatrix, rows: SampledWeights
) -> Callable[[xgb.Booster, int], None] | None:
    if floor is None:
        return None
    return lambda booster, number: check_leaves(sums, leaf_counts(booster, matrix, rows.taking_part(number)), floor)
