"""The active party: its training, what its leaves tell of labels, and its part in a vertical job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.formatting import counted
from nvflare_plugins.data.labels import has_event
from nvflare_plugins.data.table import is_plain_text
from nvflare_plugins.growth import survival
from nvflare_plugins.growth.arithmetic import ARITHMETICS, SplitFormula, TreeParameters, arithmetic_here
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.model import base_score_of, continued_model, new_model
from nvflare_plugins.growth.objectives import FirstEstimate, Objective, Scale, adaptive_leaves
from nvflare_plugins.growth.ranking import Queries
from nvflare_plugins.growth.sampling import TreeRandom, first_pair_seed, sampled_rows, with_own_seed
from nvflare_plugins.growth.training import GrownModel
from nvflare_plugins.growth.tree import Tree
from nvflare_plugins.kinds.vertical import model as vertical_model
from nvflare_plugins.kinds.vertical.context import INTRODUCTION_BYTES, TrainedPart, VerticalContext
from nvflare_plugins.kinds.vertical.conversation import Requester
from nvflare_plugins.kinds.vertical.histogram_maker import GRADIENT_BLOCK_ROWS, Timer, untimed
from nvflare_plugins.kinds.vertical.job import check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import (
    EncodedGradients,
    GradientOwner,
    GradientScale,
    PrecomputingKeyOwner,
    open_owner,
)
from nvflare_plugins.kinds.vertical.messages import (
    ConversationLink,
    Party,
    PartySchema,
    TrainingSetup,
    collect,
    place_parties,
)
from nvflare_plugins.kinds.vertical.noised import NoisePlan, PartyNoise
from nvflare_plugins.kinds.vertical.sealed import SealedPlan
from nvflare_plugins.kinds.vertical.sealed_growth import SealedSums, SealedTraining
from nvflare_plugins.kinds.vertical.tree_growth import OwnRows, PartySums, SumsOfTraining, TreeGrowth
from nvflare_plugins.pages.run_record import ReportSection, RoundRow
from nvflare_plugins.pooled.queries import queries_of
from nvflare_plugins.pooled.value_bounds import pair_bounds
from nvflare_plugins.wire.envelope import BaseScoreSource
from nvflare_plugins.xgb.continuation import check_initial_model
from nvflare_plugins.xgb.cuts import leaf_quantiles
from nvflare_plugins.xgb.model_json import check_lists, check_names_survive, trees_model, without_lists
from nvflare_plugins.xgb.objectives import COX, Task
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import EarlyStopping

# Leaf purity: how much the leaves of a tree tell about labels, for those who see which rows share a leaf.
#
# A passive party that owns the last split above two leaves knows their rows. It can guess that the rows of a leaf have
# one label; the guess is as good as the leaf is pure. Later trees fit residuals, so their leaves are less pure: the
# first trees are the ones to keep to the active party (``own_rounds``, Completely SecureBoost).
#
# Reference: SecureBoost (Cheng et al., 2021), sections "Analysis of Information Leakage" and "Performance of Completely
# SecureBoost", table 2.


class LeafPurity:
    """Measures the trees of one training.

    Privacy: computed where the labels are; a single number a tree, for the active party's own report.
    """

    def __init__(self, label: NDArray[np.float32]) -> None:
        """Args: label: one distinct value for each class. Shapes: float32[n_rows]."""
        if not label.size:
            raise ValueError("leaf purity needs rows")
        classes, class_of_row = np.unique(label, return_inverse=True)
        self._n_classes, self._class_of_row = classes.size, class_of_row.astype(np.int32)

    def of(self, leaf_of_row: NDArray[np.int32]) -> float:
        """Return the mean purity of a tree's leaves, weighted by rows: the part of rows in their leaf's largest class.

        Shapes: leaf_of_row: int32[n_rows].
        """
        n_leaves = int(leaf_of_row.max()) + 1
        cells = leaf_of_row.astype(np.int64) * self._n_classes + self._class_of_row
        counts = np.bincount(cells, minlength=n_leaves * self._n_classes)
        return float(counts.reshape(n_leaves, self._n_classes).max(axis=1).sum() / leaf_of_row.size)


def purity_report(
    purities: Sequence[float], trees_per_round: int, own_rounds: int, label: NDArray[np.float32]
) -> dict[str, float]:
    """Return in words the purity of first and later rounds, each the mean over its trees, beside what no tree tells.

    Each stands once: without own rounds the first round is the first with passive parties.

    Shapes: label: float32[n_rows].
    """
    rounds = [float(np.mean(purities[i : i + trees_per_round])) for i in range(0, len(purities), trees_per_round)]
    found = {"largest class alone": float(np.unique(label, return_counts=True)[1].max() / label.size)}
    found |= zip(("first round", "second round"), rounds, strict=False)
    if len(rounds) > 1:
        found["later rounds"] = float(np.mean(rounds[1:]))
    if 0 < own_rounds < len(rounds):
        found["first round with passive parties"] = rounds[own_rounds]
    return found


# The training of the active party: it grows the trees itself, with what the passive parties' columns offer.
#
# Gradients, base score, leaves and metrics are those of XGBoost, in the arithmetic of the release that the parties have
# agreed on (growth/). Each party's cut points are those of its own XGBoost, over the rows in the order of the
# alignment.
#
# Security: gradients, labels and the model stay in this process. Passive parties get what ``messages.py`` holds.


Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, repr=False)
class LabelledSet:
    """One data set at the active party, rows aligned with the passive parties'.

    Shapes: features: float32[n_rows, n_own_columns], no column at all included, categorical columns hold places in
        public lists; label, weight: float32[n_rows].
    """

    name: str
    features: Floats
    label: Floats
    weight: Floats | None = None
    queries: Queries | None = None


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """The active party's columns.

    Attributes:
        names: in the order of training.
        categories: public list of each categorical one.
        label_classes: the label's public list.
    """

    names: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_classes: Sequence[str | int] | None = None


@dataclass(frozen=True, slots=True)
class VerticalSettings:
    """How long to train, when to stop, and how long to wait.

    Attributes:
        own_rounds: first rounds that use the active party's columns alone (Completely SecureBoost).
        guarded: passive parties may keep sums that their guards do not let go: not the centralized model then.
        planned: how passive parties noise their sums, or that these stay sealed; None where they are exact.
        is_resumed: the initial model is a checkpoint of the same training, which remembers its best round.
        evaluate_training: evaluate the training set too.
        arithmetic: name of that of the trees; the default is this site's XGBoost's.
        timer: measures the stages "encrypt" and "decrypt".
    """

    num_rounds: int
    early_stopping_rounds: int | None = None
    evaluate_training: bool = False
    own_rounds: int = 0
    guarded: bool = False
    planned: NoisePlan | SealedPlan | None = None
    is_resumed: bool = False
    deadline_s: float = 600.0
    arithmetic: str = field(default_factory=arithmetic_here)
    timer: Timer = untimed


@dataclass(slots=True)
class VerticalResult:
    """The active party's part of a trained model, thresholds of other parties masked, as XGBoost JSON.

    Attributes:
        leaf_purities: of each tree of this training, in order; none for regression.
    """

    model: bytes
    rounds: list[RoundRow] = field(default_factory=list)
    best_round: int | None = None
    best_score: float | None = None
    leaf_purities: list[float] = field(default_factory=list)


def _first_model(
    params: TrainingParameters,
    objective: Objective,
    rows: LabelledSet,
    names: Sequence[str],
    categories: Mapping[str, tuple[str, ...]],
    settings: VerticalSettings,
    initial: bytes | None,
) -> GrownModel:
    """Return the model that training adds to; without one to continue, the base score follows from the labels."""
    parallel = int(params.effective.get("num_parallel_tree", 1))
    types = ["c" if name in categories else "float" for name in names]
    if initial is not None and settings.is_resumed:
        return _resumed(initial, settings.arithmetic, names, types)
    if initial is not None:
        whole = without_lists(initial)
        return GrownModel(
            continued_model(whole, objective, feature_names=names, feature_types=types, parallel=parallel)
        )
    source = params.objective.base_score_source
    if source is BaseScoreSource.GIVEN:
        base = np.atleast_1d(np.asarray(params.agreed["base_score"], dtype=np.float32))
    else:
        arithmetic, seed = ARITHMETICS[settings.arithmetic], int(str(params.agreed["seed"]))
        pairs = 0 if rows.queries is None else first_pair_seed(arithmetic, seed, rows.queries.n)
        estimate = FirstEstimate(objective, source, 1, rows.queries, pairs)
        while estimate.due:
            estimate.take(estimate.local(rows.label, rows.weight))
        base = estimate.base_score()
    is_given = source is BaseScoreSource.GIVEN
    columns = {"feature_names": names, "feature_types": types}
    return GrownModel(new_model(objective, base, is_given=is_given, num_parallel_tree=parallel, **columns))


def _resumed(checkpoint: bytes, arithmetic: str, names: Sequence[str], types: Sequence[str]) -> GrownModel:
    model = GrownModel.of_bytes(checkpoint)
    grown_in = ".".join(map(str, model.document["version"][:2]))
    if grown_in != arithmetic:
        raise ConfigurationError(
            f"the rounds so far were grown in the arithmetic of xgboost {grown_in}, and the parties would go on in "
            f"that of {arithmetic}: install the XGBoost of then"
        )
    model.document["learner"] |= {"feature_names": list(names), "feature_types": list(types)}
    return model


def all_columns(own: OwnColumns, parties: Sequence[Party]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the names of all parties' columns as the model has them, and the public list of each categorical one."""
    lists = [(name, own.categories.get(name, ())) for name in own.names]
    for party in parties:
        names = [f"{party.name}.{alias}" for alias in party.schema.aliases]
        lists += zip(names, party.schema.categories, strict=True)
    return [name for name, _ in lists], {name: words for name, words in lists if words}


