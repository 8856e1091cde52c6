"""Reads the Parquet files of a data set as one table, some rows and some columns at a time.

Rows are numbered from 0 in the order of ``part_files``. A reader knows its files by size, time, place on the disk and
a hash of their footers, looks at each again whenever it opens it, and at the list of files after each pass: a file that
has changed, gone or come meanwhile ends the reading. So all passes are over the same rows. Another process of the site
may read a run of the rows (``parts_of``, ``as_told``): it numbers them from 0 again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as arrow_parquet

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet, is_in_parts

_FOOTER_END = 8  # bytes: the footer's length, and the format's mark
_BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 16  # of each column


@dataclass(frozen=True, slots=True)
class _Mark:
    """What tells a file from a changed one."""

    place: tuple[int, int]
    size_bytes: int
    changed_ns: int
    footer: bytes


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    first: int
    group_rows: tuple[int, ...]
    mark: _Mark

    @property
    def end(self) -> int:
        return self.first + sum(self.group_rows)


class ParquetParts:
    """The files of a data set, opened.

    Privacy: everything stays at the site; no message names a file.

    Attributes:
        schema: of all files, as Arrow reads it.
        n_rows: rows of all files.

    Raises:
        ConfigurationError: there is no file, or one has other columns than the first; a ``DataRefusal``: one has no
            rows.
        pyarrow.ArrowException, OSError: a file cannot be read as Parquet.
    """

    def __init__(self, spec: DataSet, *, may_be_empty: bool = False) -> None:
        """Look at all files. Args: may_be_empty: files without rows will do, of several."""
        self._spec, self._in_parts = spec, is_in_parts(spec.path)
        self._parts: list[_Part] = []
        paths = spec.files
        self._start = self.n_rows = 0
        for position, path in enumerate(paths):
            with _opened_at(path) as (mark, file):
                if self._in_parts and _place(os.lstat(path)) != mark.place:  # a link, put there since it was no link
                    raise self._changed()
                schema, groups = file.schema_arrow.remove_metadata(), _group_rows(file)
            if position == 0:
                self.schema = schema
            else:
                self._check_schema(schema, position)
            if sum(groups) == 0 and len(paths) > 1 and not may_be_empty:
                raise DataRefusal(f"data set {spec.name!r}: file {position + 1} by name has no rows: take it out.")
            self._parts.append(_Part(path, self.n_rows, groups, mark))
            self.n_rows += sum(groups)

    def parts_of(self, first: int, end: int) -> list[tuple[bytes, int, int, int, bytes]]:
        """Return of each file that holds some of the rows: path, number by name, first row, size, hash of its footer.

        Args:
            first, end: row numbers, the end not included; one row at least.
        """
        return [
            (os.fsencode(part.path), number, part.first, part.mark.size_bytes, part.mark.footer)
            for number, part in enumerate(self._parts, start=1)
            if part.first < end and first < part.end
        ]

    @classmethod
    def as_told(
        cls, spec: DataSet, parts: Sequence[tuple[bytes, int, int, int, bytes]], rows: tuple[int, int]
    ) -> ParquetParts:
        """Open the files that ``parts_of`` has told of, for these rows alone.

        Raises:
            ConfigurationError: one cannot be opened, or is another file; the message has its number.
        """
        found = cls.__new__(cls)
        found._spec, found._in_parts, found._parts = spec, False, []
        found._start, found.n_rows = rows[0], rows[1] - rows[0]
        for path, number, first, size_bytes, footer in parts:
            try:
                with _opened_at(Path(os.fsdecode(path))) as (mark, file):
                    if (mark.size_bytes, mark.footer) != (size_bytes, footer):
                        raise _another_file(spec, number, "is another file than")
                    found.schema = file.schema_arrow.remove_metadata()
                    found._parts.append(_Part(Path(os.fsdecode(path)), first, _group_rows(file), mark))
            except (OSError, pa.ArrowException) as error:
                raise _another_file(spec, number, f"cannot be read ({type(error).__name__}), unlike") from None
        return found

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return some columns of all rows. Raises: DataRefusal: a file has changed."""
        pieces = [_of(self.schema.empty_table(), columns)]
        for part, low, high in self._holding():
            with self._opened(part) as file:
                pieces += _rows_of(file, part, columns, low, high)
        return pa.concat_tables(pieces)

    def batches(self, columns: Sequence[str], most_rows: int = _BATCH_ROWS) -> Iterator[pa.Table]:
        """Yield some columns of all rows in their order, each row once: a pass. Args: most_rows: of a piece.

        Raises:
            DataRefusal: a file has changed, gone or come since the reader was made, as far as a pass can tell.
        """
        for part, low, high in self._holding():
            with self._opened(part) as file:
                yield from _batches_of(file, part, columns, low, high, most_rows)
        self.check_unchanged()

    def _holding(self) -> Iterator[tuple[_Part, int, int]]:
        """Yield each file that holds some of the rows, and which of them."""
        for part in self._parts:
            low, high = max(self._start, part.first), min(self._start + self.n_rows, part.end)
            if low < high:
                yield part, low, high

    def check_unchanged(self) -> None:
        """Look whether the files are those that were opened. Raises: DataRefusal, ConfigurationError."""
        if self._in_parts and [part.path for part in self._parts] != list(self._spec.files):
            raise self._changed()
        for part in self._parts:
            with self._opened(part):
                pass

    @contextmanager
    def _opened(self, part: _Part) -> Iterator[arrow_parquet.ParquetFile]:
        with ExitStack() as stack:
            try:
                mark, file = stack.enter_context(_opened_at(part.path))
            except (OSError, pa.ArrowException):
                raise self._changed() from None
            if mark != part.mark:
                raise self._changed()
            yield file

    def _changed(self) -> DataRefusal:
        return DataRefusal(
            f"data set {self._spec.name!r}: a file has changed, gone or come while the job was reading. Write new rows "
            f"elsewhere and put them there between jobs. Policy key: data_sets.{self._spec.name}.path."
        )

    def _check_schema(self, schema: pa.Schema, position: int) -> None:
        """Refuse a file whose columns differ from the first one's: names, order or types."""
        if schema.names != self.schema.names:
            other = sorted(set(schema.names) ^ set(self.schema.names))
            # Which column is the site's own matter, as all names are at some parties.
            what = "columns of other names than" if other else "its columns in another order than"
        elif schema.types != self.schema.types:
            what = "a column of another type than"
        else:
            return
        name = self._spec.name
        raise ConfigurationError(
            f"data set {name!r}: file {position + 1} by name has {what} the first one: write all files with one "
            f"schema. Policy key: data_sets.{name}.path."
        )


