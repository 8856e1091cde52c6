"""The training loop of the active party: stock XGBoost beside its mediator and the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.growth.tree_parameters import TreeParameters
from nvflare_plugins.vertical.active.engine import WORLD, ActiveEngine, EngineSettings
from nvflare_plugins.vertical.active.gradient_scale import GradientScale
from nvflare_plugins.vertical.active.leaf_purity import LeafPurity
from nvflare_plugins.vertical.guards.tree_limits import TreeLimits
from nvflare_plugins.vertical.model.model import mask_columns, structures
from nvflare_plugins.vertical.model.tree_routing import TreeStructure
from nvflare_plugins.vertical.noised.plan import NoisePlan
from nvflare_plugins.vertical.protocol.gradient_scheme import GradientOwner, Timer, untimed
from nvflare_plugins.vertical.protocol.links import Party
from nvflare_plugins.wire.catalogue import Phase, TrainingStep
from nvflare_plugins.wire.mediator import Mediator
from nvflare_plugins.wire.vertical_catalogue import VerticalGrammar, VerticalShape
from nvflare_plugins.xgb.communicator import Federated
from nvflare_plugins.xgb.early_stopping import EarlyStopping
from nvflare_plugins.xgb.model_json import without_lists
from nvflare_plugins.xgb.objectives import Task
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import parse_metrics
from nvflare_plugins.xgb.versions import installed_release


@dataclass(frozen=True, slots=True, repr=False)
class LabelledSet:
    """One data set at the active party, rows aligned with the passive parties'.

    Shapes: features: float32[n_rows, n_own_columns], no column at all included, categorical columns hold places in
        public lists; label, weight: float32[n_rows].
    """

    name: str
    features: NDArray[np.float32]
    label: NDArray[np.float32]
    weight: NDArray[np.float32] | None = None


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
        noised: how passive parties noise their sums; None where they are exact.
        is_resumed: the initial model is a checkpoint of the same training, which remembers its best round.
        evaluate_training: evaluate the training set too.
    """

    num_rounds: int
    early_stopping_rounds: int | None = None
    evaluate_training: bool = False
    own_rounds: int = 0
    guarded: bool = False
    noised: NoisePlan | None = None
    is_resumed: bool = False
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True)
class VerticalRound:
    """What happened in one boosting round. Units: seconds; metrics by "set-metric"."""

    round: int
    metrics: dict[str, float]
    seconds: float


@dataclass(slots=True)
class VerticalResult:
    """The active party's part of a trained model, thresholds of other parties masked, as XGBoost JSON.

    Attributes:
        leaf_purities: of each tree of this training, in order; none for regression.
    """

    model: bytes
    rounds: list[VerticalRound] = field(default_factory=list)
    best_round: int | None = None
    best_score: float | None = None
    leaf_purities: list[float] = field(default_factory=list)


def train_vertical(
    params: TrainingParameters,
    sets: Sequence[LabelledSet],
    parties: Sequence[Party],
    owner: GradientOwner,
    own: OwnColumns,
    settings: VerticalSettings,
    initial_model: bytes | None = None,
    on_round: Callable[[VerticalRound, xgb.Booster], None] | None = None,
    on_start: Callable[[Mediator], None] | None = None,
    timer: Timer = untimed,
) -> VerticalResult:
    """Train with the passive parties.

    Args:
        params: checked by ``check_vertical_parameters``.
        own: the active party's columns.
        sets: the training set, then sets to evaluate after each round, in the order of the parties' sets.
        owner: the key owner's half of the additive scheme; its format must hold the number of rows.
        initial_model: an earlier result (``VerticalResult.model``) to continue from; the passive parties must have
            been given their tables of it.
        on_round: called after every round with the record and the model so far, thresholds masked.
        on_start: gets the mediator, for aborts from another thread.
        timer: measures the stage "engine": all that XGBoost waits for.

    Raises:
        VeilBoostError: what ended the training; in place of XGBoost's own error when the mediator knows better.
    """
    _check_sets(params, sets, parties, own)
    continued = structures(initial_model) if initial_model is not None else []
    engine_settings = _engine_settings(params, sets, settings)
    weights = sets[0].weight
    largest_weight = 1.0 if weights is None else float(weights.max(initial=0.0)) or 1.0
    scale = GradientScale(params.objective, sets[0].label, largest_weight, owner.pair_format)
    purities: list[float] = []
    purity = None if params.objective.task is Task.REGRESSION else LeafPurity(sets[0].label)

    def note_purity(leaf_of_row: NDArray[np.int32]) -> None:
        if purity is not None:
            purities.append(purity.of(leaf_of_row))

    own_sets = [s.features for s in sets]
    engine = ActiveEngine(engine_settings, parties, own_sets, owner, scale, continued, note_purity, timer)
    earlier = continued if initial_model is not None else None
    mediator = Mediator(VerticalGrammar(_shape(params, sets, engine, earlier, own)), 0, engine)
    with mediator:
        if on_start is not None:
            on_start(mediator)
        try:
            with Federated(mediator, WORLD, 0):
                loop = _Loop(mediator, engine, settings, _types(own), on_round)
                result = loop.run(params.for_booster(), sets, engine_settings.eval_sets, initial_model)
        except xgb.core.XGBoostError as error:
            raise mediator.reason(error) from None
        except VeilBoostError as error:
            mediator.abort(error)
            raise
    result.leaf_purities = purities
    names, categories = all_columns(own, parties)
    result.model = mask_columns(result.model, len(own.names), names, categories, own.label_classes)
    return result