def _check_sets(
    params: TrainingParameters, sets: Sequence[LabelledSet], parties: Sequence[Party], own: OwnColumns
) -> None:
    if not parties:
        raise ConfigurationError("vertical training needs at least one passive party")
    if any(s.features.shape[1] != len(own.names) or s.features.dtype != np.float32 for s in sets):
        raise ConfigurationError("every data set needs float32 values of all the active party's columns")
    for party in parties:
        if party.schema.set_rows != tuple(s.features.shape[0] for s in sets):
            raise ConfigurationError(f"{party.name} has other rows than the active party: align the data sets first")
    for labelled in sets:
        params.objective.check_labels(labelled.label)
    params.objective.check_events(sets[0].label)


def _on_own_times(one: LabelledSet) -> LabelledSet:
    """Return rows whose labels are places among their own times (growth/survival.py), which never leave this party."""
    times = one.label[:, 0]
    return replace(one, label=survival.signed_places(times, has_event(one.label), np.unique(times)[1:]))


class _Margins:
    """What the model so far predicts for one data set, before the objective's transform.

    Margins are added up in float32 and in the order of the trees, as XGBoost's own predictions are.
    """

    def __init__(self, rows: LabelledSet, number: int, base: Floats) -> None:
        """Args: number: of the set at all parties. Shapes: base: float32[n_outputs]."""
        self._rows, self._number, self._n_trees = rows, number, 0
        self.values: Floats = np.tile(base, (len(rows.label), 1))

    def add(self, output: int, values: Floats) -> None:
        """Add a tree, by the value of each row's leaf. Shapes: values: float32[n_rows]."""
        self.values[:, output] += values
        self._n_trees += 1

    def follow(self, model: GrownModel, walker: vertical_model.PathWalker) -> None:
        """Send the rows down the trees that the margins lack; the owners of splits are asked."""
        grown = trees_model(model.document["learner"])
        trees, outputs = (grown[name][self._n_trees :] for name in ("trees", "tree_info"))
        if not trees:
            return
        leaves = walker.walk(
            [vertical_model.structure_of(tree) for tree in trees], self._n_trees, self._number, self._rows.features
        )
        for tree, output, leaf in zip(trees, outputs, leaves, strict=True):
            self.add(output, np.array(tree["split_conditions"], dtype=np.float32)[leaf])


