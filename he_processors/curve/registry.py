"""Choose the backend that runs the curve on this machine.

``auto`` takes the fastest that runs here and logs which one, as a warning where the package was installed without a C
compiler; a backend asked for by name runs or raises. The environment variable ``VEILBOOST_CURVE`` stands in for
``auto``, and counts as asking by name.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache, partial

from he_processors.curve.interface import Curve
from he_processors.errors import BackendUnavailable, ConfigurationError

AUTO = "auto"
ENVIRONMENT_VARIABLE = "VEILBOOST_CURVE"

_log = logging.getLogger(__name__)


def _load_reference() -> Curve:
    curve: Curve = importlib.import_module("he_processors.curve.reference").ReferenceCurve()
    return curve


def _load_native(variant: str) -> Curve:
    curve: Curve = importlib.import_module("he_processors.curve.native").load(variant)
    return curve


# Fastest first. A loader returns the curve, or raises BackendUnavailable with the reason.
_LOADERS: dict[str, Callable[[], Curve]] = {
    "ifma": partial(_load_native, "ifma"),
    "avx2": partial(_load_native, "avx2"),
    "portable": partial(_load_native, "portable"),
    "reference": _load_reference,
}

BACKEND_NAMES: tuple[str, ...] = tuple(_LOADERS)


def load_backend(name: str) -> Curve:
    """Return the curve of the named backend.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the backend cannot run on this machine.
    """
    if name not in _LOADERS:
        raise ConfigurationError(f"unknown curve backend; known: {', '.join(BACKEND_NAMES)}, {AUTO}")
    return _LOADERS[name]()


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that run on this machine, fastest first."""
    return tuple(name for name in BACKEND_NAMES if _why_unavailable(name) is None)


def open_curve(name: str = AUTO) -> Curve:
    """Open batch arithmetic on the curve.

    Args:
        name: a backend's name, or ``auto`` for the fastest that runs here.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the backend asked for by name cannot run on this machine.
    """
    if name == AUTO:
        name = os.environ.get(ENVIRONMENT_VARIABLE, AUTO)
    if name != AUTO:
        return load_backend(name)
    name = available_backends()[0]
    skipped = [f"{other}: {_why_unavailable(other)}" for other in BACKEND_NAMES[: BACKEND_NAMES.index(name)]]
    text = f"curve backend {name} runs" + (f" (not here: {'; '.join(skipped)})" if skipped else "")
    _log_once(text, logging.WARNING if _why_unavailable("portable") else logging.INFO)
    return load_backend(name)


@cache
def _why_unavailable(name: str) -> str | None:
    try:
        load_backend(name)
    except BackendUnavailable as error:
        return str(error)
    return None


@cache
def _log_once(message: str, level: int) -> None:
    _log.log(level, message)
