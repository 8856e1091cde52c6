"""What stands on a worker: one object of the installed package at a time, made and called by name.

Only names and plain values arrive (``plain_values``), never code, so that a worker does what the package that is
installed there does. Errors go back as words: an exception that was pickled would carry what it holds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import he_processors.errors
from he_processors.errors import VeilBoostError
from nvflare_plugins.cluster.peers import ExchangeOver, PeerLost, Peers
from nvflare_plugins.cluster.plain_values import require_plain
from nvflare_plugins.failures import reason_of

DONE, REFUSED, FAILED = "done", "refused", "failed"
LOST, OVER = "lost", "over"
_PACKAGE = "nvflare_plugins."


class WorkerPart:
    """What may stand on a worker: a subclass in this package, whose public methods take and return plain values.

    Its methods are called one at a time, in the order in which the site asked, all in one thread. A method that waits
    for XGBoost has XGBoost in a thread of its own.

    Attributes:
        peers: the other workers of the site; None where there is no other.
    """

    peers: Peers | None = None

    def end(self) -> None:
        """Let go of everything, threads too; called before another one takes the place, and at the end."""


class Trial(WorkerPart):
    """Shows that a worker answers over the way that private values will take."""

    def echo(self, value: bytes) -> bytes:
        """Return the same."""
        return value


class Desk:
    """The one object that a cluster's worker makes for a site."""

    def __init__(self) -> None:
        self._part: WorkerPart | None = None
        self.peers: Peers | None = None

    def join(self, peers: Peers) -> None:
        """Let the parts that are made from now on exchange values with other workers'."""
        self.peers = peers

    def begin(self, path: str, args: tuple[Any, ...]) -> tuple[str, Any, str]:
        """Make the object. Args: path: "nvflare_plugins.module:Class"."""
        return self._told(lambda: self._begin(path, args))

    def call(self, method: str, args: tuple[Any, ...]) -> tuple[str, Any, str]:
        """Call a method of it.

        Returns:
            DONE, its value, nothing; REFUSED, the kind of one of our own errors, its words; LOST, the number of another
            worker, which cannot be reached, nothing; OVER, None, nothing, where the site has ended the exchange; or
            FAILED, the kind of another error, what may be said of it.
        """
        return self._told(lambda: self._call(method, args))

    def end(self) -> tuple[str, Any, str]:
        """Let the object go."""
        return self._told(self._end)

    def _begin(self, path: str, args: tuple[Any, ...]) -> None:
        self._end()
        module, _, name = path.partition(":")
        if not module.startswith(_PACKAGE):
            raise TypeError("a part of another package")
        part = getattr(import_module(module), name)
        if not (isinstance(part, type) and issubclass(part, WorkerPart)):
            raise TypeError("no part that stands on a worker")
        self._part = part(*args)
        self._part.peers = self.peers

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self._part is None or method.startswith("_"):
            raise TypeError("no part to call, or no method of one")
        value = getattr(self._part, method)(*args)
        require_plain(value)
        return value

    def _end(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.end()

    @staticmethod
    def _told(work: Any) -> tuple[str, Any, str]:
        try:
            return DONE, work(), ""
        except VeilBoostError as error:
            return REFUSED, type(error).__name__, str(error)
        except PeerLost as error:
            return LOST, error.number, ""
        except ExchangeOver:
            return OVER, None, ""
        except Exception as error:
            return FAILED, type(error).__name__, reason_of(error)


def error_of(kind: str, words: str) -> VeilBoostError:
    """Return one of our own errors as it was raised at a worker."""
    found = getattr(he_processors.errors, kind, VeilBoostError)
    if not (isinstance(found, type) and issubclass(found, VeilBoostError)):
        found = VeilBoostError
    return found(words)
