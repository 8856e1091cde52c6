"""The mediator: a gRPC servicer on loopback that is all XGBoost ever talks to.

XGBoost trusts its tracker: it checks no reply's length (a long one overruns its buffer, a short one silently lets the
models differ), waits without a deadline and ignores signals while it waits. The mediator therefore checks every
length, owns the deadline through its handler, and ends a held call with an error that surfaces in Python as one
``XGBoostError``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent import futures
from types import TracebackType
from enum import Enum
from typing import Any, Protocol

import grpc
import psutil

from he_processors.errors import JobAborted, ProtocolError, VeilBoostError
from nvflare_plugins.failures import machine_failure
from nvflare_plugins.wire.catalogue import Moment
from nvflare_plugins.wire.federated_proto import CALLS, SERVICE, reply_class, request_class

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)


class Classified(Protocol):
    """What the mediator needs of a classified message."""

    @property
    def kind(self) -> Enum: ...
    @property
    def reply_size(self) -> int: ...


class Grammar(Protocol):
    """Names the messages of one training, in order; refuses every other (catalogue.py, vertical_catalogue.py)."""

    def enter(self, moment: Moment) -> None: ...
    def classify(self, call: str, dtype: int, op: int, size: int) -> Classified: ...


class Handler(Protocol):
    """Answers classified messages; one call at a time."""

    def answer(self, message: Any, buffer: bytes) -> bytes:
        """Return the reply to one message of this site's XGBoost."""


class Mediator:
    """Stands between one XGBoost and the federation.

    Use as a context manager; ``address`` is what XGBoost gets as its tracker. Any failure is kept in ``error`` and
    ends every later call.
    """

    def __init__(self, grammar: Grammar, rank: int, handler: Handler):
        self._grammar = grammar
        self._rank = rank
        self._handler = handler
        self._lock = threading.Lock()
        self._sequence = 0
        self._trusted_peers: set[str] = set()
        self._server: grpc.Server | None = None
        self.address = ""
        self.error: VeilBoostError | None = None

    def __enter__(self) -> Mediator:
        # XGBoost has one call under way at a time; the second worker serves an abort's retry.
        self._server = grpc.server(futures.ThreadPoolExecutor(2, "mediator"), options=_UNLIMITED)
        handlers = {
            call: grpc.unary_unary_rpc_method_handler(
                self._servicer(call),
                request_deserializer=request_class(call).FromString,
                response_serializer=reply_class(call).SerializeToString,
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

    def enter(self, moment: Moment) -> None:
        """Announce the next phase of the training loop."""
        with self._lock:
            self._grammar.enter(moment)

    def abort(self, error: VeilBoostError) -> None:
        """Make every later call fail with this error (the first one given is kept)."""
        if self.error is None:
            self.error = error

    def reason(self, error: Exception) -> VeilBoostError:
        """Return why a training ended in which XGBoost failed: this mediator's own error, where it has one.

        Privacy: reasons travel. XGBoost's text stays in the log of this site, because its checks quote the numbers that
            they compare.
        """
        if self.error is not None:
            return self.error
        _log.info("XGBoost failed: %s", error)
        return JobAborted("XGBoost failed; the log of that site says why")

    def _servicer(self, call: str) -> Callable:
        make_reply = reply_class(call)

        def serve(request, context: grpc.ServicerContext):
            try:
                if self.error is not None:
                    raise self.error
                self._check_peer(context.peer())
                with self._lock:
                    return make_reply(receive_buffer=self._serve(call, request))
            except VeilBoostError as error:
                self.abort(error)
            except Exception as error:  # the edge of the process: XGBoost must not be left waiting
                known = machine_failure(error)
                if known is None:
                    _log.exception("mediator failed")
                self.abort(JobAborted(known or "internal error in the mediator; the site's log has the trace"))
            context.abort(grpc.StatusCode.INTERNAL, f"VeilBoost: {self.error}")

        return serve

    def _serve(self, call: str, request) -> bytes:
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

    def _check_peer(self, peer: str) -> None:
        """Serve only connections of this very process: any local user can reach a loopback port.

        Both ends must be those of a connection that this process opened. A port alone would not do: another user may
        come from the same port of another loopback address.
        """
        if peer in self._trusted_peers:
            return
        connections = [c for c in psutil.Process().net_connections(kind="tcp") if c.raddr]
        ends = {(f"ipv4:{_address(c.laddr)}", _address(c.raddr)) for c in connections}
        if (peer, self.address) not in ends:
            raise ProtocolError("another process connected to the mediator")
        self._trusted_peers.add(peer)


def _address(end: Any) -> str:
    return f"{end.ip.removeprefix('::ffff:')}:{end.port}"  # gRPC opens IPv6 sockets for IPv4 addresses too


def _keep_loopback_from_proxies() -> None:
    """Make XGBoost's client connect directly even where the environment names a web proxy.

    gRPC takes ``http_proxy`` for loopback addresses too: XGBoost would then offer its unprotected sums to the proxy, and
    wait for ever. gRPC reads the exceptions whenever a client is made, ``no_proxy`` only without ``no_grpc_proxy``.
    """
    exceptions = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
    if _LOOPBACK not in exceptions.split(","):
        os.environ["no_grpc_proxy"] = ",".join(filter(None, (exceptions, _LOOPBACK)))
