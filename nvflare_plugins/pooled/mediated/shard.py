"""Stock XGBoost over one shard of a site, and the sums of a site over its shards."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import Table, reading_as_told
from nvflare_plugins.growth.metrics import curve_parts
from nvflare_plugins.pooled.mediated.grammar import Message
from nvflare_plugins.pooled.mediated.training import train
from nvflare_plugins.pooled.row_floors import SampledWeights, leaf_counts
from nvflare_plugins.pooled.shard_rows import (
    DRAW,
    LEAVES,
    MEDIAN,
    MESSAGE,
    MODEL,
    ROUND,
    TREE,
    ShardRows,
    ShardTask,
    digest_of,
    is_of_all_rows,
    message_of,
    plain_message,
    plain_rows,
    table_of,
)
from nvflare_plugins.wire.envelope import BaseScoreSource, Kind, Phase
from nvflare_plugins.workers.shards import BINS, READ, TELLS, Ask, Conversation, ShardPlace, said_of_model, telling
from nvflare_plugins.xgb.cuts import leaf_quantiles, quantile
from nvflare_plugins.xgb.matrices import as_weighed, evaluation_matrix, training_matrix
from nvflare_plugins.xgb.rounds import RoundRecord

# The training over one shard of a site's rows: stock XGBoost beside a mediator, whose messages the site answers.
#
# To XGBoost every shard is the site itself: all claim its rank, and each gets the answer that the site got for the sum
# of its shards. So neither the messages of a job nor the other sites tell into how many shards a site has cut its rows.
#
# What a shard asks with goes to the process that speaks for its site (sharded.py), and nowhere else:
#
# read      digest              first, where shards read files     reply: nothing (workers/shards.py) message   fields,
# buffer,     a message of XGBoost's;            reply: bytes, XGBoost's answer rows                what the site makes
# its own of, see shard_rows.py draw      round               which rows take part in a round?   reply: bool[n_rows of
# the shard] leaves    counts              int64[n_leaves] of a round         reply: nothing tree
# which tree gets its leaves?        reply: bytes, a model round     number, metrics     a round is over
# reply: whether the model is to be kept model     digest, model       SHA-256 of the model so far;       reply: nothing
# the model, of the first shard


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


# What XGBoost would average over shards, formed from all rows of the site: areas under curves, medians and quantiles.
#
# A site that is one process sends areas, medians and quantiles of its own rows, and XGBoost averages over sites. Those
# of shards do not make those of the site. So each shard gives the process that speaks for its site what they are made
# of, and what leaves the site is what it would send without workers.
#
# A leaf's quantile asks for the rows of each leaf while XGBoost is amid a round, when no one can ask it for its tree.
# But a tree follows from sums that all sites have: one more XGBoost beside the shards, without rows, gets the same
# answers, grows the same tree, and is let go ahead to its end.
#
# Privacy: scores, labels, weights and residuals go from a site's workers to the site's own process, and no further.


def is_beside_trees(message: Message) -> bool:
    """Tell whether a message has nothing to do with which trees grow: of their leaves, or of an evaluation."""
    leaves = (Kind.LEAF_COUNT, Kind.LEAF_VALID, Kind.LEAF_QUANTILE)
    return message.kind in leaves or message.moment.phase is Phase.EVALUATE


class SiteMessages:
    """Forms the site's messages of what its shards give of their rows."""

    def __init__(self, source: BaseScoreSource, alpha: float | None) -> None:
        """Args: alpha: of ``quantile_of``."""
        self._source, self._alpha = source, MEDIAN if alpha is None else alpha
        self._total_weight = 0.0
        self._quantiles: NDArray[np.float32] | None = None

    def buffers(self, message: Message, asked: Sequence[tuple[bytes, Any]]) -> list[bytes]:
        """Return what is to be added: the shards' messages, or one in their place.

        Args:
            asked: of each shard its message, and what it gives of its rows, see ``ShardRows``.
        """
        buffers = [buffer for buffer, _ in asked]
        if message.kind is Kind.WEIGHT_TOTAL:
            self._total_weight = sum(float(np.frombuffer(buffer, "<f8")[0]) for buffer in buffers)
        if message.kind is Kind.LEAF_QUANTILE and self._quantiles is not None:
            return [np.nan_to_num(self._quantiles, nan=0.0).astype("<f4").tobytes()]
        if not is_of_all_rows(message, self._source):
            return buffers
        columns = _joined([rows for _, rows in asked])
        if message.kind is Kind.METRIC:
            return [curve_parts(message.metric, *columns).astype("<f8").tobytes()]
        if message.kind is Kind.LABEL_MEAN:
            found = quantile(columns[0], columns[1], self._alpha)
            mean = found if self._source is BaseScoreSource.QUANTILE else np.float32(float(found) * self._total_weight)
            return [mean.astype("<f4").tobytes()]
        leaf, residuals, weight = columns
        self._quantiles = leaf_quantiles(residuals, weight, leaf, message.n_values, self._alpha)
        return [(~np.isnan(self._quantiles)).astype("<i4").tobytes()]


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Join columns of the shards in their order; a shard without rows says nothing of whether rows have weights."""
    if any(not isinstance(part, tuple) for part in parts):
        raise ProtocolError("a shard of this site does not give what its message is made of")
    filled = [part for part in parts if part[0].shape[0]] or [parts[0]]
    return [None if any(c is None for c in column) else np.concatenate(column) for column in zip(*filled, strict=True)]


class TreesAhead:
    """An XGBoost without rows that grows each tree from the answers to the shards, up to its end."""

    def __init__(self, task: ShardTask, table: Table) -> None:
        """Begin a training like that of the shards. Args: table: of the site, of which no row is taken."""
        alone = dataclasses.replace(
            task,
            shape=dataclasses.replace(task.shape, eval_metrics=(), n_eval_sets=0),
            names=(),
            settings=dataclasses.replace(task.settings, early_stopping_rounds=None),
            is_sampled=False,
            counts_leaves=False,
            tells_trees=True,
            reads=False,
        )
        self._work = HorizontalShard(1, alone.to_plain(), plain_rows(table, slice(0, 0)), [])
        state, self._question = self._work.listen()
        while state == TELLS:
            state, self._question = self._work.listen()
        self._tree: bytes | None = None

    def answered(self, fields: tuple[Any, ...], reply: bytes) -> None:
        """Take an answer that the shards get."""
        self._tree = None
        while self._question[0] in (TREE, ROUND):  # the end of the round before
            _, self._question = self._work.reply(False)
        if self._question[0] != MESSAGE or self._question[1] != fields:
            raise ProtocolError("the shards of this site are not in step with its trees")
        _, self._question = self._work.reply(reply)

    def tree(self) -> bytes:
        """Return the tree of this round, as a model; call it once the shards ask for the values of its leaves."""
        while self._tree is None:
            word, *rest = self._question
            if word == TREE:
                self._tree = rest[0]
            _, self._question = self._work.reply(self._reply(word, rest))
        return self._tree

    def end(self) -> None:
        """Let it end."""
        self._work.end()

    @staticmethod
    def _reply(word: str, rest: Sequence[Any]) -> object:
        if word == MESSAGE:  # whatever its leaves get: nothing is ever predicted here
            fields, buffer = rest[:2]
            return np.ones(len(buffer) // 4, "<i4").tobytes() if message_of(fields).kind is Kind.LEAF_VALID else buffer
        if word in (TREE, ROUND, DRAW):
            return False
        raise ProtocolError("the shards of this site are not in step with its trees")
