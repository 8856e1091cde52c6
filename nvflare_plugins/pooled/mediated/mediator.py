"""The mediator: a gRPC servicer on loopback that is all XGBoost ever talks to.

XGBoost trusts its tracker: it checks no reply's length (a long one overruns its buffer, a short one silently lets the
models differ), waits without a deadline and ignores signals while it waits. The mediator therefore checks every
length, owns the deadline through its handler, and ends a held call with an error that surfaces in Python as one
``XGBoostError``.

Any user of the machine can reach a loopback port. A call is therefore served only if the other end of its connection is
a socket that this process holds open at that moment, which no other process can imitate. Others are turned away before
their message is read, and the job goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from he_processors.errors import ProtocolError, VeilBoostError
from nvflare_plugins.base.errors import JobAborted, machine_failure
from nvflare_plugins.pooled.mediated.communicator import CALLS, SERVICE, reply_class, request_class
from nvflare_plugins.pooled.mediated.grammar import FRAME_BYTES, MAX_MESSAGE_BYTES, Answers, HorizontalGrammar
from nvflare_plugins.wire.envelope import TrainingStep

_WORKERS = 4  # XGBoost has one call under way at a time; the others turn strangers away, and serve an abort's retry
_LOOPBACK = "127.0.0.1"
_NO_PROXY = "no_grpc_proxy"  # gRPC reads it in this spelling
_log = logging.getLogger(__name__)


class _Stranger(Exception):
    """A call that this process's XGBoost did not make."""


class Mediator:
    """Stands between one XGBoost and the federation.

    Use as a context manager; ``address`` is what XGBoost gets as its tracker. Any failure is kept in ``error`` and
    ends every later call.
    """

    def __init__(self, grammar: HorizontalGrammar, rank: int, handler: Answers):
        self._grammar = grammar
        self._rank = rank
        self._handler = handler
        self._lock = threading.Lock()
        self._sequence = 0
        self._own_end: tuple[str, int] | None = None  # peer's address, and our descriptor of its socket
        self._has_warned = False
        self.address = ""
        self.error: VeilBoostError | None = None

    def __enter__(self) -> Mediator:
        largest = min(self._grammar.largest_message_bytes + FRAME_BYTES, MAX_MESSAGE_BYTES)
        options = [("grpc.max_receive_message_length", largest), ("grpc.max_send_message_length", -1)]
        self._server: grpc.Server = grpc.server(futures.ThreadPoolExecutor(_WORKERS, "mediator"), options=options)
        # As a stream of one message, so that the caller is known before its message is taken. The wire is the same.
        handlers = {
            call: grpc.stream_unary_rpc_method_handler(
                self._servicer(call), response_serializer=reply_class(call).SerializeToString
            )
            for call in CALLS
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port(f"{_LOOPBACK}:0")
        self._server.start()
        self.address = f"{_LOOPBACK}:{port}"
        _keep_loopback_from_proxies()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None)

    def enter(self, moment: TrainingStep) -> None:
        """Announce the next phase of the training loop."""
        with self._lock:
            self._grammar.enter(moment)

    def abort(self, error: VeilBoostError) -> None:
        """Make every later call fail with this error (the first one given is kept)."""
        if self.error is None:
            self.error = error

    def reason(self, error: BaseException) -> VeilBoostError:
        """Return why a training ended in which XGBoost failed: this mediator's own error, where it has one.

        Privacy: reasons travel. XGBoost's text stays in the log of this site, because its checks quote the numbers that
            they compare.
        """
        if self.error is not None:
            return self.error
        _log.info("XGBoost failed: %s", error)
        return JobAborted("XGBoost failed; the log of that site says why")

    def _servicer(self, call: str) -> Callable[[Iterator[bytes], grpc.ServicerContext], Any]:
        make_reply = reply_class(call)

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            try:
                self._check_peer(context)
                if self.error is not None:
                    raise self.error
                with self._lock:
                    return make_reply(receive_buffer=self._serve(call, _only(call, requests)))
            except _Stranger:
                return context.abort(grpc.StatusCode.PERMISSION_DENIED, "VeilBoost: another process is not served here")
            except VeilBoostError as error:
                self.abort(error)
            except Exception as error:  # the edge of the process: XGBoost must not be left waiting
                known = machine_failure(error)
                if known is None:
                    _log.exception("mediator failed")
                told = JobAborted(known or "internal error in the mediator; the site's log has the trace")
                told.__cause__ = error  # which says whether time mends it
                self.abort(told)
            return context.abort(grpc.StatusCode.INTERNAL, f"VeilBoost: {self.error}")

        return serve

    def _serve(self, call: str, request: Any) -> bytes:
        if request.rank != self._rank:
            raise ProtocolError(f"XGBoost claims rank {request.rank}; this site is rank {self._rank}")
        if request.sequence_number != self._sequence:
            raise ProtocolError(f"XGBoost sent call {request.sequence_number} where {self._sequence} is due")
        self._sequence += 1
        sent = request.send_buffer
        message = self._grammar.classify(
            call, getattr(request, "data_type", 0), getattr(request, "reduce_operation", 0), len(sent)
        )
        reply = self._handler.answer(message, sent)
        if len(reply) != message.reply_size:
            raise ProtocolError(
                f"reply to {message.kind.name} has {len(reply)} bytes, XGBoost expects {message.reply_size}"
            )
        return reply

    def _check_peer(self, context: grpc.ServicerContext) -> None:
        """Serve only connections of this very process. Raises: _Stranger.

        Both ends must be those of a socket that this process holds open now. A port alone would not do: another user
        may come from the same port of another loopback address, or from the same port once XGBoost's connection has
        gone.
        """
        peer = context.peer()
        if self._own_end is None or self._own_end[0] != peer or not self._is_own_end(*self._own_end):
            self._own_end = next(((peer, d) for d in _open_sockets() if self._is_own_end(peer, d)), None)
        # A connection that has gone since leaves its calls behind, and its port to others.
        if self._own_end is None or not context.is_active():
            if not self._has_warned:
                self._has_warned = True
                _log.warning("another process tried to reach the mediator of XGBoost and was turned away")
            raise _Stranger

    def _is_own_end(self, peer: str, descriptor: int) -> bool:
        """Tell whether a descriptor of this process is the socket at the other end of a connection."""
        try:
            with _copy_of_socket(descriptor) as own:
                if own.family not in (socket.AF_INET, socket.AF_INET6):
                    return False
                return (f"ipv4:{_address(own.getsockname())}", _address(own.getpeername())) == (peer, self.address)
        except OSError:  # closed, or no socket, or not connected
            return False


