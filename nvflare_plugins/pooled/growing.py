"""What a training is whose trees the sites grow themselves: engine and arithmetic, grids, base score, first model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.fixed_point import exponent_of
from nvflare_plugins.data.labels import Label
from nvflare_plugins.data.table import Table, reading_as_told
from nvflare_plugins.growth import survival
from nvflare_plugins.growth.arithmetic import ARITHMETICS, TreeParameters, arithmetic_of, why_not_own
from nvflare_plugins.growth.bins import BinLayout, bin_rows
from nvflare_plugins.growth.metrics import Metric
from nvflare_plugins.growth.model import check_predictor, continued_model, new_model
from nvflare_plugins.growth.objectives import RESIDUAL_ROOTS, FirstEstimate, Objective
from nvflare_plugins.growth.ranking import Queries
from nvflare_plugins.growth.rows import HeldRows, RowSet
from nvflare_plugins.growth.sampling import first_pair_seed
from nvflare_plugins.growth.site_sums import WIDE_BITS, Floats, PairGrid, Parts, SiteSums, pair_grid, rows_on_grid
from nvflare_plugins.growth.training import Draws, GrownModel, GrowthPlan, LoopSettings, Scales, Training
from nvflare_plugins.pooled import shards
from nvflare_plugins.pooled.job import SHORT_WORD_BITS, Engine, HorizontalJob
from nvflare_plugins.pooled.row_floors import check_leaves
from nvflare_plugins.pooled.value_bounds import ROW_LABELS, ROW_WEIGHTS, coarsest_pairs
from nvflare_plugins.wire.channel import Channel, RescaleRequested
from nvflare_plugins.wire.envelope import KIND_BY_CODE, BaseScoreSource, Kind, Phase, TrainingStep
from nvflare_plugins.wire.profiles import SHORT_BITS
from nvflare_plugins.wire.sums import Family, ProtectedSums
from nvflare_plugins.workers.shards import Answer, Ask, Conversation, ShardPlace, one_model, said_of_model
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.matrices import n_categories, unlabelled_blocks
from nvflare_plugins.xgb.objectives import Task
from nvflare_plugins.xgb.parameters import TrainingParameters, check_parameters
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult

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
    grown = job.engine != Engine.XGBOOST.value and reason is None
    if not grown and parameters.objective.task is Task.SURVIVAL:
        raise ConfigurationError(
            f"{parameters.objective.name} is trained where the sites grow the trees: leave engine at 'auto' and "
            "booster at 'gbtree'"
        )
    return grown


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
    is_close = not facts.adaptive_leaf and facts.usual_hessian is None and None not in bounds
    if not coarsest_pairs(parameters, weighted=False) or not is_close:
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
        n_times: most bins of times of any set, of survival:cox alone; the tables' labels are places in them.
        queries: of the training rows and of the evaluation set, where rows are ranked.
    """

    parameters: TrainingParameters
    arithmetic: str
    cuts: Cuts
    n_rows: int
    table: Table
    finest: int | None
    rows_per_leaf: int | None
    sets: tuple[str, ...]
    n_times: int = 0
    queries: tuple[Queries | None, Queries | None] = (None, None)

    @property
    def n_queries(self) -> int:
        """Number of the training queries of all sites, where pairs are drawn by it."""
        return 0 if self.queries[0] is None else self.queries[0].n_all

    def plan(self, scales: Scales) -> GrowthPlan:
        """Return what is public about the training, once the scales are agreed."""
        parameters, arithmetic = self.parameters, ARITHMETICS[self.arithmetic]
        effective = parameters.effective
        objective = replace(Objective.of_job(parameters, self.arithmetic), n_times=self.n_times)
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
            scales=scales,
            coarsest=coarsest_pairs(parameters, weighted=self.table.weight is not None),
            finest=self.finest,
            counts_leaves=self.rows_per_leaf is not None,
            n_queries=self.n_queries,
        )


