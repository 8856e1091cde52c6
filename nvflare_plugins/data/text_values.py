"""How a data set writes numbers and dates as text. Each text is read by itself: no row changes what another one is."""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

DECIMALS = (".", ",")
THOUSANDS = ("", ",", ".", " ", "'", "\u2019", "\u00a0", "\u202f")


_EPOCH = datetime.date(1970, 1, 1).toordinal()
_DAY_S = 86_400
_PART = re.compile(r"YYYY|YY|MM?|DD?|hh|mm|ss")
_FROM = re.compile(r"(.*) from ([12]\d{3})", re.ASCII)
_CENTURY = 100
_DIGITS = {"YYYY": r"\d{4}", "M": r"\d{1,2}", "D": r"\d{1,2}"}
_TWO_DIGITS = r"\d{2}"
_BETWEEN = frozenset("-./,: TZ")
_COMMON_DATES = (
    "YYYY-MM-DD",
    "DD.MM.YYYY",
    "D.M.YYYY",
    "MM/DD/YYYY",
    "DD/MM/YYYY",
    "YYYY/MM/DD",
    "DD-MM-YYYY",
    "MM-DD-YYYY",
    "YYYYMMDD",
    "YYYY-MM-DD hh:mm:ss",
    "YYYY-MM-DDThh:mm:ss",
    "YYYY-MM-DDThh:mm:ssZ",
    "YYYY-MM-DD hh:mm",
    "DD.MM.YYYY hh:mm",
    "DD.MM.YYYY hh:mm:ss",
    "MM/DD/YYYY hh:mm",
    "DD/MM/YYYY hh:mm",
)
_SHORT_DATES = ("DD.MM.YY", "D.M.YY", "MM/DD/YY", "DD/MM/YY", "DD-MM-YY", "YY-MM-DD", "YY.MM.DD", "DD.MM.YY hh:mm")
_MONTHS = (
    "jan(?:uary?|uar)?|feb(?:ruary?|ruar)?|mar(?:ch)?|märz?|mrz|apr(?:il)?|may|mai|june?|juni|july?|juli|aug(?:ust)?|"
    "sept?(?:ember)?|o[ck]t(?:ober)?|nov(?:ember)?|de[cz](?:ember)?"
)
_LIKE_A_DATE = re.compile(
    rf"\d{{1,4}}([./-])\s?\d{{1,2}}\1\s?\d{{1,4}}\b.*|(?=.*\d)(?:.*[\W\d_])?(?:{_MONTHS})(?:[\W\d_].*)?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How numbers are written: 1234.5 unless said otherwise.

    Attributes:
        decimal: between whole part and fraction, "." or ",".
        thousands: between groups of three digits of the whole part, which may also stand without; "" for nothing.
    """

    decimal: str = "."
    thousands: str = ""

    def number(self, text: str) -> float | None:
        """Return what a text says, without white space around it; None if it is no number. "nan" is NaN."""
        if not _number_pattern(self.decimal, self.thousands).fullmatch(text):
            return None
        plain = text.replace(self.thousands, "") if self.thousands else text
        return float(plain.replace(self.decimal, "."))


@functools.cache
def _number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    point, group = re.escape(decimal), re.escape(thousands)
    whole = rf"(?:\d+|\d{{1,3}}(?:{group}\d{{3}})+)" if thousands else r"\d+"
    return re.compile(
        rf"[+-]?(?:{whole}(?:{point}\d*)?|{point}\d+)(?:e[+-]?\d+)?|[+-]?inf(?:inity)?|nan", re.ASCII | re.IGNORECASE
    )


def fitting_formats(texts: Iterable[str]) -> list[NumberFormat]:
    """Return the formats under which all texts are numbers, the usual ones first."""
    fitting = [NumberFormat(decimal, group) for group in THOUSANDS for decimal in DECIMALS if decimal != group]
    for text in texts:
        fitting = [one for one in fitting if one.number(text) is not None]
        if not fitting:
            break
    return fitting


@dataclass(frozen=True, slots=True)
class DatePattern:
    """How a column writes dates, such as ``DD.MM.YYYY`` or ``YYYY-MM-DD hh:mm:ss``.

    Year (four digits), month and day each stand there once; M and D take one digit or two. A time of the day needs its
    larger parts. Between them stand - . / , : T Z and spaces. Years of two digits (YY) need the first of the hundred
    years that they mean: ``DD.MM.YY from 1930``.
    """

    text: str
    _pattern: re.Pattern[str] = field(repr=False)
    first_year: int = 0

    @classmethod
    @functools.cache
    def of(cls, text: str) -> DatePattern | None:
        """Return the pattern that a text describes; None if it describes none."""
        whole, first_year = text, 0
        if (dated := _FROM.fullmatch(text)) is not None:
            text, first_year = dated[1], int(dated[2])
        parts = _PART.findall(text)
        if ("YY" in parts) != bool(first_year):
            return None
        kinds = [part[0] for part in parts]
        between = _PART.split(text)
        n_times = sum(part in ("hh", "mm", "ss") for part in parts)
        is_date = sorted(kind for kind in kinds if kind in "YMD") == ["D", "M", "Y"]
        has_larger = {"hh", "mm", "ss"} & set(parts) == set(("hh", "mm", "ss")[:n_times])
        if not (is_date and has_larger and len(set(parts)) == len(parts) and set("".join(between)) <= _BETWEEN):
            return None
        regex = re.escape(between[0])
        for part, after in zip(parts, between[1:], strict=True):
            name = part if part.islower() else part[0]
            regex += f"(?P<{name}>{_DIGITS.get(part, _TWO_DIGITS)}){re.escape(after)}"
        return cls(whole, re.compile(regex, re.ASCII), first_year)

    def days(self, text: str) -> float | None:
        """Return the days since 1970-01-01, the time as a fraction of a day; None if the text is no such date."""
        match = self._pattern.fullmatch(text)
        if match is None:
            return None
        value = {name: int(digits) for name, digits in match.groupdict().items()}
        try:
            year = value["Y"]
            if self.first_year:
                year = self.first_year + (year - self.first_year) % _CENTURY
            date = datetime.date(year, value["M"], value["D"])
            time = datetime.time(value.get("hh", 0), value.get("mm", 0), value.get("ss", 0))
        except ValueError:
            return None
        seconds = (time.hour * 60 + time.minute) * 60 + time.second
        return date.toordinal() - _EPOCH + seconds / _DAY_S


def fitting_dates(texts: Iterable[str]) -> list[str]:
    """Return the usual patterns that all texts follow: two where days and months cannot be told apart.

    Those with years of two digits are without a first year, and so no patterns yet: nothing in a text tells it.
    """
    leap = " from 1950"  # in which 00 is a leap year, so that no date is left out
    usual = (*_COMMON_DATES, *(text + leap for text in _SHORT_DATES))
    fitting = [pattern for text in usual if (pattern := DatePattern.of(text)) is not None]
    for text in texts:
        fitting = [one for one in fitting if one.days(text) is not None]
        if not fitting:
            break
    return [one.text.removesuffix(leap) for one in fitting]


def looks_like_date(text: str) -> bool:
    """Tell whether a text seems to say a day, in whatever form."""
    return _LIKE_A_DATE.fullmatch(text) is not None


def days_in_frame(pattern: DatePattern, text: str) -> float | None:
    """Return the days of a frame's value, as a number or a date of Python says it if its column is none of texts."""
    days = pattern.days(text.removesuffix(".0"))
    if days is not None:
        return days
    try:
        instant = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    instant = instant if instant.tzinfo is not None else instant.replace(tzinfo=datetime.UTC)
    return (instant - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / datetime.timedelta(days=1)
