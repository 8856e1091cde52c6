"""C sources of the kernels of growth and, where a compiler was at hand, the extensions built from them."""

from __future__ import annotations

import logging
from functools import cache

from he_processors._native import extension

_log = logging.getLogger(__name__)

INTERFACE = 3
"""What is asked of the extensions; raised together with growth.h's when a C source changes."""

NUMPY = "numpy"

growth = extension("_growth", __name__, INTERFACE)
float32 = extension("_float32", __name__, INTERFACE)


def variants() -> tuple[str, ...]:
    """Return the ways to compute on this machine, fastest first; the last one is always ``NUMPY``.

    Results are equal to the bit.
    """
    return (*(() if growth is None else growth.instruction_sets()), NUMPY)


BEST = variants()[0]


@cache
def say_so_once() -> None:
    """Warn if there is no extension."""
    if growth is None:
        _log.warning("trees are grown in numpy, many times more slowly: the package was installed without a C compiler")
