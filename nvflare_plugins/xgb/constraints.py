"""Monotone and interaction constraints in one form: by position in the agreed column order.

XGBoost takes them by name or by position, as text or as lists, and does not check positions that do not exist. All
sites must hold the same constraints, so they are normalised before they are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from he_processors.errors import ConfigurationError
from nvflare_plugins.checks import check_plain, shown


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
    if len(directions) != len(feature_names):
        raise ConfigurationError(f"{name}: {len(directions)} directions for {len(feature_names)} columns.")
    if any(isinstance(direction, bool) or direction not in (-1, 0, 1) for direction in directions):
        raise ConfigurationError(f"{name}: every direction is -1, 0 or 1.")
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
