"""Writing files so that a reader finds either the old content or the new one, never half."""

from __future__ import annotations

import os
from pathlib import Path


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
    """Write a file whole, so that it is there and not the old one if the machine stops right after. Returns its path."""
    write_atomically(path, content, mode)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path
