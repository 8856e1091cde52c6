"""Reads columns of CSV and Parquet files, and frames of a site's own loader, into Arrow columns.

Arrow's own messages quote the offending line, so none of them is passed on: an error says which data set, which
column and how many values, never a value. What the rows decide is a ``DataRefusal``, whose reason stays at the site; a
missing file, the header and the declared types of a Parquet file are public.

For differentially private jobs a file is read with ``repair``: what would be refused is repaired row by row, and no row
changes what another one is read as. A row of a CSV file is a line then: a quotation mark that is not closed in its line
would make the lines after it part of one value, so that such a line is skipped (of a value with line breaks each line
counts by itself). So is a line with another number of fields, or of more than 2^18 bytes. A value that is no number is
missing, and so is text that is not UTF-8. What remains, such as a damaged Parquet file, is refused.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import DataSet
from nvflare_plugins.failures import DataRefusal, machine_failure

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf(?:inity)?|nan"
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_LONGEST_LINE = 1 << 18  # bytes; a line has to fit into one of Arrow's blocks, which are four times as long
_READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, ValueError)


class TabularFile:
    """One opened data set: its column names, and columns on demand.

    Privacy: everything stays local; no message holds a value.

    Args:
        repair: repair row by row instead of refusing (see the module).

    Raises:
        ConfigurationError: the file is missing, or has two columns of one name; a ``DataRefusal``: it is unreadable.
    """

    def __init__(self, spec: DataSet, repair: bool = False) -> None:
        self._spec, self._repair = spec, repair
        self._table = _call_loader(spec, repair) if spec.loader else None
        try:
            self.column_names = self._read_names()
        except FileNotFoundError:
            raise self._error(
                f"has no file at its path: mend the path in the policy. Policy key: data_sets.{spec.name}.path"
            ) from None
        except _READ_ERRORS as error:
            self._refuse_machine(error)
            raise self._refusal(f"cannot be read as {spec.format} ({type(error).__name__})") from None
        repeated = sorted({name for name in self.column_names if self.column_names.count(name) > 1})
        if repeated:
            raise self._error(f"has more than one column named {repeated[0]!r}")

    def read(self, numeric: list[str], text: list[str]) -> dict[str, pa.ChunkedArray]:
        """Return columns by name; ``text`` columns of a CSV file keep their text exactly as it stands.

        Raises:
            DataRefusal: unreadable rows; unless repairing, no rows, or more rows than the policy allows.
        """
        try:
            table = self._read_table(numeric, text)
        except _READ_ERRORS as error:
            self._refuse_machine(error)
            raise self._refusal(
                f"cannot be read as {self._spec.format} ({type(error).__name__}): rows with differing numbers of "
                "fields, or text that is not UTF-8?"
            ) from None
        if not self._repair:
            if table.num_rows == 0:
                raise self._refusal("has no rows")
            self._check_length(table.num_rows)
        return {name: self._decoded(table.column(name)) for name in (*numeric, *text)}

    def numbers(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
        """Return a column as numbers; true and false become 1 and 0, missing values NaN.

        Shapes: result: float64[n_rows].

        Raises:
            ConfigurationError: the file declares another type, such as dates; a ``DataRefusal``: its values are text.
        """
        if pa.types.is_dictionary(column.type) and not _is_text(column.type.value_type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if _is_text(kind) or pa.types.is_dictionary(kind):
            if self._repair:
                return _values_of_texts(column, self._number)
            if pa.types.is_dictionary(kind):
                column = column.cast(kind.value_type)
            return self._numbers_in_text(name, column.to_pandas())
        numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif not numeric and not pa.types.is_null(kind):
            what = f"column {name!r} holds {kind}: turn it into numbers, or leave it out of features"
            # The type of a frame may follow from its values; a file declares it.
            raise self._error(what) if self._table is None else self._refusal(what)
        return np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)

    def _number(self, text: str) -> float:
        """Return one text as a number, true and false as 1 and 0, anything else as missing."""
        shown = text.strip()
        if shown in self._spec.missing:
            return np.nan
        shown = shown.lower()
        if shown in ("true", "false"):
            return float(shown == "true")
        return float(shown) if re.fullmatch(_NUMBER, shown, re.ASCII) else np.nan

    def _decoded(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return bytes, as which text is read for repair, as text; what is not UTF-8 becomes text in no list."""
        if not pa.types.is_binary(column.type):
            return column
        encoded = column.combine_chunks().dictionary_encode()
        texts = [item.decode("utf-8", "backslashreplace") for item in encoded.dictionary.to_pylist()]
        # Two byte strings may become one text: no dictionary then.
        return pa.chunked_array([pa.array(texts, pa.string()).take(encoded.indices)], pa.string())

    def _numbers_in_text(self, name: str, column: pd.Series) -> NDArray[np.float64]:
        stripped = column.str.strip()
        present = stripped.notna() & ~stripped.isin(["", *self._spec.missing])
        values = np.full(len(column), np.nan)
        shown = stripped[present].str.lower()
        if len(shown) and shown.isin(["true", "false"]).all():
            values[present] = (shown == "true").to_numpy(np.float64)
            return values
        if not shown.str.fullmatch(_NUMBER).all():
            raise self._refusal(
                f"column {name!r} holds text that is no number: give the job a public category list for it (a label: "
                "label_classes), name its missing-value texts in the policy, or leave it out of features. A column "
                "that names the rows is the data set's id in the policy"
            )
        values[present] = shown.astype(np.float64)
        return values

    def _read_names(self) -> list[str]:
        if self._table is not None:
            return list(self._table.column_names)
        if self._spec.format == "parquet":
            names = arrow_parquet.read_schema(self._spec.path).names
            return [name for name in names if not _PANDAS_INDEX.fullmatch(name)]  # row numbers are not data
        # What rows follow the header does not matter here: Arrow reads some of them.
        header = _first_line(self._spec.path)
        source = io.BytesIO(header) if self._is_closed(header) else self._spec.path
        with arrow_csv.open_csv(source, parse_options=self._parse_options(skip_invalid=True)) as reader:
            return list(reader.schema.names)

    def _read_table(self, numeric: list[str], text: list[str]) -> pa.Table:
        columns = [*numeric, *text]
        if self._table is not None:
            return self._table.select(columns)
        if self._spec.format == "parquet":
            return self._read_parquet(columns)
        as_text = pa.binary() if self._repair else pa.string()  # bytes need not be UTF-8
        types = {name: pa.float64() for name in numeric} | dict.fromkeys(text, as_text)
        try:
            if self._repair and self._has_missing_number():
                raise pa.ArrowInvalid("Arrow compares such texts before it strips them, and _number afterwards")
            return self._read_csv(columns, types)
        except pa.ArrowInvalid:
            # Some column is not all numbers: read it all as text, so that true/false work and text can be named.
            return self._read_csv(columns, dict.fromkeys(columns, as_text))

    def _has_missing_number(self) -> bool:
        """Return whether a number stands for missing, as -999 does in some files."""
        return any(not np.isnan(float(t)) for t in self._spec.missing if re.fullmatch(_NUMBER, t.lower(), re.ASCII))

    def _read_csv(self, columns: list[str], types: dict[str, pa.DataType]) -> pa.Table:
        convert = arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=columns,
            null_values=["", *self._spec.missing],
            strings_can_be_null=False,
        )
        parse = self._parse_options(self._repair)
        source = io.BytesIO(self._lines_by_themselves()) if self._repair else self._spec.path
        return arrow_csv.read_csv(source, parse_options=parse, convert_options=convert)

    def _lines_by_themselves(self) -> bytes:
        """Return the file without lines in which Arrow would not find the end of the line.

        Arrow takes a quotation mark for one that opens a value only where a value begins.
        """
        with pa.input_stream(str(self._spec.path)) as stream:
            header, *lines = stream.read().splitlines(keepends=True) or [b""]
        return b"".join([header, *(line for line in lines if len(line) <= _LONGEST_LINE and self._is_closed(line))])

    def _is_closed(self, line: bytes) -> bool:
        """Tell whether every value that a quotation mark opens ends in the same line."""
        if b'"' not in line:
            return True
        separator = re.escape(self._spec.separator.encode())
        value = rb'(?:"(?:[^"\r\n]|"")*"|(?!")[^%b\r\n]*)' % separator
        return re.fullmatch(rb"%b(?:%b%b)*[\r\n]*" % (value, separator, value), line) is not None

    def _read_parquet(self, columns: list[str]) -> pa.Table:
        with arrow_parquet.ParquetFile(self._spec.path) as file:
            if not self._repair:
                self._check_length(file.metadata.num_rows)
            return file.read(columns=columns).select(columns)

    def _parse_options(self, skip_invalid: bool) -> arrow_csv.ParseOptions:
        skip = (lambda row: "skip") if skip_invalid else None
        return arrow_csv.ParseOptions(delimiter=self._spec.separator, invalid_row_handler=skip)

    def _check_length(self, n_rows: int) -> None:
        if 0 < self._spec.max_rows < n_rows:
            raise self._refusal("has more rows than this site's max_rows allows")

    def _refuse_machine(self, error: Exception) -> None:
        known = machine_failure(error)
        if known is not None:
            raise self._error(f"cannot be read: {known}") from None

    def _error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"data set {self._spec.name!r} {what}.")

    def _refusal(self, what: str) -> DataRefusal:
        return DataRefusal(f"data set {self._spec.name!r} {what}.")


