"""The training loop of one site: stock XGBoost beside its mediator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.growth.metrics import without_empty_curves
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.pooled.mediated import grammar
from nvflare_plugins.pooled.mediated.communicator import Federated
from nvflare_plugins.pooled.row_floors import SampledWeights
from nvflare_plugins.wire.channel import SiteProgress
from nvflare_plugins.wire.envelope import BaseScoreSource, Kind, Phase, TrainingStep
from nvflare_plugins.wire.sums import Family, ProtectedSums
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import EarlyStopping, RoundRecord, TrainingResult, parse_metrics, widest_batch
from nvflare_plugins.xgb.versions import installed_release

if TYPE_CHECKING:  # it needs gRPC
    from nvflare_plugins.pooled.mediated.mediator import Mediator

_BIN_BYTES = 16  # a gradient pair of XGBoost's histograms, float64 each


def check_histograms(n_bins: int, n_nodes: int) -> None:
    """Refuse a table so wide that XGBoost could not hand over the histograms of a level: it sends them at once.

    Args:
        n_bins: of all columns.
        n_nodes: most histograms of one message.

    Raises:
        ConfigurationError: the message would be longer than gRPC's 2 GiB.
    """
    if _BIN_BYTES * n_bins * n_nodes > grammar.LARGEST_BUFFER_BYTES:
        raise ConfigurationError(
            f"histograms of {n_bins:,} bins do not fit: XGBoost hands over those of {n_nodes} nodes in one message of "
            f"at most 2 GiB, which is {grammar.LARGEST_BUFFER_BYTES // (_BIN_BYTES * n_nodes):,} bins of all columns. "
            "Take fewer columns (features), fewer bins (max_bin) or levels (max_depth), or grow_policy='lossguide', "
            "which sends one node's."
        )


def training_shape(
    params: TrainingParameters,
    n_sites: int,
    n_features: int,
    n_bins: int,
    *,
    weighted: bool,
    n_eval_sets: int,
    continued: bool,
) -> grammar.TrainingShape:
    """Return the public facts that fix XGBoost's messages."""
    agreed, facts = params.agreed, params.objective
    vector_leaf = agreed.get("multi_strategy") == "multi_output_tree"
    parallel = int(params.effective.get("num_parallel_tree", 1))
    depth = int(params.effective.get("max_depth", 6))
    built = 1 if agreed.get("grow_policy") == "lossguide" else widest_batch(depth)
    check_histograms(n_bins, built)
    source = BaseScoreSource.CONTINUED if continued else facts.base_score_source
    return grammar.TrainingShape(
        n_sites=n_sites,
        n_features=n_features,
        n_bins=n_bins,
        n_outputs=facts.n_outputs,
        trees_per_round=parallel * (1 if vector_leaf else facts.n_outputs),
        vector_leaf=vector_leaf,
        max_built_nodes=built,
        weighted=weighted,
        adaptive_leaf=facts.adaptive_leaf,
        base_score=source,
        eval_metrics=params.metrics,
        n_eval_sets=n_eval_sets,
        column_seed=installed_release().sends_column_seed,
    )


