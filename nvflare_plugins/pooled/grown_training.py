"""A site's training with trees that the sites grow themselves, over rows in this process or in shards at workers.

Every shard grows all trees from the sums of all sites. What it asks with goes to the process that speaks for its site
and nowhere else. There the shards' integers are added, which gives those of the site whatever their number, and
protected once. So the model is the same bytes for any number of shards.

    read       digest               first, where shards read files      reply: nothing (workers/shards.py)
    pairs      moment, sums, grid,  sums of gradient pairs, and with    reply: int64, those of all sites, and those
               whether all fit,     a root what metrics sends, of the   of metrics; none where another grid or scale
               parts                round before                        is needed
    wider      moment, grid,        another grid                        reply: its bounds
               largest row
    rows       moment, sums         behind the scale of a smooth loss   reply: int64, those of all sites
    leaves     moment, counts       int64[n_leaves] of a round          reply: nothing
    quantiles  moment, leaf,        what the site's quantiles are of    reply: sites with rows, sums of quantiles
               residuals, weights,
               number of leaves
    metrics    moment, parts        of each metric                      reply: those of all sites
    draw       round                which rows take part in a round?    reply: bool[n_rows of the shard]
    round      number, metrics      a round is over                     reply: whether the model is to be kept
    model      digest, model        SHA-256 of the model so far;        reply: nothing
                                    the model, of the first shard
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import Table, reading_as_told
from nvflare_plugins.growth.grid import PairGrid
from nvflare_plugins.growth.rows import HeldRows
from nvflare_plugins.growth.site_sums import Floats, GrowthSums, Parts, SiteSums
from nvflare_plugins.growth.training import Draws, GrownModel, GrownResult, GrowthPlan, LoopSettings, Training
from nvflare_plugins.pooled.growing import Beginning, Grown, Scales, first_model, row_set
from nvflare_plugins.pooled.row_floors import check_leaves
from nvflare_plugins.pooled.shard_rows import DRAW, LEAVES, MODEL, ROUND, digest_of, table_of
from nvflare_plugins.pooled.sharded import ShardDraws, ShardedRows
from nvflare_plugins.wire.channel import Channel, RescaleRequested
from nvflare_plugins.wire.envelope import PHASE_BY_CODE, TrainingStep
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.shards import (
    BINS,
    READ,
    TELLS,
    Answer,
    Ask,
    Conversation,
    ShardPlace,
    comparing,
    lead,
    one_model,
    runs_of,
    said_of_model,
    telling,
)
from nvflare_plugins.workers.workers import Workers, note_rows
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.parameters import check_parameters
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult

PAIRS, WIDER, ROWS, QUANTILES, METRICS = "pairs", "wider", "rows", "quantiles", "metrics"
_PATH = "nvflare_plugins.pooled.grown_training:GrownShard"

OnRound = Callable[[RoundRecord, bytes | None], None]
"""Gets the record of a round, and the model so far where it is kept."""


def train_grown(
    grown: Grown,
    begin: Beginning,
    evaluated: Sequence[Table | None],
    sums: ProtectedSums,
    channel: Channel,
    settings: LoopSettings,
    draws: Draws | None,
    is_kept: Callable[[int], bool],
    on_round: OnRound,
    workers: Workers | None,
    files: Sequence[Path | None],
) -> TrainingResult:
    """Train with the other sites.

    Args:
        files: for the bins of the training rows, and of each evaluation set; None holds them.
        evaluated: rows of each evaluation set; None stands for the training rows.
        is_kept: tells, by the number of rounds done, whether ``on_round`` gets the model so far.

    Raises:
        VeilBoostError: what ended the training; what happened at a worker comes with its number.
    """
    scales = Scales.of(sums, grown)
    plan = grown.plan(scales)
    model, start = first_model(grown, plan, begin, sums, channel.world)
    site = site_sums(grown, plan, sums)
    if workers is not None:
        rows, runs = ShardedRows(grown.table, evaluated, draws), runs_of(grown.table.n_rows, len(workers))
        task = shard_task(grown, scales, model, start, settings, channel, draws is not None, rows.are_read)
        drawn = None if draws is None else ShardDraws(draws, runs)
        note_rows(workers, runs)
        return lead_grown(
            lambda answer: _lead_shards(workers, task, rows, answer), channel, site, drawn, is_kept, on_round
        )
    training = row_set(plan, grown.table, start, files[0])
    pairs = zip(evaluated, files[1:], strict=True)
    sets = [None if one is None else row_set(plan, one, start, file) for one, file in pairs]

    def after(record: RoundRecord, so_far: GrownModel) -> None:
        on_round(record, so_far.to_bytes() if is_kept(record.round + 1) else None)

    held = HeldRows(plan.layout, plan.objective, training, sets)
    return training_result(Training(plan, held, site, channel, settings, draws, after).run(model))


def site_sums(grown: Grown, plan: GrowthPlan, sums: ProtectedSums) -> SiteSums:
    """Return what a training of the site's own process asks of all sites."""
    least, alpha = grown.rows_per_leaf or 0, float(plan.objective.leaf_quantile)
    return SiteSums(sums, plan.layout.starts, alpha, lambda counts: check_leaves(sums, counts, least))