def scales_of(sums: ProtectedSums, grown: Grown) -> Scales:
    """Take the agreed scales, and bounds of survival:cox from the pooled weights of events."""
    g, h = (sums.scale_of(family).bound_exponent for family in (Family.GRADIENTS, Family.HESSIANS))
    events = pooled_events(grown, sums)
    if events:  # no sum of any rows is larger (growth/survival.py)
        g, h = exponent_of(2.0 * sum(events)), exponent_of(sum(events))
    is_smooth = Objective.of_job(grown.parameters, grown.arithmetic).is_smooth
    quantities = (RESIDUAL_ROOTS, str(Family.WEIGHTS)) if is_smooth else ()
    of_residuals = tuple(row_exponent(sums, quantity, grown.n_rows) for quantity in quantities)
    weight_bound = sums.scale_of(ROW_WEIGHTS).bound_exponent
    return Scales((g, h), of_residuals, sums.pair_capacity_bits, sums.rows_are_exact, weight_bound, events)


def pooled_events(grown: Grown, sums: ProtectedSums) -> tuple[float, ...]:
    """Return the weight of the events of all sites in each bin of times; none where there are no bins.

    Privacy: every site learns these sums, of at least as many events each as the grid asks for.

    Raises:
        ConfigurationError: no event has weight.
    """
    if not grown.n_times:
        return ()
    exponent, label = row_exponent(sums, str(Family.WEIGHTS), grown.n_rows), grown.table.label
    weights = survival.event_weights(label, grown.table.weight)
    own = np.zeros(grown.n_times, dtype=np.int64)
    np.add.at(own, survival.places_of(label)[0], rows_on_grid(ROW_WEIGHTS, weights, exponent, grown.n_rows))
    pooled = sums.add(Kind.RISK_SUMS, own, own.size, wide=True)
    if not pooled.any():
        raise ConfigurationError(f"{grown.parameters.objective.name}: no event has a weight above 0")
    return tuple(np.ldexp(pooled.astype(np.float64), exponent).tolist())


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
    pairs = first_pair_seed(ARITHMETICS[grown.arithmetic], int(str(parameters.agreed["seed"])), grown.n_queries)
    estimate = FirstEstimate(objective, source, world, grown.queries[0], pairs)
    while due := estimate.due:
        kind = Kind.STUMP_SUM if due[0] == Family.GRADIENTS else Kind.LABEL_MEAN
        if estimate.needs_whole_site:
            estimate.take(sums.sum(kind, np.asarray(estimate.local(table.label, table.weight), dtype=np.float64)))
            continue
        exponents = [row_exponent(sums, quantity, grown.n_rows) for quantity in due]

        def on_grid(quantity: str, rows: NDArray[np.float64]) -> NDArray[np.int64]:
            return rows_on_grid(quantity, rows, row_exponent(sums, quantity, grown.n_rows), grown.n_rows)

        own = estimate.local(table.label, table.weight, on_grid)
        pooled = sums.add(kind, np.asarray(own, dtype=np.int64), len(due), wide=True)
        estimate.take(np.ldexp(pooled.astype(np.float64), exponents))
    base = estimate.base_score()
    return base, objective.margins_of(base)


def margins_of_model(model: bytes, table: Table, n_outputs: int) -> NDArray[np.float32]:
    """Return what a model predicts for rows, before the objective's transform. Shapes: float32[n_rows, n_outputs]."""
    booster = xgb.Booster({"nthread": 1}, model_file=bytearray(model))
    if not table.n_rows:
        return np.empty((0, n_outputs), dtype=np.float32)
    found = [booster.predict(block, output_margin=True) for block in unlabelled_blocks(table)]
    return np.concatenate([one.reshape(-1, n_outputs) for one in found]).astype(np.float32)


def first_model(
    grown: Grown, plan: GrowthPlan, initial: bytes | None, sums: ProtectedSums, world: int, *, is_own: bool
) -> tuple[GrownModel, NDArray[np.float32] | bytes]:
    """Return the model that training adds to, and the margins of all rows, or the model that they follow from.

    Args:
        initial: the model that training continues; None where it begins anew.
        is_own: that model is of this job, and of no other.

    Raises:
        ConfigurationError: the rounds so far were grown in another arithmetic.
    """
    table, parallel = grown.table, plan.parallel_trees
    columns = {"feature_names": table.feature_names, "feature_types": table.feature_types}
    start: NDArray[np.float32] | bytes
    if initial is None:
        base, margins = first_margins(grown, plan.objective, table, sums, world)
        is_given = grown.parameters.objective.base_score_source is BaseScoreSource.GIVEN
        document = new_model(plan.objective, base, is_given=is_given, num_parallel_tree=parallel, **columns)
        start = margins
    elif is_own:
        start, document = initial, json.loads(initial)
        said = document["learner"].get("attributes", {}).get(ARITHMETIC_ATTRIBUTE)
        if said != grown.arithmetic:
            by = "XGBoost" if said is None else f"the sites in the arithmetic {said}"
            raise ConfigurationError(
                f"the rounds so far were grown by {by}, and the sites would go on in the arithmetic "
                f"{grown.arithmetic}: set engine and arithmetic as they were, and install the XGBoost of then"
            )
    else:
        start, document = initial, continued_model(initial, plan.objective, parallel=parallel, **columns)
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


