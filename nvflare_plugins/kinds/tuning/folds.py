"""Folds of a tuning, their rows, and the bins that are made once for all trials."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.base.errors import TooFewRows
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import row_tags, usable_ids
from nvflare_plugins.data.table import Table, reading_as_told
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from nvflare_plugins.growth.bins import BinLayout, BinnedTable, bin_rows
from nvflare_plugins.growth.rows import HeldRows, RowSet
from nvflare_plugins.growth.training import Draws, GrowthPlan
from nvflare_plugins.pooled.growing import GrownTraining, grow_shard, plan_of
from nvflare_plugins.pooled.mediated.engine import MediatedTraining
from nvflare_plugins.pooled.mediated.shard import ShardTask, train_shard
from nvflare_plugins.pooled.row_floors import decider
from nvflare_plugins.pooled.shards import RoundWatch, ShardedRows, ShardedTraining, cut_draws, digest_of, table_of
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers import shards
from nvflare_plugins.workers.workers import Workers, collect, note_rows
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.cuts import Cuts
from nvflare_plugins.xgb.matrices import evaluation_matrix, n_categories, training_matrix
from nvflare_plugins.xgb.rounds import TrainingResult

# Which fold a row is in, and how many rows a fold must have.
#
# Every site draws the folds of its own rows from a secret of its own, which no job sees. A row is known by its group
# where the job names a column of groups, else by its id where the policy knows one, else by what it holds in the job's
# columns; the fold is a keyed hash of that modulo k. So a group is never split (within a site: two sites do not know
# that they hold the same person, whose rows may then be in two folds); rows that are alike stay together; and a second
# tuning with the same k, next month or over added rows, finds every row in the fold in which it was. Without groups and
# ids other columns are other folds, and so is another k: drawn independently, not halves or quarters of the former.
#
# What folds show. A trial trains on all rows but those of fold f, for every f. Its first histograms are sums over these
# rows, at nearly the same predictions: the k sums S - S_f determine S and every S_f. So all sites learn, of every fold,
# what a training on its rows alone would show: pooled sums over its rows. That is what the floor is for: every fold
# holds at least 1,000 rows of all sites together, at least as many as any policy's ``min_effective_rows`` asks for, and
# rows of as many sites as a job needs. These are the numbers that a run over added rows needs, for the same reason.
# Where rounds draw rows, what a fold's draw takes and what it leaves out must each be that many. They are the rows of
# all sites: who holds most of them (or pools with who does) takes those off, and is left with sums over the rows of the
# others in a fold, of which each site that counts has ten at least. Who needs more in each fold of itself chooses fewer
# folds.
#
# Further trials repeat these sums at other predictions (a different tree makes them so), as further rounds of one
# training do; each of them is a sum over at least a whole fold's rows of a node, and a node's floor is that of a
# training (``min_rows_per_node``). A second k, or other columns without ids, are further partitions of the same rows:
# their sums are again over folds of 1,000 rows and more, but several partitions together are more equations about the
# same rows, as several trainings are. Nothing here bounds what all jobs on the same rows tell together.
#
# The consent ``tuning`` caps trials x folds x rounds of one job: its work, and the number of sums that it releases. It
# is no budget over several jobs, and no measure of what one row adds; who needs that takes a private method.


LEAST_ROWS = 1000
"""Pooled rows of a fold, at least."""
LEAST_OF_A_SITE = 10
"""A site with fewer rows in a fold does not count among those that have some: its rows would not hide the others'."""

TOO_FEW_IN_A_FOLD = (
    f"some fold has fewer than {LEAST_ROWS} rows of all sites together, or than the sites' policies or the sampling of "
    f"rows ask for, or rows of too few sites ({LEAST_OF_A_SITE} of each at least). Policy keys: min_effective_rows, "
    "min_sites, max_colluders. Remedy: fewer folds, more rows or sites, a group column of smaller groups, subsample "
    "nearer to one half or left out; or ask the sites to lower the keys."
)
"""The same text at all sites, whichever fold it was: it says neither where nor by how much."""


def fold_of_rows(table: Table, spec: DataSet, secret: bytes, n_folds: int) -> NDArray[np.int64]:
    """Return each row's fold. Shapes: result: int64[n_rows], from 0.

    Args:
        secret: 32 bytes of this site, the same for every job.

    Privacy: stays at the site.

    Raises:
        ConfigurationError: the column of groups, or of ids, is of a type that names nothing.
    """
    column, what = (table.ids, "id") if table.groups is None else (table.groups, "group")
    return fold_of_names([] if column is None else names_of(column, spec, what), what, table, secret, n_folds)