def training_result(found: GrownResult) -> TrainingResult:
    """Return a grown model as every training hands its own over."""
    return _finished(found.model.to_bytes(), found.rounds, found.best_round, found.best_score)


def _finished(
    model: bytes, rounds: list[RoundRecord], best_round: int | None, best_score: float | None
) -> TrainingResult:
    return TrainingResult(xgb.Booster(model_file=bytearray(model)), rounds, best_round, best_score, model)


# -- at the site ------------------------------------------------------------------------------------------------------


def shard_task(
    grown: Grown,
    scales: Scales,
    model: GrownModel,
    start: NDArray[np.float32] | bytes,
    settings: LoopSettings,
    channel: Channel,
    is_sampled: bool,
    reads: bool,
) -> dict[str, Any]:
    """Return what each shard must know of a training, as plain values."""
    parameters = grown.parameters
    return {
        "params": {**parameters.agreed, "eval_metric": list(parameters.metrics)},
        "arithmetic": grown.arithmetic,
        "cuts": list(grown.cuts.of_feature),
        "n_rows": grown.n_rows,
        "finest": grown.finest,
        "rows_per_leaf": grown.rows_per_leaf,
        "sets": grown.sets,
        "scales": astuple(scales),
        "model": model.to_bytes(),
        "start": start,
        "settings": astuple(settings),
        "place": (channel.rank, channel.world),
        "is_sampled": is_sampled,
        "reads": reads,
    }


def _lead_shards(workers: Workers, task: dict[str, Any], rows: ShardedRows, answer: Answer) -> list[Any]:
    of_shards = rows.of_shards(len(workers))
    arguments = [(number, task, *own) for number, own in enumerate(of_shards)]
    with comparing(answer, lambda go_on: rows.digests(of_shards, go_on)) as compared:
        return lead(workers, _PATH, arguments, compared)


def lead_grown(
    lead_shards: Callable[[Answer], list[Any]],
    channel: Channel,
    site: SiteSums,
    draws: ShardDraws | None,
    is_kept: Callable[[int], bool],
    on_round: OnRound,
) -> TrainingResult:
    """Train over shards wherever they are; see ``train_grown``.

    Args:
        lead_shards: has all shards train, answers what they ask, and returns what ``grow_shard`` has returned at each.
    """
    leader = _Leader(channel, site, draws, is_kept, on_round)
    results = lead_shards(leader.answer)
    channel.moment = TrainingStep(*_moment_of(results[0][4:]))
    return _finished(one_model(results), leader.rounds, *results[0][2:4])


