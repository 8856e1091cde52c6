"""Tables of simulated sites: files with a reader for each, and data frames, which are written for their site alone.

And what the tables of all sites have in common, and what of them no reader makes equal.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.checks import shown
from nvflare_plugins.base.files import make_folder, write_private_table
from nvflare_plugins.base.formatting import near_name
from nvflare_plugins.cli.check import sentence
from nvflare_plugins.cli.demo import task_of
from nvflare_plugins.data.declaration import ENCODINGS, DataSet, format_of
from nvflare_plugins.data.labels import Label, columns_of
from nvflare_plugins.survey.agreement import SiteDraft
from nvflare_plugins.survey.columns import Column, Finding, IdShape, Use, look_at
from nvflare_plugins.survey.raw_file import RawFile, read_raw
from nvflare_plugins.survey.survey import Survey, survey

_SITE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}")
_TAKEN = ("server", "local", "startup", "simulate_job", "admin", "relay")


@dataclass(frozen=True, slots=True)
class Reader:
    """A file, or a data frame to be written, and how a site reads it.

    Attributes:
        options: keys of the policy's data set (``DataSet``).
    """

    path: Any
    options: Mapping[str, Any] = field(default_factory=dict)


def read(
    path: str | Path | pd.DataFrame,
    *,
    separator: str = ",",
    encoding: str = "utf-8",
    decimal: str = ".",
    thousands: str = "",
    missing: list[str] | None = None,
    dates: dict[str, str] | None = None,
    columns: dict[str, str | dict[str, float | str | None]] | None = None,
    rename: dict[str, str] | None = None,
    drop_unlabelled: bool = False,
    format: str | None = None,
    names: list[str] | None = None,
    id: str | None = None,
    id_form: dict[str, str | bool] | None = None,
    memory: str | None = None,
) -> Reader:
    """Say how one site's file is read; nothing is opened before the federation is checked.

    Args:
        path: CSV or Parquet, also with .gz; or a data frame.
        separator: between the columns of a CSV file, such as ";" or a tab.
        encoding: of a CSV file; Python's names such as cp1252 are understood.
        decimal: between whole part and fraction of numbers that are text: "." or ",".
        thousands: between groups of three digits of such numbers.
        missing: texts that mean "missing" besides the usual ones.
        dates: column -> pattern, such as DD.MM.YYYY; dates become days since 1970-01-01.
        columns: column -> measurement, id, categories, yes/no, limits, or an object from text to number or spelling.
        rename: name in the file -> name that all sites share.
        drop_unlabelled: leave rows without a label out.
        format: csv or parquet, where the suffix does not say it.
        names: of the columns, for a CSV file without a line of names.
        id: column that names its rows, which is no feature.
        id_form: what makes its ids equal to other sites', such as {"ignore_case": True} (jobs/REFERENCE.md).
        memory: whole, passes or external: how many rows of a Parquet file are held at once.
    """
    given = {"separator": separator, "encoding": _encoding(encoding), "decimal": decimal, "thousands": thousands}
    optional: dict[str, Any] = {
        "missing": missing,
        "dates": dates,
        "columns": columns,
        "rename": rename,
        "format": format,
    }
    optional |= {"names": names, "id": id, "id_form": id_form, "memory": memory}
    defaults = {"separator": ",", "encoding": "utf-8", "decimal": ".", "thousands": ""}
    options: dict[str, Any] = {name: value for name, value in given.items() if value != defaults[name]}
    options |= {name: value for name, value in optional.items() if value is not None}
    source = Path(path) if isinstance(path, (str, Path)) else path
    return Reader(source, {**options, **({"drop_unlabelled": True} if drop_unlabelled else {})})


Source: TypeAlias = "pd.DataFrame | str | Path | Reader"


def _encoding(name: str) -> str:
    """Return the policy's name of an encoding that Python knows by several."""

    def canonical(one: str) -> str:
        try:
            return codecs.lookup(one).name
        except LookupError:
            return one

    return next((one for one in ENCODINGS if canonical(one) == canonical(name)), name)


