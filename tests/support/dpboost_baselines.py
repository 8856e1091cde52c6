"""The baselines that DPBoost is compared with, as plans of its own components."""

from __future__ import annotations

from dp_components.dpboost.ensemble_of_ensembles import DpBoostPlan, RowSharing


def para(epsilon: float, n_trees: int = 50) -> DpBoostPlan:
    """Return the slides' baseline PARA (Zhao et al. 2018): all trees on disjoint rows, in equal shares.

    With the sensitivities, filtering and clipping of DPBoost, as the slides have it.
    """
    return DpBoostPlan(epsilon, n_trees, n_trees, sharing=RowSharing.EQUAL)


def seq(epsilon: float, n_trees: int = 50) -> DpBoostPlan:
    """Return the slides' baseline SEQ (Liu et al. 2018): every tree on all rows, with epsilon / T.

    With the sensitivities, filtering and clipping of DPBoost, as the slides have it; clipping counts all trees.
    """
    return DpBoostPlan(epsilon, n_trees, 1, clips_over_all_trees=True)
