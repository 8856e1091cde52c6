"""What a training is whose trees the sites grow themselves: engine and arithmetic, grids, base score, first model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.fixed_point import exponent_of
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.arithmetic import ARITHMETICS, TreeParameters, arithmetic_of, why_not_own
from nvflare_plugins.growth.bins import BinLayout, bin_rows
from nvflare_plugins.growth.grid import WIDE_BITS, pair_grid, rows_on_grid
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.model import check_predictor, continued_model, new_model
from nvflare_plugins.growth.objectives import RESIDUAL_ROOTS, FirstEstimate, Objective
from nvflare_plugins.growth.rows import RowSet
from nvflare_plugins.growth.training import GrownModel, GrowthPlan
from nvflare_plugins.pooled.job import SHORT_WORD_BITS, Engine, HorizontalJob
from nvflare_plugins.pooled.value_bounds import ROW_LABELS, ROW_WEIGHTS, coarsest_pairs
from nvflare_plugins.wire.envelope import BaseScoreSource, Kind
from nvflare_plugins.wire.profiles import SHORT_BITS
from nvflare_plugins.wire.sums import Family, ProtectedSums
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.matrices import unlabelled_blocks
from nvflare_plugins.xgb.parameters import TrainingParameters

POOLED_ROWS = "pooled rows"
"""Among the scales that a site keeps of a job: bits of the pooled number of training rows."""
ARITHMETIC_ATTRIBUTE = "veilboost_arithmetic"
"""In a model that the sites have grown themselves: whose arithmetic they followed."""
_ROW_QUANTITIES = {str(Family.LABELS): ROW_LABELS, str(Family.WEIGHTS): ROW_WEIGHTS}


def is_grown(job: HorizontalJob, parameters: TrainingParameters) -> bool:
    """Return whether the sites grow the trees of a job themselves: a public fact of the job, the same at all sites.

    Raises:
        ConfigurationError: the job wants that for what they do not grow.
    """
    reason = why_not_own(parameters)
    if job.engine == Engine.OWN.value and reason is not None:
        raise ConfigurationError(
            f"engine='own' does not grow {reason}: leave engine at 'auto', which takes XGBoost 3.2 or 3.3 for it, or "
            "leave it out"
        )
    if reason is not None and job.arithmetic != "auto":
        raise ConfigurationError(
            f"arithmetic is read only where the sites grow the trees, and they do not grow {reason}: leave it out"
        )
    return job.engine != Engine.XGBOOST.value and reason is None


def check_words(job: HorizontalJob, parameters: TrainingParameters, n_rows: int = 1) -> None:
    """Refuse words of 32 bits where a row would keep too few of them, before any sum travels so.

    Args:
        n_rows: pooled training rows, or fewer while these are unknown.

    Privacy: a refusal tells the server that there are more pooled rows than such words are for, and no number.

    Raises:
        ConfigurationError: they do not do; decided from what all sites know, so at all sites alike.
    """
    if job.word_bits != SHORT_WORD_BITS:
        return
    if not is_grown(job, parameters):
        raise ConfigurationError(
            f"word_bits=32 is for trees that the sites grow, and they do not grow {why_not_own(parameters)}: set "
            "word_bits to 64"
        )
    facts = parameters.objective
    bounds = facts.gradient_bound, facts.hessian_bound
    if not coarsest_pairs(parameters, weighted=False) or facts.adaptive_leaf or None in bounds:
        raise ConfigurationError(
            f"word_bits=32 is refused for {facts.name} with these parameters, whose rows have no common bound, or one "
            "far above most of them: they would lose digits that decide splits. Set word_bits to 64"
        )
    g, h = (exponent_of(float(bound or 0.0)) for bound in bounds)
    pair_grid(g, h, n_rows, SHORT_BITS, rows_are_exact=True, coarsest=0.0)


def arithmetic_of_job(job: HorizontalJob) -> str:
    """Return the arithmetic that a job names, else that of this site's XGBoost. Raises: ConfigurationError."""
    return arithmetic_of(xgb.__version__).name if job.arithmetic == "auto" else job.arithmetic


def arithmetic_here(job: HorizontalJob) -> str:
    """Return the arithmetic of a job, once this site's XGBoost has predicted as a model of it says.

    Raises:
        ConfigurationError: this site's XGBoost is not known, or predicts otherwise.
    """
    chosen = arithmetic_of_job(job)
    check_predictor(chosen)
    return chosen


