"""One site's training of a random forest: stock XGBoost refreshes leaves, its mediator releases noisy sums."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.distributed_noise import add_noise_share
from dp_components.events import ComposedEvent, Release
from dp_components.leaf_weights.interface import LeafWeights
from dp_components.leaf_weights.noise_ridge import noise_proportional_ridge
from dp_components.leaf_weights.query import UNIT
from dp_components.mechanisms.gaussian import add_gaussian_noise
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.candidates import Candidates, FeatureBounds
from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.private_trees.candidates import paid_candidates, public_candidates
from nvflare_plugins.private_trees.forest import Forest, draw_forest, initial_model
from nvflare_plugins.private_trees.methods import CandidateSource, Method, SplitMethod
from nvflare_plugins.private_trees.noise_plan import NoisePlan, Trust
from nvflare_plugins.private_trees.refresh_catalogue import RefreshGrammar, leaf_integers, node_statistics
from nvflare_plugins.wire.catalogue import Kind, Message, Phase, TrainingStep
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.mediator import Mediator
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.communicator import Federated


@dataclass(frozen=True, slots=True)
class PrivateTreesPlan:
    """Everything public about one training; equal at all sites.

    Args:
        bounds: public interval of each feature.
        structure_seed: public seed of the forest's structure. Noise never comes from it.
    """

    method: Method
    bounds: tuple[FeatureBounds, ...]
    noise: NoisePlan
    trust: Trust
    structure_seed: int
    feature_names: tuple[str, ...] = ()

    @property
    def ridge(self) -> float:
        """XGBoost's lambda, with the share that is in proportion to the noise on a leaf."""
        method = self.method
        noise_std = self.noise.gradient_std * self.trust.noise_factor
        return noise_proportional_ridge(method.ridge, method.noise_ridge, noise_std)


