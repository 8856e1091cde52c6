"""XGBoost's arithmetic as a named thing, one row a release; what each supports; the parameters of a tree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.fixed_point import to_float
from he_processors.histogram.sums import NodeTotal
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.parameters import TrainingParameters

# What decides the growth of a tree, read from XGBoost itself.


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
        monotone = effective.get("monotone_constraints", "").strip("()")
        interactions = effective.get("interaction_constraints", "")
        return cls(
            **{name: read(effective[name]) for name, read in _NUMBERS.items()},
            lossguide=effective["grow_policy"] == "lossguide",
            monotone=tuple(int(item) for item in monotone.split(",") if item.strip()),
            interactions=tuple(map(frozenset, json.loads(interactions))) if interactions else None,
        )


_READ: dict[object, Callable[[str], Any]] = {"np.float32": np.float32, "int": int}
_NUMBERS = {one.name: _READ[one.type] for one in fields(TreeParameters) if one.type in _READ}
"""Settings that XGBoost reports as one number -> what reads it."""


# XGBoost's formulas of weights and gains, on sums that are exact integers: a row for each release that differs.
#
# They are XGBoost's to the last bit: sums are doubles, gains are float32, in the order of operations of its source.
#
# Reference: XGBoost 3.2 to 3.4, src/tree/split_evaluator.h, src/tree/param.h.


_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How one release of XGBoost grows trees, where releases differ.

    Attributes:
        name: the release that has it first; what sites agree on, and what models and evidence record.
        gains_by_weight: a gain is what the float32 weight gains, in doubles; a node of little hessian keeps its weight,
            and both children of a split need hessian. Before, gains are ratios wherever weights are not limited.
        draws_pair_seeds: what pairs of a round are drawn from is the next number of the training's generator (ranking
            by ``mean``); before, it follows from round and number of queries.
        one_column_generator: all samples of columns of a training come from one generator; afterwards each sample has a
            generator of its own, seeded by the training's.
        lowest_is_infinite: a split that sends only missing values to the left has the threshold minus infinity;
            before, one below all values of the table that the cuts are from.
    """

    name: str
    gains_by_weight: bool
    one_column_generator: bool
    draws_pair_seeds: bool
    lowest_is_infinite: bool


ARITHMETICS = {
    row.name: row
    for row in (
        Arithmetic(
            "3.2", gains_by_weight=False, one_column_generator=True, draws_pair_seeds=False, lowest_is_infinite=False
        ),
        Arithmetic(
            "3.3", gains_by_weight=False, one_column_generator=False, draws_pair_seeds=False, lowest_is_infinite=True
        ),
        Arithmetic(
            "3.4", gains_by_weight=True, one_column_generator=False, draws_pair_seeds=True, lowest_is_infinite=True
        ),
    )
}


def arithmetic_of(version: str) -> Arithmetic:
    """Return the arithmetic of a version of XGBoost.

    Raises:
        ConfigurationError: a release whose arithmetic is not known.
    """
    found = ARITHMETICS.get(".".join(version.split(".")[:2]))
    if found is None:
        known = ", ".join(ARITHMETICS)
        raise ConfigurationError(f"the arithmetic of xgboost {version} is not known; remedy: one of {known}")
    return found


def arithmetic_here() -> str:
    """Return the name of the arithmetic of this site's XGBoost. Raises: ConfigurationError: as ``arithmetic_of``."""
    return arithmetic_of(xgb.__version__).name


@dataclass(frozen=True, slots=True)
class WeightBounds:
    """Limits of a node's weight that follow from monotone constraints above it.

    Shapes: float32 scalars, or float32[n_nodes, 1] for several nodes at once.
    """

    lower: np.float32 | NDArray[np.float32] = -_LARGEST
    upper: np.float32 | NDArray[np.float32] = _LARGEST


