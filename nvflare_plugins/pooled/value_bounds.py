"""How large the numbers are that a site will send: the bounds behind the scales of sums (wire/sums.py).

Only the power of two above a bound counts. One that proves too small costs an agreement on a wider scale and tells the
server which site asked; one that is too large by a factor of 1,000 costs ten of some sixty bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.objectives import RESIDUAL_ROOTS
from nvflare_plugins.growth.ranking import PairRules, Queries
from nvflare_plugins.growth.site_sums import WIDE_BITS
from nvflare_plugins.pooled.row_floors import row_weights
from nvflare_plugins.wire.envelope import CURVE_METRICS, RANK_METRICS, BaseScoreSource
from nvflare_plugins.wire.sums import Family, ProtectedSums, metric_quantity
from nvflare_plugins.xgb.objectives import Task
from nvflare_plugins.xgb.parameters import TrainingParameters

_HEADROOM = 8.0  # predictions overshoot labels, and another site's mean may be larger than this site's labels
_LARGEST_LOG_LOSS = 64.0  # XGBoost clips probabilities at 1e-16
_FINEST = 2.0**-20
COARSEST = 2.0**-24
ROW_LABELS, ROW_WEIGHTS = "row labels", "row weights"
_ROW_HEADROOM = 16.0
_MODERATE_WEIGHT = 16.0
_LARGEST_RISK = 2.0**16  # the mean hazard ratio of a bin of times
_LINEAR = ("reg:squarederror", "count:poisson")  # gradients are differences of predictions and labels


def value_bounds(parameters: TrainingParameters, tables: Sequence[Table]) -> dict[str, float]:
    """Bound what this site will send, per quantity. The quantities are the same at all sites.

    Args:
        tables: the training set, and the evaluation set if there is one.
    """
    training, facts = tables[0], parameters.objective
    total = _total_weight(training)
    gradient, hessian = _gradient_sums(parameters, training, total)
    largest = _largest(_finite(training.label))
    # A mean is no larger than a label; medians, quantiles and class counts are weighed before they are sent.
    sends_mean = facts.base_score_source is BaseScoreSource.MEAN and not facts.adaptive_leaf
    bounds: dict[str, float] = {
        Family.GRADIENTS: gradient,
        Family.HESSIANS: hessian,
        Family.WEIGHTS: 4.0 * max(map(_total_weight, tables)),
        Family.LABELS: 4.0 * largest if sends_mean else _HEADROOM * (largest + 1.0) * (total + 1.0),
    }
    for metric in parameters.metrics:
        bounds[metric_quantity(metric)] = max(_metric_sum(metric, parameters, table) for table in tables)
    if training.weight is not None:
        positive = training.weight[training.weight > 0]
        bounds[Family.INVERSE_WEIGHTS] = 1.0 / float(positive.min()) if positive.size else 0.0
    return bounds


def row_bounds(parameters: TrainingParameters, table: Table, queries: Queries | None = None) -> dict[str, float]:
    """Bound the gradient and the hessian of any row of this site: their grid follows from it (growth/site_sums.py).

    Each row's bound is of the row alone, or of its query, so that the largest of all sites does not depend on who holds
    which rows.
    """
    facts, label = parameters.objective, np.abs(table.label.astype(np.float64))
    weight, start = row_weights(table), _largest_base_score(parameters)
    largest = _largest_of(weight)
    if facts.task is Task.SURVIVAL:
        label, size = np.zeros(len(label)), largest
    elif facts.name in (*_LINEAR, "reg:pseudohubererror") or facts.adaptive_leaf:
        size = _largest_of(weight * (label + start))
    elif facts.name == "reg:squaredlogerror":
        logs = np.abs(np.log1p(np.maximum(table.label.astype(np.float64), -1.0 + 1e-7)))
        size = _largest_of(weight * (1.0 + np.maximum(logs, math.log1p(start))))
    elif facts.name == "reg:tweedie":
        power = 2.0 - parameters.number("tweedie_variance_power", 1.5)
        size = _largest_of(weight * np.maximum(label, start) ** power)
    else:  # gamma: ratios of labels and predictions
        size = largest
    gradient = _HEADROOM * size if facts.gradient_bound is None else facts.gradient_bound * largest
    if facts.name == "reg:pseudohubererror":
        gradient = min(gradient, _HEADROOM * size)
    hessian = _HEADROOM * size if facts.hessian_bound is None else facts.hessian_bound * largest
    if queries is not None:
        gradient, hessian = pair_bounds(parameters, queries)
    bounds = {
        Family.GRADIENTS: gradient,
        Family.HESSIANS: hessian,
        ROW_LABELS: _largest_of(weight * label),
        ROW_WEIGHTS: largest,
    }
    if facts.adaptive_leaf:  # XGBoost 3.4 has smooth losses in place of leaves that are quantiles
        bounds[Family.GRADIENTS] = max(gradient, _HEADROOM * size)
        bounds[Family.HESSIANS] = max(hessian, _ROW_HEADROOM * largest)
        bounds[RESIDUAL_ROOTS] = _ROW_HEADROOM * _largest_of(weight * np.sqrt(label + start + 1.0))
    return bounds


def pair_bounds(parameters: TrainingParameters, queries: Queries) -> tuple[float, float]:
    """Bound |gradient| and hessian of any row that is ranked, with its query's weight."""
    most, weight = int(queries.sizes.max(initial=1)), 1.0
    if queries.weight is not None:
        weight = float(queries.weight.max(initial=0.0)) * float(queries.weight_norm)
    gradient, hessian = PairRules.of(parameters.agreed).bounds(most)
    return gradient * weight, hessian * weight


