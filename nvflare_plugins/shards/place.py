"""What every work over a shard has in common: it plays its site's part, and all shards end with one model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.catalogue import Phase, TrainingStep


@dataclass(slots=True)
class ShardPlace:
    """The place of a site among the sites, without a way to them; see ``Place``."""

    rank: int
    world: int
    moment: TrainingStep = field(default_factory=lambda: TrainingStep(Phase.SETUP))
    network_seconds: float = 0.0


def said_of_model(number: int, model: bytes) -> tuple[bytes, bytes | None]:
    """Return what a shard says of its model: SHA-256, and from the first shard, 0, the model too."""
    return hashlib.sha256(model).digest(), None if number else model


def one_model(said: Sequence[tuple[Any, ...]]) -> bytes:
    """Return the model of all shards. Args: said: by each, see ``said_of_model``.

    Raises:
        ProtocolError: they do not have the same.
    """
    digest, model = said[0][:2]
    if not isinstance(model, bytes) or any(one[0] != digest for one in said):
        raise ProtocolError("the shards of this site have trained different models; none is used")
    return model


def runs_of(n_rows: int, n_shards: int) -> list[slice]:
    """Cut rows into runs of like length, in order, some of them empty where there are few rows."""
    ends = [n_rows * number // n_shards for number in range(n_shards + 1)]
    return [slice(ends[number], ends[number + 1]) for number in range(n_shards)]
