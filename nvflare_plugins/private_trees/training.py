"""One site's training of a random forest: stock XGBoost refreshes leaves, beside a mediator that releases noisy sums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import LeafWeights
from dp_components.leaf_weights.noise_ridge import noise_proportional_ridge
from dp_components.leaf_weights.row_bounds import UNIT
from dp_components.split_candidates import dp_quantiles
from dp_components.split_candidates.candidates import Candidates, FeatureBounds
from he_processors.errors import ConfigurationError, JobAborted, VeilBoostError
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.forest import Forest, draw_forest, initial_model
from nvflare_plugins.private_trees.methods import CandidateSource, Method, SplitMethod
from nvflare_plugins.private_trees.noise_plan import IntegerNoise, NoisePlan, Trust
from nvflare_plugins.private_trees.refresh_catalogue import RefreshGrammar, leaf_integers, node_statistics
from nvflare_plugins.wire.catalogue import Kind, Message, Moment, Phase
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.mediator import Mediator
from nvflare_plugins.wire.sums import ProtectedSums


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
        return noise_proportional_ridge(method.ridge, method.noise_ridge, self.noise.leaf.gradient * self.trust.total)


class NoisySums:
    """Sums over the sites with this site's share of the noise inside.

    Privacy: what leaves the site is protected by the session's masks; the sum is released with the noise of the plan.
    """

    def __init__(self, sums: ProtectedSums, plan: PrivateTreesPlan, noise: IntegerNoise):
        self._sums, self._plan, self._noise = sums, plan, noise

    def release(self, kind: Kind, exact: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the noisy sum of the sites' integers. Shapes: int64[n]."""
        std = self._plan.noise.grid_std(kind, exact.size)  # refuses what is not paid for, in every trust model
        share = self._plan.trust.share
        contribution = exact + self._noise(std * share) if share else exact
        return self._sums.sum_counts(kind, contribution)


class RefreshHandler:
    """Answers XGBoost's node statistics with noisy ones."""

    def __init__(self, sums: NoisySums, forest: Forest, weights: LeafWeights):
        self._sums, self._forest, self._weights = sums, forest, weights

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """Return the reply to one round's message."""
        trees = self._forest.of_round(message.moment.round)
        noisy = self._sums.release(Kind.NODE_STATS, leaf_integers(buffer, trees))
        return node_statistics(self._weights.repaired(noisy.reshape(-1, 2) / UNIT), trees)


def agree_candidates(plan: PrivateTreesPlan, columns: NDArray[np.float32], sums: NoisySums) -> Candidates:
    """Return the split candidates; paid ones cost one exchange.

    Shapes: columns: float32[n_features, n_rows].
    Raises: ConfigurationError, for candidates that are not private.
    """
    method = plan.method
    if method.candidates in (CandidateSource.QUANTILE, CandidateSource.ITERATIVE_HESSIAN):
        raise ConfigurationError(f"candidates {method.candidates.value!r} cannot be used with random trees in a job")
    public = public_candidates(method, plan.bounds)
    if not method.candidates.is_paid:
        return public
    grids = [dp_quantiles.public_grid(b) for b in plan.bounds]
    noisy = sums.release(Kind.CELL_COUNTS, dp_quantiles.count_cells(columns, grids))
    mixed = method.candidates is CandidateSource.MIXED
    n_quantiles = method.n_candidates // 2 if mixed else method.n_candidates
    paid = dp_quantiles.cut_at_quantiles(noisy.astype(np.float64), grids, plan.noise.cells * plan.trust.total, n_quantiles)
    return dp_quantiles.union(public, paid) if mixed else paid


@dataclass(frozen=True, slots=True)
class TrainedForest:
    """The model, and what training cost this site. Units: seconds of CPU time of XGBoost and the objective."""

    booster: xgb.Booster
    forest: Forest
    xgboost_cpu_s: float


def train_private_trees(
    plan: PrivateTreesPlan, channel: Channel, sums: ProtectedSums, noise: IntegerNoise,
    columns: NDArray[np.float32], label: NDArray[np.float32], n_threads: int = 1,
) -> TrainedForest:  # fmt: skip
    """Train with the other sites.

    Shapes: columns: float32[n_features, n_rows], NaN is missing; label: float32[n_rows] of 0 and 1.
    Privacy: the sites and the server see the noisy sums that ``plan.noise`` pays for, and nothing else of the rows.
    Raises: VeilBoostError, what ended the training.
    """
    if plan.method.split_method is not SplitMethod.TOTALLY_RANDOM:
        raise ConfigurationError("this path trains totally random trees")
    noisy_sums = NoisySums(sums, plan, noise)
    forest = draw_forest(plan.method, agree_candidates(plan, columns, noisy_sums), plan.structure_seed)
    weights = plan.method.weight_update.weights()
    # Made outside any communicator, so that XGBoost sends nothing about it.
    matrix = xgb.DMatrix(np.ascontiguousarray(columns.T), label=label, nthread=n_threads)
    mediator = Mediator(RefreshGrammar(forest), channel.rank, RefreshHandler(noisy_sums, forest, weights))
    with mediator:
        try:
            return _refresh(plan, forest, weights, channel, mediator, matrix, n_threads)
        except xgb.core.XGBoostError as error:
            if mediator.error is not None:
                raise mediator.error from None
            raise JobAborted(f"XGBoost failed: {str(error).strip().splitlines()[0][:500]}") from None
        except VeilBoostError as error:
            mediator.abort(error)
            raise


def _refresh(
    plan: PrivateTreesPlan, forest: Forest, weights: LeafWeights, channel: Channel, mediator: Mediator,
    matrix: xgb.DMatrix, n_threads: int,
) -> TrainedForest:  # fmt: skip
    label = matrix.get_label()

    def objective(margin: NDArray[np.float32], _: xgb.DMatrix) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = weights.row_statistics(margin, label)
        return rows.gradients * np.float32(1 / UNIT), rows.hessians * np.float32(1 / UNIT)

    started = time.thread_time()
    with xgb.collective.CommunicatorContext(
        dmlc_communicator="federated",
        federated_server_address=mediator.address,
        federated_world_size=channel.world,
        federated_rank=channel.rank,
    ):
        booster = xgb.Booster(
            refresh_parameters(plan, n_threads), [matrix],
            model_file=bytearray(initial_model(forest, plan.method, plan.feature_names)),
        )  # fmt: skip
        booster.set_param(refresh_parameters(plan, n_threads))
        for number in range(forest.n_rounds):
            _enter(mediator, channel, Moment(Phase.UPDATE, number))
            booster.update(matrix, number, fobj=objective)
        _enter(mediator, channel, Moment(Phase.FINISH, forest.n_rounds))
    return TrainedForest(booster, forest, time.thread_time() - started)


def _enter(mediator: Mediator, channel: Channel, moment: Moment) -> None:
    mediator.enter(moment)
    channel.moment = moment


def refresh_parameters(plan: PrivateTreesPlan, n_threads: int) -> dict[str, object]:
    """Return XGBoost's parameters for a refresh of the plan's forest."""
    return {
        "process_type": "update", "updater": "refresh", "refresh_leaf": 1, "nthread": n_threads,
        "num_parallel_tree": plan.method.batch_size, "learning_rate": plan.method.learning_rate,
        "lambda": plan.ridge, "max_delta_step": plan.method.clip, "min_child_weight": 0, "verbosity": 0,
    }  # fmt: skip
