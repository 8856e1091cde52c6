"""The training of one site that grows XGBoost's trees itself, in step with the other sites.

A tree costs one exchange a level, or one a split under ``lossguide``: the sum of all rows rides on the root's
histogram. What all sites have received alike they compute alike, so that each ends with the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.arithmetic import Arithmetic, GradientUnit
from nvflare_plugins.growth.bins import BinLayout
from nvflare_plugins.growth.first_estimate import RESIDUAL_ROOTS, adaptive_leaves
from nvflare_plugins.growth.grid import PairGrid, pair_grid, rows_on_grid
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.model import add_round, n_rounds_of
from nvflare_plugins.growth.objectives import Objective
from nvflare_plugins.growth.sampling import TreeRandom
from nvflare_plugins.growth.site_rows import HeldRows
from nvflare_plugins.growth.site_sums import GrowthSums
from nvflare_plugins.growth.tree import Tree, TreeGrower
from nvflare_plugins.growth.tree_parameters import TreeParameters
from nvflare_plugins.wire.catalogue import Phase, TrainingStep
from nvflare_plugins.wire.channel import Place, RescaleRequested
from nvflare_plugins.wire.sums import Family
from nvflare_plugins.xgb.early_stopping import EarlyStopping
from nvflare_plugins.xgb.model_json import model_bytes
from nvflare_plugins.xgb.rounds import RoundRecord


@dataclass(frozen=True, slots=True, repr=False)
class GrowthPlan:
    """What is public about one training, the same at all sites.

    Attributes:
        eta: learning rate of one tree, divided by the number of parallel trees.
        parallel_trees: trees of one output and round.
        seed: XGBoost's, of columns alone.
        metrics: to evaluate, in order, on each of the sets.
        sets: names of the evaluation sets.
        n_rows: no fewer rows than all sites have together, a public number.
        bounds: exponents of the largest |gradient| and hessian of a row; a row that exceeds them widens the grid.
        coarsest: the largest step of gradient sums that will do; 0 for the finest.
        capacity_bits, rows_are_exact: of the scheme, see ``pair_grid``.
        scale_exponents: steps on which the rows of ``HeldRows.scale_parts`` lie, 2^exponent; of smooth losses alone.
        counts_leaves: rows are counted in the leaves of each tree.
    """

    layout: BinLayout
    tree: TreeParameters
    arithmetic: Arithmetic
    objective: Objective
    eta: np.float32
    parallel_trees: int
    seed: int
    seed_per_iteration: bool
    metrics: tuple[Metric, ...]
    sets: tuple[str, ...]
    n_rows: int
    bounds: tuple[int, int]
    coarsest: float
    finest: int | None
    capacity_bits: int
    rows_are_exact: bool
    scale_exponents: tuple[int, ...]
    counts_leaves: bool


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How long to train and when to stop."""

    num_rounds: int
    early_stopping_rounds: int | None = None
    first_round: int = 0
    moments_before: int = 0  # rounds of the trainings before this one in the same attempt


@dataclass(slots=True, repr=False)
class GrownModel:
    """A model as it grows: XGBoost's document (model.py)."""

    document: dict[str, Any]

    @classmethod
    def of_bytes(cls, model: bytes) -> GrownModel:
        """Read what ``to_bytes`` wrote."""
        return cls(json.loads(model))

    @property
    def n_rounds(self) -> int:
        """Return the number of rounds."""
        return n_rounds_of(self.document)

    def attr(self, key: str) -> str | None:
        """Return an attribute, as a Booster does."""
        found: str | None = self.document["learner"]["attributes"].get(key)
        return found

    def set_attr(self, **kwargs: str) -> None:
        """Set attributes, as a Booster does."""
        self.document["learner"]["attributes"] |= kwargs

    def append_round(self, trees: Sequence[Sequence[Tree]]) -> None:
        """Add the trees of a round, those of each output in turn."""
        add_round(self.document, [[tree.fields() for tree in of_output] for of_output in trees])

    def to_bytes(self) -> bytes:
        """Return the model in XGBoost's JSON form."""
        return model_bytes(self.document)


@dataclass(slots=True)
class GrownResult:
    """A trained model and how it came about."""

    model: GrownModel
    rounds: list[RoundRecord] = field(default_factory=list)
    best_round: int | None = None
    best_score: float | None = None


class Draws(Protocol):
    """Which rows take part in a round."""

    def of_round(self, number: int) -> NDArray[np.bool_]:
        """Return which rows take part in a round. Shapes: bool[n_rows]."""


