"""A lane in which one site grows the trees of all rows by itself: no network, no protection, exact sums."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pandas as pd
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data.table import Table
from nvflare_plugins.growth import float32, training
from nvflare_plugins.growth import rows as site_rows
from nvflare_plugins.growth._native import BEST, NUMPY
from nvflare_plugins.growth.arithmetic import arithmetic_of
from nvflare_plugins.growth.model import new_model
from nvflare_plugins.growth.rows import BinnedRows, HeldRows
from nvflare_plugins.growth.site_sums import WIDE_BITS, PairGrid
from nvflare_plugins.growth.training import GrownModel, LoopSettings, Scales, Training
from nvflare_plugins.growth.tree import TreeGrower
from nvflare_plugins.pooled.growing import Grown, row_set
from nvflare_plugins.workers.shards import ShardPlace
from nvflare_plugins.xgb.parameters import check_parameters
from tests.bench.horizontal_data import LABEL, arrays
from tests.bench.horizontal_lanes import Baton, Lane, Task

_BOUNDS = (0, -2)  # of log loss: 2^0 and 2^-2


def start_growing(task: Task, threads: int = 1, variant: str = BEST) -> Lane:
    """One process with all rows, of log loss from a given base score. Args: variant: of ``_native.variants``."""
    name = "own" if threads == 1 else f"own_{threads}"
    lane = Lane(name if variant == BEST else f"{name}_{variant}")
    lane.start(_grow, task, threads, variant)
    return lane


class _OneSite:
    """The sums of one site are its own."""

    seconds = 0.0

    def pairs(
        self, values: NDArray[np.int64], grid: PairGrid, *, fits: bool, parts: object = ()
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        return values, []


def _grow(baton: Baton, task: Task, threads: int, variant: str) -> None:
    os.environ["VEILBOOST_THREADS"] = str(threads)
    _compute_by(variant)
    table = _all_rows(task)
    parameters = check_parameters(task.params, table.feature_names, [])
    arithmetic = arithmetic_of(xgb.__version__).name
    grown = Grown(parameters, arithmetic, task.cuts, table.n_rows, table, finest=None, rows_per_leaf=None, sets=())
    plan = grown.plan(Scales(_BOUNDS, (), WIDE_BITS, rows_are_exact=True, weight_bound=1))
    base = np.array([task.params["base_score"]], np.float32)
    columns = {"feature_names": table.feature_names, "feature_types": table.feature_types}
    document = new_model(plan.objective, base, is_given=True, num_parallel_tree=1, **columns)
    rows = HeldRows(plan.layout, plan.objective, row_set(plan, table, plan.objective.margins_of(base)), [])
    settings, place = LoopSettings(task.num_rounds), ShardPlace(0, 1)
    loop = Training(plan, rows, _OneSite(), place, settings, on_round=lambda record, model: baton.ready())
    baton.finished(loop.run(GrownModel(document)).model)


def _compute_by(variant: str) -> None:
    """Let this process compute in one of the ways that give the same."""
    if variant != BEST:
        site_rows.BinnedRows = partial(BinnedRows, variant=variant)  # type: ignore[misc]
        training.TreeGrower = partial(TreeGrower, variant=variant)  # type: ignore[misc]
    if variant == NUMPY:
        float32.native = None


def _all_rows(task: Task) -> Table:
    frame = pd.concat([pd.read_parquet(task.share(site)) for site in task.sites])
    features, label = arrays(frame)
    names = tuple(str(name) for name in frame.columns.drop(LABEL))
    return Table(features, names, ("float",) * len(names), label, LABEL)
