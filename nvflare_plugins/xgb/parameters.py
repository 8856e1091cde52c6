"""The strict check of XGBoost parameters, and constraints of columns and rows among them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import check_plain, expect, shown
from nvflare_plugins.base.errors import PolicyRefusal
from nvflare_plugins.data.labels import Label
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.objectives import COX, OBJECTIVE_PARAMETERS, ObjectiveFacts, check_metric, objective_facts

# Monotone and interaction constraints in one form: by position in the agreed column order.
#
# XGBoost takes them by name or by position, as text or as lists, and does not check positions that do not exist. All
# sites must hold the same constraints, so they are normalised before they are compared.


def check_monotone_constraints(given: object, feature_names: Sequence[str]) -> str:
    """Return monotone constraints as XGBoost's text form, one of -1, 0, 1 for every column.

    Args:
        given: ``{"age": 1}``, ``[1, 0, -1]`` or ``"(1,0,-1)"``.
        feature_names: the agreed columns, in order.

    Raises:
        ConfigurationError: an unknown column, a wrong number of entries, or an entry other than -1, 0, 1.
    """
    name = "monotone_constraints"
    if isinstance(given, str):
        given = _parse(name, "[" + given.strip().strip("()") + "]")
    if isinstance(given, Mapping):
        directions = [0] * len(feature_names)
        for column, direction in given.items():
            directions[_position(name, column, feature_names)] = direction
    elif isinstance(given, (list, tuple)):
        directions = list(given)
    else:
        raise ConfigurationError(f"{name}: give a mapping from column to direction, or one direction per column.")
    n_given, n_columns = len(directions), len(feature_names)
    expect(f"{name}: {n_given} directions for {n_columns} columns.", n_given == n_columns)
    valid = all(not isinstance(direction, bool) and direction in (-1, 0, 1) for direction in directions)
    expect(f"{name}: every direction is -1, 0 or 1.", valid)
    return "(" + ",".join(str(int(direction)) for direction in directions) + ")"


def check_interaction_constraints(given: object, feature_names: Sequence[str]) -> str:
    """Return interaction constraints as XGBoost's text form: a JSON list of lists of positions.

    Args:
        given: ``[["age", "sex"], ["bmi"]]``, ``[[0, 1], [2]]`` or the same as JSON text.
        feature_names: the agreed columns, in order.

    Raises:
        ConfigurationError: not a list of non-empty lists, or an unknown column.
    """
    name = "interaction_constraints"
    if isinstance(given, str):
        given = _parse(name, given)
    if not isinstance(given, (list, tuple)) or not all(isinstance(group, (list, tuple)) and group for group in given):
        raise ConfigurationError(f"{name}: give a list of non-empty groups of columns.")
    groups = [sorted({_position(name, column, feature_names) for column in group}) for group in given]
    return json.dumps(groups, separators=(",", ":"))


_CONSTRAINTS = {
    "monotone_constraints": check_monotone_constraints,
    "interaction_constraints": check_interaction_constraints,
}
"""Parameters that name columns -> their checks."""


def _parse(name: str, text: str) -> object:
    try:
        value = json.loads(text)
        check_plain(name, value)
        return value
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{name}: the text is not a list of numbers or names.") from None


def _position(name: str, column: object, feature_names: Sequence[str]) -> int:
    if isinstance(column, str) and column in feature_names:
        return feature_names.index(column)
    if isinstance(column, int) and not isinstance(column, bool) and 0 <= column < len(feature_names):
        return column
    raise ConfigurationError(
        f"{name}: there is no column {shown(column)} among the {len(feature_names)} agreed columns."
    )


# The strict check of XGBoost parameters for the horizontal mode.
#
# XGBoost only warns about a parameter that it does not know, reads some parameters for one objective and ignores them
# for another, and fills in values of its own (``count:poisson`` sets ``max_delta_step`` to 0.7). All sites must train
# with the same effective parameters, and a parameter may change which messages XGBoost sends. So only the parameters of
# this file are accepted, with XGBoost's own types and ranges, and what XGBoost makes of them is read back from a probe
# Booster before anything is sent.


_Check = Callable[[str, object], object]

ALIASES: dict[str, str] = {
    "eta": "learning_rate",
    "gamma": "min_split_loss",
    "lambda": "reg_lambda",
    "alpha": "reg_alpha",
    "n_jobs": "nthread",
    "random_state": "seed",
}
"""XGBoost's second names -> the name used in the agreed document."""


