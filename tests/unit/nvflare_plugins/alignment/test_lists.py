"""Blocks of points: exact bytes, one length, and nothing but what is due from whom."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from nvflare_plugins.kinds.alignment import intersection as module
from nvflare_plugins.kinds.alignment.intersection import POINT_BYTES, Lists, pack_block, shuffled, unpack_block

POINTS = st.lists(st.binary(min_size=POINT_BYTES, max_size=POINT_BYTES), max_size=8)


@given(POINTS)
def test_a_block_comes_back_and_its_length_says_nothing(points):
    assert unpack_block(pack_block(points, 8), 8) == points
    assert len(pack_block(points, 8)) == len(pack_block([], 8))


@given(st.binary(max_size=4 + 3 * POINT_BYTES + 2))
def test_hostile_bytes_are_a_block_or_an_error(data):
    try:
        points = unpack_block(data, 3)
    except ProtocolError:
        return
    assert pack_block(points, 3) == data


@given(POINTS.filter(lambda points: len(points) < 8), st.integers(0, 4 + 8 * POINT_BYTES - 1), st.integers(1, 255))
def test_every_changed_byte_changes_the_points_or_is_noticed(points, place, change):
    data = bytearray(pack_block(points, 8))
    data[place] ^= change
    with contextlib.suppress(ProtocolError):
        assert unpack_block(bytes(data), 8) != points


def test_shuffles_are_permutations_and_all_equally_likely():
    # 6 orders, 6,000 draws: each count is 1,000 +- 29; the limit is 7 of those, two-sided false alarm 6 * 3e-12.
    counts = Counter("".join(shuffled("abc")) for _ in range(6000))
    assert set(counts) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert all(abs(count - 1000) < 203 for count in counts.values())


class Wire:
    """Two parties whose messages wait for each other in a list; nothing is sealed."""

    sites, world = ("a", "b"), 2

    def __init__(self, rank: int, incoming: list[bytes]):
        self.rank, self.incoming, self.sent = rank, incoming, []

    def route(self, kind, parts):
        self.sent.append(list(parts))
        received = [b""] * self.world
        received[1 - self.rank] = self.incoming.pop(0)
        return received

    def seal_for(self, rank, plaintext, purpose):
        return plaintext

    def open_of(self, rank, sealed, purpose):
        return sealed


def points(*numbers: int) -> list[bytes]:
    return [number.to_bytes(POINT_BYTES, "big") for number in numbers]


def swap(monkeypatch, incoming: list[bytes], outgoing: list[bytes], longest: int, source: int | None = 1):
    monkeypatch.setattr(module, "BLOCK", 2)
    wire, blocks, record = Wire(0, incoming), [], []
    lists = Lists(wire, wire, "test", longest, lambda *at: blocks.append(at), lambda *what: record.append(what))
    return lists.swap(outgoing, (1,) if outgoing else (), source), wire, blocks, record


def test_long_lists_travel_in_blocks_of_one_size(monkeypatch):
    incoming = [pack_block(points(5, 6), 2), pack_block(points(7), 2), pack_block([], 2)]
    received, wire, blocks, record = swap(monkeypatch, incoming, points(1, 2, 3), 5)
    assert received == points(5, 6, 7)
    assert [unpack_block(parts[1], 2) for parts in wire.sent] == [points(1, 2), points(3), []]
    assert all(parts[0] == b"" for parts in wire.sent)
    assert blocks == [(1, 3), (2, 3), (3, 3)]
    assert record == [("sent", "b", 68), ("received", "b", 68)] * 3, "sizes in the evidence are those of padded blocks"


def test_a_short_list_has_a_block_of_the_next_power_of_two(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1 << 16)
    sizes = set()
    for longest in (33, 40, 64):
        wire = Wire(0, [pack_block([], 64)])
        Lists(wire, wire, "test", longest).swap(points(1), (1,), 1)
        sizes.add(len(wire.sent[0][1]))
    assert sizes == {4 + 64 * POINT_BYTES}


@pytest.mark.parametrize(
    ("incoming", "message"),
    [
        ([b""], "not in step"),
        ([pack_block(points(1, 1), 2)], "repeated points"),
        ([pack_block(points(1, 2), 2), pack_block(points(2), 2)], "repeated points"),
        ([pack_block(points(1, 2), 2), pack_block(points(3, 4), 2)], "longer one"),
        ([pack_block(points(1), 1)], "another size"),
        ([pack_block(points(1), 2) + b"\0"], "another size"),
        ([(3).to_bytes(4, "little") + bytes(64)], "after its points"),
        ([(1).to_bytes(4, "little") + bytes(63) + b"\1"], "after its points"),
    ],
)
def test_what_is_not_due_ends_the_step(monkeypatch, incoming, message):
    with pytest.raises(ProtocolError, match=message):
        swap(monkeypatch, incoming, points(9), 3)


def test_a_part_that_nobody_should_send_ends_the_step(monkeypatch):
    with pytest.raises(ProtocolError, match="b is not in step"):
        swap(monkeypatch, [pack_block(points(1), 1)], points(9), 1, source=None)
