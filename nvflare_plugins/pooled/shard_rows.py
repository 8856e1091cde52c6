"""One shard of a site's rows, and the tasks over all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data.table import Table, passes_of, plain_reading, values_digest
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.pooled.mediated.grammar import Answer, Dtype, Message, TrainingShape
from nvflare_plugins.wire.envelope import (
    CURVE_METRICS,
    KIND_BY_CODE,
    PHASE_BY_CODE,
    BaseScoreSource,
    Kind,
    TrainingStep,
)
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.parameters import TrainingParameters

# What the shards of a site are told of a training, and the forms in which they and their site speak.


MESSAGE, DRAW, LEAVES, TREE, ROUND, MODEL = "message", "draw", "leaves", "tree", "round", "model"
PATH = "nvflare_plugins.pooled.mediated.shard:HorizontalShard"


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
        alpha: the quantile that the leaves are; None for leaves that are sums.
        tells_trees: each tree is handed over.
        reads: shards read some of their rows themselves.
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
    alpha: float | None = None
    tells_trees: bool = False
    reads: bool = False

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
    """Return a run of rows as plain values, without what only the site's own process needs, ids among it.

    Of a table that is read in passes go labels, weights, and what the worker needs to read the features itself.
    """
    passes = table.passes if rows.start < rows.stop else None
    return {
        "features": table.features[rows] if passes is None else table.features,
        "passes": None if passes is None else plain_reading(passes, rows),
        "feature_names": table.feature_names,
        "feature_types": table.feature_types,
        "label": table.label[rows],
        "label_name": table.label_name,
        "weight": None if table.weight is None else table.weight[rows],
        "weight_name": table.weight_name,
        "categories": {name: tuple(values) for name, values in table.categories.items()},
    }


def table_of(plain: dict[str, Any]) -> Table:
    """Return the rows that ``plain_rows`` has told of. Raises: ConfigurationError: see ``passes_of``."""
    reading = plain["passes"]
    return Table(**{**plain, "passes": None if reading is None else passes_of(reading)})


def digest_of(tables: Iterable[Table | None], go_on: Callable[[int], None] = lambda n_rows: None) -> bytes:
    """Return a hash of the features of those tables that are read in passes. Args: go_on: of ``values_digest``."""
    read = [table for table in tables if table is not None and table.passes is not None]
    return b"".join(values_digest(table, go_on) for table in read)


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


# What a shard gives of its rows where the site's message is none that messages of shards add up to.


_ESTIMATES = (BaseScoreSource.MEDIAN, BaseScoreSource.QUANTILE)
MEDIAN = 0.5


def why_in_one_process(parameters: TrainingParameters) -> str:
    """Return what of a training no shards can do, for people; "" where they can."""
    if parameters.objective.adaptive_leaf and parameters.agreed["booster"] == "dart":
        return f"booster dart with objective {parameters.objective.name}"
    return ""


def quantile_of(parameters: TrainingParameters) -> float | None:
    """Return which quantile an objective's leaves are; None for others."""
    if not parameters.objective.adaptive_leaf:
        return None
    return float(parameters.agreed.get("quantile_alpha", MEDIAN))  # type: ignore[arg-type]


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
        if any(metric in CURVE_METRICS for metric in self._task.shape.eval_metrics):
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
            number = self._n_metrics // len(self._task.shape.eval_metrics)
            matrix = self._evaluated[number]
            given = self._scores(self._of_sets[number]), matrix.get_label(), _weight_of(matrix)
        elif tree is not None:
            given = self._leaves(json.loads(tree), tree)
        elif is_of_all_rows(message, self._task.shape.base_score):
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
        objective = {"multi:softmax": "multi:softprob"}.get(str(self._task.params["objective"]))
        params = {**self._task.params, **({"objective": objective} if objective else {})}
        matrix = xgb.DMatrix(np.zeros((margins.shape[0], 1), np.float32), base_margin=margins)
        kept: dict[str, Any] = {name: params[name] for name in ("objective", "num_class", "nthread") if name in params}
        return xgb.Booster(kept, [matrix]).predict(matrix)

    def _leaves(self, document: dict[str, Any], model: bytes) -> tuple[Any, ...]:
        learner = document["learner"]
        tree = learner["gradient_booster"]["model"]["trees"][-1]
        nodes = np.flatnonzero(np.array(tree["left_children"]) == -1)
        n_rows, weight = self._matrix.num_row(), _weight_of(self._matrix)
        counted = np.ones(n_rows, dtype=bool) if weight is None else weight > 0
        self._to_xgboost = None if counted.any() else np.searchsorted(nodes, _walked(tree))
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


def _walked(tree: dict[str, Any]) -> list[int]:
    """Return the leaves of a tree in XGBoost's order of a walk: the right child first."""
    found, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        left, right = tree["left_children"][node], tree["right_children"][node]
        if left == -1:
            found.append(node)
        else:
            waiting += [left, right]
    return found


def _weight_of(matrix: xgb.DMatrix) -> NDArray[np.float32] | None:
    weight: NDArray[np.float32] = matrix.get_weight()
    return weight if weight.size else None
