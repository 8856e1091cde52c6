"""Where a command may write what it makes."""

from __future__ import annotations

from pathlib import Path

from he_processors.errors import ConfigurationError
from nvflare_plugins.base.formatting import printable

DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading a run's files ends in where they are not as they were written: their fields are looked at where used."""


def check_output(option: str, path: Path, *suffixes: str) -> None:
    """Refuse a name that might be that of another file (a ledger, a model, a log), before any work is done.

    Args:
        option: whose argument it is, for the message.
        suffixes: what such files end in.

    Raises:
        ConfigurationError: it has another ending, or cannot be a file there.
    """
    shown = printable(str(path))
    if path.suffix.lower() not in suffixes:
        raise ConfigurationError(f"{option} {shown}: the name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ConfigurationError(f"{option} {shown} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{option} {shown} lies in a folder that is not there: make it first")
