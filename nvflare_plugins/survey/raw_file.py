"""Reads a data set for a survey: whatever its encoding, its separator and its rows are like.

Nothing is refused but what is no table at all. What the policy's options do not read is found, and the file is then
read with the options that seem right, so that the rest can be looked at in the same go. What the policy wants read in
passes is read again whenever a column is asked for, some columns at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as arrow_parquet

from nvflare_plugins.base.errors import machine_failure
from nvflare_plugins.data import tabular_files
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.parquet_parts import ParquetParts
from nvflare_plugins.data.text_values import NumberFormat
from nvflare_plugins.survey.columns import Finding

_SEPARATORS = (",", ";", "\t", "|")
_NOT_IN_WINDOWS_1252 = frozenset(b"\x81\x8d\x8f\x90\x9d")
_COLUMN_PASSES = 64
"""As many columns are read at once as that makes: of few, one at a time."""


class ColumnsInPasses:
    """The columns of Parquet files that are never held together.

    Attributes:
        types: as the files declare them.
        n_rows: of each column.
    """

    def __init__(
        self, types: Sequence[pa.DataType], n_rows: int, read: Callable[[range], Sequence[pa.ChunkedArray]]
    ) -> None:
        """Take what reads columns. Args: read: returns the columns of these places."""
        self.types, self.n_rows, self._read = types, n_rows, read
        self._step = max(1, len(types) // _COLUMN_PASSES)
        self._held: tuple[int, Sequence[pa.ChunkedArray]] = (-1, ())

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self.types)

    def __getitem__(self, place: int) -> pa.ChunkedArray:
        """Return a column, reading it and those beside it unless they were the last ones."""
        first = place - place % self._step
        if self._held[0] != first:
            self._held = (-1, ())  # let go before others are read
            self._held = (first, self._read(range(first, min(first + self._step, len(self)))))
        return self._held[1][place - first]


class UnreadableError(Exception):
    """A file could be opened, and a column of it not be read. Attributes: raw: what is to be looked at in its place."""

    def __init__(self, raw: RawFile) -> None:
        super().__init__()
        self.raw = raw


@dataclass(frozen=True, slots=True)
class RawFile:
    """A data set as it stands.

    Attributes:
        spec: the policy's, with the options that the file seems to need.
        names: of all columns, under their new names where the policy renames them; they may repeat or be empty.
        columns: in the same order; those of a text file are text. Reading them in passes may raise an
            ``UnreadableError``.
        findings: what is the matter with the file as a whole.
        names_are_data: the first line holds no names, so that names must not be shown.
    """

    spec: DataSet
    names: tuple[str, ...]
    columns: tuple[pa.ChunkedArray, ...] | ColumnsInPasses
    findings: tuple[Finding, ...]
    names_are_data: bool = False

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        if isinstance(self.columns, ColumnsInPasses):
            return self.columns.n_rows
        return len(self.columns[0]) if self.columns else 0

    def kind(self, place: int) -> pa.DataType:
        """Return the declared type of a column."""
        columns = self.columns
        return columns.types[place] if isinstance(columns, ColumnsInPasses) else columns[place].type


def read_raw(spec: DataSet) -> RawFile:
    """Read all columns of a data set.

    Raises:
        ConfigurationError: its own loader fails.
    """
    if spec.loader is not None:
        file = tabular_files.TabularFile(spec)
        columns = file.read([], file.column_names, may_be_empty=True)
        return RawFile(spec, tuple(columns), tuple(columns.values()), ())
    try:
        return _read_parquet(spec) if spec.format == "parquet" else _read_text(spec)
    except FileNotFoundError:
        return _nothing(spec, "no_file", "there is no file at this path")
    except (pa.ArrowException, OSError) as error:
        return _unreadable(spec, error)


def _unreadable(spec: DataSet, error: Exception) -> RawFile:
    why = machine_failure(error) or type(error).__name__
    return _nothing(spec, "unreadable", f"the file cannot be read as {spec.format} ({why})")


def _nothing(spec: DataSet, kind: str, text: str, found: Sequence[Finding] = ()) -> RawFile:
    return RawFile(spec, (), (), (*found, Finding(kind, text)))


def _renamed(spec: DataSet, in_file: Sequence[str]) -> tuple[tuple[str, ...], list[Finding]]:
    names = tuple(spec.rename.get(name, name) for name in in_file)
    gone = len(set(spec.rename) - set(in_file)) + len({*spec.dates, *spec.columns} - set(names))
    text = "the policy names columns that are not there. Policy keys: rename, dates, columns"
    return names, [Finding("no_such_column", text, count=gone)] if gone else []


def _read_parquet(spec: DataSet) -> RawFile:
    parts = ParquetParts(spec, may_be_empty=True)
    kept = [place for place, name in enumerate(parts.schema.names) if not name.startswith("__index_level_")]
    in_file = [parts.schema.names[place] for place in kept]
    names, found = _renamed(spec, in_file)
    if len(set(in_file)) < len(in_file):  # columns are read by name
        with arrow_parquet.ParquetFile(spec.files[0]) as one:
            table = one.read()
        return RawFile(spec, names, tuple(table.column(place) for place in kept), tuple(found))

    def read(places: range) -> Sequence[pa.ChunkedArray]:
        try:
            return list(parts.read([in_file[place] for place in places]).columns)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableError(_unreadable(spec, error)) from None

    if not spec.in_passes:
        return RawFile(spec, names, tuple(read(range(len(names)))), tuple(found))
    types = [parts.schema.field(name).type for name in in_file]
    return RawFile(spec, names, ColumnsInPasses(types, parts.n_rows, read), tuple(found))


# -- text files -------------------------------------------------------------------------------------------------------


def _read_text(spec: DataSet) -> RawFile:
    if (what := tabular_files.foreign_content(spec.path)) is not None:
        return _nothing(spec, "not_text", f"the file is {what}")
    with pa.input_stream(str(spec.path)) as stream:
        data = stream.read()
    if not data.strip(b"\xef\xbb\xbf \r\n\t\x00"):
        return _nothing(spec, "empty", "the file is empty")
    found = list(_encoding(spec, data))
    spec = _with_options(spec, found)
    text = (
        data
        if spec.encoding == "utf-8"
        else b"".join(tabular_files.utf8_chunks(replace(spec, names=()), "backslashreplace"))
    )
    if spec.encoding == "utf-8" and found:  # nothing known reads it: the rest is looked at all the same
        text = data.decode("utf-8", "replace").encode()
    text = text.removeprefix(b"\xef\xbb\xbf")
    found += _separator(spec, text.splitlines()[0].decode())
    spec = _with_options(spec, found)
    text = (tabular_files.line_of_names(spec) if spec.names else b"") + text
    header, *lines = text.splitlines(keepends=True)
    return _read_lines(spec, header, lines, text, found)


def _with_options(spec: DataSet, found: Sequence[Finding]) -> DataSet:
    options = {key: value for finding in found for key, value in finding.options.items()}
    return replace(spec, **options)


def _encoding(spec: DataSet, data: bytes) -> Iterator[Finding]:
    key = "Policy key: encoding"
    lines = data.splitlines() if spec.encoding != "utf-16" else [data]
    bad = [number for number, line in enumerate(lines) if not _is_text_in(spec.encoding, line)]
    is_wide = data.startswith(tabular_files.UTF_16_MARKS) or data[1:400:2].count(0) > len(data[1:400:2]) // 2
    if spec.encoding != "utf-16" and is_wide:
        yield Finding("encoding", f"the file is written in utf-16. {key}", options={"encoding": "utf-16"})
    elif bad:
        known = None if spec.encoding == "utf-16" else _seeming_encoding(data)
        what = f"lines hold bytes that are no text in the encoding {spec.encoding}"
        remedy = f"it may be {known}: look at its umlauts and accents. {key}" if known else f"name the right one. {key}"
        options = {"encoding": known} if known and known != spec.encoding else {}
        yield Finding("encoding", f"{what}; {remedy}", count=len(bad), first_row=bad[0] or None, options=options)
    elif spec.encoding not in ("utf-8", "utf-16") and not data.isascii() and _is_text_in("utf-8", data):
        text = f"the file is utf-8, of which {spec.encoding} makes other letters. {key}"
        yield Finding("encoding", text, options={"encoding": "utf-8"})


def _is_text_in(encoding: str, data: bytes) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _seeming_encoding(data: bytes) -> str:
    high = {byte for byte in set(data) if byte >= 0x80}
    return "cp850" if high & _NOT_IN_WINDOWS_1252 else "windows-1252"


def _separator(spec: DataSet, header: str) -> Iterator[Finding]:
    found = {mark: len(tabular_files.fields_of(header, mark)) for mark in (spec.separator, *_SEPARATORS)}
    best = max(found, key=lambda mark: found[mark])
    if found[spec.separator] == 1 < found[best]:
        text = (
            f"the fields of the first line are separated by {best!r}, not by {spec.separator!r}. Policy key: separator"
        )
        yield Finding("separator", text, options={"separator": best})


def _read_lines(spec: DataSet, header: bytes, lines: list[bytes], text: bytes, found: list[Finding]) -> RawFile:
    in_file = tabular_files.fields_of(header.decode(), spec.separator)
    if not in_file or not tabular_files.is_closed(header, spec.separator):
        words = "the first line is no line of names: a quotation mark stays open. Close it; names have no line breaks"
        return _nothing(spec, "header", words, found)
    are_data = not spec.names and tabular_files.look_like_data(in_file, NumberFormat(spec.decimal, spec.thousands))
    if are_data:
        words = f"the first line looks like a row: name the {len(in_file)} columns in their order (--names; NAMES= of "
        found.append(Finding("header", f"{words}make demo), or put a line of names before it. Policy key: names"))
    names, missing = _renamed(spec, in_file)
    found += missing
    unclosed = [number for number, line in enumerate(lines, 1) if not tabular_files.is_closed(line, spec.separator)]
    if unclosed:
        what = "lines have a quotation mark that is not closed in the same line: the lines after it become part of one "
        what += "value, up to the next mark. Close it or take it out, and line breaks out of values"
        found.append(Finding("open_quote", what, count=len(unclosed), first_row=unclosed[0]))
    try:
        table, uneven = _parse(spec, text, len(names))
    except pa.ArrowInvalid:  # such as a value that never ends
        closed = b"".join([header, *(line for line in lines if tabular_files.is_closed(line, spec.separator))])
        table, uneven = _parse(spec, closed, len(names))
    if uneven:
        what = (
            f"rows have another number of fields than the {len(names)} names. They are left out here; jobs refuse them"
        )
        found.append(Finding("uneven_rows", what, count=len(uneven), first_row=min(uneven)))
    return RawFile(spec, names, tuple(table.columns), tuple(found), are_data)


def _parse(spec: DataSet, text: bytes, n_columns: int) -> tuple[pa.Table, list[int]]:
    """Return the rows, all as text, and the numbers of those with too many or too few fields."""
    uneven: list[int] = []

    def skip(row: arrow_csv.InvalidRow) -> str:
        uneven.append(row.number - 1)
        return "skip"

    names = [str(position) for position in range(n_columns)]
    table = arrow_csv.read_csv(
        io.BytesIO(text),
        read_options=arrow_csv.ReadOptions(
            use_threads=False,
            column_names=names,
            skip_rows=1,
            block_size=max(1 << 22, 2 * len(text.partition(b"\n")[0])),
        ),
        parse_options=arrow_csv.ParseOptions(delimiter=spec.separator, invalid_row_handler=skip),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
    return table, uneven
