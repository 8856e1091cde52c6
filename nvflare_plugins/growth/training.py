"""The training of one site that grows XGBoost's trees itself, in step with the other sites.

A tree costs one exchange a level, or one a split under ``lossguide``: the sum of all rows rides on the root's
histogram. So do the metrics of the round before, where nothing waits for them: early stopping would, and after the last
round there is no root. What all sites have received alike they compute alike, so that each ends with the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth import survival
from nvflare_plugins.growth.arithmetic import Arithmetic, GradientUnit, TreeParameters
from nvflare_plugins.growth.bins import BinLayout
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.model import add_round, base_score_of, largest_margin, n_rounds_of
from nvflare_plugins.growth.objectives import RESIDUAL_ROOTS, Objective, Scale, adaptive_leaves
from nvflare_plugins.growth.rows import HeldRows
from nvflare_plugins.growth.sampling import TreeRandom
from nvflare_plugins.growth.site_sums import GrowthSums, PairGrid, Parts, pair_grid, rows_on_grid
from nvflare_plugins.growth.tree import Tree, TreeGrower
from nvflare_plugins.wire.channel import RescaleRequested, SiteProgress
from nvflare_plugins.wire.envelope import Kind, Phase, TrainingStep
from nvflare_plugins.wire.sums import Family
from nvflare_plugins.xgb.model_json import model_bytes
from nvflare_plugins.xgb.rounds import EarlyStopping, RoundRecord, TrainingResult


@dataclass(frozen=True, slots=True)
class Scales:
    """What the agreed scales and the scheme give a training. Plain values all.

    Attributes:
        bounds: exponents of the largest |gradient| and hessian of a row; a row that exceeds them widens the grid.
        of_residuals: steps on which the rows of ``HeldRows.scale_parts`` lie, 2^exponent; of smooth losses alone.
        capacity_bits, rows_are_exact: of the scheme, see ``pair_grid``.
        weight_bound: no row's weight is larger than 2^weight_bound.
        events: weight of the events in each bin of times, of survival:cox alone.
    """

    bounds: tuple[int, int]
    of_residuals: tuple[int, ...]
    capacity_bits: int
    rows_are_exact: bool
    weight_bound: int
    events: tuple[float, ...] = ()


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
        coarsest: the largest step of gradient sums that will do; 0 for the finest.
        counts_leaves: rows are counted in the leaves of each tree.
        n_queries: of all sites, where pairs of their rows are drawn by it.
        drew_pairs: pairs were drawn for the base score, before the first round.
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
    scales: Scales
    coarsest: float
    finest: int | None
    counts_leaves: bool
    n_queries: int = 0
    drew_pairs: bool = False

    @property
    def draws_pairs(self) -> bool:
        """Whether pairs of rows are drawn in each round."""
        return self.objective.rules is not None and self.objective.rules.is_mean


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How long to train and when to stop.

    Attributes:
        moments_before: rounds of the trainings before this one in the same attempt.
        metrics_ride: those of a round may travel with the first root of the next one.
    """

    num_rounds: int
    early_stopping_rounds: int | None = None
    first_round: int = 0
    moments_before: int = 0
    metrics_ride: bool = False


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


Draws = Callable[[int], NDArray[np.bool_]]
"""Tells which rows take part in a round, by its number. Shapes: bool[n_rows]."""
_Totals = Sequence[NDArray[np.float64]]
_Due = tuple[int, list[tuple[str, Parts]]]
"""A round whose metrics are not added yet, and this site's parts of them by name."""


