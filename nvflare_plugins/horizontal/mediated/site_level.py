"""What XGBoost would average over shards, formed from all rows of the site: areas under curves, medians and quantiles.

A site that is one process sends areas, medians and quantiles of its own rows, and XGBoost averages over sites. Those
of shards do not make those of the site. So each shard gives the process that speaks for its site what they are made
of, and what leaves the site is what it would send without workers.

A leaf's quantile asks for the rows of each leaf while XGBoost is amid a round, when no one can ask it for its tree.
But a tree follows from sums that all sites have: one more XGBoost beside the shards, without rows, gets the same
answers, grows the same tree, and is let go ahead to its end.

Privacy: scores, labels, weights and residuals go from a site's workers to the site's own process, and no further.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.horizontal.mediated.grammar import Message
from nvflare_plugins.horizontal.mediated.shard import HorizontalShard
from nvflare_plugins.horizontal.shard_rows import MEDIAN, is_of_all_rows
from nvflare_plugins.horizontal.shard_task import DRAW, MESSAGE, ROUND, TREE, ShardTask, message_of, plain_rows
from nvflare_plugins.shards.conversation import TELLS
from nvflare_plugins.wire.catalogue import BaseScoreSource, Kind, Phase
from nvflare_plugins.xgb.curves import curve_parts
from nvflare_plugins.xgb.quantiles import leaf_quantiles, quantile


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