def fold_of_names(
    names: Sequence[str | None], what: str, table: Table, secret: bytes, n_folds: int
) -> NDArray[np.int64]:
    """Return each row's fold by what names it. Shapes: result: int64[n_rows], from 0.

    Args:
        names: of each row, None for one without; empty where nothing names rows. Those are known by what they hold.
        what: "group" or "id".
    """
    hashes = row_tags(table, secret).astype(np.uint64)
    for row, name in enumerate(names):
        if name is not None:
            digest = hashlib.blake2b(f"{what}:{name}".encode(), key=secret, digest_size=8).digest()
            hashes[row] = int.from_bytes(digest, "little")
    return (hashes % np.uint64(n_folds)).astype(np.int64)


def names_of(column: pa.ChunkedArray, spec: DataSet, what: str) -> Sequence[str | None]:
    """Return what a column calls each row, None where it says nothing.

    Raises:
        ConfigurationError: its type names nothing.
    """
    try:
        return usable_ids(column, spec)
    except ConfigurationError:
        raise ConfigurationError(
            f"data set {spec.name!r}: its column of {what}s must hold texts or whole numbers"
        ) from None


def chosen_draws(draws: Draws, chosen: NDArray[np.bool_]) -> Draws:
    """Return draws from all rows of the site, among those that one training has.

    A row is drawn in a round in all trainings or in none, and in a training over all rows with the same ``subsample``,
    too: differences of folds are then sums over what was drawn of a fold.

    Args:
        chosen: the training's rows among all of the site. Shapes: bool[n_rows].
    """
    return lambda number: draws(number)[chosen]


def rows_needed(floors: Floors, fractions: Sequence[float]) -> int:
    """Return how many pooled rows every fold must have.

    Args:
        floors: of all sites.
        fractions: of the rows that a round draws, for each trial.
    """
    share = min(1.0 if fraction == 1 else min(fraction, 1 - fraction) for fraction in fractions)
    return math.ceil(min(max(LEAST_ROWS, floors.effective_rows) / share, 2.0**62))


def check_folds(
    sums: ProtectedSums,
    floors: Floors,
    own: Floors,
    weights: NDArray[np.float64],
    folds: NDArray[np.int64],
    n_folds: int,
    needed: int,
) -> None:
    """Have all sites together decide whether every fold has rows enough, before anything else of folds leaves.

    Args:
        floors, own: of all sites, and of this one.
        weights: what each row counts, at most 1 (``scale_pos_weight``).
        needed: see ``rows_needed``.

    Shapes: weights: float64[n_rows]; folds: int64[n_rows].

    Privacy: two protected sums for each fold: sites that have some rows in it, and rows, which no site counts beyond
        what is needed.

    Raises:
        TooFewRows: at all sites alike, with one text.
    """
    rows = np.bincount(folds, minlength=n_folds)
    effective = np.minimum(np.floor(np.bincount(folds, weights, minlength=n_folds)), needed).astype(np.int64)
    here = np.stack([(rows >= LEAST_OF_A_SITE).astype(np.int64), effective], axis=1)
    pooled = sums.sum_counts(Kind.EFFECTIVE_ROWS, here.ravel()).reshape(-1, 2)
    if (pooled[:, 0] < floors.sites).any() or (pooled[:, 1] < needed).any():
        raise TooFewRows(TOO_FEW_IN_A_FOLD, decider(pooled, here, own.effective_rows, needed))


# The bins of a tuning's folds, made once for all trials, and a training over them in the site's own process.


EVALUATED = "eval"


def bins_of(
    table: Table, folds: NDArray[np.int64] | NDArray[np.int8], fold: int, cuts: Cuts, max_bin: int
) -> tuple[xgb.DMatrix, xgb.DMatrix]:
    """Return the rows of all folds but one by the agreed cuts, and those of that one, to be scored.

    Shapes: folds: of each row, from 0, [n_rows].
    """
    kept, held_out = (table.taken(np.flatnonzero(chosen)) for chosen in (folds != fold, folds == fold))
    matrix = training_matrix(kept, cuts, max_bin)
    return matrix, evaluation_matrix(held_out, matrix, max_bin)


