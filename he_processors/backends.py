"""A choice of backends that do the same: the fastest that runs on this machine, or one that is asked for by name.

``auto`` takes the fastest that runs here and logs which one, as a warning where the package was installed without a C
compiler; a backend asked for by name runs or raises. An environment variable stands in for ``auto``, and counts as
asking by name.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from he_processors.errors import BackendUnavailable, ConfigurationError

AUTO = "auto"
Backend = TypeVar("Backend")

_log = logging.getLogger(__name__)


def imported(module: str, name: str, missing: str = "a part of the package is missing") -> Any:
    """Return a name of a module, or raise BackendUnavailable with what is ``missing`` where it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BackendUnavailable(missing) from error


class Registry(Generic[Backend]):
    """The backends of one kind, by name, fastest first."""

    def __init__(self, kind: str, variable: str, loaders: dict[str, Callable[[], Backend]]) -> None:
        """Take note of them; none is loaded.

        Args:
            kind: what they are, for errors and logs.
            variable: the environment variable that stands in for ``auto``.
            loaders: each returns the backend, or raises BackendUnavailable with the reason.
        """
        self._kind, self._variable, self._loaders = kind, variable, loaders
        self._failures: dict[str, str | None] = {}
        self._said: set[str] = set()

    def load(self, name: str) -> Backend:
        """Return the named backend.

        Raises:
            ConfigurationError: no backend has this name.
            BackendUnavailable: the backend cannot run on this machine.
        """
        if name not in self._loaders:
            raise ConfigurationError(f"unknown {self._kind} backend; known: {', '.join(self._loaders)}, {AUTO}")
        return self._loaders[name]()

    def available(self) -> tuple[str, ...]:
        """Return the names of the backends that run on this machine, fastest first."""
        return tuple(name for name in self._loaders if self.failure(name) is None)

    def first(self) -> str:
        """Return the name of the fastest backend that runs on this machine; slower ones are not tried."""
        return next(name for name in self._loaders if self.failure(name) is None)

    def asked_for(self, name: str) -> str:
        """Return the name that the environment variable gives in the place of ``auto``; other names as they are."""
        return os.environ.get(self._variable, AUTO) if name == AUTO else name

    def failure(self, name: str) -> str | None:
        """Return why a backend does not run on this machine; None if it does. It is tried once."""
        if name not in self._failures:
            try:
                self.load(name)
            except BackendUnavailable as error:
                self._failures[name] = str(error)
            else:
                self._failures[name] = None
        return self._failures[name]

    def log_choice(self, name: str) -> None:
        """Log, once, which backend runs and why no faster one does."""
        names = list(self._loaders)
        skipped = "; ".join(f"{other}: {self.failure(other)}" for other in names[: names.index(name)])
        text = f"{name} runs" + (f" (not here: {skipped})" if skipped else "")
        self.log_once(text, logging.WARNING if self.failure("portable") else logging.INFO)

    def log_once(self, text: str, level: int = logging.INFO) -> None:
        """Log a sentence about a backend, unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            _log.log(level, "%s backend %s", self._kind, text)

    def forget(self) -> None:
        """Forget what runs here and what was logged."""
        self._failures.clear()
        self._said.clear()
