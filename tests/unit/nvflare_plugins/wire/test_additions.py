"""What the server adds: words modulo 2^64 or 2^32, and residues modulo 2^61 - 1 behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from nvflare_plugins.wire.aggregation import WordSum, open_sum
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Kind, unpack
from tests.support import frames


def frame(payload: bytes, n_values: int, tail: int, **changes: Any) -> Frame:
    return frames.frame(payload, counter=3, n_values=n_values, tail=tail, **changes)


def packed(numbers: list[int], width: int = 8) -> bytes:
    return np.array(numbers, dtype=f"<u{width}").tobytes()


@settings(max_examples=80)
@given(st.data())
def test_values_wrap_at_their_width_and_residues_at_the_modulus_however_they_come(data):
    n, k, world = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 12))
    width = data.draw(st.sampled_from([4, 8]))
    limit = 1 << (8 * width)
    word, residue = st.integers(0, limit - 1), st.sampled_from([0, 1, MODULUS - 1]) | st.integers(0, MODULUS - 1)
    rows = [([data.draw(word) for _ in range(n)], [data.draw(residue) for _ in range(k)]) for _ in range(world)]
    whole, pieces = WordSum(n, k, width), WordSum(n, k, width)
    for values, residues in rows:
        sent = packed(values, width) + packed(residues)
        whole.add(sent)
        added, piece = 0, b""
        while added < len(sent):
            start = added + len(piece)
            piece += sent[start : start + data.draw(st.integers(1, 20))]
            n_bytes = pieces.add_at(added, piece)
            added, piece = added + n_bytes, piece[n_bytes:]
    sums = [[sum(column) % limit for column in zip(*(values for values, _ in rows), strict=True)]]
    sums += [[sum(column) % MODULUS for column in zip(*(residues for _, residues in rows), strict=True)]]
    for total in (whole, pieces):
        assert bytes(total.pack()) == packed(sums[0], width) + packed(sums[1])


@pytest.mark.parametrize("bad", [MODULUS, MODULUS + 1, 2**64 - 1])
def test_a_residue_that_is_none_is_refused(bad):
    total = WordSum(1, 2)
    with pytest.raises(ProtocolError, match="modulus"):
        total.add(packed([5, 0, bad]))
    with pytest.raises(ProtocolError, match="modulus"):
        total.add_at(16, packed([bad]))
    total.add(packed([2**64 - 1, 0, MODULUS - 1]))


@pytest.mark.parametrize(
    ("n_values", "tail", "size"), [(2, 16, 24), (2, 16, 40), (2, 12, 28), (2, 8, 16), (0, 16, 0), (10**9, 16, 32)]
)
def test_sizes_that_do_not_fit_the_header_are_refused_before_memory_is_taken(n_values, tail, size):
    with pytest.raises(ProtocolError):
        open_sum(frame(bytes(size), n_values, tail), {})


@pytest.mark.parametrize("codec", [Codec.MASKED_32, Codec.PLAIN_32])
@pytest.mark.parametrize("size", [8 * 3 + 16, 4 * 3 + 12, 4 * 3 + 20, 4 * 4 + 16, 16, 0])
def test_words_of_another_width_than_the_codec_s_are_refused(codec, size):
    assert len(open_sum(frame(bytes(4 * 3 + 16), 3, 16, codec=codec), {}).pack()) == 4 * 3 + 16
    with pytest.raises(ProtocolError, match=f"sent {size} bytes for 3 values of 4 bytes and 16 bytes of residues"):
        open_sum(frame(bytes(size), 3, 16, codec=codec), {})


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.HISTOGRAM, Kind.HISTOGRAM_METRIC)])
def test_nothing_but_histograms_is_added_in_words_of_32_bits(kind):
    with pytest.raises(ProtocolError, match=f"{kind.name} does not travel in words of 32 bits"):
        open_sum(frame(bytes(4 * 3 + 16), 3, 16, codec=Codec.MASKED_32, kind=kind), {})


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
