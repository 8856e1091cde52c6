"""XGBoost's own federated communicator towards the mediator, spoken without generated code."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from he_processors.errors import ConfigurationError, VeilBoostError
from nvflare_plugins.xgb.versions import installed_release

if TYPE_CHECKING:
    from nvflare_plugins.pooled.mediated.mediator import Mediator


# XGBoost's end of the federation, opened and closed so that others can see when it does not return.
#
# Where the system refuses XGBoost a thread, opening or closing waits without end. A communicator belongs to the thread
# that opened it, so nobody else can close it: what watches the thread must know, and go on without it.


_OPENING = "XGBoost could not join the federation"
_CLOSING = "XGBoost had finished"
_waiting: dict[int | None, tuple[float, str]] = {}  # by thread: since when, and what had happened before


@dataclass(frozen=True, slots=True)
class Blocked:
    """A thread that waits for XGBoost to open or to close its communicator.

    Attributes:
        seconds: for how long.
        reason: what had happened before, such as the error that ended the training; free of data.
    """

    seconds: float
    reason: str


def blocked(thread: threading.Thread) -> Blocked | None:
    """Return for how long a thread has been waiting for its communicator to open or close; None if it is not."""
    since, reason = _waiting.get(thread.ident, (None, ""))
    return None if since is None else Blocked(time.monotonic() - since, reason)


class Federated:
    """A communicator whose tracker is a mediator. A context manager; both ends must be in the same thread.

    Raises:
        ConfigurationError: XGBoost has no such communicator, or would train without the other sites.
    """

    def __init__(self, mediator: Mediator, world: int, rank: int) -> None:
        from xgboost import collective

        installed_release()
        self._context = collective.CommunicatorContext(
            dmlc_communicator="federated",
            federated_server_address=mediator.address,
            federated_world_size=world,
            federated_rank=rank,
        )
        self._mediator, self._place = mediator, (world, rank)

    def __enter__(self) -> dict[str, Any]:
        from xgboost import collective

        with _waits(_OPENING):
            collective.init(**self._context.args)  # a wheel that lacks the communicator joins nobody and says nothing
            world, rank = collective.get_world_size(), collective.get_rank()
        if (world, rank) != self._place:
            error = ConfigurationError(
                f"XGBoost joined a federation of {world} as rank {rank} where this site is rank {self._place[1]} of "
                f"{self._place[0]}, and would train without the others: install xgboost anew, as pip has it"
            )
            self.__exit__(type(error), error, None)
            raise error
        return dict(self._context.args)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _waits(_CLOSING if error is None else self._reason(error)):
            self._context.__exit__(kind, error, trace)

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, VeilBoostError) and self._mediator.error is None:
            return str(error)
        return str(self._mediator.reason(error))


@contextmanager
def _waits(reason: str) -> Iterator[None]:
    _waiting[threading.get_ident()] = (time.monotonic(), reason)
    try:
        yield
    finally:
        del _waiting[threading.get_ident()]


# XGBoost's federated gRPC service, stated as a protobuf descriptor.
#
# The four calls and their fields are those of ``plugin/federated/federated.proto`` of XGBoost 3.2. The messages live in
# a descriptor pool of their own, so that another library that registers the same package name does not collide.


_PACKAGE = "xgboost.collective.federated"
SERVICE = f"{_PACKAGE}.Federated"

_FIELD = descriptor_pb2.FieldDescriptorProto
_COMMON = (("sequence_number", _FIELD.TYPE_UINT64), ("rank", _FIELD.TYPE_INT32), ("send_buffer", _FIELD.TYPE_BYTES))
# The two enums travel as varints: int32 fields read them without declaring the enum types.
_REQUEST_FIELDS = {
    "Allgather": _COMMON,
    "AllgatherV": _COMMON,
    "Allreduce": (*_COMMON, ("data_type", _FIELD.TYPE_INT32), ("reduce_operation", _FIELD.TYPE_INT32)),
    "Broadcast": (*_COMMON, ("root", _FIELD.TYPE_INT32)),
}
CALLS = tuple(_REQUEST_FIELDS)


def _build_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="federated.proto", package=_PACKAGE, syntax="proto3")
    for call, fields in _REQUEST_FIELDS.items():
        request = file.message_type.add(name=f"{call}Request")
        for number, (name, field_type) in enumerate(fields, start=1):
            request.field.add(name=name, number=number, type=field_type, label=_FIELD.LABEL_OPTIONAL)
        reply = file.message_type.add(name=f"{call}Reply")
        reply.field.add(name="receive_buffer", number=1, type=_FIELD.TYPE_BYTES, label=_FIELD.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in (f"{call}{suffix}" for call in CALLS for suffix in ("Request", "Reply"))
    }


_MESSAGES = _build_messages()


def request_class(call: str) -> Any:
    """Return the request message class of one of ``CALLS``."""
    return _MESSAGES[f"{call}Request"]


def reply_class(call: str) -> Any:
    """Return the reply message class of one of ``CALLS``."""
    return _MESSAGES[f"{call}Reply"]