class _Leader:
    """Answers what all shards ask."""

    def __init__(
        self,
        channel: Channel,
        sums: SiteSums,
        draws: ShardDraws | None,
        is_kept: Callable[[int], bool],
        on_round: OnRound,
    ) -> None:
        self.channel, self._sums, self._is_kept, self._on_round = channel, sums, is_kept, on_round
        self._draws = draws
        self.rounds: list[RoundRecord] = []
        self._record: RoundRecord | None = None
        self._last = self._clocks()

    def answer(self, word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        """Return a reply for each shard; see ``lead``."""
        if word == DRAW and self._draws is not None:
            return self._draws.of_round(asked[0][0])
        if word == ROUND:
            return [self._round_over(*asked[0])] * len(asked)
        if word == MODEL and self._record is not None:
            self._finish_round(self._record, one_model(asked))
            return [None] * len(asked)
        if word not in _ANSWERS or any(one[:2] != asked[0][:2] for one in asked):
            raise ProtocolError("the shards of this site are not in step")
        self.channel.moment = TrainingStep(*_moment_of(asked[0]))
        return [_ANSWERS[word](self._sums, [one[2:] for one in asked])] * len(asked)

    def _round_over(self, number: int, metrics: dict[str, float]) -> bool:
        """Take note of a round; its times are those of the site. Returns: whether the model is wanted first."""
        total, summed, waited = (a - b for a, b in zip(self._clocks(), self._last, strict=True))
        record = RoundRecord(number, metrics, total, total - summed, summed - waited, waited)
        self.rounds.append(record)
        if self._is_kept(number + 1):
            self._record = record
            return True
        self._finish_round(record, None)
        return False

    def _finish_round(self, record: RoundRecord, model: bytes | None) -> None:
        self._record = None
        self._on_round(record, model)
        self._last = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._sums.seconds, self.channel.network_seconds


def _moment_of(fields: Sequence[Any]) -> tuple[Any, int]:
    return PHASE_BY_CODE[fields[0]], int(fields[1])


def _add_pairs(
    sums: GrowthSums, asked: list[tuple[Any, ...]]
) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]] | None:
    values, grids, fits, parts = zip(*asked, strict=True)
    try:
        return sums.pairs(_added(values), PairGrid(*grids[0]), all(fits), _parts(parts))
    except RescaleRequested:
        return None


def _widen(sums: GrowthSums, asked: list[tuple[Any, ...]]) -> tuple[int, int]:
    largest: Floats = np.max([one[1] for one in asked], axis=0)
    return sums.widened(PairGrid(*asked[0][0]), largest)


def _quantiles(sums: GrowthSums, asked: list[tuple[Any, ...]]) -> tuple[NDArray[np.int64], Floats]:
    leaf, residuals, weight = _joined([one[:3] for one in asked])
    return sums.leaf_quantiles(leaf, residuals, weight, asked[0][3])


def _parts(of_shards: Sequence[Sequence[tuple[str, Parts]]]) -> list[tuple[str, Parts]]:
    """Return the parts of metrics over the rows of all shards."""
    of_all: list[tuple[str, Parts]] = []
    for of_metric in zip(*of_shards, strict=True):
        name, values = of_metric[0][0], [part for _, part in of_metric]
        of_all.append((name, _joined(values) if isinstance(values[0], tuple) else _added(values)))
    return of_all


def _check_leaves(sums: GrowthSums, asked: list[tuple[Any, ...]]) -> None:
    sums.check_leaves(_added([counts for (counts,) in asked]))


_ANSWERS: dict[str, Callable[[GrowthSums, list[tuple[Any, ...]]], Any]] = {
    PAIRS: _add_pairs,
    WIDER: _widen,
    ROWS: lambda sums, asked: sums.rows(_added([values for (values,) in asked])),
    LEAVES: _check_leaves,
    QUANTILES: _quantiles,
    METRICS: lambda sums, asked: sums.metrics(_parts([parts for (parts,) in asked])),
}


