"""A shard of a site's rows in a tuning: the bins of its folds, made once, and one training after the other over them.

While it makes the bins it asks, where it reads files itself,

    read      digest                                            reply: nothing (shards/reading.py)

and in each training what any shard of a horizontal training asks (horizontal/mediated/shard.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data_sets.shard_reader import reading_as_told
from nvflare_plugins.horizontal.grown_training import grow_shard, plan_of
from nvflare_plugins.horizontal.mediated.shard import train_shard
from nvflare_plugins.horizontal.shard_task import ShardTask, digest_of, table_of
from nvflare_plugins.shards.conversation import BINS, TELLS, Ask, Conversation
from nvflare_plugins.shards.reading import READ, telling
from nvflare_plugins.tuning.fold_bins import bins_of
from nvflare_plugins.tuning.fold_rows import FoldRows
from nvflare_plugins.xgb.cuts import Cuts

PATH = "nvflare_plugins.tuning.shard:TuningShard"

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
        """Begin a training with grown trees on all folds but one; see ``horizontal.grown_training.shard_task``."""
        number, [rows] = self._number, self._rows

        def work(ask: Ask) -> tuple[Any, ...]:
            plan = plan_of(task, rows.labels)
            return grow_shard(ask, number, task, plan, rows.without(fold, plan, task["start"]))

        self._start(work)
