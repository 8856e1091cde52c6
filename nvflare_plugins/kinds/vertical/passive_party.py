"""A passive party: bins, node membership, and a private table of its splits. It runs no XGBoost while training.

Privacy: what comes in are protected gradients, the rows of nodes whose histograms are asked for, and the splits that
the party won. What leaves are protected sums per bin, and one bit per row of a node that it splits. Labels, gradients,
leaves and other parties' features never reach it; its thresholds never leave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Columns
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.histogram.planner import BinCodes, BinLayout, child_to_build
from he_processors.histogram.sums import BinMasks, BinNoise
from nvflare_plugins.data.table import ComparedColumn
from nvflare_plugins.growth.arithmetic import ARITHMETICS, Arithmetic
from nvflare_plugins.kinds.vertical import messages, model
from nvflare_plugins.kinds.vertical.context import TrainedPart, VerticalContext
from nvflare_plugins.kinds.vertical.conversation import Responder
from nvflare_plugins.kinds.vertical.guards import NO_LIMITS, GrownNodes, Guard, SplitBits, TreeLimits, bins_section
from nvflare_plugins.kinds.vertical.histogram_maker import HistogramMaker, PairsForm, histogram_maker, unpack_public_key
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.noised import NoisedGuard, NoiseSource
from nvflare_plugins.kinds.vertical.party_data import CutPoints, PartyData, PartySet, find_cut_points
from nvflare_plugins.kinds.vertical.sealed import FRACTION_BITS, SealedPassive
from nvflare_plugins.pages.run_record import ReportSection, RoundRow
from nvflare_plugins.site.memory.budgets import PredictionBudget
from nvflare_plugins.site.memory.released import ReleasedSums, SentRows
from nvflare_plugins.site.memory.store import Memory
from nvflare_plugins.site.policy import SitePolicy
from nvflare_plugins.xgb.parameters import TrainingParameters

ROOT = 0


@dataclass(frozen=True, slots=True, repr=False)
class _Due:
    """Sums that were asked for: one answer for each block of features that is left."""

    tree: int
    nodes: tuple[int, ...]
    withheld: tuple[int, ...]
    rows: list[NDArray[np.int32]]
    blocks: Iterator[slice]
    divisions: Sequence[tuple[int, int, int]]  # node, child that is asked for, the other one


class PassiveParty:
    """Answers the active party's requests about one party's columns.

    Not safe for concurrent use: requests come one at a time, in order.
    """

    def __init__(  # noqa: PLR0913 - what a job's start says, the rest by name
        self,
        sets: Sequence[Columns],
        aliases: Sequence[str],
        max_bin: int,
        maker: HistogramMaker,
        table: model.PrivateTable | None = None,
        guard: Guard | None = None,
        most_trees: int | None = None,
        limits: TreeLimits = NO_LIMITS,
        categories: Sequence[Sequence[str]] = (),
        cuts: CutPoints | None = None,
        noise: NoiseSource | SealedPassive | None = None,
        arithmetic: Arithmetic | None = None,
    ):
        """Prepare the party's tables; find its cut points.

        Args:
            sets: the training set and further sets, rows aligned with the active party's.
                Shapes: float32[n_features, n_rows] each; NaN is missing.
            aliases: names of the features for the other parties.
            table: splits of a model that training continues from.
            guard: decides which sums may leave, and counts them and split bits; without one all leaves uncounted.
            most_trees: trees that the job may still grow; None for no limit.
            limits: how far each of them may.
            categories: of each feature its public list, nothing for one of numbers; empty if all are of numbers.
            cuts: bins found elsewhere; None has XGBoost find them here.
            noise: of the preset noised, or what the preset sealed holds; None for exact sums.
            arithmetic: of the job's trees; None is this site's XGBoost's.

        Raises:
            PolicyRefusal: the guard does not allow so many bins.
        """
        self._sets = tuple(sets)
        self._compared: dict[tuple[int, int], ComparedColumn] = {}  # by set and feature, as they are asked for
        self._aliases = tuple(aliases)
        self.guard = guard
        if guard is not None:
            guard.check_bins(max_bin)
        self._categories = tuple(tuple(words) for words in categories) or ((),) * len(self._aliases)
        categorical = [feature for feature, words in enumerate(self._categories) if words]
        self._cuts = cuts or find_cut_points(self._sets[0], max_bin, categorical, arithmetic=arithmetic)
        self._sealed = noise if isinstance(noise, SealedPassive) else None
        self._noise = None if isinstance(noise, SealedPassive) else noise
        if guard is not None:
            self._cuts = guard.merge_rare_bins(self._cuts, self._sets[0])
            self._codes = guard.codes(self._cuts, self._sets[0])
        else:
            self._codes = self._cuts.codes(self._sets[0])
        self._bin_of_missing = {feature: self._where_missing_count(feature) for feature in categorical}
        self._maker = maker
        maker.hold(self._codes)
        self._n_rows = self._sets[0].shape[1]
        # A continued or resumed training adds trees; it never grows an old one again.
        self._tree = max((tree for tree, _ in table or ()), default=-1)
        self._n_trees = 0
        self._most_trees = most_trees
        self._limits = limits
        self._grown = GrownNodes(limits, 0)
        self._features = np.arange(self._codes.shape[0])
        self._tree_layout = self._cuts.layout
        self._tree_codes = self._codes
        self._rows: dict[int, NDArray[np.int32]] = {}
        self._known: set[int] = set()  # nodes whose sums the active party has, siblings included
        self._sides: dict[int, NDArray[np.bool_]] = {}  # by node: what this party's split of it answered
        self._due: _Due | None = None
        self._above: dict[int, tuple[int, bool]] = {}  # by node: this party's nearest split above it
        self._paths = [model.AnsweredPaths(columns.shape[1]) for columns in self._sets]
        self.table: model.PrivateTable = dict(table or {})

    def schema(self) -> messages.PartySchema:
        """Introduce the party."""
        set_rows = tuple(columns.shape[1] for columns in self._sets)
        return messages.PartySchema(set_rows, self._cuts.layout.n_bins, self._aliases, self._categories)

    def answer(self, request: messages.Request) -> messages.Answer | None:
        """Answer one request; None where there is nothing to say.

        Raises:
            ProtocolError: the request does not fit what came before, or this party's table.
        """
        if isinstance(request, messages.MoreSums):
            self._check_tree(request.tree)
            return self._next_sums()
        if self._due is not None:
            raise ProtocolError("a request between two blocks of sums")
        if isinstance(request, messages.TreeGradients):
            self._begin_tree(request)
            return None
        if isinstance(request, messages.MoreGradients):
            self._check_tree(request.tree)
            self._maker.add_gradients(request.gradients)
            return None
        if isinstance(request, messages.HistogramRequest):
            return self._histograms(request)
        if isinstance(request, messages.SplitRequest):
            return self._splits(request)
        if isinstance(request, messages.DecisionRequest):
            return self._decisions(request)
        return self._sealed_answer(request)

    def prepare(self) -> bool:
        """Do a little of what later trees need, while nothing is asked; return whether there is more."""
        return self._maker.prepare(is_last=self._n_trees == self._most_trees)

    def _begin_tree(self, request: messages.TreeGradients) -> None:
        if request.tree <= self._tree or request.features.n != self._codes.shape[0]:
            raise ProtocolError("gradients of a tree that is not the next one, or for other features")
        if self._most_trees is not None and self._n_trees >= self._most_trees:
            raise ProtocolError("gradients of more trees than the job has")
        self._tree = request.tree
        self._n_trees += 1
        chosen = np.flatnonzero(request.features.unpack())
        if chosen.size == 0:
            raise ProtocolError("a tree without features of this party needs no gradients")
        if self._noise is not None:
            self._noise.check_tree(chosen.size)
        if not np.array_equal(chosen, self._features):
            self._features = chosen
            self._tree_layout = BinLayout(tuple(self._cuts.layout.n_bins[feature] for feature in chosen))
            self._tree_codes = self._codes[chosen]
        self._rows = {ROOT: np.arange(self._n_rows, dtype=np.int32)}
        self._sides = {}
        self._above = {ROOT: model.NOTHING_ABOVE}
        self._known = set()
        self._grown = GrownNodes(self._limits, self._limits.most_splits(self._n_rows))
        for paths in self._paths:  # rows go through the trees of a round before the next one begins
            paths.end_trees()
        if self._sealed is not None:
            self._sealed.begin_tree(self._tree_layout)
        self._maker.begin_tree(self._n_rows)
        self._maker.add_gradients(request.gradients)

    def _histograms(self, request: messages.HistogramRequest) -> messages.HistogramAnswer:
        """Divide the nodes, decide whose sums may leave, and answer with the first block of them."""
        self._check_tree(request.tree)
        divided: tuple[messages.NodePartition | messages.OwnDivision, ...] = (*request.partitions, *request.own)
        if not divided and ROOT in self._known:
            raise ProtocolError("the sums of all rows are asked for twice")
        n_rows = sum(self._known_rows_of(part.node).size for part in divided) // 2 if divided else self._n_rows
        asked = tuple(self._divide(part) for part in divided) or (ROOT,)
        withheld = self._withheld(divided, asked)
        # Noised siblings are both sent: one by subtraction would have the noise of two, and neither costs more.
        families: list[tuple[int, ...]] = [(node,) for node in asked]
        if self._noise is not None and divided:
            families = [(node, part.left + part.right - node) for part, node in zip(divided, asked, strict=True)]
        nodes = tuple(node for family in families if family[0] not in withheld for node in family)
        blocks = messages.feature_blocks(
            self._tree_layout, sum(map(len, families)), n_rows, is_streamed=self._maker.is_streamed
        )
        pairs = zip(divided, asked, strict=False)
        divisions = [(part.node, node, part.left + part.right - node) for part, node in pairs]
        rows = [self._rows_of(node) for node in nodes]
        self._due = _Due(request.tree, nodes, withheld, rows, iter(blocks), divisions)
        if self._noise is not None and not divided and nodes:
            self._noise.pay(request.tree)
        for part, node in zip(divided, asked, strict=False):
            if node in withheld:  # nothing below is asked for any more
                del self._rows[part.left], self._rows[part.right]
            else:
                self._known |= {part.left, part.right}
        if withheld == (ROOT,):
            self._rows = {}
        elif not divided:
            self._known = {ROOT}
        return self._next_sums()

    def _sealed_answer(self, request: messages.Request) -> messages.Answer | None:
        """Answer a message of the preset sealed. Raises: ProtocolError: the job has another one, or out of order."""
        if self._sealed is not None and isinstance(request, messages.Transfers):
            return self._sealed.transfers(request)
        if self._sealed is None or not isinstance(request, messages.SealedRequest):
            raise ProtocolError(f"a passive party has no answer to {type(request).__name__}")
        self._check_tree(request.tree)
        rows = [self._known_rows_of(node) for node in request.nodes]
        return self._sealed.answer(request, rows, self._tree_codes)

    def _next_sums(self) -> messages.HistogramAnswer:
        """Add up the next block of features. Raises: ProtocolError: none is due."""
        due = self._due
        block = None if due is None else next(due.blocks, None)
        if due is None or block is None:
            raise ProtocolError("more sums are asked for than there are")
        sums = b""
        if due.nodes:
            whole = block == slice(0, self._tree_layout.n_features)
            layout = self._tree_layout if whole else messages.layout_of(self._tree_layout, block)
            codes = self._tree_codes if whole else self._tree_codes[block]
            sums = self._maker.sum_bins(codes, layout, due.rows, self._features[block], self._added(due, layout))
        if block.stop == self._tree_layout.n_features:
            self._due = None
            if self._sealed is not None:
                self._sealed.complete(due.nodes, due.divisions)
        return messages.HistogramAnswer(self._tree, due.nodes, sums, due.withheld)

    def _added(self, due: _Due, layout: BinLayout) -> BinNoise | BinMasks | None:
        """Return what is added to a block of sums before it leaves."""
        if self._sealed is not None:
            return self._sealed.mask(len(due.nodes), layout)
        return None if self._noise is None else self._noise.draw(due.tree, len(due.nodes), layout)

    def _withheld(
        self, divided: Sequence[messages.NodePartition | messages.OwnDivision], asked: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the nodes, of those asked for, whose sums must stay here. Charges the others."""
        if self.guard is None:
            return ()
        if not divided:
            return () if self.guard.admit_root() else (ROOT,)
        siblings = [part.left + part.right - node for part, node in zip(divided, asked, strict=True)]
        pairs = [(self._rows[node], self._rows[sibling]) for node, sibling in zip(asked, siblings, strict=True)]
        admitted = self.guard.admit(pairs)
        return tuple(node for node, is_admitted in zip(asked, admitted, strict=True) if not is_admitted)

    def _divide(self, part: messages.NodePartition | messages.OwnDivision) -> int:
        """Note the children's rows; return the child whose sums are wanted."""
        rows = self._known_rows_of(part.node)
        goes_left = self._side_of(part)
        if goes_left.size != rows.size or not part.node < part.left < part.right:
            raise ProtocolError("a partition does not fit its node")
        if part.left in self._above or part.right in self._above:
            raise ProtocolError("a partition names a node that the tree has already")
        self._grown.divide(part.node, part.left, part.right)
        left, right = rows[goes_left], rows[~goes_left]
        self._rows[part.left], self._rows[part.right] = left, right
        del self._rows[part.node]
        is_own = isinstance(part, messages.OwnDivision)
        for child in (part.left, part.right):
            self._above[child] = (part.node, child == part.left) if is_own else self._above[part.node]
        return child_to_build(part.left, left.size, part.right, right.size)

    def _side_of(self, part: messages.NodePartition | messages.OwnDivision) -> NDArray[np.bool_]:
        """Return which rows of a divided node go left: as this party has answered, where it split the node."""
        is_own = (self._tree, part.node) in self.table
        if is_own != isinstance(part, messages.OwnDivision):
            raise ProtocolError("a node is divided by another party than the one that split it")
        return self._sides.pop(part.node) if isinstance(part, messages.OwnDivision) else part.goes_left.unpack()

    def _splits(self, request: messages.SplitRequest) -> messages.SplitAnswer:
        self._check_tree(request.tree)
        rows = [self._known_rows_of(split.node) for split in request.splits]
        answers = tuple(self._split(self._won(split)) for split in request.splits)
        if self.guard is not None:
            divided = [(self.table[self._tree, split.node], self._sides[split.node]) for split in request.splits]
            self.guard.charge_bits(
                [SplitBits(self._name_of(split), of, left) for of, (split, left) in zip(rows, divided, strict=True)]
            )
        return messages.SplitAnswer(self._tree, answers)

    def _won(self, split: messages.OwnedSplit) -> messages.OwnedSplit:
        """Return a split that the party won; under seal the active party does not know which one."""
        if self._sealed is None:
            return split
        if split != messages.OwnedSplit(split.node, 0, -1, default_left=False):
            raise ProtocolError("a split that the active party cannot know")
        place, last_bin, default_left = self._sealed.winner(split.node)
        return messages.OwnedSplit(split.node, int(self._features[place]), last_bin, default_left)

    def _name_of(self, split: model.PrivateSplit) -> bytes:
        """Return what tells splits of this party's columns apart, in this job and in others."""
        facts = (split.threshold.tobytes().hex(), bool(split.default_left), split.categories)
        return repr((self._aliases[split.feature], *facts)).encode()

    def _split(self, split: messages.OwnedSplit) -> messages.Bits:
        rows = self._known_rows_of(split.node)
        if split.feature not in self._features or split.bin >= self._cuts.layout.n_bins[split.feature]:
            raise ProtocolError("a split of a feature or bin that the tree does not use")
        if (self._tree, split.node) in self.table:
            raise ProtocolError("a node is split twice")
        self._grown.split(split.node)
        if bool(self._categories[split.feature]) != bool(split.right_bins):
            raise ProtocolError("a split by categories of a feature of numbers, or by a threshold of one of categories")
        codes = self._codes[split.feature, rows]
        is_missing = codes == self._cuts.layout.n_bins[split.feature]
        if split.right_bins:
            is_left = self._divide_categories(split, codes)
        else:
            is_left = codes.astype(np.int32) <= split.bin
            self._keep(split, self._cuts.threshold(split.feature, split.bin), None)
        goes_left = np.where(is_missing, split.default_left, is_left)
        self._sides[split.node] = goes_left
        return messages.Bits.of(goes_left)

    def _divide_categories(self, split: messages.OwnedSplit, codes: BinCodes) -> NDArray[np.bool_]:
        """Keep a split by categories; return which rows with a value go left: those of no chosen bin."""
        if split.right_bins[-1] >= self._cuts.layout.n_bins[split.feature] or (np.diff(split.right_bins) <= 0).any():
            raise ProtocolError("a split by categories that the feature does not have")
        taken_for = self._bin_of_missing[split.feature]
        if taken_for is not None:
            split = replace(split, default_left=taken_for not in split.right_bins)
        self._keep(split, model.NO_THRESHOLD, self._cuts.categories_in(split.feature, split.right_bins))
        result: NDArray[np.bool_] = ~np.isin(codes, split.right_bins)
        return result

    def _where_missing_count(self, feature: int) -> int | None:
        """Return the bin of rows without a value if a guard has put them into one, too few as they are."""
        found = self._codes[feature, np.isnan(self._sets[0][feature])]
        return int(found[0]) if found.size and found[0] < self._cuts.layout.n_bins[feature] else None

    def _keep(self, split: messages.OwnedSplit, threshold: np.float32, categories: tuple[int, ...] | None) -> None:
        self.table[self._tree, split.node] = model.PrivateSplit(
            split.feature, threshold, split.default_left, self._above[split.node], categories
        )

    def _decisions(self, request: messages.DecisionRequest) -> messages.DecisionAnswer:
        """Tell which rows go left at finished nodes; what the guard has not counted yet, it counts before."""
        answers, new = [], []
        for query in request.queries:
            answer = self._decide(request.data_set, query)
            answers.append(messages.Bits.of(answer.goes_left))
            if self.guard is not None and self.guard.is_new(answer):
                new.append(answer)
        if self.guard is not None and new:
            self.guard.charge_bits(new)
        return messages.DecisionAnswer(tuple(answers))

    def _decide(self, data_set: int, query: messages.PathQuery) -> SplitBits:
        if not 0 <= data_set < len(self._sets) or query.rows.n != self._sets[data_set].shape[1]:
            raise ProtocolError("a question about rows of another data set")
        split = self.table.get((query.tree, query.node))
        if split is None:
            raise ProtocolError("a question about a node that this party did not split")
        rows = query.rows.unpack()
        goes_left = split.goes_left(self._values(data_set, split.feature).of(rows))
        self._paths[data_set].follow(query.tree, query.node, split, rows, goes_left)
        return SplitBits(self._name_of(split), np.flatnonzero(rows), goes_left, data_set)

    def _values(self, data_set: int, feature: int) -> ComparedColumn:
        """Return what splits compare: those of this training, and those of trees before it."""
        if (data_set, feature) not in self._compared:
            known = [split.threshold for split in self.table.values() if split.feature == feature]
            numbers = np.union1d(self._cuts.thresholds(feature), np.array(known, dtype=np.float32))
            if self._categories[feature]:  # also places that no row of the training set has
                numbers = np.arange(len(self._categories[feature]), dtype=np.float32)
            self._compared[data_set, feature] = ComparedColumn.compare(self._sets[data_set][feature], numbers)
        return self._compared[data_set, feature]

    def _check_tree(self, tree: int) -> None:
        if tree != self._tree:
            raise ProtocolError(f"a request for tree {tree} while tree {self._tree} grows")

    def _known_rows_of(self, node: int) -> NDArray[np.int32]:
        """Return the rows of a node whose sums were given: the guard has counted them, and lets go of no other."""
        if node not in self._known:
            raise ProtocolError(f"node {node} is not one whose sums this party gave")
        return self._rows_of(node)

    def _rows_of(self, node: int) -> NDArray[np.int32]:
        rows = self._rows.get(node)
        if rows is None:
            raise ProtocolError(f"node {node} is not one whose rows this party knows")
        return rows


