"""One training of a tuning whose trees the sites grow, over rows in this process or at workers."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth.training import LoopSettings, Training
from nvflare_plugins.horizontal.growing import Beginning, Grown, Scales, first_model
from nvflare_plugins.horizontal.grown_training import shard_task, site_sums, training_result
from nvflare_plugins.tuning.fold_rows import FoldRows
from nvflare_plugins.tuning.folds import FoldDraws
from nvflare_plugins.tuning.sharded import FoldsOnWorkers
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.rounds import TrainingResult


def train_on_folds(
    rows: FoldRows | FoldsOnWorkers,
    fold: int,
    grown: Grown,
    settings: LoopSettings,
    draws: FoldDraws | None,
    channel: Channel,
    sums: ProtectedSums,
) -> TrainingResult:
    """Train on all rows but those of a fold, with the other sites, and score these.

    Args:
        grown: its table has labels alone, of the rows that are trained on.
    """
    scales = Scales.of(sums, grown)
    plan = grown.plan(scales)
    model, start = first_model(grown, plan, Beginning(None, is_own=False), sums, channel.world)
    site = site_sums(grown, plan, sums)
    if isinstance(rows, FoldRows):
        held = rows.without(fold, plan, cast("NDArray[np.float32]", start))  # no model is continued
        return training_result(Training(plan, held, site, channel, settings, draws).run(model))
    task = shard_task(grown, scales, model, start, settings, channel, draws is not None, reads=False)
    return rows.grow(fold, task, channel, site, draws)
