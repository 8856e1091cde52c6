"""Stock XGBoost over one shard of a site, and the sums of a site over its shards."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import Table, reading_as_told
from nvflare_plugins.growth.metrics import curve_parts
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.pooled import shards
from nvflare_plugins.pooled.mediated.grammar import Answer, Dtype, Message, TrainingShape
from nvflare_plugins.pooled.mediated.training import TrainingTask, train
from nvflare_plugins.pooled.row_floors import SampledWeights, leaf_counts
from nvflare_plugins.wire.envelope import CURVE_METRICS, KIND_BY_CODE, BaseScoreSource, Kind, Phase, TrainingStep
from nvflare_plugins.workers.shards import TELLS, Ask, Conversation, ShardPlace, said_of_model
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts, leaf_quantiles, quantile
from nvflare_plugins.xgb.matrices import as_weighed, evaluation_matrix, training_matrix
from nvflare_plugins.xgb.model_json import trees_model, walked_leaves
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import RoundRecord

# The training over one shard of a site's rows: stock XGBoost beside a mediator, whose messages the site answers.
#
# To XGBoost every shard is the site itself: all claim its rank, and each gets the answer that the site got for the sum
# of its shards. So neither the messages of a job nor the other sites tell into how many shards a site has cut its rows.
#
# Beside what every shard asks (pooled/shards.py) it asks the process that speaks for its site, and nobody else:
#
#     message    fields, buffer,      a message of XGBoost's;             reply: bytes, XGBoost's answer
#                rows                 what the site makes its own of
#     leaves     counts               int64[n_leaves] of a round          reply: nothing
#     tree                            which tree gets its leaves?         reply: bytes, a model


MESSAGE, TREE = "message", "tree"
PATH = "nvflare_plugins.pooled.mediated.shard:HorizontalShard"
_ESTIMATES = (BaseScoreSource.MEDIAN, BaseScoreSource.QUANTILE)
_OF_LEAVES = (Kind.LEAF_VALID, Kind.LEAF_QUANTILE)
MEDIAN = 0.5


@dataclass(frozen=True, slots=True, repr=False)
class ShardTask:
    """What all shards of a site train alike.

    Attributes:
        rank, world: of the site among the sites.
        names: of the evaluation sets.
        is_sampled: rounds train on rows that the site has drawn.
        counts_leaves: rows are counted in the leaves of each tree.
        alpha: the quantile that the leaves are; None for leaves that are sums.
        tells_trees: each tree is handed over.
        reads: shards read some of their rows themselves.
    """

    rank: int
    world: int
    training: TrainingTask
    cuts: Cuts
    max_bin: int
    names: tuple[str, ...]
    is_sampled: bool
    counts_leaves: bool
    alpha: float | None
    tells_trees: bool = False
    reads: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a worker."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        params, shape, settings, initial = (getattr(self.training, name) for name in TrainingTask.__slots__)
        source = {"base_score": shape.base_score.value}
        training = params, {**asdict(shape), **source}, asdict(settings), initial
        return {**plain, "training": training, "cuts": list(self.cuts.of_feature)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> ShardTask:
        """Read what ``to_plain`` wrote."""
        params, shape, settings, initial = plain["training"]
        of_shape = TrainingShape(**{**shape, "base_score": BaseScoreSource(shape["base_score"])})
        training = TrainingTask(params, of_shape, LoopSettings(**settings), initial)
        return cls(**{**plain, "training": training, "cuts": Cuts(tuple(plain["cuts"]))})


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
    moment = TrainingStep(Phase(phase), number)
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
        told = ShardTask.of_plain(task)

        def work(ask: Ask) -> tuple[bytes, bytes | None, int | None, float | None]:
            with reading_as_told():
                table, sets = shards.tables_of(ask, rows, evaluated, reads=told.reads)
                table = as_weighed(table)
                matrix = training_matrix(table, told.cuts, told.max_bin)
                eval_sets = [
                    matrix if one is None else evaluation_matrix(as_weighed(one), matrix, told.max_bin) for one in sets
                ]
            return train_shard(ask, number, told, table.weight, matrix, eval_sets)

        super().__init__(work)


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
    draws = shards.asked_draws(ask, matrix.num_row()) if task.is_sampled else None
    rows = SampledWeights(matrix, weight, draws, estimates_base_score=task.training.estimates)
    initial = task.training.initial_model
    start = None if initial is None else xgb.Booster({"nthread": 1}, model_file=bytearray(initial))
    given = ShardRows(task, matrix, eval_sets, start if task.alpha is not None else None)

    def after_tree(booster: xgb.Booster, number: int) -> None:
        if task.tells_trees:
            last = booster.num_boosted_rounds() - 1
            ask(TREE, bytes(booster[last : last + 1].save_raw("json")))
        given.after_tree(booster)
        if task.counts_leaves:
            ask(shards.LEAVES, leaf_counts(booster, matrix, rows.taking_part(number)))

    def after_round(record: RoundRecord, booster: xgb.Booster) -> None:
        shards.tell_round(ask, number, record, lambda: bytes(booster.save_raw("json")))

    answers = _AskedAnswers(ask, rows, given, task)
    place, named = ShardPlace(task.rank, task.world), list(zip(eval_sets, task.names, strict=True))
    result = train(task.training, place, answers, rows, named, after_round, after_tree)
    return *said_of_model(number, result.model), result.best_round, result.best_score


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
        given = None
        if not self._task.tells_trees:
            tree = self._ask(TREE) if message.kind is Kind.LEAF_VALID else None
            given = self._given.of_message(message, tree)
        reply: bytes = self._ask(MESSAGE, plain_message(message), buffer, given)
        if message.kind in _OF_LEAVES:
            reply = self._given.in_own_order(reply)
        self.seconds += time.perf_counter() - started
        return reply


# What a shard gives of its rows where the site's message is none that messages of shards add up to.


def quantile_of(parameters: TrainingParameters) -> float | None:
    """Return which quantile an objective's leaves are; None for others."""
    if not parameters.objective.adaptive_leaf:
        return None
    return parameters.number("quantile_alpha", MEDIAN)