def column_storage(own: NDArray[np.float32], n_foreign: int, params: Mapping[str, object]) -> dict[str, object]:
    """Choose how XGBoost keeps the bins of columns, by what takes less memory; the model is the same.

    As soon as one column counts as sparse, XGBoost keeps a row's number (8 bytes) beside each bin of every column.
    Those of passive parties hold nothing here, and count as sparse unless told that none is. Then it keeps a bin for
    each row of every column, and a bit that says whether there is one.

    Shapes: own: float32[n_rows, n_own_columns]; NaN is missing.

    Args:
        n_foreign: columns of passive parties.

    Reference: XGBoost 3.2 and 3.3, src/common/column_matrix.cc (InitStorage).
    """
    bin_bytes = 1 if int(params.get("max_bin", 256)) <= 256 else 2  # type: ignore[call-overload]
    n_missing = sum(int(np.count_nonzero(np.isnan(column))) for column in own.T)
    without_rows, with_rows = column_bytes(own.shape[0], own.shape[1], n_foreign, bin_bytes, n_missing)
    return {"sparse_threshold": 0.0} if without_rows < with_rows else {}


def column_bytes(n_rows: int, n_own: int, n_foreign: int, bin_bytes: int, n_missing: int = 0) -> tuple[float, float]:
    """Return what XGBoost's columns of bins take where none counts as sparse, and where some does."""
    return n_rows * (n_own + n_foreign) * (bin_bytes + 0.125), (n_rows * n_own - n_missing) * (bin_bytes + 8)