def _added(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _joined(parts: Sequence[tuple[Any, ...]]) -> Any:
    """Join columns of the shards in their order; a shard without rows says nothing of whether rows have weights."""
    filled = [part for part in parts if part[0].shape[0]] or [parts[0]]
    columns = zip(*filled, strict=True)
    return tuple(None if any(c is None for c in column) else np.concatenate(column) for column in columns)


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
        table, sets = table_of(rows), [None if one is None else table_of(one) for one in evaluated]
        if task["reads"]:
            read = [one for one in (table, *sets) if one is not None and one.passes is not None]
            ask(READ, digest_of(read, telling(ask, sum(one.n_rows for one in read))))
        ask(TELLS, BINS, 0, 0)
        plan = plan_of(task, table)
        training = row_set(plan, table, task["start"])
        held = HeldRows(
            plan.layout,
            plan.objective,
            training,
            [None if one is None else row_set(plan, one, task["start"]) for one in sets],
        )
    return grow_shard(ask, number, task, plan, held)


def plan_of(task: dict[str, Any], table: Table) -> GrowthPlan:
    """Return what is public about a training of which a shard was told. Args: table: the shard's training rows."""
    parameters = check_parameters(task["params"], table.feature_names)
    named = {name: task[name] for name in ("arithmetic", "n_rows", "finest", "rows_per_leaf", "sets")}
    return Grown(parameters, cuts=Cuts(tuple(task["cuts"])), table=table, **named).plan(Scales(*task["scales"]))


def grow_shard(ask: Ask, number: int, task: dict[str, Any], plan: GrowthPlan, held: HeldRows) -> tuple[Any, ...]:
    """Train over one shard.

    Args:
        number: of the shard; the first, 0, hands over the model.
        task: see ``shard_task``.

    Returns:
        Digest and model, as asked with ``MODEL``; best round and score, where it may stop early; the moment.
    """
    place = ShardPlace(*task["place"])

    def after(record: RoundRecord, model: GrownModel) -> None:
        if ask(ROUND, record.round, record.metrics):
            ask(MODEL, *said_of_model(number, model.to_bytes()))

    sums, draws = _AskedSums(ask, place), _AskedDraws(ask) if task["is_sampled"] else None
    result: GrownResult = Training(plan, held, sums, place, LoopSettings(*task["settings"]), draws, after).run(
        GrownModel.of_bytes(task["model"])
    )
    said = said_of_model(number, result.model.to_bytes())
    return *said, result.best_round, result.best_score, *_plain(place.moment)


class _AskedDraws:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def of_round(self, number: int) -> NDArray[np.bool_]:
        """See ``Draws``: made by the site, from a secret that stays there."""
        drawn: NDArray[np.bool_] = self._ask(DRAW, number)
        return drawn


class _AskedSums:
    """Asks the site; see ``GrowthSums``."""

    def __init__(self, ask: Ask, place: ShardPlace) -> None:
        self._ask_site, self._place = ask, place
        self.seconds = 0.0

    def _ask(self, word: str, *values: Any) -> Any:
        return self._ask_site(word, *_plain(self._place.moment), *values)

    def pairs(
        self, values: NDArray[np.int64], grid: PairGrid, fits: bool, parts: Sequence[tuple[str, Parts]] = ()
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        added = self._ask(PAIRS, values, astuple(grid), fits, list(parts))
        if added is None:
            raise RescaleRequested("another grid or scale is needed")
        return added[0], added[1]

    def widened(self, grid: PairGrid, largest: Floats) -> tuple[int, int]:
        g, h = self._ask(WIDER, astuple(grid), largest)
        return g, h

    def check_leaves(self, counts: NDArray[np.int64]) -> None:
        self._ask(LEAVES, counts)

    def rows(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        added: NDArray[np.int64] = self._ask(ROWS, values)
        return added

    def leaf_quantiles(
        self, leaf: NDArray[np.int32], residuals: Floats, weight: Floats | None, n_leaves: int
    ) -> tuple[NDArray[np.int64], Floats]:
        n_valid, total = self._ask(QUANTILES, leaf, residuals, weight, n_leaves)
        return n_valid, total

    def metrics(self, parts: Sequence[tuple[str, Parts]]) -> list[NDArray[np.float64]]:
        added: list[NDArray[np.float64]] = self._ask(METRICS, list(parts))
        return added


def _plain(moment: TrainingStep) -> tuple[int, int]:
    return moment.phase.value, moment.round
