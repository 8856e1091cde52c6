"""Both trainers behind one call."""

from __future__ import annotations

from collections.abc import Mapping

from nvflare_plugins.private_trees.forest_trainer import train_forest
from nvflare_plugins.private_trees.methods import Grower
from nvflare_plugins.private_trees.training import (
    AfterRound,
    OwnRows,
    PrivateTreesPlan,
    SumsOverSites,
    Trainer,
    ignore_round,
)
from nvflare_plugins.private_trees.xgboost_trainer import train_by_xgboost
from nvflare_plugins.wire.channel import Place

TRAINERS: Mapping[Grower, Trainer] = {Grower.SITES: train_forest, Grower.XGBOOST: train_by_xgboost}


def train(
    plan: PrivateTreesPlan,
    channel: Place,
    sums: SumsOverSites,
    rows: OwnRows,
    after_round: AfterRound = ignore_round,
) -> bytes:
    """Train with the other sites; return the model in XGBoost's JSON form.

    Privacy: the sites and the server see the noisy sums that the plan lists, and nothing else of the rows.

    Raises:
        VeilBoostError: what ended the training.
    """
    plan.trust.check_sites(channel.world)
    return TRAINERS[plan.method.grower](plan, channel, sums, rows, after_round)