def _real(low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False) -> _Check:
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigurationError(f"{name}: a finite number is needed.")
        is_inside = low <= value <= high and not (open_low and value == low) and not (open_high and value == high)
        expect(f"{name}={value:g} is outside {interval}.", is_inside)
        return float(value)

    return check


def _integer(low: int, high: int) -> _Check:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigurationError(f"{name}: a whole number is needed.")
        expect(f"{name}={value} is outside [{low}, {high}].", low <= value <= high)
        return value

    return check


def _flag(name: str, value: object) -> bool:
    expect(f"{name}: true or false is needed.", value in (0, 1) and not isinstance(value, float))
    return bool(value)


def _choice(*allowed: str, remedy: str = "") -> _Check:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            hint = f" ({remedy})" if remedy else ""
            raise ConfigurationError(f"{name} must be {' or '.join(allowed)}{hint}; got {shown(value)}.")
        return value

    return check


def _base_score(name: str, value: object) -> object:
    number = _real(-math.inf)
    return [number(name, item) for item in value] if isinstance(value, (list, tuple)) else number(name, value)


def _quantile_alpha(name: str, value: object) -> float:
    if isinstance(value, (list, tuple)):
        expect(f"{name}: one quantile per job is supported; train one job for each quantile.", len(value) == 1)
        value = value[0]
    return _real(0.0, 1.0, open_low=True, open_high=True)(name, value)  # type: ignore[return-value]


