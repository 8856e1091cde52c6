"""Private trees in one process: every site in a thread, masks between them, the server an ``Aggregator``.

Plan, trainers, noisy sums and the trusted server are the shipped ones; only the session and the ledger are left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.accounting import gaussian_limit
from dp_components.mechanisms import add_noise
from dp_components.split_candidates.candidates import FeatureBounds
from he_processors.masks import PairwiseMasks
from he_processors.randomness import OS_RANDOMNESS, RandomSource
from he_processors.sum_tags import SumTags
from nvflare_plugins.kinds.private_trees.forest import train
from nvflare_plugins.kinds.private_trees.job import JobPlan, PrivateTreesJob
from nvflare_plugins.kinds.private_trees.methods import Method
from nvflare_plugins.kinds.private_trees.noisy_sums import Mechanism, NoisySums, TrustedServer
from nvflare_plugins.kinds.private_trees.plan import TRUSTED_SERVER, OwnRows, PrivateTreesPlan, ReleasePlan, Trust
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.profiles import MaskedSums
from nvflare_plugins.wire.sums import ProtectedSums
from tests.support.federation import TIMEOUT_S, DirectTransport, run_in_threads, succeed

_JOB = PrivateTreesJob("data", "label", 1.0, 1e-5, {"x": [0, 1]})


@dataclass(frozen=True)
class Part:
    """One site's rows. Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows]."""

    columns: NDArray[np.float32]
    label: NDArray[np.float32]


def split_rows(columns: NDArray[np.float32], label: NDArray[np.float32], n_sites: int) -> list[Part]:
    """Deal the rows out to the sites."""
    return [Part(np.ascontiguousarray(columns[:, i::n_sites]), label[i::n_sites]) for i in range(n_sites)]


def plan_with(
    method: Method,
    bounds: Sequence[FeatureBounds],
    mu: float,
    trust: Trust = TRUSTED_SERVER,
    seed: int = 1,
    published_multiplier: float | None = None,
) -> PrivateTreesPlan:
    """Plan a training of any method under mu-GDP, for experiments that are no jobs."""
    releases = ReleasePlan.of(method, bounds, mu, trust.n_honest, published_multiplier)
    return PrivateTreesPlan(method, tuple(bounds), releases, trust, seed)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the mu of (epsilon, delta)."""
    return math.sqrt(gaussian_limit(epsilon, delta).mu_squared)


def trusted_server(plan: PrivateTreesPlan, mechanism: Mechanism = add_noise) -> Callable[..., bytes]:
    """Return a trusted server's answers for a training without a job, for an aggregator; nothing is written down."""
    server = TrustedServer(JobPlan(_JOB, plan), mechanism)
    return lambda frame, total: server.answer(frame, total, lambda *spend: None)


def train_in_process(
    plan: PrivateTreesPlan,
    parts: Sequence[Part],
    server_noise: Mechanism = add_noise,
    site_randomness: RandomSource = OS_RANDOMNESS,
    seen: list | None = None,
) -> list[bytes]:
    """Train at every site and return the models; raise the first error. Args: seen: collects what passes the server."""
    world = len(parts)
    sites = tuple(f"site-{i + 1:0{len(str(world))}}" for i in range(world))  # in order of their names
    attempt = os.urandom(16)
    trusted = plan.trust.is_trusted_aggregator
    aggregator = Aggregator(
        sites,
        attempt,
        TIMEOUT_S,
        on_transfer=None if seen is None else seen.append,
        on_sum=trusted_server(plan, server_noise) if trusted else None,
    )
    pairs = {(i, j): os.urandom(32) for i in range(world) for j in range(i + 1, world)}
    group = os.urandom(32)

    def take_part(site: str, transport: DirectTransport) -> bytes:
        rank = sites.index(site)
        channel = Channel(site, sites, "job", attempt, transport, TIMEOUT_S)
        secrets = {peer: pairs[min(rank, peer), max(rank, peer)] for peer in range(world) if peer != rank}
        masks = MaskedSums(PairwiseMasks(attempt, rank, secrets, group, blinder=None if trusted else 0))
        tags = None if trusted else SumTags(attempt, rank, secrets, group)
        rows = OwnRows(parts[rank].columns, parts[rank].label)
        sums = NoisySums(ProtectedSums(channel, masks, tags), plan, randomness=site_randomness, n_rows=len(rows.label))
        return train(plan, channel, sums, rows)

    return list(succeed(run_in_threads(aggregator, sites, take_part)).values())
