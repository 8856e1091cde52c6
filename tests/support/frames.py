"""Frames of one site, as tests of the server and of what reads frames need them."""

from __future__ import annotations

from typing import Any

from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, Operation, Phase, TrainingStep

ATTEMPT = bytes(range(16))
SALT = bytes(range(1, 17))


def frame(payload: bytes = b"", rank: int = 0, counter: int = 0, **changes: Any) -> Frame:
    """Return a contribution to a histogram of words; of another form, where ``changes`` say so."""
    fields = {
        "type": FrameType.CONTRIBUTION,
        "operation": Operation.SUM,
        "kind": Kind.HISTOGRAM,
        "moment": TrainingStep(Phase.UPDATE, 3),
        "codec": Codec.MASKED,
        "attempt": ATTEMPT,
        "n_values": len(payload) // 8,
    } | changes
    fields.setdefault("salt", SALT if fields["codec"].is_salted else b"")
    return Frame(rank=rank, counter=counter, payload=payload, **fields)
