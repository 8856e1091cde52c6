"""Reads columns of CSV and Parquet files, and frames of a site's own loader, into Arrow columns.

Arrow's own messages quote the offending line, so none of them is passed on: an error says which data set, which
column and how many values, never a value.
"""

from __future__ import annotations

import importlib
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.site_policy import DataSet

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf(?:inity)?|nan"
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, ValueError)


class TabularFile:
    """One opened data set: its column names, and columns on demand.

    Privacy: everything stays local; no message holds a value.

    Raises:
        ConfigurationError: The file is missing, unreadable or empty, or has two columns of one name.
    """

    def __init__(self, spec: DataSet) -> None:
        self._spec = spec
        self._table = _call_loader(spec) if spec.loader else None
        try:
            self.column_names = self._read_names()
        except FileNotFoundError:
            raise self._error("has no file at its path") from None
        except _READ_ERRORS as error:
            raise self._error(f"cannot be read as {spec.format} ({type(error).__name__})") from None
        repeated = sorted({name for name in self.column_names if self.column_names.count(name) > 1})
        if repeated:
            raise self._error(f"has more than one column named {repeated[0]!r}")

    def read(self, numeric: list[str], text: list[str]) -> dict[str, pa.ChunkedArray]:
        """Return columns by name; ``text`` columns of a CSV file keep their text exactly as it stands.

        Raises:
            ConfigurationError: Unreadable rows, no rows, or more rows than the policy allows.
        """
        try:
            table = self._read_table(numeric, text)
        except _READ_ERRORS as error:
            raise self._error(
                f"cannot be read as {self._spec.format} ({type(error).__name__}): rows with differing numbers of "
                "fields, or text that is not UTF-8?"
            ) from None
        if table.num_rows == 0:
            raise self._error("has no rows")
        if 0 < self._spec.max_rows < table.num_rows:
            raise self._error("has more rows than this site's max_rows allows")
        return {name: table.column(name) for name in (*numeric, *text)}

    def numbers(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
        """Return a column as numbers; true and false become 1 and 0, missing values NaN.

        Shapes: result: float64[n_rows].

        Raises:
            ConfigurationError: The column holds text or dates.
        """
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return self._numbers_in_text(name, column.to_pandas())
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif not numeric and not pa.types.is_null(kind):
            raise self._error(f"column {name!r} holds {kind}: turn it into numbers, or leave it out of features")
        return np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)

    def _numbers_in_text(self, name: str, column: pd.Series) -> NDArray[np.float64]:
        stripped = column.str.strip()
        present = stripped.notna() & ~stripped.isin(["", *self._spec.missing])
        values = np.full(len(column), np.nan)
        shown = stripped[present].str.lower()
        if len(shown) and shown.isin(["true", "false"]).all():
            values[present] = (shown == "true").to_numpy(np.float64)
            return values
        if not shown.str.fullmatch(_NUMBER).all():
            raise self._error(
                f"column {name!r} holds text that is no number: give the job a public category list for it, name its "
                "missing-value texts in the policy, or leave it out of features. A column that names the rows is the "
                "data set's id in the policy"
            )
        values[present] = shown.astype(np.float64)
        return values

    def _read_names(self) -> list[str]:
        if self._table is not None:
            return list(self._table.column_names)
        if self._spec.format == "parquet":
            names = arrow_parquet.read_schema(self._spec.path).names
            return [name for name in names if not _PANDAS_INDEX.fullmatch(name)]  # row numbers are not data
        with arrow_csv.open_csv(self._spec.path, parse_options=self._parse_options()) as reader:
            return list(reader.schema.names)

    def _read_table(self, numeric: list[str], text: list[str]) -> pa.Table:
        columns = [*numeric, *text]
        if self._table is not None:
            return self._table.select(columns)
        if self._spec.format == "parquet":
            return self._read_parquet(columns)
        types = {name: pa.float64() for name in numeric} | {name: pa.string() for name in text}
        try:
            return self._read_csv(columns, types)
        except pa.ArrowInvalid:
            # Some column is not all numbers: read it all as text, so that true/false work and text can be named.
            return self._read_csv(columns, {name: pa.string() for name in columns})

    def _read_csv(self, columns: list[str], types: dict[str, pa.DataType]) -> pa.Table:
        convert = arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=columns,
            null_values=["", *self._spec.missing],
            strings_can_be_null=False,
        )
        return arrow_csv.read_csv(self._spec.path, parse_options=self._parse_options(), convert_options=convert)

    def _read_parquet(self, columns: list[str]) -> pa.Table:
        with arrow_parquet.ParquetFile(self._spec.path) as file:
            n_rows = file.metadata.num_rows
            if 0 < self._spec.max_rows < n_rows:
                raise self._error("has more rows than this site's max_rows allows")
            return file.read(columns=columns).select(columns)

    def _parse_options(self) -> arrow_csv.ParseOptions:
        return arrow_csv.ParseOptions(delimiter=self._spec.separator)

    def _error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"data set {self._spec.name!r} {what}.")


def _call_loader(spec: DataSet) -> pa.Table:
    """Run the site's own loader; its exceptions may quote data, so only their type is told."""
    module, _, function = str(spec.loader).partition(":")
    try:
        frame = getattr(importlib.import_module(module), function)(spec)
    except Exception as error:  # foreign code: anything may come, and its text must not travel
        raise ConfigurationError(
            f"data set {spec.name!r}: its loader {spec.loader} failed ({type(error).__name__})."
        ) from None
    if not isinstance(frame, pd.DataFrame):
        raise ConfigurationError(f"data set {spec.name!r}: its loader {spec.loader} must return a pandas DataFrame.")
    names = [str(name) for name in frame.columns]
    try:
        columns = [pa.array(frame.iloc[:, position], from_pandas=True) for position in range(len(names))]
    except pa.ArrowException:
        raise ConfigurationError(f"data set {spec.name!r}: its loader returns a column of mixed types.") from None
    return pa.Table.from_arrays(columns, names=names)
