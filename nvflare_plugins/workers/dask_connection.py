"""Lines to the ports of Dask's workers, Dask's messages as far as a site needs them, and why a worker was lost."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import socket
import ssl
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pickle import HIGHEST_PROTOCOL
from typing import Any, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from cryptography import x509

from he_processors.errors import ConfigurationError
from nvflare_plugins.data.declaration import ClusterSecurity
from nvflare_plugins.workers import worker_connection

LOOK_S = 5.0
"""How long each step of a look at an address may take. Units: seconds."""


def load_certificates(security: ClusterSecurity) -> tuple[ssl.SSLContext, datetime]:
    """Return what this site shows and asks for towards its cluster, and when its own certificate ends.

    Raises:
        ConfigurationError: a file cannot be read or used, others may read the key, or the certificate is not valid now.
    """
    for name in ("ca", "cert", "key"):
        _check_readable(security, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # Dask compares no names either
    try:
        context.load_verify_locations(security.ca)
        context.load_cert_chain(security.cert, security.key, password="")  # rather than ask for one
        cert = x509.load_pem_x509_certificates(security.cert.read_bytes())[0]
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else type(error).__name__
        raise ConfigurationError(
            f"the certificates of this site's cluster cannot be used ({_plain(why)}). Policy key: cluster.security. "
            "Remedy: name three files in PEM: ca, a certificate that it has signed, and the key of that one without a "
            "password."
        ) from None
    start, end, now = cert.not_valid_before_utc, cert.not_valid_after_utc, datetime.now(UTC)
    if not start <= now <= end:
        when = f"ended on {end:%Y-%m-%d %H:%M}" if end < now else f"begins on {start:%Y-%m-%d %H:%M}"
        raise ConfigurationError(
            f"this site's certificate towards its cluster {when} UTC. Policy key: cluster.security.cert. Remedy: sign "
            "one that is valid now, and look at this machine's clock."
        )
    return context, end


def why_not(address: str, context: ssl.SSLContext | None) -> str:  # noqa: C901 - one error, one sentence
    """Look at an address of Dask's, and say why nothing comes from there.

    Args:
        address: tls://host:port, or tcp:// without a context.

    Returns:
        What to say of it after "it", without where it is.
    """
    try:
        place = urlsplit(address)
        with socket.create_connection((place.hostname or "", place.port or 0), LOOK_S) as link:
            if context is None:
                return _heard(link)
            with context.wrap_socket(link) as protected:
                return _heard(protected)
    except socket.gaierror:
        return "has a name that this machine does not know"
    except ConnectionRefusedError:
        return "is not there: nothing listens at its port, or a firewall refuses"
    except TimeoutError:
        return "does not answer: its machine or process stands still, or a firewall is between"
    except ssl.SSLCertVerificationError as error:
        return f"shows a certificate that does not pass here: {_plain(error.verify_message)}"
    except ssl.SSLError as error:
        _, alert, words = str(error.reason).partition("ALERT_")
        if alert:
            return f"does not take this site's certificate: {_plain(words)}"
        return "speaks no TLS"
    except (ValueError, OverflowError):
        return "has an address that is none"
    except OSError as error:
        return f"is not to be had from this machine: {_plain(os.strerror(error.errno or 0))}"


def require_own_user(end: socket.socket) -> None:
    """Refuse what is at the other end of a connection of this machine's loopback if another user runs it.

    Where there are no certificates, nothing else tells that a scheduler or worker is this site's own.

    Raises:
        ConfigurationError: the kernel names another user, or none.
    """
    wanted = tuple(_as_listed(*name[:2]) for name in (end.getpeername(), end.getsockname()))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for fields in map(str.split, lines):
                if (fields[1], fields[2]) == wanted and fields[7] == str(os.geteuid()):
                    return
    raise ConfigurationError(
        "a scheduler or worker that this site's cluster has without TLS is not run by the user who runs this site. "
        "Policy keys: cluster.scheduler, cluster.security. Remedy: run it as this user (which only Linux "
        "tells), or give the cluster certificates (tls://)."
    )


def _as_listed(host: str, port: int) -> str:
    """Return an address as the kernel lists it: words of 32 bits in the machine's order, and the port."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _heard(link: socket.socket) -> str:
    """Return what to say of one that takes a connection. Raises: SSLError: it refuses, which TLS 1.3 tells only now."""
    if link.recv(1):
        return "answers, and not as Dask does here: it has another version, or was busy"
    return "closes connections at once: its log says why"