def checked_names(names: list[object]) -> list[str]:
    """Return the names of sites, in their order.

    Raises:
        ConfigurationError: one that FLARE would not take, or that could be two sites' at once.
    """
    if not names:
        raise ConfigurationError("a federation needs sites: give a dictionary from a site's name to its table")
    for name in names:
        if not isinstance(name, str) or not _SITE.fullmatch(name) or name.lower() in _TAKEN:
            raise ConfigurationError(
                f"{shown(name)} is no name for a simulated site. Remedy: at most 63 letters, digits and _ - of ASCII, "
                f"and none of {', '.join(_TAKEN)}"
            )
    folded = [str(name).lower() for name in names]
    for name, one in zip(names, folded, strict=True):
        if folded.count(one) > 1:
            raise ConfigurationError(f"the site {name!r} is there twice (upper case does not tell sites apart)")
    return [str(name) for name in names]


def reader_of(site: str, source: object, folder: Path, name: str) -> Reader:
    """Return how a site's table is read; a data frame is written below a folder first, for its owner alone.

    Raises:
        ConfigurationError: there is no such file, or it is no table.
    """
    if isinstance(source, (str, Path)):
        source = read(source)
    options: Mapping[str, Any] = {}
    if isinstance(source, Reader) and not isinstance(source.path, Path):
        options, source = source.options, source.path
    if isinstance(source, Reader):
        path = source.path.expanduser().absolute()
        if not path.exists():
            raise ConfigurationError(f"{site}: there is no file {path}: mend its path")
        return Reader(path, {"format": "csv", **_known_format(path), **source.options})
    frame = _frame(site, source)
    make_folder(folder / site)
    try:
        path = write_private_table(folder / site / f"{name}.parquet", frame)
        dates = {one: "YYYY-MM-DD" for one in frame.columns if frame[one].dtype.kind == "M"}  # whatever they say
        return Reader(path, {"format": "parquet", **({"dates": dates} if dates else {}), **options})
    except Exception as error:  # pyarrow's and pandas' own, whose texts quote values
        raise ConfigurationError(
            f"{site}: its data frame cannot be written as a table ({type(error).__name__}). Remedy: columns of one "
            "type each: numbers, texts, dates or truth values"
        ) from None


def _known_format(path: Path) -> dict[str, str]:
    found = "parquet" if path.is_dir() else format_of(path)
    return {} if found is None else {"format": found}


def _frame(site: str, source: object) -> pd.DataFrame:
    if isinstance(source, pd.DataFrame):
        frame = source.copy(deep=False)
    elif hasattr(source, "__arrow_c_stream__") and not isinstance(source, pd.Series):  # polars, Arrow
        frame = pa.table(source).to_pandas()
    else:
        raise ConfigurationError(
            f"{site}: {type(source).__name__} is no table. Remedy: a data frame, a path, or vb.read(path, ...)"
        )
    frame.columns = [str(name) for name in frame.columns]
    if frame.columns.has_duplicates:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise ConfigurationError(f"{site}: column {shown(twice)} is there twice: name its columns apart")
    for name in frame.columns:
        if frame[name].dtype == object:
            frame[name] = _plain_column(site, frame[name])
        elif isinstance(frame[name].dtype, pd.CategoricalDtype):
            frame[name] = frame[name].astype(object).map(str, na_action="ignore")
    return frame


def _plain_column(site: str, column: pd.Series) -> pd.Series:
    values = column.dropna()
    if any(isinstance(value, (list, dict, set, tuple, bytes)) for value in values):
        raise ConfigurationError(f"{site}: column {column.name!r} holds lists or other objects: give numbers or texts")
    if len(values) and all(isinstance(value, date) for value in values):
        return pd.to_datetime(column)
    if not all(isinstance(value, str) for value in values):
        return column.map(str, na_action="ignore")
    return column


_LEFT_OUT = ("dates",)  # columns of no feature, which stop nothing; a job that names one is refused by its check
_SAYS_NOTHING = ("constant", "no_values")


