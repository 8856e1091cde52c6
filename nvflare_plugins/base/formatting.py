"""Sizes, times, numbers and foreign text as people read them."""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from itertools import accumulate

_FEWEST_DIGITS, _MOST_DIGITS = 6, 17  # the latter tell any two doubles apart
_LARGEST = {"s": 120, "min": 7200, "h": 172800}  # seconds up to which a unit is used
_LONGEST_WRITTEN = 1e15
_FORMULA = "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20"  # the last four are wide, as East Asian keyboards write them
_NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_JAMO = frozenset(map(chr, range(0x1160, 0x1200)))  # vowels and finals, which join the letter before
_PILED_UP = re.compile("[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{4,}")


def human_bytes(n: int) -> str:
    """Return a size as people read it: 1.5 MB for 1,500,000 bytes."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def human_number(value: float, digits: int = 3) -> str:
    """Return a number in so many digits, and a large one written out: 12,346 and not 1.23e+04."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < _LONGEST_WRITTEN else text


def number(value: float) -> str:
    """Return a number with as many digits as a person needs."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def human_seconds(seconds: float) -> str:
    """Return a time as people read it: 66.5 min for 3,990 seconds, 0.12 ms for 0.00012."""
    if 0 < seconds < 0.001:
        return f"{max(1000 * seconds, 0.001):.2g} ms"
    for unit, length in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < _LARGEST[unit]:
            return f"{human_number(seconds / length)} {unit}"
    return f"{human_number(seconds / 86400)} days"


def utc(text: str) -> str:
    """Return a time of ISO 8601 in UTC as people read it, without its zone."""
    return text.replace("T", " ").removesuffix("+00:00")


def counted(n: int, one: str, more: str | None = None) -> str:
    """Return a number of things: "1 run", "2 runs". ``more``: the plural, where it is not ``one`` with an s."""
    return f"{n} {one if n == 1 else more or one + 's'}"


def bounds(values: Sequence[float]) -> list[str]:
    """Return bounds of intervals with as many digits as tell them apart: those of days, or of sums near 1e9, need more.

    Beyond six digits they are written out, as 1000000064 and not as 1.000000064e+09.
    """
    for digits in range(_FEWEST_DIGITS, _MOST_DIGITS):
        texts = [f"{value:.{digits}g}" for value in values]
        is_plain = digits == _FEWEST_DIGITS or not any("e+" in text for text in texts)
        if is_plain and len(set(texts)) == len(set(values)):
            return texts
    return [f"{value:.{_MOST_DIGITS}g}" for value in values]


def printable(text: str, most: int = 200) -> str:
    """Return foreign text fit for screens and pages: on one line, bounded, and without what could steer or reorder it.

    Control characters, line breaks, marks of writing direction and halves of surrogate pairs become question marks, and
    so do accents that pile up on one letter.
    """
    text = text if len(text) <= most else text[: most - 1] + "\u2026"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "?" for c in text)
    return _PILED_UP.sub("?", text)


def cells(text: str) -> int:
    """Return how many columns of a terminal a printable text takes.

    Wide characters and emoji take two, accents and the vowels of decomposed Korean none. Reference: Unicode Standard
    Annex 11, East Asian Width.
    """
    return sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf") or character in _JAMO:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitted(text: str, width: int) -> str:
    """Return foreign text fit for a column of a table on a terminal, cut or filled with spaces to just its width."""
    text = printable(text, 4 * width)
    if cells(text) > width:
        ends = accumulate(map(_cells_of, text))
        text = text[: sum(end < width for end in ends)] + "\u2026"
    return text + " " * (width - cells(text))


def table_lines(rows: Sequence[Sequence[str]], right: Collection[int] = (), *, is_ruled: bool = False) -> list[str]:
    """Return the rows of a table as lines, with columns below one another.

    Args:
        right: numbers of the columns that stand flush right.
        is_ruled: draw a line below the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = [["-" * width for width in widths]] if is_ruled else []
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (rows[0], *rule, *rows[1:])
    ]


def near_name(name: str, present: Sequence[str]) -> str:
    """Return the end of a sentence that says a name is not there: which one may be meant, if any."""
    folded = {other.casefold(): other for other in reversed(present)}
    close = [folded[one] for one in difflib.get_close_matches(name.casefold(), folded, n=1)]
    for other in present:
        if unicodedata.normalize("NFKC", other).split() == unicodedata.normalize("NFKC", name).split():
            return f"; {other!r} looks alike and is written with other characters, {other!a} for {name!a}"
    return f"; did you mean {close[0]!r}?" if close else ""


def inert(text: str) -> str:
    """Return text as a cell that no spreadsheet takes for a formula: with an apostrophe before it if need be.

    Numbers stay as they are. Reference: OWASP, CSV injection.
    """
    is_formula = text[:1] in _FORMULA and text != "" and _NUMBER.fullmatch(text) is None
    return f"'{text}" if is_formula else text
