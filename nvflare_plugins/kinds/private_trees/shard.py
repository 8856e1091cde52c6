"""Private trees over the shards of a site's rows: every shard grows all trees from the noised sums of all sites.

What a shard asks with, exact sums of its rows, goes to the process that speaks for its site and nowhere else. There the
shards' integers are added, which gives those of the site whatever their number, and then paid for, noised and masked
once. So the model is the same bytes for any number of shards.

    read      digest              first, where shards read files     reply: nothing (workers/shards.py)
    sums      int64 sums, which release       reply: int64, noised sums over all sites
    round     number of one that is over      reply: nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import plain_reading, reading_as_told, table_read_by, values_digest
from nvflare_plugins.kinds.private_trees.forest import PassedColumns, clipped, train
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.plan import AfterRound, OwnRows, SumsOverSites
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import KIND_BY_CODE, Kind, Phase, TrainingStep
from nvflare_plugins.workers import shards
from nvflare_plugins.workers.workers import Workers, note_rows

SUMS, ROUND = "sums", "round"
_PATH = "nvflare_plugins.kinds.private_trees.shard:PrivateShard"


def train_in_shards(
    workers: Workers,
    job: PrivateTreesJob,
    plan: JobPlan,
    channel: Channel,
    sums: SumsOverSites,
    rows: OwnRows,
    after_round: AfterRound,
) -> bytes:
    """Train with the other sites over workers; see ``forest.train``, which does the same in one process.

    Raises:
        VeilBoostError: what ended the training; what happened at a worker comes with its number.
    """
    public = (job.to_dict(), channel.rank, channel.world, plan.training.feature_names)
    runs = shards.runs_of(len(rows.label), len(workers))
    arguments = [(number, *public, _plain(rows, run)) for number, run in enumerate(runs)]
    note_rows(workers, runs)

    def answer(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        if word == ROUND:
            after_round(*asked[0])
            return [None] * len(asked)
        if word != SUMS or any(one[1:] != asked[0][1:] for one in asked):
            raise ProtocolError("the shards of this site are not in step")
        _, phase, round_, kind, number, tree, level = asked[0]
        channel.moment = TrainingStep(Phase(phase), round_)
        exact: NDArray[np.int64] = np.sum([one[0] for one in asked], axis=0, dtype=np.int64)
        noisy = sums.release(KIND_BY_CODE[kind], number, exact, tree, level)
        return [noisy] * len(asked)

    plan.training.trust.check_sites(channel.world)
    with shards.comparing(answer, lambda go_on: _digests(rows, [plain for *_, plain in arguments], go_on)) as answered:
        model = shards.one_model(shards.lead(workers, _PATH, arguments, answered))
    channel.moment = TrainingStep(Phase.FINISH, plan.releases.n_rounds)
    return model


def _plain(rows: OwnRows, run: slice) -> dict[str, Any]:
    """Return a run of rows as plain values: the columns themselves, or what a worker needs to read them."""
    columns, reading = rows.columns, None
    if isinstance(columns, PassedColumns):
        passes = columns.table.passes
        reading = None if passes is None or run.start == run.stop else plain_reading(passes, run)
        held = np.empty((columns.shape[0], 0), dtype=np.float32)
    else:
        held = np.stack([column[run] for column in columns])
    return {
        "columns": held,
        "reading": reading,
        "reads": isinstance(columns, PassedColumns),
        "label": rows.label[run],
        "weights": None if rows.weights is None else rows.weights[run],
    }


def _rows_of(plain: dict[str, Any], bounds: Sequence[FeatureBounds]) -> OwnRows:
    """Return the rows that ``_plain`` has told of. Raises: ConfigurationError: see ``table_read_by``."""
    columns = plain["columns"]
    if plain["reading"] is not None:
        columns = clipped(table_read_by(plain["reading"], plain["label"]), bounds)
    return OwnRows(columns, plain["label"], plain["weights"])


def _digest(plain: dict[str, Any], go_on: Callable[[int], None] = lambda n_rows: None) -> bytes:
    reading = plain["reading"]
    return b"" if reading is None else values_digest(table_read_by(reading, plain["label"]), go_on)


def _digests(rows: OwnRows, plain: Sequence[dict[str, Any]], go_on: Callable[[int], None]) -> list[bytes]:
    """Return what each shard has to find in the files that it reads. Raises: DataRefusal: a file has changed."""
    found = [_digest(one, go_on) for one in plain]
    if isinstance(rows.columns, PassedColumns) and rows.columns.table.passes is not None:
        rows.columns.table.passes.file.check_unchanged()
    return found


class PrivateShard(shards.Conversation):
    """Grows private trees over one shard with the other shards of its site, and with the other sites."""

    def __init__(
        self, number: int, job: dict[str, Any], rank: int, world: int, names: tuple[str, ...], rows: dict[str, Any]
    ) -> None:
        """Start growing.

        Args:
            number: of the shard; the first, 0, hands over the model.
            job: the job's fields, from which the public plan follows.
            rank, world: of the site among the sites.
            names: of the features.
            rows: see ``_plain``.
        """

        def work(ask: shards.Ask) -> tuple[bytes, bytes | None]:
            plan = JobPlan.of(PrivateTreesJob.from_dict(job), world, names)
            place = shards.ShardPlace(rank, world)
            sums = _AskedSums(ask, place)
            with reading_as_told():
                own = _rows_of(rows, plan.training.bounds)
                if rows["reads"]:
                    ask(shards.READ, _digest(rows, shards.telling(ask, len(own.label))))
                model = train(plan.training, place, sums, own, lambda n: ask(ROUND, n))
            return shards.said_of_model(number, model)

        super().__init__(work)


class _AskedSums:
    """Passes a shard's sums to the site."""

    def __init__(self, ask: shards.Ask, place: shards.ShardPlace):
        self._ask, self._place = ask, place

    def release(
        self, kind: Kind, number: int, exact: NDArray[np.int64], tree: int | None = None, level: int | None = None
    ) -> NDArray[np.int64]:
        """See ``SumsOverSites``."""
        moment = self._place.moment
        noisy: NDArray[np.int64] = self._ask(
            SUMS, exact, moment.phase.value, moment.round, kind.code, number, tree, level
        )
        return noisy
