"""Writing files so that a reader finds either the old content or the new one, never half."""

from __future__ import annotations

import csv
import io
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_plugins.formatting import inert

if TYPE_CHECKING:
    import pandas as pd


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a file whole or not at all, also if it is interrupted. Returns its path."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.partial")
    partial.unlink(missing_ok=True)  # of a process that was killed
    # A name that others can guess, in a folder that may be theirs too: no link of theirs is followed.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def write_durably(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a file whole, there and not the old one if the machine stops right after; return its path."""
    write_atomically(path, content, mode)
    sync_folder(path.parent)
    return path


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


def write_results(path: Path, table: pd.DataFrame) -> int:
    """Write rows for people, as ``write_private_table``; as CSV without what a spreadsheet would compute.

    Ids and names of classes are texts of others. In CSV those that begin like a formula get an apostrophe before them
    (``formatting.inert``). Parquet says what is text, and keeps them as they are.

    Returns:
        How many cells, and names of columns, were changed.
    """
    n_changed = 0
    if path.suffix == ".csv":
        table = table.copy()
        for place, kind in enumerate(table.dtypes):
            cells = [] if kind.kind in "biufcMm" else list(table.iloc[:, place])
            changed = [inert(cell) if isinstance(cell, str) else cell for cell in cells]
            n = sum(cell is not before for cell, before in zip(changed, cells, strict=True))
            if n:
                table.isetitem(place, changed)
            n_changed += n
        names = [inert(str(name)) for name in table.columns]
        n_changed += sum(name != str(before) for name, before in zip(names, table.columns, strict=True))
        table = table.set_axis(names, axis=1)
    write_private_table(path, table)
    return n_changed


def _csv(table: pd.DataFrame) -> bytes:
    text: str = table.to_csv(index=False)
    if "\r" in text:  # Python's writer quotes a line feed alone, and readers take both for the end of a row
        text = table.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)
    return text.encode()