# A site's training with trees that the sites grow themselves, over rows in this process or in shards at workers.
#
# Every shard grows all trees from the sums of all sites. The process that speaks for its site adds the integers of its
# shards, which gives those of the site whatever their number, and protects them once. So the model is the same bytes
# for any number of shards. Beside what every shard asks (shards.py):
#
#     pairs      moment, sums, grid,  sums of gradient pairs, and with    reply: int64, those of all sites, and those
#                whether all fit,     a root what metrics sends, of the   of metrics; none where another grid or scale
#                parts                round before                        is needed
#     wider      moment, grid,        another grid                        reply: its bounds
#                largest row
#     rows       moment, kind, sums   that gradients need                 reply: int64, those of all sites
#     leaves     moment, counts       int64[n_leaves] of a round          reply: nothing
#     quantiles  moment, leaf,        what the site's quantiles are of    reply: sites with rows, sums of quantiles
#                residuals, weights,
#                number of leaves
#     metrics    moment, parts        of each metric                      reply: those of all sites


class GrownTraining(shards.ShardedTraining):
    """One training, from the model that it begins with.

    Attributes:
        plan: what is public about it.
        model: that training adds to.
        start: of ``first_model``.
        sums: what the site's own process asks of all sites.
    """

    SHARD = "nvflare_plugins.pooled.growing:GrownShard"

    def __init__(
        self,
        grown: Grown,
        sums: ProtectedSums,
        channel: Channel,
        settings: LoopSettings,
        draws: Draws | None,
        initial: bytes | None = None,
    ) -> None:
        """Agree on the first estimate, once the scales are agreed. Args: initial: a model that is continued."""
        self._grown, self._channel, self._settings, self.draws = grown, channel, settings, draws
        self.plan = grown.plan(scales_of(sums, grown))
        is_own, source = settings.first_round > 0, grown.parameters.objective.base_score_source
        if self.plan.draws_pairs and initial is None and source is not BaseScoreSource.GIVEN:
            self.plan = replace(self.plan, drew_pairs=True)
        self.model, self.start = first_model(grown, self.plan, initial, sums, channel.world, is_own=is_own)
        least, alpha = grown.rows_per_leaf or 0, float(self.plan.objective.leaf_quantile)
        self.sums = SiteSums(sums, self.plan.layout.starts, alpha, lambda counts: check_leaves(sums, counts, least))

    def rows(self, evaluated: Sequence[Table | None], files: Sequence[Path | None] | None = None) -> HeldRows:
        """Bin the rows.

        Args:
            evaluated: rows of each evaluation set; None stands for the training rows.
            files: for the bins of the training rows, and of each evaluation set; None holds them.
        """
        return _held(self.plan, self._grown.table, evaluated, self.start, files, self._grown.queries)

    def here(self, held: HeldRows, watch: shards.RoundWatch) -> TrainingResult:
        """Train with the other sites, over rows in this process."""

        def after(record: RoundRecord, so_far: GrownModel) -> None:
            watch.round_over(record, so_far.to_bytes)

        training = Training(self.plan, held, self.sums, self._channel, self._settings, self.draws, after)
        return training.run(self.model)

    def at_shards(
        self,
        lead_shards: Callable[[Answer], list[Any]],
        task: dict[str, Any],
        draws: shards.ShardDraws | None,
        watch: shards.RoundWatch,
    ) -> TrainingResult:
        """See ``ShardedTraining``; each shard returns what ``grow_shard`` does."""
        leader = _Leader(self._channel, self.sums, draws, watch)
        results = lead_shards(leader.answer)
        self._channel.moment = _moment_of(results[0][4:])
        return TrainingResult(one_model(results), leader.rounds, *results[0][2:4])

    def shard_task(self, *, reads: bool) -> dict[str, Any]:
        """See ``ShardedTraining``."""
        grown, parameters = self._grown, self._grown.parameters
        return {
            "params": {**parameters.agreed, "eval_metric": list(parameters.metrics)},
            "arithmetic": grown.arithmetic,
            "cuts": list(grown.cuts.of_feature),
            "n_rows": grown.n_rows,
            "finest": grown.finest,
            "rows_per_leaf": grown.rows_per_leaf,
            "sets": grown.sets,
            "n_times": grown.n_times,
            "scales": astuple(self.plan.scales),
            "model": self.model.to_bytes(),
            "start": self.start,
            "settings": astuple(self._settings),
            "place": (self._channel.rank, self._channel.world),
            "is_sampled": self.draws is not None,
            "reads": reads,
        }