def grown_by(arithmetic: str) -> str:
    """Say who grew the trees of a job. Args: arithmetic: in which the sites did; "" where XGBoost did."""
    by_sites = f"the sites themselves, in the arithmetic of XGBoost {arithmetic}"
    return f"The trees were grown by {by_sites if arithmetic else 'XGBoost, beside a mediator'}."


@dataclass(frozen=True, slots=True, repr=False)
class Grown:
    """One training over grown trees at one site.

    Attributes:
        arithmetic: name of it, agreed among the sites.
        n_rows: pooled training rows.
        table: this site's training rows.
        finest: of ``pair_grid``.
        rows_per_leaf: least rows of a leaf, where they are counted; None where they are not.
        sets: names of the evaluation sets.
    """

    parameters: TrainingParameters
    arithmetic: str
    cuts: Cuts
    n_rows: int
    table: Table
    finest: int | None
    rows_per_leaf: int | None
    sets: tuple[str, ...]

    def plan(self, scales: Scales) -> GrowthPlan:
        """Return what is public about the training, once the scales are agreed."""
        parameters, arithmetic = self.parameters, ARITHMETICS[self.arithmetic]
        effective, objective = parameters.effective, Objective.of_job(parameters, self.arithmetic)
        parallel = int(effective.get("num_parallel_tree", 1))
        return GrowthPlan(
            layout=BinLayout.from_cuts(self.cuts, n_categories(self.table), arithmetic),
            tree=TreeParameters.from_effective(effective),
            arithmetic=arithmetic,
            objective=objective,
            eta=np.float32(np.float32(effective["learning_rate"]) / np.float32(parallel)),
            parallel_trees=parallel,
            seed=int(str(parameters.agreed["seed"])),
            seed_per_iteration=bool(parameters.agreed.get("seed_per_iteration", False)),
            metrics=tuple(Metric(name, objective) for name in parameters.metrics),
            sets=self.sets,
            n_rows=self.n_rows,
            bounds=scales.bounds,
            coarsest=coarsest_pairs(parameters, self.table.weight is not None),
            finest=self.finest,
            capacity_bits=scales.capacity_bits,
            rows_are_exact=scales.rows_are_exact,
            scale_exponents=scales.of_residuals,
            counts_leaves=self.rows_per_leaf is not None,
        )


@dataclass(frozen=True, slots=True)
class Scales:
    """What the agreed scales and the scheme give a training; see ``GrowthPlan``. Plain values all."""

    bounds: tuple[int, int]
    of_residuals: tuple[int, ...]
    capacity_bits: int
    rows_are_exact: bool

    @classmethod
    def of(cls, sums: ProtectedSums, grown: Grown) -> Scales:
        """Take them from the agreed ones."""
        g, h = (sums.scale_of(family).bound_exponent for family in (Family.GRADIENTS, Family.HESSIANS))
        needs_scale = Objective.of_job(grown.parameters, grown.arithmetic).needs_scale
        quantities = (RESIDUAL_ROOTS, str(Family.WEIGHTS)) if needs_scale else ()
        of_residuals = tuple(row_exponent(sums, quantity, grown.n_rows) for quantity in quantities)
        return cls((g, h), of_residuals, sums.pair_capacity_bits, sums.rows_are_exact)


def row_exponent(sums: ProtectedSums, quantity: str, n_rows: int) -> int:
    """Return the exponent of the grid on which rows of a quantity lie, so that all rows can be added."""
    bound = sums.scale_of(_ROW_QUANTITIES.get(quantity, quantity)).bound_exponent
    return bound + max(n_rows, 1).bit_length() - WIDE_BITS


