"""Small checks of what a job says; every complaint is a ``ConfigurationError`` in words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from he_processors.errors import ConfigurationError

_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_WORD = re.compile(r"[A-Za-z]{3,7}")
_SHOWN = 80


def check_fields(document: object, known: Collection[str], needed: Collection[str] = ()) -> dict[str, Any]:
    """Return a job's document if it has known fields only, and all that are needed. Raises: ConfigurationError."""
    if not isinstance(document, dict):
        raise ConfigurationError("a job is an object with named fields")
    unknown = sorted(str(name)[:_SHOWN] for name in document if name not in known)
    if unknown:
        raise ConfigurationError(f"the job has unknown fields: {', '.join(unknown)}")
    missing = [name for name in needed if name not in document]
    if missing:
        raise ConfigurationError(f"the job lacks {', '.join(missing)}")
    return document


def job_id_or_none(name: str, value: object, keyword: str | None = None) -> None:
    """Complain about anything but None, the id of a job or a keyword; also about the keyword misspelt.

    Raises: ConfigurationError.
    """
    if value is None or (keyword is not None and value == keyword):
        return
    is_id = isinstance(value, str) and _JOB_ID.fullmatch(value) is not None and value not in (".", "..")
    what = "the id of a job" if keyword is None else f"{keyword!r} or the id of a job"
    expect(f"{name} must be {what} (letters, digits, '.', '_' and '-'), or be left out", is_id)
    if keyword is not None and _WORD.fullmatch(str(value)):
        is_near = difflib.SequenceMatcher(None, str(value).lower(), keyword).ratio() > 0.7
        expect(f"{name}={value!r} is unknown; did you mean {keyword!r}?", not is_near)


def checked_sites(sites: Sequence[str] | None) -> list[str] | None:
    """Return the sites of a job by name; None means all that are there. Raises: ConfigurationError."""
    if sites is None:
        return None
    if isinstance(sites, str):  # its letters would be taken for the names of sites
        raise ConfigurationError(f"sites must be a list of names, not a text: write sites=[{sites[:_SHOWN]!r}]")
    if not is_list(sites, is_text) or len(set(sites)) != len(sites):
        raise ConfigurationError("sites must be a list of different names, at least one")
    return sorted(sites)


def expect(complaint: str, holds: bool) -> None:
    """Complain unless something holds. Raises: ConfigurationError."""
    if not holds:
        raise ConfigurationError(complaint)


def one_of(name: str, value: object, allowed: list[str]) -> None:
    """Complain about a value that is not among the allowed ones. Raises: ConfigurationError."""
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


def at_least(name: str, value: object, least: int) -> None:
    """Complain about anything but a whole number that is large enough. Raises: ConfigurationError."""
    expect(f"{name} must be a whole number of at least {least}", is_whole(value, least))


def is_text(value: object) -> bool:
    """Tell whether a value is a text that is not empty."""
    return isinstance(value, str) and value != ""


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object, least: int, most: int = 1 << 62) -> bool:
    """Tell whether a value is a whole number within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_list(value: object, is_entry: Callable[[object], bool]) -> bool:
    """Tell whether a value is a list, not empty, of such entries."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_entry, value))


def is_mapping(value: object) -> bool:
    """Tell whether a value is a dictionary with names for keys."""
    return isinstance(value, dict) and all(map(is_text, value))


def are_bounds(value: object) -> bool:
    """Tell whether a value is a pair of numbers, the lower one first."""
    return is_list(value, is_number) and len(value) == 2 and value[0] < value[1]  # type: ignore[arg-type,index]


def is_entry(value: object) -> bool:
    """Tell whether a value can stand in a public list: a text or a whole number."""
    return isinstance(value, (str, int)) and not isinstance(value, bool)
