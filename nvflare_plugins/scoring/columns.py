"""Columns of rows to be scored, as the model needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nvflare_plugins.base.formatting import counted, near_name, printable
from nvflare_plugins.data.table import positions_of
from nvflare_plugins.data.tabular_files import distinct_texts, is_number, is_text, numbers_of_texts, taken
from nvflare_plugins.data.text_values import NumberFormat
from nvflare_plugins.scoring.model import Feature, ScoringError

# From the columns of a file or frame to the numbers that a model was trained on.
#
# Columns go by name, in any order. Numbers, missing values and categories are read by the functions that read the
# training files (``data_sets``). Everything that does not fit is found before the first row is scored, and told in one
# error that counts values and shows none.


UNKNOWN = -2  # ``positions_of``
_MOST_SHOWN = 10
PLAIN = NumberFormat()


@dataclass(frozen=True, slots=True)
class Remedies:
    """What helps, in the words of the place where the rows come from."""

    missing_column: str
    extra_column: str
    repeated_column: str
    unknown_category: str
    text: str
    type: str
    infinite: str
    reading: str = ""


COMMAND = Remedies(
    "give the file the model's columns, under the model's names",
    "name what is no feature with --ignore COLUMN, or with --id COLUMN to keep it",
    "rename one of them",
    "correct them, or count them as missing with --unknown-is-missing",
    "correct them, or name the texts that mean missing with --missing TEXT",
    "write the column as numbers",
    "leave them empty, which is missing, or scale the column as in training",
    "--separator and --encoding, or the site's policy (--workspace), say how a file is written.",
)
POLICY = replace(
    COMMAND,
    extra_column="leave them out (--ignore COLUMN)",
    unknown_category="correct them",
    text="correct them, or name the texts that mean missing for the data set (veilboost site-setup DIR --missing "
    "NAME=TEXT)",
    reading="The site's policy says how its data set, and a file beside it, is written (veilboost site-setup).",
)
PYTHON = Remedies(
    "give the frame the model's columns, under the model's names",
    "drop what is no feature",
    "rename one of them",
    "correct them, or count them as missing with unknown_is_missing=True",
    "correct them, or make them missing (NaN)",
    "make the column numbers",
    "make them NaN, which is missing, or scale the column as in training",
)


def check_names(where: str, features: Sequence[Feature], present: Sequence[str], remedies: Remedies) -> None:
    """Refuse a table that lacks columns of the model, or has others.

    Args:
        where: the file's name, for the message.
        present: columns of the table, without those that are no features.

    Raises:
        ScoringError: names and numbers of the columns, and what helps.
    """
    names = [feature.name for feature in features]
    known, given = set(names), set(present)
    problems = []
    lacking = [name for name in names if name not in given]
    if lacking:
        hint = near_name(lacking[0], sorted(given - known))
        problems.append(
            f"lacks {len(lacking)} of the model's {len(names)} columns ({_shown(lacking)}): "
            f"{remedies.missing_column}{hint}"
        )
    extra = [name for name in dict.fromkeys(present) if name not in known]
    if extra:
        problems.append(
            f"has {counted(len(extra), 'column')} that the model lacks ({_shown(extra)}): {remedies.extra_column}"
        )
    repeated = sorted({name for name in present if present.count(name) > 1}) if len(given) < len(present) else []
    if repeated:
        problems.append(
            f"has {counted(len(repeated), 'name')} of columns twice ({_shown(repeated)}): {remedies.repeated_column}"
        )
    _raise(where, problems)


def matrix_of(
    where: str,
    features: Sequence[Feature],
    columns: Mapping[str, pa.ChunkedArray],
    missing: Sequence[str],
    *,
    unknown_is_missing: bool,
    remedies: Remedies,
    number_format: NumberFormat = PLAIN,
) -> NDArray[np.float32]:
    """Return rows as the model was trained on them.

    Shapes: result: float32[n_rows, n_features]; NaN is missing, categories are positions in their list.

    Args:
        missing: texts that mean "missing", besides an empty one.
        unknown_is_missing: categories outside their list count as missing instead of being refused.
        number_format: how texts write numbers.

    Raises:
        ScoringError: values that the model cannot have been trained on, by column and number.
    """
    n_rows = len(next(iter(columns.values()))) if columns else 0
    matrix = np.empty((n_rows, len(features)), dtype=np.float32)
    problems: list[str] = []
    for place, feature in enumerate(features):
        column, name = columns[feature.name], _shown([feature.name])
        is_nested = pa.types.is_nested(column.type)
        if feature.categories is not None and not is_nested:
            codes = positions_of(column, feature.categories, missing)
            n_unknown = int(np.count_nonzero(codes == UNKNOWN))
            if n_unknown and not unknown_is_missing:
                problems.append(
                    f"column {name}: {n_unknown} of {n_rows} values are none of the model's "
                    f"{len(feature.categories)} categories: {remedies.unknown_category}"
                )
            matrix[:, place] = np.where(codes < 0, np.nan, codes)
            continue
        if is_nested or not _holds_numbers(column.type):
            problems.append(f"column {name}: its {n_rows} values are of type {column.type}: {remedies.type}")
            continue
        numbers, n_text = _numbers_of(column, missing, number_format)
        if n_text:
            problems.append(f"column {name}: {n_text} of {n_rows} values are text that is no number: {remedies.text}")
        matrix[:, place], n_infinite = narrowed(numbers)
        if n_infinite:
            problems.append(
                f"column {name}: {n_infinite} of {n_rows} values are infinite or beyond float32: {remedies.infinite}"
            )
    _raise(where, problems)
    return matrix


def _holds_numbers(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_numbers(kind.value_type)
    return is_number(kind) or is_text(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)


def _numbers_of(
    column: pa.ChunkedArray, missing: Sequence[str], number_format: NumberFormat
) -> tuple[NDArray[np.float64], int]:
    """Return a column as numbers, and how many of its values are text that is none. Shapes: float64[n_rows]."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if is_text(column.type):
        texts, codes = distinct_texts(column)
        values = numbers_of_texts(texts, missing, number_format)
        truth = [place for place, text in enumerate(texts) if text.strip().lower() in ("true", "false")]
        wrong = [place for place, value in enumerate(values) if value is None]
        # Among numbers truth values are none; beside other text it is this text that is meant.
        others = [place for place in wrong if place not in truth] or wrong
        return taken(values, codes), int(np.count_nonzero(np.isin(codes, others)))
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64), 0


