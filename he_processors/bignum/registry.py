"""Choose the backend that runs the big-number batches on this machine.

``auto`` takes the fastest that runs here and logs which one, as a warning where the package was installed without a C
compiler; a backend asked for by name runs or raises. The environment variable ``VEILBOOST_BIGNUM`` stands in for
``auto``, and counts as asking by name.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import cache, partial

from he_processors.bignum.interface import ModBatch
from he_processors.errors import BackendUnavailable, ConfigurationError

AUTO = "auto"
ENVIRONMENT_VARIABLE = "VEILBOOST_BIGNUM"

ModBatchFactory = Callable[[int], ModBatch]

_log = logging.getLogger(__name__)


def _load_reference() -> ModBatchFactory:
    factory: ModBatchFactory = importlib.import_module("he_processors.bignum.reference").ReferenceBatch
    return factory


def _load_gmpy2() -> ModBatchFactory:
    try:
        factory: ModBatchFactory = importlib.import_module("he_processors.bignum.gmp").GmpBatch
        return factory
    except ImportError as error:
        raise BackendUnavailable("gmpy2 is not installed") from error


def _load_native(variant: str) -> ModBatchFactory:
    try:
        factory: ModBatchFactory = importlib.import_module("he_processors.bignum.native").load(variant)
        return factory
    except ImportError as error:
        raise BackendUnavailable("the native extension was not built") from error


def _load_cuda() -> ModBatchFactory:
    try:
        factory: ModBatchFactory = importlib.import_module("he_processors.bignum.cuda").load()
        return factory
    except ImportError as error:
        raise BackendUnavailable("CuPy is not installed") from error


# Fastest first. A loader returns the factory, or raises BackendUnavailable with the reason.
_LOADERS: dict[str, Callable[[], ModBatchFactory]] = {
    "cuda": _load_cuda,
    "ifma": partial(_load_native, "ifma"),
    "avx2": partial(_load_native, "avx2"),
    "portable": partial(_load_native, "portable"),
    "gmpy2": _load_gmpy2,
    "reference": _load_reference,
}

BACKEND_NAMES: tuple[str, ...] = tuple(_LOADERS)


def load_backend(name: str) -> ModBatchFactory:
    """Return the factory of the named backend.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the backend cannot run on this machine.
    """
    if name not in _LOADERS:
        raise ConfigurationError(f"unknown big-number backend; known: {', '.join(BACKEND_NAMES)}, {AUTO}")
    return _LOADERS[name]()


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that run on this machine, fastest first."""
    return tuple(name for name in BACKEND_NAMES if _why_unavailable(name) is None)


def open_backend(name: str, modulus: int) -> ModBatch:
    """Open batch arithmetic modulo ``modulus``.

    Args:
        name: a backend's name, or ``auto`` for the fastest that runs here and takes this modulus.
        modulus: the odd modulus.

    Raises:
        ConfigurationError: no backend has this name.
        BackendUnavailable: the backend asked for by name cannot run on this machine or not with this modulus.
        ValueError: the modulus is even or too small.
    """
    if name == AUTO:
        name = os.environ.get(ENVIRONMENT_VARIABLE, AUTO)
    if name != AUTO:
        return load_backend(name)(modulus)
    for candidate in BACKEND_NAMES:
        if _why_unavailable(candidate) is not None:
            continue
        try:
            return _chosen(candidate, load_backend(candidate)(modulus))
        except BackendUnavailable as error:
            _log_once(f"big-number backend {candidate} passed over: {error}")
    raise BackendUnavailable("no big-number backend runs on this machine")


def _chosen(name: str, arithmetic: ModBatch) -> ModBatch:
    skipped = [f"{other}: {_why_unavailable(other)}" for other in BACKEND_NAMES[: BACKEND_NAMES.index(name)]]
    text = f"big-number backend {name} runs" + (f" (not here: {'; '.join(skipped)})" if skipped else "")
    _log_once(text, logging.WARNING if _why_unavailable("portable") else logging.INFO)
    return arithmetic


@cache
def _why_unavailable(name: str) -> str | None:
    try:
        load_backend(name)
    except BackendUnavailable as error:
        return str(error)
    return None


@cache
def _log_once(message: str, level: int = logging.INFO) -> None:
    _log.log(level, message)