# A passive party's part in a vertical job: it answers what the active party asks, and keeps a private table.


def open_guard(job: VerticalJob, policy: SitePolicy, data: PartyData, parameters: TrainingParameters) -> Guard:
    """Check whether this party would answer for its rows, and return their guard; nothing is charged yet.

    Raises:
        PolicyRefusal: randomised buckets of rows were sent, whose exact bits must stay; or this site has answered for
            rows of the evaluation set as often as it does.
        ConfigurationError: what this site remembers is damaged.
    """
    for one in data.sets:
        SentRows(policy).refuse(None if one.ids is None else one.row_ids())
    for one in predicted_sets(data):
        _budget(policy, one).check(one.row_ids())
    kind = NoisedGuard if job.is_noised or job.is_sealed else Guard
    guard = kind(
        policy.vertical,
        ReleasedSums(Memory.open(policy), data.train.data_set.name),
        data.train.row_ids(),
        row_fraction=float(parameters.effective["subsample"]),
        enforce=job.may_withhold,
        sums_per_set=job.sums_per_set,
    )
    for number, one in enumerate(data.sets):
        if number and one.data_set.name == data.train.data_set.name:
            guard.count_answers_about(number, one.row_ids())
    return guard


def _budget(policy: SitePolicy, one: PartySet) -> PredictionBudget:
    return PredictionBudget(policy, one.data_set.name, in_training=True)


