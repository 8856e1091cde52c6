"""What the shards of a site are told of a training, and the forms in which they and their site speak."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nvflare_plugins.data_sets.shard_reader import passes_of, plain_reading, values_digest
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.growth.training import LoopSettings
from nvflare_plugins.horizontal.mediated.grammar import Answer, Dtype, Message, TrainingShape
from nvflare_plugins.wire.catalogue import KIND_BY_CODE, PHASE_BY_CODE, BaseScoreSource, TrainingStep
from nvflare_plugins.xgb.cuts import Cuts

MESSAGE, DRAW, LEAVES, TREE, ROUND, MODEL = "message", "draw", "leaves", "tree", "round", "model"
PATH = "nvflare_plugins.horizontal.mediated.shard:HorizontalShard"


@dataclass(frozen=True, slots=True, repr=False)
class ShardTask:
    """What all shards of a site train alike.

    Attributes:
        rank, world: of the site among the sites.
        params: for the Booster.
        names: of the evaluation sets.
        is_sampled: rounds train on rows that the site has drawn.
        estimates: XGBoost begins with an estimate from all rows.
        counts_leaves: rows are counted in the leaves of each tree.
        alpha: the quantile that the leaves are; None for leaves that are sums.
        tells_trees: each tree is handed over.
        reads: shards read some of their rows themselves.
    """

    rank: int
    world: int
    params: dict[str, object]
    shape: TrainingShape
    cuts: Cuts
    max_bin: int
    names: tuple[str, ...]
    settings: LoopSettings
    initial_model: bytes | None
    is_sampled: bool
    estimates: bool
    counts_leaves: bool
    alpha: float | None = None
    tells_trees: bool = False
    reads: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a worker."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        shape = {**asdict(self.shape), "base_score": self.shape.base_score.value}
        return {**plain, "shape": shape, "cuts": list(self.cuts.of_feature), "settings": asdict(self.settings)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> ShardTask:
        """Read what ``to_plain`` wrote."""
        shape = {**plain["shape"], "base_score": BaseScoreSource(plain["shape"]["base_score"])}
        rest = {"cuts": Cuts(tuple(plain["cuts"])), "settings": LoopSettings(**plain["settings"])}
        return cls(**{**plain, **rest, "shape": TrainingShape(**shape)})


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


def plain_message(message: Message) -> tuple[Any, ...]:
    """Return a message of XGBoost's as plain values."""
    moment, dtype = message.moment, message.dtype
    return (
        message.kind.code,
        message.answer.value,
        None if dtype is None else int(dtype),
        message.n_values,
        moment.phase.value,
        moment.round,
        message.reply_size,
        message.metric,
    )


def message_of(fields: tuple[Any, ...]) -> Message:
    """Read what ``plain_message`` wrote."""
    kind, answer, dtype, n_values, phase, number, reply_size, metric = fields
    moment = TrainingStep(PHASE_BY_CODE[phase], number)
    found = None if dtype is None else Dtype(dtype)
    return Message(KIND_BY_CODE[kind], Answer(answer), found, n_values, moment, reply_size, metric)
