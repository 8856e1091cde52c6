"""The training over one shard of a site's rows: stock XGBoost beside a mediator, whose messages the site answers.

To XGBoost every shard is the site itself: all claim its rank, and each gets the answer that the site got for the sum of
its shards. So neither the messages of a job nor the other sites tell into how many shards a site has cut its rows.

What a shard asks with goes to the process that speaks for its site (sharded.py), and nowhere else:

    message   fields, buffer      a message of XGBoost's             reply: bytes, XGBoost's answer
    draw      round               which rows take part in a round?   reply: bool[n_rows of the shard]
    leaves    counts              int64[n_leaves] of a round         reply: nothing
    round     number, metrics     a round is over                    reply: whether the model is to be kept
    model     digest, model       SHA-256 of the model so far;       reply: nothing
                                  the model, of the first shard
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.horizontal.matrices import as_weighed, evaluation_matrix, training_matrix
from nvflare_plugins.horizontal.row_floors import leaf_counts
from nvflare_plugins.horizontal.row_sampling import SampledWeights
from nvflare_plugins.horizontal.training import LoopSettings, train
from nvflare_plugins.shards.conversation import Ask, Conversation
from nvflare_plugins.shards.place import ShardPlace, said_of_model
from nvflare_plugins.wire.catalogue import (
    KIND_BY_CODE,
    PHASE_BY_CODE,
    Answer,
    BaseScoreSource,
    Dtype,
    Kind,
    Message,
    TrainingShape,
    TrainingStep,
)
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.rounds import RoundRecord

MESSAGE, DRAW, LEAVES, ROUND, MODEL = "message", "draw", "leaves", "round", "model"
PATH = "nvflare_plugins.horizontal.shard:HorizontalShard"


@dataclass(frozen=True, slots=True, repr=False)
class ShardTask:
    """What all shards of a site train alike.

    Attributes:
        rank, world: of the site among the sites.
        params: for the Booster.
        names: of the evaluation sets.
        is_sampled: rounds train on rows that the site has drawn.
        estimates: XGBoost begins with an estimate from all rows.
        counts_leaves: rows are counted in the leaves of each tree.
    """

    rank: int
    world: int
    params: dict[str, object]
    shape: TrainingShape
    cuts: Cuts
    max_bin: int
    names: tuple[str, ...]
    settings: LoopSettings
    initial_model: bytes | None
    is_sampled: bool
    estimates: bool
    counts_leaves: bool

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a worker."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        shape = {**asdict(self.shape), "base_score": self.shape.base_score.value}
        return {**plain, "shape": shape, "cuts": list(self.cuts.of_feature), "settings": asdict(self.settings)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> ShardTask:
        """Read what ``to_plain`` wrote."""
        shape = {**plain["shape"], "base_score": BaseScoreSource(plain["shape"]["base_score"])}
        rest = {"cuts": Cuts(tuple(plain["cuts"])), "settings": LoopSettings(**plain["settings"])}
        return cls(**{**plain, **rest, "shape": TrainingShape(**shape)})


def plain_rows(table: Table, rows: slice) -> dict[str, Any]:
    """Return a run of rows as plain values, without what only the site's own process needs, ids among it."""
    return {
        "features": table.features[rows],
        "feature_names": table.feature_names,
        "feature_types": table.feature_types,
        "label": table.label[rows],
        "label_name": table.label_name,
        "weight": None if table.weight is None else table.weight[rows],
        "weight_name": table.weight_name,
        "categories": {name: tuple(values) for name, values in table.categories.items()},
    }


def plain_message(message: Message) -> tuple[Any, ...]:
    """Return a message of XGBoost's as plain values."""
    moment, dtype = message.moment, message.dtype
    return (
        message.kind.code,
        message.answer.value,
        None if dtype is None else int(dtype),
        message.n_values,
        moment.phase.value,
        moment.round,
        message.reply_size,
        message.metric,
    )


def message_of(fields: tuple[Any, ...]) -> Message:
    """Read what ``plain_message`` wrote."""
    kind, answer, dtype, n_values, phase, number, reply_size, metric = fields
    moment = TrainingStep(PHASE_BY_CODE[phase], number)
    found = None if dtype is None else Dtype(dtype)
    return Message(KIND_BY_CODE[kind], Answer(answer), found, n_values, moment, reply_size, metric)


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
        of_sets = [None if one is None else Table(**one) for one in evaluated]
        training = _ShardTraining(number, ShardTask.of_plain(task), Table(**rows), of_sets)
        super().__init__(training.run)


class _ShardTraining:
    def __init__(self, number: int, task: ShardTask, table: Table, evaluated: list[Table | None]):
        self._number, self._task, self._table, self._evaluated = number, task, as_weighed(table), evaluated

    def run(self, ask: Ask) -> tuple[bytes, bytes | None, int | None, float | None]:
        """Train. Returns: digest and model, as asked with ``MODEL``; best round and score, where it may stop early."""
        task, table = self._task, self._table
        matrix = training_matrix(table, task.cuts, task.max_bin)
        eval_sets = [
            matrix if rows is None else evaluation_matrix(as_weighed(rows), matrix, task.max_bin)
            for rows in self._evaluated
        ]
        rows = SampledWeights(
            matrix, table.weight, _AskedDraws(ask, table.n_rows) if task.is_sampled else None, task.estimates
        )

        def after_tree(booster: xgb.Booster, number: int) -> None:
            ask(LEAVES, leaf_counts(booster, matrix, rows.taking_part(number)))

        def after_round(record: RoundRecord, booster: xgb.Booster) -> None:
            if ask(ROUND, record.round, record.metrics):
                ask(MODEL, *self._model(booster))

        result = train(
            task.params,
            task.shape,
            ShardPlace(task.rank, task.world),
            _AskedAnswers(ask, rows),
            matrix,
            list(zip(eval_sets, task.names, strict=True)),
            task.settings,
            task.initial_model,
            after_round,
            rows,
            after_tree if task.counts_leaves else None,
        )
        return *self._model(result.booster), result.best_round, result.best_score

    def _model(self, booster: xgb.Booster) -> tuple[bytes, bytes | None]:
        return said_of_model(self._number, bytes(booster.save_raw("json")))


class _AskedAnswers:
    """Passes XGBoost's messages to the site."""

    def __init__(self, ask: Ask, rows: SampledWeights):
        self._ask, self._rows = ask, rows
        self.seconds = 0.0

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """See ``Answers``."""
        if message.kind is Kind.MODEL_PARAMETERS:
            self._rows.base_score_known()
        started = time.perf_counter()
        reply: bytes = self._ask(MESSAGE, plain_message(message), buffer)
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