def all_columns(own: OwnColumns, parties: Sequence[Party]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the names of all parties' columns as the model has them, and the public list of each categorical one."""
    lists = [(name, own.categories.get(name, ())) for name in own.names]
    for party in parties:
        names = [f"{party.name}.{alias}" for alias in party.schema.aliases]
        lists += zip(names, party.schema.categories, strict=True)
    return [name for name, _ in lists], {name: words for name, words in lists if words}


def _types(own: OwnColumns) -> tuple[str, ...]:
    """Return XGBoost's types of the active party's columns; none if all are of numbers, which needs no saying."""
    return tuple("c" if name in own.categories else "float" for name in own.names) if own.categories else ()


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


def _engine_settings(
    params: TrainingParameters, sets: Sequence[LabelledSet], settings: VerticalSettings
) -> EngineSettings:
    parallel = int(params.effective.get("num_parallel_tree", 1))
    return EngineSettings(
        params=TreeParameters.from_effective(params.effective),
        seed=int(params.agreed["seed"]),  # type: ignore[call-overload]
        n_outputs=params.objective.n_outputs,
        parallel_trees=parallel,
        eval_sets=tuple(range(0 if settings.evaluate_training else 1, len(sets))) if params.metrics else (),
        n_metrics=len(params.metrics),
        column_seed=installed_release().sends_column_seed,
        caches_training=parallel == 1,
        own_rounds=settings.own_rounds,
        guarded=settings.guarded,
        noised=settings.noised,
        deadline_s=settings.deadline_s,
    )


def _shape(
    params: TrainingParameters,
    sets: Sequence[LabelledSet],
    engine: ActiveEngine,
    earlier: Sequence[TreeStructure] | None,
    own: OwnColumns,
) -> VerticalShape:
    continued, limits = earlier is not None, TreeLimits.from_effective(params.effective)
    # A set is predicted every round; pruned nodes keep their places.
    new_nodes = engine.trees_per_round * (2 * limits.most_splits(sets[0].features.shape[0]) + 1)
    return VerticalShape(
        world=WORLD,
        matrix_rows=tuple(s.features.shape[0] for s in sets),
        n_outputs=params.objective.n_outputs,
        trees_per_round=engine.trees_per_round,
        adaptive_leaf=params.objective.adaptive_leaf,
        estimates_base_score=not continued and "base_score" not in params.agreed,
        continued=continued,
        predicts_training=int(params.effective.get("num_parallel_tree", 1)) > 1,
        eval_sets=engine.eval_sets,
        n_metrics=len(params.metrics),
        column_seed=installed_release().sends_column_seed,
        most_nodes=sum(tree.n_nodes for tree in earlier or ()) + new_nodes,
        most_categories=max(map(len, own.categories.values()), default=0),
        own_types=_types(own),
        n_foreign=engine.n_foreign,
    )


class _Loop:
    def __init__(
        self,
        mediator: Mediator,
        engine: ActiveEngine,
        settings: VerticalSettings,
        types: tuple[str, ...],
        on_round: Callable[[VerticalRound, xgb.Booster], None] | None,
    ):
        self._mediator = mediator
        self._engine = engine
        self._settings = settings
        self._types = list(types) or None
        self._on_round = on_round

    def run(
        self,
        params: Mapping[str, object],
        sets: Sequence[LabelledSet],
        eval_sets: Sequence[int],
        initial_model: bytes | None,
    ) -> VerticalResult:
        from xgboost.core import DataSplitMode  # which 3.4 lacks

        matrices = [
            xgb.DMatrix(
                s.features,
                label=s.label,
                weight=s.weight,
                feature_types=self._types,
                data_split_mode=DataSplitMode.COL,
                enable_categorical=True,
            )
            for s in sets
        ]
        model_file = None if initial_model is None else bytearray(_unnamed(initial_model))
        kept = column_storage(sets[0].features, self._engine.n_foreign, params)
        booster = xgb.Booster({**params, **kept}, matrices, model_file=model_file)
        evaluated = [(matrices[position], sets[position].name) for position in eval_sets]
        result = VerticalResult(b"")
        first = len(self._engine.trees) // self._engine.trees_per_round
        last = first + self._settings.num_rounds
        stopping = EarlyStopping(self._settings.early_stopping_rounds)
        if self._settings.is_resumed:
            stopping.take_up(booster)
        for number in range(first, last):
            if stopping.is_over(number - 1):
                break
            record = self._round(booster, matrices[0], evaluated, number)
            result.rounds.append(record)
            stopping.note(booster, record.round, record.metrics)
            if self._on_round is not None:
                self._on_round(record, booster)
        self._enter(Phase.FINISH, last)
        result.best_round, result.best_score = stopping.best_round, stopping.best_score
        result.model = bytes(booster.save_raw("json"))
        return result

    def _round(
        self, booster: xgb.Booster, matrix: xgb.DMatrix, evaluated: list[tuple[xgb.DMatrix, str]], number: int
    ) -> VerticalRound:
        started = time.perf_counter()
        self._engine.check_predictions((0,))
        self._enter(Phase.UPDATE, number)
        booster.update(matrix, number)
        self._engine.check_round(structures(bytes(booster[number : number + 1].save_raw("json"))))
        metrics = {}
        if evaluated:
            self._engine.check_predictions(self._engine.eval_sets)
            self._enter(Phase.EVALUATE, number)
            metrics = parse_metrics(booster.eval_set(evaluated, number))
        return VerticalRound(number, metrics, time.perf_counter() - started)

    def _enter(self, phase: Phase, number: int) -> None:
        moment = TrainingStep(phase, number)
        self._mediator.enter(moment)
        self._engine.enter(moment)


def _unnamed(model: bytes) -> bytes:
    """Take names and lists off: XGBoost would send the names in column split, and training has places in the lists."""
    booster = xgb.Booster(model_file=bytearray(without_lists(model)))
    booster.feature_names = None
    booster.feature_types = None
    return bytes(booster.save_raw("json"))