def _first_line(path: Path) -> bytes:
    with pa.input_stream(str(path)) as stream:
        head = b""
        while len(lines := head.splitlines(keepends=True)) < 2 and (more := stream.read(_LONGEST_LINE)):
            head += more
    return lines[0] if lines else b""


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _values_of_texts(column: pa.ChunkedArray, number: Callable[[str], float]) -> NDArray[np.float64]:
    """Return the number of each text, each by itself. Shapes: result: float64[n_rows]; NaN is missing."""
    encoded = column.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    values = np.array([*(np.nan if text is None else number(text) for text in texts), np.nan])
    result: NDArray[np.float64] = values[
        encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False).astype(np.int64)
    ]
    return result


def _call_loader(spec: DataSet, repair: bool) -> pa.Table:
    """Run the site's own loader; its exceptions may quote data, so only their type is told."""
    module, _, function = str(spec.loader).partition(":")
    try:
        frame = getattr(importlib.import_module(module), function)(spec)
    except Exception as error:  # foreign code: anything may come, and its text must not travel
        what = f"its loader {spec.loader} failed ({type(error).__name__})"
        raise DataRefusal(f"data set {spec.name!r}: {what}.") from None
    if not isinstance(frame, pd.DataFrame):
        raise ConfigurationError(f"data set {spec.name!r}: its loader {spec.loader} must return a pandas DataFrame.")
    names = [str(name) for name in frame.columns]
    try:
        columns = [_array_of(frame.iloc[:, position], repair) for position in range(len(names))]
    except pa.ArrowException:
        raise DataRefusal(f"data set {spec.name!r}: its loader returns a column of mixed types.") from None
    return pa.Table.from_arrays(columns, names=names)


def _array_of(column: pd.Series, repair: bool) -> pa.Array | pa.ChunkedArray:
    if repair and column.dtype == object:  # Arrow would guess one type from all values
        absent = column.isna()
        return pa.array([None if gone else str(value) for value, gone in zip(column, absent, strict=True)], pa.string())
    return pa.array(column, from_pandas=True)
