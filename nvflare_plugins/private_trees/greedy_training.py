"""One site's training of greedy trees by XGBoost's own grower (``grower: xgboost``): its histograms with noise.

Models are worse at the same epsilon than those of own_training.py, which is the default.

``max_cached_hist_node=1`` keeps XGBoost from subtracting: it asks for both children of every split, whose rows are
disjoint, so that a level of a tree is one query per feature. The root's sum is never a release of its own: it is the
mean over features of the noisy root histogram's totals. Leaves follow from the noisy histograms too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.leaf_weights.query import UNIT
from dp_components.sensitivity import grid_integers
from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError, ProtocolError, VeilBoostError
from nvflare_plugins.private_trees.candidates import public_candidates
from nvflare_plugins.private_trees.methods import CandidateSource, Method, SplitMethod, WeightUpdate
from nvflare_plugins.private_trees.training import (
    AfterRound,
    NoisySums,
    Objective,
    Pay,
    PrivateTreesPlan,
    bounded_objective,
    enter,
    ignore_round,
    without_ledger,
)
from nvflare_plugins.wire.catalogue import (
    Answer,
    BaseScoreSource,
    HorizontalGrammar,
    Kind,
    Message,
    Phase,
    TrainingShape,
    TrainingStep,
)
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.mediator import Mediator
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.communicator import Federated
from nvflare_plugins.xgb.cuts import Cuts, reference_table
from nvflare_plugins.xgb.versions import installed_release


class NoisyHistogramHandler:
    """Answers XGBoost's histograms with noisy ones, and the root's sum from them."""

    def __init__(self, sums: NoisySums, bins_per_feature: NDArray[np.int64], method: Method):
        """Args: method: histograms of ``depth`` levels are paid for in each round."""
        self._sums, self._bins, self._method = sums, bins_per_feature, method
        self._root: NDArray[np.float64] | None = None
        self._round, self._n_levels = -1, 0

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """Return the reply to one message of XGBoost."""
        if message.answer is Answer.LOCAL:
            return buffer if message.kind is Kind.FEATURE_COUNT else b""
        if message.kind is Kind.ROOT_SUM and self._root is not None:
            starts = np.cumsum(self._bins) - self._bins
            return bytes(np.add.reduceat(self._root, starts, axis=0).mean(axis=0).astype("<f8").tobytes())
        if message.kind is not Kind.HISTOGRAM:
            raise ProtocolError(f"{message.kind.name} is not released in private training")
        return self._histogram(message, buffer)

    def _histogram(self, message: Message, buffer: bytes) -> bytes:
        try:
            exact = grid_integers(np.frombuffer(buffer, dtype="<f8"))
        except ValueError:
            raise ProtocolError("a histogram is not on the grid of the row statistics") from None
        n_nodes = exact.size // (2 * int(self._bins.sum()))
        level = self._next_level(message.moment.round)
        if n_nodes > 1 << level:
            raise ProtocolError(f"XGBoost asks for {n_nodes} histograms of level {level}, which has fewer nodes")
        query = f"histograms of level {level} of round {message.moment.round}"
        # Charged as a full level, as in the plan, which is older than the tree.
        sizes = [level_size(self._method, level)] * self._bins.size
        noisy = self._sums.release(Kind.HISTOGRAM, exact, query, sizes) / UNIT
        self._root = noisy.reshape(-1, 2) if n_nodes == 1 else None
        return noisy.astype("<f8").tobytes()

    def _next_level(self, number: int) -> int:
        if number != self._round:
            self._round, self._n_levels = number, 0
        self._n_levels += 1
        if self._n_levels > self._method.depth:
            raise ProtocolError(f"XGBoost asks for more than the {self._method.depth} levels that are paid for")
        return self._n_levels - 1


def level_size(method: Method, level: int) -> int:
    """Return the most values of one feature's query for a level: pairs (G, H) of every node and bin.

    There are two bins more than candidates: XGBoost adds the outer bounds.
    """
    return (method.n_candidates + 2) << (level + 1)


def train_greedy_trees(
    plan: PrivateTreesPlan,
    channel: Channel,
    sums: ProtectedSums,
    columns: NDArray[np.float32],
    label: NDArray[np.float32],
    pay: Pay = without_ledger,
    n_threads: int = 1,
    row_weights: NDArray[np.float32] | None = None,
    after_round: AfterRound = ignore_round,
    n_reports: int | None = None,
) -> xgb.Booster:
    """Train histogram trees (FEVERLESS, DP-GBM) with the other sites.

    Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows] of 0 and 1; row_weights: float32[n_rows] in
        [0, 1], in units of the public largest weight.

    Args:
        n_reports: rows that report under local noise, if some were left out.
    Privacy: every bin of every histogram is noised, empty ones too; ``plan.noise`` pays for depth x features queries
        per tree.

    Raises:
        VeilBoostError: what ended the training.
        ConfigurationError: what XGBoost's grower cannot do.
    """
    _check(plan, columns)
    plan.trust.check_sites(channel.world)
    n_reports = label.size if n_reports is None else n_reports
    if label.size == 0:  # XGBoost grows another tree where it has no row: one that weighs nothing stands in
        low = np.array([[bounds.low] for bounds in plan.bounds], dtype=np.float32)
        columns, label, row_weights = low, np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
    candidates = public_candidates(plan.method, plan.bounds)
    matrix = greedy_matrix(candidates, columns, label, n_threads, plan.feature_names)
    bounds = matrix.get_quantile_cut()[0].astype(np.int64)
    bins = bounds[1:] - bounds[:-1] - 1  # one bound more than bins is listed
    noisy_sums = NoisySums(sums, plan, pay, n_rows=n_reports)
    handler = NoisyHistogramHandler(noisy_sums, bins, plan.method)
    mediator = Mediator(HorizontalGrammar(_shape(plan, channel.world, bins)), channel.rank, handler)
    with mediator:
        try:
            objective = bounded_objective(plan, label, row_weights)
            return _grow(plan, channel, mediator, matrix, n_threads, objective, after_round)
        except xgb.core.XGBoostError as error:
            raise mediator.reason(error) from None
        except VeilBoostError as error:
            mediator.abort(error)
            raise


def _grow(
    plan: PrivateTreesPlan,
    channel: Channel,
    mediator: Mediator,
    matrix: xgb.QuantileDMatrix,
    n_threads: int,
    objective: Objective,
    after_round: AfterRound,
) -> xgb.Booster:
    with Federated(mediator, channel.world, channel.rank):
        booster = xgb.Booster(greedy_parameters(plan, n_threads), [matrix])
        for number in range(plan.method.n_trees):
            enter(mediator, channel, TrainingStep(Phase.UPDATE, number))
            booster.update(matrix, number, fobj=objective)
            after_round(number)
        enter(mediator, channel, TrainingStep(Phase.FINISH, plan.method.n_trees))
    return booster


def greedy_parameters(plan: PrivateTreesPlan, n_threads: int) -> dict[str, object]:
    """Return XGBoost's parameters for greedy trees on noisy histograms."""
    method = plan.method
    return {
        "tree_method": "hist",
        "max_cached_hist_node": 1,
        "max_depth": method.depth,
        "max_bin": _max_bin(plan),
        "learning_rate": method.learning_rate,
        "lambda": plan.ridge,
        "max_delta_step": method.clip,
        "min_child_weight": 0,
        "base_score": 0.5,
        "objective": "binary:logistic",
        "nthread": n_threads,
        "verbosity": 0,
    }


