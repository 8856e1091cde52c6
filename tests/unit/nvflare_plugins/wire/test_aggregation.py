"""The server's side of an exchange: sums, retries, and peers that misbehave."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from nvflare_plugins.wire.aggregation import Aggregator, WordSum, add_words, open_sum
from nvflare_plugins.wire.channel import Channel, HeadExchange
from nvflare_plugins.wire.envelope import (
    Codec,
    Frame,
    FrameType,
    Kind,
    Operation,
    Phase,
    TrainingStep,
    Transfer,
    pack_list,
    unpack,
    unpack_list,
)
from tests.support import frames
from tests.support.federation import DirectTransport, run_in_threads
from tests.support.frames import ATTEMPT

SITES = ("a", "b", "c")


def frame(rank: int, counter: int = 0, **changes) -> Frame:
    usual = {"n_values": 2, "payload": np.array([rank, 10], dtype="<u8").tobytes()}
    return frames.frame(rank=rank, counter=counter, **usual | changes)


class Server:
    def __init__(self, **options):
        self.transfers: list[Transfer] = []
        self.aggregator = Aggregator(SITES, ATTEMPT, 0.05, on_transfer=self.transfers.append, **options)
        self.answers: dict[str, list[Frame]] = {site: [] for site in SITES}

    def send(self, site: str, data: Frame | bytes) -> None:
        packed = data if isinstance(data, bytes) else data.pack()
        self.aggregator.submit(site, packed, lambda answer: self.answers[site].append(unpack(answer)))

    def send_all(self, **changes) -> None:
        for rank, site in enumerate(SITES):
            self.send(site, frame(rank, **changes))

    def assert_aborted(self, *words: str) -> None:
        assert self.aggregator.reason is not None
        for word in words:
            assert word in self.aggregator.reason


def test_sums_modulo_2_64_and_answers_every_site():
    server = Server()
    top = np.array([2**64 - 1, 5], dtype=np.uint64)
    for rank, site in enumerate(SITES):
        server.send(site, frame(rank, payload=top.astype("<u8").tobytes()))
    expected = (top * np.uint64(3)).tobytes()
    assert [server.answers[s][0].payload for s in SITES] == [expected] * 3
    assert [t.direction for t in server.transfers] == ["received"] * 3 + ["sent"]
    assert server.transfers[-1].sites == SITES


def test_nobody_is_answered_before_all_are_there():
    server = Server()
    server.send("a", frame(0))
    server.send("b", frame(1))
    assert not any(server.answers.values())


def test_a_retry_gets_the_same_answer_without_counting_twice():
    server = Server()
    server.send("a", frame(0))
    server.send("a", frame(0))
    server.send("b", frame(1))
    server.send("c", frame(2))
    server.send("b", frame(1))
    assert server.answers["b"][0].pack() == server.answers["b"][1].pack()
    assert np.frombuffer(server.answers["b"][0].payload, "<u8").tolist() == [3, 30]


def test_sums_without_a_salt_are_refused_and_answers_have_one_of_their_own():
    server = Server()
    for rank, site in enumerate(SITES):
        server.send(site, frame(rank, salt=bytes([rank + 1]) * 16))
    salts = {server.answers[site][0].salt for site in SITES}
    assert len(salts) == 1 and len(next(iter(salts))) == 16 and not salts & {bytes([n]) * 16 for n in range(4)}
    assert [t.frame.salt for t in server.transfers[:3]] == [bytes([n]) * 16 for n in (1, 2, 3)]
    server.send("a", frame(0, 1, salt=b""))
    server.assert_aborted("lacks the salt")
    with pytest.raises(ProtocolError, match="salt"):
        unpack(frame(0, codec=Codec.SEALED, salt=b"s" * 16).pack())


def test_gather_and_broadcast():
    server = Server()
    for rank, site in enumerate(SITES):
        server.send(site, frame(rank, operation=Operation.GATHER, payload=site.encode() * rank))
    assert unpack_list(server.answers["a"][0].payload, 3) == [b"", b"b", b"cc"]
    for rank, site in enumerate(SITES):
        server.send(site, frame(rank, 1, operation=Operation.BROADCAST, payload=b"root" if rank == 0 else b""))
    assert server.answers["c"][1].payload == b"root"


def test_only_rank_0_may_broadcast():
    server = Server()
    for rank, site in enumerate(SITES):
        server.send(site, frame(rank, operation=Operation.BROADCAST, payload=b"x"))
    server.assert_aborted("only rank 0")


def test_one_request_for_another_scale_stops_the_sum():
    server = Server()
    server.send("a", frame(0))
    server.send("b", frame(1, type=FrameType.RESCALE, payload=b""))
    server.send("c", frame(2))
    assert {server.answers[s][0].type for s in SITES} == {FrameType.RESCALE}
    assert server.answers["a"][0].payload == b""


@pytest.mark.parametrize("size", [1, 3, 4, 7, 16, 1000])
@pytest.mark.parametrize("codec", [Codec.MASKED, Codec.MASKED_32])
def test_frames_that_come_in_pieces_are_added_as_whole_ones(codec, size):
    """Five values of four bytes put the residues behind them at half a word of eight."""
    width = codec.word_bytes
    values, residues = np.array([1 << (8 * width - 2), 1, 2, 3, (1 << 8 * width) - 1], f"<u{width}"), [MODULUS - 1, 7]
    payload = values.tobytes() + np.array(residues, "<u8").tobytes()
    server = Server()
    for rank, site in enumerate(SITES):
        sent = frame(rank, codec=codec, n_values=5, payload=payload, tail=16)
        data = sent.pack()
        if rank == 1:
            server.send(site, sent)
            continue
        arriving = server.aggregator.begin(site, data[:100], len(data))
        for start in range(0, len(data), size):
            arriving.feed(data[start : start + size])
        arriving.finish(lambda answer, site=site: server.answers[site].append(unpack(answer)))
    answer = server.answers["a"][0]
    total = (values * values.dtype.type(3)).tobytes() + np.array([MODULUS - 3, 21], "<u8").tobytes()
    assert (answer.type, answer.codec, answer.payload) == (FrameType.RESULT, codec, total)


def test_a_long_frame_of_another_width_than_its_codec_s_ends_the_attempt_at_its_head():
    server = Server()
    data = frame(0, codec=Codec.MASKED_32, n_values=5, payload=bytes(40)).pack()
    assert server.aggregator.begin("a", data[:100], len(data)) is None
    server.assert_aborted("a: sent 40 bytes for 5 values of 4 bytes")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"payload": b"short"}, ("5 bytes",)),
        ({"n_values": 3}, ("b", "no longer in step")),
        ({"kind": Kind.METRIC}, ("METRIC", "HISTOGRAM")),
        ({"codec": Codec.PLAIN}, ("PLAIN", "MASKED")),
        ({"codec": Codec.MASKED_32}, ("b", "MASKED_32", "MASKED")),
        ({"codec": Codec.MASKED_32, "payload": bytes(8)}, ("b", "MASKED_32", "MASKED")),
        ({"moment": TrainingStep(Phase.UPDATE, 4)}, ("update:4",)),
        ({"counter": 1}, ("counter 1 where 0 is due",)),
        ({"attempt": bytes(16)}, ("another job attempt",)),
        ({"rank": 0}, ("claims rank 0",)),
        ({"type": FrameType.RESULT}, ("only the server",)),
    ],
)
def test_a_frame_out_of_place_aborts_for_everyone_and_names_the_site(changes, words):
    server = Server()
    server.send("a", frame(0))
    server.send("b", frame(1, **changes) if "rank" not in changes else frame(**changes))
    server.send("c", frame(2))
    server.assert_aborted("b: " if "payload" not in changes else "", *words)
    assert all(server.answers[s][-1].type is FrameType.ABORT for s in SITES)


def test_a_second_encoding_under_one_counter_aborts():
    server = Server()
    server.send("a", frame(0))
    server.send("a", frame(0, payload=bytes(16)))
    server.assert_aborted("two different frames under counter 0")


def test_an_unknown_site_aborts():
    server = Server()
    server.aggregator.submit("mallory", frame(0).pack(), lambda answer: None)
    server.assert_aborted("mallory", "not a site")


def test_a_missing_site_is_named_after_the_deadline():
    server = Server()
    server.send("a", frame(0))
    server.send("c", frame(2))
    threading.Event().wait(0.1)
    server.aggregator.expire()
    server.assert_aborted("no message from b")
    assert server.answers["a"][0].type is FrameType.ABORT


def test_the_deadline_follows_the_messages_that_are_really_sent():
    server = Server(transfer_s=lambda n_bytes: 1000.0 if n_bytes > 16 else 0.0)
    server.send("a", frame(0))
    threading.Event().wait(0.1)
    server.aggregator.expire()
    server.assert_aborted("no message from b, c within 0 s")
    server = Server(transfer_s=lambda n_bytes: 1000.0 if n_bytes > 16 else 0.0)
    server.send_all()
    server.send("a", frame(0, 1))  # the others may still be receiving the answer before
    threading.Event().wait(0.1)
    server.aggregator.expire()
    assert server.aggregator.reason is None


def test_lattice_contributions_before_their_parameters_abort():
    server = Server()
    server.send_all(codec=Codec.BFV)
    server.assert_aborted("before its public parameters")


@given(st.binary(max_size=200))
def test_any_bytes_either_parse_or_raise_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        unpack(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_never_passes_as_another_valid_length(position, value):
    packed = bytearray(frame(0, attachment=b"head").pack())
    packed[position % len(packed)] = value
    try:
        parsed = unpack(bytes(packed))
    except ProtocolError:
        return
    assert len(parsed.payload) + len(parsed.attachment) == 20


def test_truncated_and_extended_frames_are_refused():
    packed = frame(0).pack()
    for cut in range(len(packed)):
        with pytest.raises(ProtocolError):
            unpack(packed[:cut])
    with pytest.raises(ProtocolError):
        unpack(packed + b"x")


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_lists_round_trip_exactly(parts):
    packed = pack_list(parts)
    assert unpack_list(packed, len(parts)) == parts
    for broken in (packed + b"x", packed[:-1] if packed else b""):
        with pytest.raises(ProtocolError):
            unpack_list(broken, len(parts))


def test_add_words_refuses_other_lengths():
    with pytest.raises(ProtocolError):
        add_words([bytes(16), bytes(8)], 2)


def run_sites(work, aggregator: Aggregator) -> dict[str, object]:
    return run_in_threads(
        aggregator, SITES, lambda site, way: work(Channel(site, SITES, "job", ATTEMPT, way, 5.0)), notices_death=True
    )


def test_channels_number_their_exchanges_and_carry_heads_once():
    heads: dict[str, list] = {site: [] for site in SITES}

    def work(channel: Channel):
        channel.heads = HeadExchange(lambda: f"head of {channel.site}".encode(), heads[channel.site].append)
        channel.gather(Kind.HANDSHAKE, channel.site.encode())
        channel.heads.is_due = True
        parts = channel.gather(Kind.HANDSHAKE, channel.site.encode())
        channel.gather(Kind.HANDSHAKE, b"")
        return parts, channel.counter

    outcomes = run_sites(work, Aggregator(SITES, ATTEMPT, 5.0, attachment=lambda: b"server"))
    assert outcomes == {site: ([b"a", b"b", b"c"], 3) for site in SITES}
    assert heads == {site: [[b"head of a", b"head of b", b"head of c", b"server"]] for site in SITES}


def test_an_abort_reaches_every_site_as_one_error():
    aggregator = Aggregator(SITES, ATTEMPT, 5.0)

    def work(channel: Channel):
        if channel.site == "b":
            aggregator.abort("b: the disk is full")
        return channel.gather(Kind.HANDSHAKE, b"")

    outcomes = run_sites(work, aggregator)
    assert {str(e) for e in outcomes.values()} == {"b: the disk is full"}


def test_a_server_that_answers_with_another_exchange_is_refused():
    class Replaying(DirectTransport):
        first: bytes | None = None

        def exchange(self, data: bytes, timeout_s: float) -> bytes:
            answer = super().exchange(data, timeout_s)
            Replaying.first = Replaying.first or answer
            return Replaying.first

    aggregator = Aggregator(("a",), ATTEMPT, 5.0)
    channel = Channel("a", ("a",), "job", ATTEMPT, Replaying(aggregator, "a"), 5.0)
    channel.gather(Kind.HANDSHAKE, b"1")
    with pytest.raises(ProtocolError, match="belongs elsewhere"):
        channel.gather(Kind.HANDSHAKE, b"2")


def test_attempt_must_be_16_bytes():
    with pytest.raises(ValueError):
        Aggregator(SITES, os.urandom(8), 1.0)


@pytest.mark.parametrize("due", [True, False])
def test_heads_that_the_server_keeps_back_or_makes_up_are_noticed(due):
    class Lying(DirectTransport):
        def exchange(self, data: bytes, timeout_s: float) -> bytes:
            answer = unpack(super().exchange(data, timeout_s))
            return replace(answer, attachment=b"" if due else pack_list([b"x", b""])).pack()

    channel = Channel("a", ("a",), "job", ATTEMPT, Lying(Aggregator(("a",), ATTEMPT, 5.0), "a"), 5.0)
    channel.heads = HeadExchange(lambda: b"head", lambda heads: None)
    if due:
        channel.heads.is_due = True
    with pytest.raises(ProtocolError, match="evidence heads"):
        channel.gather(Kind.CLOSING, b"")


def test_routed_parts_reach_their_rank_and_no_one_else():
    server = Server()
    routed = {"operation": Operation.ROUTE, "kind": Kind.CONVERSATION, "codec": Codec.SEALED, "n_values": 0}
    for rank, site in enumerate(SITES):
        parts = [b"" if to == rank else f"{rank}->{to}".encode() for to in range(3)]
        server.send(site, frame(rank, **routed, payload=pack_list(parts)))
    for rank, site in enumerate(SITES):
        (answer,) = server.answers[site]
        expected = [b"" if sender == rank else f"{sender}->{rank}".encode() for sender in range(3)]
        assert unpack_list(answer.payload, 3) == expected
    sent = [(t.sites, t.frame.payload) for t in server.transfers if t.direction == "sent"]
    assert [sites for sites, _ in sent] == [("a",), ("b",), ("c",)]
    # A retry gets its own answer again, not another site's.
    server.send("b", frame(1, **routed, payload=pack_list([b"1->0", b"", b"1->2"])))
    assert server.answers["b"][1] == server.answers["b"][0]


@pytest.mark.parametrize("payload", [pack_list([b"x", b"", b""]), pack_list([b"", b""]), b"", b"\xff" * 40])
def test_a_routed_contribution_needs_one_part_for_each_other_rank(payload):
    server = Server()
    routed = {"operation": Operation.ROUTE, "kind": Kind.CONVERSATION, "codec": Codec.SEALED, "n_values": 0}
    server.send("a", frame(0, **routed, payload=payload))
    for rank in (1, 2):
        parts = [b""] * 3
        server.send(SITES[rank], frame(rank, **routed, payload=pack_list(parts)))
    assert server.aggregator.reason is not None


def test_an_answer_for_all_that_is_too_long_ends_the_attempt_by_name(monkeypatch):
    """Each site's part may be sent, and all of them together may be more than one message holds."""
    server = Server()
    monkeypatch.setattr("nvflare_plugins.wire.aggregation.MAX_FRAME_BYTES", 2 * (1 << 20) + 100)
    gathered = {"operation": Operation.GATHER, "kind": Kind.CLOSING, "codec": Codec.PUBLIC, "n_values": 0}
    for rank, site in enumerate(SITES):
        server.send(site, frame(rank, **gathered, payload=bytes(60)))
    assert server.aggregator.reason is not None and "CLOSING: the answer for all sites" in server.aggregator.reason