@dataclass(frozen=True, slots=True)
class SiteTable:
    """One site's table as it stands. Attributes: names: of its columns, as jobs know them."""

    raw: RawFile
    found: Survey
    options: Mapping[str, Any]

    @classmethod
    def of(cls, spec: DataSet, label: Label, options: Mapping[str, Any]) -> SiteTable:
        """Look at a site's whole table. Args: options: keys of the policy's data set that say how it is read."""
        raw = read_raw(spec)
        has_label = set(columns_of(label)) <= set(raw.names)
        return cls(raw, survey(spec, Use(label=label if has_label else None)), options)

    @property
    def names(self) -> tuple[str, ...]:
        return self.raw.names

    @property
    def says_nothing(self) -> set[str]:
        """Columns of one value or none, which may say something at other sites."""
        return {str(one.column) for one in self.found.findings if one.kind in _SAYS_NOTHING}

    @property
    def problems(self) -> list[str]:
        """What stops a job or misleads it, each with how ``vb.read`` says it where it can."""
        return [hinted(one) for one in self.found.findings if stops(one)]

    def values(self, name: str) -> list[Any]:
        """Return the different values of a column that a label may have: texts, or numbers; missing ones left out."""
        raw = self.raw.columns[self.names.index(name)]
        facts = look_at(Column.of(name, raw, self.raw.spec), raw, self.raw.spec, is_chosen=True)
        if facts.values is None:
            return Column.of(name, raw, self.raw.spec).present(self.raw.spec.missing)
        found = np.unique(facts.values[np.isfinite(facts.values)]).tolist()
        return [int(value) if float(value).is_integer() else value for value in found]


def stops(finding: Finding) -> bool:
    """Return whether a finding stops a training whose features follow from the tables."""
    return finding.is_problem and finding.kind not in _LEFT_OUT


def hinted(finding: Finding) -> str:
    """Return a finding in words, with what ``vb.read`` takes to read the file otherwise."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in finding.options.items())
    return sentence(finding) + (f". In Python: vb.read(path, {arguments})" if arguments else "")


def drafts_of(
    tables: Mapping[str, SiteTable], label: Label, special: Sequence[str], wanted: Sequence[str] | None
) -> dict[str, SiteDraft]:
    """Return what every site's table suggests, to be united (``survey.agreement``).

    Args:
        special: columns that are no features.
        wanted: the features, where the caller names them; dates among them are numbers then.
    """
    drafted = {name for table in tables.values() for name in table.found.draft.features}
    with_texts = {name for table in tables.values() for name in table.found.draft.categories}

    def of(table: SiteTable) -> SiteDraft:
        draft = table.found.draft
        silent = [name for name in table.names if name in table.says_nothing & drafted]
        known = dict.fromkeys([*draft.features, *silent, *(() if wanted is None else draft.dates)])
        names = [name for name in known if name not in special and (wanted is None or name in wanted)]
        texts = {name: list(draft.categories.get(name, ())) for name in names if name in with_texts}
        texts = {name: some for name, some in texts.items() if some or name in silent}
        numbers: dict[str, tuple[float, float] | None] = dict.fromkeys(name for name in names if name not in texts)
        classes = None if draft.label_classes is None else list(draft.label_classes)
        options = {key: copy.deepcopy(value) for key, value in table.options.items()}
        return SiteDraft(label, [*names, *columns_of(label)], numbers, texts, [], {}, classes, options)

    return {site: of(table) for site, table in tables.items()}


def id_drafts(tables: Mapping[str, SiteTable], name: str) -> dict[str, SiteDraft]:
    """Return how every site writes its ids, to be united."""
    shapes = {site: table.found.draft.id_forms.get(name) for site, table in tables.items()}

    def of(site: str, shape: IdShape) -> SiteDraft:
        return SiteDraft(None, [name], {}, {}, [], {name: asdict(shape)}, None, copy.deepcopy({**tables[site].options}))

    return {site: of(site, shape) for site, shape in shapes.items() if shape is not None}


def lacking(tables: Mapping[str, SiteTable], features: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (site, what to do) for each feature that a site has no column for."""
    for name in features:
        owners = ", ".join(site for site, table in tables.items() if name in table.names)
        for site, table in tables.items():
            if table.names and name not in table.names:
                hint = near_name(name, list(table.names))
                yield (
                    site,
                    f"there is no column {name!r}, which {owners or 'features'} has{hint or '.'} Remedy: "
                    f"vb.read(path, rename={{'NAME HERE': {name!r}}}), or name the common columns in features=[...]",
                )


def task(tables: Mapping[str, SiteTable], label: Label) -> tuple[dict[str, Any], list[str | int] | None, str]:
    """Choose an objective by the label.

    Returns:
        XGBoost parameters, the label's classes (None where they are 0, 1, ... or numbers), and a metric.

    Raises:
        ConfigurationError: a label of one value, or of too many texts.
    """
    if not isinstance(label, str):
        return {"objective": "survival:aft"}, None, "aft-nloglik"
    found = task_of(pd.Series(list(dict.fromkeys(one for table in tables.values() for one in table.values(label)))))
    return found.params, found.label_classes, found.federated_metric