def _held(
    plan: GrowthPlan,
    table: Table,
    evaluated: Sequence[Table | None],
    start: NDArray[np.float32] | bytes,
    files: Sequence[Path | None] | None = None,
    queries: tuple[Queries | None, Queries | None] = (None, None),
) -> HeldRows:
    """Bin the rows of a training; see ``GrownTraining.rows``."""
    own, *of_sets = files or [None] * (1 + len(evaluated))
    training = replace(row_set(plan, table, start, own), queries=queries[0])
    pairs = zip(evaluated, of_sets, strict=True)
    sets = [
        None if one is None else replace(row_set(plan, one, start, file), queries=queries[1]) for one, file in pairs
    ]
    return HeldRows(plan.layout, plan.objective, training, sets)


# -- at the site ------------------------------------------------------------------------------------------------------


_WORDS = ("pairs", "wider", "rows", "leaves", "quantiles", "metrics")


class _Leader(shards.ShardLeader):
    """Answers what all shards ask."""

    def __init__(
        self, channel: Channel, sums: SiteSums, draws: shards.ShardDraws | None, watch: shards.RoundWatch
    ) -> None:
        super().__init__(channel, sums, draws, watch)
        self._sums = sums

    def _answer(self, word: str, asked: list[tuple[Any, ...]]) -> Any:
        if word not in _WORDS or any(one[:2] != asked[0][:2] for one in asked):
            raise ProtocolError("the shards of this site are not in step")
        self.channel.moment = _moment_of(asked[0])
        sums, of_each = self._sums, list(zip(*asked, strict=True))[2:]
        match word:
            case "pairs":
                values, grids, fits, parts = of_each
                try:
                    return sums.pairs(_added(values), PairGrid(*grids[0]), fits=all(fits), parts=_parts(parts))
                except RescaleRequested:
                    return None
            case "wider":
                return sums.widened(PairGrid(*of_each[0][0]), np.max(of_each[1], axis=0))
            case "rows":
                return sums.rows(KIND_BY_CODE[of_each[0][0]], _added(of_each[1]))
            case "leaves":
                return sums.check_leaves(_added(of_each[0]))
            case "quantiles":
                leaf, residuals, weight = shards.joined([one[2:5] for one in asked])
                return sums.leaf_quantiles(leaf, residuals, weight, of_each[3][0])
            case _:  # metrics
                return sums.metrics(_parts(of_each[0]))


def _moment_of(fields: Sequence[Any]) -> TrainingStep:
    return TrainingStep(Phase(fields[0]), int(fields[1]))


def _parts(of_shards: Sequence[Sequence[tuple[str, Parts]]]) -> list[tuple[str, Parts]]:
    """Return the parts of metrics over the rows of all shards."""
    of_all: list[tuple[str, Parts]] = []
    for of_metric in zip(*of_shards, strict=True):
        name, values = of_metric[0][0], [part for _, part in of_metric]
        of_all.append((name, shards.joined(values) if isinstance(values[0], tuple) else _added(values)))
    return of_all


