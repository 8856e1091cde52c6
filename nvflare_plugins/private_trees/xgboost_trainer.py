"""The trainer that is stock XGBoost: it refreshes a public forest, and sees none but noisy sums of its leaves.

For random trees whose candidates stay the same. The model is that of forest_trainer.py bit by bit, in more time; a job
asks for it by ``grower: xgboost``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.leaf_weights.interface import LeafWeights
from dp_components.leaf_weights.query import UNIT
from he_processors.errors import VeilBoostError
from nvflare_plugins.private_trees.candidates import agree_candidates
from nvflare_plugins.private_trees.forest import Forest, draw_forest, initial_model
from nvflare_plugins.private_trees.refresh_grammar import RefreshGrammar, leaf_integers, node_statistics
from nvflare_plugins.private_trees.training import AfterRound, OwnRows, PrivateTreesPlan, SumsOverSites
from nvflare_plugins.wire.catalogue import Kind, Message, Phase, TrainingStep
from nvflare_plugins.wire.channel import Place
from nvflare_plugins.wire.mediator import Mediator
from nvflare_plugins.xgb.communicator import Federated
from nvflare_plugins.xgb.tree_documents import written

Objective = Callable[[NDArray[np.float32], xgb.DMatrix], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Margins and matrix -> gradients and Hessians of the rows, as XGBoost takes them."""


def train_by_xgboost(
    plan: PrivateTreesPlan, channel: Place, sums: SumsOverSites, rows: OwnRows, after_round: AfterRound
) -> bytes:
    """Train one site's part; see ``Trainer``."""
    forest = draw_forest(plan.method, agree_candidates(plan, rows.columns, sums), plan.structure_seed)
    # Made outside any communicator, so that XGBoost sends nothing about it.
    matrix = xgb.DMatrix(
        np.column_stack(list(rows.columns)),
        label=rows.label,
        nthread=1,
        feature_names=list(plan.feature_names) or None,
    )
    handler = RefreshHandler(sums, forest, plan.weights)
    mediator = Mediator(RefreshGrammar(forest), channel.rank, handler)
    with mediator:
        try:
            return _refresh(plan, forest, channel, mediator, matrix, bounded_objective(plan, rows), after_round)
        except xgb.core.XGBoostError as error:
            raise mediator.reason(error) from None
        except VeilBoostError as error:
            mediator.abort(error)
            raise


class RefreshHandler:
    """Answers XGBoost's node statistics with noisy ones."""

    def __init__(self, sums: SumsOverSites, forest: Forest, weights: LeafWeights) -> None:
        self._sums, self._forest, self._weights = sums, forest, weights

    def answer(self, message: Message, buffer: bytes) -> bytes:
        """Return the reply to one round's message."""
        number = message.moment.round
        trees = self._forest.of_round(number)
        noisy = self._sums.release(Kind.NODE_STATS, number, leaf_integers(buffer, trees))
        return node_statistics(self._weights.repaired(noisy.reshape(-1, 2) / UNIT), trees)


def bounded_objective(plan: PrivateTreesPlan, rows: OwnRows) -> Objective:
    """Return the objective whose row statistics obey the plan's sensitivity, whatever the margins are."""

    def objective(margin: NDArray[np.float32], _: xgb.DMatrix) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        pairs = rows.statistics(margin, plan) * np.float32(1 / UNIT)
        return pairs[:, 0].astype(np.float32), pairs[:, 1].astype(np.float32)  # exact: at most 2^20 grid steps

    return objective


def refresh_parameters(plan: PrivateTreesPlan) -> dict[str, object]:
    """Return XGBoost's parameters for a refresh of the plan's forest."""
    return {
        "process_type": "update",
        "updater": "refresh",
        "refresh_leaf": 1,
        "nthread": 1,
        "num_parallel_tree": plan.method.batch_size,
        "learning_rate": plan.method.learning_rate,
        "lambda": plan.ridge,
        "max_delta_step": plan.method.clip,
        "min_child_weight": 0,
        "verbosity": 0,
    }


def _refresh(
    plan: PrivateTreesPlan,
    forest: Forest,
    channel: Place,
    mediator: Mediator,
    matrix: xgb.DMatrix,
    objective: Objective,
    after_round: AfterRound,
) -> bytes:
    def enter(moment: TrainingStep) -> None:
        mediator.enter(moment)
        channel.moment = moment

    with Federated(mediator, channel.world, channel.rank):
        model = bytearray(initial_model(forest, plan.method, plan.feature_names))
        booster = xgb.Booster(refresh_parameters(plan), [matrix], model_file=model)
        booster.set_param(refresh_parameters(plan))
        for number in range(forest.n_rounds):
            enter(TrainingStep(Phase.UPDATE, number))
            booster.update(matrix, number, fobj=objective)
            after_round(number)
        enter(TrainingStep(Phase.FINISH, forest.n_rounds))
    return written(booster)