@dataclass(frozen=True, slots=True, repr=False)
class GradientUnit:
    """What one step of an encoded gradient and hessian is worth: powers of two, so that decoding is exact."""

    g_exponent: int
    h_exponent: int

    def decode(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return sums as doubles, rounded once. Shapes: g, h: int64[n_words, ...]; results: float64[...]."""
        return to_float(g) * 2.0**self.g_exponent, to_float(h) * 2.0**self.h_exponent

    def decode_total(self, total: NodeTotal) -> tuple[float, float]:
        """Return one node's sums as doubles, rounded once."""
        return float(total.g) * 2.0**self.g_exponent, float(total.h) * 2.0**self.h_exponent


@dataclass(frozen=True, slots=True, repr=False)
class NodeToSplit:
    """What the evaluation must know about a node.

    Attributes:
        root_gain: gain of the node as it is, under the bounds of its parent.
        allowed: which of the party's features may split it. Shapes: bool[n_features].
    """

    total: NodeTotal
    root_gain: np.float32
    bounds: WeightBounds
    allowed: NDArray[np.bool_]


class SplitFormula:
    """Weights and gains, elementwise on arrays of doubles."""

    def __init__(self, params: TreeParameters, arithmetic: Arithmetic = ARITHMETICS["3.2"]):
        self.arithmetic = arithmetic
        self.params = params
        self._lambda = np.float64(params.reg_lambda)
        self._alpha = np.float64(params.reg_alpha)
        self._max_delta_step = params.max_delta_step
        self._min_child_weight = np.float64(params.min_child_weight)
        self.is_constrained = bool(params.monotone)
        self.max_cat_to_onehot, self.max_cat_threshold = params.max_cat_to_onehot, params.max_cat_threshold
        self._uses_weights = self.is_constrained or params.max_delta_step != 0 or arithmetic.gains_by_weight

    def weight(self, g: NDArray[np.float64], h: NDArray[np.float64], bounds: WeightBounds) -> NDArray[np.float32]:
        """Return leaf weights before the learning rate."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            weight = -self._threshold(g) / (h + self._lambda)
            if self._max_delta_step != 0:
                limit = np.float64(self._max_delta_step)
                weight = np.where(np.abs(weight) > limit, np.copysign(limit, weight), weight)
            has_none = h <= 0 if self.arithmetic.gains_by_weight else (h < self._min_child_weight) | (h <= 0)
            rounded = np.where(has_none, 0.0, weight).astype(np.float32)
        if not self.is_constrained:
            return rounded
        return np.where(rounded < bounds.lower, bounds.lower, np.where(rounded > bounds.upper, bounds.upper, rounded))

    def gain(self, g: NDArray[np.float64], h: NDArray[np.float64], bounds: WeightBounds) -> NDArray[np.float32]:
        """Return the gain of nodes that stay as they are."""
        if not self._uses_weights:
            return self._ratio_gain(g, h)
        return self._weight_gain(g, h, self.weight(g, h, bounds))

    def split_gain(
        self,
        left: tuple[NDArray[np.float64], NDArray[np.float64]],
        right: tuple[NDArray[np.float64], NDArray[np.float64]],
        monotone: NDArray[np.int8],
        bounds: WeightBounds,
    ) -> NDArray[np.float32]:
        """Return the gains of splits; minus infinity where a monotone constraint forbids one.

        Shapes: left, right: (float64[n], float64[n]); monotone: int8[n], broadcastable; result: float32[n].
        """
        if not self._uses_weights:
            return self._ratio_gain(*left) + self._ratio_gain(*right)
        w_left, w_right = self.weight(*left, bounds), self.weight(*right, bounds)
        gain = self._weight_gain(*left, w_left) + self._weight_gain(*right, w_right)
        forbidden = ((monotone > 0) & ~(w_left <= w_right)) | ((monotone < 0) & ~(w_left >= w_right))
        return np.where(forbidden, np.float32(-np.inf), gain)

    def is_valid(self, h_left: NDArray[np.float64], h_right: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which splits leave enough hessian on both sides."""
        is_enough = (h_left >= self._min_child_weight) & (h_right >= self._min_child_weight)
        return is_enough & (h_left > 0) & (h_right > 0) if self.arithmetic.gains_by_weight else is_enough

    def rule(self, unit: GradientUnit) -> NDArray[np.float64]:
        """Return the formulas as the kernels take them (``vg_formula`` in _native/growth.h). Shapes: float64[8]."""
        limit = self._max_delta_step if self._max_delta_step != 0 else np.inf
        steps = 2.0**unit.g_exponent, 2.0**unit.h_exponent
        kind = 2 if self.arithmetic.gains_by_weight else int(self._uses_weights)
        return np.array(
            [self._lambda, self._alpha, limit, self._min_child_weight, *steps, kind, self.is_constrained],
            dtype=np.float64,
        )

    def _threshold(self, g: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._alpha == 0:
            return g
        return np.where(g > self._alpha, g - self._alpha, np.where(g < -self._alpha, g + self._alpha, 0.0))

    def _ratio_gain(self, g: NDArray[np.float64], h: NDArray[np.float64]) -> NDArray[np.float32]:
        # Both arguments of XGBoost's division are narrowed to float32 before it divides.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            threshold = self._threshold(g)
            gain = (threshold * threshold).astype(np.float32) / (h + self._lambda).astype(np.float32)
        return np.where(h <= 0, np.float32(0), gain)

    def _weight_gain(
        self, g: NDArray[np.float64], h: NDArray[np.float64], weight: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore", over="ignore"):
            if self.arithmetic.gains_by_weight:
                w = weight.astype(np.float64)
                square = (weight * weight).astype(np.float64)
                cost = 2.0 * g * w + (h + self._lambda) * square + 2.0 * self._alpha * np.abs(w)
                return np.where(h <= 0, np.float32(0), (-cost).astype(np.float32))
            g32, h32 = g.astype(np.float32), h.astype(np.float32)
            regularised = h32 + np.float32(self._lambda)
            gain = -(np.float32(2) * g32 * weight + regularised * (weight * weight))
        return np.where(h <= 0, np.float32(0), gain)


def loss_changes(
    formula: SplitFormula,
    unit: GradientUnit,
    left: tuple[NDArray[np.int64], NDArray[np.int64]],
    total: tuple[NDArray[np.int64], NDArray[np.int64]],
    nodes: list[NodeToSplit],
    monotone: NDArray[np.int8],
    allowed: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """Return the loss change of every split; -inf where there is none.

    Shapes: left: (g, h), int64[n_words, n_nodes, n_splits]; total: int64[n_words, n_nodes, 1], of the nodes;
        monotone: int8[n_splits], allowed: bool[n_nodes, n_splits], both broadcastable;
        result: float32[n_nodes, n_splits].
    """
    left_sums = unit.decode(*left)
    right_sums = unit.decode(total[0] - left[0], total[1] - left[1])
    bounds = WeightBounds(_column([n.bounds.lower for n in nodes]), _column([n.bounds.upper for n in nodes]))
    gain = formula.split_gain(left_sums, right_sums, monotone, bounds)
    with np.errstate(invalid="ignore"):
        change = gain - _column([n.root_gain for n in nodes])
    usable = allowed & formula.is_valid(left_sums[1], right_sums[1]) & np.isfinite(change)
    return np.where(usable, change, np.float32(-np.inf))


def _column(values: list[Any]) -> NDArray[Any]:
    return np.array(values)[:, None]


# What the grower takes of XGBoost's parameters; the rest is trained by XGBoost itself, where every wheel can.


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
        *("aft_loss_distribution", "aft_loss_distribution_scale"),
        *("num_parallel_tree", "reg_alpha", "reg_lambda", "tweedie_variance_power", "ndcg_exp_gain"),
        *("lambdarank_normalization", "lambdarank_num_pair_per_sample", "lambdarank_pair_method"),
        "lambdarank_score_normalization",
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
    decisive = {*_NUMBERS, "learning_rate", "num_parallel_tree"}
    effective = {name: value for name, value in parameters.effective.items() if name in decisive}
    return {**document, "effective": effective}
