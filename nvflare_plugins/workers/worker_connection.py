"""What stands on a worker: its part, the values that it hands to others, and its line to the site."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import dp_components
import he_processors
import he_processors.errors
from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.base import errors
from nvflare_plugins.base.errors import reason_of

# What may go to a worker and come back: plain values, so that no object of ours, and no secret in one, is pickled.


_SINGLE = (type(None), bool, int, float, str, bytes)
_NUMBERS = "biuf"


def require_plain(value: Any) -> int:
    """Return about how many bytes a value takes on the way.

    Args:
        value: None, a bool, a number, a text, bytes, an array of numbers; lists, tuples and dictionaries of these.

    Raises:
        TypeError: something else; the message names the type alone.
    """
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray or value.dtype.kind not in _NUMBERS:
            raise TypeError(f"an array of {value.dtype} does not go to a worker")
        return int(value.nbytes)
    if type(value) in (bytes, str):
        return len(value)
    if type(value) in _SINGLE:
        return 8
    if type(value) in (list, tuple):
        return sum(map(require_plain, value))
    if type(value) is dict:
        return sum(require_plain(key) + require_plain(one) for key, one in value.items())
    raise TypeError(f"a {type(value).__name__} does not go to a worker")


# Values that a party's workers hand to one another while all of them do one call.
#
# Sums of all workers are added in a tree, and divided on the way (``reduce_scatter``): a group of workers is halved,
# each half gets what the other has of its share, and so on, so that each worker ends with the whole sums of its own
# share after as many steps as the number of workers can be halved. What a worker sends is less than what it holds.
#
# Security: values go straight from worker to worker, under the cluster's own certificates (or over this machine's
# loopback), and are plain values of one party: a worker loads no code that comes with them.


ALL = 1 << 62
"""More than any exchange's number."""
_LOOK_S = 0.5

Parcel = tuple[int, int, int, Any]
"""Number of the exchange and of its step, sender, value."""