def _objective(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{name}: a name (text) is needed; custom objective functions are not supported.")
    return value


_INT31 = 2**31 - 1
_ONLY_HIST = "approx sends a new sketch of raw values every round, exact cannot be distributed"

_ALLOWED: dict[str, _Check] = {
    "objective": _objective,
    "booster": _choice("gbtree", "dart", remedy="gblinear sends no gradients: every site would train its own model"),
    "tree_method": _choice("hist", "auto", remedy=_ONLY_HIST),
    "device": _choice("cpu", remedy="on a GPU XGBoost sends other messages, which are not in the catalogue"),
    "process_type": _choice("default", remedy="update labels its sums as maxima and would train a wrong model"),
    "sampling_method": _choice("uniform", remedy="gradient_based sampling is not proved on distributed rows"),
    "grow_policy": _choice("depthwise", "lossguide"),
    "multi_strategy": _choice("one_output_per_tree", "multi_output_tree"),
    "sample_type": _choice("uniform", "weighted"),
    "normalize_type": _choice("tree", "forest"),
    "learning_rate": _real(0.0, open_low=True),
    "min_split_loss": _real(0.0),
    "min_child_weight": _real(0.0),
    "reg_lambda": _real(0.0),
    "reg_alpha": _real(0.0),
    "max_delta_step": _real(0.0),
    "max_depth": _integer(0, 30),
    "max_leaves": _integer(0, 2**24),
    "max_bin": _integer(2, 65_536),
    "max_cat_to_onehot": _integer(1, _INT31),
    "max_cat_threshold": _integer(1, _INT31),
    "num_parallel_tree": _integer(1, 10_000),
    "subsample": _real(0.0, 1.0, open_low=True),
    "colsample_bytree": _real(0.0, 1.0, open_low=True),
    "colsample_bylevel": _real(0.0, 1.0, open_low=True),
    "colsample_bynode": _real(0.0, 1.0, open_low=True),
    "rate_drop": _real(0.0, 1.0),
    "skip_drop": _real(0.0, 1.0),
    "one_drop": _flag,
    "base_score": _base_score,
    "scale_pos_weight": _real(0.0, open_low=True),
    "num_class": _integer(2, 10_000),
    "huber_slope": _real(0.0, open_low=True),
    "quantile_alpha": _quantile_alpha,
    "tweedie_variance_power": _real(1.0, 2.0, open_high=True),
    "aft_loss_distribution": _choice("normal", "logistic", "extreme"),
    "aft_loss_distribution_scale": _real(0.0, open_low=True),
    "lambdarank_pair_method": _choice("topk", "mean"),
    "lambdarank_num_pair_per_sample": _integer(1, 100_000),
    "lambdarank_normalization": _flag,
    "lambdarank_score_normalization": _flag,
    "ndcg_exp_gain": _flag,
    "seed": _integer(0, _INT31),
    "seed_per_iteration": _flag,
    "nthread": _integer(0, 4096),
    "verbosity": _integer(0, 3),
    "validate_parameters": _flag,
    "disable_default_eval_metric": _flag,
}
_LOCAL = ("nthread", "verbosity")
_DART_ONLY = ("rate_drop", "skip_drop", "one_drop", "sample_type", "normalize_type")

_REFUSED: dict[str, str] = {
    "updater": "the updaters follow from tree_method=hist; leave it out",
    "updater_seq": "the updaters follow from tree_method=hist; leave it out",
    "refresh_leaf": "it belongs to process_type=update, which labels its sums as maxima; leave it out",
    "debug_synchronize": "it broadcasts whole trees in clear; model hashes are compared at the end anyway",
    "max_cached_hist_node": "it changes which histograms are sent; leave it out",
    "sparse_threshold": "it is not proved on distributed rows; leave it out",
    "feature_weights": "weighted column sampling is not proved on distributed rows; use colsample_* alone",
    "base_margin": "a margin per row is not supported; use base_score, or continue from a model",
    "enable_categorical": "it follows from the job's public category lists; give those instead",
    "feature_types": "they follow from the job's public category lists; give those instead",
    "missing": "missing values are set by the site's data set; leave it out",
    "gpu_id": "training runs on the CPU; leave it out",
    "predictor": "prediction runs on the CPU; leave it out",
    "silent": "write verbosity instead",
    "n_estimators": "the number of rounds is a field of the job",
    "num_boost_round": "the number of rounds is a field of the job",
    "early_stopping_rounds": "early stopping is a field of the job",
    "lambdarank_unbiased": "the bias of places needs sums over the queries of all sites after every tree; leave it out",
    "lambdarank_bias_norm": "it belongs to lambdarank_unbiased, which is refused; leave it out",
    "feature_selector": "gblinear is not supported",
    "num_feature": "it follows from the agreed schema",
    "num_target": "it follows from the objective",
    "boost_from_average": "give base_score instead",
}


@dataclass(frozen=True, slots=True)
class TrainingParameters:
    """Checked XGBoost parameters of one job.

    Attributes:
        agreed: what every site must have equal, under XGBoost's canonical names; JSON values only.
        metrics: metrics to evaluate, in order; empty means none.
        objective: facts for the scales and the catalogue.
        effective: what XGBoost itself makes of the parameters (tree, booster and objective settings as text).
        requested_threads: the job's ``nthread``, or 0 for "as many as the site allows".
        verbosity: XGBoost's log level at this site.
    """

    agreed: dict[str, object]
    metrics: tuple[str, ...]
    objective: ObjectiveFacts
    effective: dict[str, str]
    requested_threads: int
    verbosity: int

    @property
    def max_bin(self) -> int:
        return int(str(self.agreed["max_bin"]))

    def number(self, name: str, default: float) -> float:
        """Return an agreed parameter that is one number, or its default."""
        return float(str(self.agreed.get(name, default)))

    def document(self) -> dict[str, object]:
        """Return the JSON-able document that all sites compare before training (local settings left out)."""
        return {"agreed": self.agreed, "metrics": list(self.metrics), "effective": self.effective}

    def for_booster(self, cores: int | None = None) -> dict[str, object]:
        """Return the parameters for ``xgb.train`` at this site.

        Args:
            cores: cores that this process may use; None asks the operating system.
        """
        return {
            **self.agreed,
            "eval_metric": list(self.metrics),
            # XGBoost then evaluates exactly the agreed metrics: an unexpected one would send unexpected sums.
            "disable_default_eval_metric": True,
            "validate_parameters": True,
            "nthread": local_threads(self.requested_threads, cores),
            "verbosity": self.verbosity,
        }


def local_threads(requested: int, cores: int | None = None) -> int:
    """Return how many threads XGBoost may use at this site: at most all cores but one, at least one.

    The core left over serves the mediator's gRPC threads: with all cores taken, OpenMP's spinning made a round 2 to
    10 times slower.
    """
    available = len(os.sched_getaffinity(0)) if cores is None else cores
    limit = max(1, available - 1)
    return min(requested, limit) if requested else limit


def check_parameters(
    params: Mapping[str, object],
    feature_names: Sequence[str],
    metrics: Sequence[str] | None = None,
    *,
    label: Label | None = None,
) -> TrainingParameters:
    """Check a job's XGBoost parameters and return them normalised.

    Call it outside a communicator: the probe Booster would otherwise send messages.

    Args:
        params: parameters as for ``xgb.train``; ``eval_metric`` may be among them.
        feature_names: the agreed columns, in order; constraints may name them.
        metrics: the metrics, if the job holds them apart; None takes ``eval_metric``, else the objective's default;
            an empty list evaluates nothing.
        label: the job's, where its kind takes survival objectives.

    Raises:
        ConfigurationError: a parameter is unknown, refused, out of range, or does not fit the objective; the
            message names it and the remedy.
    """
    expect("params must be a dictionary of XGBoost parameters", isinstance(params, Mapping))
    check_plain("params", dict(params))
    given = _canonical_names(params)
    eval_metric = given.pop("eval_metric", None)
    constraints = {name: given.pop(name) for name in _CONSTRAINTS if name in given}
    checked = {name: _check_one(name, value) for name, value in given.items()}
    is_checked = checked.get("validate_parameters") is not False
    expect("validate_parameters must stay on: unknown parameters are refused here.", is_checked)
    verbosity = int(checked.pop("verbosity", 1))  # type: ignore[call-overload]
    threads = int(checked.pop("nthread", 0))  # type: ignore[call-overload]
    for forced in ("validate_parameters", "disable_default_eval_metric", "process_type", "sampling_method"):
        checked.pop(forced, None)
    defaults = {"objective": "reg:squarederror", "booster": "gbtree", "max_bin": 256, "seed": 0}
    checked = {**defaults, **checked, "tree_method": "hist", "device": "cpu"}
    _check_combinations(checked, constraints)
    checked |= {name: _CONSTRAINTS[name](value, feature_names) for name, value in constraints.items()}
    facts = objective_facts(checked)
    facts.check_form(label)
    chosen = _check_metrics(eval_metric, metrics, facts)
    effective = effective_parameters({**checked, "eval_metric": list(chosen)}, len(feature_names))
    return TrainingParameters(checked, chosen, facts, effective, threads, verbosity)


def _canonical_names(params: Mapping[str, object]) -> dict[str, object]:
    """Replace aliases; None means "not given", as in XGBoost's own wrappers."""
    canonical: dict[str, object] = {}
    for name, value in params.items():
        expect("parameter names are text.", isinstance(name, str))
        target = ALIASES.get(name, name)
        if value is not None:
            is_new = target not in canonical
            expect(f"parameter {shown(target)} is given twice (under two names); give it once.", is_new)
            canonical[target] = value
    return canonical


def _check_one(name: str, value: object) -> object:
    if name in _ALLOWED:
        return _ALLOWED[name](name, value)
    if name in _REFUSED:
        raise ConfigurationError(f"parameter {name!r} is refused: {_REFUSED[name]}.")
    known = [*_ALLOWED, *ALIASES, *_CONSTRAINTS, "eval_metric"]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"parameter {shown(name)} is not supported.{hint}")


