"""What a worker says of itself before anything private reaches it, and what it must be."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dp_components
import he_processors
from he_processors.errors import ConfigurationError

_EQUAL = ("veilboost", "xgboost", "numpy", "distributed", "python", "native modules")


def installed() -> dict[str, str]:
    """Return the releases of this process, and digests of the package's own modules."""
    own = {name: _version(name) for name in ("veilboost", "xgboost", "numpy", "distributed")}
    return {**own, "python": ".".join(platform.python_version_tuple()[:2]), "native modules": _native_digest()}


def describe_worker(dask_worker: Any) -> dict[str, Any]:
    """Return what ``check_worker`` looks at. Runs at a worker. Args: dask_worker: given by Dask."""
    memory = dask_worker.memory_manager
    return {
        **installed(),
        "sources": source_digest(),
        "pid": os.getpid(),
        "threads": int(dask_worker.state.nthreads),
        "spills": bool(memory.memory_target_fraction) or bool(memory.memory_spill_fraction),
    }


def check_worker(number: int, found: dict[str, Any]) -> None:
    """Refuse a worker that is not as this process is, or might write rows to a disk.

    Raises:
        ConfigurationError: the message names the worker, what differs, and the remedy.
    """
    here = installed()
    for name in _EQUAL:
        if not _is(found.get(name), here[name]):
            shown = "another build" if name == "native modules" else f"{_word(found.get(name))}, not {here[name]}"
            raise ConfigurationError(
                f"worker {number} of this site's cluster has {name}: {shown}. Remedy: install there what this site "
                "has, for the same kind of machine."
            )
    if not _is(found.get("sources"), source_digest()):
        raise ConfigurationError(
            f"worker {number} of this site's cluster has another VeilBoost of the same version. Remedy: install there "
            "what this site has."
        )
    if not _is(found.get("threads"), 1):
        raise ConfigurationError(
            f"worker {number} of this site's cluster has more than one thread. Remedy: start workers with --nthreads 1."
        )
    if found.get("spills") is not False:
        raise ConfigurationError(
            f"worker {number} of this site's cluster may write what it holds to its disk. Remedy: start workers with "
            "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET=False and DASK_DISTRIBUTED__WORKER__MEMORY__SPILL=False."
        )


def _is(value: object, expected: object) -> bool:
    return type(value) is type(expected) and value == expected


def source_digest() -> str:
    """Return a digest of the Python sources of the package."""
    return _digest("*.py")


def _native_digest() -> str:
    return _digest("*.so")


def _digest(pattern: str) -> str:
    digest = hashlib.sha256()
    for folder in (Path(he_processors.__file__).parent, Path(dp_components.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(folder.rglob(pattern)):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _word(value: object) -> str:
    text = str(value)[:40]
    return text if text.isascii() and text.isprintable() else "?"
