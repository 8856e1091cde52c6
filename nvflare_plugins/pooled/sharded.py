"""The training of a site whose rows are in shards: their messages are added here, protected once, and answered to all.

The site is one to everybody else: cut points, floors, scales, draws, tags, masks, evidence and registry are the same
however many shards it has. Every shard's XGBoost adds gradients in float64 by itself, and these sums are added here in
the order of the shards and rounded once to the grid. For a fixed number of shards the model is therefore the same bytes
wherever they are. With another number sums differ by roundings of float64, far below the step of the grid, which change
an integer of the grid only where a sum lies next to the middle between two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import Table
from nvflare_plugins.pooled.mediated.shard import SiteMessages, TreesAhead, is_beside_trees
from nvflare_plugins.pooled.mediated.training import TrainingHandler
from nvflare_plugins.pooled.row_floors import Draws, check_leaves
from nvflare_plugins.pooled.shard_rows import (
    DRAW,
    LEAVES,
    MESSAGE,
    MODEL,
    PATH,
    ROUND,
    TREE,
    ShardTask,
    digest_of,
    message_of,
    plain_rows,
    table_of,
)
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Phase, TrainingStep
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import Answer, comparing, lead, one_model, runs_of
from nvflare_plugins.workers.workers import Workers, note_rows
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult

_PlainRows = tuple[dict[str, Any], list[dict[str, Any] | None]]
"""Of one shard: its rows, and those of its evaluation sets; see ``plain_rows``."""


@dataclass(frozen=True, slots=True, repr=False)
class ShardedRows:
    """A site's rows, to be trained on in shards.

    Attributes:
        evaluated: rows of each evaluation set; None stands for the training rows.
        draws: which rows take part in each round; None for all.
    """

    table: Table
    evaluated: Sequence[Table | None]
    draws: Draws | None

    @property
    def are_read(self) -> bool:
        """Whether shards read some of these rows themselves."""
        return any(one is not None and one.passes is not None for one in (self.table, *self.evaluated))

    def digests(self, of_shards: Sequence[_PlainRows], go_on: Callable[[int], None]) -> list[bytes]:
        """Return what each shard has to find in the files that it reads; see ``digest_of``.

        Args:
            go_on: of ``comparing``.

        Raises:
            DataRefusal: a file has changed since this process has looked at the rows.
        """
        found = [
            digest_of([table_of(one) for one in (rows, *evaluated) if one is not None], go_on)
            for rows, evaluated in of_shards
        ]
        for table in (self.table, *self.evaluated):
            if table is not None and table.passes is not None:
                table.passes.file.check_unchanged()
        return found

    def of_shards(self, n_shards: int) -> list[_PlainRows]:
        """Return the rows of each shard, and those of its evaluation sets, of which it may have none."""
        sets = [None if one is None else (one, runs_of(one.n_rows, n_shards)) for one in self.evaluated]
        return [
            (
                plain_rows(self.table, rows),
                [None if one is None else plain_rows(one[0], one[1][number]) for one in sets],
            )
            for number, rows in enumerate(runs_of(self.table.n_rows, n_shards))
        ]


def train_sharded(
    workers: Workers,
    task: ShardTask,
    rows: ShardedRows,
    channel: Channel,
    sums: ProtectedSums,
    handler: TrainingHandler,
    rows_per_node: int,
    is_kept: Callable[[int], bool],
    on_round: Callable[[RoundRecord, bytes | None], None],
) -> TrainingResult:
    """Train with the other sites; see ``train``, which does the same where the rows are in one process.

    Args:
        rows_per_node: least rows in a leaf, where they are counted.
        is_kept: tells, by the number of rounds done, whether ``on_round`` gets the model so far.

    Raises:
        VeilBoostError: what ended the training; what happened at a worker comes with its number.
    """
    of_shards, plain = rows.of_shards(len(workers)), task.to_plain()
    arguments = [(number, plain, *own) for number, own in enumerate(of_shards)]

    def lead_shards(answer: Answer) -> list[Any]:
        with comparing(answer, lambda go_on: rows.digests(of_shards, go_on)) as compared:
            return lead(workers, PATH, arguments, compared)

    runs = runs_of(rows.table.n_rows, len(workers))
    note_rows(workers, runs)
    drawing = None if rows.draws is None else ShardDraws(rows.draws, runs)
    return train_led(lead_shards, task, rows.table, drawing, channel, sums, handler, rows_per_node, is_kept, on_round)


def train_led(
    lead_shards: Callable[[Answer], list[Any]],
    task: ShardTask,
    table: Table,
    draws: ShardDraws | None,
    channel: Channel,
    sums: ProtectedSums,
    handler: TrainingHandler,
    rows_per_node: int,
    is_kept: Callable[[int], bool],
    on_round: Callable[[RoundRecord, bytes | None], None],
) -> TrainingResult:
    """Train over shards wherever they are; see ``train_sharded``.

    Args:
        lead_shards: has all shards train, answers what they ask, and returns what ``train_shard`` has returned at each.
        table: of the site, for names and types of its columns.
        draws: which rows take part in each round; None for all.
    """
    trees = None if task.alpha is None else TreesAhead(task, table)
    messages = SiteMessages(task.shape.base_score, task.alpha)
    leader = _Leader(channel, sums, handler, draws, messages, trees, rows_per_node, is_kept, on_round)
    try:
        results = lead_shards(leader.answer)
    finally:
        if trees is not None:
            trees.end()
    settings = task.settings
    channel.moment = TrainingStep(Phase.FINISH, settings.moments_before + settings.first_round + settings.num_rounds)
    model = one_model(results)
    _, _, best_round, best_score = results[0]
    return TrainingResult(xgb.Booster(task.params, model_file=bytearray(model)), leader.rounds, best_round, best_score)


@dataclass(frozen=True, slots=True)
class ShardDraws:
    """The rows of a round, cut into those of the shards. ``runs``: of the rows that are drawn from."""

    draws: Draws
    runs: Sequence[slice]

    def of_round(self, number: int) -> list[NDArray[np.bool_]]:
        """Return, for each shard, which of its rows take part in a round. Shapes: bool[n_rows of the shard]."""
        drawn = self.draws.of_round(number)
        return [drawn[run] for run in self.runs]


class _Leader:
    """Answers what all shards ask."""

    def __init__(
        self,
        channel: Channel,
        sums: ProtectedSums,
        handler: TrainingHandler,
        draws: ShardDraws | None,
        messages: SiteMessages,
        trees: TreesAhead | None,
        rows_per_node: int,
        is_kept: Callable[[int], bool],
        on_round: Callable[[RoundRecord, bytes | None], None],
    ):
        self._channel, self._sums, self._handler, self._draws = channel, sums, handler, draws
        self._messages, self._trees = messages, trees
        self._rows_per_node, self._is_kept, self._on_round = rows_per_node, is_kept, on_round
        self._record: RoundRecord | None = None
        self._last = self._clocks()
        self.rounds: list[RoundRecord] = []

    def answer(self, word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        """Return a reply for each shard; see ``lead``."""
        n_shards, first = len(asked), asked[0]
        if word == MESSAGE:
            if any(one[0] != first[0] for one in asked):
                raise ProtocolError("the shards of this site are not in step")
            return [self._answer(first[0], [(buffer, rows) for _, buffer, rows in asked])] * n_shards
        if word == TREE and self._trees is not None:
            return [self._trees.tree()] * n_shards
        if word == DRAW and self._draws is not None:
            return self._draws.of_round(first[0])
        if word == LEAVES:
            check_leaves(self._sums, np.sum([counts for (counts,) in asked], axis=0), self._rows_per_node)
            return [None] * n_shards
        if word == ROUND:
            return [self._round_over(*first)] * n_shards
        if word == MODEL and self._record is not None:
            self._finish_round(self._record, one_model(asked))
            return [None] * n_shards
        raise ProtocolError("a shard of this site asks for what it has no use for")

    def _answer(self, fields: tuple[Any, ...], asked: list[tuple[bytes, Any]]) -> bytes:
        message = message_of(fields)
        self._channel.moment = message.moment
        reply = self._handler.answer_shards(message, self._messages.buffers(message, asked))
        if self._trees is not None and not is_beside_trees(message):
            self._trees.answered(fields, reply)
        return reply

    def _round_over(self, number: int, metrics: dict[str, float]) -> bool:
        """Take note of a round; its times are those of the site. Returns: whether the model is wanted first."""
        total, handled, waited = (a - b for a, b in zip(self._clocks(), self._last, strict=True))
        record = RoundRecord(number, metrics, total, total - handled, handled - waited, waited)
        self.rounds.append(record)
        wanted = self._is_kept(number + 1)
        if wanted:
            self._record = record
        else:
            self._finish_round(record, None)
        return wanted

    def _finish_round(self, record: RoundRecord, model: bytes | None) -> None:
        self._record = None
        self._on_round(record, model)
        self._last = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._handler.seconds, self._channel.network_seconds