def _open_sockets() -> Iterator[int]:
    """Yield the descriptors of this process that are sockets.

    From its own list of descriptors, in which one that stays open is never missing. The system's table of connections
    loses entries while others come and go: with ten sites in one process XGBoost was taken for a stranger.
    """
    for name in os.listdir("/dev/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)
        except OSError:  # closed meanwhile, as the listing's own
            continue


def _copy_of_socket(descriptor: int) -> socket.socket:
    """Return a socket of our own on what a descriptor stands for, which may be something else by now.

    A copy of the descriptor of a locked file would keep the lock that its owner believes to have given back, so none
    may stay behind.

    Raises:
        OSError: it stands for no socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def _only(call: str, requests: Iterator[bytes]) -> Any:
    """Return the one message of a call. Raises: ProtocolError."""
    gave_up = "XGBoost gave a call up, or sent more bytes than any message of this training has"
    try:
        content = next(requests, None)  # a call that is refused for its length ends with an error or without a message
        if content is None:
            raise ProtocolError(gave_up)
        return request_class(call).FromString(content)
    except grpc.RpcError:
        raise ProtocolError(gave_up) from None
    except DecodeError:
        raise ProtocolError("XGBoost sent a message that is none of its protocol") from None


def _address(end: tuple[Any, ...]) -> str:
    return f"{end[0].removeprefix('::ffff:')}:{end[1]}"  # gRPC opens IPv6 sockets for IPv4 addresses too


def _keep_loopback_from_proxies() -> None:
    """Make XGBoost's client connect directly even where the environment names a web proxy.

    gRPC takes ``http_proxy`` for loopback addresses too: XGBoost would then offer its unprotected sums to the proxy,
    and wait for ever. gRPC reads the exceptions whenever a client is made, ``no_proxy`` only without ``no_grpc_proxy``.
    """
    exceptions = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy") or ""
    if _LOOPBACK not in exceptions.split(","):
        os.environ[_NO_PROXY] = ",".join(filter(None, (exceptions, _LOOPBACK)))
