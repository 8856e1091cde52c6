"""Small checks of what a job says; every complaint is a ``ConfigurationError`` in words."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeGuard

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import printable

_WORD = re.compile(r"[A-Za-z]{3,7}")
_SHOWN = 80
_DEEPEST = 8
_LARGEST = 1 << 64
_LONGEST = 100_000  # constraints are texts
_LONGEST_NAME = 256
_MOST_VALUES = 1 << 20


def too_old(what: str, before: str, remedy: str) -> ConfigurationError:
    """Return the refusal of what a version before 0.9 wrote, which is never read as if nothing were there.

    Args:
        before: the first version that wrote otherwise.
        remedy: what to do with 0.10, the last version that reads it.
    """
    return ConfigurationError(
        f"{what}: a version of VeilBoost before {before} wrote it, and this one does not read it. Remedy: {remedy} "
        "with VeilBoost 0.10."
    )


def plain(value: object, levels: int = 2) -> Any:
    """Return what a caller in Python gave with dictionaries and lists in the place of other mappings and sequences."""
    if isinstance(value, Mapping):
        return {key: plain(item, levels - 1) if levels else item for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Set)):
        return [plain(item, levels - 1) if levels else item for item in value]
    return value


def check_plain(name: str, value: object) -> None:
    """Complain about what is not plain JSON of bounded depth, numbers and texts. Raises: ConfigurationError."""
    expect(f"{name} holds more than {_MOST_VALUES} values", _count_plain(name, value, 0) <= _MOST_VALUES)


def check_path_letters(what: str, path: str) -> None:
    """Complain about a path that Python would take for another one, or for none. Raises: ConfigurationError."""
    encoding = sys.getfilesystemencoding()
    expect(
        f"{what} has letters beyond ASCII, and Python takes names of files for {encoding} here: set PYTHONUTF8=1, or a "
        "locale of UTF-8 such as LC_ALL=C.UTF-8",
        encoding == "utf-8" or path.isascii(),
    )


def shown(value: object) -> str:
    """Return what a job says fit for a message: in quotes, short, and without what could steer a terminal."""
    if isinstance(value, str):
        return printable(repr(value[:_SHOWN]), _SHOWN)
    if value is None or is_number(value) or isinstance(value, (bool, float)):
        return repr(value)
    return "a number of too many digits" if isinstance(value, int) else f"a {type(value).__name__}"


def _count_plain(name: str, value: object, depth: int) -> int:
    """Count the values within, all of which must be JSON of a size that a job can have. Raises: ConfigurationError."""
    expect(f"{name} is nested more than {_DEEPEST} levels deep", depth <= _DEEPEST)
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, int):
        expect(f"{name} is too large a number", abs(value) <= _LARGEST)
        return 1
    if isinstance(value, float):
        expect(f"{name} must be a finite number", math.isfinite(value))
        return 1
    if isinstance(value, str):
        expect(
            f"{name} must be at most {_LONGEST} printable characters", len(value) <= _LONGEST and _is_printable(value)
        )
        return 1
    if isinstance(value, (list, tuple)):
        return 1 + sum(_count_plain(name, item, depth + 1) for item in value)
    if isinstance(value, dict):
        texts = all(isinstance(key, str) and len(key) <= _LONGEST and _is_printable(key) for key in value)
        expect(f"the names in {name} must be printable texts", texts)
        places = {key: printable(f"{name}.{key}" if depth else key, _SHOWN) for key in value}
        return 1 + sum(_count_plain(places[key], item, depth + 1) for key, item in value.items())
    raise ConfigurationError(f"{name} must be text, a number, true or false, a list or an object")


def _is_printable(text: str) -> bool:
    return re.sub("[\n\t\u00a0\u202f]", " ", text).isprintable()  # the last two separate thousands


def not_misspelt(name: str, value: str, keyword: str) -> None:
    """Complain about a keyword misspelt where any other word could stand too. Raises: ConfigurationError."""
    if value != keyword and _WORD.fullmatch(value):
        is_near = difflib.SequenceMatcher(None, value.lower(), keyword).ratio() > 0.7
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


def expect(complaint: str, holds: bool) -> None:  # noqa: FBT001 - what is checked is its subject
    """Complain unless something holds. Raises: ConfigurationError."""
    if not holds:
        raise ConfigurationError(complaint)


def one_of(name: str, value: object, allowed: list[str]) -> None:
    """Complain about a value that is not among the allowed ones. Raises: ConfigurationError."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigurationError(f"{name}={shown(value)} is unknown; choose one of {', '.join(allowed)}")


def is_text(value: object) -> bool:
    """Tell whether a value is a name: printable and not empty. Longer than 256 characters it is none of ours."""
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, float) and math.isfinite(value)


def is_whole(value: object, least: int, most: int = 1 << 62) -> bool:
    """Tell whether a value is a whole number within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_list(value: object, is_entry: Callable[[object], bool]) -> bool:
    """Tell whether a value is a list, not empty, of such entries."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_entry, value))
