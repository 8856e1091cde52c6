"""Rows of a file on their way to scores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.base.formatting import printable
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.labels import label_of_words
from nvflare_plugins.data.table import BLOCK_VALUES, Table, load_table, positions_of
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.data.text_values import NumberFormat
from nvflare_plugins.pages.run_record import DataFacts, RunRecord
from nvflare_plugins.scoring.columns import COMMAND, UNKNOWN, Remedies, check_names, matrix_of
from nvflare_plugins.scoring.model import Feature, ScoringError
from nvflare_plugins.site.policy_values import is_private

# Rows to score, read from a file by the reader of the training files.


_COLUMN_PASSES = 64
"""As many columns are read at once as that makes: of few, one at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Shapes: values: float32[n_rows, n_features], as the model was trained on them; ids: [n_rows], or None.

    Attributes:
        unknown: column -> its texts that are none of the model's categories, with how many rows have each.
    """

    values: NDArray[np.float32]
    ids: pd.Series | None
    unknown: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return len(self.values)

    def columns(self) -> Iterator[Rows]:
        """Yield the same rows with one feature after the other."""
        for place in range(self.values.shape[1]):
            yield Rows(self.values[:, place : place + 1], None, self.unknown)

    def blocks(self) -> Iterator[Rows]:
        """Yield rows with all features, some at a time."""
        yield self


class RowReader:
    """The rows of a data set for a model, read from its file whenever they are asked for.

    What is refused is counted in the rows that are looked at.

    Args:
        spec: where the file lies and how it is read; its name stands in messages. There may be no rows in it.
        id_column: kept as it stands; never a feature.
        ignored: columns that are no features.
        unknown_is_missing: categories outside their list count as missing, and are counted, instead of being refused.
        remedies: what helps, as the command says it that reads the rows.

    Attributes:
        n_rows: of a Parquet data set.

    Raises:
        ScoringError: the file cannot be read, or its columns or values are not the model's; whatever reads, too.
    """

    def __init__(
        self,
        spec: DataSet,
        features: Sequence[Feature],
        id_column: str | None = None,
        ignored: Sequence[str] = (),
        *,
        unknown_is_missing: bool = False,
        remedies: Remedies = COMMAND,
    ) -> None:
        self._features, self._id_column = features, id_column
        self._unknown_is_missing, self._remedies = unknown_is_missing, remedies
        with _for_who_has_the_file(spec, remedies):
            self._spec = _of_columns_there(spec)
            self._file = TabularFile(self._spec)
            present = _without_others(spec.name, self._file.column_names, id_column, ignored, features)
            ids = self._spec.no_features - {feature.name for feature in features}
            check_names(spec.name, features, [name for name in present if name not in ids], remedies)
        self.n_rows = self._file.n_rows

    def read(self) -> Rows:
        """Return all rows at once."""
        with _for_who_has_the_file(self._spec, self._remedies):
            return self._read(self._features)

    def columns(self) -> Iterator[Rows]:
        """Yield all rows with one feature after the other."""
        step = max(1, len(self._features) // _COLUMN_PASSES)
        for first in range(0, len(self._features), step):
            with _for_who_has_the_file(self._spec, self._remedies):
                yield from self._read(self._features[first : first + step]).columns()

    def blocks(self) -> Iterator[Rows]:
        """Yield rows some at a time, if the data set is one that is read in passes; else all at once."""
        with _for_who_has_the_file(self._spec, self._remedies):
            if not self._spec.in_passes or not self.n_rows:
                yield self._read(self._features)
                return
            most_rows = max(1, BLOCK_VALUES // max(1, len(self._features)))
            for columns in self._file.batches(*self._by_kind(self._features), most_rows):
                yield self._rows(columns, self._features)

    def _read(self, features: Sequence[Feature]) -> Rows:
        return self._rows(self._file.read(*self._by_kind(features), may_be_empty=True), features)

    def _by_kind(self, features: Sequence[Feature]) -> tuple[list[str], list[str]]:
        """Return what is read as numbers, and what as text."""
        text = [feature.name for feature in features if feature.categories is not None]
        ids = [] if self._id_column is None else [self._id_column]
        return [feature.name for feature in features if feature.categories is None], [*text, *ids]

    def _rows(self, read: Mapping[str, pa.ChunkedArray], features: Sequence[Feature]) -> Rows:
        """Return what was read as the model takes it. Raises: ScoringError: values are not the model's."""
        spec, columns = self._spec, dict(read)
        for name in set(self._by_kind(features)[0]) & {*spec.dates, *spec.read_otherwise} & set(columns):
            columns[name] = pa.chunked_array([self._file.numbers(name, columns[name])])
        values = matrix_of(
            spec.name,
            features,
            columns,
            spec.missing,
            unknown_is_missing=self._unknown_is_missing,
            remedies=self._remedies,
            number_format=NumberFormat(spec.decimal, spec.thousands),
        )
        ids = None if self._id_column is None else _ids(columns[self._id_column])
        return Rows(values, ids, _unknown(features, columns, spec.missing) if self._unknown_is_missing else {})