class VerticalTraining:
    """The training with the passive parties."""

    def __init__(
        self,
        params: TrainingParameters,
        sets: Sequence[LabelledSet],
        parties: Sequence[Party],
        owner: GradientOwner,
        own: OwnColumns,
        settings: VerticalSettings,
        initial_model: bytes | None = None,
    ):
        """Prepare a training.

        Args:
            params: checked by ``check_vertical_parameters``.
            sets: the training set, then sets to evaluate after each round, in the order of the parties' sets.
            owner: the key owner's half of the additive scheme; its format must hold the number of rows.
            own: the active party's columns.
            initial_model: an earlier result (``VerticalResult.model``) to continue from; the passive parties must have
                been given their tables of it.

        Raises:
            ConfigurationError, DataRefusal: parties, rows, labels or the model to continue do not fit the job.
        """
        _check_sets(params, sets, parties, own)
        self._lists = names, categories = all_columns(own, parties)
        self._label_classes = own.label_classes
        objective = Objective.of_job(params, settings.arithmetic)
        if objective.name == COX:
            sets = [_on_own_times(one) for one in sets]
            objective = replace(objective, n_times=max(int(np.abs(one.label).max(initial=1)) for one in sets))
        model = _first_model(params, objective, sets[0], names, categories, settings, initial_model)
        self._objective, self._sets, self._parties, self._owner = objective, sets, tuple(parties), owner
        self._settings, self._model = settings, model
        self._n_own, self._n_columns = len(own.names), parties[-1].columns.stop
        self._tree = TreeParameters.from_effective(params.effective)
        self._parallel = int(params.effective.get("num_parallel_tree", 1))
        self._eta = np.float32(np.float32(params.effective["learning_rate"]) / np.float32(self._parallel))
        arithmetic, self._seed = ARITHMETICS[settings.arithmetic], int(str(params.agreed["seed"]))
        self._formula = SplitFormula(self._tree, arithmetic)
        self._random = TreeRandom(self._tree, self._n_columns, arithmetic, self._seed)
        self._draws_pairs = objective.rules is not None and objective.rules.is_mean
        if (
            self._draws_pairs
            and initial_model is None
            and params.objective.base_score_source is not BaseScoreSource.GIVEN
        ):
            self._random.pair_seed(0, 0)  # what the base score was drawn from
        self._monotone = np.zeros(self._n_columns, dtype=np.int8)
        self._monotone[: len(self._tree.monotone)] = self._tree.monotone
        train = sets[0]
        categorical = [i for i, name in enumerate(own.names) if name in own.categories]
        monotone = self._monotone[: self._n_own]
        self._own = OwnRows(train.features, train.weight, params.max_bin, categorical, monotone, arithmetic)
        bounds = objective.row_bounds(params.objective)
        largest_weight = 1.0 if train.weight is None else float(train.weight.max(initial=0.0)) or 1.0
        # Places in time say nothing of the size of gradients.
        sized = np.zeros(1, np.float32) if objective.n_times else train.label
        if train.queries is not None:
            bounds, largest_weight = pair_bounds(params, train.queries), 1.0
        self._scale = GradientScale(bounds, sized, largest_weight, owner.pair_format)
        self._walker = vertical_model.PathWalker(self._parties, self._n_own, settings.deadline_s)
        base = np.broadcast_to(objective.margins_of(base_score_of(model.document)), (objective.n_outputs,))
        self._margins = [_Margins(one, number, base) for number, one in enumerate(sets)]
        self._metrics = [Metric(name, objective) for name in params.metrics]
        self._purity = LeafPurity(train.label) if params.objective.task in (Task.BINARY, Task.MULTICLASS) else None
        self._closed: set[str] = set()  # parties that give no sums any more
        planned = settings.planned
        self._noised = planned if isinstance(planned, NoisePlan) else None
        self._sealed = self._open_sealed(planned) if isinstance(planned, SealedPlan) else None
        self._result = VerticalResult(b"")

    def _open_sealed(self, plan: SealedPlan) -> SealedTraining:
        if len(self._parties) != 1:
            raise ConfigurationError("preset sealed is for exactly two parties")
        self._model.set_attr(**{vertical_model.SEALED_ATTRIBUTE: "1"})
        return SealedTraining(plan, self._parties[0], self._settings.deadline_s)

    def run(self, on_round: Callable[[RoundRow, GrownModel], None] | None = None) -> VerticalResult:
        """Train.

        Args:
            on_round: called after every round with the record and the model so far, thresholds masked.

        Raises:
            VeilBoostError: what ended the training.
        """
        settings, result, model = self._settings, self._result, self._model
        first = model.n_rounds
        stopping = EarlyStopping(settings.early_stopping_rounds)
        if settings.is_resumed:
            stopping.take_up(model)
        self._margins[0].follow(model, self._walker)
        for number in range(first, first + settings.num_rounds):
            if stopping.is_over(number - 1):
                break
            record = self._round(number)
            result.rounds.append(record)
            stopping.note(model, record.round, record.metrics)
            if on_round is not None:
                on_round(record, model)
        result.best_round, result.best_score = stopping.best_round, stopping.best_score
        result.model = vertical_model.mask_columns(model.to_bytes(), self._n_own, *self._lists, self._label_classes)
        return result

    def _round(self, number: int) -> RoundRow:
        started = time.perf_counter()
        self._grow_round(number)
        metrics = {}
        for i, one in enumerate(self._sets) if self._metrics else ():
            if i or self._settings.evaluate_training:
                margins = self._margins[i]
                margins.follow(self._model, self._walker)
                for metric in self._metrics:
                    parts = metric.parts(margins.values, one.label, one.weight, one.queries)
                    metrics[f"{one.name}-{metric.name}"] = metric.value(parts)
        return RoundRow(number, time.perf_counter() - started, metrics)

    # -- one round ----------------------------------------------------------------------------------------------------

    def _grow_round(self, number: int) -> None:
        self._random.begin_round(number)
        gradients = self._gradients(number)
        n_before = len(trees_model(self._model.document["learner"])["trees"])
        grown: list[list[Tree]] = []
        leaves: list[tuple[int, Floats]] = []
        for output in range(self._objective.n_outputs):
            grown.append([])
            for _ in range(self._parallel):
                tree = self._grow_tree(number, n_before + len(leaves), *gradients[output].T)
                leaf_of_row = self._own.rows.node_of_rows()
                if self._purity is not None:
                    self._result.leaf_purities.append(self._purity.of(leaf_of_row))
                grown[-1].append(tree)
                leaves.append((output, tree.conditions[leaf_of_row]))
        self._model.append_round(grown)
        for output, values in leaves:
            self._margins[0].add(output, values)

    def _gradients(self, number: int) -> Floats:
        """Return the gradients of all rows. Shapes: float32[n_outputs, n_rows, 2]."""
        rows, margins, objective = self._sets[0], self._margins[0].values, self._objective
        scale: Scale = np.float32(0)
        if objective.n_times:
            scale = survival.local_hazards(margins.reshape(-1), rows.label, rows.weight, objective.n_times)
        elif objective.is_smooth:
            total = float(len(rows.label)) if rows.weight is None else float(rows.weight.sum(dtype=np.float64))
            parts = objective.scale_rows(margins, rows.label, rows.weight)
            scale = objective.scale(float(parts.sum(dtype=np.float64)), total)
        pair_seed = self._random.pair_seed(number, rows.queries.n) if self._draws_pairs and rows.queries else 0
        return objective.gradients(margins, rows.label, rows.weight, scale, rows.queries, pair_seed)

    def _grow_tree(self, number: int, tree_number: int, g: Floats, h: Floats) -> Tree:
        drawn = None
        if self._tree.subsample < 1:
            drawn = sampled_rows(g.size, self._tree.subsample, self._random.row_seed())
            g, h = np.where(drawn, g, np.float32(0)), np.where(drawn, h, np.float32(0))
        sampler = self._random.columns
        sampler.begin_tree()
        encoded = self._scale.encode(g, h)
        columns = sampler.tree_columns()
        if number < self._settings.own_rounds:
            columns[self._n_own :] = False
        parties = self._party_sums(tree_number, columns, encoded)
        if parties:
            self._send_gradients(encoded, parties)
        growth = TreeGrowth(
            self._tree, self._formula, self._eta, encoded, self._own, parties, self._n_columns, sampler.node_columns
        )
        tree = growth.grow()
        self._closed.update(sums.party.name for sums in parties if sums.is_closed)
        return tree.with_leaf_values(self._adaptive(tree, drawn)) if self._objective.adaptive_leaf else tree

    def _adaptive(self, tree: Tree, drawn: NDArray[np.bool_] | None) -> Floats:
        """Return leaves as quantiles of their rows' residuals. Shapes: float32[n_leaves]."""
        rows, margins = self._sets[0], self._margins[0].values[:, 0]
        weight = rows.weight
        chosen = np.ones(len(rows.label), dtype=bool) if weight is None else weight > 0
        if drawn is not None:
            chosen &= drawn
            # XGBoost takes weighted quantiles of rows that are drawn.
            weight = np.ones(len(rows.label), dtype=np.float32) if weight is None else weight
        leaf = np.searchsorted(tree.leaves, self._own.rows.node_of_rows()[chosen]).astype(np.int32)
        of_each = None if weight is None else weight[chosen]
        alpha, n_leaves = float(self._objective.leaf_quantile), tree.leaves.size
        found = leaf_quantiles((rows.label - margins)[chosen], of_each, leaf, n_leaves, alpha)
        has_rows = ~np.isnan(found)
        own = np.where(has_rows, found, np.float32(0)).astype(np.float32)
        return adaptive_leaves(has_rows.astype(np.int64), own, tree.conditions[tree.leaves], self._eta)

    # -- the passive parties of a tree --------------------------------------------------------------------------------

    def _party_sums(self, tree: int, columns: NDArray[np.bool_], encoded: EncodedGradients) -> list[PartySums]:
        """Begin a tree at the parties of which it may use a column. Shapes: columns: bool[n_columns]; may change."""
        settings, found = self._settings, list[PartySums]()
        training = SumsOfTraining(
            self._owner, self._formula, self._monotone, settings.deadline_s, settings.guarded, settings.timer
        )
        for party in self._parties:
            noise = None if self._noised is None else self._noised.of_party(len(party.schema.n_bins))
            self._cap_features(party, tree, columns, noise)
            if not columns[party.columns].any() or party.name in self._closed:
                continue
            if self._sealed is None:
                found.append(PartySums(training, party, tree, columns, encoded.unit, noise))
            else:
                found.append(SealedSums(training, party, tree, columns, encoded, self._own, self._sealed))
        return found

    def _cap_features(self, party: Party, tree: int, columns: NDArray[np.bool_], noise: PartyNoise | None) -> None:
        """Draw which of a party's features a noised tree may use, where it has more: anew for each, from the seed.

        Shapes: columns: bool[n_columns], of the tree; changed in place.
        """
        mine = np.flatnonzero(columns[party.columns])
        if noise is None or mine.size <= noise.features_per_tree:
            return
        keys = [self._seed & 0xFFFFFFFF, tree, party.first_column]
        drawn = np.random.default_rng(keys).permutation(mine)[noise.features_per_tree :]
        columns[party.columns.start + drawn] = False

    def _send_gradients(self, encoded: EncodedGradients, parties: Sequence[PartySums]) -> None:
        """Encrypt block by block, so that one is on its way while the next is made, and ask for the root."""
        n_rows, timer = encoded.g.size, self._settings.timer
        with timer("encrypt"):
            self._owner.begin_tree(encoded.g, encoded.h)
        for start in range(0, n_rows, GRADIENT_BLOCK_ROWS):
            block = slice(start, start + GRADIENT_BLOCK_ROWS)
            with timer("encrypt"):
                protected = self._owner.encrypt(encoded.g[block], encoded.h[block])
            for sums in parties:
                sums.send(protected)
        for sums in parties:
            sums.ask([], n_rows=n_rows)
            sums.party.link.flush()