class Training:
    """One training at one site."""

    def __init__(
        self,
        plan: GrowthPlan,
        rows: HeldRows,
        sums: GrowthSums,
        channel: SiteProgress,
        settings: LoopSettings,
        draws: Draws | None = None,
        on_round: Callable[[RoundRecord, GrownModel], None] | None = None,
    ) -> None:
        """Prepare to train.

        Args:
            draws: which of this site's rows take part in each round; None for all.
            on_round: called after every round with the record and the model so far; where metrics ride, when they
                are there, before the next round changes the model.
        """
        self._plan, self._rows, self._sums, self._channel, self._settings = plan, rows, sums, channel, settings
        self._draws, self._on_round = draws, on_round
        self._grower = TreeGrower(plan.layout, plan.tree, plan.arithmetic, plan.eta)
        self._random = TreeRandom(
            plan.tree, plan.layout.n_features, plan.arithmetic, plan.seed, per_iteration=plan.seed_per_iteration
        )
        if plan.drew_pairs:
            self._random.pair_seed(0, plan.n_queries)
        self._grid = self._made(plan.scales.bounds)
        self._places = [(name, metric) for name in plan.sets for metric in plan.metrics]
        self._due: _Due | None = None
        self._range: survival.RiskRange | None = None

    def run(self, model: GrownModel) -> TrainingResult:
        """Train; the rows have margins already, and the model what they were made from. It is trained further.

        Raises:
            VeilBoostError: what ended the training.
        """
        settings, self._model, self._rounds = self._settings, model, list[RoundRecord]()
        first, last = settings.first_round, settings.first_round + settings.num_rounds
        self._begin_risks()
        self._stopping = stopping = EarlyStopping(settings.early_stopping_rounds, max(model.n_rounds - first, 0))
        if first:
            stopping.take_up(model)
        rides = settings.metrics_ride and settings.early_stopping_rounds is None and bool(self._places)
        self._last = self._clocks()
        for number in range(first, last):
            if stopping.is_over(number - 1):
                break
            self._enter(Phase.UPDATE, number)
            self._random.begin_round(number)
            model.append_round(self._trees(number))
            self._due = number, self._metric_parts()
            if not rides or number + 1 == last:
                self._evaluate(self._due)
        self._enter(Phase.FINISH, last)
        return TrainingResult(model.to_bytes(), self._rounds, stopping.best_round, stopping.best_score)

    # -- trees --------------------------------------------------------------------------------------------------------

    def _trees(self, number: int) -> list[list[Tree]]:
        """Grow the trees of a round: those of each output in turn."""
        rows, plan = self._rows, self._plan
        drawn = None if self._draws is None else self._draws(number)
        pair_seed = self._random.pair_seed(number, plan.n_queries) if plan.draws_pairs else 0
        largest = rows.begin_round(drawn, self._scale(), pair_seed)
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
                if self._range is not None:
                    self._range.grown(tree.conditions[tree.leaves])
                of_output.append(tree)
            grown.append(of_output)
        if plan.counts_leaves:
            self._sums.check_leaves(np.concatenate(counts))
        return grown

    def _begin_risks(self) -> None:
        """Bound the hazard ratios that the model may give any row."""
        plan, document = self._plan, self._model.document
        if plan.scales.events:
            base = plan.objective.margins_of(base_score_of(document))
            self._range = survival.RiskRange(plan.n_rows, 2.0**plan.scales.weight_bound, largest_margin(document, base))

    def _hazards(self, known: survival.RiskRange) -> survival.Hazards:
        """Return what a round's gradients need of the rows at risk, from one more sum over all rows.

        Raises:
            ConfigurationError: hazard ratios lie too far apart.
        """
        known.check()
        plan, events = self._plan, np.array(self._plan.scales.events)
        words = self._sums.rows(Kind.RISK_SUMS, self._rows.risk_words(plan.n_rows))
        at_bins = survival.from_words(words, plan.n_rows)
        known.opened(at_bins, events)
        return survival.hazards(at_bins, events)

    def _scale(self) -> Scale:
        """Return the scale of a smooth loss, or hazards, from one more sum over all rows.

        Raises:
            CapacityExceeded: a row is larger than was agreed, so that the sum of all might not fit.
            ConfigurationError: see ``_hazards``.
        """
        plan = self._plan
        if self._range is not None:
            return self._hazards(self._range)
        if not plan.objective.is_smooth:
            return np.float32(0)
        exponents = plan.scales.of_residuals
        parts = zip((RESIDUAL_ROOTS, str(Family.WEIGHTS)), self._rows.scale_parts(), exponents, strict=True)
        own = [rows_on_grid(name, rows, exponent, plan.n_rows).sum() for name, rows, exponent in parts]
        pooled = self._sums.rows(Kind.RESIDUAL_SCALE, np.array(own, dtype=np.int64)).astype(np.float64)
        return plan.objective.scale(*np.ldexp(pooled, exponents).tolist())

    def _tree(self, output: int, largest: NDArray[np.float32]) -> Tree:
        sampler = self._random.columns
        sampler.begin_tree()
        while True:
            grid = self._grid
            fits = all(float(x) <= 2.0**bound for x, bound in zip(largest, (grid.g_bound, grid.h_bound), strict=True))
            self._rows.begin_tree(output, grid.g_exponent, grid.h_exponent)
            try:
                unit = GradientUnit(grid.g_exponent, grid.h_exponent)
                slack = (4 * self._channel.world) << grid.shift if grid.shift else 0
                return self._grower.grow(self._rows.binned, partial(self._add, grid, fits=fits), unit, sampler, slack)
            except RescaleRequested:
                if self._due is None:
                    self._grid = self._made(self._sums.widened(grid, largest))
                else:  # the metrics may be what does not fit: they go alone, under a new scale, and the root again
                    self._finish(self._due[0], self._sums.metrics(self._due[1]))

    def _add(self, grid: PairGrid, values: NDArray[np.int64], *, fits: bool) -> NDArray[np.int64]:
        """Add gradient pairs of one tree over all sites, and with those of the root the metrics that are due.

        Raises:
            RescaleRequested: for the root, where a site's pairs, or the metrics, do not fit.
        """
        number, parts = self._due or (0, [])
        added, totals = self._sums.pairs(values, grid, fits=fits, parts=parts)
        if self._due is not None:
            self._finish(number, totals)
        return added

    def _made(self, bounds: tuple[int, int]) -> PairGrid:
        plan = self._plan
        return pair_grid(
            *bounds,
            1 if plan.scales.events else plan.n_rows,  # survival.py bounds the sums of any rows
            plan.scales.capacity_bits,
            rows_are_exact=plan.scales.rows_are_exact,
            coarsest=plan.coarsest,
            finest=plan.finest,
        )

    def _adaptive(self, tree: Tree) -> NDArray[np.float32]:
        """Return leaves as the mean of the sites' residual quantiles. Shapes: float32[n_leaves]."""
        node, residuals, weight = self._rows.residuals()
        leaf = np.searchsorted(tree.leaves, node).astype(np.int32)
        sums = self._sums.leaf_quantiles(leaf, residuals, weight, tree.leaves.size)
        return adaptive_leaves(*sums, tree.conditions[tree.leaves], self._plan.eta)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self, due: _Due) -> None:
        """Complete a round with an exchange of its metrics' own, if it has any."""
        totals: _Totals = ()
        if due[1]:
            self._enter(Phase.EVALUATE, due[0])
            totals = self._sums.metrics(due[1])
        self._finish(due[0], totals)

    def _finish(self, number: int, totals: _Totals) -> None:
        """Complete a round with the metrics of all sites. Its times are those since the one before was told."""
        named = zip(self._places, totals, strict=True)
        values = {f"{name}-{metric.name}": metric.value(total) for (name, metric), total in named}
        total, summed, waited = (a - b for a, b in zip(self._clocks(), self._last, strict=True))
        record = RoundRecord(number, values, total, total - summed, summed - waited, waited)
        self._due = None
        self._rounds.append(record)
        self._stopping.note(self._model, number, values)
        if self._on_round is not None:
            self._on_round(record, self._model)
        self._last = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._sums.seconds, self._channel.network_seconds

    def _metric_parts(self) -> list[tuple[str, Parts]]:
        """Return this site's parts of the metrics of all sets, set by set."""
        sets = range(len(self._plan.sets))
        parts = [part for number in sets for part in self._rows.metric_parts(number, self._plan.metrics)]
        return [(metric.name, part) for (_, metric), part in zip(self._places, parts, strict=True)]

    def _enter(self, phase: Phase, number: int) -> None:
        self._channel.moment = TrainingStep(phase, self._settings.moments_before + number)
