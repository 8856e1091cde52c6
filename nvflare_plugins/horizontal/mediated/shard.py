"""The training over one shard of a site's rows: stock XGBoost beside a mediator, whose messages the site answers.

To XGBoost every shard is the site itself: all claim its rank, and each gets the answer that the site got for the sum of
its shards. So neither the messages of a job nor the other sites tell into how many shards a site has cut its rows.

What a shard asks with goes to the process that speaks for its site (sharded.py), and nowhere else:

    read      digest              first, where shards read files     reply: nothing (shards/reading.py)
    message   fields, buffer,     a message of XGBoost's;            reply: bytes, XGBoost's answer
              rows                what the site makes its own of,
                                  see shard_rows.py
    draw      round               which rows take part in a round?   reply: bool[n_rows of the shard]
    leaves    counts              int64[n_leaves] of a round         reply: nothing
    tree                          which tree gets its leaves?        reply: bytes, a model
    round     number, metrics     a round is over                    reply: whether the model is to be kept
    model     digest, model       SHA-256 of the model so far;       reply: nothing
                                  the model, of the first shard
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data_sets.shard_reader import reading_as_told
from nvflare_plugins.horizontal.matrices import as_weighed, evaluation_matrix, training_matrix
from nvflare_plugins.horizontal.mediated.grammar import Message
from nvflare_plugins.horizontal.mediated.training import train
from nvflare_plugins.horizontal.row_floors import leaf_counts
from nvflare_plugins.horizontal.row_sampling import SampledWeights
from nvflare_plugins.horizontal.shard_rows import ShardRows
from nvflare_plugins.horizontal.shard_task import (
    DRAW,
    LEAVES,
    MESSAGE,
    MODEL,
    ROUND,
    TREE,
    ShardTask,
    digest_of,
    plain_message,
    table_of,
)
from nvflare_plugins.shards.conversation import BINS, TELLS, Ask, Conversation
from nvflare_plugins.shards.place import ShardPlace, said_of_model
from nvflare_plugins.shards.reading import READ, telling
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.xgb.rounds import RoundRecord

_OF_LEAVES = (Kind.LEAF_VALID, Kind.LEAF_QUANTILE)


class HorizontalShard(Conversation):
    """Trains over one shard with the other shards of its site, and with the other sites."""

    def __init__(
        self, number: int, task: dict[str, Any], rows: dict[str, Any], evaluated: list[dict[str, Any] | None]
    ) -> None:
        """Start training.

        Args:
            number: of the shard; the first, 0, hands over the model.
            task: see ``ShardTask``.
            rows: see ``plain_rows``.
            evaluated: rows of each evaluation set; None stands for the training rows.
        """
        told = ShardTask.of_plain(task)

        def work(ask: Ask) -> tuple[bytes, bytes | None, int | None, float | None]:
            weight, matrix, eval_sets = _bins(ask, told, rows, evaluated)
            return train_shard(ask, number, told, weight, matrix, eval_sets)

        super().__init__(work)


def _bins(
    ask: Ask, task: ShardTask, rows: dict[str, Any], evaluated: list[dict[str, Any] | None]
) -> tuple[NDArray[np.float32] | None, xgb.DMatrix, list[xgb.DMatrix]]:
    """Return the rows' weights, and their bins; what is read here is compared with what the site has read."""
    with reading_as_told():
        table = table_of(rows)
        sets = [None if one is None else table_of(one) for one in evaluated]
        if task.reads:
            read = [one for one in (table, *sets) if one is not None and one.passes is not None]
            ask(READ, digest_of(read, telling(ask, sum(one.n_rows for one in read))))
        ask(TELLS, BINS, 0, 0)
        table = as_weighed(table)
        matrix = training_matrix(table, task.cuts, task.max_bin)
        eval_sets = [
            matrix if one is None else evaluation_matrix(as_weighed(one), matrix, task.max_bin) for one in sets
        ]
    return table.weight, matrix, eval_sets


def train_shard(
    ask: Ask,
    number: int,
    task: ShardTask,
    weight: NDArray[np.float32] | None,
    matrix: xgb.DMatrix,
    eval_sets: Sequence[xgb.DMatrix],
) -> tuple[bytes, bytes | None, int | None, float | None]:
    """Train over one shard.

    Args:
        number: of the shard; the first, 0, hands over the model.
        weight: of the rows, float32[n_rows]; None for 1 each.

    Returns:
        Digest and model, as asked with ``MODEL``; best round and score, where it may stop early.
    """
    draws = _AskedDraws(ask, matrix.num_row()) if task.is_sampled else None
    rows = SampledWeights(matrix, weight, draws, task.estimates)
    initial = task.initial_model
    start = None if initial is None else xgb.Booster({"nthread": 1}, model_file=bytearray(initial))
    given = ShardRows(task, matrix, eval_sets, start if task.alpha is not None else None)

    def after_tree(booster: xgb.Booster, number: int) -> None:
        if task.tells_trees:
            last = booster.num_boosted_rounds() - 1
            ask(TREE, bytes(booster[last : last + 1].save_raw("json")))
        given.after_tree(booster)
        if task.counts_leaves:
            ask(LEAVES, leaf_counts(booster, matrix, rows.taking_part(number)))

    def said(booster: xgb.Booster) -> tuple[bytes, bytes | None]:
        return said_of_model(number, bytes(booster.save_raw("json")))

    def after_round(record: RoundRecord, booster: xgb.Booster) -> None:
        if ask(ROUND, record.round, record.metrics):
            ask(MODEL, *said(booster))

    result = train(
        task.params,
        task.shape,
        ShardPlace(task.rank, task.world),
        _AskedAnswers(ask, rows, given, task),
        matrix,
        list(zip(eval_sets, task.names, strict=True)),
        task.settings,
        initial,
        after_round,
        rows,
        after_tree,
    )
    return *said(result.booster), result.best_round, result.best_score


class _AskedAnswers:
    """Passes XGBoost's messages to the site."""

    def __init__(self, ask: Ask, rows: SampledWeights, given: ShardRows, task: ShardTask):
        self._ask, self._rows, self._given, self._task = ask, rows, given, task
        self.seconds = 0.0

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """See ``Answers``."""
        if message.kind is Kind.MODEL_PARAMETERS:
            self._rows.base_score_known()
        started = time.perf_counter()
        tree, given = None, None
        if message.kind is Kind.LEAF_VALID and not self._task.tells_trees:
            tree = self._ask(TREE)
        if not self._task.tells_trees:
            given = self._given.of_message(message, tree)
        reply: bytes = self._ask(MESSAGE, plain_message(message), buffer, given)
        if message.kind in _OF_LEAVES:
            reply = self._given.in_own_order(reply)
        self.seconds += time.perf_counter() - started
        return reply


class _AskedDraws:
    """Draws that the site makes: from a secret that stays there, over the rows of all shards."""

    def __init__(self, ask: Ask, n_rows: int):
        self._ask, self._n_rows = ask, n_rows
        self._last: tuple[int, NDArray[np.bool_]] | None = None

    def of_round(self, number: int) -> NDArray[np.bool_]:
        """See ``Draws``."""
        if self._last is None or self._last[0] != number:
            drawn = self._ask(DRAW, number)  # none for the row that stands for no rows (``as_weighed``)
            self._last = number, drawn if drawn.size == self._n_rows else np.zeros(self._n_rows, dtype=bool)
        return self._last[1]
