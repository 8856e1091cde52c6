"""What the server adds: words modulo 2^64, and residues modulo 2^61 - 1 behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from nvflare_plugins.wire.additions import WordSum, open_sum
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Operation, unpack

ATTEMPT = bytes(16)


def frame(payload: bytes, n_values: int, tail: int, **changes: object) -> Frame:
    fields = {
        "type": FrameType.CONTRIBUTION,
        "operation": Operation.SUM,
        "kind": Kind.HISTOGRAM,
        "moment": TrainingStep(Phase.UPDATE, 0),
        "codec": Codec.MASKED,
        "rank": 0,
        "counter": 3,
        "attempt": ATTEMPT,
        "n_values": n_values,
        "payload": payload,
        "salt": b"s" * 16,
        "tail": tail,
    }
    return Frame(**{**fields, **changes})


def packed(numbers: list[int]) -> bytes:
    return np.array(numbers, dtype="<u8").tobytes()


@settings(max_examples=80)
@given(st.data())
def test_values_wrap_at_2_64_and_residues_at_the_modulus_however_they_come(data):
    n, k, world = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 12))
    word, residue = st.integers(0, 2**64 - 1), st.sampled_from([0, 1, MODULUS - 1]) | st.integers(0, MODULUS - 1)
    rows = [[data.draw(word) for _ in range(n)] + [data.draw(residue) for _ in range(k)] for _ in range(world)]
    whole, pieces = WordSum(n, k), WordSum(n, k)
    for row in rows:
        whole.add(packed(row))
        start = 0
        while start < n + k:
            step = data.draw(st.integers(1, n + k - start))
            pieces.add_at(start, packed(row[start : start + step]))
            start += step
    expected = [sum(column) % (2**64 if i < n else MODULUS) for i, column in enumerate(zip(*rows, strict=True))]
    for total in (whole, pieces):
        assert np.frombuffer(total.pack(), "<u8").tolist() == expected


@pytest.mark.parametrize("bad", [MODULUS, MODULUS + 1, 2**64 - 1])
def test_a_residue_that_is_none_is_refused(bad):
    total = WordSum(1, 2)
    with pytest.raises(ProtocolError, match="modulus"):
        total.add(packed([5, 0, bad]))
    with pytest.raises(ProtocolError, match="modulus"):
        total.add_at(2, packed([bad]))
    total.add(packed([2**64 - 1, 0, MODULUS - 1]))


@pytest.mark.parametrize(
    ("n_values", "tail", "size"), [(2, 16, 24), (2, 16, 40), (2, 12, 28), (2, 8, 16), (0, 16, 0), (10**9, 16, 32)]
)
def test_sizes_that_do_not_fit_the_header_are_refused_before_memory_is_taken(n_values, tail, size):
    with pytest.raises(ProtocolError):
        open_sum(frame(bytes(size), n_values, tail), {})


def test_ciphertexts_are_added_with_the_residues_behind_them():
    from he_processors.bfv import BfvProcessor

    site = BfvProcessor.from_secret(BfvProcessor.generate(3))
    parameters = {Codec.BFV: site.public_parameters()}
    bodies = [site.encrypt(np.array([rank, -7])) for rank in range(3)]
    frames = [frame(body + packed([MODULUS - 1, 9]), 2, 16, codec=Codec.BFV) for body in bodies]
    total = open_sum(frames[0], parameters)
    for one in frames:
        total.add(one.payload)
    payload = bytes(total.pack())
    assert site.decrypt(payload[:-16], 2).tolist() == [3, -21]
    assert np.frombuffer(payload[-16:], "<u8").tolist() == [MODULUS - 3, 27]
    with pytest.raises(ProtocolError, match="modulus"):
        open_sum(frames[0], parameters).add(bodies[0] + packed([MODULUS, 9]))
    with pytest.raises(ProtocolError, match="public parameters"):
        open_sum(frames[0], {})


def test_a_frame_says_how_long_its_tail_is():
    sent = frame(packed([1, 2, 3]), 1, 16)
    assert unpack(sent.pack()) == sent and sent.place() != replace(sent, tail=8).place()
    with pytest.raises(ProtocolError, match="tail"):
        unpack(replace(sent, tail=25).pack())
    asked = replace(sent, type=FrameType.RESCALE, payload=b"")
    assert unpack(asked.pack()).place() == sent.place(), "it stands where the sums of the other sites stand"
