"""C sources of the native backends and, where a compiler was at hand, the extensions built from them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from he_processors.errors import BackendUnavailable

INTERFACE = 6
"""What is asked of an extension; raised together with that of interface.h whenever a C source changes."""


def extension(name: str, package: str = __name__, interface: int = INTERFACE) -> Any:
    """Return an extension of a package; None where it was not built.

    Args:
        interface: what is asked of it.

    Raises:
        BackendUnavailable: it was built from other sources than those that lie here: its functions may have changed.
    """
    try:
        module = importlib.import_module(f"{package}.{name}")
    except ImportError:
        return None
    if getattr(module, "INTERFACE", None) != interface:
        file = f"{package.replace('.', '/')}/{Path(module.__file__ or name).name}"
        raise BackendUnavailable(
            f"{file} was built from other sources than those beside it. Remedy: build it again "
            "(`pip install -e .` in the checkout, or `make`), or delete the file to go on without it, more slowly"
        )
    return module
