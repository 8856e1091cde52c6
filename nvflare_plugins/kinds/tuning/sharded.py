"""One training of a tuning over all folds but one, with the rows here or in shards."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import Table, reading_as_told
from nvflare_plugins.growth.site_sums import SiteSums
from nvflare_plugins.growth.training import LoopSettings, Training
from nvflare_plugins.kinds.tuning.folds import EVALUATED, FoldDraws, FoldRows, FoldTraining, bins_of
from nvflare_plugins.pooled.growing import Beginning, Grown, Scales, first_model
from nvflare_plugins.pooled.grown_training import (
    grow_shard,
    lead_grown,
    plan_of,
    shard_task,
    site_sums,
    training_result,
)
from nvflare_plugins.pooled.mediated.shard import train_shard
from nvflare_plugins.pooled.shard_rows import ShardTask, digest_of, table_of
from nvflare_plugins.pooled.sharded import ShardDraws, ShardedRows, train_led
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import (
    BINS,
    READ,
    TELLS,
    Ask,
    Conversation,
    comparing,
    lead,
    lead_on,
    runs_of,
    telling,
)
from nvflare_plugins.workers.workers import Workers, collect, note_rows
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.rounds import TrainingResult

# A shard of a site's rows in a tuning: the bins of its folds, made once, and one training after the other over them.
#
# While it makes the bins it asks, where it reads files itself,
#
# read      digest                                            reply: nothing (workers/shards.py)
#
# and in each training what any shard of a horizontal training asks (pooled/mediated/shard.py).


PATH = "nvflare_plugins.kinds.tuning.sharded:TuningShard"

_Bins = list[tuple[xgb.DMatrix, xgb.DMatrix]]


class TuningShard(Conversation):
    """Makes the bins of a shard's rows, and trains over them as often as it is told to."""

    def __init__(
        self,
        number: int,
        cuts: list[NDArray[np.float32]],
        max_bin: int,
        n_folds: int,
        reads: bool,
        rows: dict[str, Any],
        folds: NDArray[np.int8],
        arithmetic: str,
    ) -> None:
        """Begin to make the bins.

        Args:
            number: of the shard; the first, 0, hands over models.
            cuts: of each feature.
            reads: it reads rows itself.
            rows: see ``plain_rows``.
            folds: of each row. Shapes: int8[n_rows].
            arithmetic: in which it grows the trees itself; "" where XGBoost does.
        """
        self._number, self._bins, self._rows = number, _Bins(), list[FoldRows]()
        bins, own = self._bins, self._rows  # the work must not know the conversation

        def work(ask: Ask) -> None:
            with reading_as_told():
                table = table_of(rows)
                if reads:
                    ask(READ, digest_of([table], telling(ask, table.n_rows)))
                if arithmetic:
                    ask(TELLS, BINS, 0, 0)
                    own.append(FoldRows(table, folds, Cuts(tuple(cuts)), arithmetic))
                    return
                for fold in range(n_folds):
                    ask(TELLS, BINS, 0, 0)  # each fold is a step, for which a worker has its time
                    bins.append(bins_of(table, folds, fold, Cuts(tuple(cuts)), max_bin))

        super().__init__(work)

    def train(self, fold: int, task: dict[str, Any]) -> None:
        """Begin a training on all folds but one; see ``ShardTask``, whose cuts are those of the bins."""
        number, told, (matrix, held_out) = self._number, ShardTask.of_plain(task), self._bins[fold]
        self._start(lambda ask: train_shard(ask, number, told, None, matrix, [held_out]))

    def grow(self, fold: int, task: dict[str, Any]) -> None:
        """Begin a training with grown trees on all folds but one; see ``pooled.grown_training.shard_task``."""
        number, [rows] = self._number, self._rows

        def work(ask: Ask) -> tuple[Any, ...]:
            plan = plan_of(task, rows.labels)
            return grow_shard(ask, number, task, plan, rows.without(fold, plan, task["start"]))

        self._start(work)


# The trainings of a tuning at a site whose rows are in shards: each shard has its rows, and makes its bins, once.
#
# A shard is a run of all rows of the site, whatever their folds: each holds some of every fold, and a training on all
# folds but one is over what the shards hold of these. Folds are drawn by the site over all its rows, as without
# workers. For the rest a training is a horizontal one over shards (pooled/sharded.py).