def test_a_channel_routes_and_refuses_an_own_part():
    aggregator = Aggregator(SITES, ATTEMPT, 5.0)

    def work(channel: Channel) -> list[bytes]:
        with pytest.raises(ValueError, match="own one empty"):
            channel.route(Kind.CONVERSATION, [b"x"] * 3)
        return channel.route(
            Kind.CONVERSATION, [b"" if r == channel.rank else bytes([channel.rank, r]) for r in range(3)]
        )

    results = run_sites(work, aggregator)
    assert results["b"] == [bytes([0, 1]), b"", bytes([2, 1])]


# -- what is added: words modulo 2^64 or 2^32, and residues modulo 2^61 - 1 behind them --------------------------------


def frame_of(payload: bytes, n_values: int, tail: int, **changes: Any) -> Frame:
    return frames.frame(payload, counter=3, n_values=n_values, tail=tail, **changes)


def packed(numbers: list[int], width: int = 8) -> bytes:
    return np.array(numbers, dtype=f"<u{width}").tobytes()


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
        open_sum(frame_of(bytes(size), n_values, tail), {})


@pytest.mark.parametrize("codec", [Codec.MASKED_32, Codec.PLAIN_32])
@pytest.mark.parametrize("size", [8 * 3 + 16, 4 * 3 + 12, 4 * 3 + 20, 4 * 4 + 16, 16, 0])
def test_words_of_another_width_than_the_codec_s_are_refused(codec, size):
    assert len(open_sum(frame_of(bytes(4 * 3 + 16), 3, 16, codec=codec), {}).pack()) == 4 * 3 + 16
    with pytest.raises(ProtocolError, match=f"sent {size} bytes for 3 values of 4 bytes and 16 bytes of residues"):
        open_sum(frame_of(bytes(size), 3, 16, codec=codec), {})


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.HISTOGRAM, Kind.HISTOGRAM_METRIC)])
def test_nothing_but_histograms_is_added_in_words_of_32_bits(kind):
    with pytest.raises(ProtocolError, match=f"{kind.name} does not travel in words of 32 bits"):
        open_sum(frame_of(bytes(4 * 3 + 16), 3, 16, codec=Codec.MASKED_32, kind=kind), {})


def test_ciphertexts_are_added_with_the_residues_behind_them():
    from he_processors.bfv import BfvProcessor

    site = BfvProcessor(BfvProcessor.generate(3))
    parameters = {Codec.BFV: site.public_parameters()}
    bodies = [site.encrypt(np.array([rank, -7])) for rank in range(3)]
    frames = [frame_of(body + packed([MODULUS - 1, 9]), 2, 16, codec=Codec.BFV) for body in bodies]
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
    sent = frame_of(packed([1, 2, 3]), 1, 16)
    assert unpack(sent.pack()) == sent and sent.place() != replace(sent, tail=8).place()
    with pytest.raises(ProtocolError, match="tail"):
        unpack(replace(sent, tail=25).pack())
    asked = replace(sent, type=FrameType.RESCALE, payload=b"")
    assert unpack(asked.pack()).place() == sent.place(), "it stands where the sums of the other sites stand"