def label_sum(table: Table) -> float:
    """Return the sum of this site's labels, times their weights."""
    return float(np.sum(row_weights(table) * table.label.astype(np.float64)))


def coarsest_pairs(parameters: TrainingParameters, *, weighted: bool) -> float:
    """Return the largest step of gradient sums with which leaves still are what jobs/MODEL.md says; 0 for the finest.

    Where every row's gradient is bounded alike, the step counts beside a leaf's denominator, which holds lambda or
    whole rows. Labels and weights of any size have no such measure. A public fact: the job says it.
    """
    facts = parameters.objective
    unbounded = facts.gradient_bound is None or facts.hessian_bound is None
    factor = parameters.number("scale_pos_weight", 1.0)
    sloped = facts.name == "reg:pseudohubererror"  # bounded by a slope that may be far above all residuals
    is_plain = not (unbounded or weighted or sloped) and 1 / _MODERATE_WEIGHT <= factor <= _MODERATE_WEIGHT
    return COARSEST if is_plain else 0.0


def check_weights(sums: ProtectedSums, parameters: TrainingParameters, *, weighted: bool, n_rows: int | None) -> None:
    """Refuse weights that differ so much that leaves of the smallest rows would drown in the step of the sums.

    A leaf's denominator is at least min_child_weight + lambda, and some row's weight. The step is far below the
    rounding of XGBoost's own sums over all rows; but that of a small node's is finer.

    Args:
        n_rows: pooled rows where rows are rounded to the grid, each by itself; None where sites' sums are.

    Privacy: decided from the agreed scales, so at all sites alike.

    Raises:
        ConfigurationError: they do.
    """
    if not weighted:
        return
    least = sum(float(parameters.effective.get(name, 1.0)) for name in ("min_child_weight", "reg_lambda"))
    smallest = 2.0 ** -sums.scale_of(Family.INVERSE_WEIGHTS).bound_exponent
    error = 2.0 ** sums.scale_of(Family.WEIGHTS).exponent
    if n_rows is not None:  # what roundings of all rows typically add up to
        row_bits = max(n_rows, 1).bit_length()
        error = 2.0 ** (sums.scale_of(ROW_WEIGHTS).bound_exponent + row_bits - WIDE_BITS) * math.sqrt(n_rows / 12)
    if error > _FINEST * max(least, smallest):
        raise ConfigurationError(
            "weight: the weights of all sites differ too much for leaves of the smallest ones to be exact; clip the "
            "weights, set those that hardly count to 0, or raise min_child_weight"
        )