def narrowed(numbers: NDArray[np.floating]) -> tuple[NDArray[np.float32], int]:
    """Return numbers as XGBoost takes them, and how many are infinite then."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    return narrow, int(np.count_nonzero(np.isinf(narrow)))


def _raise(where: str, problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _MOST_SHOWN} columns more" if len(problems) > _MOST_SHOWN else ""
        raise ScoringError(f"{where} {'; '.join(problems[:_MOST_SHOWN])}{more}.")


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(repr(printable(name, 80)) for name in names[:_MOST_SHOWN])
    return f"{shown} and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else shown


# What counts of two classes by bins of a score tell of a model: bounds for the metrics, as scores within a bin tie.
#
# Whatever the scores within the bins are, the metric on the rows lies between the bounds, and both are reached.


Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Between:
    """A metric that lies between two numbers."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


def auc(negative: Counts, positive: Counts) -> Between:
    """Bound the area under the ROC curve: the share of pairs in which the positive row scores higher.

    Shapes: negative, positive: int64[n_bins], by ascending score; both have rows.
    """
    of_negative, of_positive = _floats(negative), _floats(positive)
    below = np.concatenate([[0.0], np.cumsum(of_negative)[:-1]])
    pairs = of_positive.sum() * of_negative.sum()
    decided, tied = (of_positive * below).sum(), (of_positive * of_negative).sum()
    return Between(float(decided / pairs), float((decided + tied) / pairs))


def average_precision(negative: Counts, positive: Counts) -> Between:
    """Bound average precision (AUCPR as scikit-learn sums it): the mean precision at the positive rows.

    In a bin all positive rows may come first, or last; p positive rows after T of them and F negative ones add
    the sum of (T + i) / (T + i + F) for i = 1 to p, which is p - F (psi(T + F + p + 1) - psi(T + F + 1)).

    Shapes: as ``auc``.
    """
    from scipy.special import digamma

    of_negative, of_positive = _floats(negative)[::-1], _floats(positive)[::-1]
    true = np.concatenate([[0.0], np.cumsum(of_positive)[:-1]])
    false = np.concatenate([[0.0], np.cumsum(of_negative)[:-1]])

    def added(before: NDArray[np.float64]) -> float:
        steps = digamma(true + before + of_positive + 1) - digamma(true + before + 1)
        return float((of_positive - before * steps).sum() / of_positive.sum())

    return Between(added(false + of_negative), added(false))


def kolmogorov_smirnov(negative: Counts, positive: Counts) -> Between:
    """Bound the largest difference between the classes' distributions of the score.

    Shapes: as ``auc``.
    """
    of_negative, of_positive = (np.concatenate([[0.0], np.cumsum(_floats(one))]) for one in (negative, positive))
    of_negative, of_positive = of_negative / of_negative[-1], of_positive / of_positive[-1]
    low = float(np.abs(of_negative - of_positive).max())
    inside = np.maximum(of_negative[1:] - of_positive[:-1], of_positive[1:] - of_negative[:-1])
    return Between(low, float(max(low, inside.max())))


def _floats(counts: Counts) -> NDArray[np.float64]:
    return counts.astype(np.float64)
