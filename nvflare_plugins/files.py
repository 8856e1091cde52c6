"""Writing files so that a reader finds either the old content or the new one, never half."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a file whole or not at all. Returns its path."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
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
        return write_atomically(path, table.to_csv(index=False).encode(), 0o600)
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return write_atomically(path, content.getvalue(), 0o600)
