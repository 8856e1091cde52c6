"""What a site's policy declares of a data set: its files, how they are read, what may be spent on it."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import Field

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.declared import (
    AS_GIVEN,
    PRINTABLE,
    STRICT,
    Document,
    FilePath,
    Flag,
    Name,
    OneOf,
    Text,
    Words,
    document,
    where,
)
from nvflare_plugins.data.text_values import DECIMALS, THOUSANDS, DatePattern, NumberFormat

# Dated files of rows in a folder: what they are called, and which one a data set reads.
#
# The rule: a data set whose path is a folder reads the snapshot whose name has the latest time, and no other file. All
# snapshots of a folder are of one name. Times are UTC: ``NAME-20261122T201500Z.parquet``.


# Which files a data set consists of: one, the newest snapshot of a folder, or all of a pattern.

_NAME = re.compile(r"(.+)-(\d{8}T\d{6}Z)\.parquet")


def snapshot_name(name: str, moment: datetime) -> str:
    """Return the name of a snapshot's file. Args: moment: in UTC."""
    return f"{name}-{moment:%Y%m%dT%H%M%SZ}.parquet"


def snapshots_in(folder: Path) -> dict[Path, str]:
    """Return the snapshots of a folder, the oldest first, each with its name; links are none.

    What cannot be listed, for whatever reason, has none.
    """
    found = {}
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    for name in names:
        path = folder / name
        matched = _NAME.fullmatch(name)
        if matched and path.is_file() and not path.is_symlink():
            found[path] = (matched[2], matched[1])
    return {path: found[path][1] for path in sorted(found, key=lambda one: (found[one][0], one.name))}


def newest_in(folder: Path, data_set: str) -> Path:
    """Return the snapshot that a data set reads.

    Raises:
        ConfigurationError: the folder has none, or some of several names.
    """
    found = snapshots_in(folder)
    if not found:
        raise ConfigurationError(
            f"data set {data_set!r} is a folder without a snapshot that can be read: take one (`veilboost snapshot`). "
            f"Policy key: data_sets.{data_set}.path."
        )
    if len(set(found.values())) > 1:
        raise ConfigurationError(
            f"data set {data_set!r} is a folder with snapshots of several names: give each a folder of its own. Policy "
            f"keys: data_sets.{data_set}.path, snapshots.NAME.folder."
        )
    return list(found)[-1]


# Which files a data set consists of: one, the newest snapshot of a folder, or all Parquet files of folder or pattern.
#
# The order of rows: files by name (by code point, as ``sorted`` does; capital letters before small ones, and part-10
# before part-2), the rows of each as they stand. A pattern is a path whose last part has ``*``, ``?`` or ``[``, unless
# a file has that very name. Names that begin with ``.`` or ``_`` are left out, as Spark and Arrow write their own notes
# under such names. Links and folders are refused: a link would bring in what lies elsewhere, under another data set's
# name perhaps, and the columns of a folder such as ``year=2026`` stand in its name and in none of its files.


_WILD = frozenset("*?[")


def is_pattern(path: Path) -> bool:
    """Tell whether the last part of a path stands for many files."""
    return bool(_WILD & set(path.name)) and not os.path.lexists(path)


def is_in_parts(path: Path) -> bool:
    """Tell whether a path stands for Parquet files that are read as one: a pattern, or a folder without snapshots."""
    return is_pattern(path) or (os.path.isdir(path) and not snapshots_in(path))


def files_of(path: Path, data_set: str) -> tuple[Path, ...]:
    """Return the files of a data set in the order of their rows.

    Raises:
        ConfigurationError: a folder or pattern without files, or with links or folders among them; snapshots of several
            names.
    """
    if not is_in_parts(path):
        return (newest_in(path, data_set) if os.path.isdir(path) else path,)
    return tuple(_parts(path, data_set))


def known_files(path: Path) -> tuple[Path, ...]:
    """Return what lies at a path now, links followed: for those who compare data sets. Raises nothing."""
    if not is_in_parts(path):
        return (path, *snapshots_in(path))
    try:
        return (path, *(entry for entry in _listed(path) if not os.path.isdir(entry)))
    except OSError:
        return (path,)


