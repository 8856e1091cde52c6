"""A site's training by stock XGBoost beside its mediator: ``engine: xgboost``, for XGBoost 3.2 and 3.3."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xgboost as xgb

from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.pooled.mediated.grammar import TrainingShape
from nvflare_plugins.pooled.mediated.training import TrainingHandler, train, training_shape
from nvflare_plugins.pooled.preparation import Prepared
from nvflare_plugins.pooled.row_floors import (
    RowDraws,
    SampledWeights,
    check_leaves,
    counts_leaves,
    leaf_counts,
    row_fraction,
)
from nvflare_plugins.pooled.shard_rows import ShardTask, quantile_of
from nvflare_plugins.pooled.sharded import ShardedRows, train_sharded
from nvflare_plugins.pooled.value_bounds import label_sum
from nvflare_plugins.wire.envelope import BaseScoreSource
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.workers import Workers, shards_line
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.matrices import (
    as_weighed,
    bin_starts,
    bins_below,
    evaluation_matrix,
    reference_matrix,
    training_matrix,
)
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class Mediated:
    """One training at one site.

    Attributes:
        rows_per_node: the floor that the sites have agreed on.
        draws: which rows take part in each round; None for all.
    """

    attempt: SiteAttempt
    prepared: Prepared
    parameters: TrainingParameters
    workers: Workers | None
    rows_per_node: int
    draws: RowDraws | None

    def train(
        self,
        sums: ProtectedSums,
        cuts: Cuts,
        root_feature: int | None,
        evaluated: Sequence[tuple[Table | None, str]],
        initial: bytes | None,
        settings: LoopSettings,
        pages: Path | None,
        is_kept: Callable[[int], bool],
        after_round: Callable[[RoundRecord, bytes | None], None],
    ) -> TrainingResult:
        """Train with the other sites, once the scales are agreed.

        Args:
            root_feature: a feature without missing values at any site.
            evaluated: rows and name of each evaluation set; no rows stand for the training rows.
            pages: a folder for bins that the site's policy does not want held.
            is_kept: tells, by the number of rounds done, whether ``after_round`` gets the model so far.
        """
        channel, table, parameters = self.attempt.channel, as_weighed(self.prepared.table), self.parameters
        starts = bin_starts(reference_matrix(table, cuts, parameters.max_bin), table)
        shape = training_shape(
            parameters,
            channel.world,
            len(table.feature_names),
            int(starts[-1]),
            table.weight is not None,
            len(evaluated),
            initial is not None,
        )
        root_bins = None if root_feature is None else slice(*map(int, starts[root_feature : root_feature + 2]))
        estimates = shape.base_score not in (BaseScoreSource.GIVEN, BaseScoreSource.CONTINUED)
        params, handler = {**parameters.for_booster(), "subsample": 1.0}, self._handler(sums, shape, root_bins)
        floor = self.rows_per_node
        if self.workers is not None:
            _log.info("%s", shards_line(table.n_rows, len(self.workers)))
            rows_of_all = ShardedRows(table, [one for one, _ in evaluated], self.draws)
            task = ShardTask(
                channel.rank,
                channel.world,
                {**params, "nthread": 1},
                shape,
                cuts,
                parameters.max_bin,
                tuple(name for _, name in evaluated),
                settings,
                initial,
                row_fraction(parameters) < 1,
                estimates,
                counts_leaves(parameters, floor),
                quantile_of(parameters),
                reads=rows_of_all.are_read,
            )
            return train_sharded(self.workers, task, rows_of_all, channel, sums, handler, floor, is_kept, after_round)
        matrix = training_matrix(table, cuts, parameters.max_bin, bins_below(pages, "train", self.prepared.data_set))
        rows = SampledWeights(matrix, table.weight, self.draws, estimates)
        handler.on_base_score = rows.base_score_known

        def after(record: RoundRecord, booster: xgb.Booster) -> None:
            after_round(record, bytes(booster.save_raw("json")) if is_kept(record.round + 1) else None)

        def check(booster: xgb.Booster, number: int) -> None:
            """Count the rows of each new leaf over all sites, where hessians do not bound them."""
            check_leaves(sums, leaf_counts(booster, matrix, rows.taking_part(number)), floor)

        return train(
            params,
            shape,
            channel,
            handler,
            matrix,
            [(matrix if one is None else self._evaluation(one, matrix, pages), name) for one, name in evaluated],
            settings,
            initial,
            after,
            rows,
            check if counts_leaves(parameters, floor) else None,
        )

    def _evaluation(self, table: Table, matrix: xgb.DMatrix, pages: Path | None) -> xgb.DMatrix:
        spec = self.prepared.eval_set
        below = None if spec is None else bins_below(pages, "eval", spec)
        return evaluation_matrix(as_weighed(table), matrix, self.parameters.max_bin, below)

    def _handler(self, sums: ProtectedSums, shape: TrainingShape, root_bins: slice | None) -> TrainingHandler:
        # Of the objectives that start from the mean, the logistic ones alone have bounded gradients.
        is_mean = shape.base_score is BaseScoreSource.MEAN
        is_logistic = self.parameters.objective.gradient_bound is not None and is_mean
        label = label_sum(self.prepared.table) if is_mean else None
        return TrainingHandler(sums, shape, root_bins, self.attempt.evidence, is_logistic, label_sum=label)