def _added(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return reduce(np.add, parts)


# -- at a worker ------------------------------------------------------------------------------------------------------


class GrownShard(Conversation):
    """Grows trees over one shard with the other shards of its site, and with the other sites."""

    def __init__(
        self, number: int, task: dict[str, Any], rows: dict[str, Any], evaluated: list[dict[str, Any] | None]
    ) -> None:
        """Start training.

        Args:
            number: of the shard; the first, 0, hands over the model.
            rows: see ``plain_rows``.
            evaluated: rows of each evaluation set; None stands for the training rows.
        """
        super().__init__(lambda ask: _train_shard(ask, number, task, rows, evaluated))


def _train_shard(
    ask: Ask, number: int, task: dict[str, Any], rows: dict[str, Any], evaluated: list[dict[str, Any] | None]
) -> tuple[Any, ...]:
    """Return what ``grow_shard`` returns."""
    with reading_as_told():
        table, sets = shards.tables_of(ask, rows, evaluated, reads=task["reads"])
        plan = plan_of(task, table)
        held = _held(plan, table, sets, task["start"])
    return grow_shard(ask, number, task, plan, held)


def plan_of(task: dict[str, Any], table: Table) -> GrowthPlan:
    """Return what is public about a training of which a shard was told. Args: table: the shard's training rows."""
    is_of_times = table.label.ndim == 2 or task["n_times"]
    of_times: Label | None = {} if is_of_times else None  # the job's own was checked before
    parameters = check_parameters(task["params"], table.feature_names, label=of_times)
    named = {name: task[name] for name in ("arithmetic", "n_rows", "finest", "rows_per_leaf", "sets", "n_times")}
    return Grown(parameters, cuts=Cuts(tuple(task["cuts"])), table=table, **named).plan(Scales(*task["scales"]))


def grow_shard(ask: Ask, number: int, task: dict[str, Any], plan: GrowthPlan, held: HeldRows) -> tuple[Any, ...]:
    """Train over one shard.

    Args:
        number: of the shard; the first, 0, hands over the model.
        task: see ``GrownTraining.shard_task``.

    Returns:
        Digest and model, as asked with ``MODEL``; best round and score, where it may stop early; the moment.
    """
    place = ShardPlace(*task["place"])

    def after(record: RoundRecord, model: GrownModel) -> None:
        shards.tell_round(ask, number, record, model.to_bytes)

    sums, draws = _AskedSums(ask, place), shards.asked_draws(ask, held.n_rows) if task["is_sampled"] else None
    training = Training(plan, held, sums, place, LoopSettings(*task["settings"]), draws, after)
    result = training.run(GrownModel.of_bytes(task["model"]))
    return *said_of_model(number, result.model), result.best_round, result.best_score, *_plain(place.moment)


class _AskedSums:
    """Asks the site; see ``GrowthSums``."""

    def __init__(self, ask: Ask, place: ShardPlace) -> None:
        self._ask_site, self._place = ask, place
        self.seconds = 0.0

    def _ask(self, word: str, *values: Any) -> Any:
        return self._ask_site(word, *_plain(self._place.moment), *values)

    def pairs(
        self, values: NDArray[np.int64], grid: PairGrid, *, fits: bool, parts: Sequence[tuple[str, Parts]] = ()
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        added = self._ask("pairs", values, astuple(grid), fits, list(parts))
        if added is None:
            raise RescaleRequested("another grid or scale is needed")
        return added[0], added[1]

    def widened(self, grid: PairGrid, largest: Floats) -> tuple[int, int]:
        g, h = self._ask("wider", astuple(grid), largest)
        return g, h

    def check_leaves(self, counts: NDArray[np.int64]) -> None:
        self._ask("leaves", counts)

    def rows(self, kind: Kind, values: NDArray[np.int64]) -> NDArray[np.int64]:
        added: NDArray[np.int64] = self._ask("rows", kind.code, values)
        return added

    def leaf_quantiles(
        self, leaf: NDArray[np.int32], residuals: Floats, weight: Floats | None, n_leaves: int
    ) -> tuple[NDArray[np.int64], Floats]:
        n_valid, total = self._ask("quantiles", leaf, residuals, weight, n_leaves)
        return n_valid, total

    def metrics(self, parts: Sequence[tuple[str, Parts]]) -> list[NDArray[np.float64]]:
        added: list[NDArray[np.float64]] = self._ask("metrics", list(parts))
        return added


def _plain(moment: TrainingStep) -> tuple[int, int]:
    return moment.phase.value, moment.round