Objective = Callable[[NDArray[np.float32], xgb.DMatrix], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Margins and matrix -> gradients and Hessians of the rows, as XGBoost takes them."""

Pay = Callable[[str, Callable[[], Release]], NDArray[np.int64]]
"""Charges a release to the site's ledger before it is handed out: (query, how to make it) -> value.

The query is words, then ``STATE`` and a hash of everything public that its exact answer depends on.
"""

STATE = "; after "

AfterRound = Callable[[int], None]
"""Takes note of a finished round."""


def without_ledger(query: str, make: Callable[[], Release]) -> NDArray[np.int64]:
    """Hand out a release that nobody pays for: for benchmarks and tests on public data."""
    return make().value


def ignore_round(number: int) -> None:
    """Take no note."""


class NoisySums:
    """Sums over the sites, released with the plan's noise.

    Privacy: what leaves the site is under the session's masks: with this site's share of the noise inside, or, for a
    trusted aggregator, exact; then the server adds the noise. Every release is paid for first.
    """

    def __init__(
        self,
        sums: ProtectedSums,
        plan: PrivateTreesPlan,
        pay: Pay = without_ledger,
        randomness: RandomSource = OS_RANDOMNESS,
        n_rows: int = 0,
    ):
        """Args: n_rows: rows of this site that report, for local noise."""
        self._sums, self._plan, self._pay, self._randomness = sums, plan, pay, randomness
        self._n_rows = n_rows
        self._state = hashlib.sha256(repr(plan).encode())

    def release(self, kind: Kind, exact: NDArray[np.int64], query: str, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Return the noisy sum of the sites' integers. Shapes: int64[n].

        Args:
            query: what is asked, in words. All sums received before, on which the exact answer depends too, are added
                as a hash: a site that plays its part again gets the same reply only where everything was the same.
            sizes: number of values of each query in the message: a row enters every tree of a batch, so B trees are
                B queries. A tree is charged as a full one, as in the plan, which is older than the structure.
        """
        noise, trust = self._plan.noise, self._plan.trust
        planned = noise.of_kind(kind)  # refuses what is not paid for
        least = 2 << self._plan.method.depth if kind is Kind.NODE_STATS else 0
        event = ComposedEvent(tuple(noise.event(kind, max(size, least), trust.n_honest) for size in sizes))

        def make() -> Release:
            if trust.is_trusted_aggregator:
                return Release(np.zeros(1, dtype=np.int64), event)  # exact sums are charged, but kept in no file
            pairs = exact.reshape(-1, len(planned.sensitivity.weights))
            if trust.shares is None:  # of a single report, of which the event speaks, the sum tells less
                multiplier = planned.multiplier * trust.local_factor(self._n_rows)
                reports = add_gaussian_noise(pairs, planned.sensitivity, multiplier, self._randomness)
                return Release(reports.value, event)
            share = add_noise_share(pairs, planned.sensitivity, planned.multiplier, trust.shares, self._randomness)
            return Release(share.value, event)

        paid = self._pay(f"{query}{STATE}{self._state.hexdigest()[:32]}", make)
        noisy = self._sums.sum_counts(kind, exact.ravel() if trust.is_trusted_aggregator else paid.ravel())
        self._state.update(noisy.astype("<i8").tobytes())
        return noisy


class RefreshHandler:
    """Answers XGBoost's node statistics with noisy ones."""

    def __init__(self, sums: NoisySums, forest: Forest, weights: LeafWeights):
        self._sums, self._forest, self._weights = sums, forest, weights

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """Return the reply to one round's message."""
        trees = self._forest.of_round(message.moment.round)
        sizes = [2 * tree.leaves.size for tree in trees]
        query = f"leaf sums of round {message.moment.round}"
        noisy = self._sums.release(Kind.NODE_STATS, leaf_integers(buffer, trees), query, sizes)
        return node_statistics(self._weights.repaired(noisy.reshape(-1, 2) / UNIT), trees)


def agree_candidates(plan: PrivateTreesPlan, columns: NDArray[np.float32], sums: NoisySums) -> Candidates:
    """Return the split candidates; paid ones cost one exchange.

    Shapes: columns: float32[n_features, n_rows].

    Raises:
        ConfigurationError: candidates that are not private.
    """
    method = plan.method
    if method.candidates in (CandidateSource.QUANTILE, CandidateSource.ITERATIVE_HESSIAN):
        raise ConfigurationError(f"candidates {method.candidates.value!r} cannot be used with random trees in a job")
    public = public_candidates(method, plan.bounds)
    if not method.candidates.is_paid:
        return public
    grids = [dp_quantiles.public_grid(b) for b in plan.bounds]
    counts = dp_quantiles.count_cells(columns, grids)
    noisy = sums.release(Kind.CELL_COUNTS, counts, "rows per public cell", [counts.size])
    return paid_candidates(method, public, noisy, grids, plan.noise, plan.trust.noise_factor)


@dataclass(frozen=True, slots=True)
class TrainedForest:
    """The model, and what training cost this site. Units: seconds of CPU time of XGBoost and the objective."""

    booster: xgb.Booster
    forest: Forest
    xgboost_cpu_s: float


def train_private_trees(
    plan: PrivateTreesPlan,
    channel: Channel,
    sums: ProtectedSums,
    columns: NDArray[np.float32],
    label: NDArray[np.float32],
    pay: Pay = without_ledger,
    n_threads: int = 1,
    randomness: RandomSource = OS_RANDOMNESS,
    row_weights: NDArray[np.float32] | None = None,
    after_round: AfterRound = ignore_round,
    n_reports: int | None = None,
) -> TrainedForest:
    """Train with the other sites.

    Shapes: columns: float32[n_features, n_rows], NaN is missing; label: float32[n_rows] of 0 and 1; row_weights:
        float32[n_rows] in [0, 1], in units of the public largest weight.

    Args:
        n_reports: rows that report under local noise, if some were left out.
    Privacy: the sites and the server see the noisy sums that ``plan.noise`` pays for, and nothing else of the rows.

    Raises:
        VeilBoostError: what ended the training.
    """
    if plan.method.split_method is not SplitMethod.TOTALLY_RANDOM:
        raise ConfigurationError("this path trains totally random trees")
    plan.trust.check_sites(channel.world)
    noisy_sums = NoisySums(sums, plan, pay, randomness, label.size if n_reports is None else n_reports)
    forest = draw_forest(plan.method, agree_candidates(plan, columns, noisy_sums), plan.structure_seed)
    weights = plan.method.weight_update.weights()
    # Made outside any communicator, so that XGBoost sends nothing about it.
    matrix = xgb.DMatrix(
        np.ascontiguousarray(columns.T), label=label, nthread=n_threads, feature_names=list(plan.feature_names) or None
    )
    mediator = Mediator(RefreshGrammar(forest), channel.rank, RefreshHandler(noisy_sums, forest, weights))
    with mediator:
        try:
            objective = bounded_objective(plan, label, row_weights)
            return _refresh(plan, forest, channel, mediator, matrix, n_threads, objective, after_round)
        except xgb.core.XGBoostError as error:
            raise mediator.reason(error) from None
        except VeilBoostError as error:
            mediator.abort(error)
            raise


def _refresh(
    plan: PrivateTreesPlan,
    forest: Forest,
    channel: Channel,
    mediator: Mediator,
    matrix: xgb.DMatrix,
    n_threads: int,
    objective: Objective,
    after_round: AfterRound,
) -> TrainedForest:
    started = time.thread_time()
    with Federated(mediator, channel.world, channel.rank):
        booster = xgb.Booster(
            refresh_parameters(plan, n_threads),
            [matrix],
            model_file=bytearray(initial_model(forest, plan.method, plan.feature_names)),
        )
        booster.set_param(refresh_parameters(plan, n_threads))
        for number in range(forest.n_rounds):
            enter(mediator, channel, TrainingStep(Phase.UPDATE, number))
            booster.update(matrix, number, fobj=objective)
            after_round(number)
        enter(mediator, channel, TrainingStep(Phase.FINISH, forest.n_rounds))
    return TrainedForest(booster, forest, time.thread_time() - started)


def bounded_objective(
    plan: PrivateTreesPlan, label: NDArray[np.float32], row_weights: NDArray[np.float32] | None = None
) -> Objective:
    """Return the objective whose row statistics obey the plan's sensitivity, whatever the margins are.

    Shapes: row_weights: float32[n_rows], clipped into [0, 1] here, so that no row counts for more than one.
    """
    weights = plan.method.weight_update.weights()
    factor = None if row_weights is None else np.clip(row_weights.astype(np.float64), 0.0, 1.0)[:, None]

    def objective(margin: NDArray[np.float32], _: xgb.DMatrix) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        values = weights.row_statistics(margin, label, plan.method.query).values
        # Toward zero, so that a row stays on the grid and inside its bounds.
        pairs = (values if factor is None else np.trunc(values * factor)) * np.float32(1 / UNIT)
        return pairs[:, 0].astype(np.float32), pairs[:, 1].astype(np.float32)  # exact: at most 2^20 grid steps

    return objective


def enter(mediator: Mediator, channel: Channel, moment: TrainingStep) -> None:
    """Announce the next phase to the mediator and to the channel."""
    mediator.enter(moment)
    channel.moment = moment


def refresh_parameters(plan: PrivateTreesPlan, n_threads: int) -> dict[str, object]:
    """Return XGBoost's parameters for a refresh of the plan's forest."""
    return {
        "process_type": "update",
        "updater": "refresh",
        "refresh_leaf": 1,
        "nthread": n_threads,
        "num_parallel_tree": plan.method.batch_size,
        "learning_rate": plan.method.learning_rate,
        "lambda": plan.ridge,
        "max_delta_step": plan.method.clip,
        "min_child_weight": 0,
        "verbosity": 0,
    }
