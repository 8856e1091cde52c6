"""A site's training by stock XGBoost beside its mediator: ``engine: xgboost``, for XGBoost 3.2 and 3.3.

Where the site's rows are in shards, every shard's XGBoost adds gradients in float64 by itself. These sums are added
here in the order of the shards, rounded once to the grid, and protected once. For a fixed number of shards the model is
therefore the same bytes wherever they are. With another number sums differ by roundings of float64, far below the step
of the grid, which change an integer of the grid only where a sum lies next to the middle between two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.attempt.site_attempt import SiteAttempt
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.training import Draws, LoopSettings
from nvflare_plugins.pooled.attempt import Agreement
from nvflare_plugins.pooled.mediated import shard
from nvflare_plugins.pooled.mediated.training import TrainingHandler, TrainingTask, train, training_shape
from nvflare_plugins.pooled.row_floors import SampledWeights, check_leaves, leaf_counts
from nvflare_plugins.pooled.shards import LEAVES, RoundWatch, ShardDraws, ShardedTraining, ShardLeader
from nvflare_plugins.pooled.value_bounds import label_sum
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import BaseScoreSource, Phase, TrainingStep
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import Answer, one_model
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.matrices import bin_starts, reference_matrix
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult


@dataclass(frozen=True, slots=True, repr=False)
class MediatedEngine:
    """Trains over one set of cut points, as often as it is asked to.

    Attributes:
        n_bins: of all features.
        root_bins: bins of a feature that no site lacks values in.
    """

    attempt: SiteAttempt
    sums: ProtectedSums
    cuts: Cuts
    max_bin: int
    n_bins: int
    root_bins: slice | None

    @classmethod
    def of(cls, attempt: SiteAttempt, agreement: Agreement, table: Table, max_bin: int) -> MediatedEngine:
        """Take the agreed cut points. Args: table: this site's rows."""
        starts = bin_starts(reference_matrix(table, agreement.cuts, max_bin), table)
        root = agreement.root_feature
        root_bins = None if root is None else slice(*map(int, starts[root : root + 2]))
        return cls(attempt, agreement.sums, agreement.cuts, max_bin, int(starts[-1]), root_bins)

    def training(
        self,
        parameters: TrainingParameters,
        table: Table,
        settings: LoopSettings,
        draws: Draws | None,
        rows_per_leaf: int | None,
        names: tuple[str, ...],
        initial: bytes | None = None,
    ) -> MediatedTraining:
        """Return one training, once the scales are agreed.

        Args:
            table: labels and weights of the rows that are trained on.
            rows_per_leaf: least rows in a leaf, where they are counted; None where they need not be.
            names: of the evaluation sets.
            initial: the model that training continues.
        """
        weighted, n_features = table.weight is not None, len(table.feature_names)
        world, is_continued = self.attempt.channel.world, initial is not None
        shape = training_shape(
            parameters,
            world,
            n_features,
            self.n_bins,
            weighted=weighted,
            n_eval_sets=len(names),
            continued=is_continued,
        )
        # Of the objectives that start from the mean, the logistic ones alone have bounded gradients.
        is_mean = shape.base_score is BaseScoreSource.MEAN
        is_logistic = parameters.objective.gradient_bound is not None and is_mean
        label, log = label_sum(table) if is_mean else None, self.attempt.evidence
        handler = TrainingHandler(self.sums, shape, self.root_bins, log, starts_at_rate=is_logistic, label_sum=label)
        task = TrainingTask({**parameters.for_booster(), "subsample": 1.0}, shape, settings, initial)
        return MediatedTraining(self, handler, task, table, names, draws, rows_per_leaf, shard.quantile_of(parameters))


