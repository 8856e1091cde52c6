"""Rows from a database into a dated Parquet file: what jobs read afterwards, and never the database itself.

Everything is the site's own: address, query and folder stand in its policy, and no job can name or change them. Nothing
is sent. The password comes from the environment or a file that its owner alone can read; it stands in no file that is
written, no log and no error. Errors of databases quote statements, values and addresses: of them only the kind is said.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as arrow_parquet

from he_processors.errors import ConfigurationError
from nvflare_plugins.data_sets.declaration import SnapshotSource
from nvflare_plugins.data_sets.snapshot_files import snapshot_name, snapshots_in
from nvflare_plugins.files import write_durably

_BATCH_ROWS = 10_000
_READ_ONLY = {
    "sqlite": "PRAGMA query_only = ON",
    "postgresql": "SET TRANSACTION READ ONLY",
    "mysql": "SET TRANSACTION READ ONLY",
    "mariadb": "SET TRANSACTION READ ONLY",
    "oracle": "SET TRANSACTION READ ONLY",
}


@dataclass(frozen=True, slots=True)
class Taken:
    """One snapshot. Attributes: read_only: whether the database held the query to reading."""

    path: Path
    n_rows: int
    n_columns: int
    read_only: bool
    removed: tuple[Path, ...]


def take_snapshot(
    source: SnapshotSource,
    keep: int | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Taken:
    """Run the query, write its rows as a new snapshot (mode 0600, whole or not at all), remove older ones.

    Args:
        keep: how many snapshots of the name stay, the new one among them; None removes none.

    Raises:
        ConfigurationError: the extra is not installed, the policy asks for what cannot be, the database refuses, the
            password is not there, or there are more rows than ``max_rows``; then nothing has been written.
    """
    with _connected(source) as (connection, read_only):
        table = _read(connection, source)
    source.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = source.folder / snapshot_name(source.name, now())
    if path.exists():
        raise _error(source, "has a snapshot of this very second: take it again")
    content = io.BytesIO()
    arrow_parquet.write_table(table, content)
    write_durably(path, content.getvalue(), mode=0o600)
    return Taken(path, table.num_rows, table.num_columns, read_only, _prune(source, keep))


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


def _read(connection: Any, source: SnapshotSource) -> pa.Table:
    """Read all rows as Arrow columns, batch by batch. Raises: ConfigurationError."""
    import sqlalchemy

    result = connection.execution_options(stream_results=True).execute(sqlalchemy.text(source.query))
    names = list(map(str, result.keys()))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise _error(source, f"gives two columns the name {repeated[0]!r}: name them apart (AS)", "query")
    columns: list[list[pa.Array]] = [[] for _ in names]
    n_rows = 0
    for rows in result.partitions(_BATCH_ROWS):
        n_rows += len(rows)
        if n_rows > source.max_rows:
            raise _error(source, f"gives more than {source.max_rows} rows: limit the query, or raise it", "max_rows")
        for column, name, values in zip(columns, names, zip(*rows, strict=True), strict=True):
            column.append(_array(source, name, values))
    return pa.table({name: _joined(source, name, column) for name, column in zip(names, columns, strict=True)})


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


def _joined(source: SnapshotSource, name: str, batches: list[pa.Array]) -> pa.ChunkedArray:
    """Put the batches of a column together: numbers become the widest of their types, other types have to agree."""
    if not batches:
        return pa.chunked_array([pa.nulls(0)])
    try:
        kind = pa.unify_schemas(
            [pa.schema([("column", batch.type)]) for batch in batches], promote_options="permissive"
        )
        wanted = kind.field(0).type
        if any(_is_text(batch.type) != _is_text(wanted) for batch in batches if not pa.types.is_null(batch.type)):
            raise _type_error(source, name)
        return pa.chunked_array([batch.cast(wanted) for batch in batches], type=wanted)
    except pa.ArrowException:
        raise _type_error(source, name) from None


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