def names_in(spec: DataSet, remedies: Remedies = COMMAND) -> list[str]:
    """Return the columns of a file under the names that the data set gives them. Raises: as ``RowReader``."""
    with _for_who_has_the_file(spec, remedies):
        return TabularFile(_of_columns_there(spec)).column_names


@contextmanager
def _for_who_has_the_file(spec: DataSet, remedies: Remedies) -> Iterator[None]:
    """Say what a reader's refusal says to others, and why: who asks has the file."""
    try:
        yield
    except ScoringError:
        raise
    except ConfigurationError as error:
        reason = error.reason if isinstance(error, DataRefusal) else str(error)
        # A key of the policy does not help who has only a file.
        reason = re.sub(r"\.?\s*Policy keys?: .*", "", reason, flags=re.DOTALL).removeprefix(f"data set {spec.name!r} ")
        raise ScoringError(f"{spec.name} {reason.rstrip('.')}. {remedies.reading}") from None


def _ids(column: pa.ChunkedArray) -> pd.Series:
    """Return them as Arrow holds them: whole numbers with gaps would become others in pandas."""
    if pa.types.is_dictionary(column.type):  # which pandas would not read again from a file of Parquet
        column = column.cast(column.type.value_type)
    return column.to_pandas(types_mapper=pd.ArrowDtype)


def _unknown(
    features: Sequence[Feature], columns: Mapping[str, pa.ChunkedArray], missing: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Count the texts of each column that are none of the model's categories."""
    found = {}
    for feature in features:
        if feature.categories is None:
            continue
        column = columns[feature.name]
        is_unknown = positions_of(column, feature.categories, missing) == UNKNOWN
        if is_unknown.any():
            counts = column.filter(pa.array(is_unknown)).value_counts().to_pylist()
            found[feature.name] = {str(one["values"]): int(one["counts"]) for one in counts}
    return found


def _of_columns_there(spec: DataSet) -> DataSet:
    """Return the data set without what it says of columns that are not in the file: rows to score have no label."""
    in_file = TabularFile(replace(spec, rename={}, dates={}, columns={})).column_names
    rename = {name: called for name, called in spec.rename.items() if name in in_file}
    names = [rename.get(name, name) for name in in_file]
    dates = {name: spec.dates[name] for name in spec.dates if name in names}
    return replace(spec, rename=rename, dates=dates, columns={n: a for n, a in spec.columns.items() if n in names})


def _without_others(
    name: str, present: Sequence[str], id_column: str | None, ignored: Sequence[str], features: Sequence[Feature]
) -> list[str]:
    """Return the columns without those that the command line says are no features."""
    known = {feature.name for feature in features}
    for option, columns in (("--id", [] if id_column is None else [id_column]), ("--ignore", ignored)):
        for column in columns:
            shown = printable(repr(column))
            if column not in present:
                raise ScoringError(f"{option} {shown}: {name} has no such column")
            if column in known:
                raise ScoringError(f"{option} {shown} is a feature of the model: leave the option out")
    return [column for column in present if column != id_column and column not in ignored]


# The rows of a finished run, read anew from a site's data sets as the run's record says that they were read then.


def load_again(spec: DataSet, facts: DataFacts, record: RunRecord, *, takes_passes: bool = False) -> Table:
    """Return the rows of a data set with a run's columns, lists and label.

    Args:
        takes_passes: the caller does without ``Table.features`` where the policy wants no data set held.

    Raises:
        ConfigurationError: they do not fit any more; the reason is this site's own, and nobody else reads it.
    """
    try:
        return load_table(
            spec,
            label=label_of_words(facts.label),
            weight=facts.weight or None,
            features=facts.columns,
            categories=facts.categories,
            label_classes=facts.label_classes or None,
            unknown_is_missing=bool(record.settings.get("unknown_category_is_missing")),
            may_lack_rows=True,
            repair=is_private(record.profile),
            takes_passes=takes_passes,
            held_by="whoever attacks or judges a model at the site holds all rows at once",
        )
    except DataRefusal as error:
        raise ConfigurationError(error.reason) from None
