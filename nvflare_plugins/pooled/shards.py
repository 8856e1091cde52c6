"""A training of a site whose rows are in shards: what shards are told of their rows, and what they ask alike.

The site is one to everybody else: cut points, floors, scales, draws, tags, masks, evidence and registry are the same
however many shards it has. Whoever grows the trees, a shard asks the process that speaks for its site, and nobody else:

    read       digest               first, where shards read files      reply: nothing (workers/shards.py)
    draw       round                which rows take part in a round?    reply: bool[n_rows of the shard]
    round      number, metrics      a round is over                     reply: whether the model is to be kept
    model      digest, model        SHA-256 of the model so far;        reply: nothing
                                    the model, of the first shard
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from nvflare_plugins.data.table import Table, passes_of, plain_reading, values_digest
from nvflare_plugins.growth.training import Draws
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.workers.shards import (
    BINS,
    READ,
    TELLS,
    Answer,
    Ask,
    comparing,
    lead,
    one_model,
    runs_of,
    said_of_model,
    telling,
)
from nvflare_plugins.workers.workers import Workers, note_rows
from nvflare_plugins.xgb.objectives import Task
from nvflare_plugins.xgb.parameters import TrainingParameters
from nvflare_plugins.xgb.rounds import RoundRecord, TrainingResult

DRAW, LEAVES, ROUND, MODEL = "draw", "leaves", "round", "model"

_PlainRows = tuple[dict[str, Any], list[dict[str, Any] | None]]
"""Of one shard: its rows, and those of its evaluation sets; see ``plain_rows``."""


def why_in_one_process(parameters: TrainingParameters) -> str:
    """Return what of a training no shards can do, for people; "" where they can."""
    if parameters.objective.adaptive_leaf and parameters.agreed["booster"] == "dart":
        return f"booster dart with objective {parameters.objective.name}"
    if parameters.objective.task is Task.RANKING:
        return f"objective {parameters.objective.name}, whose queries are ranked as a whole"
    return ""


# -- rows -------------------------------------------------------------------------------------------------------------


def plain_rows(table: Table, rows: slice) -> dict[str, Any]:
    """Return a run of rows as plain values, without what only the site's own process needs, ids among it.

    Of a table that is read in passes go labels, weights, and what the worker needs to read the features itself.
    """
    passes = table.passes if rows.start < rows.stop else None
    return {
        "features": table.features[rows] if passes is None else table.features,
        "passes": None if passes is None else plain_reading(passes, rows),
        "feature_names": table.feature_names,
        "feature_types": table.feature_types,
        "label": table.label[rows],
        "label_name": table.label_name,
        "weight": None if table.weight is None else table.weight[rows],
        "weight_name": table.weight_name,
        "categories": {name: tuple(values) for name, values in table.categories.items()},
    }


def table_of(plain: dict[str, Any]) -> Table:
    """Return the rows that ``plain_rows`` has told of. Raises: ConfigurationError: see ``passes_of``."""
    reading = plain["passes"]
    return Table(**{**plain, "passes": None if reading is None else passes_of(reading)})


def digest_of(tables: Iterable[Table | None], go_on: Callable[[int], None] = lambda n_rows: None) -> bytes:
    """Return a hash of the features of those tables that are read in passes. Args: go_on: of ``values_digest``."""
    read = [table for table in tables if table is not None and table.passes is not None]
    return b"".join(values_digest(table, go_on) for table in read)


def tables_of(
    ask: Ask, rows: dict[str, Any], evaluated: Sequence[dict[str, Any] | None], *, reads: bool
) -> tuple[Table, list[Table | None]]:
    """Return a shard's rows and those of its evaluation sets; what it reads is compared with what the site has read."""
    table, sets = table_of(rows), [None if one is None else table_of(one) for one in evaluated]
    if reads:
        read = [one for one in (table, *sets) if one is not None and one.passes is not None]
        ask(READ, digest_of(read, telling(ask, sum(one.n_rows for one in read))))
    ask(TELLS, BINS, 0, 0)
    return table, sets