class FoldsHere:
    """All rows in the site's own process, in bins."""

    def __init__(self, table: Table, folds: NDArray[np.int64], n_folds: int, cuts: Cuts, max_bin: int) -> None:
        self._bins = [bins_of(table, folds, fold, cuts, max_bin) for fold in range(n_folds)]

    def train(self, fold: int, training: MediatedTraining) -> TrainingResult:
        """Train on all rows but those of a fold, with the other sites, and score these."""
        matrix, held_out = self._bins[fold]
        return training.here(matrix, [held_out], RoundWatch())


# The rows of a tuning whose trees the sites grow: bins that are made once for all folds and trials.


class FoldRows:
    """All rows of a site, or of a shard, in bins, and the fold of each."""

    def __init__(self, table: Table, folds: NDArray[np.integer], cuts: Cuts, arithmetic: str) -> None:
        """Bin all rows. Shapes: folds: of each row, from 0, [n_rows]."""
        layout = BinLayout.from_cuts(cuts, n_categories(table), ARITHMETICS[arithmetic])
        self._bins, self._folds = bin_rows(layout, table.blocks(), table.n_rows), folds
        self.labels = replace(table, features=table.features[:0], passes=None, ids=None, groups=None)

    def with_columns(self, places: Sequence[int], orders: Sequence[NDArray[np.int64]] = ()) -> FoldRows:
        """Return the rows with some columns alone, and behind them copies of these.

        Args:
            orders: of the rows, for the copy of each of these columns. Shapes: int64[n_rows] each.
        """
        found, bins = copy.copy(self), self._bins
        own = bins.codes[:, list(places)]
        copies = [own[order, place] for place, order in enumerate(orders)]
        codes, missing = np.column_stack([own, *copies]), np.tile(bins.missing[list(places)], 2 if copies else 1)
        found._bins = BinnedTable(np.ascontiguousarray(codes), missing, bins.is_dense)
        return found

    def occupied(self, place: int, n_bins: int) -> NDArray[np.bool_]:
        """Return in which bins of a column without missing values there are rows here. Shapes: bool[n_bins]."""
        found: NDArray[np.bool_] = np.bincount(self._bins.codes[:, place], minlength=n_bins) > 0
        return found

    def bins_of_fold(self, fold: int) -> BinnedTable:
        """Return the rows of a fold, in bins."""
        return BinnedTable(self._bins.codes[self._folds == fold], self._bins.missing, self._bins.is_dense)

    def train(self, fold: int, training: GrownTraining) -> TrainingResult:
        """Train on all rows but those of a fold, with the other sites, and score these."""
        start = cast("NDArray[np.float32]", training.start)  # no model is continued
        return training.here(self.without(fold, training.plan, start), RoundWatch())

    def without(self, fold: int, plan: GrowthPlan, start: NDArray[np.float32]) -> HeldRows:
        """Return the rows of all folds but one, and those of that one to be scored. Args: start: margins of any row."""

        def chosen(rows: NDArray[np.bool_]) -> RowSet:
            bins = BinnedTable(self._bins.codes[rows], self._bins.missing, self._bins.is_dense)
            label = self.labels.label[rows]
            margins = np.broadcast_to(start, (len(label), plan.objective.n_outputs)).astype(np.float32)
            return RowSet(bins, label, None, margins)

        held_out = self._folds == fold
        return HeldRows(plan.layout, plan.objective, chosen(~held_out), [chosen(held_out)])


# A shard of a site's rows in a tuning: the bins of its folds, made once, and one training after the other over them.
#
# While it makes the bins it asks, where it reads files itself,
#
# read      digest                                            reply: nothing (workers/shards.py)
#
# and in each training what any shard of a horizontal training asks (pooled/mediated/shard.py).


PATH = "nvflare_plugins.kinds.tuning.folds:TuningShard"


