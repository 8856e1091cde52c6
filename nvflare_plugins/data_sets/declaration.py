"""What a site's policy declares of a data set: where it lies, how it is read, what may be spent on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_EPSILON, MOST_DELTA = 64.0, 1e-2


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """What all private jobs together may spend on a data set, towards adding or removing one person.

    Attributes:
        epsilon, delta: of everything together; epsilon at most 64, delta at most 0.01. Epsilon bounds how far what is
            released can move anyone's odds on a person, by the factor e^epsilon: at 23 already from one among all
            people alive to even, so that 64 promises nothing and more says it less plainly. Releasing each row in
            full with probability delta keeps delta: it has to be far below one over the number of rows.
        pure_epsilon: of what is released under pure differential privacy, apart; None allows none.
        rows_per_person: most rows that belong to one person. They are protected together. A site can only count
            those in its own file, and the promise is over the union of the sites: where a person may have rows at
            several, state the most that one person has at all of them together.
    """

    epsilon: float
    delta: float
    pure_epsilon: float | None = None
    rows_per_person: int = 1


@dataclass(frozen=True, slots=True)
class VerticalRules:
    """A party's own limits in vertical jobs. The first four are heuristics of the preset `guarded`.

    Attributes:
        min_rows_per_node: no sums over fewer rows, nor over a difference of so few.
        max_bins: most bins of a feature.
        max_sums_per_row: most independent sums in which a row's bin of one feature may take part, over all jobs.
        max_split_bits_per_row: most splits of this site that may divide a row, over all features and jobs: each shows
            one ordered bit of it. The default is what twenty trees give, the most that 40 sums allow, if all splits of
            five levels are this site's: it bounds deep trees, whose large nodes cost few sums.
        min_intersection: an alignment of fewer rows is refused.
        max_size_ratio: another party's set may be so many times larger or smaller.
        predictions_per_row: how often a row may be asked for, over all jobs; being in an evaluation set counts once.
        predictions_per_job: rows that one job may ask for.
    """

    min_rows_per_node: int = 20
    max_bins: int = 32
    max_sums_per_row: int = 40
    max_split_bits_per_row: int = 100
    min_intersection: int = 100
    max_size_ratio: int = 100
    predictions_per_row: int = 10
    predictions_per_job: int = 100_000


MISSING_TEXTS = ("NA", "N/A", "NaN", "nan", "NULL", "null", "None")


@dataclass(frozen=True, slots=True)
class DataSet:
    """Where a named data set of this site lies and how it is read; the job knows only the name.

    Attributes:
        name: the name that jobs use.
        path: the file, absolute.
        format: "csv" (also .csv.gz) or "parquet".
        loader: optional ``package.module:function`` of this site, called with this object, returning a pandas
            DataFrame; the file format is then the function's own matter.
        separator: between the columns of a CSV file.
        missing: texts that mean "missing" in a CSV file, besides an empty field.
        max_rows: larger data sets are refused; 0 means no limit. Differentially private jobs do not look at it: their
            refusal would tell the number of rows.
        id: column that names the rows, for alignment. It is never a feature.
        aliases: column -> what other parties call it in vertical jobs; columns without one are f0, f1, ...
        privacy: budget for differentially private jobs; without one they are all refused. With one, all other jobs
            are: they would show exactly what the budget bounds (see ``Consents.exact_use_of_budgeted_data``).
    """

    name: str
    path: Path
    format: str
    loader: str | None = None
    separator: str = ","
    missing: tuple[str, ...] = MISSING_TEXTS
    max_rows: int = 0
    id: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    privacy: PrivacyBudget | None = None