@dataclass(frozen=True, slots=True, repr=False)
class ShardedRows:
    """A site's rows, to be trained on in shards.

    Attributes:
        evaluated: rows of each evaluation set; None stands for the training rows.
        draws: which rows take part in each round; None for all.
    """

    table: Table
    evaluated: Sequence[Table | None]
    draws: Draws | None

    @property
    def are_read(self) -> bool:
        """Whether shards read some of these rows themselves."""
        return any(one is not None and one.passes is not None for one in (self.table, *self.evaluated))

    def digests(self, of_shards: Sequence[_PlainRows], go_on: Callable[[int], None]) -> list[bytes]:
        """Return what each shard has to find in the files that it reads; see ``digest_of``.

        Args:
            go_on: of ``comparing``.

        Raises:
            DataRefusal: a file has changed since this process has looked at the rows.
        """
        found = [
            digest_of([table_of(one) for one in (rows, *evaluated) if one is not None], go_on)
            for rows, evaluated in of_shards
        ]
        for table in (self.table, *self.evaluated):
            if table is not None and table.passes is not None:
                table.passes.file.check_unchanged()
        return found

    def of_shards(self, n_shards: int) -> list[_PlainRows]:
        """Return the rows of each shard, and those of its evaluation sets, of which it may have none."""
        sets = [None if one is None else (one, runs_of(one.n_rows, n_shards)) for one in self.evaluated]
        return [
            (
                plain_rows(self.table, rows),
                [None if one is None else plain_rows(one[0], one[1][number]) for one in sets],
            )
            for number, rows in enumerate(runs_of(self.table.n_rows, n_shards))
        ]

    def drawn(self, n_shards: int) -> ShardDraws | None:
        """Return which rows of each shard take part in each round; None for all."""
        return None if self.draws is None else cut_draws(self.draws, runs_of(self.table.n_rows, n_shards))

    def lead(self, workers: Workers, path: str, task: dict[str, Any], answer: Answer) -> list[Any]:
        """Hand each shard its rows and the task, and answer what all ask until they are done.

        Args:
            path: of the class that works at a worker, whose arguments are its number, the task and its rows.
        """
        note_rows(workers, runs_of(self.table.n_rows, len(workers)))
        of_shards = self.of_shards(len(workers))
        arguments = [(number, task, *own) for number, own in enumerate(of_shards)]
        with comparing(answer, lambda go_on: self.digests(of_shards, go_on)) as compared:
            return lead(workers, path, arguments, compared)


ShardDraws = Callable[[int], list[NDArray[np.bool_]]]
"""Tells, for each shard, which of its rows take part in a round. Shapes: bool[n_rows of the shard]."""


def cut_draws(draws: Draws, runs: Sequence[slice]) -> ShardDraws:
    """Return draws cut into those of the shards. Args: runs: of the rows that are drawn from."""

    def of_round(number: int) -> list[NDArray[np.bool_]]:
        drawn = draws(number)
        return [drawn[run] for run in runs]

    return of_round