def _check_readable(security: ClusterSecurity, name: str) -> None:
    try:
        with getattr(security, name).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigurationError(
            f"cluster.security.{name} cannot be read ({type(error).__name__}): correct the path in the policy"
        ) from None
    if name == "key" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError("cluster.security.key may be read by others than its owner: chmod 600")


def _plain(words: str) -> str:
    """Return words of OpenSSL's or the system's, of which none comes from elsewhere, in our form."""
    return words.replace("_", " ").lower()


# Dask's own messages, as far as a site needs them: asked with plain values, read as plain values, nothing loaded.
#
# Dask's client loads the pickles in what schedulers and workers send before its caller sees them. So a site has no such
# client, and its process does not import Dask. Of a message it reads the first frame alone, msgpack without extensions;
# a pickle in it is bytes, and the frames behind it are passed over.
#
# A message is the length of what follows, the number of frames, their lengths, and the frames. Numbers are as the
# machine has them: Dask asks for machines of one kind.


MOST_FRAMES, MOST_BYTES = 1 << 10, 1 << 26
"""How much an answer may have. A scheduler tells of each worker in about two kilobytes."""
_PIECE = 1 << 16
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 10))  # as Dask's: half a minute in all


class NoAnswer(ValueError):
    """What came is no answer of Dask's, in plain values."""


class DaskConnection:
    """A connection to a port of Dask's. A context manager, which closes it unless ``take`` was called."""

    def __init__(self, address: str, context: ssl.SSLContext | None, until: float) -> None:
        """Connect and introduce this end.

        Args:
            address: tls://host:port with a context; tcp://host:port, of this machine's loopback, without.
            until: on the monotonic clock, for all that is said here.

        Raises:
            OSError: there is no way; TimeoutError among them.
            NoAnswer: something else is there.
            ConfigurationError: without a context, a process of another user is there.
        """
        self._until = until
        try:
            place = urlsplit(address)
            self._end = socket.create_connection((place.hostname or "", place.port or 0), self._left())
        except (ValueError, OverflowError):
            raise OSError("no address") from None
        try:
            self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE:
                if hasattr(socket, name):
                    self._end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if context is not None:
                self._end = context.wrap_socket(self._end)
            python = tuple(int(part) for part in platform.python_version_tuple()[:2])
            self.say({"compression": None, "python": (*python, 0), "pickle-protocol": HIGHEST_PROTOCOL})
            self.hear()  # how the other end would compress and pickle
            if context is None:
                require_own_user(self._end)
        except BaseException:
            self._end.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._end.fileno() >= 0:
            self._end.close()

    def ask(self, op: str, **more: Any) -> Any:
        """Call a function of the other end. Returns: see ``hear``."""
        self.say({"op": op, **more})
        return self.hear()

    def say(self, message: dict[str, Any]) -> None:
        """Send plain values."""
        import msgpack

        frame = msgpack.packb(message)
        self._end.settimeout(self._left())
        self._end.sendall(struct.pack("=QQQ", 16 + len(frame), 1, len(frame)) + frame)

    def hear(self) -> Any:
        """Return the plain values of a message; what is pickled in it stays a place's number.

        Raises:
            NoAnswer: they are not plain, or too many.
            OSError: the other end is gone; TimeoutError: it does not answer in time.
        """
        import msgpack

        _, n_frames = struct.unpack("=QQ", self._exactly(16))
        if not 0 < n_frames <= MOST_FRAMES:
            raise NoAnswer("no message of Dask's")
        first, *others = struct.unpack(f"={n_frames}Q", self._exactly(8 * n_frames))
        if first + sum(others) > MOST_BYTES:
            raise NoAnswer("a message that is too long")
        frame = self._exactly(first)
        for length in others:
            for start in range(0, length, _PIECE):
                self._exactly(min(_PIECE, length - start))
        try:
            answer = msgpack.unpackb(frame, raw=False, strict_map_key=False, use_list=False)
            worker_connection.require_plain(answer)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            raise NoAnswer("no plain values") from None
        return answer

    def take(self) -> socket.socket:
        """Return the socket, which is the caller's from now on."""
        end, self._end = self._end, socket.socket()
        self._end.close()
        return end

    def _exactly(self, length: int) -> bytes:
        content = bytearray(length)
        view = memoryview(content)
        while view.nbytes:
            self._end.settimeout(self._left())
            n_read = self._end.recv_into(view)
            if not n_read:
                raise ConnectionResetError
            view = view[n_read:]
        return bytes(content)

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


