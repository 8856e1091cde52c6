"""Private trees over the shards of a site's rows: every shard grows all trees from the noised sums of all sites.

What a shard asks with, exact sums of its rows, goes to the process that speaks for its site and nowhere else. There the
shards' integers are added, which gives those of the site whatever their number, and then paid for, noised and masked
once. So the model is the same bytes for any number of shards, of all kinds of growers.

    sums      int64 sums, which release       reply: int64, noised sums over all sites
    round     number of one that is over      reply: nothing
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.cluster.workers import Workers
from nvflare_plugins.private_trees.job import PrivateTreesJob
from nvflare_plugins.private_trees.job_plan import JobPlan
from nvflare_plugins.private_trees.trainers import train
from nvflare_plugins.private_trees.training import AfterRound, OwnRows, SumsOverSites
from nvflare_plugins.shards.conversation import Ask, Conversation
from nvflare_plugins.shards.lockstep import lead
from nvflare_plugins.shards.place import ShardPlace, one_model, runs_of, said_of_model
from nvflare_plugins.wire.catalogue import KIND_BY_CODE, PHASE_BY_CODE, Kind, Phase, TrainingStep
from nvflare_plugins.wire.channel import Channel

SUMS, ROUND = "sums", "round"
_PATH = "nvflare_plugins.private_trees.shard:PrivateShard"


def train_in_shards(
    workers: Workers,
    job: PrivateTreesJob,
    plan: JobPlan,
    channel: Channel,
    sums: SumsOverSites,
    rows: OwnRows,
    after_round: AfterRound,
) -> bytes:
    """Train with the other sites over workers; see ``trainers.train``, which does the same in one process.

    Raises:
        VeilBoostError: what ended the training; what happened at a worker comes with its number.
    """
    public = (job.to_dict(), channel.rank, channel.world, plan.training.feature_names)
    arguments = [
        (number, *public, _plain(rows, run)) for number, run in enumerate(runs_of(rows.label.size, len(workers)))
    ]

    def answer(word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        if word == ROUND:
            after_round(*asked[0])
            return [None] * len(asked)
        if word != SUMS or any(one[1:] != asked[0][1:] for one in asked):
            raise ProtocolError("the shards of this site are not in step")
        _, phase, round_, kind, number, tree, level = asked[0]
        channel.moment = TrainingStep(PHASE_BY_CODE[phase], round_)
        exact: NDArray[np.int64] = np.sum([one[0] for one in asked], axis=0, dtype=np.int64)
        noisy = sums.release(KIND_BY_CODE[kind], number, exact, tree, level)
        return [noisy] * len(asked)

    plan.training.trust.check_sites(channel.world)
    model = one_model(lead(workers, _PATH, arguments, answer))
    channel.moment = TrainingStep(Phase.FINISH, plan.releases.n_rounds)
    return model


def _plain(rows: OwnRows, run: slice) -> dict[str, Any]:
    return {
        "columns": np.stack([column[run] for column in rows.columns]),
        "label": rows.label[run],
        "weights": None if rows.weights is None else rows.weights[run],
    }


class PrivateShard(Conversation):
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
            rows: fields of ``OwnRows``.
        """

        def work(ask: Ask) -> tuple[bytes, bytes | None]:
            plan = JobPlan.of(PrivateTreesJob.from_dict(job), world, names)
            place = ShardPlace(rank, world)
            sums = _AskedSums(ask, place)
            model = train(plan.training, place, sums, OwnRows(**rows), lambda n: ask(ROUND, n))
            return said_of_model(number, model)

        super().__init__(work)


class _AskedSums:
    """Passes a shard's sums to the site."""

    def __init__(self, ask: Ask, place: ShardPlace):
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