# The active party's part in a vertical job: key, conversation, the trees that it grows.


class ActiveSite:
    """Trains with the passive parties.

    Security: label, gradients, secret key and leaves stay in this process.
    """

    def __init__(self, start: VerticalContext):
        self._start = start
        initial = start.initial.part if start.initial is not None else None
        self._n_initial = (
            0 if initial is None else len(vertical_model.structures(initial.booster)) // start.trees_per_round
        )
        self._model = None if initial is None else initial.booster
        if start.checkpoint is not None:
            self._model = start.checkpoint.content.encode()
        self._rows: dict[int, RoundRow] = {}
        table = start.data.train.table
        self._own = OwnColumns(start.data.columns, dict(table.categories), start.job.label_classes)

    def run(self) -> TrainedPart:
        """Train; return this party's part."""
        start, job = self._start, self._start.job
        start.enter_round(start.n_done)
        with Requester(
            start.end_of_conversation(INTRODUCTION_BYTES),
            on_turn=lambda turn: start.round_done(self._rows[turn]),
            first_turn=start.n_done,
            timer=lambda: start.stages.measure("network"),
        ) as requester:
            self._requester: Requester = requester
            # Within the conversation, which shows the others that this site is alive.
            n_rows, backend = start.data.train.table.n_rows, start.context.policy.arithmetic
            timer, numbers = start.stages.measure, start.scheme.numbers
            owner = open_owner(job, n_rows, backend, timer, start.workers, start.planned, numbers)
            start.progress.say(self._scheme_line())
            parties = self._introduce(owner.setup)
            params = self._checked_parameters(parties)
            start.stages.take()
            n_trees = max(job.num_rounds - max(start.n_done, job.own_rounds), 0) * start.trees_per_round
            with PrecomputingKeyOwner(owner, n_rows, n_trees, start.stages.measure) as filled:
                training = VerticalTraining(
                    params, self._sets(params), parties, filled, self._own, self._settings(), self._model
                )
                result = training.run(self._after_round)
        columns = tuple(vertical_model.PartyColumns(party.name, party.schema.aliases) for party in parties)
        part = vertical_model.ActivePart(result.model, start.data.columns, columns, result.best_round)
        best = None if result.best_round is None else result.best_round - self._n_initial
        n_rounds = start.n_done + len(result.rounds)
        return TrainedPart(part, n_rounds, params.agreed, self._sections(result, parties), best)

    # -- before training ----------------------------------------------------------------------------------------------

    def _scheme_line(self) -> str:
        job = self._start.job
        if not job.is_encrypted:
            return "gradients go to the passive parties in the clear, as the job and all policies say"
        if job.key_length is None:
            loss = (
                ""
                if job.is_exact
                else f"; gradients are rounded to {job.fraction_bits} bits: not the centralized model"
            )
            return f"made an {job.profile} key of 128-bit strength for this job{loss}"
        return f"made a {job.profile} key of {job.key_length} bits for this job"

    def _introduce(self, setup: TrainingSetup) -> tuple[Party, ...]:
        """Announce the scheme; get every passive party's schema."""
        start, job, notes = self._start, self._start.job, self._start.notes
        ranks = [rank for rank in range(start.attempt.channel.world) if rank != start.active_rank]
        names = [start.attempt.channel.sites[rank] for rank in ranks]
        links = [ConversationLink(self._requester, rank, name, notes) for rank, name in zip(ranks, names, strict=True)]
        asked = [link.ask(setup) for link in links]
        schemas = [
            collect(name, future, PartySchema, start.answer_s) for name, future in zip(names, asked, strict=True)
        ]
        for name, schema in zip(names, schemas, strict=True):
            if not all(is_plain_text(alias) and not set(alias) & set("[]<") for alias in schema.aliases):
                raise ProtocolError(f"{name} calls a feature by a name that no model can hold")
            listed = [tuple(map(str, words)) for words in job.categories.get(name, {}).values()]
            if sorted(listed) != sorted(words for words in schema.categories if words):
                raise ProtocolError(f"{name} has other lists of categories than the job")
        sizes, n_earlier = start.sizes, len(vertical_model.structures(self._model)) if self._model else 0
        for rank, schema in zip(ranks, schemas, strict=True):
            self._requester.expect(rank, sizes.longest_answer(schema.n_bins, n_earlier))
        introductions = list(zip(names, schemas, links, strict=True))
        parties = place_parties(len(start.data.columns), introductions)
        shown = ", ".join(f"{len(party.schema.aliases)} of {party.name}" for party in parties)
        start.progress.say(f"columns: {len(start.data.columns)} here, {shown}")
        return parties

    def _checked_parameters(self, parties: tuple[Party, ...]) -> TrainingParameters:
        """Check the parameters with all parties' columns, and that the model to continue is one of this job."""
        start, (names, categories) = self._start, all_columns(self._own, parties)
        if len(set(names)) != len(names):
            raise ConfigurationError("a column here has the name under which the model lists another party's")
        check_names_survive(names, categories)
        params = with_own_seed(check_vertical_parameters(start.job.params, names, label=start.job.label))
        if start.initial is not None:
            part = start.initial.part
            if [(p.site, p.aliases) for p in part.parties] != [(p.name, p.schema.aliases) for p in parties]:
                raise ConfigurationError("the model to continue was trained with other parties, or other features")
            check_initial_model(part.booster, str(start.job.initial_model), params, names)
            check_lists(part.booster, str(start.job.initial_model), categories, start.job.label_classes)
        return params

    def _sets(self, params: TrainingParameters) -> list[LabelledSet]:
        return [
            LabelledSet(
                one.name,
                one.table.held_features(),
                one.table.label,
                one.table.weight,
                queries_of(params, one.table, one.data_set),
            )
            for one in self._start.data.sets
        ]

    def _settings(self) -> VerticalSettings:
        start, job = self._start, self._start.job
        return VerticalSettings(
            num_rounds=job.num_rounds - self._start.n_done,
            early_stopping_rounds=job.early_stopping_rounds,
            evaluate_training=job.evaluate_training,
            own_rounds=self._n_initial + job.own_rounds if job.own_rounds else 0,
            guarded=job.may_withhold,
            planned=start.planned,
            is_resumed=self._start.checkpoint is not None,
            deadline_s=self._start.answer_s,
            arithmetic=self._start.arithmetic,
            timer=start.stages.measure,
        )

    # -- while training -----------------------------------------------------------------------------------------------

    def _after_round(self, record: RoundRow, model: GrownModel) -> None:
        start = self._start
        number = record.round - self._n_initial  # the job's rounds, without those of the model it continues
        times = start.stages.take()
        stages = times.stages
        stages.pop("prepare", None)  # beside the others
        known = sum(stages.get(stage, 0.0) for stage in ("encrypt", "decrypt", "compare", "network"))
        if "search" in stages:  # within "decrypt", and listed beside it
            stages["decrypt"] = max(stages["decrypt"] - stages["search"], 0.0)
        stages["grow"] = max(record.seconds - known, 0.0)
        row = self._rows[number] = RoundRow(number, record.seconds, record.metrics, stages, times.spans)
        self._requester.turn(number + 1)  # before the checkpoint: the passive parties are then two behind at most
        if start.is_checkpoint(number + 1):
            start.keep(number + 1, model.to_bytes().decode())
        start.progress(row, start.job.num_rounds)

    # -- after training -----------------------------------------------------------------------------------------------

    def _sections(self, result: VerticalResult, parties: tuple[Party, ...]) -> tuple[ReportSection, ...]:
        start = self._start
        rows = [(start.context.site, "active", str(len(start.data.columns)), ", ".join(start.data.columns))]
        rows += [(p.name, "passive", str(len(p.schema.aliases)), ", ".join(p.schema.aliases)) for p in parties]
        sections = [
            ReportSection("Parties", columns=("party", "role", "features", "names or aliases"), rows=tuple(rows))
        ]
        if result.leaf_purities:
            label = start.data.train.table.label
            own = max(start.job.own_rounds - start.n_done, 0)
            report = purity_report(result.leaf_purities, start.trees_per_round, own, label)
            text = (
                "How often a passive party that knows which rows share a leaf would guess their label, had it been "
                f"told each leaf's most frequent one. {counted(own, 'round')} used this party's columns alone."
            )
            told = tuple((name, f"{value:.4f}") for name, value in report.items())
            sections.append(ReportSection("Leaf purity", (text,), ("trees", "purity"), told))
        return tuple(sections)