def _check_combinations(params: dict[str, object], constraints: Mapping[str, object]) -> None:
    objective = str(params["objective"])
    for name, fitting in OBJECTIVE_PARAMETERS.items():
        if name in params and objective not in fitting:
            raise ConfigurationError(f"{name} is read only by {', '.join(fitting)}, not by {objective}; leave it out.")
    for name, remedy in (("num_class", "the number of label classes"), ("quantile_alpha", "the quantile to fit")):
        if objective in OBJECTIVE_PARAMETERS[name] and name not in params:
            raise ConfigurationError(f"{objective} needs {name}: {remedy}.")
    is_dart = params["booster"] == "dart"
    for name in _DART_ONLY:
        is_read = is_dart or name not in params
        expect(f"{name} is read only by booster=dart; set it, or leave {name} out.", is_read)
    is_grown = objective != COX or not is_dart
    expect(f"{COX} takes booster=gbtree: XGBoost has other gradients of tied events; leave booster out.", is_grown)
    has_limit = params.get("max_depth") != 0 or bool(params.get("max_leaves"))
    expect("max_depth=0 means no limit and then needs max_leaves above 0.", has_limit)
    if params.get("multi_strategy") == "multi_output_tree":
        is_multi = objective in OBJECTIVE_PARAMETERS["num_class"]
        expect("multi_strategy=multi_output_tree needs a multi: objective.", is_multi)
        expect("XGBoost has neither dart nor constraints with multi_output_tree.", not is_dart and not constraints)


