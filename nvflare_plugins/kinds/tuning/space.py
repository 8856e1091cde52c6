"""The search space of a tuning job: a list of parameter sets, or ranges from which all sites draw the same sets.

The draw is declared, so that any program can repeat it: the number u of trial t (from 0) and parameter p is the first
53 bits of SHA-256("veilboost/tuning/SEED/t/p"), divided by 2^53. A list of n values gives the one at floor(u n); a
range low + u (high - low), or low (high / low)^u on a logarithmic scale, to six significant digits; whole numbers are
floor(low + u (high - low + 1)), on a logarithmic scale the nearest whole number. A draw that repeats an earlier trial
is passed over, and the next t takes its place. Nothing here is secret: the seed stands in the job.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import expect, is_number, shown
from nvflare_plugins.xgb.parameters import ALIASES

MOST_TRIALS = 1000
_DRAWS_PER_TRIAL = 100
_DIGITS = 6

TUNABLE = (
    "learning_rate",
    "min_split_loss",
    "max_depth",
    "max_leaves",
    "min_child_weight",
    "reg_lambda",
    "reg_alpha",
    "max_delta_step",
    "subsample",
    "colsample_bytree",
    "colsample_bylevel",
    "colsample_bynode",
    "grow_policy",
    "rate_drop",
    "skip_drop",
)
"""Parameters that trials may differ in, under XGBoost's canonical names; their aliases will do too."""

_FIXED = {
    "max_bin": "all trials share one cut search and its bins",
    "objective": "scores of different objectives cannot be compared",
    "eval_metric": "scores of different metrics cannot be compared",
    "seed": "the best of several seeds is the luckiest, not the best parameters",
    "scale_pos_weight": "it changes what rows weigh, and with it how many rows a fold needs",
    "base_score": "it moves every score alike",
    "num_class": "it follows from the labels",
}

Trial = dict[str, Any]


def checked_trials(
    params: Mapping[str, Any],
    trials: Sequence[Trial] | None,
    search: Mapping[str, Any] | None,
    n_trials: int | None,
    seed: int,
) -> tuple[Trial, ...]:
    """Return the parameter sets of a job in order, from its fields of these names. Raises: ConfigurationError."""
    expect("give either trials or search", (trials is None) != (search is None))
    if trials is not None:
        expect("n_trials is for search: trials are as many as they are listed", n_trials is None)
    expect("search needs n_trials, how many parameter sets to draw", trials is not None or n_trials is not None)
    found = listed(trials) if trials is not None else drawn(search or {}, int(n_trials or 0), seed)
    check_together(params, found)
    return found


def listed(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Check a list of parameter sets.

    Raises:
        ConfigurationError: one is empty, repeats another, or names a parameter that trials may not differ in.
    """
    seen: dict[str, int] = {}
    for number, trial in enumerate(trials, start=1):
        where = f"trials, entry {number}"
        expect(f"{where} must be an object of parameters, at least one", isinstance(trial, dict) and bool(trial))
        for name in trial:
            _check_name(where, name)
        first = seen.setdefault(_canonical(trial), number)
        if first != number:
            raise ConfigurationError(f"trials, entries {first} and {number} are the same parameters: leave one out")
    return tuple(dict(trial) for trial in trials)


def drawn(search: Mapping[str, Any], n_trials: int, seed: int) -> tuple[Trial, ...]:
    """Draw parameter sets, no two alike, as the module says.

    Raises:
        ConfigurationError: a range is none, or the space holds fewer different sets.
    """
    for name, choice in search.items():
        _check_name("search", name)
        _check_choice(name, choice)
    found: dict[str, Trial] = {}
    for t in range(_DRAWS_PER_TRIAL * n_trials):
        trial = {name: _value(choice, _uniform(seed, t, name)) for name, choice in sorted(search.items())}
        found.setdefault(_canonical(trial), trial)
        if len(found) == n_trials:
            return tuple(found.values())
    raise ConfigurationError(
        f"search holds fewer than n_trials={n_trials} different parameter sets (found {len(found)}): widen it, or "
        "lower n_trials"
    )


def check_together(params: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Refuse a parameter that both the params and a trial give, under whatever names. Raises: ConfigurationError."""
    fixed = {ALIASES.get(name, name) for name in params}
    for trial in trials:
        for name in trial:
            if ALIASES.get(name, name) in fixed:
                raise ConfigurationError(f"parameter {shown(name)} is in params and in a trial: give it in one of them")


def _canonical(trial: Trial) -> str:
    values = {ALIASES.get(name, name): value for name, value in trial.items()}
    return json.dumps({n: float(v) if is_number(v) else v for n, v in values.items()}, sort_keys=True)


def _check_name(where: str, name: str) -> None:
    canonical = ALIASES.get(name, name)
    if canonical not in TUNABLE:
        why = _FIXED.get(canonical, f"trials may differ in {', '.join(TUNABLE)}")
        raise ConfigurationError(
            f"{where}: {shown(name)} cannot be tuned: {why}. Give it in params, once for all trials"
        )


def _check_choice(name: str, choice: Any) -> None:
    where = f"search.{name}"
    if isinstance(choice, list):
        expect(f"{where} must hold at least one value", bool(choice))
        expect(f"{where} must hold numbers or texts", all(is_number(v) or isinstance(v, str) for v in choice))
        return
    expect(
        f'{where} must be a list of values, or an object {{"low": ..., "high": ..., "log": true, "whole": true}}',
        isinstance(choice, dict) and {"low", "high"} <= set(choice) <= {"low", "high", "log", "whole"},
    )
    low, high = choice["low"], choice["high"]
    expect(f"{where}: low and high must be finite numbers, low below high", _is_range(low, high))
    for flag in ("log", "whole"):
        expect(f"{where}: {flag} must be true or false", isinstance(choice.get(flag, False), bool))
    if choice.get("log"):
        expect(f"{where}: low must be above 0 on a logarithmic scale", low > 0)
    if choice.get("whole"):
        expect(f"{where}: low and high must be whole numbers", isinstance(low, int) and isinstance(high, int))


def _is_range(low: Any, high: Any) -> bool:
    return is_number(low) and is_number(high) and math.isfinite(low) and math.isfinite(high) and low < high


def _uniform(seed: int, t: int, name: str) -> float:
    digest = hashlib.sha256(f"veilboost/tuning/{seed}/{t}/{name}".encode()).digest()
    return float((int.from_bytes(digest[:8], "big") >> 11) / 2**53)


def _value(choice: Any, u: float) -> Any:
    if isinstance(choice, list):
        return choice[int(u * len(choice))]
    low, high = choice["low"], choice["high"]
    if choice.get("whole") and not choice.get("log"):
        return low + int(u * (high - low + 1))
    value = low + u * (high - low)
    if choice.get("log"):
        value = math.exp(math.log(low) + u * (math.log(high) - math.log(low)))
    # Six digits: the last of twelve may differ between two machines' logarithms, and all sites must draw the same.
    value = round(value) if choice.get("whole") else float(f"{value:.{_DIGITS}g}")
    return min(max(value, low), high)