def joined(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Join columns of the shards in their order; a shard without rows says nothing of whether rows have weights.

    Raises:
        ProtocolError: a shard has given none.
    """
    if any(not isinstance(part, tuple) for part in parts):
        raise ProtocolError("a shard of this site does not give what its message is made of")
    filled = [part for part in parts if part[0].shape[0]] or [parts[0]]
    columns = zip(*filled, strict=True)
    return tuple(None if any(c is None for c in column) else np.concatenate(column) for column in columns)


def asked_draws(ask: Ask, n_rows: int) -> Draws:
    """Return draws that the site makes for a shard: from a secret that stays there, over the rows of all shards."""

    @lru_cache(maxsize=1)  # XGBoost's rows of a round are asked for more than once
    def of_round(number: int) -> NDArray[np.bool_]:
        drawn: NDArray[np.bool_] = ask(DRAW, number)
        if drawn.size == 0 and n_rows == 1:  # the row that stands for no rows (``as_weighed``)
            drawn = np.zeros(1, dtype=bool)
        if drawn.size != n_rows:
            raise ProtocolError(f"a draw over {drawn.size} rows for a shard of {n_rows}")
        return drawn

    return of_round


# -- trainings --------------------------------------------------------------------------------------------------------


class ShardedTraining(ABC):
    """One training of a site, over rows in this process or in shards.

    Attributes:
        SHARD: path of the class that works at a worker.
        draws: which rows take part in each round; None for all.
    """

    SHARD: ClassVar[str]
    draws: Draws | None

    @abstractmethod
    def shard_task(self, *, reads: bool) -> dict[str, Any]:
        """Return what each shard must know of the training, as plain values. Args: reads: shards read rows."""

    @abstractmethod
    def at_shards(
        self,
        lead_shards: Callable[[Answer], list[Any]],
        task: dict[str, Any],
        draws: ShardDraws | None,
        watch: RoundWatch,
    ) -> TrainingResult:
        """Train over shards, wherever they are.

        Args:
            lead_shards: has all shards train, answers what they ask, and returns what each has returned.
            task: of ``shard_task``.

        Raises:
            VeilBoostError: what ended the training; what happened at a worker comes with its number.
        """

    def at_workers(self, workers: Workers, rows: ShardedRows, watch: RoundWatch) -> TrainingResult:
        """Train over rows that are handed to workers. Raises: as ``at_shards``."""
        task = self.shard_task(reads=rows.are_read)
        drawn = rows.drawn(len(workers))
        return self.at_shards(lambda answer: rows.lead(workers, self.SHARD, task, answer), task, drawn, watch)


# -- rounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundWatch:
    """What a site does after each round.

    Attributes:
        is_kept: tells, by the number of rounds done, whether ``on_round`` gets the model so far.
        on_round: gets the record of a round, and the model so far where it is kept.
    """

    is_kept: Callable[[int], bool] = lambda n_done: False
    on_round: Callable[[RoundRecord, bytes | None], None] = lambda record, model: None

    def round_over(self, record: RoundRecord, model: Callable[[], bytes]) -> None:
        """Take note of a round. Args: model: gives the model so far."""
        self.on_round(record, model() if self.is_kept(record.round + 1) else None)


class Timed(Protocol):
    """What takes its time for the site's answers. Units: seconds."""

    seconds: float


class ShardLeader:
    """Answers what all shards of a site ask, whoever grows the trees."""

    def __init__(self, channel: Channel, timed: Timed, draws: ShardDraws | None, watch: RoundWatch) -> None:
        """Begin. Args: timed: what protects and adds sums."""
        self.channel, self._timed, self._draws, self._watch = channel, timed, draws, watch
        self._record: RoundRecord | None = None
        self._last = self._clocks()
        self.rounds: list[RoundRecord] = []

    def answer(self, word: str, asked: list[tuple[Any, ...]]) -> list[Any]:
        """Return a reply for each shard; see ``lead``. Raises: ProtocolError: they are not in step."""
        if word == DRAW and self._draws is not None:
            return self._draws(asked[0][0])
        if word == ROUND:
            return [self._round_over(*asked[0])] * len(asked)
        if word == MODEL and self._record is not None:
            self._finish_round(self._record, one_model(asked))
            return [None] * len(asked)
        return [self._answer(word, asked)] * len(asked)

    def _answer(self, word: str, asked: list[tuple[Any, ...]]) -> Any:
        """Return the reply to a question of this kind of training, the same for all shards. Raises: ProtocolError."""
        raise ProtocolError("a shard of this site asks for what it has no use for")

    def _round_over(self, number: int, metrics: dict[str, float]) -> bool:
        """Take note of a round; its times are those of the site. Returns: whether the model is wanted first."""
        total, answered, waited = (a - b for a, b in zip(self._clocks(), self._last, strict=True))
        record = RoundRecord(number, metrics, total, total - answered, answered - waited, waited)
        self.rounds.append(record)
        if self._watch.is_kept(number + 1):
            self._record = record
            return True
        self._finish_round(record, None)
        return False

    def _finish_round(self, record: RoundRecord, model: bytes | None) -> None:
        self._record = None
        self._watch.on_round(record, model)
        self._last = self._clocks()

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._timed.seconds, self.channel.network_seconds


def tell_round(ask: Ask, number: int, record: RoundRecord, model: Callable[[], bytes]) -> None:
    """Tell the site that a round is over at this shard, and hand over the model where it is kept.

    Args:
        number: of the shard; the first, 0, hands over the model.
    """
    if ask(ROUND, record.round, record.metrics):
        ask(MODEL, *said_of_model(number, model()))