def _check_metrics(eval_metric: object, given: Sequence[str] | None, facts: ObjectiveFacts) -> tuple[str, ...]:
    is_once = eval_metric is None or given is None
    expect("metrics are given twice: as eval_metric and as a field of the job; give them once.", is_once)
    requested = eval_metric if given is None else given
    if requested is None:
        return (facts.default_metric,)
    listed = requested if isinstance(requested, (list, tuple)) else [requested]
    metrics = tuple(check_metric(metric, facts) for metric in listed)
    expect("eval_metric: a metric is given twice.", len(set(metrics)) == len(metrics))
    return metrics


_UNUSED = re.compile(r"Parameters:\s*\{(?P<names>[^}]*)\}\s*are not used")


def effective_parameters(params: Mapping[str, object], n_features: int) -> dict[str, str]:
    """Ask XGBoost what it makes of the parameters, and refuse what it would only warn about.

    Args:
        params: parameters under canonical names, ``eval_metric`` included.
        n_features: number of columns, so that the probe needs no data.

    Raises:
        ConfigurationError: XGBoost rejects a parameter, does not use one, or changes one.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            probe = xgb.Booster({**params, "num_feature": n_features, "validate_parameters": True, "nthread": 1})
            config = json.loads(probe.save_config())["learner"]
        except (xgb.core.XGBoostError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(f"XGBoost {xgb.__version__} refuses the parameters: {reason}") from None
    for warning in caught:
        if unused := _UNUSED.search(str(warning.message)):
            raise ConfigurationError(f"XGBoost does not use the parameters {unused['names'].strip()}; leave them out.")
    effective = _leaves(config)
    for name, value in params.items():
        if name == "booster":
            continue  # XGBoost 3.3 takes dart as gbtree with dropout; which of the two decides is in its parameters
        if name in effective and not _same_value(value, effective[name]):
            raise ConfigurationError(f"XGBoost changes {name}={shown(value)} to {effective[name]!r}; give that value.")
    return effective


_REPORTED = ("tree_train_param", "hist_train_param", "dart_train_param", "gbtree_model_param", "learner_train_param")


def _leaves(config: object) -> dict[str, str]:
    """Collect the settings that decide training, by canonical name."""
    found: dict[str, str] = {}
    if isinstance(config, list):
        for item in config:
            found |= _leaves(item)
    elif isinstance(config, dict):
        for key, value in config.items():
            if key in _REPORTED or (key.endswith("_param") and key.split("_")[0] in _OBJECTIVE_SECTIONS):
                found |= {name: str(text) for name, text in value.items() if name not in ALIASES}
            elif isinstance(value, (dict, list)):
                found |= _leaves(value)
    return dict(sorted(found.items()))


_OBJECTIVE_SECTIONS = ("reg", "poisson", "tweedie", "quantile", "pseudo", "softmax", "aft")


def _same_value(given: object, effective: str) -> bool:
    if isinstance(given, bool):
        return effective == str(int(given))
    if isinstance(given, (int, float)):
        try:
            # XGBoost holds these settings as float32; quantile_alpha is shown as a list of one.
            return math.isclose(float(effective.strip("[]")), given, rel_tol=1e-6, abs_tol=1e-37)
        except ValueError:
            return False
    return isinstance(given, list) or str(given) == effective


def without_columns(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters without those that name columns, for checks before the columns are known."""
    return {key: value for key, value in params.items() if ALIASES.get(key, key) not in _CONSTRAINTS}