def _check(plan: PrivateTreesPlan, columns: NDArray[np.float32]) -> None:
    method = plan.method
    if method.split_method is not SplitMethod.HISTOGRAM or method.weight_update is WeightUpdate.AVERAGING:
        raise ConfigurationError("this path trains histogram trees with Newton or gradient updates")
    if method.candidates not in (CandidateSource.UNIFORM, CandidateSource.LOGARITHMIC) or method.batch_size != 1:
        raise ConfigurationError("histogram trees take uniform or logarithmic candidates and no batches")
    if method.n_features_per_tree is not None:
        raise ConfigurationError("histogram trees use all features here")
    if np.isnan(columns).any():
        raise ConfigurationError("histogram trees need columns without missing values: impute publicly first")


def _max_bin(plan: PrivateTreesPlan) -> int:
    return plan.method.n_candidates + 2  # two bins belong to the outer bounds of the reference table


def greedy_matrix(
    candidates: Candidates,
    columns: NDArray[np.float32],
    label: NDArray[np.float32],
    n_threads: int,
    feature_names: Sequence[str] = (),
) -> xgb.QuantileDMatrix:
    """Bin the rows by the public candidates. Made outside any communicator, so that XGBoost sends nothing about it."""
    # XGBoost sends x < cut to the left, the candidates x <= c: the cut is the next float32 above c.
    cuts = Cuts(tuple(np.nextafter(c, np.float32(np.inf)) for c in candidates.of_feature))
    names = list(feature_names) or None
    common = {"max_bin": max(candidates.counts) + 2, "nthread": n_threads, "feature_names": names}
    reference = xgb.QuantileDMatrix(reference_table(cuts, {}), **common)
    return xgb.QuantileDMatrix(np.ascontiguousarray(columns.T), label=label, ref=reference, **common)


def _shape(plan: PrivateTreesPlan, n_sites: int, bins: NDArray[np.int64]) -> TrainingShape:
    return TrainingShape(
        n_sites=n_sites,
        n_features=bins.size,
        n_bins=int(bins.sum()),
        n_outputs=1,
        trees_per_round=1,
        vector_leaf=False,
        max_built_nodes=1 << (plan.method.depth - 1),
        weighted=False,
        adaptive_leaf=False,
        base_score=BaseScoreSource.GIVEN,
        eval_metrics=(),
        n_eval_sets=0,
        column_seed=installed_release().sends_column_seed,
    )
