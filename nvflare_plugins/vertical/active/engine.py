"""The engine at the active party: answers its XGBoost for all other ranks.

To XGBoost it looks as if one more rank held the columns of all passive parties. Gradients are intercepted where
XGBoost would broadcast them; split candidates of the passive columns are found on opened sums; row decisions come from
the owners of the splits. Everything XGBoost does is followed and compared, and any disagreement ends the job.

Security: gradients, labels and XGBoost's model stay in this process. Passive parties get what ``messages.py`` holds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import JobAborted, ProtocolError
from nvflare_plugins.growth.arithmetic import SplitFormula
from nvflare_plugins.growth.sampling import ColumnSampler, XGBoostRandom, sampled_rows
from nvflare_plugins.growth.tree_parameters import TreeParameters
from nvflare_plugins.vertical.active.gradient_scale import GradientScale
from nvflare_plugins.vertical.active.party_sums import ROOT, PartySums
from nvflare_plugins.vertical.active.tree_growth import DISAGREE, EncodedGradients, TreeGrowth
from nvflare_plugins.vertical.message_sizes import check_predictions
from nvflare_plugins.vertical.model.tree_routing import PathWalker, TreeStructure
from nvflare_plugins.vertical.noised.plan import NoisePlan, PartyNoise
from nvflare_plugins.vertical.protocol.gradient_scheme import GRADIENT_BLOCK_ROWS, GradientOwner, Timer, untimed
from nvflare_plugins.vertical.protocol.links import Party
from nvflare_plugins.wire.catalogue import Phase, TrainingStep
from nvflare_plugins.wire.expand_entries import ENTRY_SIZE, ExpandEntry, pack_entry, unpack_entry
from nvflare_plugins.wire.vertical_catalogue import FOREIGN_TYPE, VerticalKind, VerticalMessage

WORLD = 2  # the active party, and one rank for all passive parties
_ROOT_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one training asks of the engine.

    Attributes:
        own_rounds: first rounds that use the active party's columns alone (Completely SecureBoost).
        guarded: passive parties may keep the sums of nodes; without them their features do not compete there.
        noised: how passive parties noise their sums; None where they are exact.
        n_metrics: metrics of each evaluation set.
        column_seed: XGBoost seeds one generator for all columns of the training, and says with what.
        eval_sets: numbers of the data sets to evaluate, in order; 0 is the training set.
        caches_training: XGBoost keeps its predictions of the training rows up to date while it trains.
    """

    params: TreeParameters
    seed: int
    n_outputs: int
    parallel_trees: int
    eval_sets: tuple[int, ...]
    n_metrics: int
    column_seed: bool
    caches_training: bool
    own_rounds: int = 0
    guarded: bool = False
    noised: NoisePlan | None = None
    deadline_s: float = 600.0


