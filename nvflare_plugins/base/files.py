"""Writing files so that a reader finds either the old content or the new one, never half."""

from __future__ import annotations

import csv
import fcntl
import io
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nvflare_plugins.base.formatting import inert

if TYPE_CHECKING:
    import pandas as pd


_ROOM_BYTES = 1 << 20


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a file whole or not at all, also if it is interrupted. Returns its path."""
    with written_atomically(path, mode) as file:
        file.write(content)
    return path


@contextmanager
def written_atomically(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a file that is there whole once all has been written, and not at all if something fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.partial")
    partial.unlink(missing_ok=True)  # of a process that was killed
    descriptor = create_held(partial, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def create_held(path: Path, mode: int) -> int:
    """Create a file, held until it is closed or this process ends; on a volume without locks it is not held.

    Returns:
        Its descriptor, for writing.

    Raises:
        OSError: it is there already, or cannot be made.
    """
    while True:
        # A name that others can guess, in a folder that may be theirs too: no link of theirs is followed.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # before it was held, it was taken for a dead process's and removed


def for_owner(name: str, flags: int) -> int:
    """Open a file as ``open`` does, which is of mode 0600 if it is made: an opener."""
    return os.open(name, flags, 0o600)


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file of mode 0600 to read it and add to it, made if it is not there; one process at a time does."""
    with open(path, "a+b", opener=for_owner) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def held_by_nobody(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files whose process has ended, each held here meanwhile; none on a volume without locks."""
    for path in paths:
        with suppress(OSError), path.open("r+b") as file:  # gone, another user's, or held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                yield path


def write_durably(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a file whole, there and not the old one if the machine stops right after; return its path."""
    write_atomically(path, content, mode)
    sync_folder(path.parent)
    return path


def make_folder(folder: Path, *, is_new: bool = False) -> Path:
    """Make a folder, and those above it that are missing, of mode 0700 whatever the umask; return its path.

    Raises:
        FileExistsError: it is there, and should be new; or something that is no folder is there.
    """
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    if is_new and not missing:
        raise FileExistsError(f"{folder} is there already")
    for path in reversed(missing):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # another process has just made it
            if not path.is_dir() or (is_new and path == folder):
                raise
        else:
            path.chmod(0o700)
    return folder


def copy_folder(source: Path, copy: Path) -> Path:
    """Copy a folder into one that may be there; folders are of mode 0700. Returns the copy's path."""
    make_folder(copy)
    shutil.copytree(source, copy, dirs_exist_ok=True)
    for place in (copy, *(path for path in copy.rglob("*") if path.is_dir() and not path.is_symlink())):
        place.chmod(0o700)
    return copy


def takes_files(folder: Path) -> bool:
    """Return whether a folder's disk takes a file of some size; true of a folder that is not there."""
    path = folder / f".veilboost_room.{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            is_whole = os.write(descriptor, b"\1" * _ROOM_BYTES) == _ROOM_BYTES
            os.fsync(descriptor)
            return is_whole
        finally:
            os.close(descriptor)
            path.unlink()
    except OSError:
        return not folder.is_dir()


def sync_folder(folder: Path) -> None:
    """Make names in a folder as durable as what the files hold."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, durably: it must not be forgotten if the machine stops right after."""
    write_durably(path, content, mode=0o600)


def write_private_table(path: Path, table: pd.DataFrame) -> Path:
    """Write rows as CSV or Parquet, by the name's suffix, for their owner alone. Returns the path."""
    if path.suffix == ".csv":
        return write_atomically(path, _csv(table), 0o600)
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return write_atomically(path, content.getvalue(), 0o600)


def inert_csv(rows: Iterable[Iterable[object]]) -> bytes:
    """Return lines of CSV in which no text is a spreadsheet's formula: names come from other parties."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([inert(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return text.getvalue().encode()


def write_results(path: Path, table: pd.DataFrame) -> int:
    """Write rows for people, as ``write_private_table``; as CSV without what a spreadsheet would compute.

    Ids and names of classes are texts of others. In CSV those that begin like a formula get an apostrophe before them
    (``formatting.inert``). Parquet says what is text, and keeps them as they are.

    Returns:
        How many cells, and names of columns, were changed.
    """
    return write_result_blocks(path, [table])[1]


def write_result_blocks(path: Path, tables: Iterable[pd.DataFrame]) -> tuple[int, int]:
    """Write rows as ``write_results``, block by block as they come; all of them, or no file.

    Returns:
        How many rows were written; how many cells, and names of columns, were changed.

    Raises:
        whatever ``tables`` raises.
    """
    import pyarrow as pa
    import pyarrow.parquet as arrow_parquet

    n_rows = n_changed = 0
    with written_atomically(path, 0o600) as file, ExitStack() as stack:
        writer = None
        for number, table in enumerate(tables):
            n_rows += len(table)
            if path.suffix.lower() == ".csv":
                table, n_cells, n_names = _inert(table)
                n_changed += n_cells + (0 if number else n_names)
                file.write(_csv(table, has_header=number == 0))
                continue
            rows = pa.Table.from_pandas(table, schema=None if writer is None else writer.schema, preserve_index=False)
            writer = writer or stack.enter_context(arrow_parquet.ParquetWriter(file, rows.schema))
            writer.write_table(rows)
    return n_rows, n_changed


def _inert(table: pd.DataFrame) -> tuple[pd.DataFrame, int, int]:
    """Return rows without what a spreadsheet would compute, and how many cells, and names, were changed."""
    n_changed, table = 0, table.copy()
    for place, kind in enumerate(table.dtypes):
        cells = [] if kind.kind in "biufcMm" else list(table.iloc[:, place])
        changed = [inert(cell) if isinstance(cell, str) else cell for cell in cells]
        n = sum(cell is not before for cell, before in zip(changed, cells, strict=True))
        if n:
            table.isetitem(place, changed)
        n_changed += n
    names = [inert(str(name)) for name in table.columns]
    n_names = sum(name != str(before) for name, before in zip(names, table.columns, strict=True))
    return table.set_axis(names, axis=1), n_changed, n_names


def _csv(table: pd.DataFrame, *, has_header: bool = True) -> bytes:
    text: str = table.to_csv(index=False, header=has_header)
    if "\r" in text:  # Python's writer quotes a line feed alone, and readers take both for the end of a row
        text = table.to_csv(index=False, header=has_header, quoting=csv.QUOTE_NONNUMERIC)
    return text.encode()
