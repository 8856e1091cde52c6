"""Columns of CSV and Parquet files, and of a site's own loader, as Arrow columns."""

from __future__ import annotations

import codecs
import csv
import functools
import importlib
import io
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal, machine_failure
from nvflare_plugins.data import declaration
from nvflare_plugins.data.parquet_parts import ParquetParts
from nvflare_plugins.data.text_values import DatePattern, NumberFormat, days_in_frame, fitting_dates, fitting_formats

if TYPE_CHECKING:
    import pandas as pd

# Runs a site's own loader, and makes Arrow columns of the frame that it returns.


_NO_ARRAY = (pa.ArrowException, UnicodeError, OverflowError, TypeError)


def table_of_loader(spec: declaration.DataSet, *, repair: bool) -> pa.Table:
    """Run the site's own loader; its exceptions may quote data, so only their type is told."""
    import pandas as pd

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
        columns = [_array_of(frame.iloc[:, position], repair=repair) for position in range(len(names))]
    except _NO_ARRAY:
        raise DataRefusal(f"data set {spec.name!r}: its loader returns a column of mixed types.") from None
    return pa.Table.from_arrays(columns, names=names)


def _array_of(column: pd.Series, *, repair: bool) -> pa.Array | pa.ChunkedArray:
    if repair:  # Arrow would guess one type from all values
        return column_of_frame(column)
    import pandas as pd

    # Of some mixtures, such as numpy's dates and half floats, Arrow dies instead of refusing them.
    if column.dtype == object and pd.api.types.infer_dtype(column, skipna=True) == "mixed":
        raise TypeError("mixed")
    return pa.array(column, from_pandas=True)


def column_of_frame(column: pd.Series) -> pa.ChunkedArray:
    """Return a frame's column whatever it holds: one of mixed types as text, each value by itself."""
    if column.dtype == object:
        absent = column.isna()
        # Half of a pair of surrogates, which Arrow does not take, would end the reading of all rows.
        texts = [
            None if gone else str(value).encode(errors="backslashreplace").decode()
            for value, gone in zip(column, absent, strict=True)
        ]
        return pa.chunked_array([pa.array(texts, pa.string())])
    try:
        array = pa.array(column, from_pandas=True)
    except _NO_ARRAY:  # categories of mixed types
        return column_of_frame(column.astype(object))
    if isinstance(array.type, pa.BaseExtensionType):  # periods, intervals
        return column_of_frame(column.astype(object))
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


# Reads columns of CSV and Parquet files, and frames of a site's own loader, into Arrow columns.
#
# Arrow's own messages quote the offending line, so none of them is passed on: an error says which data set, which
# column and how many values, never a value. What the rows decide is a ``DataRefusal``, whose reason stays at the site;
# a missing file, the header and the declared types of a Parquet file are public.
#
# For differentially private jobs a file is read with ``repair``: what would be refused is repaired row by row, and no
# row changes what another one is read as. A row of a CSV file is a line then: a quotation mark that is not closed in
# its line would make the lines after it part of one value, so that such a line is skipped (of a value with line breaks
# each line counts by itself). So is a line with another number of fields, or of more than 2^18 bytes. A value that is
# no number, or no date of its column's pattern, is missing, and so is text that is not in the file's encoding. What
# remains, such as a damaged Parquet file, is refused.
#
# How texts are read (``DataSet``: encoding, separator, decimal, thousands, missing, dates) is the policy's matter,
# never guessed: a text that does not follow it is refused, with the key that would read it.


_log = logging.getLogger(__name__)
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
_LONGEST_LINE = 1 << 18  # bytes; a line has to fit into one of Arrow's blocks, which are four times as long
_READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, ValueError)
_CHUNK_BYTES = 1 << 20
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_OTHER_SEPARATORS = ";\t|,"
_BOOLEANS = ("true", "false")
_DAY_US = 86_400_000_000


