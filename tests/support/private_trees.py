"""Private trees in one process: every site in a thread, masks between them, the server an ``Aggregator``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.mechanisms.gaussian import add_gaussian_noise
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from he_processors.masks import PairwiseMasks
from nvflare_plugins.private_trees.noise_plan import Mechanism, ServerNoise
from nvflare_plugins.private_trees.training import PrivateTreesPlan, TrainedForest, train_private_trees
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.profiles import MaskedSums
from nvflare_plugins.wire.sums import ProtectedSums
from tests.support.federation import TIMEOUT_S, DirectTransport


@dataclass(frozen=True)
class Part:
    """One site's rows. Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows]."""

    columns: NDArray[np.float32]
    label: NDArray[np.float32]


def split_rows(columns: NDArray[np.float32], label: NDArray[np.float32], n_sites: int) -> list[Part]:
    """Deal the rows out to the sites."""
    return [Part(np.ascontiguousarray(columns[:, i::n_sites]), label[i::n_sites]) for i in range(n_sites)]


def train_in_process(
    plan: PrivateTreesPlan,
    parts: Sequence[Part],
    server_noise: Mechanism = add_gaussian_noise,
    site_randomness: RandomSource = OS_RANDOMNESS,
    seen: list | None = None,
    train: Callable[..., object] | None = None,
) -> list[TrainedForest]:
    """Train at every site; raise the first error.

    Args: seen: collects what passes the server; train: takes the place of training random trees.
    """
    world = len(parts)
    sites = tuple(f"site-{i + 1}" for i in range(world))
    attempt = os.urandom(16)
    trusted = plan.trust.is_trusted_aggregator
    aggregator = Aggregator(
        sites,
        attempt,
        TIMEOUT_S,
        on_transfer=None if seen is None else seen.append,
        on_sum=ServerNoise(plan.noise, server_noise).release if trusted else None,
    )
    pairs = {(i, j): os.urandom(32) for i in range(world) for j in range(i + 1, world)}
    group = os.urandom(32)
    outcomes: list[TrainedForest | Exception] = [None] * world  # type: ignore[list-item]

    def take_part(rank: int) -> None:
        try:
            channel = Channel(sites[rank], sites, "job", attempt, DirectTransport(aggregator, sites[rank]), TIMEOUT_S)
            secrets = {peer: pairs[min(rank, peer), max(rank, peer)] for peer in range(world) if peer != rank}
            masks = MaskedSums(PairwiseMasks(attempt, rank, secrets, group, blinder=None if trusted else 0))
            sums = ProtectedSums(channel, masks, masks)
            part = parts[rank]
            if train is not None:
                outcomes[rank] = train(plan, channel, sums, part.columns, part.label)
            else:
                outcomes[rank] = train_private_trees(
                    plan, channel, sums, part.columns, part.label, randomness=site_randomness
                )
        except Exception as error:  # the caller decides
            outcomes[rank] = error
            aggregator.abort(f"{sites[rank]}: {error}")

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