@dataclass(frozen=True, repr=False)
class MediatedTraining(ShardedTraining):
    """One training at one site.

    Attributes:
        table: of the site, for labels, weights, names and types of its columns.
        names: of the evaluation sets.
        rows_per_leaf: least rows in a leaf, where they are counted; None where they need not be.
        alpha: the quantile that the leaves are; None for leaves that are sums.
    """

    SHARD: ClassVar[str] = shard.PATH

    engine: MediatedEngine
    handler: TrainingHandler
    task: TrainingTask
    table: Table
    names: tuple[str, ...]
    draws: Draws | None
    rows_per_leaf: int | None
    alpha: float | None

    @property
    def channel(self) -> Channel:
        """The site's way to the others."""
        return self.engine.attempt.channel

    def check_leaves(self, counts: NDArray[np.int64]) -> None:
        """Add the rows in each leaf of the last round over all sites. Raises: PolicyRefusal: one holds too few."""
        check_leaves(self.engine.sums, counts, self.rows_per_leaf or 0)

    def here(self, matrix: xgb.DMatrix, evaluated: Sequence[xgb.DMatrix], watch: RoundWatch) -> TrainingResult:
        """Train with the other sites, over rows in this process."""
        rows = SampledWeights(matrix, self.table.weight, self.draws, estimates_base_score=self.task.estimates)
        self.handler.on_base_score = rows.base_score_known

        def after(record: RoundRecord, booster: xgb.Booster) -> None:
            watch.round_over(record, lambda: bytes(booster.save_raw("json")))

        def check(booster: xgb.Booster, number: int) -> None:
            """Count the rows of each new leaf over all sites, where hessians do not bound them."""
            self.check_leaves(leaf_counts(booster, matrix, rows.taking_part(number)))

        on_tree = None if self.rows_per_leaf is None else check
        sets = list(zip(evaluated, self.names, strict=True))
        return train(self.task, self.channel, self.handler, rows, sets, after, on_tree)

    def shard_task(self, *, reads: bool) -> dict[str, Any]:
        """See ``ShardedTraining``; ``ShardTask`` reads it."""
        return shard.ShardTask(
            self.channel.rank,
            self.channel.world,
            replace(self.task, params={**self.task.params, "nthread": 1}),
            self.engine.cuts,
            self.engine.max_bin,
            self.names,
            is_sampled=self.draws is not None,
            counts_leaves=self.rows_per_leaf is not None,
            alpha=self.alpha,
            reads=reads,
        ).to_plain()

    def at_shards(
        self,
        lead_shards: Callable[[Answer], list[Any]],
        task: dict[str, Any],
        draws: ShardDraws | None,
        watch: RoundWatch,
    ) -> TrainingResult:
        """See ``ShardedTraining``; each shard returns what ``train_shard`` does."""
        told, settings = shard.ShardTask.of_plain(task), self.task.settings
        trees = None if self.alpha is None else shard.TreesAhead(told, self.table)
        leader = _Leader(self, trees, draws, watch)
        try:
            results = lead_shards(leader.answer)
        finally:
            if trees is not None:
                trees.end()
        last = settings.moments_before + settings.first_round + settings.num_rounds
        self.channel.moment = TrainingStep(Phase.FINISH, last)
        return TrainingResult(one_model(results), leader.rounds, *results[0][2:])


class _Leader(ShardLeader):
    """Answers what all shards ask."""

    def __init__(
        self, training: MediatedTraining, trees: shard.TreesAhead | None, draws: ShardDraws | None, watch: RoundWatch
    ) -> None:
        super().__init__(training.channel, training.handler, draws, watch)
        self._training, self._trees = training, trees
        self._messages = shard.SiteMessages(training.task.shape.base_score, training.alpha)

    def _answer(self, word: str, asked: list[tuple[Any, ...]]) -> Any:
        if word == shard.MESSAGE:
            if any(one[0] != asked[0][0] for one in asked):
                raise ProtocolError("the shards of this site are not in step")
            return self._answer_message(asked[0][0], [(buffer, rows) for _, buffer, rows in asked])
        if word == shard.TREE and self._trees is not None:
            return self._trees.tree()
        if word == LEAVES and self._training.rows_per_leaf is not None:
            return self._training.check_leaves(np.sum([counts for (counts,) in asked], axis=0))
        return super()._answer(word, asked)

    def _answer_message(self, fields: tuple[Any, ...], asked: list[tuple[bytes, Any]]) -> bytes:
        message = shard.message_of(fields)
        self.channel.moment = message.moment
        reply = self._training.handler.answer(message, *self._messages.buffers(message, asked))
        if self._trees is not None and not shard.is_beside_trees(message):
            self._trees.answered(fields, reply)
        return reply