class TabularFile:
    """One opened data set: its column names, and columns on demand.

    Privacy: everything stays local; no message holds a value.

    Args:
        repair: repair row by row instead of refusing (see the module).
        parts: the files of a Parquet data set, where they are opened already.

    Raises:
        ConfigurationError: the file is missing, or has two columns of one name; a ``DataRefusal``: it is unreadable.
    """

    def __init__(self, spec: declaration.DataSet, *, repair: bool = False, parts: ParquetParts | None = None) -> None:
        self._spec, self._repair = spec, repair
        self._format = NumberFormat(spec.decimal, spec.thousands)
        self._table = table_of_loader(spec, repair=repair) if spec.loader else None
        self._parts = parts
        try:
            # One look at the files for all that is read of them: the next snapshot may come meanwhile.
            if self._parts is None and not spec.loader and spec.format == "parquet":
                self._parts = ParquetParts(spec, may_be_empty=repair)
            in_file = self._read_names()
        except FileNotFoundError:
            raise self._error(f"has no file at its path: mend the path in the policy. {self._key('path')}") from None
        except _READ_ERRORS as error:
            self._refuse_machine(error)
            raise self._refusal(f"cannot be read as {spec.format} ({type(error).__name__})") from None
        if not set(spec.rename) <= set(in_file):  # which one is the site's own matter, as all names at some parties
            raise self._error(f"has no column of a name that the policy renames. {self._key('rename')}")
        self.column_names = [spec.rename.get(name, name) for name in in_file]
        self._in_file = dict(zip(self.column_names, in_file, strict=True))
        repeated = sorted({name for name in self.column_names if self.column_names.count(name) > 1})
        if repeated:
            raise self._error(f"has more than one column named {repeated[0]!r}")
        if not set(spec.dates) <= set(self.column_names):
            raise self._error(f"has no column of a name that the policy gives as a date. {self._key('dates')}")
        if not set(spec.columns) <= set(self.column_names):
            raise self._error(f"has no column of a name that the policy answers. {self._key('columns')}")

    def read(self, numeric: list[str], text: list[str], *, may_be_empty: bool = False) -> dict[str, pa.ChunkedArray]:
        """Return columns by name; ``text`` columns of a CSV file keep their text exactly as it stands.

        Args:
            may_be_empty: no rows will do; always so if repairing.

        Raises:
            DataRefusal: unreadable rows; unless repairing, no rows, or more rows than the policy allows.
        """
        try:
            table = self._read_table(numeric, text)
        except _READ_ERRORS as error:
            self._refuse_machine(error)
            raise self._refusal(
                f"cannot be read as {self._spec.format} ({type(error).__name__}): rows with differing numbers of "
                f"fields, or text that is not in the encoding {self._spec.encoding}? `veilboost check` finds them. "
                f"{self._key('encoding', 'separator', *(['names'] if self._spec.names else []))}"
            ) from None
        if not self._repair:
            n_rows = table.num_rows if self._parts is None else self._parts.n_rows
            if n_rows == 0 and not may_be_empty:
                raise self._refusal("has no rows")
            self._check_length(n_rows)
            self._warn_of_open_quotes()
        return {
            name: spelt(self._decoded(table.column(name)), self._spec.columns.get(name)) for name in (*numeric, *text)
        }

    @property
    def n_rows(self) -> int:
        """Number of rows of a Parquet data set, as its footers say; 0 for others."""
        return 0 if self._parts is None else self._parts.n_rows

    def parts_of(self, first: int, end: int) -> list[tuple[bytes, int, int, int, bytes]]:
        """Return what tells the files of some rows of a Parquet data set; see ``ParquetParts``."""
        return [] if self._parts is None else self._parts.parts_of(first, end)

    def check_unchanged(self) -> None:
        """Look whether the files of a Parquet data set are those that were opened. Raises: DataRefusal."""
        if self._parts is not None:
            self._parts.check_unchanged()

    def batches(self, numeric: list[str], text: list[str], most_rows: int) -> Iterator[dict[str, pa.ChunkedArray]]:
        """Yield columns of a Parquet data set by name, some rows at a time. Raises: DataRefusal, as ``read``."""
        columns = [*numeric, *text]
        in_file = [self._in_file[name] for name in columns]
        if self._parts is None:
            raise self._error(f"cannot be read in passes. {self._key('memory')}")
        try:
            for batch in self._parts.batches(in_file, most_rows):
                named = batch.rename_columns(columns)
                yield {name: spelt(self._decoded(named.column(name)), self._spec.columns.get(name)) for name in columns}
        except _READ_ERRORS as error:
            self._refuse_machine(error)
            raise self._refusal(f"cannot be read as parquet ({type(error).__name__})") from None

    def numbers(self, name: str, column: pa.ChunkedArray, *, each_by_itself: bool = False) -> NDArray[np.float64]:
        """Return a column as numbers; true and false become 1 and 0, dates days since 1970-01-01, missing values NaN.

        Args:
            each_by_itself: true and false are numbers whatever the other values are; always so if repairing.

        Shapes: result: float64[n_rows].

        Raises:
            ConfigurationError: the file declares another type, such as a list; a ``DataRefusal``: its values are text.
        """
        if pa.types.is_dictionary(column.type) and not is_text(column.type.value_type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if name in self._spec.dates:
            return self._days(name, column)
        if name in self._spec.read_otherwise and not pa.types.is_nested(kind) and not is_time(kind):
            return self._answered(name, column)
        if is_text(kind) or pa.types.is_dictionary(kind):
            return self._numbers_in_text(name, column, each_by_itself=each_by_itself or self._repair)
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif not (is_number(kind) or pa.types.is_null(kind)):
            return self._no_values(name, column)
        return np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)

    def _no_values(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
        """Refuse a column of a type that is none of numbers; a frame's is missing throughout if repairing.

        What pandas makes of a column may hang on one row: the others are then text that is no number, and missing.
        """
        if self._table is None or not self._repair:
            raise self._wrong_type(name, column.type)
        _log.warning("data set %r: column %r holds %s and counts as missing", self._spec.name, name, column.type)
        return np.full(len(column), np.nan)

    def check_has_texts(self, name: str, column: pa.ChunkedArray) -> None:
        """Refuse a column whose values cannot stand in a list: lists and structures. Raises: as ``numbers``."""
        if pa.types.is_nested(column.type):
            raise self._wrong_type(name, column.type)

    def _wrong_type(self, name: str, kind: pa.DataType) -> ConfigurationError:
        what = f"column {name!r} holds {kind}: turn it into numbers, or leave it out of features"
        if is_time(kind):
            what += f". Days since 1970-01-01 it becomes by the policy. {self._key('dates')}"
        # The type of a frame may follow from its values; a file declares it.
        return self._error(what) if self._table is None else self._refusal(what)

    def _days(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
        kind = column.type
        if is_time(kind):
            return days_of(column)
        if pa.types.is_integer(kind):
            column = column.cast(pa.string())
        elif pa.types.is_null(kind):
            return np.full(len(column), np.nan)
        elif pa.types.is_floating(kind) and self._table is not None:  # pandas' whole numbers, where some are missing
            numbers = [None if value is None or np.isnan(value) else repr(value) for value in column.to_pylist()]
            column = pa.chunked_array([pa.array(numbers, pa.string())])
        elif not (is_text(kind) or pa.types.is_dictionary(kind)):
            return self._no_values(name, column)
        pattern = DatePattern.of(self._spec.dates[name])
        if pattern is None:
            raise self._error(f"gives column {name!r} a pattern that describes no dates. {self._key('dates')}")
        texts, codes = distinct_texts(column)
        read = pattern.days if self._table is None else functools.partial(days_in_frame, pattern)
        days = [np.nan if self._is_missing(text.strip()) else read(text.strip()) for text in texts]
        if None in days and not self._repair:
            raise self._refusal(
                f"column {name!r} holds text that is no date of its pattern: mend the pattern, or name its "
                f"missing-value texts. {self._key('dates', 'missing')}"
            )
        return taken(days, codes)

    def _answered(self, name: str, column: pa.ChunkedArray) -> NDArray[np.float64]:
        found, codes = distinct_values(column)
        values = declaration.answered_values(found, self._spec.columns[name], self._format, self._spec.missing)
        if None in values and not self._repair:
            raise self._refusal(
                f"column {name!r} holds text that the policy's answer of it does not read: give it a number there, or "
                f"name its missing-value texts. {self._key('columns', 'missing')}"
            )
        return taken(values, codes)

    def _warn_of_open_quotes(self) -> None:
        """Tell this site's own log of lines in which a quotation mark seems to stay open: fewer rows than it thinks."""
        if self._table is not None or self._spec.format != "csv":
            return
        data = b"".join(utf8_chunks(self._spec, "backslashreplace"))
        n_open = sum(line.count(b'"') % 2 for line in data.splitlines()) if b'"' in data else 0
        if n_open:
            _log.warning(
                "data set %r: %d lines have a quotation mark that is not closed in the same line. Rows after it become "
                "part of one value; `veilboost check` says where",
                self._spec.name,
                n_open,
            )

    def _is_missing(self, text: str) -> bool:
        return not text or text in self._spec.missing

    def _numbers_in_text(self, name: str, column: pa.ChunkedArray, *, each_by_itself: bool) -> NDArray[np.float64]:
        """Return texts as numbers; what is none is refused or, if repairing, missing, each by itself.

        True and false become 1 and 0; unless repairing, only where a column holds nothing else.
        """
        texts, codes = distinct_texts(column)
        values = numbers_of_texts(texts, self._spec.missing, self._format, each_by_itself=each_by_itself)
        if None in values and not self._repair:
            raise self._no_number(name, [t.strip() for t, value in zip(texts, values, strict=True) if value is None])
        return taken(values, codes)

    def _no_number(self, name: str, texts: Iterable[str]) -> DataRefusal:
        """Return the refusal of texts that are no numbers, with the key that would read them if there is one."""
        texts = list(texts)
        if fitting_dates(texts):
            what, keys = "text that looks like dates", ["dates"]
        elif all(declaration.limit_of(text) for text in texts):
            what, keys = "values below or above a limit, such as <0.5", ["columns"]
        elif fitting_formats(texts):
            what, keys = "numbers with another decimal point, or with thousands apart", ["decimal", "thousands"]
        else:
            what, keys = "text that is no number", ["missing", "columns"]
        return self._refusal(
            f"column {name!r} holds {what}: give the job a public category list for it (a label: label_classes), name "
            "its missing-value texts in the policy, or leave it out of features. A column that names the rows is the "
            f"data set's id in the policy. {self._key(*keys)}"
        )

    def _decoded(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return bytes, as which text is read for repair, as text; what is not UTF-8 becomes text in no list."""
        if not pa.types.is_binary(column.type):
            return column
        encoded = column.combine_chunks().dictionary_encode()
        texts = [item.decode("utf-8", "backslashreplace") for item in encoded.dictionary.to_pylist()]
        # Two byte strings may become one text: no dictionary then.
        return pa.chunked_array([pa.array(texts, pa.string()).take(encoded.indices)], pa.string())

    def _read_names(self) -> list[str]:
        if self._table is not None:
            return list(self._table.column_names)
        if self._parts is not None:
            # Row numbers are not data.
            return [name for name in self._parts.schema.names if not _PANDAS_INDEX.fullmatch(name)]
        if declaration.is_in_parts(self._spec.path):
            raise self._error(
                f"is read as {self._spec.format}, and many files can only be Parquet. {self._key('format')}"
            )
        if (what := foreign_content(self._spec.path)) is not None:
            raise self._error(f"is {what}. {self._key('path', 'format')}")
        # What rows follow the header does not matter here: Arrow reads some of them.
        header = _first_line(utf8_chunks(self._spec, "backslashreplace"))
        if self._spec.encoding != "utf-16" and header.startswith(UTF_16_MARKS):
            raise self._error(f"is written in UTF-16. {self._key('encoding')}")
        names = fields_of(header.decode(errors="replace"), self._spec.separator)
        if not self._spec.names and look_like_data(names, self._format) and not _may_be_codes(names):
            raise self._error(f"has no names of columns: its first line looks like a row. {self._key('names')}")
        source = io.BytesIO(header) if is_closed(header, self._spec.separator) else self._source()
        with arrow_csv.open_csv(source, parse_options=self._parse_options(skip_invalid=True)) as reader:
            return list(reader.schema.names)

    def other_separator(self) -> str | None:
        """Return the character that seems to stand between the names of the only column, if one does: public."""
        if self._table is not None or self._spec.format != "csv" or len(self.column_names) != 1:
            return None
        return next((mark for mark in _OTHER_SEPARATORS if mark in self.column_names[0]), None)

    def _source(self) -> Path | io.BytesIO:
        """Return what Arrow reads: the file itself, or its text in UTF-8."""
        if self._spec.encoding == "utf-8" and not self._spec.names:
            return self._spec.path
        return io.BytesIO(b"".join(utf8_chunks(self._spec, "backslashreplace" if self._repair else "strict")))

    def _read_table(self, numeric: list[str], text: list[str]) -> pa.Table:
        columns = [*numeric, *text]
        in_file = [self._in_file[name] for name in columns]
        if self._table is not None:
            return self._table.select(in_file).rename_columns(columns)
        if self._parts is not None:
            if not self._repair:
                self._check_length(self._parts.n_rows)  # before it is read
            return self._parts.read(in_file).rename_columns(columns)
        as_text = pa.binary() if self._repair else pa.string()  # bytes need not be UTF-8
        types = {self._in_file[name]: as_text for name in columns}
        as_text_first = {*self._spec.dates, *self._spec.read_otherwise}
        numbers = {self._in_file[name]: pa.float64() for name in numeric if name not in as_text_first}
        try:
            if self._repair and self._has_missing_number():
                raise pa.ArrowInvalid("Arrow compares such texts before it strips them, and _number afterwards")
            return self._read_csv(in_file, types | numbers).rename_columns(columns)
        except pa.ArrowInvalid:
            # Some column is not all numbers: read it all as text, so that true/false work and text can be named.
            return self._read_csv(in_file, types).rename_columns(columns)

    def _has_missing_number(self) -> bool:
        """Return whether a number stands for missing, as -999 does in some files."""
        numbers = [self._format.number(text) for text in self._spec.missing]
        return any(number is not None and not np.isnan(number) for number in numbers)

    def _read_csv(self, columns: list[str], types: dict[str, pa.DataType]) -> pa.Table:
        convert = arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=columns,
            null_values=["", *self._spec.missing],
            strings_can_be_null=False,
            decimal_point=self._spec.decimal,
        )
        parse = self._parse_options(skip_invalid=self._repair)
        source = io.BytesIO(self._lines_by_themselves()) if self._repair else self._source()
        return arrow_csv.read_csv(source, parse_options=parse, convert_options=convert)

    def _lines_by_themselves(self) -> bytes:
        """Return the file without lines in which Arrow would not find the end of the line.

        Arrow takes a quotation mark for one that opens a value only where a value begins.
        """
        data = b"".join(utf8_chunks(self._spec, "backslashreplace"))
        header, *lines = data.splitlines(keepends=True) or [b""]
        separator = self._spec.separator
        kept = (line for line in lines if len(line) <= _LONGEST_LINE and is_closed(line, separator))
        return b"".join([header, *kept])

    def _parse_options(self, *, skip_invalid: bool) -> arrow_csv.ParseOptions:
        skip = (lambda row: "skip") if skip_invalid else None
        return arrow_csv.ParseOptions(delimiter=self._spec.separator, invalid_row_handler=skip)

    def _check_length(self, n_rows: int) -> None:
        if 0 < self._spec.max_rows < n_rows:
            raise self._refusal("has more rows than this site's max_rows allows")

    def _refuse_machine(self, error: Exception) -> None:
        known = machine_failure(error)
        if known is not None:
            raise self._error(f"cannot be read: {known}") from None

    def _key(self, *names: str) -> str:
        keys = ", ".join(f"data_sets.{self._spec.name}.{name}" for name in names)
        return f"Policy key{'s' if len(names) > 1 else ''}: {keys}"

    def _error(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"data set {self._spec.name!r} {what}.")

    def _refusal(self, what: str) -> DataRefusal:
        return DataRefusal(f"data set {self._spec.name!r} {what}.")


FOREIGN = {
    b"\xd0\xcf\x11\xe0": "an old spreadsheet: save the sheet as CSV",
    b"\x1f\x8b": "packed with gzip: end its name in .csv.gz",
    b"BZh": "packed with bzip2: unpack it",
    b"\xfd7zXZ": "packed with xz: unpack it",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"PAR1": "a Parquet file: say so (format)",
}
"""How files begin that are no text, whatever they are called, and what helps."""
_ZIP = b"PK\x03\x04"


def foreign_content(path: Path) -> str | None:
    """Return what a file is that is no text, with the remedy; None if nothing is known of it. Raises: OSError."""
    with pa.input_stream(str(path)) as stream:
        head = stream.read(8)
    if not head.startswith(_ZIP):
        return next((what for mark, what in FOREIGN.items() if head.startswith(mark)), None)
    try:
        with zipfile.ZipFile(path) as archive:
            is_sheet = any(name.startswith(("xl/", "[Content_Types]", "mimetype")) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        is_sheet = False
    if is_sheet:
        return "a spreadsheet: save the sheet as CSV"
    return "a ZIP archive, whatever its name says: unpack it, and name the file in it"


def format_in(path: Path) -> str:
    """Return the format of a file by what it begins with, or of a folder or pattern of files, whatever its name is."""
    if declaration.is_in_parts(path):
        return "parquet"
    try:
        with path.open("rb") as stream:
            return "parquet" if stream.read(4) == b"PAR1" else "csv"
    except OSError:
        return declaration.format_of(path) or "csv"


def fields_of(line: str, separator: str) -> list[str]:
    """Return the fields of a line."""
    try:
        return next(csv.reader(io.StringIO(line.rstrip("\r\n")), delimiter=separator), [])
    except csv.Error:  # a name longer than its limit
        return line.split(separator)


def look_like_data(fields: Sequence[str], form: NumberFormat) -> bool:
    """Tell whether a line holds values and no names: mostly numbers and dates, which do not just number columns."""
    texts = [text.strip().removeprefix("\ufeff") for text in fields if text.strip()]
    numbers = [form.number(text) for text in texts]
    said = [number for number in numbers if number is not None]
    n_dates = sum(n is None and bool(fitting_dates([text])) for text, n in zip(texts, numbers, strict=True))
    are_places = len(said) > 1 and n_dates == 0 and said == [said[0] + place for place in range(len(said))]
    return not are_places and len(said) + n_dates > len(texts) / 2


def _may_be_codes(fields: Sequence[str]) -> bool:
    """Tell whether numbers in a line may be names all the same, as years are: whole, and each above the one before."""
    codes = [int(text) for text in fields if text.strip().isdecimal()]
    return len(codes) > 1 and codes == sorted(set(codes)) and not any(set(text) & set(".,-/:") for text in fields)


def utf8_chunks(spec: declaration.DataSet, errors: str) -> Iterator[bytes]:
    """Yield a text file, unpacked, in UTF-8, with the policy's line of names before it if it has none.

    Args:
        errors: what the decoder of another encoding does with bytes that have no meaning in it.

    Raises:
        UnicodeDecodeError: there are such bytes, and errors is "strict".
    """
    with pa.input_stream(str(spec.path)) as stream:
        chunk = stream.read(_CHUNK_BYTES)
        if spec.names:
            yield line_of_names(spec)
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
        if spec.encoding == "utf-8":
            while chunk:
                yield chunk
                chunk = stream.read(_CHUNK_BYTES)
            return
        encoding = spec.encoding
        if encoding == "utf-16":
            encoding = "utf-16-be" if chunk.startswith(codecs.BOM_UTF16_BE) else "utf-16-le"
            chunk = chunk[2:] if chunk.startswith(UTF_16_MARKS) else chunk
        decoder = codecs.getincrementaldecoder(encoding)(errors)
        while chunk:
            yield decoder.decode(chunk).encode()
            chunk = stream.read(_CHUNK_BYTES)
        yield decoder.decode(b"", final=True).encode()


def line_of_names(spec: declaration.DataSet) -> bytes:
    """Return the names that the policy gives as the first line of a file in UTF-8."""
    quoted = (f'"{name.replace(chr(34), chr(34) * 2)}"' for name in spec.names)
    return (spec.separator.join(quoted) + "\n").encode()


def is_closed(line: bytes, separator: str) -> bool:
    """Tell whether every value that a quotation mark opens ends in the same line."""
    if b'"' not in line:
        return True
    mark = re.escape(separator.encode())
    value = rb'(?:"(?:[^"\r\n]|"")*"|(?!")[^%b\r\n]*)' % mark
    return re.fullmatch(rb"%b(?:%b%b)*[\r\n]*" % (value, mark, value), line) is not None


def _first_line(chunks: Iterable[bytes]) -> bytes:
    head, lines = b"", [b""]
    for chunk in chunks:
        head += chunk
        lines = head.splitlines(keepends=True)
        if len(lines) > 1:
            break
    return lines[0] if lines else b""


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_number(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def days_of(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return declared dates and times as days since 1970-01-01 in UTC. Shapes: float64[n_rows]."""
    instants = column.cast(pa.timestamp("us", tz=getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
    return np.array(instants.to_numpy(), dtype=np.float64) / _DAY_US


def is_time(kind: pa.DataType) -> bool:
    """Tell whether a column of this type holds dates, or points in time."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def distinct_values(column: pa.ChunkedArray) -> tuple[list[object], NDArray[np.int64]]:
    """Return the different values of a column, and which of them each row has. Shapes: int64[n_rows]; -1 is none."""
    encoded = column.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return encoded.dictionary.to_pylist(), codes


def spelt(column: pa.ChunkedArray, answer: declaration.Answer | None) -> pa.ChunkedArray:
    """Return a column with its texts as the policy's answer spells them, if it does."""
    if not isinstance(answer, Mapping) or not declaration.is_spelling(answer) or pa.types.is_nested(column.type):
        return column
    texts = pc.utf8_trim_whitespace(column.cast(pa.string()))
    found = pc.index_in(texts, value_set=pa.array(list(answer), pa.string()))
    new = pa.chunked_array([pa.array(list(answer.values()), pa.string()).take(found.combine_chunks())])
    return pc.if_else(pc.is_valid(found), new, texts)


def distinct_texts(column: pa.ChunkedArray) -> tuple[list[str], NDArray[np.int64]]:
    """Return likewise the different texts of a column of texts."""
    values, codes = distinct_values(column)
    return ["" if text is None else str(text) for text in values], codes


def numbers_of_texts(
    texts: Iterable[str], missing: Sequence[str], number_format: NumberFormat, *, each_by_itself: bool = False
) -> list[float | None]:
    """Return each text as a number, NaN where it means "missing", None where it is no number.

    Args:
        each_by_itself: true and false are 1 and 0 whatever the other texts are; otherwise only if there are no others.
    """
    shown = [text.strip() for text in texts]
    present = [text for text in shown if text and text not in missing]
    are_booleans = bool(present) and all(text.lower() in _BOOLEANS for text in present)
    values: list[float | None] = []
    for text in shown:
        if not text or text in missing:
            values.append(np.nan)
        elif text.lower() in _BOOLEANS:
            values.append(float(text.lower() == "true") if are_booleans or each_by_itself else None)
        else:
            values.append(number_format.number(text))
    return values


def taken(values: list[float | None], codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each row's value; None, and no value, are NaN. Shapes: codes: int64[n_rows]; result: float64[n_rows]."""
    return np.array([*values, None], dtype=np.float64)[codes]