# How a line comes about: a connection to the port that a worker has of Dask, under its TLS, taken over by both ends.
#
# So there is no other port to open, and no other certificate. The site has a worker run one function of this package by
# its name, ``stand_by``, connects to it as any client of Dask's, names a part host, and from then on Dask has the
# socket no more. A part host is there as long as the site's line to it. Beside that line are others to the same part
# host, which it answers while its part is at work: one of the site's, and one of each worker that sends it something.
#
# Security: over a line go plain values alone (``line``). Neither the site nor, from another worker, a worker loads code
# that comes over it. But Dask's own port stays open: whoever has the cluster's certificates, or without them is on this
# machine, may run any code at a worker.


SITE, BESIDE, WORKER = "site", "beside", "worker"
REACH_S = 30.0
"""How long one worker tries to reach another. Units: seconds."""
_OP = "veilboost_line"
_FUNCTIONS = {
    SITE: ("describe", "meet", "begin", "call", "end"),
    BESIDE: ("end_exchange", "waits_for"),
    WORKER: ("deliver",),
}
"""What whoever is at the other end of a line may ask of a part host."""
_hosts: WeakValueDictionary[str, DaskPartHost] = WeakValueDictionary()
"""Of this worker, by their names."""

Told = tuple[str, Any, str]


class DaskPartHost(worker_connection.PartHost):
    """A part host at a worker of Dask's."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self._worker, self._senders = worker, _Senders(worker.connection_args.get("ssl_context"))

    def describe(self) -> Told:
        """Say what is installed here (``probe``)."""
        return self._told(lambda: worker_connection.describe_worker(self._worker))

    def meet(self, number: int, hosts: Sequence[tuple[str, str]]) -> Told:
        """Let parts exchange values with those on the site's other workers.

        Args:
            hosts: of all workers in order, this one too: the worker's address, and the name of its part host.
        """
        senders = self._senders
        return self._told(
            lambda: self.join(worker_connection.Peers(number, lambda to, parcel: senders.send(hosts[to], parcel)))
        )

    def deliver(self, parcel: worker_connection.Parcel) -> Told:
        """Take what another worker's part sends, whatever this one's does."""
        return self._told(lambda: None if self.peers is None else self.peers.deliver(parcel))

    def end_exchange(self, exchange: int) -> Told:
        """Let the part wait no longer for other workers in this exchange and those before it."""
        return self._told(lambda: None if self.peers is None else self.peers.end(exchange))

    def waits_for(self) -> Told:
        """Return the worker for which the part waits; None where it waits for none."""
        return self._told(lambda: None if self.peers is None else self.peers.waits_for())

    def leave(self, by: str) -> None:
        """Have a line's end take effect. Args: by: who was at its other end."""
        if by == BESIDE:
            self.end_exchange(worker_connection.ALL)
        elif by == SITE:
            self.end()
            self._senders.close()


class _Senders:
    """A worker's lines to others, each with a thread that sends one parcel after the other."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lines: dict[str, worker_connection.WorkerLine] = {}

    def send(self, host: tuple[str, str], parcel: worker_connection.Parcel) -> Future[Any]:
        """Begin to send. Raises (from the future): OSError, ValueError, UnpicklingError: it is not reached."""
        address, name = host
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(1, thread_name_prefix=_OP)
        return self._threads[name].submit(self._deliver, address, name, parcel)

    def _deliver(self, address: str, name: str, parcel: worker_connection.Parcel) -> None:
        if name not in self._lines:
            with DaskConnection(address, self._context, time.monotonic() + REACH_S) as connection:
                self._lines[name] = open_line(connection, name, WORKER)
        self._lines[name].send(("deliver", (parcel,)))
        if self._lines[name].receive() != (worker_connection.DONE, None, ""):
            raise OSError("another worker does not take it")

    def close(self) -> None:
        """Hang up; who sends finds it."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for line in tuple(self._lines.values()):
            line.hang_up()