@contextmanager
def _opened_at(path: Path) -> Iterator[tuple[_Mark, arrow_parquet.ParquetFile]]:
    """Open a file, with what tells it from a changed one. Raises: OSError, pyarrow.ArrowException."""
    with pa.OSFile(os.fsencode(path)) as source:  # names need not be texts
        status = os.fstat(source.fileno())
        source.seek(max(status.st_size - _FOOTER_END, 0))
        end = source.read(_FOOTER_END)
        length = min(int.from_bytes(end[:4], "little"), status.st_size)
        source.seek(max(status.st_size - _FOOTER_END - length, 0))
        footer = hashlib.blake2b(source.read(length) + end, digest_size=16).digest()
        source.seek(0)
        mark = _Mark(_place(status), status.st_size, status.st_mtime_ns, footer)
        # Buffered, or some rows of a row group would bring all bytes of the group into memory.
        yield mark, arrow_parquet.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def _another_file(spec: DataSet, number: int, what: str) -> ConfigurationError:
    name = spec.name
    return ConfigurationError(
        f"file {number} by name of data set {name!r} {what} that of the site's own process. Policy keys: "
        f"data_sets.{name}.path, cluster.workers_read. Remedy: have workers reach the same files at the same path, or "
        "let the site's process hand out rows (false)."
    )


def _group_rows(file: arrow_parquet.ParquetFile) -> tuple[int, ...]:
    metadata = file.metadata
    return tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))


def _place(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _rows_of(
    file: arrow_parquet.ParquetFile, part: _Part, columns: Sequence[str], low: int, high: int
) -> Iterator[pa.Table]:
    """Yield rows of one file, reading the row groups that hold them."""
    if (low, high) == (part.first, part.end):
        yield _of(file.read(columns=list(columns)), columns)
        return
    yield from _batches_of(file, part, columns, low, high, _BATCH_ROWS)


def _batches_of(
    file: arrow_parquet.ParquetFile, part: _Part, columns: Sequence[str], low: int, high: int, most_rows: int
) -> Iterator[pa.Table]:
    """Yield rows of one file some at a time, from the row groups that hold them."""
    groups: list[int] = []
    start, skipped = part.first, 0
    for group, n_rows in enumerate(part.group_rows):
        if start + n_rows > low and start < high:
            if not groups:
                skipped = low - start
            groups.append(group)
        start += n_rows
    wanted = high - low
    for batch in file.iter_batches(batch_size=most_rows, row_groups=groups, columns=list(columns)):
        taken = batch.slice(skipped, wanted)
        skipped = max(skipped - batch.num_rows, 0)
        wanted -= taken.num_rows
        if taken.num_rows:
            yield _of(taken, columns)
        if not wanted:
            return


def _of(rows: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> pa.Table:
    """Return columns in order, without what files note of them (whether they may lack values, a tool's own notes)."""
    return pa.table([rows.column(name) for name in columns], names=list(columns))