class TuningShard(shards.Conversation):
    """Makes the bins of a shard's rows, and trains over them as often as it is told to."""

    def __init__(
        self,
        number: int,
        cuts: list[NDArray[np.float32]],
        max_bin: int,
        n_folds: int,
        reads: bool,  # noqa: FBT001 - workers are called by position
        rows: dict[str, Any],
        folds: NDArray[np.int8],
        arithmetic: str,
    ) -> None:
        """Begin to make the bins.

        Args:
            number: of the shard; the first, 0, hands over models.
            cuts: of each feature.
            reads: it reads rows itself.
            rows: see ``plain_rows``.
            folds: of each row. Shapes: int8[n_rows].
            arithmetic: in which it grows the trees itself; "" where XGBoost does.
        """
        self._number, self._bins, self._rows = number, list[tuple["xgb.DMatrix", "xgb.DMatrix"]](), list[FoldRows]()
        bins, own = self._bins, self._rows  # the work must not know the conversation

        def work(ask: shards.Ask) -> None:
            with reading_as_told():
                table = table_of(rows)
                if reads:
                    ask(shards.READ, digest_of([table], shards.telling(ask, table.n_rows)))
                if arithmetic:
                    ask(shards.TELLS, shards.BINS, 0, 0)
                    own.append(FoldRows(table, folds, Cuts(tuple(cuts)), arithmetic))
                    return
                for fold in range(n_folds):
                    ask(shards.TELLS, shards.BINS, 0, 0)  # each fold is a step, for which a worker has its time
                    bins.append(bins_of(table, folds, fold, Cuts(tuple(cuts)), max_bin))

        super().__init__(work)

    def train(self, fold: int, task: dict[str, Any]) -> None:
        """Begin a training on all folds but one. Args: task: of ``ShardedTraining``, whose cuts are not looked at."""
        number, own, bins = self._number, self._rows, self._bins  # the work must not know the conversation

        def work(ask: shards.Ask) -> tuple[Any, ...]:
            if not own:
                matrix, held_out = bins[fold]
                return train_shard(ask, number, ShardTask.of_plain(task), None, matrix, [held_out])
            plan = plan_of(task, own[0].labels)
            return grow_shard(ask, number, task, plan, own[0].without(fold, plan, task["start"]))

        self._start(work)


# The trainings of a tuning at a site whose rows are in shards: each shard has its rows, and makes its bins, once.
#
# A shard is a run of all rows of the site, whatever their folds: each holds some of every fold, and a training on all
# folds but one is over what the shards hold of these. Folds are drawn by the site over all its rows, as without
# workers. For the rest a training is a horizontal one over shards (pooled/shards.py).


class FoldsOnWorkers:
    """All rows at the site's workers; see ``FoldsHere``."""

    def __init__(
        self,
        workers: Workers,
        table: Table,
        folds: NDArray[np.int64],
        n_folds: int,
        cuts: Cuts,
        max_bin: int,
        arithmetic: str = "",
    ) -> None:
        """Hand out the rows, or what workers need to read them; return when all have their bins.

        Shapes: folds: of each row, int64[n_rows].

        Args:
            arithmetic: in which the sites grow the trees; "" where XGBoost does.

        Raises:
            VeilBoostError: as ``GrownTraining.at_shards``.
        """
        self._workers = workers
        runs, rows = shards.runs_of(table.n_rows, len(workers)), ShardedRows(table, (), None)
        self._kept = [runs_of_chosen(folds != fold, runs) for fold in range(n_folds)]
        of_shards = rows.of_shards(len(workers))
        common = list(cuts.of_feature), max_bin, n_folds, rows.are_read
        arguments = [
            (number, *common, plain, folds[run].astype(np.int8), arithmetic)
            for number, (run, (plain, _)) in enumerate(zip(runs, of_shards, strict=True))
        ]
        note_rows(workers, runs)
        with shards.comparing(_nothing_else, lambda go_on: rows.digests(of_shards, go_on)) as answer:
            shards.lead(workers, PATH, arguments, answer)

    def train(self, fold: int, training: ShardedTraining) -> TrainingResult:
        """Train on all rows but those of a fold, with the other sites, and score these."""
        workers, task = self._workers, training.shard_task(reads=False)
        collect([workers.call(number, "train", fold, task) for number in range(len(workers))])
        draws = None if training.draws is None else cut_draws(training.draws, self._kept[fold])
        return training.at_shards(lambda answer: shards.lead_on(workers, answer), task, draws, RoundWatch())


def _nothing_else(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
    raise ProtocolError("a shard of this site asks for what it has no use for")


def runs_of_chosen(chosen: NDArray[np.bool_], runs: list[slice]) -> list[slice]:
    """Return the runs that the chosen rows of runs make, one after the other. Shapes: chosen: bool[n_rows]."""
    ends = np.cumsum([0, *(np.count_nonzero(chosen[run]) for run in runs)]).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