# The least number of rows in every node of a tree, kept by min_child_weight where hessians are bounded.


_DEFAULT_CHILD_WEIGHT = 1.0  # XGBoost's

_log = logging.getLogger(__name__)


def obeys_child_weight(parameters: TrainingParameters) -> bool:
    """Tell whether min_child_weight keeps nodes large: hessians have a close bound, and XGBoost looks at it."""
    return _floor_hessian(parameters) is not None and parameters.objective.usual_hessian is None


def _floor_hessian(parameters: TrainingParameters) -> float | None:
    """Return the hessian of a row from which a floor by min_child_weight follows; None where it has none."""
    is_vector = parameters.agreed.get("multi_strategy") == "multi_output_tree"
    facts = parameters.objective
    return None if is_vector else facts.usual_hessian or facts.hessian_bound


def child_weight(parameters: TrainingParameters) -> float:
    """Return the min_child_weight in effect."""
    return parameters.number("min_child_weight", _DEFAULT_CHILD_WEIGHT)


def with_floor(parameters: TrainingParameters, rows_per_node: int, largest: float = 1.0) -> TrainingParameters:
    """Return the parameters with a min_child_weight under which no node holds fewer rows.

    A row's hessian is at most the objective's bound times its weight, so a node whose hessians add up to k times the
    largest such product holds at least k rows. Where the bound is far above usual hessians (``usual_hessian``) these
    stand in its place, and leaves are counted (pooled/row_floors.py).

    Args:
        rows_per_node: k; 0 for no floor.
        largest: no weight exceeds it.

    Raises:
        PolicyRefusal: the job gives a smaller number itself.
    """
    hessian = _floor_hessian(parameters)
    if rows_per_node == 0 or hessian is None:
        return parameters
    needed = rows_per_node * hessian * largest
    is_given = "min_child_weight" in parameters.agreed
    if is_given and obeys_child_weight(parameters) and child_weight(parameters) < needed:
        raise PolicyRefusal(
            f"min_child_weight={child_weight(parameters):g} does not keep nodes from holding fewer than "
            f"{rows_per_node} rows. Policy key: min_rows_per_node. Remedy: give at least {needed:.9g}, leave it out, "
            "or ask the sites to lower the key."
        )
    if is_given or needed <= _DEFAULT_CHILD_WEIGHT:
        return parameters
    _log.info("min_child_weight is %g, so that every node holds at least %d rows", needed, rows_per_node)
    return dataclasses.replace(
        parameters,
        agreed={**parameters.agreed, "min_child_weight": needed},
        effective={**parameters.effective, "min_child_weight": f"{needed:.9g}"},
    )