class FoldsOnWorkers:
    """All rows at the site's workers; see ``Folds``."""

    def __init__(
        self,
        workers: Workers,
        table: Table,
        folds: NDArray[np.int64],
        n_folds: int,
        cuts: Cuts,
        max_bin: int,
        arithmetic: str = "",
    ) -> None:
        """Hand out the rows, or what workers need to read them; return when all have their bins.

        Shapes: folds: of each row, int64[n_rows].

        Args:
            arithmetic: in which the sites grow the trees; "" where XGBoost does.

        Raises:
            VeilBoostError: as ``train_sharded``.
        """
        self._workers, self._table, self._max_bin = workers, table, max_bin
        runs, rows = runs_of(table.n_rows, len(workers)), ShardedRows(table, (), None)
        self._kept = [runs_of_chosen(folds != fold, runs) for fold in range(n_folds)]
        of_shards = rows.of_shards(len(workers))
        common = list(cuts.of_feature), max_bin, n_folds, rows.are_read
        arguments = [
            (number, *common, plain, folds[run].astype(np.int8), arithmetic)
            for number, (run, (plain, _)) in enumerate(zip(runs, of_shards, strict=True))
        ]
        note_rows(workers, runs)
        with comparing(_nothing_else, lambda go_on: rows.digests(of_shards, go_on)) as answer:
            lead(workers, PATH, arguments, answer)

    def train(self, fold: int, training: FoldTraining, channel: Channel, sums: ProtectedSums) -> TrainingResult:
        """See ``Folds``."""
        task = ShardTask(
            channel.rank,
            channel.world,
            {**training.params, "nthread": 1},
            training.shape,
            Cuts(()),  # the bins are made
            self._max_bin,
            (EVALUATED,),
            training.settings,
            None,
            training.draws is not None,
            training.estimates,
            training.rows_per_node is not None,
        )
        self._begin("train", fold, task.to_plain())
        return train_led(
            lambda answer: lead_on(self._workers, answer),
            task,
            self._table,
            self._draws(training.draws, fold),
            channel,
            sums,
            training.handler,
            training.rows_per_node or 0,
            lambda n_done: False,
            lambda record, model: None,
        )

    def grow(
        self, fold: int, task: dict[str, Any], channel: Channel, sums: SiteSums, draws: FoldDraws | None
    ) -> TrainingResult:
        """Train likewise with trees that the sites grow. Args: task: see ``pooled.grown_training.shard_task``."""
        self._begin("grow", fold, task)
        return lead_grown(
            lambda answer: lead_on(self._workers, answer),
            channel,
            sums,
            self._draws(draws, fold),
            lambda n_done: False,
            lambda record, model: None,
        )

    def _begin(self, method: str, fold: int, task: dict[str, Any]) -> None:
        collect([self._workers.call(number, method, fold, task) for number in range(len(self._workers))])

    def _draws(self, draws: FoldDraws | None, fold: int) -> ShardDraws | None:
        return None if draws is None else ShardDraws(draws, self._kept[fold])


def _nothing_else(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
    raise ProtocolError("a shard of this site asks for what it has no use for")


def runs_of_chosen(chosen: NDArray[np.bool_], runs: list[slice]) -> list[slice]:
    """Return the runs that the chosen rows of runs make, one after the other. Shapes: chosen: bool[n_rows]."""
    ends = np.cumsum([0, *(np.count_nonzero(chosen[run]) for run in runs)]).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


# One training of a tuning whose trees the sites grow, over rows in this process or at workers.


def train_on_folds(
    rows: FoldRows | FoldsOnWorkers,
    fold: int,
    grown: Grown,
    settings: LoopSettings,
    draws: FoldDraws | None,
    channel: Channel,
    sums: ProtectedSums,
) -> TrainingResult:
    """Train on all rows but those of a fold, with the other sites, and score these.

    Args:
        grown: its table has labels alone, of the rows that are trained on.
    """
    scales = Scales.of(sums, grown)
    plan = grown.plan(scales)
    model, start = first_model(grown, plan, Beginning(None, is_own=False), sums, channel.world)
    site = site_sums(grown, plan, sums)
    if isinstance(rows, FoldRows):
        held = rows.without(fold, plan, cast("NDArray[np.float32]", start))  # no model is continued
        return training_result(Training(plan, held, site, channel, settings, draws).run(model))
    task = shard_task(grown, scales, model, start, settings, channel, draws is not None, reads=False)
    return rows.grow(fold, task, channel, site, draws)
