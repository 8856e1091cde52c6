"""Rows from a database into a dated Parquet file: what jobs read afterwards, and never the database itself.

Everything is the site's own: address, query and folder stand in its policy, and no job can name or change them. Nothing
is sent. The password comes from the environment or a file that its owner alone can read; it stands in no file that is
written, no log and no error. Errors of databases quote statements, values and addresses: of them only the kind is said.

Some rows are held at a time. Only the last one tells which type a column has, so that rows first go into a file without
a name in the same folder, of mode 0600, which is gone when the process ends, however it ends.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as arrow_parquet

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.files import make_folder, sync_folder, written_atomically
from nvflare_plugins.data.declaration import SnapshotSource, snapshot_name, snapshots_in

_BATCH_ROWS = 10_000
_GROUP_VALUES = 1 << 22
"""Values of a row group of the file, or those of one batch where these are more."""
_READ_ONLY = dict.fromkeys(("postgresql", "mysql", "mariadb", "oracle"), "SET TRANSACTION READ ONLY")
_READ_ONLY["sqlite"] = "PRAGMA query_only = ON"


@dataclass(frozen=True, slots=True)
class Taken:
    """One snapshot. Attributes: read_only: whether the database held the query to reading."""

    path: Path
    n_rows: int
    n_columns: int
    read_only: bool
    removed: tuple[Path, ...]


def take_snapshot(
    source: SnapshotSource, keep: int | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Taken:
    """Run the query, write its rows as a new snapshot (mode 0600, whole or not at all), remove older ones.

    Args:
        keep: how many snapshots of the name stay, the new one among them; None removes none.

    Raises:
        ConfigurationError: the extra is not installed, the policy asks for what cannot be, the database refuses, the
            password is not there, or there are more rows than ``max_rows``; then nothing has been written.
    """
    with ExitStack() as stack:
        with _connected(source) as (connection, read_only):
            rows = _read(connection, source, stack)
        make_folder(source.folder)
        path = source.folder / snapshot_name(source.name, now())
        if path.exists():
            raise _error(source, "has a snapshot of this very second: take it again")
        schema = rows.schema(source)
        with written_atomically(path, 0o600) as file, arrow_parquet.ParquetWriter(file, schema) as writer:
            for group in rows.groups(source, schema):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
        sync_folder(path.parent)
    return Taken(path, rows.n_rows, len(rows.names), read_only, _prune(source, keep))


def _prune(source: SnapshotSource, keep: int | None) -> tuple[Path, ...]:
    if keep is None:
        return ()
    own = [path for path, name in snapshots_in(source.folder).items() if name == source.name]
    removed = tuple(own[: max(len(own) - keep, 0)])
    for path in removed:
        path.unlink()
    return removed


# -- the database -----------------------------------------------------------------------------------------------------


@contextmanager
def _connected(source: SnapshotSource) -> Iterator[tuple[Any, bool]]:
    """Connect, in a transaction that only reads where the database has such, and that is rolled back in any case."""
    try:
        import sqlalchemy
    except ImportError:
        raise _error(source, "needs SQLAlchemy: pip install 'veilboost[snapshot]'") from None
    address = _address(source, sqlalchemy)
    try:
        engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool, hide_parameters=True)
        opened = engine.connect()
    except Exception as error:  # drivers raise what they like where they do not know an option of the address
        raise _database_error(source, error) from None
    try:
        with opened as connection:
            statement = _READ_ONLY.get(engine.dialect.name)
            if statement is not None:
                connection.execute(sqlalchemy.text(statement))
            try:
                yield connection, statement is not None
            finally:
                connection.rollback()
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise _database_error(source, error) from None


def _database_error(source: SnapshotSource, error: Exception) -> ConfigurationError:
    """Say what kind of error it was, and nothing of its text."""
    original = getattr(error, "orig", None)
    kind = type(error).__name__ if original is None else f"{type(error).__name__}, {type(original).__name__}"
    if isinstance(error, ImportError):
        return _error(source, "needs a driver of its database: install what its address names", "url")
    return _error(source, f"was refused by the database or its driver ({kind}): mend address or query", "url", "query")


def _address(source: SnapshotSource, sqlalchemy: Any) -> Any:
    try:
        address = sqlalchemy.make_url(source.url)
    except sqlalchemy.exc.ArgumentError:
        raise _error(source, "has an address that is none of SQLAlchemy's", "url") from None
    if address.get_backend_name() == "sqlite" and not Path(address.database or "").is_file():
        raise _error(source, "names a SQLite file that is not there", "url")  # SQLite would make an empty one
    password = _password(source)
    return address if password is None else address.set(password=password)


def _password(source: SnapshotSource) -> str | None:
    if source.password_env is not None:
        password = os.environ.get(source.password_env)
        if not password:
            raise _error(source, f"takes its password from the variable {source.password_env}, which is not set")
        return password
    if source.password_file is None:
        return None
    try:
        with source.password_file.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
                raise _error(source, "has a password file that others may read: chmod 600", "password_file")
            content = file.read(1 << 16)
    except OSError as error:
        raise _error(source, f"has a password file that cannot be read ({error.strerror})", "password_file") from None
    try:
        password = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = ""
    if not password:
        raise _error(source, "has a password file without a password", "password_file")
    return password


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows as the database gave them, batch by batch, each in the types that its own values have.

    Attributes:
        opened: returns the file that holds them; asked where there are rows.
        types: of each column, those of its batches in the order in which they came.
        starts: where the batches begin in the file.
    """

    names: list[str]
    types: list[dict[pa.DataType, None]]
    opened: Callable[[], IO[bytes]]
    file: IO[bytes] | None = None
    starts: list[int] = field(default_factory=list)
    n_rows: int = 0

    def append(self, columns: Sequence[pa.Array]) -> None:
        """Put a batch behind the others."""
        for types, column in zip(self.types, columns, strict=True):
            types[column.type] = None
        file = self.file = self.file or self.opened()
        self.starts.append(file.tell())
        batch = pa.record_batch(list(columns), names=self.names)
        with pa.ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)
        self.n_rows += batch.num_rows

    def schema(self, source: SnapshotSource) -> pa.Schema:
        """Return the columns' types over all batches. Raises: ConfigurationError."""
        return pa.schema(
            [(name, _joined(source, name, types)) for name, types in zip(self.names, self.types, strict=True)]
        )

    def groups(self, source: SnapshotSource, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield all rows, some at a time; one empty table where there are none. Raises: ConfigurationError."""
        most_rows, n_kept = _GROUP_VALUES // max(1, len(self.names)), 0
        kept: list[pa.RecordBatch] = []
        for batch in self._batches():
            columns = [_cast(source, column, of) for column, of in zip(batch.columns, schema, strict=True)]
            if kept and n_kept + batch.num_rows > most_rows:
                yield pa.Table.from_batches(kept)
                kept, n_kept = [], 0
            kept.append(pa.record_batch(columns, schema=schema))
            n_kept += batch.num_rows
        yield pa.Table.from_batches(kept, schema=schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if self.file is None:
            return
        for start in self.starts:
            self.file.seek(start)
            with pa.ipc.open_stream(self.file) as stream:
                yield stream.read_next_batch()


def _read(connection: Any, source: SnapshotSource, stack: ExitStack) -> _Rows:
    """Read all rows, batch by batch. Args: stack: closes the file that holds them. Raises: ConfigurationError."""
    import sqlalchemy

    result = connection.execution_options(stream_results=True).execute(sqlalchemy.text(source.query))
    names = list(map(str, result.keys()))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise _error(source, f"gives two columns the name {repeated[0]!r}: name them apart (AS)", "query")
    found = _Rows(names, [{} for _ in names], lambda: _file_without_name(source.folder, stack))
    for rows in result.partitions(_BATCH_ROWS):
        if found.n_rows + len(rows) > source.max_rows:
            raise _error(source, f"gives more than {source.max_rows} rows: limit the query, or raise it", "max_rows")
        columns = [_array(source, name, values) for name, values in zip(names, zip(*rows, strict=True), strict=True)]
        found.append(columns)
    return found


def _file_without_name(folder: Path, stack: ExitStack) -> IO[bytes]:
    """Open a file that no folder lists; a folder that is made for it goes if it stays empty."""
    if not folder.is_dir():
        make_folder(folder)
        stack.callback(_remove_empty, folder)
    return stack.enter_context(tempfile.TemporaryFile(dir=folder))


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _array(source: SnapshotSource, name: str, values: Sequence[Any]) -> pa.Array:
    """Return one batch of a column in the type that its values have; None is missing, and so is a decimal NaN."""
    kept = [_plain(value) for value in values]
    if any(isinstance(value, bytes | memoryview) for value in kept):
        raise _type_error(source, name)
    try:
        return pa.array(kept)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise _type_error(source, name) from None  # the reason could quote a value


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal) and not value.is_finite():
        return None
    return value


def _joined(source: SnapshotSource, name: str, types: Collection[pa.DataType]) -> pa.DataType:
    """Return the type of a column: of numbers the widest of its batches', other types have to agree."""
    if not types:
        return pa.null()
    try:
        schemas = [pa.schema([("column", one)]) for one in types]
        wanted = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        raise _type_error(source, name) from None
    if any(_is_text(one) != _is_text(wanted) for one in types if not pa.types.is_null(one)):
        raise _type_error(source, name)
    return wanted


def _cast(source: SnapshotSource, column: pa.Array, wanted: pa.Field) -> pa.Array:
    try:
        return column.cast(wanted.type)
    except pa.ArrowException:
        raise _type_error(source, wanted.name) from None  # the reason could quote a value


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _type_error(source: SnapshotSource, name: str) -> ConfigurationError:
    return _error(
        source,
        f"gives column {name!r} values of several types, or of one that a table cannot hold: make it numbers, text or "
        "dates in the query (CAST)",
        "query",
    )


def _error(source: SnapshotSource, what: str, *keys: str) -> ConfigurationError:
    named = " and ".join(f"snapshots.{source.name}.{key}" for key in keys)
    return ConfigurationError(f"snapshot {source.name!r} {what}." + (f" Policy key: {named}." if named else ""))