def predicted_sets(data: PartyData) -> list[PartySet]:
    """Return the sets whose rows are charged: they go down every tree, as in a prediction.

    Bits of the training set's rows, and of others of the same table, are counted with those of its splits.
    """
    return [one for one in data.sets[1:] if one.data_set.name != data.train.data_set.name]


class PassiveSite:
    """Answers requests until the active party ends the training.

    Privacy: see ``PassiveParty``; neither label, gradient, leaf nor foreign threshold reaches this process in the
        clear, unless the job's profile is ``plain``.
    """

    def __init__(self, start: VerticalContext):
        """Args: start: after all sites have allowed the rows, with this one's guard (``open_guard``)."""
        if start.guard is None:
            raise ValueError("a passive party needs its guard")
        if (start.noised is None) != (start.payment is None):
            raise ValueError("noised sums need their payment, and nothing else has one")
        self._start = start
        self._party: PassiveParty | None = None
        self._guard = start.guard
        self._n_rounds = start.n_done
        self._table = self._first_table()
        self._uncharged = predicted_sets(start.data)

    def run(self) -> TrainedPart:
        """Take part; return this party's part."""
        start = self._start
        start.enter_round(start.n_done)
        most_categories = max(map(len, start.data.categories), default=0)
        longest = start.sizes.longest_question(len(start.data.columns), len(self._table), most_categories)
        Responder(
            start.end_of_conversation(longest),
            start.active_rank,
            lambda data: messages.answer_bytes(data, start.job.active, self._answer, start.notes),
            self._turned,
            start.n_done,
            lambda: self._party is not None and self._party.prepare(),
        ).run()
        if self._party is None:
            raise ProtocolError("the active party ended the training before it began")
        categories = dict(start.data.train.table.categories)
        part = model.PassivePart(dict(self._party.table), start.data.columns, start.data.aliases, categories)
        return TrainedPart(part, self._n_rounds, start.parameters.agreed, self._sections())

    def _first_table(self) -> model.PrivateTable:
        start = self._start
        if start.checkpoint is None:
            return {} if start.initial is None else dict(start.initial.part.table)
        table, aliases = model.table_from_json(start.checkpoint.content)
        if aliases != start.data.aliases:
            raise ConfigurationError("the checkpoint is of other features, or under other aliases, than the job has")
        return table

    def _answer(self, request: messages.Request) -> messages.Answer | None:
        if isinstance(request, messages.TrainingSetup):
            return self._begin(request)
        if self._party is None:
            raise ProtocolError("the active party asks before it has announced its key")
        if isinstance(request, messages.DecisionRequest) and request.data_set > 0:
            for one in self._uncharged:  # durably, before the first answer about its rows
                _budget(self._start.context.policy, one).charge(one.row_ids())
            self._uncharged = []
        return self._party.answer(request)

    def _begin(self, setup: messages.TrainingSetup) -> messages.Answer:
        start, job = self._start, self._start.job
        if self._party is not None:
            raise ProtocolError("the active party announced a key twice")
        if setup.scheme != start.scheme.code:
            raise ProtocolError("the active party announced another scheme than the job's")
        if job.key_length is not None:
            found = unpack_public_key(setup.scheme, setup.public_key, start.scheme.numbers)
            if found.key_bits < job.key_length:
                raise ProtocolError("the active party announced a shorter key than the job's")
        due = job.fraction_bits if job.profile == VerticalProfile.ELGAMAL.value else None
        if start.noised is not None:  # noise counts steps of this very format: beside a finer one it would be nothing
            due = start.noised.fraction_bits
        if start.sealed is not None:
            due = FRACTION_BITS
        if due is not None and setup.fraction_bits != due:
            raise ProtocolError("the active party announced another number of fraction bits than the job's")
        n_rows, workers, timer = start.data.train.table.n_rows, start.workers, start.stages.measure
        backend, allow_clear = start.context.policy.arithmetic, not job.is_encrypted
        tails = (0, 0) if start.noised is None else start.noised.tails
        form = PairsForm(tails, job.point_bytes, start.sealed is not None)
        numbers = start.scheme.numbers
        maker = histogram_maker(
            setup, n_rows, workers, allow_clear=allow_clear, backend=backend, timer=timer, form=form, numbers=numbers
        )
        payment = start.payment
        self._party = PassiveParty(
            start.data.features(),
            start.data.aliases,
            start.parameters.max_bin,
            maker,
            self._table,
            self._guard,
            most_trees=start.most_trees,
            limits=TreeLimits.from_effective(start.parameters.effective),
            categories=start.data.categories,
            cuts=None if payment is None else payment.cut_points(start.data.train),
            noise=self._noise(),
            arithmetic=ARITHMETICS[start.arithmetic],
        )
        start.progress.say(f"answering {job.active} about {len(start.data.columns)} columns")
        start.stages.take()
        return self._party.schema()

    def _noise(self) -> NoiseSource | SealedPassive | None:
        """Return what is added to sums before they leave."""
        start, payment = self._start, self._start.payment
        if start.sealed is not None:
            floor = start.context.policy.vertical.min_rows_per_node
            return SealedPassive(start.sealed, floor, start.stages.measure)
        return None if payment is None else NoiseSource(payment.noise, payment.pay_tree)

    def _turned(self, number: int) -> None:
        """Note that the active party has finished a round; nothing of the next one has been worked on."""
        start = self._start
        times = start.stages.take()
        seconds, stages = times.seconds, times.stages
        stages.pop("prepare", None)  # while it waits
        stages["network"] = max(seconds - sum(stages.values()), 0.0)  # and waiting for the others
        self._n_rounds = number + 1
        if start.is_checkpoint(self._n_rounds) and self._party is not None:
            start.keep(self._n_rounds, model.table_to_json(self._party.table, start.data.aliases))
        row = RoundRow(number, seconds, {}, stages, times.spans)
        start.round_done(row)
        start.progress(row, start.job.num_rounds)

    def _sections(self) -> tuple[ReportSection, ...]:
        start, found = self._start, self._guard.exposure()
        features = ReportSection(
            "This party's features",
            columns=("column", "alias"),
            rows=tuple(zip(start.data.columns, start.data.aliases, strict=True)),
        )
        bins = bins_section(found, start.job.preset, start.job.sums_per_set)
        return (features, bins) if start.payment is None else (features, start.payment.section(), bins)