def first_margins(
    grown: Grown, objective: Objective, table: Table, sums: ProtectedSums, world: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the base score of the model and the margins that follow from it, the same at all sites.

    Rows' numbers are rounded to grids of rows, so that their sums do not depend on who holds which rows.

    Shapes: results: float32[n_outputs].

    Privacy: every site learns the pooled sums behind the estimate.
    """
    parameters = grown.parameters
    source = parameters.objective.base_score_source
    if source is BaseScoreSource.GIVEN:
        given = parameters.agreed["base_score"]
        scores = np.array(given if isinstance(given, list) else [given], dtype=np.float32)
        base = np.broadcast_to(scores, (objective.n_outputs,)).astype(np.float32)
        return base, objective.margins_of(base)
    estimate = FirstEstimate(objective, source, world)
    while due := estimate.due:
        kind = Kind.STUMP_SUM if due[0] == Family.GRADIENTS else Kind.LABEL_MEAN
        if estimate.needs_whole_site:
            estimate.take(sums.sum(kind, np.asarray(estimate.local(table.label, table.weight), dtype=np.float64)))
            continue
        exponents = [row_exponent(sums, quantity, grown.n_rows) for quantity in due]
        own = estimate.local(table.label, table.weight, lambda quantity, rows: _on_grid(sums, grown, quantity, rows))
        pooled = sums.add(kind, np.asarray(own, dtype=np.int64), len(due), wide=True)
        estimate.take(np.ldexp(pooled.astype(np.float64), exponents))
    base = estimate.base_score()
    return base, objective.margins_of(base)


def _on_grid(sums: ProtectedSums, grown: Grown, quantity: str, rows: NDArray[np.float64]) -> NDArray[np.int64]:
    return rows_on_grid(quantity, rows, row_exponent(sums, quantity, grown.n_rows), grown.n_rows)


def margins_of_model(model: bytes, table: Table, n_outputs: int) -> NDArray[np.float32]:
    """Return what a model predicts for rows, before the objective's transform. Shapes: float32[n_rows, n_outputs]."""
    booster = xgb.Booster({"nthread": 1}, model_file=bytearray(model))
    if not table.n_rows:
        return np.empty((0, n_outputs), dtype=np.float32)
    found = [booster.predict(block, output_margin=True) for block in unlabelled_blocks(table)]
    return np.concatenate([one.reshape(-1, n_outputs) for one in found]).astype(np.float32)


@dataclass(frozen=True, slots=True, repr=False)
class Beginning:
    """What training begins with.

    Attributes:
        model: that it continues; None where it begins anew.
        is_own: the model is of this job, and of no other.
    """

    model: bytes | None
    is_own: bool


def first_model(
    grown: Grown, plan: GrowthPlan, begin: Beginning, sums: ProtectedSums, world: int
) -> tuple[GrownModel, NDArray[np.float32] | bytes]:
    """Return the model that training adds to, and the margins of all rows, or the model that they follow from.

    Raises:
        ConfigurationError: the rounds so far were grown in another arithmetic.
    """
    table, parallel = grown.table, plan.parallel_trees
    columns = {"feature_names": table.feature_names, "feature_types": table.feature_types}
    if begin.model is None:
        base, margins = first_margins(grown, plan.objective, table, sums, world)
        is_given = grown.parameters.objective.base_score_source is BaseScoreSource.GIVEN
        document = new_model(plan.objective, base, is_given=is_given, num_parallel_tree=parallel, **columns)
        start: NDArray[np.float32] | bytes = margins
    else:
        start = begin.model
        document = json.loads(begin.model) if begin.is_own else {}
        said = document.get("learner", {}).get("attributes", {}).get(ARITHMETIC_ATTRIBUTE)
        if begin.is_own and said != grown.arithmetic:
            by = "XGBoost" if said is None else f"the sites in the arithmetic {said}"
            raise ConfigurationError(
                f"the rounds so far were grown by {by}, and the sites would go on in the arithmetic "
                f"{grown.arithmetic}: set engine and arithmetic as they were, and install the XGBoost of then"
            )
        if not begin.is_own:
            document = continued_model(begin.model, plan.objective, parallel=parallel, **columns)
    model = GrownModel(document)
    model.set_attr(**{ARITHMETIC_ATTRIBUTE: grown.arithmetic})
    return model, start


def row_set(plan: GrowthPlan, table: Table, start: NDArray[np.float32] | bytes, file: Path | None = None) -> RowSet:
    """Bin rows.

    Args:
        start: of ``first_model``.
        file: for the bins, if they are not to be held.
    """
    n_outputs = plan.objective.n_outputs
    if isinstance(start, bytes):
        margins = margins_of_model(start, table, n_outputs)
    else:
        margins = np.broadcast_to(start, (table.n_rows, n_outputs)).astype(np.float32)
    return RowSet(bin_rows(plan.layout, table.blocks(), table.n_rows, file=file), table.label, table.weight, margins)


def n_categories(table: Table) -> dict[int, int]:
    """Return the number of categories of each categorical column, by its place."""
    return {i: len(table.categories[name]) for i, name in enumerate(table.feature_names) if name in table.categories}
