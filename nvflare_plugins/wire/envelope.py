"""Our own frames between a site and the server: a fixed header, a payload, an optional attachment.

A frame says who sends it, where in the job it belongs (attempt, counter, kind, moment) and how the payload is
protected (codec). The server adds, forwards or collects payloads by the header alone; it needs no key. At the end of
a payload may stand what others check it by: of a sum, residues modulo 2^61 - 1 (he_processors/sum_tags.py), which the
server adds as such; of a gathered message, MACs (he_processors/pair_macs.py). The header also has the salt with which
both ends commit to the payload in their evidence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum

from he_processors.errors import ProtocolError
from nvflare_plugins.wire.catalogue import KIND_BY_CODE, PHASE_BY_CODE, Kind, TrainingStep
from nvflare_plugins.wire.commitments import SALT_BYTES, UNSALTED_CODECS

_HEADER = struct.Struct("<4sBBBBHBIQ16sHQQII16s")
_MAGIC = b"VLBF"
_VERSION = 3
ATTEMPT_BYTES = 16
MAX_ATTACHMENT = 1 << 20
MAX_VALUES = 1 << 32
MAX_FRAME_BYTES = 2 << 30
"""Of one message, header and attachment included; it travels in pieces (flare/pieces.py)."""
CHUNK_BYTES = 2 << 20  # of a piece: small enough that a slow link shows progress between two queries
_NO_SALT = bytes(SALT_BYTES)


class Codec(IntEnum):
    """How a payload is protected on its way."""

    PUBLIC = 0  # nothing to protect
    PLAIN = 1  # a private kind in clear: only the profile `plain` does that
    MASKED = 2
    BFV = 3
    CKKS = 4
    SEALED = 5  # end to end between sites
    # Words that a site's own plugin has protected. The server may assume nothing of them but their number, and has
    # nothing of the plugin: it adds 64-bit words modulo 2^64, as under MASKED.
    PLUGIN = 6
    # As MASKED and PLAIN in 32-bit words, added modulo 2^32: histograms of jobs with word_bits=32.
    MASKED_32 = 7
    PLAIN_32 = 8

    @property
    def word_bytes(self) -> int:
        """Bytes of a word that the server adds; 0 where a payload is not of words."""
        if self in (Codec.MASKED_32, Codec.PLAIN_32):
            return 4
        return 8 if self in (Codec.PLAIN, Codec.MASKED, Codec.PLUGIN) else 0

    @property
    def is_salted(self) -> bool:
        """Whether frames carry a salt for the evidence's commitment to their payload (evidence/format.py)."""
        return self.name not in UNSALTED_CODECS


class FrameType(IntEnum):
    """What a frame asks for or answers."""

    CONTRIBUTION = 1
    RESULT = 2
    ABORT = 3
    RESCALE = 4  # "my value does not fit the agreed scale": all sites agree on a new one, nothing is summed


class Operation(IntEnum):
    """What the server does with the contributions of all sites."""

    GATHER = 1
    BROADCAST = 2
    SUM = 3
    ROUTE = 4  # part r of every contribution goes to rank r, and to no one else


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between a site and the server.

    Attributes:
        payload: all of it, its tail included.
        tail: bytes at the payload's end that are residues of a sum, or MACs of a gathered message.
        salt: what sender and receiver salt their commitments to the payload with; empty where there is none.
    """

    type: FrameType
    operation: Operation
    kind: Kind
    moment: TrainingStep
    codec: Codec
    rank: int
    counter: int
    attempt: bytes
    n_values: int
    payload: bytes | memoryview
    attachment: bytes = b""
    salt: bytes = b""
    tail: int = 0

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.type,
            self.operation,
            self.codec,
            self.kind.code,
            self.moment.phase.value,
            self.moment.round,
            self.counter,
            self.attempt,
            self.rank,
            self.n_values,
            len(self.payload),
            len(self.attachment),
            self.tail,
            self.salt or _NO_SALT,
        )
        return b"".join((header, self.payload, self.attachment))

    def place(self) -> tuple[object, ...]:
        """Return what must be equal in the frames of all sites of one exchange."""
        return (self.operation, self.kind, self.moment, self.codec, self.counter, self.n_values, self.tail)


def unpack(data: bytes) -> Frame:
    """Parse a frame strictly.

    Raises:
        ProtocolError: wrong magic, version, code, length, or trailing bytes.
    """
    head, payload = unpack_head(data, len(data))
    view = memoryview(data)
    return replace(head, payload=bytes(view[payload]), attachment=bytes(view[payload.stop :]))


def unpack_head(data: bytes, size: int) -> tuple[Frame, slice]:
    """Parse the beginning of a frame of ``size`` bytes strictly.

    Returns:
        The frame without payload and attachment, and where the payload lies in the whole.

    Raises:
        ProtocolError: as ``unpack``.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"frame of {len(data)} bytes is shorter than its header")
    (
        magic,
        version,
        type_,
        operation,
        codec,
        kind,
        phase,
        round_,
        counter,
        attempt,
        rank,
        n_values,
        n_payload,
        n_attachment,
        tail,
        salt,
    ) = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError("not a frame of this version of VeilBoost: all sites and the server must run the same one")
    if n_attachment > MAX_ATTACHMENT or n_values > MAX_VALUES:
        raise ProtocolError("frame announces more values or a longer attachment than any message has")
    if size != _HEADER.size + n_payload + n_attachment:
        raise ProtocolError(f"frame of {size} bytes announces {_HEADER.size + n_payload + n_attachment}")
    try:
        codes = FrameType(type_), Operation(operation), KIND_BY_CODE[kind], PHASE_BY_CODE[phase], Codec(codec)
    except (ValueError, KeyError):
        raise ProtocolError("frame holds an unknown type, operation, kind, phase or codec") from None
    if type_ != FrameType.RESCALE and tail > n_payload:  # a request for another scale stands in a sum's place, empty
        raise ProtocolError("frame announces a tail that is longer than its payload")
    if codes[4].is_salted != (salt != _NO_SALT):
        raise ProtocolError("frame lacks the salt that its codec needs, or has one that it does not")
    head = Frame(
        codes[0],
        codes[1],
        codes[2],
        TrainingStep(codes[3], round_),
        codes[4],
        rank,
        counter,
        attempt,
        n_values,
        b"",
        b"",
        salt if any(salt) else b"",
        tail,
    )
    return head, slice(_HEADER.size, _HEADER.size + n_payload)


def pack_list(parts: list[bytes]) -> bytes:
    """Join byte strings so that ``unpack_list`` can take them apart."""
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join((lengths, *parts))


def unpack_list(data: bytes, n_parts: int) -> list[bytes]:
    """Take apart what ``pack_list`` joined.

    Raises:
        ProtocolError: not exactly ``n_parts`` parts that fill the data to the last byte.
    """
    start = 4 + 8 * n_parts
    if len(data) < start or struct.unpack_from("<I", data)[0] != n_parts:
        raise ProtocolError(f"expected a list of {n_parts} parts")
    lengths = struct.unpack_from(f"<{n_parts}Q", data, 4)
    if start + sum(lengths) != len(data):
        raise ProtocolError("the lengths of a list do not fill its data")
    parts, position = [], start
    for length in lengths:
        parts.append(data[position : position + length])
        position += length
    return parts
