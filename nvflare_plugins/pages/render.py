"""Pages and figures from the templates beside this module.

Whatever a value holds is text: it is bounded, made printable and escaped, and never read as a template or as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from nvflare_plugins.base.formatting import counted, human_bytes, number, printable, utc

_LONGEST = 4000


@cache
def environment() -> Environment:
    """Return the templates, with the filters that they use."""
    made = Environment(
        loader=PackageLoader("nvflare_plugins.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.filters |= {
        "around_code": lambda text: re.split("`([^`]+)`", printable(text, _LONGEST)),
        "bytes": human_bytes,
        "counted": counted,
        "epsilon": lambda value: f"{value:.4g}" if value is not None and value < float("inf") else "unbounded",
        "fmt": format,
        "listed": listed,
        "number": number,
        "px": lambda value: f"{value:.1f}",
        "utc": utc,
    }
    return made


def page(template: str, /, **facts: object) -> str:
    """Return a whole page that loads nothing. Raises: AttributeError: a fact lacks what the template shows."""
    try:
        return environment().get_template(template).render(facts)
    except UndefinedError as error:
        raise AttributeError(str(error)) from None


def figure(macro: str, /, **facts: object) -> str:
    """Return a figure, drawn by the macro of that name, as markup that pages take as it is."""
    drawn: str = getattr(environment().get_template("figures.svg").module, macro)(**facts)
    return drawn


def listed(texts: Sequence[str], most: int = 1000) -> str:
    """Return texts in a row, and how many more there are."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more:,} more" if more > 0 else "")


def _shown(value: object) -> object:
    """Return what a template prints of a value: markup that a template has made as it is, all else as text."""
    return value if hasattr(value, "__html__") else printable(str(value), _LONGEST)