class TrainingHandler:
    """Answers the messages of one training: sums through ``ProtectedSums``, the rest from what the site holds.

    Attributes:
        on_base_score: called while XGBoost waits, between its estimate of the base score and its first gradients.
    """

    def __init__(
        self,
        sums: ProtectedSums,
        shape: grammar.TrainingShape,
        root_bins: slice | None,
        log: EvidenceLog | None = None,
        *,
        starts_at_rate: bool = False,
        label_sum: float | None = None,
    ):
        """Serve one training.

        Args:
            root_bins: bins of a feature that no site lacks values in; its bins add up to the root sum.
            starts_at_rate: the objective is logistic and its first prediction is the pooled label mean.
            label_sum: weighted sum of this site's labels, where the first prediction is their pooled mean.
        """
        self._sums, self._shape, self._root_bins, self._log = sums, shape, root_bins, log
        self._starts_at_rate, self._label_sum = starts_at_rate, label_sum
        self.on_base_score: Callable[[], None] | None = None
        self._total_weight: float | None = None
        self._root_histogram: NDArray[np.float64] | None = None
        self.seconds = 0.0

    def answer(self, message: grammar.Message, *buffers: bytes) -> bytes:
        """Return the reply to one message that XGBoost, or that of every shard of this site, has sent.

        Parts are added in the order of the shards, as float64 or int64; what is protected afterwards is their sum.
        """
        started = time.perf_counter()
        try:
            return self._answer(message, buffers)
        finally:
            self.seconds += time.perf_counter() - started

    def _answer(self, message: grammar.Message, buffers: Sequence[bytes]) -> bytes:
        if message.answer is grammar.Answer.LOCAL or message.dtype is None:
            # The largest of any numbers is not asked for here, so that shards have the same to say.
            if any(buffer != buffers[0] for buffer in buffers) and message.kind is not Kind.METRIC_SIZE:
                raise ProtocolError(f"the shards of this site disagree on {message.kind.name}")
            return self._answer_locally(message, buffers[0])
        if message.kind is Kind.ROOT_SUM and self._root_histogram is not None:
            return self._root_sum(message, self._root_histogram)
        if message.dtype in (grammar.Dtype.INT32, grammar.Dtype.INT64):
            counts = self._sums.sum_counts(message.kind, _added(buffers, message.dtype.numpy, np.int64))
            if message.kind is Kind.ROW_COUNT:
                self._total_weight = float(counts[0])
            return counts.astype(message.dtype.numpy).tobytes()
        values = self._own_numbers(message, _added(buffers, message.dtype.numpy, np.float64))
        total = self._sums.sum(message.kind, values, message.metric).astype(message.dtype.numpy, copy=False)
        if message.kind is Kind.WEIGHT_TOTAL:
            self._total_weight = float(total[0])
        elif message.kind is Kind.LABEL_MEAN:
            self._tighten(float(total[0]))
        one_node = message.kind is Kind.HISTOGRAM and total.size == 2 * self._shape.n_bins
        usable = one_node and self._root_bins is not None and not self._shape.vector_leaf
        self._root_histogram = total if usable else None
        return total.tobytes()

    def _own_numbers(self, message: grammar.Message, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if message.metric == "aucpr":
            return without_empty_curves(values)
        if message.kind is Kind.LABEL_MEAN and self._label_sum is not None and self._total_weight:
            # XGBoost rounds its part of the mean to float32, and the parts' sum may miss the pooled mean by a unit of
            # the last place, and with it every leaf. The same number in float64 does not.
            return np.array([self._label_sum / self._total_weight])
        return values

    def _tighten(self, rate: float) -> None:
        """Bound the first gradients of a logistic objective by the pooled label mean, which every site has now.

        At a prediction equal to the mean m of N rows, the |gradients| of all sites add up to 2 N m (1 - m), and the
        hessians to half of it. For a rare class that is far less than N.
        """
        if self._starts_at_rate and self._total_weight is not None and 0.0 < rate < 1.0:
            self._sums.tighten(Family.GRADIENTS, 2.0 * self._total_weight * rate * (1.0 - rate))
            self._sums.tighten(Family.HESSIANS, self._total_weight * rate * (1.0 - rate))

    def _root_sum(self, message: grammar.Message, histogram: NDArray[np.float64]) -> bytes:
        """Add up one feature's bins in order, as central XGBoost does for dense data."""
        bins = histogram.reshape(-1, 2)[self._root_bins]
        self._note(message, "sum of the root histogram over a feature without missing values")
        return bytes(np.cumsum(bins, axis=0)[-1].tobytes())

    def _answer_locally(self, message: grammar.Message, buffer: bytes) -> bytes:
        if message.kind is Kind.FEATURE_COUNT:
            if int.from_bytes(buffer, "little") != self._shape.n_features:
                raise ProtocolError("XGBoost counts other features than the sites agreed on")
            self._note(message, "agreed before training")
            return buffer
        if message.kind is Kind.METRIC_SIZE:
            # XGBoost asks only whether any site has rows, and for the number of outputs per row.
            self._note(message, "every site has rows; the sizes stay here")
            return np.array([1, self._shape.n_outputs], dtype="<u8").tobytes()
        if message.kind is Kind.LEAF_COUNT:
            self._note(message, "the tree is the same at every site")
            return buffer
        if message.kind is Kind.MODEL_PARAMETERS and self.on_base_score is not None:
            self.on_base_score()
        self._note(message, "follows from what all sites agreed on")
        return b""

    def _note(self, message: grammar.Message, how: str) -> None:
        if self._log is not None:
            self._log.local(message.kind.name, str(message.moment), how)


def _added(buffers: Sequence[bytes], dtype: str, wide: type[np.int64] | type[np.float64]) -> NDArray[Any]:
    """Add the shards' vectors, one after the other. Shapes: [n] each; result: wide[n]."""
    total = np.frombuffer(buffers[0], dtype=dtype).astype(wide, copy=False)
    for buffer in buffers[1:]:
        total = total + np.frombuffer(buffer, dtype=dtype).astype(wide, copy=False)
    return total


@dataclass(frozen=True, slots=True, repr=False)
class TrainingTask:
    """What one XGBoost trains.

    Attributes:
        params: for the Booster at this site.
        initial_model: raw model to continue from.
    """

    params: Mapping[str, object]
    shape: grammar.TrainingShape
    settings: LoopSettings
    initial_model: bytes | None

    @property
    def estimates(self) -> bool:
        """Whether XGBoost begins with an estimate from all rows."""
        return self.shape.base_score not in (BaseScoreSource.GIVEN, BaseScoreSource.CONTINUED)


def train(
    task: TrainingTask,
    channel: SiteProgress,
    handler: grammar.Answers,
    rows: SampledWeights,
    eval_sets: Sequence[tuple[xgb.DMatrix, str]],
    on_round: Callable[[RoundRecord, xgb.Booster], None],
    on_tree: Callable[[xgb.Booster, int], None] | None = None,
) -> TrainingResult:
    """Train with the other sites.

    The matrices must have been built outside any communicator, so that XGBoost sends nothing about them.

    Args:
        rows: the training matrix, and what its rows weigh in a round.
        on_round: called after every round with the record and the model so far.
        on_tree: called after every round before anything is evaluated, with the model so far and the round.

    Raises:
        VeilBoostError: what ended the training, in place of XGBoost's own error when the mediator knows better.
    """
    mediator: Mediator = _with_grpc().Mediator(grammar.HorizontalGrammar(task.shape), channel.rank, handler)
    with mediator:
        try:
            with Federated(mediator, channel.world, channel.rank):
                return _Loop(mediator, channel, handler, task, rows, eval_sets, on_round, on_tree).run()
        except xgb.core.XGBoostError as error:
            why = mediator.reason(error)
            raise why from why.__cause__
        except VeilBoostError as error:
            mediator.abort(error)
            raise


def _with_grpc() -> ModuleType:
    """Load the mediator, the one part that needs gRPC. Raises: ConfigurationError: it is not installed."""
    try:
        return import_module("nvflare_plugins.pooled.mediated.mediator")
    except ImportError as error:
        raise ConfigurationError(
            f"engine='xgboost' needs {error.name}: pip install 'veilboost[mediated]', or let the sites grow the trees"
        ) from None


@dataclass(frozen=True, slots=True, repr=False)
class _Loop:
    """The rounds of one training; see ``train``."""

    mediator: Mediator
    channel: SiteProgress
    handler: grammar.Answers
    task: TrainingTask
    rows: SampledWeights
    eval_sets: Sequence[tuple[xgb.DMatrix, str]]
    on_round: Callable[[RoundRecord, xgb.Booster], None]
    on_tree: Callable[[xgb.Booster, int], None] | None

    def run(self) -> TrainingResult:
        matrix, settings, initial = self.rows.matrix, self.task.settings, self.task.initial_model
        cache = [matrix, *(one for one, _ in self.eval_sets if one is not matrix)]
        start = None if initial is None else bytearray(initial)
        booster = xgb.Booster(dict(self.task.params), cache, model_file=start)
        # From a matrix without rows XGBoost takes no names, and this site's model would differ from the others'.
        booster.feature_names, booster.feature_types = matrix.feature_names, matrix.feature_types
        rounds: list[RoundRecord] = []
        first, last = settings.first_round, settings.first_round + settings.num_rounds
        # Asked of a fresh model, XGBoost would configure it here, and send what is due later.
        before = 0 if initial is None else booster.num_boosted_rounds() - first
        stopping = EarlyStopping(settings.early_stopping_rounds, before)
        if first:
            stopping.take_up(booster)
        for number in range(first, last):
            if stopping.is_over(number - 1):
                break
            record = self._round(booster, number)
            rounds.append(record)
            stopping.note(booster, record.round, record.metrics)
            self.on_round(record, booster)
        self._enter(Phase.FINISH, last)
        return TrainingResult(bytes(booster.save_raw("json")), rounds, stopping.best_round, stopping.best_score)

    def _round(self, booster: xgb.Booster, number: int) -> RoundRecord:
        started, handled, waited = time.perf_counter(), self.handler.seconds, self.channel.network_seconds
        self._enter(Phase.UPDATE, number)
        self.rows.begin_update(number)
        booster.update(self.rows.matrix, number)
        self.rows.end_update()
        if self.on_tree is not None:
            self.on_tree(booster, number)
        metrics = {}
        if self.task.shape.eval_metrics and self.task.shape.n_eval_sets:
            self._enter(Phase.EVALUATE, number)
            metrics = parse_metrics(booster.eval_set(list(self.eval_sets), number))
        total = time.perf_counter() - started
        handled, waited = self.handler.seconds - handled, self.channel.network_seconds - waited
        return RoundRecord(number, metrics, total, total - handled, handled - waited, waited)

    def _enter(self, phase: Phase, number: int) -> None:
        moment = TrainingStep(phase, self.task.settings.moments_before + number)
        self.mediator.enter(moment)
        self.channel.moment = moment