def stand_by(dask_worker: Any) -> None:
    """Have a worker hand over connections that name a part host. Runs at the worker, on Dask's event loop."""

    def hand_over(comm: Any, desk: str = "", by: str = "") -> None:
        found = _hosts.get(desk)
        if found is None and by == SITE:
            found = _hosts[desk] = DaskPartHost(dask_worker)
        if found is None or by not in _FUNCTIONS:
            comm.abort()
            return
        leave = found.leave
        args = (_taken(comm), found, _FUNCTIONS[by], lambda: leave(by))
        threading.Thread(target=worker_connection.serve, args=args, daemon=True, name=_OP).start()

    dask_worker.handlers[_OP] = hand_over


def have_stand_by(connection: DaskConnection) -> None:
    """Have the worker at the other end run ``stand_by``. Raises: NoAnswer: with its words of why it cannot."""
    answer = connection.ask("run", function=pickle.dumps(stand_by), wait=True)
    if not isinstance(answer, dict) or answer.get("status") != "OK":
        words = str(answer.get("exception_text", "")) if isinstance(answer, dict) else ""
        name = words.partition("(")[0][:60]
        raise NoAnswer(name if name.isidentifier() else "another answer")


def open_line(
    connection: DaskConnection, host: str, by: str, look: Callable[[], None] = lambda: None
) -> worker_connection.WorkerLine:
    """Make a line of a connection to a worker that stands by.

    Args:
        host: its name, new to the worker if ``by`` is SITE.
        by: who this end is.
        look: see ``WorkerLine``.

    Raises:
        OSError: there is no such part host, or no answer.
    """
    connection.say({"op": _OP, "desk": host, "by": by, "reply": False})
    line = worker_connection.WorkerLine(connection.take(), look)
    try:
        line.await_ready()
    except BaseException:
        line.close()
        raise
    return line


def _taken(comm: Any) -> socket.socket:
    """Take the socket of a connection of Dask's, which is closed without it."""
    stream = comm.stream
    if stream.writing():
        comm.abort()
        raise OSError("the connection is in use")
    end: socket.socket = stream.socket
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Who stands still while a lot is on its way to it has the deadline; Dask would give up after half a minute.
        # A machine that is gone is still found by the probes of an idle connection.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    stream.io_loop.remove_handler(end)
    stream.socket = socket.socket()
    comm.abort()
    return end


# What is known of why a worker was lost.


_OUT_OF_MEMORY = "worker-restart-memory"  # under which Dask's nanny tells the scheduler that it has ended a worker
_ASK_S = 2.0


def lost(scheduler: str, context: ssl.SSLContext | None, number: int, address: str, pid: object) -> str:
    """Return in words that a worker was lost, and that it had too little memory where Dask's nanny says so.

    Args:
        scheduler, context: its address and what this site shows to it; it may be gone.
        number: of the worker.
        pid: of its process: the scheduler also tells of those that were at its address before.
    """
    try:
        with DaskConnection(scheduler, context, time.monotonic() + _ASK_S) as connection:
            events = connection.ask("events", topic=_OUT_OF_MEMORY)
    except NoAnswer:
        events = ()
    except OSError:
        return f"the scheduler of this site's cluster was lost while worker {number} worked; its log says why"
    if (address, pid) in _ended(events):
        return (
            f"worker {number} of this site's cluster was lost: it took more memory than it may have, and its nanny "
            "ended it. Remedy: give it more (dask worker --memory-limit), or the cluster more workers (policy key: "
            "cluster.workers)."
        )
    return (
        f"worker {number} of this site's cluster was lost; its log, or its machine's, says why: often it has too "
        "little memory"
    )


def _ended(events: Any) -> set[tuple[str, int]]:
    """Return the addresses and processes that a nanny has ended. Args: events: (time, event), as a scheduler tells."""
    found = set()
    for event in events if isinstance(events, tuple) else ():
        match event:
            case (_, {"worker": str(address), "pid": int(pid)}):
                found.add((address, pid))
    return found