class ActiveEngine:
    """Handles the classified messages of one training (a ``Handler`` of the mediator)."""

    def __init__(
        self,
        settings: EngineSettings,
        parties: Sequence[Party],
        own_sets: Sequence[NDArray[np.float32]],
        owner: GradientOwner,
        scale: GradientScale,
        earlier_trees: Sequence[TreeStructure] = (),
        on_tree: Callable[[NDArray[np.int32]], None] = lambda leaf_of_row: None,
        timer: Timer = untimed,
    ):
        """Prepare for one training.

        Args:
            own_sets: the active party's columns of each data set. Shapes: float32[n_rows, n_own_columns] each.
            on_tree: called with the leaf of every training row when a tree is finished. Shapes: int32[n_rows].
            timer: measures the stage "engine": all that XGBoost waits for.
        """
        self._settings = settings
        self._parties = tuple(parties)
        self._own_sets = own_sets
        self._owner = owner
        self._scale = scale
        self._on_tree = on_tree
        self._timer = timer
        self._n_own = own_sets[0].shape[1]
        self._n_columns = parties[-1].columns.stop if parties else self._n_own
        self._n_rows = own_sets[0].shape[0]
        self._formula = SplitFormula(settings.params)
        monotone = settings.params.monotone
        self._monotone = np.array(monotone or [0] * self._n_columns, dtype=np.int8)
        self._walker = PathWalker(self._parties, self._n_own, settings.deadline_s)
        self._random = XGBoostRandom(settings.seed)
        self._sampler: ColumnSampler | None = None
        self._phase, self._round = Phase.SETUP, 0
        self._gradients = np.empty((0, 0, 2), dtype=np.float32)
        self._trees_begun = 0
        self._growth: TreeGrowth | None = None
        self._closed: set[str] = set()  # parties that give no sums any more
        self._root_sum = np.zeros(2)
        self._root_size = np.zeros(2)
        self._own_sizes = np.empty(0, dtype=np.int64)
        self._decisions = np.empty(0, dtype=bool)
        self._metrics_seen = 0
        self._present = np.empty(0, dtype=np.int64)  # bits of the last prediction that passive parties decided
        self._predicted = [0] * len(own_sets)  # trees that XGBoost's predictions of each set hold
        self.trees: list[TreeStructure] = list(earlier_trees)
        k = VerticalKind
        self._answers: dict[VerticalKind, Callable[[bytes], bytes]] = {
            k.COLUMN_COUNTS: self._column_counts,
            k.TOTAL_COLUMNS: self._total_columns,
            k.EMPTY_RANKS: lambda buffer: buffer,
            k.TYPE_COUNT: lambda buffer: buffer + struct.pack("<Q", 8 * self.n_foreign),
            k.TYPE_SIZES: lambda buffer: buffer + struct.pack("<q", len(FOREIGN_TYPE)) * self.n_foreign,
            k.TYPE_BYTES: lambda buffer: buffer + struct.pack("<Q", len(FOREIGN_TYPE) * self.n_foreign),
            k.TYPES: lambda buffer: buffer + FOREIGN_TYPE * self.n_foreign,
            k.FEATURE_COUNT: self._feature_count,
            k.SKETCH_COLUMNS: self._feature_count,
            k.ERROR_LENGTH: self._no_error,
            k.VALUE_LENGTH: _kept,
            k.BASE_SCORE: _kept,
            k.MODEL_PARAMETERS: _kept,
            k.LEAF_VALUES: _kept,
            k.METRIC: self._metric,
            k.GRADIENTS: self._take_gradients,
            k.SAMPLER_SEED: self._take_seed,
            k.ENTRY_COUNT: self._entry_count,
            k.ENTRY_SIZES: self._entry_sizes,
            k.ENTRY_BYTES: self._entry_bytes,
            k.ENTRIES: self._entries,
            k.ROW_DECISIONS: self._row_decisions,
            k.ROW_MISSING: self._row_missing,
            k.TREE_DECISIONS: self._tree_decisions,
            k.TREE_MISSING: self._tree_missing,
        }

    @property
    def n_foreign(self) -> int:
        """Columns of passive parties."""
        return int(self._n_columns - self._n_own)

    @property
    def trees_per_round(self) -> int:
        """Trees of one boosting round."""
        return self._settings.n_outputs * self._settings.parallel_trees

    @property
    def eval_sets(self) -> tuple[int, ...]:
        """Numbers of the data sets that are evaluated."""
        return self._settings.eval_sets

    def enter(self, moment: TrainingStep) -> None:
        """Announce the next phase of the training loop."""
        self._phase, self._round = moment.phase, moment.round
        self._metrics_seen = 0

    def answer(self, message: VerticalMessage, buffer: bytes) -> bytes:
        """Return the reply to one message of XGBoost."""
        with self._timer("engine"):
            return self._answers[message.kind](buffer)

    def check_predictions(self, data_sets: Sequence[int]) -> None:
        """Refuse sets whose rows XGBoost could not ask about, before it does. Raises: ConfigurationError."""
        for data_set in data_sets:
            n_nodes = sum(tree.n_nodes for tree in self.trees[self._predicted[data_set] :])
            check_predictions(self._own_sets[data_set].shape[0], n_nodes)

    def check_round(self, model_trees: Sequence[TreeStructure]) -> None:
        """Compare the trees of the round just finished with those that XGBoost made.

        Raises:
            ProtocolError: a tree is not finished, or differs in any node.
        """
        n = self.trees_per_round
        if self._trees_begun != n or self._growth is not None or len(model_trees) != n:
            raise ProtocolError(DISAGREE.format("the number of trees"))
        for ours, theirs in zip(self.trees[-n:], model_trees, strict=True):
            same = (
                np.array_equal(ours.left, theirs.left)
                and np.array_equal(ours.right, theirs.right)
                and np.array_equal(ours.feature, theirs.feature)
                and np.array_equal(ours.threshold, theirs.threshold)
                and np.array_equal(ours.default_left, theirs.default_left)
                and ours.categories == theirs.categories
            )
            if not same:
                raise ProtocolError(DISAGREE.format("a finished tree"))

    # -- setup --------------------------------------------------------------------------------------------------------

    def _column_counts(self, buffer: bytes) -> bytes:
        if int.from_bytes(buffer, "little") != self._n_own:
            raise ProtocolError(DISAGREE.format("the active party's columns"))
        return struct.pack("<2Q", self._n_own, self.n_foreign)

    def _total_columns(self, buffer: bytes) -> bytes:
        return struct.pack("<Q", self._n_columns)

    def _feature_count(self, buffer: bytes) -> bytes:
        if int.from_bytes(buffer, "little") != self._n_columns:
            raise ProtocolError(DISAGREE.format("the number of columns"))
        return buffer

    def _no_error(self, buffer: bytes) -> bytes:
        if any(buffer):
            # XGBoost would broadcast its error text with a stack trace; it stays here.
            raise JobAborted("XGBoost refused the labels or weights of the active party")
        return b""

    def _metric(self, buffer: bytes) -> bytes:
        self._metrics_seen += 1
        return b""

    # -- one round ----------------------------------------------------------------------------------------------------

    def _take_gradients(self, buffer: bytes) -> bytes:
        shape = (self._n_rows, self._settings.n_outputs, 2)
        self._gradients = np.frombuffer(buffer, dtype="<f4").reshape(shape)
        self._trees_begun = 0
        if self._sampler is None and not self._settings.column_seed:
            self._sampler = ColumnSampler(self._settings.params, self._n_columns, self._fresh_generator)
        if self._sampler is not None:
            self._begin_tree(self._sampler)
        return b""

    def _fresh_generator(self) -> XGBoostRandom:
        return XGBoostRandom(self._random.draw())

    def _take_seed(self, buffer: bytes) -> bytes:
        seed = int.from_bytes(buffer, "little")
        if seed != self._random.draw():
            raise ProtocolError(DISAGREE.format("the sequence of random numbers"))
        generator = XGBoostRandom(seed)
        self._sampler = ColumnSampler(self._settings.params, self._n_columns, lambda: generator)
        self._sampler.begin_tree()  # XGBoost 3.2 samples once more when it sets itself up
        self._begin_tree(self._sampler)
        return b""

    def _begin_tree(self, sampler: ColumnSampler) -> None:
        settings, params = self._settings, self._settings.params
        g, h = self._gradients[:, self._trees_begun // settings.parallel_trees].T
        if params.subsample < 1:
            keep = sampled_rows(self._n_rows, params.subsample, self._random.draw())
            g, h = np.where(keep, g, np.float32(0)), np.where(keep, h, np.float32(0))
        sampler.begin_tree()
        self._trees_begun += 1
        self._root_sum = np.array([values.sum(dtype=np.float64) for values in (g, h)])
        self._root_size = np.array([np.abs(values).sum(dtype=np.float64) for values in (g, h)])
        encoded = self._scale.encode(g, h)
        columns = sampler.tree_columns()
        if self._round < settings.own_rounds:
            columns[self._n_own :] = False
        noise = {party.name: self._noise_of(party) for party in self._parties}
        for party in self._parties:
            self._cap_features(party, columns, noise[party.name])
        parties = [
            PartySums(
                party,
                len(self.trees),
                columns,
                self._owner,
                self._formula,
                encoded.unit,
                self._monotone,
                settings.deadline_s,
                settings.guarded,
                noise[party.name],
            )
            for party in self._parties
            if columns[party.columns].any() and party.name not in self._closed
        ]
        if parties:
            self._send_gradients(encoded, parties)
        columns_of, own = sampler.node_columns, self._own_sets[0]
        self._growth = TreeGrowth(params, self._formula, encoded, parties, self._n_columns, columns_of, own)

    def _noise_of(self, party: Party) -> PartyNoise | None:
        noised = self._settings.noised
        return None if noised is None else noised.of_party(len(party.schema.n_bins))

    def _cap_features(self, party: Party, columns: NDArray[np.bool_], noise: PartyNoise | None) -> None:
        """Draw which of a party's features a noised tree may use, where it has more: anew for each, from the seed.

        Shapes: columns: bool[n_columns], of the tree; changed in place.
        """
        mine = np.flatnonzero(columns[party.columns])
        if noise is None or mine.size <= noise.features_per_tree:
            return
        keys = [self._settings.seed & 0xFFFFFFFF, len(self.trees), party.first_column]
        drawn = np.random.default_rng(keys).permutation(mine)[noise.features_per_tree :]
        columns[party.columns.start + drawn] = False

    def _send_gradients(self, encoded: EncodedGradients, parties: Sequence[PartySums]) -> None:
        """Encrypt block by block, so that one is on its way while the next is made, and ask for the root."""
        self._owner.begin_tree(encoded.g, encoded.h)
        for start in range(0, self._n_rows, GRADIENT_BLOCK_ROWS):
            block = slice(start, start + GRADIENT_BLOCK_ROWS)
            protected = self._owner.encrypt(encoded.g[block], encoded.h[block])
            for sums in parties:
                sums.send(protected)
        for sums in parties:
            sums.ask([], n_rows=self._n_rows)
            sums.party.link.flush()

    def _end_tree_if_finished(self) -> None:
        growth = self._growing()
        if not growth.is_finished:
            return
        self.trees.append(growth.structure())
        self._on_tree(growth.leaf_of_row)
        self._closed.update(sums.party.name for sums in growth.parties if sums.is_closed)
        self._growth = None
        if self._trees_begun < self.trees_per_round and self._sampler is not None:
            self._begin_tree(self._sampler)
        elif self._settings.caches_training:
            self._predicted[0] = len(self.trees)

    # -- split candidates ---------------------------------------------------------------------------------------------

    def _growing(self) -> TreeGrowth:
        if self._growth is None:
            raise ProtocolError(DISAGREE.format("the end of a tree"))
        return self._growth

    def _entry_count(self, buffer: bytes) -> bytes:
        n_pending = len(self._growing().pending)
        if int.from_bytes(buffer, "little") != 8 * n_pending or not n_pending:
            raise ProtocolError(DISAGREE.format("the nodes to evaluate"))
        return buffer * WORLD

    def _entry_sizes(self, buffer: bytes) -> bytes:
        self._own_sizes = np.frombuffer(buffer, dtype="<i8")
        if self._own_sizes.size != len(self._growing().pending) or (self._own_sizes <= 0).any():
            raise ProtocolError(DISAGREE.format("the nodes to evaluate"))
        return buffer + struct.pack("<q", ENTRY_SIZE) * self._own_sizes.size

    def _entry_bytes(self, buffer: bytes) -> bytes:
        if int.from_bytes(buffer, "little") != self._own_sizes.sum():
            raise ProtocolError(DISAGREE.format("the size of its split candidates"))
        return buffer + struct.pack("<Q", ENTRY_SIZE * self._own_sizes.size)

    def _entries(self, buffer: bytes) -> bytes:
        if len(buffer) != self._own_sizes.sum():
            raise ProtocolError(DISAGREE.format("the size of its split candidates"))
        parts = np.split(np.frombuffer(buffer, dtype=np.uint8), np.cumsum(self._own_sizes)[:-1])
        own = [unpack_entry(part.tobytes()) for part in parts]
        self._check_root(own[0])
        offers = self._growing().offers(own)
        self._end_tree_if_finished()
        return buffer + b"".join(map(pack_entry, offers))

    def _check_root(self, entry: ExpandEntry) -> None:
        """Compare XGBoost's sum of all gradients with the engine's: they differ if other rows were sampled."""
        if entry.node != ROOT or not entry.loss_change > 0:
            return
        theirs = np.add(entry.left_sum, entry.right_sum)
        if (np.abs(theirs - self._root_sum) > _ROOT_TOLERANCE * self._root_size).any():
            raise ProtocolError(DISAGREE.format("the sum of the gradients"))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _row_decisions(self, buffer: bytes) -> bytes:
        growth = self._growing()
        if not growth.applied:
            raise ProtocolError(DISAGREE.format("the nodes to split"))
        self._decisions = _bits(buffer, self._n_rows)
        growth.passive_decisions(self._decisions)
        return np.packbits(self._decisions, bitorder="little").tobytes()

    def _row_missing(self, buffer: bytes) -> bytes:
        missing = _bits(buffer, self._n_rows)
        self._growing().divide(self._decisions, missing)
        self._end_tree_if_finished()
        return np.packbits(missing, bitorder="little").tobytes()

    def _tree_decisions(self, buffer: bytes) -> bytes:
        """Add the passive parties' decisions on the paths of a data set's rows through new trees."""
        if self._growth is not None:
            raise ProtocolError(DISAGREE.format("the end of a tree"))
        data_set = self._set_in_question()
        first, n_rows = self._predicted[data_set], self._own_sets[data_set].shape[0]
        new = self.trees[first:]
        sizes = np.array([tree.n_nodes for tree in new], dtype=np.int64)
        if len(buffer) != -(-int(n_rows * sizes.sum()) // 8):
            raise ProtocolError(DISAGREE.format("the trees to predict with"))
        starts = n_rows * (np.cumsum(sizes) - sizes)
        _, decided = self._walker.walk(new, first, data_set, self._own_sets[data_set])
        reply = np.frombuffer(buffer, dtype=np.uint8).copy()
        for d in decided:
            here = starts[d.tree] + d.rows[d.goes_left] * sizes[d.tree] + d.node
            np.bitwise_or.at(reply, here >> 3, (1 << (here & 7)).astype(np.uint8))
        # The owners have sent rows without a value the right way: on a path, no passive value is missing.
        on_path = [starts[d.tree] + d.rows * sizes[d.tree] + d.node for d in decided]
        self._present = np.concatenate(on_path) if on_path else np.empty(0, dtype=np.int64)
        self._predicted[data_set] = len(self.trees)
        return reply.tobytes()

    def _tree_missing(self, buffer: bytes) -> bytes:
        reply = np.frombuffer(buffer, dtype=np.uint8).copy()
        np.bitwise_and.at(reply, self._present >> 3, ~(1 << (self._present & 7)).astype(np.uint8))
        return reply.tobytes()

    def _set_in_question(self) -> int:
        if self._phase is not Phase.EVALUATE:
            return 0
        return self._settings.eval_sets[self._metrics_seen // self._settings.n_metrics]


def _kept(buffer: bytes) -> bytes:
    """Leave at rank 0 what it would have told the others."""
    return b""


def _bits(buffer: bytes, n: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), count=n, bitorder="little").view(bool)