class PeerLost(Exception):
    """Another worker cannot be reached."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ExchangeOver(Exception):
    """The site has ended the exchange."""


class Peers:
    """The other workers, as one of them has them. ``deliver``, ``end`` and ``waits_for`` come from other threads.

    Args:
        number: of this worker.
        send: begins to send a parcel to a worker; its future fails where that one cannot be reached.

    Attributes:
        sent_bytes, waited_s: to other workers, and for them, so far.
    """

    def __init__(self, number: int, send: Callable[[int, Parcel], Future[Any]]) -> None:
        self.number, self._send = number, send
        self._changed = threading.Condition()
        self._parcels: dict[tuple[int, int, int], Any] = {}
        self._over = 0
        self._awaited: int | None = None
        self._under_way: list[tuple[int, Future[Any]]] = []
        self.sent_bytes, self.waited_s = 0, 0.0

    def deliver(self, parcel: Parcel) -> None:
        """Take what another worker sends."""
        exchange, step, sender, value = parcel
        with self._changed:
            if exchange > self._over:
                self._parcels[exchange, step, sender] = value
                self._changed.notify_all()

    def end(self, exchange: int) -> None:
        """End this exchange and those before it, for whoever waits and whoever comes to wait."""
        with self._changed:
            self._over = max(self._over, exchange)
            self._parcels = {key: value for key, value in self._parcels.items() if key[0] > self._over}
            self._changed.notify_all()

    def waits_for(self) -> int | None:
        """Return the worker whose parcel is waited for; None where none is."""
        return self._awaited

    def send(self, to: int, exchange: int, step: int, value: Any) -> None:
        """Begin to send a plain value."""
        self.sent_bytes += require_plain(value)
        self._under_way.append((to, self._send(to, (exchange, step, self.number, value))))

    def receive(self, sender: int, exchange: int, step: int) -> Any:
        """Wait for a value. Raises: PeerLost, ExchangeOver."""
        since = time.perf_counter()
        try:
            with self._changed:
                self._awaited = sender
                while (exchange, step, sender) not in self._parcels:
                    self._go_on(exchange)
                    self._changed.wait(_LOOK_S)
                return self._parcels.pop((exchange, step, sender))
        finally:
            self._awaited = None
            self.waited_s += time.perf_counter() - since

    def settle(self, exchange: int) -> None:
        """Wait until all that was sent has arrived. Raises: PeerLost, ExchangeOver."""
        while self._under_way:
            self._go_on(exchange)
            to, future = self._under_way[0]
            self._awaited = to
            wait([future], _LOOK_S)
            self._awaited = None
            if future.done() and future.exception() is None:
                self._under_way.pop(0)

    def _go_on(self, exchange: int) -> None:
        if exchange <= self._over:
            self._under_way.clear()
            raise ExchangeOver
        for to, future in self._under_way:
            if future.done() and future.exception() is not None:
                self._under_way.clear()
                raise PeerLost(to)


def reduce_scatter(
    peers: Peers,
    exchange: int,
    bounds: Sequence[int],
    sums: Any,
    part: Callable[[Any, slice], Any],
    add: Callable[[Any, slice, list[Any]], Any],
) -> Any:
    """Add the sums of all workers; return this one's share of them, None where it has no share.

    Args:
        exchange: its number, the same at all workers, and higher than those before.
        bounds: worker w ends with the sums from bounds[w] to bounds[w + 1].
        sums: of this worker, of all slots.
        part: makes a plain value of a slice of sums.
        add: returns a slice of sums with such values added.

    Raises:
        PeerLost: another worker cannot be reached.
        ExchangeOver: the site has ended the exchange.
    """
    low, high, step = 0, len(bounds) - 1, 0
    while high - low > 1:
        middle = (low + high) // 2
        mine, theirs = (low, middle), (middle, high)
        if peers.number >= middle:
            mine, theirs = theirs, mine
        first, place, n_theirs = bounds[low], peers.number - mine[0], theirs[1] - theirs[0]
        given = slice(bounds[theirs[0]] - first, bounds[theirs[1]] - first)
        if given.start < given.stop:
            peers.send(theirs[0] + min(place, n_theirs - 1), exchange, step, part(sums, given))
        kept = slice(bounds[mine[0]] - first, bounds[mine[1]] - first)
        if kept.start == kept.stop:
            sums = None
            break
        last = mine[1] - mine[0] - 1  # a half may have one worker more: its last one sends to the other's last, too
        senders = [theirs[0] + one for one in range(n_theirs) if min(one, last) == place]
        sums = add(sums, kept, [peers.receive(sender, exchange, step) for sender in senders])
        (low, high), step = mine, step + 1
    peers.settle(exchange)
    return sums


# A connection to one worker, the one object that stands there, and what must hold before.

# What stands on a worker: one object of the installed package at a time, made and called by name.
#
# Only names and plain values arrive (``require_plain``), never code, so that a worker does what the package that is
# installed there does. Errors go back as words: an exception that was pickled would carry what it holds.


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


class PartHost:
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
    found = {**vars(he_processors.errors), **vars(errors)}.get(kind, VeilBoostError)
    if not (isinstance(found, type) and issubclass(found, VeilBoostError)):
        found = VeilBoostError
    return found(words)


# A line between a site's process and one worker: a socket of their own, one question and one answer at a time.
#
# Dask's own messages are copied, wrapped and read by an event loop at both ends, which for a message of a histogram
# cost as much time as adding it up. Here long bytes and arrays go from where they lie to where they will lie, past
# everything but the kernel (and TLS, where the cluster has it); one thread at each end sends, waits and receives.
#
# A message is the length of its form, the form, and the long values in the order in which the form names them. The form
# is a pickle that can hold nothing but plain values: whoever reads it loads no code.


LOOK_S = 0.5
"""How often one who waits looks whether it is still worth it. Units: seconds."""
_READY = b"R"
_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 16
_LEAST_APART = 4096
_NO_FORM = (ArithmeticError, AttributeError, EOFError, LookupError, SyntaxError, TypeError, ValueError)
"""What a form that is none raises besides, in pickle and numpy."""


class WorkerLine:
    """One end. Not safe for concurrent use, but for ``hang_up``."""

    def __init__(self, end: socket.socket, look: Callable[[], None] = lambda: None) -> None:
        """Take a connected socket.

        Args:
            look: called while nothing moves, every ``LOOK_S``; what it raises ends the waiting.
        """
        end.settimeout(LOOK_S)
        self._end, self._look = end, look
        self._incoming = io.BufferedReader(_Incoming(end, look), _BUFFER_BYTES)

    def send(self, content: Any) -> None:
        """Send plain values (``require_plain``). Raises: OSError: the other end is gone."""
        form = io.BytesIO()
        form.write(bytes(_LENGTH.size))
        writer = _Writer(form)
        writer.dump(content)
        view = form.getbuffer()
        _LENGTH.pack_into(view, 0, len(view) - _LENGTH.size)
        for one in (view, *writer.apart):
            self._push(one)

    def receive(self) -> Any:
        """Return what the other end has sent. Raises: OSError: it is gone; UnpicklingError: it sent something else."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        try:
            return _Reader(self._exactly(length), self._exactly, self._exactly_into).load()
        except _NO_FORM:
            raise pickle.UnpicklingError("no form of plain values") from None

    def say_ready(self) -> None:
        """Tell the other end that this one listens."""
        self._push(memoryview(_READY))

    def await_ready(self) -> None:
        """Wait until the other end listens."""
        self._exactly(len(_READY))

    def hang_up(self) -> None:
        """Let both ends find the line dead; who waits in another thread wakes."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # of a TLS socket its layers stay as they are

    def close(self) -> None:
        """Hang up and let the socket go."""
        self.hang_up()
        self._end.close()

    def _push(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                view = view[self._end.send(view) :]
            except TimeoutError:
                self._look()

    def _exactly(self, length: int) -> bytes:
        content = self._incoming.read(length)  # a long one is received where it stays
        if len(content) != length:
            raise ConnectionResetError
        return content

    def _exactly_into(self, view: memoryview) -> None:
        while view.nbytes:
            n_read = self._incoming.readinto(view)
            if not n_read:
                raise ConnectionResetError
            view = view[n_read:]


def serve(
    end: socket.socket,
    host: PartHost,
    functions: Sequence[str] = ("begin", "call", "end"),
    leave: Callable[[], object] | None = None,
) -> None:
    """Answer at a worker what the other end asks, until it hangs up.

    Args:
        functions: of the part host, which may be called.
        leave: called then; left out, the part host's object is let go.
    """
    line = WorkerLine(end)
    try:
        line.say_ready()
        while True:
            line.send(_answer(host, functions, line.receive()))
    except (OSError, pickle.UnpicklingError):
        pass  # nobody asks any more
    finally:
        line.close()
        (leave or host.end)()


def _answer(host: PartHost, functions: Sequence[str], question: object) -> tuple[str, Any, str]:
    match question:
        case (str(function), tuple(args)) if function in functions:
            pass
        case _:
            raise pickle.UnpicklingError("no function of a part host")
    answer: tuple[str, Any, str] = getattr(host, function)(*args)
    return answer


class _Incoming(io.RawIOBase):
    def __init__(self, end: socket.socket, look: Callable[[], None]) -> None:
        self._end, self._look = end, look

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                return self._end.recv_into(buffer)
            except TimeoutError:
                self._look()


class _Writer(pickle.Pickler):
    """Writes a form; what is long is left in ``apart``, to be sent behind it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.apart: list[memoryview] = []

    def persistent_id(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if type(value) is bytes and len(value) >= _LEAST_APART:
            self.apart.append(memoryview(value))
            return len(value)
        if type(value) is np.ndarray:
            lies_by_column = value.flags.f_contiguous and not value.flags.c_contiguous
            flat = value.ravel("F" if lies_by_column else "C")  # a copy only of what does not lie in one piece
            self.apart.append(flat.view(np.uint8).data)
            return value.dtype.str, value.shape, lies_by_column
        return None


class _Reader(pickle.Unpickler):
    """Reads a form; long values are received as it comes to them."""

    def __init__(
        self, form: bytes, exactly: Callable[[int], bytes], exactly_into: Callable[[memoryview], None]
    ) -> None:
        super().__init__(io.BytesIO(form))
        self._exactly, self._exactly_into = exactly, exactly_into

    def persistent_load(self, name: Any) -> Any:
        """See ``pickle.Unpickler``."""
        if type(name) is int and name >= 0:
            return self._exactly(name)
        text, shape, lies_by_column = name
        dtype = np.dtype(str(text))
        if dtype.kind not in _NUMBERS or min(shape, default=0) < 0:
            raise pickle.UnpicklingError("no array of numbers")
        flat = np.empty(prod(shape), dtype=dtype)
        self._exactly_into(flat.view(np.uint8).data)
        return flat.reshape(shape, order="F" if lies_by_column else "C")

    def find_class(self, module: str, name: str) -> Any:
        """Load nothing. Raises: UnpicklingError."""
        raise pickle.UnpicklingError("only plain values go over a line")


# What a worker says of itself before anything private reaches it, and what it must be.


_EQUAL = ("veilboost", "xgboost", "numpy", "distributed", "python", "native modules")


def installed() -> dict[str, str]:
    """Return the releases of this process, and digests of the package's own modules."""
    own = {name: _version(name) for name in ("veilboost", "xgboost", "numpy", "distributed")}
    return {**own, "python": ".".join(platform.python_version_tuple()[:2]), "native modules": _digest("*.so")}


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
