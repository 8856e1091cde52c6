"""What the grower takes of XGBoost's parameters; the rest is trained by XGBoost itself, where every wheel can."""

from __future__ import annotations

from nvflare_plugins.growth.tree_parameters import TreeParameters
from nvflare_plugins.xgb.parameters import TrainingParameters

_TAKEN: dict[str, tuple[object, ...]] = {
    "booster": ("gbtree",),
    "device": ("cpu",),
    "grow_policy": ("depthwise", "lossguide"),
    "multi_strategy": ("one_output_per_tree",),
    "tree_method": ("hist", "auto"),
}
"""Parameters of which the grower takes these values."""

_ANY = frozenset(
    {
        *("base_score", "huber_slope", "num_class", "objective", "quantile_alpha", "scale_pos_weight"),
        *("colsample_bylevel", "colsample_bynode", "colsample_bytree", "subsample", "seed", "seed_per_iteration"),
        *("interaction_constraints", "monotone_constraints", "max_bin", "max_cat_threshold", "max_cat_to_onehot"),
        *("learning_rate", "max_delta_step", "max_depth", "max_leaves", "min_child_weight", "min_split_loss"),
        *("num_parallel_tree", "reg_alpha", "reg_lambda", "tweedie_variance_power"),
    }
)
"""Parameters that it takes with whatever value was checked before."""

_REASONS = {
    "dart": "trees that are dropped and weighed again (booster=dart)",
    "multi_output_tree": "leaves that are vectors (multi_strategy=multi_output_tree)",
}


def why_not_own(parameters: TrainingParameters) -> str | None:
    """Return what the grower does not do of a job's (checked) parameters; None if it does everything.

    Objectives and metrics are those of xgb/objectives.py, all of which it has.
    """
    for name, value in sorted(parameters.agreed.items()):
        if name in _ANY or value in _TAKEN.get(name, ()):
            continue
        return _REASONS.get(str(value), f"the parameter {name}={value}")
    return None


def grown_document(parameters: TrainingParameters) -> dict[str, object]:
    """Return what sites compare of the parameters: without what only some releases of XGBoost report."""
    document = parameters.document()
    decisive = {*TreeParameters.__dataclass_fields__, "learning_rate", "num_parallel_tree"} - {
        "lossguide",
        "monotone",
        "interactions",
    }
    effective = {name: value for name, value in parameters.effective.items() if name in decisive}
    return {**document, "effective": effective}
