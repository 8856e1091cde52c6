"""What decides the growth of a tree, read from XGBoost itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TreeParameters:
    """XGBoost's settings of tree growth, as the float32 numbers that it computes with.

    Attributes:
        monotone: -1, 0 or 1 for each column of all parties; empty for none.
        max_cat_to_onehot: a categorical column of fewer categories is split one against the others.
        max_cat_threshold: most categories that a split of more sets apart.
        interactions: groups of columns that may meet on a path; None for no constraint.
    """

    reg_lambda: np.float32
    reg_alpha: np.float32
    min_split_loss: np.float32
    min_child_weight: np.float32
    max_delta_step: np.float32
    max_depth: int
    max_leaves: int
    lossguide: bool
    subsample: np.float32
    colsample_bytree: np.float32
    colsample_bylevel: np.float32
    colsample_bynode: np.float32
    monotone: tuple[int, ...] = ()
    interactions: tuple[frozenset[int], ...] | None = None
    max_cat_to_onehot: int = 4
    max_cat_threshold: int = 64

    @classmethod
    def from_effective(cls, effective: Mapping[str, str]) -> TreeParameters:
        """Read the settings that a probe Booster reported (xgb/parameters.py, ``effective``)."""

        def real(name: str) -> np.float32:
            return np.float32(effective[name])

        monotone = effective.get("monotone_constraints", "").strip("()")
        interactions = effective.get("interaction_constraints", "")
        return cls(
            reg_lambda=real("reg_lambda"),
            reg_alpha=real("reg_alpha"),
            min_split_loss=real("min_split_loss"),
            min_child_weight=real("min_child_weight"),
            max_delta_step=real("max_delta_step"),
            max_depth=int(effective["max_depth"]),
            max_leaves=int(effective["max_leaves"]),
            lossguide=effective["grow_policy"] == "lossguide",
            subsample=real("subsample"),
            colsample_bytree=real("colsample_bytree"),
            colsample_bylevel=real("colsample_bylevel"),
            colsample_bynode=real("colsample_bynode"),
            monotone=tuple(int(item) for item in monotone.split(",") if item.strip()),
            interactions=tuple(map(frozenset, json.loads(interactions))) if interactions else None,
            max_cat_to_onehot=int(effective["max_cat_to_onehot"]),
            max_cat_threshold=int(effective["max_cat_threshold"]),
        )