def is_of_all_rows(message: Message, source: BaseScoreSource) -> bool:
    """Tell whether a message is none that shards' add up to. Args: source: of the first estimate."""
    if message.kind is Kind.LABEL_MEAN:
        return source in _ESTIMATES
    return message.kind is Kind.LEAF_VALID or (message.kind is Kind.METRIC and message.metric in CURVE_METRICS)


class ShardRows:
    """What one shard gives of its rows. Called while XGBoost waits for an answer, from another thread than its own."""

    def __init__(
        self, task: ShardTask, matrix: xgb.DMatrix, evaluated: Sequence[xgb.DMatrix], initial: xgb.Booster | None
    ) -> None:
        """Args: initial: the model that training continues, outside any communicator."""
        self._task, self._matrix, self._evaluated = task, matrix, evaluated
        self._margins = None if initial is None else initial.predict(matrix, output_margin=True)
        self._of_sets: list[NDArray[np.float32]] = []
        self._n_metrics = 0
        self._to_xgboost: NDArray[np.int64] | None = None

    def after_tree(self, booster: xgb.Booster) -> None:
        """Take note of the predictions so far; before anything is evaluated, in the thread that trains."""
        if self._task.alpha is not None:
            self._margins = booster.predict(self._matrix, output_margin=True)
        self._n_metrics = 0
        if any(metric in CURVE_METRICS for metric in self._task.training.shape.eval_metrics):
            self._of_sets = [booster.predict(one, output_margin=True) for one in self._evaluated]

    def of_message(self, message: Message, tree: bytes | None) -> tuple[Any, ...] | None:
        """Return what the site makes its message of; None where it adds up those of its shards.

        Args:
            tree: of this round, for the values of its leaves.

        Returns:
            label and weight; or scores, label and weight; or leaf, residual and weight. Scores are float32[n_rows] or
            float32[n_rows, n_classes], leaves int32[n_rows] in the order of their nodes, the rest float32[n_rows];
            no weights are None.
        """
        given: tuple[Any, ...] | None = None
        if message.kind is Kind.METRIC and message.metric in CURVE_METRICS:
            number = self._n_metrics // len(self._task.training.shape.eval_metrics)
            matrix = self._evaluated[number]
            given = self._scores(self._of_sets[number]), matrix.get_label(), _weight_of(matrix)
        elif tree is not None:
            given = self._leaves(tree)
        elif is_of_all_rows(message, self._task.training.shape.base_score):
            given = self._matrix.get_label(), _weight_of(self._matrix)
        self._n_metrics += message.kind is Kind.METRIC
        return given

    def in_own_order(self, reply: bytes) -> bytes:
        """Return values of leaves as this shard's XGBoost takes them: it walks a tree in which it has no row."""
        values = np.frombuffer(reply, "<i4")
        return reply if self._to_xgboost is None else values[self._to_xgboost].tobytes()

    def _scores(self, margins: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return scores as XGBoost's metrics see them: of classes their probabilities, whatever the model predicts."""
        if not margins.shape[0]:
            return margins
        objective = {"multi:softmax": "multi:softprob"}.get(str(self._task.training.params["objective"]))
        params = {**self._task.training.params, **({"objective": objective} if objective else {})}
        matrix = xgb.DMatrix(np.zeros((margins.shape[0], 1), np.float32), base_margin=margins)
        kept: dict[str, Any] = {name: params[name] for name in ("objective", "num_class", "nthread") if name in params}
        return xgb.Booster(kept, [matrix]).predict(matrix)

    def _leaves(self, model: bytes) -> tuple[Any, ...]:
        learner = json.loads(model)["learner"]
        tree = trees_model(learner)["trees"][-1]
        nodes = np.flatnonzero(np.array(tree["left_children"]) == -1)
        n_rows, weight = self._matrix.num_row(), _weight_of(self._matrix)
        counted = np.ones(n_rows, dtype=bool) if weight is None else weight > 0
        self._to_xgboost = None if counted.any() else np.searchsorted(nodes, walked_leaves(tree))
        if not counted.any():
            nothing = np.empty(0, np.float32)
            return np.empty(0, np.int32), nothing, None if weight is None else nothing
        margins = self._margins
        if margins is None:  # the first prediction is the same for all rows
            margins = np.full(n_rows, float(learner["learner_model_param"]["base_score"].strip("[]")), np.float32)
        found = xgb.Booster({"nthread": 1}, model_file=bytearray(model)).predict(self._matrix, pred_leaf=True)
        leaf = np.searchsorted(nodes, found.reshape(n_rows).astype(np.int64)).astype(np.int32)
        residuals = self._matrix.get_label() - margins.reshape(n_rows)
        return leaf[counted], residuals[counted], None if weight is None else weight[counted]


def _weight_of(matrix: xgb.DMatrix) -> NDArray[np.float32] | None:
    weight: NDArray[np.float32] = matrix.get_weight()
    return weight if weight.size else None


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
        columns = shards.joined([rows for _, rows in asked])
        if message.kind is Kind.METRIC:
            return [curve_parts(message.metric, *columns).astype("<f8").tobytes()]
        if message.kind is Kind.LABEL_MEAN:
            found = quantile(columns[0], columns[1], self._alpha)
            mean = found if self._source is BaseScoreSource.QUANTILE else np.float32(float(found) * self._total_weight)
            return [mean.astype("<f4").tobytes()]
        leaf, residuals, weight = columns
        self._quantiles = leaf_quantiles(residuals, weight, leaf, message.n_values, self._alpha)
        return [(~np.isnan(self._quantiles)).astype("<i4").tobytes()]


class TreesAhead:
    """An XGBoost without rows that grows each tree from the answers to the shards, up to its end."""

    def __init__(self, task: ShardTask, table: Table) -> None:
        """Begin a training like that of the shards. Args: table: of the site, of which no row is taken."""
        alone = dataclasses.replace(
            task,
            training=dataclasses.replace(
                task.training,
                shape=dataclasses.replace(task.training.shape, eval_metrics=(), n_eval_sets=0),
                settings=dataclasses.replace(task.training.settings, early_stopping_rounds=None),
            ),
            names=(),
            is_sampled=False,
            counts_leaves=False,
            tells_trees=True,
            reads=False,
        )
        self._work = HorizontalShard(1, alone.to_plain(), shards.plain_rows(table, slice(0, 0)), [])
        state, self._question = self._work.listen()
        while state == TELLS:
            state, self._question = self._work.listen()
        self._tree: bytes | None = None

    def answered(self, fields: tuple[Any, ...], reply: bytes) -> None:
        """Take an answer that the shards get."""
        self._tree = None
        while self._question[0] in (TREE, shards.ROUND):  # the end of the round before
            _, self._question = self._work.reply(False)  # noqa: FBT003 - the answer
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
        if word in (TREE, shards.ROUND, shards.DRAW):
            return False
        raise ProtocolError("the shards of this site are not in step with its trees")