class _TreeSums:
    """Adds the gradient pairs of one tree."""

    def __init__(self, sums: GrowthSums, grid: PairGrid, fits: bool) -> None:
        self._sums, self._grid, self._fits = sums, grid, fits

    def add(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sums over all sites. Raises: RescaleRequested: for the root, where a site's pairs do not fit."""
        return self._sums.pairs(values, self._grid, self._fits)


class Training:
    """One training at one site."""

    def __init__(
        self,
        plan: GrowthPlan,
        rows: HeldRows,
        sums: GrowthSums,
        channel: Place,
        settings: LoopSettings,
        draws: Draws | None = None,
        on_round: Callable[[RoundRecord, GrownModel], None] | None = None,
    ) -> None:
        """Prepare to train.

        Args:
            draws: which of this site's rows take part in each round; None for all.
            on_round: called after every round with the record and the model so far.
        """
        self._plan, self._rows, self._sums, self._channel, self._settings = plan, rows, sums, channel, settings
        self._draws, self._on_round = draws, on_round
        self._grower = TreeGrower(plan.layout, plan.tree, plan.arithmetic, plan.eta)
        self._random = TreeRandom(
            plan.tree, plan.layout.n_features, plan.arithmetic, plan.seed, plan.seed_per_iteration
        )
        self._grid = self._made(plan.bounds)

    def run(self, model: GrownModel) -> GrownResult:
        """Train; the rows have margins already, and the model what they were made from. It is trained further.

        Raises:
            VeilBoostError: what ended the training.
        """
        settings, result = self._settings, GrownResult(model)
        first, last = settings.first_round, settings.first_round + settings.num_rounds
        stopping = EarlyStopping(settings.early_stopping_rounds, max(model.n_rounds - first, 0))
        if first:
            stopping.take_up(model)
        for number in range(first, last):
            if stopping.is_over(number - 1):
                break
            record = self._round(model, number)
            result.rounds.append(record)
            stopping.note(model, record.round, record.metrics)
            if self._on_round is not None:
                self._on_round(record, model)
        self._enter(Phase.FINISH, last)
        result.best_round, result.best_score = stopping.best_round, stopping.best_score
        return result

    def _round(self, model: GrownModel, number: int) -> RoundRecord:
        started, summed, waited = time.perf_counter(), self._sums.seconds, self._channel.network_seconds
        self._enter(Phase.UPDATE, number)
        self._random.begin_round(number)
        model.append_round(self._trees(number))
        metrics = {}
        if self._plan.metrics and self._plan.sets:
            self._enter(Phase.EVALUATE, number)
            metrics = self._evaluate()
        total = time.perf_counter() - started
        summed, waited = self._sums.seconds - summed, self._channel.network_seconds - waited
        return RoundRecord(number, metrics, total, total - summed, summed - waited, waited)

    # -- trees --------------------------------------------------------------------------------------------------------

    def _trees(self, number: int) -> list[list[Tree]]:
        """Grow the trees of a round: those of each output in turn."""
        rows, plan = self._rows, self._plan
        drawn = None if self._draws is None else self._draws.of_round(number)
        largest = rows.begin_round(drawn, self._scale())
        grown: list[list[Tree]] = []
        counts = []
        for output in range(plan.objective.n_outputs):
            of_output = []
            for _ in range(plan.parallel_trees):
                tree = self._tree(output, largest[output])
                if plan.objective.adaptive_leaf:
                    tree = tree.with_leaf_values(self._adaptive(tree))
                if plan.counts_leaves:
                    counts.append(rows.leaf_rows(tree.n_nodes)[tree.leaves])
                rows.end_tree(output, tree.conditions, tree.splits)
                of_output.append(tree)
            grown.append(of_output)
        if plan.counts_leaves:
            self._sums.check_leaves(np.concatenate(counts))
        return grown

    def _scale(self) -> np.float32:
        """Return the scale of a smooth loss, from one more sum over all rows.

        Raises:
            CapacityExceeded: a row is larger than was agreed, so that the sum of all might not fit.
        """
        plan = self._plan
        if not plan.objective.needs_scale:
            return np.float32(0)
        parts = zip((RESIDUAL_ROOTS, str(Family.WEIGHTS)), self._rows.scale_parts(), plan.scale_exponents, strict=True)
        own = [rows_on_grid(name, rows, exponent, plan.n_rows).sum() for name, rows, exponent in parts]
        pooled = self._sums.rows(np.array(own, dtype=np.int64)).astype(np.float64)
        return plan.objective.scale(*np.ldexp(pooled, plan.scale_exponents).tolist())

    def _tree(self, output: int, largest: NDArray[np.float32]) -> Tree:
        sampler = self._random.columns
        sampler.begin_tree()
        while True:
            grid = self._grid
            fits = all(float(x) <= 2.0**bound for x, bound in zip(largest, (grid.g_bound, grid.h_bound), strict=True))
            sums = _TreeSums(self._sums, grid, fits)
            self._rows.begin_tree(output, grid.g_exponent, grid.h_exponent)
            try:
                unit = GradientUnit(grid.g_exponent, grid.h_exponent)
                slack = (4 * self._channel.world) << grid.shift if grid.shift else 0
                return self._grower.grow(self._rows, sums, unit, sampler, slack)
            except RescaleRequested:
                self._grid = self._made(self._sums.widened(grid, largest))

    def _made(self, bounds: tuple[int, int]) -> PairGrid:
        plan = self._plan
        return pair_grid(*bounds, plan.n_rows, plan.capacity_bits, plan.rows_are_exact, plan.coarsest, plan.finest)

    def _adaptive(self, tree: Tree) -> NDArray[np.float32]:
        """Return leaves as the mean of the sites' residual quantiles. Shapes: float32[n_leaves]."""
        node, residuals, weight = self._rows.residuals()
        leaf = np.searchsorted(tree.leaves, node).astype(np.int32)
        sums = self._sums.leaf_quantiles(leaf, residuals, weight, tree.leaves.size)
        return adaptive_leaves(*sums, tree.conditions[tree.leaves], self._plan.eta)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of all sets, by "set-metric", from one exchange."""
        plan = self._plan
        places = [(number, name, metric) for number, name in enumerate(plan.sets) for metric in plan.metrics]
        parts = [part for number in range(len(plan.sets)) for part in self._rows.metric_parts(number, plan.metrics)]
        totals = self._sums.metrics([(metric.name, part) for (_, _, metric), part in zip(places, parts, strict=True)])
        return {
            f"{name}-{metric.name}": metric.value(total)
            for (_, name, metric), total in zip(places, totals, strict=True)
        }

    def _enter(self, phase: Phase, number: int) -> None:
        self._channel.moment = TrainingStep(phase, self._settings.moments_before + number)
