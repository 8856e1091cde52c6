"""The catalogue: every message of XGBoost 3.2 and 3.3 in horizontal training, by phase, call, dtype, reduce op, size.

This is the only code that looks into XGBoost's buffers. ``HorizontalGrammar.classify`` takes the messages in the order
in which XGBoost sends them and names each one; what does not fit aborts the job, because a message that nobody knows
could carry anything. The order was read from XGBoost's source and recorded from real runs (tests/golden); releases
differ by ``TrainingShape.column_seed`` alone.

Several kinds need no network: what they ask for is public and was agreed before training, or follows from what the
site already holds. They are answered by the mediator (``Answer.LOCAL``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.envelope import CURVE_METRICS, BaseScoreSource, Kind, Phase, TrainingStep

MAX_LEAVES = 1 << 20
MAX_MESSAGE_BYTES = (1 << 31) - 1  # of protobuf
FRAME_BYTES = 1 << 10  # the fields of a call beside its buffer
LARGEST_BUFFER_BYTES = MAX_MESSAGE_BYTES - FRAME_BYTES
MAX_MODEL_PARAMETERS = 1 << 16


class Dtype(IntEnum):
    """Element types as XGBoost numbers them on the wire."""

    FLOAT32 = 1
    FLOAT64 = 2
    INT32 = 6
    INT64 = 7
    UINT32 = 10
    UINT64 = 11

    @property
    def numpy(self) -> str:
        """Little-endian numpy dtype string."""
        return {1: "<f4", 2: "<f8", 6: "<i4", 7: "<i8", 10: "<u4", 11: "<u8"}[self.value]

    @property
    def size(self) -> int:
        """Bytes per element."""
        return int(self.numpy[-1])


class Op(IntEnum):
    """Reduce operations as XGBoost numbers them."""

    MAX = 0
    MIN = 1
    SUM = 2


class Answer(Enum):
    """How the mediator comes to a reply."""

    LOCAL = "answered at the site"
    SUM = "protected sum over the sites"


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """Public facts that fix the size and order of every message of one training."""

    n_sites: int
    n_features: int
    n_bins: int  # over all features
    n_outputs: int  # classes of a multiclass objective, else 1
    trees_per_round: int  # outputs x num_parallel_tree; num_parallel_tree for vector leaves
    vector_leaf: bool  # multi_strategy=multi_output_tree
    max_built_nodes: int  # most histograms in one message; 1 for lossguide
    weighted: bool
    adaptive_leaf: bool  # absolute and quantile error
    base_score: BaseScoreSource
    eval_metrics: tuple[str, ...]
    n_eval_sets: int
    column_seed: bool  # rank 0 broadcasts a seed for the columns, as XGBoost 3.2 does


@dataclass(frozen=True, slots=True)
class Message:
    """One classified message of XGBoost."""

    kind: Kind
    answer: Answer
    dtype: Dtype | None
    n_values: int
    moment: TrainingStep
    reply_size: int  # bytes that XGBoost expects; it does not check
    metric: str = ""  # which one, for METRIC


@dataclass(frozen=True, slots=True)
class _Expected:
    kind: Kind
    answer: Answer
    call: str
    dtype: Dtype | None
    op: Op | None
    sizes: range  # allowed buffer sizes in bytes
    metric: str = ""

    def matches(self, call: str, dtype: int, op: int, size: int) -> bool:
        if call != self.call or size not in self.sizes:
            return False
        return self.dtype is None or (dtype == self.dtype and op == self.op)

    def __str__(self) -> str:
        step = f"{self.sizes.start}" if len(self.sizes) == 1 else f"{self.sizes.start} to {self.sizes[-1]}"
        what = f"{self.dtype.name} {self.op.name}" if self.dtype is not None and self.op is not None else ""
        return f"{self.kind.name} ({self.call} {what} {step} bytes)"


def _exactly(size: int) -> range:
    return range(size, size + 1)


def _local(kind: Kind, dtype: Dtype, op: Op, size: int) -> _Expected:
    return _Expected(kind, Answer.LOCAL, "Allreduce", dtype, op, _exactly(size))


def _broadcast(kind: Kind, most: int) -> _Expected:
    # Rank 0 sends the content, every other rank an empty buffer. The content follows from what all sites agreed on
    # and from sums that all sites received, so it is the same everywhere and need not travel.
    return _Expected(kind, Answer.LOCAL, "Broadcast", None, None, range(most + 1))


def _sum(kind: Kind, dtype: Dtype, size: int, metric: str = "") -> _Expected:
    return _Expected(kind, Answer.SUM, "Allreduce", dtype, Op.SUM, _exactly(size), metric)


class Answers(Protocol):
    """Answers the messages of one XGBoost. Units: ``seconds`` that it has taken so far."""

    seconds: float

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """Return the reply to one message."""


class HorizontalGrammar:
    """A strict state machine over the messages of one horizontal training.

    The state is the position inside the phase. After a histogram of one node XGBoost may go on with the same tree or
    start the next one with the same message; the message after that tells, and both readings are equally private.
    """

    def __init__(self, shape: TrainingShape):
        self._shape = shape
        self._moment = TrainingStep(Phase.SETUP)
        self._queue: list[_Expected] = []  # messages due in exactly this order
        self._growing = False  # between the root of a tree and the end of the update
        self._maybe_root = False  # the last message may have been the root of the next tree
        self._trees_begun = 0
        self._leaves_done = 0
        self._initialised = False

    @property
    def moment(self) -> TrainingStep:
        """The announced phase and round."""
        return self._moment

    @property
    def largest_message_bytes(self) -> int:
        """The longest buffer of any message."""
        shape = self._shape
        histograms = 16 * shape.n_bins * max(shape.max_built_nodes, 1)
        leaves = 4 * MAX_LEAVES if shape.adaptive_leaf else 0
        return max(histograms, 24 * shape.n_outputs, leaves, MAX_MODEL_PARAMETERS)

    def enter(self, moment: TrainingStep) -> None:
        """Announce the next phase.

        Raises:
            ProtocolError: the phase before was not complete, or rounds go backwards.
        """
        self._check_complete()
        if moment.round < self._moment.round:
            raise ProtocolError(f"phase {moment} does not follow {self._moment}")
        self._moment = moment
        self._growing = self._maybe_root = False
        self._trees_begun = self._leaves_done = 0
        self._queue = []
        if moment.phase is Phase.UPDATE:
            if not self._initialised:
                self._queue += self._first_estimate()
                self._initialised = True
            self._queue += self._root()
        elif moment.phase is Phase.EVALUATE:
            self._queue += self._evaluation()

    def classify(self, call: str, dtype: int, op: int, size: int) -> Message:
        """Name the message that came and advance.

        Args:
            call: one of the four gRPC calls.
            dtype: wire code of the element type, 0 where the call has none.
            op: wire code of the reduce operation, 0 where the call has none.
            size: bytes that XGBoost sent.

        Raises:
            ProtocolError: no message of this form is allowed now.
        """
        expected = next((e for e in self._allowed() if e.matches(call, dtype, op, size)), None)
        if expected is None:
            raise ProtocolError(
                f"unknown message in phase {self._moment}: {call} (dtype {dtype}, op {op}) of {size} bytes; due is: "
                f"{self._names()}. What the catalogue of XGBoost does not hold is refused: check that the "
                "parameters of the job are on the supported list of jobs/MODEL.md"
            )
        self._advance(expected, size)
        n_values = size // expected.dtype.size if expected.dtype is not None else size
        # An empty reply to a broadcast leaves every rank's own (equal) buffer as it is.
        reply_size = 0 if call == "Broadcast" else size
        return Message(
            expected.kind, expected.answer, expected.dtype, n_values, self._moment, reply_size, expected.metric
        )

    def _check_complete(self) -> None:
        unfinished = self._queue or (
            self._growing
            and (
                self._trees_begun < self._shape.trees_per_round
                or self._leaves_done < self._shape.trees_per_round * self._shape.adaptive_leaf
            )
        )
        if unfinished:
            raise ProtocolError(f"XGBoost left phase {self._moment} while this was due: {self._names()}")

    def _allowed(self) -> list[_Expected]:
        if self._queue:
            return self._queue[:1]
        if not self._growing:
            return []
        shape = self._shape
        more_trees = self._trees_begun < shape.trees_per_round
        allowed = []
        if self._maybe_root and more_trees:
            allowed.append(_sum(Kind.ROOT_SUM, Dtype.FLOAT64, 16))
        if more_trees and shape.vector_leaf:
            allowed.append(self._root()[0])
        if not self._leaves_done:
            allowed.append(self._level())
        if shape.adaptive_leaf and not more_trees and self._leaves_done < shape.trees_per_round:
            allowed.append(_local(Kind.LEAF_COUNT, Dtype.UINT64, Op.MAX, 8))
        return allowed

    def _advance(self, expected: _Expected, size: int) -> None:
        kind = expected.kind
        from_queue = bool(self._queue)
        if from_queue:
            self._queue.pop(0)
        if kind is Kind.ROOT_SUM:
            self._trees_begun += 1
            self._growing, self._maybe_root = True, False
            if self._shape.vector_leaf and not from_queue:
                self._queue += self._root()[1:]
        elif kind is Kind.HISTOGRAM:
            self._maybe_root = self._growing and size == 16 * self._shape.n_bins and not self._shape.vector_leaf
        elif kind is Kind.LEAF_COUNT:
            self._leaves_done += 1
            anything = range(4, 4 * MAX_LEAVES + 1, 4)
            self._queue += [
                _Expected(Kind.LEAF_VALID, Answer.SUM, "Allreduce", Dtype.INT32, Op.SUM, anything),
                _Expected(Kind.LEAF_QUANTILE, Answer.SUM, "Allreduce", Dtype.FLOAT32, Op.SUM, anything),
            ]
        elif kind is Kind.LEAF_VALID:
            self._queue[0] = _sum(Kind.LEAF_QUANTILE, Dtype.FLOAT32, size)

    def _names(self) -> str:
        return ", ".join(map(str, self._allowed())) or "the end of the phase"

    def _first_estimate(self) -> list[_Expected]:
        shape, source = self._shape, self._shape.base_score
        if source is BaseScoreSource.CONTINUED:
            return self._column_seed()
        due = [_local(Kind.FEATURE_COUNT, Dtype.UINT32, Op.MAX, 4)]
        if source is BaseScoreSource.MEAN and not shape.weighted:
            due.append(_sum(Kind.ROW_COUNT, Dtype.INT64, 8))
        elif source in (BaseScoreSource.MEAN, BaseScoreSource.MEDIAN, BaseScoreSource.CLASSES):
            due.append(_sum(Kind.WEIGHT_TOTAL, Dtype.FLOAT64, 8))
        if source is BaseScoreSource.STUMP:
            due.append(_sum(Kind.STUMP_SUM, Dtype.FLOAT64, 16 * shape.n_outputs))
        elif source is not BaseScoreSource.GIVEN:
            due.append(_sum(Kind.LABEL_MEAN, Dtype.FLOAT32, 4 * shape.n_outputs))
        if source is not BaseScoreSource.GIVEN:
            due.append(_broadcast(Kind.MODEL_PARAMETERS, MAX_MODEL_PARAMETERS))
        return due + self._column_seed()

    def _column_seed(self) -> list[_Expected]:
        return [_broadcast(Kind.SAMPLER_SEED, 4)] if self._shape.column_seed else []

    def _root(self) -> list[_Expected]:
        shape = self._shape
        histogram = _sum(Kind.HISTOGRAM, Dtype.FLOAT64, 16 * shape.n_bins)
        if shape.vector_leaf:
            return [_sum(Kind.ROOT_SUM, Dtype.FLOAT64, 16 * shape.n_outputs)] + [histogram] * shape.n_outputs
        return [histogram, _sum(Kind.ROOT_SUM, Dtype.FLOAT64, 16)]

    def _level(self) -> _Expected:
        one = 16 * self._shape.n_bins
        sizes = range(one, one * self._shape.max_built_nodes + 1, one)
        return _Expected(Kind.HISTOGRAM, Answer.SUM, "Allreduce", Dtype.FLOAT64, Op.SUM, sizes)

    def _evaluation(self) -> list[_Expected]:
        due: list[_Expected] = []
        for metric in self._shape.eval_metrics:
            if metric in CURVE_METRICS:
                due.append(_local(Kind.METRIC_SIZE, Dtype.UINT64, Op.MAX, 16))
                n_parts = 2 if self._shape.n_outputs == 1 else 3 * self._shape.n_outputs
                due.append(_sum(Kind.METRIC, Dtype.FLOAT64, 8 * n_parts, metric))
            else:
                due.append(_sum(Kind.METRIC, Dtype.FLOAT64, 16, metric))
        return due * self._shape.n_eval_sets
