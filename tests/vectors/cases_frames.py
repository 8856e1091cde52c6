"""Vectors of frames, lists and labels."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nvflare_plugins.wire.envelope import (
    MAX_ATTACHMENT,
    SALT_BYTES,
    Codec,
    Frame,
    FrameType,
    Kind,
    Operation,
    Phase,
    TrainingStep,
    pack_list,
)
from tests.vectors.drawn import Case, at, damages, drawn

_OPERATIONS = {
    Kind.HE_SECRET: (Operation.BROADCAST, Codec.SEALED),
    Kind.CONVERSATION: (Operation.ROUTE, Codec.SEALED),
    Kind.GROUP_KEY: (Operation.ROUTE, Codec.SEALED),
    Kind.HANDSHAKE: (Operation.GATHER, Codec.PUBLIC),
}
_SEALED = (Kind.AGREEMENT, Kind.OWN_TREES)
ATTEMPT = drawn("attempt", 16)


def made(
    name: str,
    kind: Kind,
    operation: Operation,
    codec: Codec,
    payload: bytes,
    *,
    type_: FrameType = FrameType.CONTRIBUTION,
    moment: TrainingStep | None = None,
    **more: object,
) -> bytes:
    """Return a frame whose salt its name fixes."""
    values = {"rank": 1, "counter": 7, "n_values": 0, "tail": 0, **more}
    return Frame(
        type_,
        operation,
        kind,
        moment or TrainingStep(Phase.UPDATE, 3),
        codec,
        values["rank"],
        values["counter"],
        ATTEMPT,
        values["n_values"],
        payload,
        values.get("attachment", b""),
        drawn(f"salt of {name}", SALT_BYTES) if codec.is_salted else b"",
        values["tail"],
    ).pack()


def _of_kind(kind: Kind) -> bytes:
    name = kind.name
    if kind in _SEALED or not kind.private or kind in _OPERATIONS:
        operation, codec = _OPERATIONS.get(kind, (Operation.GATHER, Codec.SEALED if kind.private else Codec.PUBLIC))
        return made(name, kind, operation, codec, drawn(name, 40))
    n_residues = 770 if kind is Kind.SCALE else 2
    words = b"" if kind is Kind.SCALE else drawn(name, 32)
    residues = b"".join(struct.pack("<Q", int.from_bytes(drawn(f"{name} {i}", 7), "little")) for i in range(n_residues))
    return made(name, kind, Operation.SUM, Codec.MASKED, words + residues, n_values=len(words) // 8, tail=len(residues))


def _others() -> Iterator[tuple[str, bytes]]:
    """Every type, operation and codec, and the ends of the ranges."""
    for codec in Codec:
        payload = drawn(f"of {codec.name}", 24)
        n_values = len(payload) // (codec.word_bytes or 8)
        yield f"codec {codec.name}", made(codec.name, Kind.HISTOGRAM, Operation.SUM, codec, payload, n_values=n_values)
    for phase in Phase:
        moment = TrainingStep(phase, (1 << 32) - 1)
        yield f"phase {phase.name}", made("phase", Kind.CLOSING, Operation.GATHER, Codec.PUBLIC, b"", moment=moment)
    answer = {"type_": FrameType.RESULT, "rank": 3}
    parts = pack_list([b"a", b"", b"ccc"])
    yield "gathered answer", made("g", Kind.CLOSING, Operation.GATHER, Codec.PUBLIC, parts, **answer)
    yield (
        "answer with heads",
        made("h", Kind.CLOSING, Operation.GATHER, Codec.PUBLIC, parts, attachment=parts, **answer),
    )
    yield (
        "sum that comes back",
        made("s", Kind.METRIC, Operation.SUM, Codec.MASKED, bytes(48), n_values=2, tail=32, **answer),
    )
    yield (
        "abort",
        made(
            "a", Kind.CLOSING, Operation.GATHER, Codec.PUBLIC, "site-2: zu groß".encode(), type_=FrameType.ABORT, rank=3
        ),
    )
    yield (
        "request for another scale",
        made("r", Kind.HISTOGRAM, Operation.SUM, Codec.MASKED, b"", type_=FrameType.RESCALE, n_values=512, tail=16),
    )
    most = {"rank": (1 << 16) - 1, "counter": (1 << 64) - 1, "n_values": 1 << 32}
    yield "largest numbers", made("l", Kind.HISTOGRAM, Operation.SUM, Codec.BFV, b"", **most)
    yield (
        "longest attachment of a vector",
        made("t", Kind.CLOSING, Operation.GATHER, Codec.PUBLIC, b"", attachment=drawn("t", 300)),
    )


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for kind in Kind:
        yield f"kind {kind.name}", "frame", {"data": _of_kind(kind).hex()}
    for name, data in _others():
        yield name, "frame", {"data": data.hex()}
    sum_, plain = _of_kind(Kind.HISTOGRAM), _of_kind(Kind.CLOSING)
    u32, u64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
    changes = {
        "empty": b"",
        "shorter than a header": sum_[:80],
        "cut short": sum_[:-1],
        "a byte too long": sum_ + b"\0",
        "magic": at(sum_, 0, b"VLBX"),
        "version 2": at(sum_, 4, b"\2"),
        "version 4": at(sum_, 4, b"\4"),
        "type 0": at(sum_, 5, b"\0"),
        "type 5": at(sum_, 5, b"\5"),
        "operation 0": at(sum_, 6, b"\0"),
        "operation 5": at(sum_, 6, b"\5"),
        "codec 9": at(sum_, 7, b"\x09"),
        "kind 17": at(sum_, 8, b"\x11\0"),
        "kind 0": at(sum_, 8, b"\0\0"),
        "phase 0": at(sum_, 10, b"\0"),
        "phase 5": at(sum_, 10, b"\5"),
        "one value too many": at(sum_, 41, u64((1 << 32) + 1)),
        "payload longer than there is": at(sum_, 49, u64(49)),
        "payload of 2^64 - 1 bytes": at(sum_, 49, b"\xff" * 8),
        "attachment longer than there is": at(sum_, 57, u32(1)),
        "attachment longer than any": at(sum_, 57, u32(MAX_ATTACHMENT + 1)),
        "tail longer than the payload": at(sum_, 61, u32(len(sum_) - 80)),
        "no salt": at(sum_, 65, bytes(16)),
    }
    yield from damages("frame", "frame", {}, changes)
    yield from damages("frame", "frame", {}, {"salt where none belongs": at(plain, 65, b"\1" * 16)})
    for parts in ([], [b""], [b"one", b"", b"\0" * 9]):
        yield f"list of {len(parts)}", "list", {"data": pack_list(parts).hex(), "parts": len(parts)}
    good = pack_list([b"one", b"two"])
    changes = {
        "empty": b"",
        "cut short": good[:-1],
        "a byte too long": good + b"\0",
        "another number": at(good, 0, u32(3)),
        "a length too large": at(good, 4, u64(4)),
        "lengths that wrap": at(good, 4, u64((1 << 64) - 1) + u64(7)),
    }
    yield from damages("list", "list", {"parts": 2}, changes)
    for name, label in {
        "first piece": ["00" * 16, 1, 5 << 20, 0],
        "last piece": ["00" * 16, 9, 5 << 20, 4 << 20],
        "largest frame": ["00" * 16, 1, 2 << 30, 0],
        "number 0": ["00" * 16, 0, 10, 0],
        "frame that is too large": ["00" * 16, 1, (2 << 30) + 1, 0],
        "offset behind the end": ["00" * 16, 1, 10, 11],
        "negative offset": ["00" * 16, 1, 10, -1],
        "three fields": ["00" * 16, 1, 10],
        "a size that is no integer": ["00" * 16, 1, True, 0],
        "no text": [1, 1, 10, 0],
        "no list": "label",
    }.items():
        yield f"label: {name}", "label", {"label": label}