def _listed(path: Path) -> list[Path]:
    folder, pattern = (path.parent, path.name) if is_pattern(path) else (path, "*")
    names = sorted(name for name in os.listdir(folder) if name[0] not in "._")
    return [folder / name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _parts(path: Path, data_set: str) -> list[Path]:
    found = _listed(path)
    key = f"Policy key: data_sets.{data_set}.path."
    if not found:
        raise ConfigurationError(
            f"data set {data_set!r} is a folder or a pattern without a file: put Parquet files there, or take a "
            f"snapshot (`veilboost snapshot`). {key}"
        )
    for entry in found:
        if entry.is_symlink():
            what, remedy = "a link", "put the file itself there"
        elif entry.is_dir():
            what, remedy = "a folder (such as year=2026)", "write the column into the files and put them side by side"
        elif not entry.is_file():
            what, remedy = "something that is no file", "take it out"
        else:
            continue
        raise ConfigurationError(f"data set {data_set!r} holds {what} among its files: {remedy}. {key}")
    return found


# What a site's policy declares of a Dask cluster of its own, on which its part of a training may run.


MOST_WORKERS = 1024
_DAY_S = 86_400
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"  # another number would make a name of it, to be looked up
_LOOPBACK = re.compile(rf"tcp://(127(\.{_OCTET}){{3}}|localhost|\[::1\]):[0-9]{{1,5}}")
_TLS = re.compile(r"tls://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


def is_on_loopback(address: str) -> bool:
    """Tell whether an address of Dask's, without TLS, is one of this machine's loopback."""
    return _LOOPBACK.fullmatch(address) is not None


def is_under_tls(address: str) -> bool:
    """Tell whether an address of Dask's is one under TLS."""
    return _TLS.fullmatch(address) is not None


_Deadline = Annotated[float, STRICT, Ge(1), Le(_DAY_S), AS_GIVEN, Words(f"a number of seconds from 1 to {_DAY_S:,}")]
_ADDRESS = Words("tls://host:port; tcp:// is taken on the loopback of this machine alone (127.0.0.1, localhost, [::1])")


@document
class ClusterSecurity(Document):
    """The certificates of the cluster, as Dask knows them: scheduler, workers and this site show one each."""

    WHAT = "security"
    IS_JSON = False  # it holds paths

    ca: FilePath
    """The certificates that may have signed those of scheduler and workers, in PEM."""
    cert: FilePath
    """This site's certificate towards them, in PEM."""
    key: FilePath
    """Its key, in PEM, which nobody but its owner may read (mode 0600)."""


@document
class Cluster(Document):
    """A Dask cluster of this site, for it alone: whoever may use its scheduler may read what its workers hold."""

    WHAT = "cluster"
    IS_JSON = False  # it holds paths

    scheduler: Annotated[str, STRICT, where(lambda value: is_under_tls(value) or is_on_loopback(value)), _ADDRESS]
    """Address of the scheduler, `tls://host:port`. Without TLS scheduler and workers have to be on this machine's
    loopback, and run by the user who runs this site.
    """
    workers: Annotated[int, STRICT, Ge(1), Le(MOST_WORKERS)]
    """How many workers take part, each with a part of the rows. They need one thread each, and the same releases as
    this site.
    """
    security: ClusterSecurity | None = None
    """The certificates. `tls://` needs them."""
    deadline_s: _Deadline = 600.0
    """How long one step may take at a worker before the job is ended."""
    workers_read: Flag = False
    """Workers of horizontal jobs, their tunings and private jobs read their rows themselves, where a data set is read
    in passes (`memory`); they have to reach the same files at the same path. Else the site's process hands rows out,
    which it then holds.
    """
    sites: tuple[Name, ...] = ()
    """Whose it is, where several sites read one policy, as in the simulator; the others train in their own process.
    Left out, it is the site's that reads this.
    """

    def __post_init__(self) -> None:
        if self.scheduler.startswith("tls://") and self.security is None:
            raise ConfigurationError(
                "cluster.security is missing: tls:// needs the paths of ca, cert and key, as {'ca': ..., 'cert': ..., "
                "'key': ...}"
            )
        if self.scheduler.startswith("tcp://") and self.security is not None:
            raise ConfigurationError("cluster.scheduler is tcp://, which uses no certificates: write tls://")


# What a site's policy answers of a column, where its values alone do not tell what they are.


_LIMIT = re.compile(r"(<=?|>=?|[≤≥])\s*(.+)")
_YES_OR_NO = dict.fromkeys(("yes", "y", "ja", "j", "true", "1"), 1.0) | dict.fromkeys(
    ("no", "n", "nein", "false", "0"), 0.0
)
MEASUREMENT, ID, CATEGORIES, YES_NO, LIMITS = "measurement", "id", "categories", "yes/no", "limits"
Answer = str | Mapping[str, float | str | None]


def is_read_by(answer: Answer | None) -> bool:
    """Tell whether a column's texts become numbers by what the policy answers of it."""
    return answer in (YES_NO, LIMITS) or (isinstance(answer, Mapping) and not is_spelling(answer))


def is_yes_or_no(text: str) -> bool:
    """Tell whether a text says yes or no to the answer of that name."""
    return text.lower() in _YES_OR_NO


def is_spelling(answer: Answer | None) -> bool:
    """Tell whether an answer says how texts of a column are spelt, as ``{"ULM": "Ulm"}`` does."""
    return isinstance(answer, Mapping) and any(isinstance(value, str) for value in answer.values())


def limit_of(text: str) -> tuple[str, str] | None:
    """Return the mark and the number of a value beyond what could be measured, such as ``<0.5``; None if it is none."""
    match = _LIMIT.fullmatch(text)
    return None if match is None else (match[1][0].replace("≤", "<").replace("≥", ">"), match[2])


def answered_number(text: str, answer: Answer, form: NumberFormat, missing: Iterable[str]) -> float | None:
    """Return what a text of an answered column says, without white space around it; NaN if missing, None if nothing.

    Limits: ``<x`` is half of x (x itself, where that is not above 0), ``>x`` is x.
    """
    if isinstance(answer, Mapping) and text in answer:
        value = answer[text]
        return math.nan if value is None or isinstance(value, str) else value
    if not text or text in missing:
        return math.nan
    if answer == YES_NO:
        return _YES_OR_NO.get(text.lower())
    beyond = limit_of(text) if answer == LIMITS else None
    if beyond is None:
        return form.number(text)
    value = form.number(beyond[1])
    return value / 2 if value is not None and beyond[0] == "<" and value > 0 else value


def answered_values(
    values: Iterable[object], answer: Answer, form: NumberFormat, missing: Iterable[str]
) -> list[float | None]:
    """Return what each value of a file or frame says, as ``answered_number``. Whole numbers may be 3 or 3.0."""
    return [answered_number(_text(value), answer, form, missing) for value in values]


def _text(value: object) -> str:
    if value is None or value != value:
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


# What a site's policy declares of a data set: where it lies, how it is read, what may be spent on it.


MOST_ROWS = 2**53  # of any number in a policy: more would be no number any more for those who divide it
MOST_EPSILON, MOST_DELTA = 64.0, 1e-2
Epsilon = Annotated[
    float, STRICT, Gt(0), Le(MOST_EPSILON), AS_GIVEN, Words(f"a number above 0 and at most {MOST_EPSILON:g}")
]
Delta = Annotated[
    float,
    STRICT,
    Gt(0),
    Le(MOST_DELTA),
    AS_GIVEN,
    Words(f"a number above 0, at most {MOST_DELTA:g} and far below one over the number of rows"),
]
MISSING_TEXTS = ("NA", "N/A", "NaN", "nan", "NULL", "null", "None")
ENCODINGS = (
    "utf-8",
    "utf-16",
    "latin-1",
    "iso-8859-2",
    "iso-8859-15",
    "windows-1250",
    "windows-1251",
    "windows-1252",
    "cp437",
    "cp850",
    "mac-roman",
)
"""Characters of one byte, of UTF-8, or of whole units of two: no row of a file changes how the next one is read."""


def has_password(url: str) -> bool:
    """Tell whether an address of SQLAlchemy's form seems to hold a password, or an option with a secret."""
    _, _, rest = url.partition("://")
    place, _, options = rest.partition("?")
    # A password may hold @ and /, though SQLAlchemy asks for them quoted.
    user = place.rpartition("@")[0]
    names = (option.partition("=")[0].lower() for option in options.split("&"))
    return ":" in user or any(word in name for name in names for word in _SECRET_OPTIONS)


Count = Annotated[int, STRICT, Ge(1), Le(MOST_ROWS)]
CountOrNone = Annotated[int, STRICT, Ge(0), Le(MOST_ROWS)]
Column = Annotated[str, STRICT]  # any name that a file gives
SnapshotName = Annotated[str, STRICT, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$"), Words("letters, digits, '_', '.', '-'")]
BudgetEpsilon = Annotated[
    float,
    STRICT,
    Gt(0),
    where(lambda value: value <= MOST_EPSILON),
    Words(f"a number above 0 and at most {MOST_EPSILON:g}: a larger one protects nobody"),
]
Renamed = Annotated[
    dict[Column, Text],
    where(lambda value: len(set(value.values())) == len(value)),
    Words("an object from column to a name, a different one for each"),
]
Dates = Annotated[
    dict[Column, Annotated[str, STRICT, where(DatePattern.of)]],
    Words(
        "an object from column to pattern, such as DD.MM.YYYY or YYYY-MM-DD hh:mm:ss; years of two digits need the "
        "first of the hundred years that they mean, as in DD.MM.YY from 1930"
    ),
]
ANSWERS = (MEASUREMENT, ID, CATEGORIES, YES_NO, LIMITS)
Answers = Annotated[
    dict[
        Column,
        Annotated[str, OneOf(*ANSWERS)]
        | dict[Annotated[str, STRICT], Annotated[float, STRICT, Field(allow_inf_nan=False)] | None]
        | dict[Annotated[str, STRICT], Annotated[str, STRICT] | None],
    ],
    Words(f"an object from column to {', '.join(ANSWERS)} or an object from text to number or text (null: missing)"),
]
_DELTA = Words(f"a number from 0, at most {MOST_DELTA:g}, and far below one over the number of rows")
Statement = Annotated[
    str, STRICT, Field(max_length=2000), PRINTABLE, Words("a text of at most 2000 characters on one line")
]
_FORMAT = Words("csv or parquet (it does not follow from the file's suffix)")
_SEPARATOR = Words("one character of ASCII other than a quotation mark")
_THOUSANDS = Words("nothing, a comma, a point, a space (also one that does not break, narrow or not) or an apostrophe")
EXTERNAL = "external"
_PASSED = ("passes", EXTERNAL)
_SECRET_OPTIONS = ("pass", "pwd", "secret", "token", "key")
_URL = Words("an address without a password, which password_env or password_file name")
_QUERY = Words("one statement that begins with SELECT or WITH")

_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}


def format_of(path: Path) -> str | None:
    """Return the format that follows from a file's suffix, None if none does; both may be followed by .gz."""
    return _SUFFIXES.get(Path(path.name.lower().removesuffix(".gz")).suffix)


@document
class PrivacyBudget(Document):
    """What all private jobs together may spend on a data set, towards adding or removing one person.

    Epsilon bounds how far what is released can move anyone's odds on a person, by the factor e^epsilon: at 23 already
    from one among all people alive to even, so that 64 promises nothing and more says it less plainly. Releasing each
    row in full with probability delta keeps delta. A site can only count the rows of a person in its own file, and the
    promise is over the union of the sites.
    """

    WHAT = "privacy"

    epsilon: BudgetEpsilon
    """Of everything together."""
    delta: Annotated[float, STRICT, Ge(0), Le(MOST_DELTA), _DELTA]
    """Of everything together; it has to be far below one over the number of rows. 0 allows nothing but what is pure."""
    pure_epsilon: Annotated[float, STRICT, Gt(0), Field(allow_inf_nan=False), Words("a number above 0")] | None = None
    """What is kept of it for pure differential privacy: method `pure` of private trees, DPBoost, `dp_local` buckets.
    `null` allows none. What is kept for one part does not pay for the other.
    """
    rows_per_person: Count = 1
    """Most rows that belong to one person, at all sites together. They are protected together. It may be raised
    later, never lowered.
    """
    own_persons: Flag = False
    """The site vouches that nobody of this data set is in another one with a budget. Without that every such data set
    has to name its persons (`id`), which leaves out of it whom another budget has paid for.
    """


@document
class VerticalRules(Document):
    """A party's own limits in vertical jobs. The first four are heuristics of the preset `guarded`."""

    WHAT = "vertical"

    min_rows_per_node: Count = 20
    """No sums over fewer rows, nor over a difference of so few."""
    max_bins: Count = 32
    """Most bins of a feature."""
    max_sums_per_row: Count = 40
    """Most independent sums in which a row's bin of one feature may take part, over all jobs."""
    max_split_bits_per_row: Count = 100
    """Most splits of this site that may divide a row, over all features and jobs: each shows one ordered bit of it.
    The default is what twenty trees give, the most that 40 sums allow, if all splits of five levels are this site's: it
    bounds deep trees, whose large nodes cost few sums.
    """
    min_intersection: Count = 100
    """An alignment of fewer rows is refused."""
    max_size_ratio: Count = 100
    """Another party's set may be so many times larger or smaller."""
    predictions_per_row: Count = 10
    """How often a row may be asked for, over all jobs; being in an evaluation set counts once."""
    predictions_per_job: Count = 100_000
    """Rows that one job may ask for; of a job that stays, different rows over all its attempts."""
    scoring_bits_per_row: Count = 10_000
    """With the consent `scoring`: most distinct bits that a row shows, over all jobs. A model counts with all of this
    site's distinct splits, once for each version of the row's values. The default lets one model of 100 trees of depth
    6 through, which has up to 6,300, and no second one of such size.
    """
    scoring_rows_per_day: Count = 10_000
    """With the consent `scoring`: most rows within a day that are new, or whose model or values have changed."""
    scoring_alignments_per_day: Count = 1
    """With the consent `scoring`: how often within a day a data set may be aligned for scoring."""


@document
class DataProtection(Document):
    """The site's own words for its data-protection officer. They decide nothing and leave the site in no message."""

    WHAT = "data_protection"

    controller: Statement = ""
    """Who is responsible for the data."""
    contact: Statement = ""
    """Whom to ask, such as the data-protection officer."""
    purpose: Statement = ""
    """What the data are used for."""
    legal_basis: Statement = ""
    """On which legal basis."""
    retention: Statement = ""
    """How long data, models and records are kept."""


@document
class IdForm(Document):
    """How the ids of a data set are made equal to those of other parties, who have to say what makes theirs equal.

    Steps in this order.
    """

    WHAT = "id_form"

    nfkc: Flag = False
    """Characters that mean the same become one, such as full-width digits (Unicode's NFKC, in place of NFC)."""
    ignore_case: Flag = False
    """`pat-7` is `PAT-7`."""
    prefix: Annotated[str, STRICT, PRINTABLE] = ""
    """What ids begin with here and not elsewhere, such as `PAT-`; it is taken off where it stands."""
    ignore_padding: Flag = False
    """`0007` is `7`: zeros at the beginning, after the prefix, do not count."""


@document
class DataSet(Document):
    """Where a named data set of this site lies and how it is read; the job knows only the name."""

    WHAT = "the data set"
    IS_JSON = False  # it holds a path, and columns may be called anything

    name: Column
    """The name that jobs use; it stands before the data set."""
    path: FilePath
    """The file; or a folder of snapshots (`veilboost snapshot`), of which the one with the latest time in its name is
    read; or any other folder of Parquet files, or a pattern such as `/data/credit/part-*.parquet`, which are read as
    one table, in the order of their names.
    """
    format: Annotated[str, OneOf("csv", "parquet"), _FORMAT]
    """How the file is read."""
    loader: Annotated[str, STRICT, Field(pattern=r"^\w+(\.\w+)*:\w+$"), Words("package.module:function")] | None = None
    """The site's own function: called with the data set, it returns a pandas DataFrame; the file's format is then
    its own matter.
    """
    separator: Annotated[str, STRICT, Field(pattern=r"^[\t !#-~]$"), _SEPARATOR] = ","
    """Between the columns of a CSV file."""
    missing: tuple[Annotated[str, STRICT], ...] = MISSING_TEXTS
    """Texts that mean "missing", besides an empty one."""
    max_rows: CountOrNone = 0
    """Larger data sets are refused; 0 is no limit. Private jobs do not look at it: their refusal would tell the number
    of rows.
    """
    id: Text | None = None
    """The column that names the rows, for alignment. It is never a feature."""
    id_form: IdForm = IdForm()
    """What makes its ids equal to those of other parties, who write them with other padding, prefixes or case.

    What was released of a row or paid for a person is remembered by the id as it is read. So all data sets of a site
    that have ids have one form, said before the first job; a job is refused after a change.
    """
    names: tuple[Text, ...] = ()
    """Names of the columns, in their order, of a CSV file that has no line of names. Such a file is refused without."""
    aliases: Renamed = field(default_factory=dict)
    """What other parties call a column in vertical jobs; columns without one are f0, f1, ..."""
    privacy: PrivacyBudget | None = None
    """Budget of all private jobs together, towards adding or removing one person. Without one they are all refused;
    with one, all other jobs are (but for the consent `exact_use_of_budgeted_data`).
    """
    encoding: Annotated[str, OneOf(*ENCODINGS)] = "utf-8"
    """Of a CSV file."""
    decimal: Annotated[str, OneOf(*DECIMALS)] = "."
    """Between whole part and fraction of numbers that are written as text."""
    thousands: Annotated[str, OneOf(*THOUSANDS), _THOUSANDS] = ""
    """Between groups of three digits of such numbers."""
    dates: Dates = field(default_factory=dict)
    """Columns of dates, with the pattern of their texts: `YYYY`, `MM` and `DD` (`M`, `D`: one digit or two), then
    perhaps `hh`, `mm`, `ss`, as in `DD.MM.YYYY` or `YYYY-MM-DD hh:mm`. Years of two digits (`YY`) are declared with the
    first of the hundred years that they mean: `DD.MM.YY from 1930` is 1930 to 2029. Dates become the days since
    1970-01-01, the time as a fraction of a day (XGBoost's float32 keeps some three minutes). What a Parquet file
    declares as date or time counts in UTC, whatever the pattern says.
    """
    columns: Answers = field(default_factory=dict)
    """What single columns are, where `veilboost check` asks. `measurement`: numbers, however many different ones.
    `id`: names rows, and is never a feature. `categories`: texts for a public list, even if they look like numbers.
    `yes/no`: yes, y, ja, j, true, 1 become 1, and no, n, nein, false, 0 become 0. `limits`: `<x` becomes half of x (x
    itself where that is not above 0) and `>x` becomes x; other texts are numbers. An object gives texts their numbers,
    `null` is missing: `{"m": 0, "f": 1, "999": null}`; other texts are numbers. An object from text to text says how a
    category is spelt elsewhere, `{"ULM": "Ulm"}`; other texts stay.
    """
    rename: Renamed = field(default_factory=dict)
    """Other names for columns. Jobs, and all other keys, use the new ones."""
    drop_unlabelled: Flag = False
    """Horizontal jobs leave out rows without a label, instead of refusing the data. Private jobs do so anyway; in
    vertical jobs the parties share the rows, and none is left out.
    """
    memory: Annotated[str, OneOf("whole", "passes", "external")] | None = None
    """How many of its rows are held at once. `whole`: all. `passes`: it is read again for each step, some rows or some
    columns at a time, and training holds bins alone. `external`: so, with the bins in files of the run's folder. `null`
    is `passes` for a folder or pattern of Parquet files, else `whole`. The last two are for Parquet, and for kinds of
    job that can; the others say so.
    """
    data_protection: DataProtection = DataProtection()
    """What differs for this data set from what the policy says under `data_protection`."""
    cluster: Cluster | None = None
    """A cluster for trainings on this data set, in the place of the policy's own. Rows that a training evaluates on are
    with those that it trains on: another cluster here ends a horizontal job.
    """

    @property
    def read_otherwise(self) -> dict[str, Answer]:
        """Return the columns whose texts become numbers by what the policy answers of them."""
        return {name: answer for name, answer in self.columns.items() if is_read_by(answer)}

    @property
    def no_features(self) -> set[str]:
        """Return the columns that name rows."""
        return {name for name, answer in self.columns.items() if answer == ID} | ({self.id} if self.id else set())

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files to read now, in the order of their rows. Raises: ConfigurationError: there is none."""
        return files_of(self.path, self.name)

    @property
    def in_passes(self) -> bool:
        """Whether its rows are never all held at once."""
        return self.memory in _PASSED or (self.memory is None and self.loader is None and is_in_parts(self.path))

    def check_may_be_held(self, held_by: str) -> None:
        """Refuse to hold all rows where the policy wants none held. Args: held_by: why. Raises: ConfigurationError."""
        if self.in_passes:
            raise ConfigurationError(
                f"data set {self.name!r} is read in passes, and {held_by}: say that it may. "
                f'Policy key: data_sets.{self.name}.memory ("whole").'
            )

    def check_holds_bins(self, holder: str) -> None:
        """Refuse that the bins of its rows lie in files. Args: holder: who holds them. Raises: ConfigurationError."""
        if self.memory == EXTERNAL:
            raise ConfigurationError(
                f"data set {self.name!r} keeps bins in files, and {holder}: say that it may. "
                f'Policy key: data_sets.{self.name}.memory ("passes").'
            )

    def __post_init__(self) -> None:
        if self.memory in _PASSED and (self.format != "parquet" or self.loader is not None):
            raise ConfigurationError(
                f"data_sets.{self.name}.memory {self.memory} is for Parquet files: write it as such, or leave it out"
            )
        if self.decimal == self.thousands:
            raise ConfigurationError(f"data_sets.{self.name}.thousands must be another character than decimal")
        if self.names and (self.format != "csv" or self.loader is not None or len(set(self.names)) < len(self.names)):
            raise ConfigurationError(
                f"data_sets.{self.name}.names belong to a CSV file without a line of names, and must all be different"
            )
        if both := sorted(set(self.columns) & set(self.dates)):
            raise ConfigurationError(
                f"data_sets.{self.name}.columns answers {both[0]!r}, which dates declares as one: leave one of them out"
            )
        pure = None if self.privacy is None else self.privacy.pure_epsilon
        if self.privacy is not None and pure is not None and pure > self.privacy.epsilon:
            raise ConfigurationError(
                f"data_sets.{self.name}.privacy.pure_epsilon must be at most epsilon, of which it is a part"
            )
        if self.privacy is not None and pure is None and self.privacy.delta == 0:
            raise ConfigurationError(
                f"data_sets.{self.name}.privacy.delta is 0, which allows nothing but what is pure: say with "
                "pure_epsilon how much of epsilon, or give a delta"
            )


@document
class SnapshotSource(Document):
    """Where rows of a data set come from, if from a database: `veilboost snapshot NAME` writes them into a dated file.

    No job reads a database, and none can name one.
    """

    WHAT = "the snapshot"
    IS_JSON = False  # it holds paths

    name: SnapshotName
    """The name of the snapshot, and of its files; it stands before it."""
    url: Annotated[Text, where(lambda value: not has_password(value)), _URL]
    """The database in SQLAlchemy's form, such as `postgresql+psycopg://reader@db.hospital/records`, without a
    password. Its driver has to be installed.
    """
    query: Annotated[str, STRICT, Field(pattern=r"^\s*([Ss][Ee][Ll][Ee][Cc][Tt]|[Ww][Ii][Tt][Hh])\b"), _QUERY]
    """One statement that begins with SELECT or WITH. The transaction only reads, where the database has such (SQLite,
    PostgreSQL, MySQL, MariaDB, Oracle), and is rolled back; give the user no right to write.
    """
    folder: FilePath
    """Where the files go, `NAME-20261122T201500Z.parquet` (UTC), readable for their owner alone. Each name has a folder
    of its own, which data sets name as their path.
    """
    password_env: Text | None = None
    """The environment variable with the password."""
    password_file: FilePath | None = None
    """The file with the password, which nobody but its owner may read (mode 0600)."""
    max_rows: Count = 10_000_000
    """More rows are refused, and nothing is written."""

    def __post_init__(self) -> None:
        if self.password_env is not None and self.password_file is not None:
            raise ConfigurationError(f"snapshots.{self.name} takes its password from two places: leave one out")
