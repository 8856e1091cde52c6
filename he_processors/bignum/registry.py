"""Choose the backend that runs the big-number batches on this machine (he_processors/backends.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from he_processors.backends import AUTO as AUTO
from he_processors.backends import Registry, imported
from he_processors.bignum.interface import ModBatch
from he_processors.errors import BackendUnavailable

ENVIRONMENT_VARIABLE = "VEILBOOST_BIGNUM"

ModBatchFactory = Callable[[int], ModBatch]


def _load(module: str, missing: str, *arguments: str) -> ModBatchFactory:
    """Return a module's backend. Raises: BackendUnavailable: it, or what it loads late, cannot be imported."""
    try:
        factory: ModBatchFactory = imported(f"he_processors.bignum.{module}", "load", missing)(*arguments)
    except ImportError as error:
        raise BackendUnavailable(missing) from error
    return factory


_NOT_BUILT = "the native extension was not built"
_LOADERS: dict[str, Callable[[], ModBatchFactory]] = {
    "cuda": partial(_load, "cuda", "CuPy is not installed"),
    "ifma": partial(_load, "native", _NOT_BUILT, "ifma"),
    "avx2": partial(_load, "native", _NOT_BUILT, "avx2"),
    "portable": partial(_load, "native", _NOT_BUILT, "portable"),
    "gmpy2": partial(imported, "he_processors.bignum.gmp", "GmpBatch", "gmpy2 is not installed"),
    "reference": partial(imported, "he_processors.bignum.reference", "ReferenceBatch"),
}
BACKENDS = Registry("big-number", ENVIRONMENT_VARIABLE, _LOADERS)
BACKEND_NAMES = tuple(_LOADERS)
load_backend, available_backends = BACKENDS.load, BACKENDS.available


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
    name = BACKENDS.asked_for(name)
    if name != AUTO:
        return load_backend(name)(modulus)
    for candidate in BACKEND_NAMES:
        if BACKENDS.failure(candidate) is not None:
            continue
        try:
            arithmetic = load_backend(candidate)(modulus)
        except BackendUnavailable as error:
            BACKENDS.log_once(f"{candidate} passed over: {error}")
        else:
            BACKENDS.log_choice(candidate)
            return arithmetic
    raise BackendUnavailable("no big-number backend runs on this machine")
