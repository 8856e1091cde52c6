"""The catalogue of vertical training: what XGBoost 3.2 says at the active party in column split.

One XGBoost, rank 0, has the label; its mediator answers for every other rank. ``VerticalGrammar.classify`` names the
messages in the order in which XGBoost sends them and refuses all others, as the horizontal catalogue does. How many
nodes a level has follows from the data: the grammar bounds those sizes, and the engine (vertical/active/engine.py),
which follows the growth of each tree, checks them exactly.

Nothing here leaves the process by itself. Feature names do not pass through XGBoost (they would be sent), and neither
does the callback for early stopping: their messages are unknown here, hence refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.catalogue import (
    MAX_LEAVES,
    MAX_MODEL_PARAMETERS,
    Dtype,
    KindFacts,
    MessageKind,
    Phase,
    TrainingStep,
)
from nvflare_plugins.wire.expand_entries import ENTRY_SIZE, LONGEST_ENTRY, SHORTEST_ENTRY, category_bytes

MAX_NODES = 2 * 256  # XGBoost splits at most 256 nodes at once and then evaluates their children
MAX_DECISION_BYTES = 1 << 40
FOREIGN_TYPE = b"float"
"""What rank 0 is told of columns of other parties: their owners divide the rows, whatever the split is."""
_MAX, _SUM, _AND, _OR = 0, 2, 3, 4


class VerticalKind(MessageKind):
    """What a message of rank 0 is about; numbered in the order of wire/PROTOCOL.md."""

    COLUMN_COUNTS = KindFacts(1, False, "columns of each rank")
    TOTAL_COLUMNS = KindFacts(2, False, "columns of all ranks")
    EMPTY_RANKS = KindFacts(3, False, "which ranks have no rows")
    FEATURE_COUNT = KindFacts(4, False, "number of features")
    ERROR_LENGTH = KindFacts(5, False, "length of an error text of the objective or metric; 0 is none")
    VALUE_LENGTH = KindFacts(6, False, "length of what rank 0 computed from the labels")
    BASE_SCORE = KindFacts(7, True, "first estimate from the labels")
    MODEL_PARAMETERS = KindFacts(8, True, "model parameters with the first estimate")
    GRADIENTS = KindFacts(9, True, "gradients of all rows")
    SAMPLER_SEED = KindFacts(10, False, "seed of the column sampler")
    SKETCH_COLUMNS = KindFacts(11, False, "columns of the sketch")
    ENTRY_COUNT = KindFacts(12, False, "bytes that announce the sizes of split candidates")
    ENTRY_SIZES = KindFacts(13, False, "sizes of split candidates")
    ENTRY_BYTES = KindFacts(14, False, "bytes of all split candidates")
    ENTRIES = KindFacts(15, True, "split candidates with gradient sums")
    ROW_DECISIONS = KindFacts(16, True, "which rows of the split nodes go left")
    ROW_MISSING = KindFacts(17, True, "which rows of the split nodes lack the value")
    LEAF_VALUES = KindFacts(18, True, "leaves set to residual quantiles")
    TREE_DECISIONS = KindFacts(19, True, "which rows go left at each node of finished trees")
    TREE_MISSING = KindFacts(20, True, "which rows lack the value at each node of finished trees")
    METRIC = KindFacts(21, True, "value of an evaluation metric")
    TYPE_COUNT = KindFacts(22, False, "bytes that announce the lengths of column types")
    TYPE_SIZES = KindFacts(23, False, "lengths of column types")
    TYPE_BYTES = KindFacts(24, False, "bytes of all column types")
    TYPES = KindFacts(25, False, "column types: numbers or categories")


@dataclass(frozen=True, slots=True)
class VerticalShape:
    """Facts that fix the size and order of every message of one vertical training.

    Attributes:
        world: ranks that XGBoost believes in.
        matrix_rows: rows of each DMatrix in the order of construction; the first one is for training.
        estimates_base_score: neither base_score nor a model to continue from is given.
        predicts_training: XGBoost's prediction cache does not hold the training rows, as with several trees at once.
        eval_sets: positions in ``matrix_rows`` of the sets to evaluate, in order.
        column_seed: rank 0 broadcasts a seed for the columns, as XGBoost 3.2 does.
        most_nodes: most nodes of all trees that one prediction walks through.
        most_categories: of the active party's categorical column with most; 0 without one.
        own_types: XGBoost's types of the active party's columns; none if all are of numbers.
        n_foreign: columns of the passive parties.
    """

    world: int
    matrix_rows: tuple[int, ...]
    n_outputs: int
    trees_per_round: int
    adaptive_leaf: bool
    estimates_base_score: bool
    continued: bool
    predicts_training: bool
    eval_sets: tuple[int, ...]
    n_metrics: int
    column_seed: bool
    most_nodes: int = 1 << 30
    most_categories: int = 0
    own_types: tuple[str, ...] = ()
    n_foreign: int = 0

    @property
    def longest_entry(self) -> int:
        """Return the most bytes of one split candidate of rank 0."""
        return LONGEST_ENTRY + category_bytes(self.most_categories)


@dataclass(frozen=True, slots=True)
class VerticalMessage:
    """One classified message of rank 0."""

    kind: VerticalKind
    n_values: int
    moment: TrainingStep
    reply_size: int


@dataclass(frozen=True, slots=True)
class _Expected:
    kind: VerticalKind
    call: str
    dtype: int
    op: int
    sizes: range
    optional: bool = False

    def matches(self, call: str, dtype: int, op: int, size: int) -> bool:
        if call != self.call or size not in self.sizes:
            return False
        return call != "Allreduce" or (dtype == self.dtype and op == self.op)

    def __str__(self) -> str:
        sizes = f"{self.sizes.start}" if len(self.sizes) == 1 else f"{self.sizes.start} to {self.sizes[-1]}"
        return f"{self.kind.name} ({self.call} {sizes} bytes)"


def _exactly(size: int) -> range:
    return range(size, size + 1)


def _reduce(kind: VerticalKind, dtype: Dtype, op: int, sizes: range, optional: bool = False) -> _Expected:
    return _Expected(kind, "Allreduce", dtype, op, sizes, optional)


def _broadcast(kind: VerticalKind, sizes: range) -> _Expected:
    return _Expected(kind, "Broadcast", 0, 0, sizes)


def _gather(kind: VerticalKind, call: str, sizes: range) -> _Expected:
    return _Expected(kind, call, 0, 0, sizes)


_K = VerticalKind
_NO_ERROR = _broadcast(_K.ERROR_LENGTH, _exactly(8))
_COUNT = _broadcast(_K.VALUE_LENGTH, _exactly(8))
_ENTRY_HEAD = _gather(_K.ENTRY_COUNT, "Allgather", _exactly(8))
_ITEM_SIZE = {
    _K.GRADIENTS: 8,
    _K.ENTRY_SIZES: 8,
    _K.BASE_SCORE: 4,
    _K.LEAF_VALUES: 4,
    _K.EMPTY_RANKS: 4,
    _K.ROW_DECISIONS: 1,
    _K.ROW_MISSING: 1,
    _K.TREE_DECISIONS: 1,
    _K.TREE_MISSING: 1,
}


class VerticalGrammar:
    """A strict state machine over the messages of rank 0."""

    def __init__(self, shape: VerticalShape):
        self._shape = shape
        self._moment = TrainingStep(Phase.SETUP)
        self._queue = [message for _ in shape.matrix_rows for message in self._matrix()]
        self._growing = False
        self._after_entries = False
        self._n_entries = 0
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
        gradients = 8 * shape.matrix_rows[0] * shape.n_outputs
        leaves = 4 * MAX_LEAVES if shape.adaptive_leaf else 0
        tree_bits = -(-max(shape.matrix_rows) * shape.most_nodes // 8) + 8
        return max(gradients, leaves, tree_bits, 4 * shape.world, shape.longest_entry * MAX_NODES, MAX_MODEL_PARAMETERS)

    def enter(self, moment: TrainingStep) -> None:
        """Announce the next phase.

        Raises:
            ProtocolError: the phase before was not complete, or rounds go backwards.
        """
        self._check_complete()
        if moment.round < self._moment.round:
            raise ProtocolError(f"phase {moment} does not follow {self._moment}")
        self._moment = moment
        self._growing = self._after_entries = False
        self._leaves_done = 0
        self._queue = []
        if moment.phase is Phase.UPDATE:
            self._queue = self._update(first=not self._initialised)
            self._initialised = True
        elif moment.phase is Phase.EVALUATE:
            self._queue = [message for position in self._shape.eval_sets for message in self._evaluation(position)]

    def classify(self, call: str, dtype: int, op: int, size: int) -> VerticalMessage:
        """Name the message that came and advance; arguments as for the horizontal catalogue.

        Raises:
            ProtocolError: no message of this form is allowed now.
        """
        allowed = self._allowed()
        expected = next((e for e in allowed if e.matches(call, dtype, op, size)), None)
        if expected is None:
            raise ProtocolError(
                f"unknown message in phase {self._moment}: {call} (dtype {dtype}, op {op}) of {size} bytes; due is: "
                f"{', '.join(map(str, allowed)) or 'the end of the phase'}. What the catalogue of XGBoost does not "
                "hold is refused: check that the parameters of the job are on the supported list of jobs/README.md"
            )
        self._advance(expected, size)
        n_values = size // _ITEM_SIZE.get(expected.kind, 8)
        return VerticalMessage(expected.kind, n_values, self._moment, self._reply_size(expected, size))

    def _reply_size(self, expected: _Expected, size: int) -> int:
        if expected.call == "Broadcast":
            return 0
        if expected.call == "Allreduce":
            return size
        if expected.kind is _K.TYPE_SIZES:
            return size + 8 * self._shape.n_foreign
        if expected.kind is _K.TYPES:
            return size + len(FOREIGN_TYPE) * self._shape.n_foreign
        if expected.kind is _K.ENTRIES:
            return size + (self._shape.world - 1) * self._n_entries * ENTRY_SIZE
        return size * self._shape.world

    def _check_complete(self) -> None:
        due = [message for message in self._queue if not message.optional]
        leaves_due = self._growing and self._shape.adaptive_leaf and self._leaves_done < self._shape.trees_per_round
        if due or leaves_due or (self._growing and not self._n_entries):
            raise ProtocolError(f"XGBoost left phase {self._moment} before its end")

    def _allowed(self) -> list[_Expected]:
        if self._queue:
            mandatory = next((i for i, message in enumerate(self._queue) if not message.optional), len(self._queue) - 1)
            return self._queue[: mandatory + 1]
        if not self._growing:
            return []
        allowed = []
        if not self._leaves_done:
            allowed.append(_ENTRY_HEAD)
            if self._after_entries:
                allowed.append(_reduce(_K.ROW_DECISIONS, Dtype.UINT8, _OR, self._row_bits()))
        if self._shape.adaptive_leaf and self._leaves_done < self._shape.trees_per_round:
            allowed.append(_NO_ERROR)
        return allowed

    def _advance(self, expected: _Expected, size: int) -> None:
        kind = expected.kind
        if self._queue:
            self._queue = self._queue[self._queue.index(expected) + 1 :]
        elif kind is _K.ERROR_LENGTH:
            self._queue = [_broadcast(_K.LEAF_VALUES, range(4, 4 * MAX_LEAVES + 1, 4))]
            self._leaves_done += 1
        if kind is _K.ENTRY_COUNT:
            self._after_entries = False
            self._queue = [_gather(_K.ENTRY_SIZES, "AllgatherV", range(8, 8 * MAX_NODES + 1, 8))]
        elif kind is _K.ENTRY_SIZES:
            self._n_entries = size // 8
            bounds = range(SHORTEST_ENTRY * self._n_entries, self._shape.longest_entry * self._n_entries + 1)
            self._queue = [
                _gather(_K.ENTRY_BYTES, "Allgather", _exactly(8)),
                _gather(_K.ENTRIES, "AllgatherV", bounds),
            ]
        elif kind is _K.ENTRIES:
            self._after_entries = True
        elif kind is _K.ROW_DECISIONS:
            self._queue = [_reduce(_K.ROW_MISSING, Dtype.UINT8, _AND, _exactly(size))]
        elif kind is _K.TREE_DECISIONS:
            self._queue.insert(0, _reduce(_K.TREE_MISSING, Dtype.UINT8, _AND, _exactly(size)))
        if self._moment.phase is Phase.UPDATE and not self._queue and not self._growing:
            self._growing = True

    def _row_bits(self) -> range:
        return _exactly(-(-self._shape.matrix_rows[0] // 8))

    def _matrix(self) -> list[_Expected]:
        return [
            _gather(_K.COLUMN_COUNTS, "Allgather", _exactly(8)),
            _reduce(_K.TOTAL_COLUMNS, Dtype.UINT64, _SUM, _exactly(8)),
            _reduce(_K.EMPTY_RANKS, Dtype.INT32, _SUM, _exactly(4 * self._shape.world)),
            *self._types(),
        ]

    def _types(self) -> list[_Expected]:
        types = self._shape.own_types
        if not types:
            return []
        return [
            _gather(_K.TYPE_COUNT, "Allgather", _exactly(8)),
            _gather(_K.TYPE_SIZES, "AllgatherV", _exactly(8 * len(types))),
            _gather(_K.TYPE_BYTES, "Allgather", _exactly(8)),
            _gather(_K.TYPES, "AllgatherV", _exactly(sum(map(len, types)))),
        ]

    def _update(self, first: bool) -> list[_Expected]:
        shape = self._shape
        self._n_entries = 0
        due = []
        if first and not shape.continued:
            due.append(_reduce(_K.FEATURE_COUNT, Dtype.UINT32, _MAX, _exactly(4)))
        if first and shape.estimates_base_score:
            due += [_NO_ERROR, _COUNT, _broadcast(_K.BASE_SCORE, _exactly(4 * shape.n_outputs))]
            due.append(_broadcast(_K.MODEL_PARAMETERS, range(1, MAX_MODEL_PARAMETERS + 1)))
        if shape.predicts_training or (first and shape.continued):
            due.append(self._tree_bits(shape.matrix_rows[0]))
        gradients = _broadcast(_K.GRADIENTS, _exactly(8 * shape.matrix_rows[0] * shape.n_outputs))
        due += [_NO_ERROR, _COUNT, gradients]
        if first:
            if shape.column_seed:
                due.append(_broadcast(_K.SAMPLER_SEED, _exactly(4)))
            due.append(_reduce(_K.SKETCH_COLUMNS, Dtype.UINT32, _MAX, _exactly(4)))
        return [*due, _ENTRY_HEAD]

    def _evaluation(self, position: int) -> list[_Expected]:
        metric = [_NO_ERROR, _broadcast(_K.METRIC, _exactly(8))]
        return [self._tree_bits(self._shape.matrix_rows[position]), *metric * self._shape.n_metrics]

    @staticmethod
    def _tree_bits(n_rows: int) -> _Expected:
        # The trees since the last prediction of this set; none if XGBoost's cache holds it.
        sizes = range(-(-n_rows // 8), MAX_DECISION_BYTES)
        return _reduce(_K.TREE_DECISIONS, Dtype.UINT8, _OR, sizes, optional=True)
