"""Choose the backend that runs the curve on this machine (he_processors/backends.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from he_processors.backends import AUTO as AUTO
from he_processors.backends import Registry, imported
from he_processors.curve.interface import Curve

ENVIRONMENT_VARIABLE = "VEILBOOST_CURVE"


def _load(module: str, name: str, *arguments: str) -> Curve:
    curve: Curve = imported(f"he_processors.curve.{module}", name)(*arguments)
    return curve


_LOADERS: dict[str, Callable[[], Curve]] = {
    "ifma": partial(_load, "native", "load", "ifma"),
    "avx2": partial(_load, "native", "load", "avx2"),
    "portable": partial(_load, "native", "load", "portable"),
    "reference": partial(_load, "reference", "ReferenceCurve"),
    "cuda": partial(_load, "cuda", "load"),  # behind one that always runs: only by name, until a device has measured it
}
BACKENDS = Registry("curve", ENVIRONMENT_VARIABLE, _LOADERS)
BACKEND_NAMES = tuple(_LOADERS)
load_backend, available_backends = BACKENDS.load, BACKENDS.available


def open_curve(name: str = AUTO) -> Curve:
    """Open batch arithmetic on the curve.

    Args:
        name: a backend's name, or ``auto`` for the fastest that runs here; ``cuda`` has to be asked for.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the backend asked for by name cannot run on this machine.
    """
    name = BACKENDS.asked_for(name)
    if name == AUTO:
        name = BACKENDS.first()
        BACKENDS.log_choice(name)
    return load_backend(name)