def _gradient_sums(parameters: TrainingParameters, table: Table, total: float) -> tuple[float, float]:
    """Bound the sums of |gradient| and of the hessian over this site's rows."""
    facts, label = parameters.objective, _finite(table.label)
    start = _largest_base_score(parameters)
    sum_of_labels = float(np.dot(row_weights(table), np.abs(label)))
    if facts.name in _LINEAR:
        gradient = hessian = _HEADROOM * (sum_of_labels + total * start)
    elif facts.name == "reg:squaredlogerror":
        gradient = hessian = _HEADROOM * total * (1.0 + _largest_log1p(label, start))
    elif facts.name == "reg:tweedie":
        power = 2.0 - parameters.number("tweedie_variance_power", 1.5)
        gradient = hessian = _HEADROOM * total * max(_largest(label), start) ** power
    else:  # gamma: ratios of labels and predictions
        gradient = hessian = _HEADROOM * total
    if facts.name == "reg:pseudohubererror" and facts.gradient_bound is not None:
        gradient = min(total * facts.gradient_bound, _HEADROOM * (sum_of_labels + total * start))
    elif facts.gradient_bound is not None:
        gradient = total * facts.gradient_bound
    if facts.hessian_bound is not None:
        hessian = total * facts.hessian_bound
    return gradient, hessian


def _metric_sum(metric: str, parameters: TrainingParameters, table: Table) -> float:  # noqa: C901 - one bound a metric
    """Bound a metric's numerator over this site's rows."""
    label, total = _finite(table.label), _total_weight(table)
    start = _largest_base_score(parameters)
    largest = max(_largest(label), start)
    name, _, argument = metric.partition("@")
    if name == "aft-nloglik":
        log_scale = abs(math.log(parameters.number("aft_loss_distribution_scale", 1.0)))
        return total * (_LARGEST_LOG_LOSS + _largest(np.log(label[label > 0])) + log_scale)
    if name == "cox-nloglik":
        return _LARGEST_RISK * total
    if name in CURVE_METRICS:
        return 4.0 * max(1.0, total, total**2)
    if name in RANK_METRICS:
        return 4.0 * max(1.0, total, float(table.n_rows))
    if name in ("logloss", "error", "mlogloss", "merror"):
        return _LARGEST_LOG_LOSS * total
    if name == "rmse":
        return _HEADROOM * total * largest**2
    if name in ("mae", "quantile"):
        return _HEADROOM * total * largest
    if name == "mphe":
        return _HEADROOM * total * largest * parameters.number("huber_slope", 1.0)
    if name == "rmsle":
        return _HEADROOM * total * (1.0 + _largest_log1p(label, start)) ** 2
    if name == "mape":
        return _HEADROOM * _relative_errors(table, largest)
    if name == "poisson-nloglik":
        return _HEADROOM * total * (largest + 1.0) * (math.log1p(largest) + 16.0)
    if name == "tweedie-nloglik":
        power = float(argument)
        edge = max(min(power - 1.0, 2.0 - power), 1e-6)
        return float(_HEADROOM * total * (1.0 + largest) ** (2.0 - power) / edge)
    logs = np.log(np.abs(label[label != 0]))
    return _LARGEST_LOG_LOSS * total * (1.0 + _largest(logs))  # gamma's: ratios and logarithms


def _relative_errors(table: Table, largest: float) -> float:
    """Bound the sum of |prediction - label| / |label|; rows of label 0 make the metric infinite, and are left out."""
    label = np.abs(table.label.astype(np.float64))
    present = label > 0
    return float(np.dot(row_weights(table)[present], 1.0 + largest / label[present]))


def _largest_of(values: NDArray[np.float64]) -> float:
    return float(values.max(initial=0.0))


def _total_weight(table: Table) -> float:
    return float(len(table.label) if table.weight is None else np.sum(table.weight, dtype=np.float64))


def _largest(label: NDArray[Any]) -> float:
    return float(np.abs(label).max(initial=0.0))


def _finite(label: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return labels; of times the lower bounds, which always are numbers. Shapes: result: float64[n_rows]."""
    return (label[:, 0] if label.ndim == 2 else label).astype(np.float64)


def _largest_log1p(label: NDArray[np.float64], start: float) -> float:
    return max(float(np.abs(np.log1p(np.maximum(label, -1.0 + 1e-7))).max(initial=0.0)), math.log1p(start))


def _largest_base_score(parameters: TrainingParameters) -> float:
    given = parameters.agreed.get("base_score", 0.0)
    scores = given if isinstance(given, list) else [given]
    return max(abs(float(str(score))) for score in scores)
