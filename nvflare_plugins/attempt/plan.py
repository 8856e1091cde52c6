"""What a plan of a job is asked and what it answers, whatever the kind: shape, network, seconds, bytes, memory."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dp_components.ledger import Budget
from he_processors.errors import ConfigurationError
from nvflare_plugins.site.policy import SitePolicy

_BYTES_PER_MBIT = 125_000


@dataclass(frozen=True, slots=True)
class Network:
    """Units: seconds per rendezvous of empty messages; bytes per second of a site's and of the server's link."""

    latency_s: float = 0.010
    site_bytes_per_s: float = 12.5e6
    server_bytes_per_s: float = 12.5e6

    def exchange_s(self, size: int, n_sites: int) -> float:
        """Return the time of one exchange: every site sends ``size`` bytes, then every site receives as many."""
        one_way = max(size / self.site_bytes_per_s, n_sites * size / self.server_bytes_per_s)
        return self.latency_s + 2 * one_way

    @classmethod
    def of(cls, latency_ms: float, bandwidth_mbit: float, server_bandwidth_mbit: float | None = None) -> Network:
        """Return a network in the units of the command line. Raises: ConfigurationError."""
        server = server_bandwidth_mbit or bandwidth_mbit
        if not all(0 < value < math.inf for value in (latency_ms, bandwidth_mbit, server)):
            raise ConfigurationError("latency and bandwidth must be numbers above 0")
        return cls(latency_ms / 1000, bandwidth_mbit * _BYTES_PER_MBIT, server * _BYTES_PER_MBIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked beside its job. What is None was not given.

    Attributes:
        rows: of all sites together.
        features: columns; in vertical training the active party's, in a FederBoost job a passive party's.
        foreign_features: columns of each passive party, in order of their names.
        bins, depth, rounds, outputs, max_leaves, metrics, cuts, key_bits, profile: in place of what the job says.
        missing: every feature has missing values somewhere.
        workers: also with so many workers at each party.
        base_rate: share of one of the two classes.
        budget: a whole budget, of which so many rows belong to a person at most.
        policy: of a site whose budget is to be looked at.
    """

    rows: int | None = None
    features: int | None = None
    foreign_features: tuple[int, ...] | None = None
    sites: int = 3
    bins: int | None = None
    depth: int | None = None
    rounds: int | None = None
    outputs: int | None = None
    max_leaves: int | None = None
    metrics: int | None = None
    cuts: str | None = None
    key_bits: int | None = None
    profile: str | None = None
    missing: bool = False
    workers: int | None = None
    base_rate: float | None = None
    network: Network = Network()
    budget: tuple[Budget, int] | None = None
    policy: SitePolicy | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of some fields that were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def shape(self) -> tuple[int, int]:
        """Return rows and features. Raises: ConfigurationError: one of them was not given."""
        if self.rows is None or self.features is None:
            raise ConfigurationError("give --rows and --features: they are not in a job")
        return self.rows, self.features


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job takes, shows and spends. Attributes: figures: as JSON values; text: for people."""

    figures: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class Planner:
    """How a kind plans its jobs.

    Attributes:
        plan: makes the plan of a job. Raises: ConfigurationError: what it needs was not given.
        uses: fields of the request that plans of most kinds do not use.
    """

    plan: Callable[[PlanRequest, Any], Plan]
    uses: tuple[str, ...] = ()


def process_memory_bytes() -> int:
    """Return the memory of this process so far: Python with XGBoost and, where used, the lattice library."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(action: Callable[[], Any], repeats: int = 1) -> tuple[Any, float]:
    """Return what an action gives and the CPU seconds of all threads that it takes, the median of repeats."""
    seconds, result = [], None
    for _ in range(repeats):
        started = time.process_time()
        result = action()
        seconds.append(time.process_time() - started)
    return result, statistics.median(seconds)
