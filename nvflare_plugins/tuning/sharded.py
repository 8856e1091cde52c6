"""The trainings of a tuning at a site whose rows are in shards: each shard has its rows, and makes its bins, once.

A shard is a run of all rows of the site, whatever their folds: each holds some of every fold, and a training on all
folds but one is over what the shards hold of these. Folds are drawn by the site over all its rows, as without workers.
For the rest a training is a horizontal one over shards (horizontal/sharded.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.cluster.workers import Workers, collect, note_rows
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.growth.site_sums import SiteSums
from nvflare_plugins.horizontal.grown_training import lead_grown
from nvflare_plugins.horizontal.shard_task import ShardTask
from nvflare_plugins.horizontal.sharded import ShardDraws, ShardedRows, train_led
from nvflare_plugins.shards.lockstep import lead, lead_on
from nvflare_plugins.shards.place import runs_of
from nvflare_plugins.shards.reading import comparing
from nvflare_plugins.tuning.fold_bins import EVALUATED, FoldTraining
from nvflare_plugins.tuning.folds import FoldDraws
from nvflare_plugins.tuning.shard import PATH
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.rounds import TrainingResult


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
        """Train likewise with trees that the sites grow. Args: task: see ``horizontal.grown_training.shard_task``."""
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
