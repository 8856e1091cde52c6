"""What each allowed objective and metric of XGBoost 3.2 needs, sends and bounds.

The facts were read from the objective sources of XGBoost 3.2.0 (``src/objective``) and are held by tests that
compute the gradients with the wheel. All bounds are for a row of weight 1: gradient and hessian are both
multiplied by the row's weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import expect, shown
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.labels import SHOWN_FORMS, Label, has_event, is_labelled
from nvflare_plugins.data.table import log_count
from nvflare_plugins.wire.envelope import RANK_METRICS, BaseScoreSource


class LabelRule(Enum):
    """Which label values an objective accepts; the text completes "labels must be"."""

    ANY = "finite numbers"
    UNIT = "between 0 and 1"
    BINARY = "0 or 1"
    CLASSES = "whole numbers from 0 to num_class - 1"
    POSITIVE = "greater than 0"
    NON_NEGATIVE = "0 or greater"
    ABOVE_MINUS_ONE = "greater than -1"
    TIMES = "times with events, or bounds of times"
    EVENTS = (
        "times above 0 (of a row that ends where it begins, such as half a day), each with an event or watched until "
        "then; no other censoring"
    )
    RELEVANCE = "whole numbers from 0 to 31 (other ones need ndcg_exp_gain=false)"


class Task(Enum):
    """The family of metrics that fits an objective."""

    BINARY = "binary"
    MULTICLASS = "multiclass"
    REGRESSION = "regression"
    SURVIVAL = "survival"
    RANKING = "ranking"


@dataclass(frozen=True, slots=True)
class ObjectiveFacts:
    """What the wire and the fixed-point scales must know about a job's objective.

    Units: the bounds hold for |gradient| and hessian of one row and one output at weight 1, ``scale_pos_weight``
        included; the product with the weight is rounded to float32. ``None`` means that labels and predictions
        drive the value without a limit known beforehand: the scale then needs a label range from the job, or a
        secure maximum of exponents.

    Attributes:
        name: XGBoost's name of the objective.
        task: the family of its metrics.
        gradient_bound: largest |gradient|, or None.
        hessian_bound: largest hessian, or None.
        base_score_source: how ``base_score`` is estimated in this job (a continued model estimates none).
        label_rule: the labels that are accepted.
        default_metric: the metric XGBoost would choose.
        own_parameters: parameters that this objective reads and most others do not.
        adaptive_leaf: leaves are replaced by a mean of local residual quantiles after each tree.
        base_score_range: between these a given ``base_score`` must lie.
        n_outputs: outputs per row: ``num_class`` for multiclass objectives, else 1.
        usual_hessian: what a row's hessian rarely exceeds, where the bound is far above it: ``min_child_weight``
            follows from it, and leaves' rows are counted besides.
    """

    name: str
    task: Task
    gradient_bound: float | None
    hessian_bound: float | None
    base_score_source: BaseScoreSource
    label_rule: LabelRule
    default_metric: str
    own_parameters: tuple[str, ...] = ()
    adaptive_leaf: bool = False
    base_score_range: tuple[float, float] = (-np.inf, np.inf)
    n_outputs: int = 1
    usual_hessian: float | None = None

    @property
    def label_words(self) -> str:
        """Which labels are taken, and what mends others; completes "labels must be"."""
        classes = "give label_classes, " if self.task in (Task.BINARY, Task.MULTICLASS) else ""
        return f"{self.label_rule.value}; some are not. Correct the label column, {classes}or choose another objective."

    def check_form(self, label: Label | None) -> None:
        """Refuse a label that is not of the objective's form. Args: label: None where a kind of job takes names alone.

        Raises:
            ConfigurationError: times are missing, or given to an objective that takes one label.
        """
        if self.task is Task.SURVIVAL and (label is None or isinstance(label, str)):
            raise ConfigurationError(
                f"objective {self.name} needs times in place of a label: label={SHOWN_FORMS}. Kinds of job in which "
                "label is always one column take another objective"
            )
        if self.task is not Task.SURVIVAL and not (label is None or isinstance(label, str)):
            raise ConfigurationError(
                f"objective {self.name} takes one column as label, and label names times: choose survival:aft or "
                "survival:cox, or give label a column's name"
            )

    def check_labels(self, label: NDArray[np.float32]) -> None:
        """Refuse labels that XGBoost would refuse at this site only, in the middle of the job.

        Shapes:  label: float32[n_rows].
        Privacy: any column can be a job's label, so that others read a fixed text.

        Raises:
            DataRefusal: some labels break the objective's rule.
        """
        n_bad = int(np.count_nonzero(~self.accepts(label)))
        if n_bad:
            log_count("labels that the objective does not take", n_bad, len(label))
            raise DataRefusal(f"{self.name}: labels must be {self.label_words}")

    def check_events(self, label: NDArray[np.float32]) -> None:
        """Refuse rows of ``survival:cox`` of which none has an event. Shapes: label: of ``check_labels``.

        Raises:
            DataRefusal: none has.
        """
        if self.name == COX and not has_event(label).any():
            raise DataRefusal(
                f"{COX}: no row of the training set has an event. Correct the column of events, or train without this "
                "site"
            )

    def accepts(self, label: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which labels the objective takes.

        Shapes: label: float32[n_rows], or float32[n_rows, 2] of times; result: bool[n_rows].
        """
        if label.ndim == 2 or self.task is Task.SURVIVAL:  # whose values were checked as they were read
            return is_labelled(label) & (label.ndim == 2 and self._accepts_times(label))
        match self.label_rule:
            case LabelRule.UNIT:
                fits = (label >= 0) & (label <= 1)
            case LabelRule.BINARY:
                fits = np.isin(label, (0, 1))
            case LabelRule.CLASSES | LabelRule.RELEVANCE:
                fits = np.isin(label, np.arange(32 if self.label_rule is LabelRule.RELEVANCE else self.n_outputs))
            case LabelRule.POSITIVE:
                fits = label > 0
            case LabelRule.NON_NEGATIVE:
                fits = label >= 0
            case LabelRule.ABOVE_MINUS_ONE:
                fits = label > -1
            case _:
                fits = np.ones(label.shape, dtype=bool)
        return np.isfinite(label) & fits

    def _accepts_times(self, label: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which rows the objective takes. Shapes: label: float32[n_rows, 2]; result: bool[n_rows]."""
        lower, upper = label.T
        is_right_or_none = (lower > 0) & ((lower == upper) | np.isposinf(upper))
        return np.asarray(is_right_or_none | (self.label_rule is LabelRule.TIMES))


COX = "survival:cox"
_UNIT_INTERVAL = (0.0, 1.0)
_POSITIVE = (0.0, np.inf)
_BINARY, _REGRESSION = Task.BINARY, Task.REGRESSION
_MEAN, _STUMP, _CLASSES = BaseScoreSource.MEAN, BaseScoreSource.STUMP, BaseScoreSource.CLASSES
_LOGISTIC = (_BINARY, 1.0, 0.25, _MEAN, LabelRule.UNIT)
_SOFTMAX = (Task.MULTICLASS, 1.0, 0.5, _CLASSES, LabelRule.CLASSES, "mlogloss", ("num_class",))
_ABSOLUTE = (_REGRESSION, 1.0, 1.0)
_OPEN = (_REGRESSION, None, None)  # labels and predictions drive gradients
_SPW = ("scale_pos_weight",)
_RANKING = (Task.RANKING, None, None, _STUMP, LabelRule.RELEVANCE, "ndcg@{depth}")  # sizes of queries drive gradients
_PAIRS = (
    "lambdarank_pair_method",
    "lambdarank_num_pair_per_sample",
    "lambdarank_normalization",
    "lambdarank_score_normalization",
    "ndcg_exp_gain",
)
_LIST = 32  # places of a list that XGBoost's ranking looks at where a job does not say
_TWEEDIE, _POWER = "tweedie-nloglik@{power:g}", ("tweedie_variance_power",)

_OBJECTIVES = {
    known.name: known
    for known in (
        ObjectiveFacts("binary:logistic", *_LOGISTIC, "logloss", _SPW, base_score_range=_UNIT_INTERVAL),
        ObjectiveFacts("reg:logistic", *_LOGISTIC, "rmse", _SPW, base_score_range=_UNIT_INTERVAL),
        ObjectiveFacts("binary:logitraw", *_LOGISTIC, "logloss", _SPW),
        ObjectiveFacts("binary:hinge", _BINARY, 1.0, 1.0, _STUMP, LabelRule.BINARY, "error"),
        ObjectiveFacts("multi:softprob", *_SOFTMAX),
        ObjectiveFacts("multi:softmax", *_SOFTMAX),
        ObjectiveFacts("reg:squarederror", _REGRESSION, None, 1.0, _MEAN, LabelRule.ANY, "rmse"),
        ObjectiveFacts("reg:squaredlogerror", *_OPEN, _STUMP, LabelRule.ABOVE_MINUS_ONE, "rmsle"),
        # The gradient z / sqrt(1 + z^2/s^2) stays below the slope s; the table holds the factor of s.
        ObjectiveFacts("reg:pseudohubererror", *_ABSOLUTE, _STUMP, LabelRule.ANY, "mphe", ("huber_slope",)),
        ObjectiveFacts(
            "reg:absoluteerror", *_ABSOLUTE, BaseScoreSource.MEDIAN, LabelRule.ANY, "mae", adaptive_leaf=True
        ),
        ObjectiveFacts(
            "reg:quantileerror",
            *_ABSOLUTE,
            BaseScoreSource.QUANTILE,
            LabelRule.ANY,
            "quantile",
            ("quantile_alpha",),
            adaptive_leaf=True,
        ),
        ObjectiveFacts(
            "count:poisson", *_OPEN, _MEAN, LabelRule.NON_NEGATIVE, "poisson-nloglik", base_score_range=_POSITIVE
        ),
        ObjectiveFacts("reg:gamma", *_OPEN, _MEAN, LabelRule.POSITIVE, "gamma-deviance", base_score_range=_POSITIVE),
        ObjectiveFacts(
            "reg:tweedie", *_OPEN, _MEAN, LabelRule.NON_NEGATIVE, _TWEEDIE, _POWER, base_score_range=_POSITIVE
        ),
        # src/common/survival_util.h clips both. Hessians are 1 / scale^2 and less; 15 is reached by rounding alone.
        ObjectiveFacts(
            "survival:aft",
            Task.SURVIVAL,
            15.0,
            15.0,
            BaseScoreSource.CONSTANT,
            LabelRule.TIMES,
            "aft-nloglik",
            ("aft_loss_distribution", "aft_loss_distribution_scale"),
            base_score_range=_POSITIVE,
            usual_hessian=1.0,
        ),
        # Stumps of Breslow's gradients are 0, and hazard ratios of 1 what XGBoost comes to where no events are tied.
        # Hessians are near the expected events of a row, about an exponential distribution: 3 is its 95 % quantile.
        ObjectiveFacts(
            COX,
            Task.SURVIVAL,
            None,
            None,
            BaseScoreSource.CONSTANT,
            LabelRule.EVENTS,
            "cox-nloglik",
            base_score_range=_POSITIVE,
            usual_hessian=3.0,
        ),
        ObjectiveFacts("rank:ndcg", *_RANKING, _PAIRS),
        ObjectiveFacts("rank:pairwise", *_RANKING, _PAIRS),
        ObjectiveFacts("rank:map", *_RANKING[:4], LabelRule.BINARY, "map@{depth}", _PAIRS),
    )
}
"""Each objective with parameters at their defaults."""

OBJECTIVES: tuple[str, ...] = tuple(_OBJECTIVES)
"""The objectives of the horizontal mode."""

OBJECTIVE_PARAMETERS: dict[str, tuple[str, ...]] = {
    parameter: tuple(name for name, known in _OBJECTIVES.items() if parameter in known.own_parameters)
    for parameter in (
        *("scale_pos_weight", "num_class", "huber_slope", "quantile_alpha", "tweedie_variance_power"),
        *("aft_loss_distribution", "aft_loss_distribution_scale"),
        *_PAIRS,
    )
}
"""Parameters that only some objectives read -> those objectives. XGBoost would ignore or misuse them elsewhere."""


def objective_facts(params: dict[str, object]) -> ObjectiveFacts:
    """Return the facts of a job's objective.

    Args:
        params: checked parameters under XGBoost's canonical names (see ``parameters.check_parameters``).

    Raises:
        ConfigurationError: the objective, or ``base_score`` for it, is not supported.
    """
    name = str(params["objective"])
    if name.startswith("reg:linear"):
        raise ConfigurationError(
            f"objective {shown(name)} is refused: it is XGBoost's old name; write reg:squarederror."
        )
    if name not in _OBJECTIVES:
        raise ConfigurationError(f"objective {shown(name)} is not supported; supported are: {', '.join(OBJECTIVES)}.")
    known = _OBJECTIVES[name]
    _check_base_score(known, params)
    factors = zip((known.gradient_bound, known.hessian_bound), _bound_factors(name, params), strict=True)
    gradient_bound, hessian_bound = (None if bound is None else bound * factor for bound, factor in factors)
    return dataclasses.replace(
        known,
        gradient_bound=gradient_bound,
        hessian_bound=hessian_bound,
        base_score_source=_base_score_source(known, params),
        usual_hessian=_usual_hessian(known, params),
        default_metric=known.default_metric.format(
            power=params.get("tweedie_variance_power", 1.5), depth=_depth(params)
        ),
        label_rule=_label_rule(known, params),
        n_outputs=int(params.get("num_class", 1)),  # type: ignore[call-overload]
    )


def _depth(params: Mapping[str, object]) -> object:
    is_mean = params.get("lambdarank_pair_method") == "mean"
    return _LIST if is_mean else params.get("lambdarank_num_pair_per_sample", _LIST)


def _label_rule(known: ObjectiveFacts, params: dict[str, object]) -> LabelRule:
    is_linear = known.label_rule is LabelRule.RELEVANCE and not params.get("ndcg_exp_gain", True)
    return LabelRule.NON_NEGATIVE if is_linear else known.label_rule


def _bound_factors(name: str, params: dict[str, object]) -> tuple[float, float]:
    scale_pos_weight = float(params.get("scale_pos_weight", 1.0))  # type: ignore[arg-type]
    if name == "reg:pseudohubererror":
        return float(params.get("huber_slope", 1.0)), 1.0  # type: ignore[arg-type]
    if name == "reg:quantileerror":
        alpha = float(params["quantile_alpha"])  # type: ignore[arg-type]
        return max(alpha, 1.0 - alpha), 1.0
    # Rows with label 1 have their weight multiplied; the others keep it.
    return max(1.0, scale_pos_weight), max(1.0, scale_pos_weight)


def _usual_hessian(known: ObjectiveFacts, params: dict[str, object]) -> float | None:
    if known.usual_hessian is None or known.hessian_bound is None:
        return known.usual_hessian
    scale = float(params.get("aft_loss_distribution_scale", 1.0))  # type: ignore[arg-type]
    of_noise = _HESSIANS_OF_NOISE.get(str(params.get("aft_loss_distribution")), known.usual_hessian)
    return min(of_noise / max(scale, 1e-9) ** 2, known.hessian_bound)


_HESSIANS_OF_NOISE = {"logistic": 0.5, "extreme": 3.0}
"""Of survival:aft at scale 1: the largest of an event, but for late ones under extreme noise, of which none is it."""


def _base_score_source(known: ObjectiveFacts, params: dict[str, object]) -> BaseScoreSource:
    if "base_score" in params:
        return BaseScoreSource.GIVEN
    # regression_obj.cu, RegLossObj::InitEstimation: a Newton step replaces the mean beyond kRtEps = 1e-6.
    scale_pos_weight = np.float32(params.get("scale_pos_weight", 1.0))  # type: ignore[arg-type]  # checked before
    if known.base_score_source is BaseScoreSource.MEAN and abs(scale_pos_weight - np.float32(1)) > np.float32(1e-6):
        return BaseScoreSource.STUMP
    return known.base_score_source


def _check_base_score(known: ObjectiveFacts, params: dict[str, object]) -> None:
    if "base_score" not in params:
        return
    low, high = known.base_score_range
    given = params["base_score"]
    scores = [float(score) for score in (given if isinstance(given, list) else [given])]  # type: ignore[arg-type]
    if len(scores) not in (1, int(params.get("num_class", 1))):  # type: ignore[call-overload]
        raise ConfigurationError(f"base_score: {known.name} takes one number, or one per class.")
    # XGBoost holds it as float32: a value that rounds onto a limit would become an infinite margin.
    with np.errstate(over="ignore"):  # infinite is out of bounds
        within = all(low < np.float32(score) < high for score in scores)
    expect(f"base_score: {known.name} needs a value above {low:g} and below {high:g}.", within)


def gradients(params: Mapping[str, object], margins: NDArray[np.float64], label: NDArray[np.float64]) -> NDArray[Any]:
    """Return the gradients of rows of weight 1; see ``scale_pos_weight`` for those with label 1.

    Shapes:  margins: float64[n_rows, n_outputs]; label: float64[n_rows]; result: float64[n_rows, n_outputs].
    Args:    params: as of ``objective_facts``; objectives whose hessian is a constant have none here.
    """
    name, y = str(params["objective"]), label[:, None]
    if name in ("multi:softprob", "multi:softmax"):
        shares = np.exp(margins - margins.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True) - (y == np.arange(margins.shape[1])))
    if name == "reg:squaredlogerror":
        predicted = np.maximum(margins, 1e-6 - 1)
        return np.asarray((np.log1p(predicted) - np.log1p(y)) / (predicted + 1))
    if name == "reg:pseudohubererror":
        residual, slope = margins - y, float(params.get("huber_slope", 1.0))  # type: ignore[arg-type]
        return np.asarray(residual / np.sqrt(1 + np.square(residual / slope)))
    rho = float(params.get("tweedie_variance_power", 1.5))  # type: ignore[arg-type]
    of_name: dict[str, Callable[[], NDArray[Any]]] = {
        "count:poisson": lambda: np.exp(margins) - y,
        "reg:gamma": lambda: 1 - y * np.exp(-margins),
        "reg:tweedie": lambda: np.exp((2 - rho) * margins) - y * np.exp((1 - rho) * margins),
        **dict.fromkeys(
            ("binary:logistic", "reg:logistic", "binary:logitraw"),
            lambda: 0.5 * (1 + np.tanh(margins / 2)) - y,
        ),
    }
    return of_name[name]()


_METRICS: dict[Task, tuple[str, ...]] = {
    Task.BINARY: ("auc", "aucpr", "logloss", "error", "rmse", "mae"),
    Task.MULTICLASS: ("mlogloss", "merror", "auc", "aucpr"),
    Task.REGRESSION: (
        "rmse",
        "mae",
        "rmsle",
        "mape",
        "mphe",
        "quantile",
        "poisson-nloglik",
        "gamma-nloglik",
        "gamma-deviance",
        "tweedie-nloglik",
    ),
    Task.SURVIVAL: ("aft-nloglik", "cox-nloglik"),
    Task.RANKING: RANK_METRICS,
}
_METRIC_ARGUMENTS: dict[str, tuple[float, float, bool]] = {
    # name -> (low, high, argument required); both limits as XGBoost accepts them: error in (0, 1), rho in [1, 2).
    "error": (0.0, 1.0, False),
    "tweedie-nloglik": (1.0, 2.0, True),
    **dict.fromkeys(RANK_METRICS, (1.0, 2.0**31, False)),
}
_OBJECTIVE_OF_METRIC = {
    "quantile": "reg:quantileerror",
    "mphe": "reg:pseudohubererror",
    "cox-nloglik": COX,
    **dict.fromkeys(("aft-nloglik", "interval-regression-accuracy"), "survival:aft"),
}


def is_ranking(params: Mapping[str, object]) -> bool:
    """Tell whether a job's parameters name an objective that ranks rows."""
    return str(params.get("objective", "")).startswith("rank:")


def check_query(params: Mapping[str, object], query: str | None) -> None:
    """Refuse a ranking without a column of queries, and such a column without a ranking. Raises: ConfigurationError."""
    expect(
        f"{params.get('objective')} needs query: the column that says which rows are ranked together",
        query is not None or not is_ranking(params),
    )
    expect(
        "query is read only by objectives rank:ndcg, rank:pairwise and rank:map; leave it out",
        query is None or is_ranking(params),
    )


def refuse_ranking(params: Mapping[str, object], where: str, remedy: str) -> None:
    """Refuse objectives that rank rows where a kind of job has none. Raises: ConfigurationError."""
    expect(f"{params.get('objective')} is refused in {where}: {remedy}", not is_ranking(params))


def check_relevance(metrics: Sequence[str], label: NDArray[np.float32]) -> None:
    """Refuse labels that precision does not take. Shapes: label: float32[n_rows].

    Raises:
        DataRefusal: a metric knows relevant rows and others alone, and there are other labels.
    """
    names = [metric for metric in metrics if metric.partition("@")[0] in ("map", "pre")]
    if names and not np.isin(label, (0, 1)).all():
        raise DataRefusal(f"{names[0]}: labels must be 0 or 1; some are not. Choose ndcg, or correct the label column.")


def check_metric(metric: object, facts: ObjectiveFacts) -> str:
    """Return a metric's name if it fits the objective and its messages are known.

    Raises:
        ConfigurationError: unknown or refused metric, or one that does not fit the objective.
    """
    if not isinstance(metric, str):
        raise ConfigurationError("eval_metric: every metric is a name (text).")
    name, at, argument = metric.partition("@")
    fitting = _METRICS[facts.task]
    if name not in fitting:
        raise ConfigurationError(
            f"eval_metric {shown(metric)} is not supported with {facts.name}; supported are: {', '.join(fitting)}."
        )
    needed = _OBJECTIVE_OF_METRIC.get(name, facts.name)
    allowed_only = f"eval_metric {shown(name)} is of {needed} and is allowed only with it."
    expect(allowed_only, facts.name == needed)
    low, high, required = _METRIC_ARGUMENTS.get(name, (0.0, 0.0, False))
    is_complete = bool(at) or not required
    expect(f"eval_metric {shown(name)} needs its argument: write {name}@1.5, for example.", is_complete)
    if at:
        is_read = name in _METRIC_ARGUMENTS
        expect(f"eval_metric {shown(metric)}: {name} takes no argument after '@'.", is_read)
        try:
            value = float(argument)
        except ValueError:
            value = np.nan
        is_inside = low <= value < high and (facts.task is not Task.RANKING or argument.isdecimal())
        expect(f"eval_metric {shown(metric)}: the number after '@' must be in [{low:g}, {high:g}).", is_inside)
    return metric
