"""XGBoost's federated gRPC service, stated as a protobuf descriptor.

The four calls and their fields are those of ``plugin/federated/federated.proto`` of XGBoost 3.2. The messages live in
a descriptor pool of their own, so that another library that registers the same package name does not collide.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
