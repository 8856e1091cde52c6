"""``make bench-load``: 100 and 300 sites of one job under `masks`, in one process, with tags; then laws for 1,000.

Measured: bytes and seconds of the handshake; processor seconds of a round at a site and at the server; memory of the
server while all contributions of a histogram arrive in pieces, as FLARE brings them. The last line is one JSON object.
Seconds of the handshake are those of all sites together, which share this process: a site has its own machine.

``--one 1000`` opens a session at one site among so many: the others do only what concerns that one, so that its
messages are real, and the server hands on as many bytes as all say.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np

from he_processors.key_agreement import (
    KEY_SIZE_BYTES,
    EphemeralKey,
    confirm_key,
    derive_group_secret,
    derive_pair_secret,
    hash_transcript,
)
from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.randomness import OS_RANDOMNESS
from he_processors.sum_tags import SumTags
from nvflare_plugins.attempt.session import _GROUP, _PAIR, Hello, Peer, Proof, Session, _PairBoxes, open_session
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import (
    CHUNK_BYTES,
    SALT_BYTES,
    Codec,
    Frame,
    FrameType,
    Kind,
    Operation,
    Phase,
    TrainingStep,
    pack_list,
    unpack,
    unpack_list,
)
from tests.support.sessions import Policy
from tests.support.threads import in_threads

ATTEMPT, KIND, BINDING = bytes(16), "horizontal", b"b" * 32
FEATURES, BINS, DEPTH = 28, 256, 6
WIDEST = 2 * FEATURES * BINS * (1 << (DEPTH - 2))  # values of the largest message of a tree: half of a level is built
ROUND = 2 * FEATURES * BINS * (1 << (DEPTH - 1))  # of all histograms of a tree, about


class CountingTransport:
    """Hands frames to the aggregator of this process and counts their bytes."""

    def __init__(self, aggregator: Aggregator, site: str) -> None:
        self._aggregator, self._site = aggregator, site
        self.n_out = self.n_in = 0

    def exchange(self, frame: bytes, timeout_s: float) -> bytes:
        done, answers = threading.Event(), []

        def reply(data: bytes) -> None:
            answers.append(data)
            done.set()

        self._aggregator.submit(self._site, frame, reply)
        done.wait(timeout_s)
        self.n_out += len(frame)
        self.n_in += len(answers[0])
        return answers[0]

    def abort(self, reason: str) -> None:
        self._aggregator.abort(reason)


def handshake(n_sites: int) -> tuple[dict[str, float], list[Session]]:
    """Open a session at all sites. Units: seconds, bytes."""
    sites = [f"site-{number:04}" for number in range(n_sites)]
    aggregator = Aggregator(sites, ATTEMPT, 3600.0)
    transports = [CountingTransport(aggregator, site) for site in sites]
    sessions: list[Any] = [None] * n_sites

    def take_part(rank: int) -> None:
        channel = Channel(sites[rank], sites, "job", ATTEMPT, transports[rank], 3600.0)
        try:
            sessions[rank] = open_session(channel, Identity.unsigned(sites[rank]), Policy(True), KIND, BINDING)
        except Exception as error:
            aggregator.abort(str(error))
            raise

    began, cpu = time.perf_counter(), time.process_time()
    in_threads(take_part, range(n_sites))
    found = {
        "wall_s": time.perf_counter() - began,
        "cpu_s_per_site": (time.process_time() - cpu) / n_sites,
        "bytes_sent_by_a_site": transports[0].n_out,
        "bytes_received_by_a_site": transports[0].n_in,
        "bytes_sent_by_the_server": sum(transport.n_in for transport in transports),
    }
    return found, sessions


class Peers:
    """The server and all other sites of a handshake, of which it does what concerns one site: its messages are real.

    Of a million pairs of sites it makes the keys of those of one site alone, so that thousands of sites fit.
    """

    def __init__(self, sites: list[str], rank: int) -> None:
        self._sites, self._rank, self._n_seen = sites, rank, 0
        self._keys = {one: EphemeralKey() for one in range(len(sites)) if one != rank}
        self._hellos = {
            one: Hello.new(Identity.unsigned(sites[one]), key.public, Policy(True), KIND, BINDING)
            for one, key in self._keys.items()
        }
        self.n_out = self.n_in = 0
        self.cpu_s = 0.0  # of the peers
        self.said: list[tuple[Frame, int]] = []  # what a site says, and the bytes of a part of the answer

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        began, frame = time.process_time(), unpack(data)
        steps = (self._hello, self._signature, self._proofs, self._group_mac)
        parts = steps[self._n_seen](bytes(frame.payload))
        self._n_seen += 1
        self.said.append((frame, max(map(len, parts))))
        answer = bytes(replace(frame, type=FrameType.RESULT, payload=pack_list(parts)).pack())
        self.n_out, self.n_in = self.n_out + len(data), self.n_in + len(answer)
        self.cpu_s += time.process_time() - began
        return answer

    def abort(self, reason: str) -> None:
        raise RuntimeError(reason)

    def _hello(self, theirs: bytes) -> list[bytes]:
        hellos = self._hellos | {self._rank: Hello.unpack(theirs)}
        everybody = [Peer(hellos[one], None).participant for one in range(len(self._sites))]
        self._id = hash_transcript("job", ATTEMPT.hex(), BINDING, 1, everybody)
        self._public = hellos[self._rank].public_key
        return [hellos[one].pack() for one in range(len(self._sites))]

    def _signature(self, theirs: bytes) -> list[bytes]:
        return [b""] * len(self._sites)

    def _proofs(self, theirs: bytes) -> list[bytes]:
        found, shares, theirs_to = [], [], unpack_list(theirs, len(self._sites))
        own = b""
        for one in range(len(self._sites)):
            if one == self._rank:
                found.append(b"")
                shares.append(b"")
                continue
            secret = derive_pair_secret(self._keys[one].agree(self._public), self._id, one, self._rank)
            boxes = _PairBoxes(one, self._id, {self._rank: secret})
            shares.append(OS_RANDOMNESS.bytes(KEY_SIZE_BYTES))
            mac = confirm_key(secret, self._id, _PAIR, one, self._rank)
            found.append(Proof(mac, boxes.seal(self._rank, shares[-1], _GROUP)).pack())
            own = boxes.open(self._rank, Proof.unpack(theirs_to[one]).share, _GROUP)
        shares[self._rank] = own
        self._secret = derive_group_secret(shares, self._id)
        return found

    def _group_mac(self, theirs: bytes) -> list[bytes]:
        n = len(self._sites)
        macs = [confirm_key(self._secret, self._id, _GROUP, one, n) for one in range(n)]
        return [theirs if one == self._rank else mac for one, mac in enumerate(macs)]


def handshake_of_one(n_sites: int) -> dict[str, float]:
    """Open a session at one site among so many, the middle one. Units: seconds, bytes."""
    sites, rank = [f"site-{number:04}" for number in range(n_sites)], n_sites // 2
    peers = Peers(sites, rank)
    channel = Channel(sites[rank], sites, "job", ATTEMPT, peers, 3600.0)
    began = time.process_time()
    session = open_session(channel, Identity.unsigned(sites[rank]), Policy(True), KIND, BINDING)
    cpu_s = time.process_time() - began - peers.cpu_s
    session.close()
    server = _server_of_a_handshake(sites, peers)
    return {"cpu_s": round(cpu_s, 3), "bytes_sent": peers.n_out, "bytes_received": peers.n_in, **server}


def _server_of_a_handshake(sites: list[str], peers: Peers) -> dict[str, float]:
    """Hand on as many bytes as the sites of a handshake say: what is in them is no matter of the server's."""
    aggregator, n_out, began = Aggregator(sites, ATTEMPT, 3600.0), [0], time.process_time()

    def reply(data: bytes) -> None:
        n_out[0] += len(data)

    for frame, n_bytes in peers.said:
        for rank, site in enumerate(sites):
            payload = bytes(n_bytes)
            if frame.operation is Operation.ROUTE:
                payload = pack_list([b"" if one == rank else payload for one in range(len(sites))])
            aggregator.submit(site, bytes(replace(frame, rank=rank, payload=payload).pack()), reply)
    assert aggregator._reason is None, aggregator._reason
    return {"server_cpu_s": round(time.process_time() - began, 3), "server_bytes_sent": n_out[0]}


def protect_and_open(session: Session, counter: int, n_values: int) -> float:
    """Return the processor seconds in which one site masks and tags a message, and opens and checks its sum."""
    secrets = (session.session_id, session.rank, session.pair_secrets, session.group_secret)
    masks, tags = PairwiseMasks(*secrets), SumTags(*secrets)
    values, none = np.arange(n_values, dtype=np.int64), np.zeros(0, np.uint64)
    label = MessageLabel(counter, "HISTOGRAM", "update:0", n_values)
    began = time.process_time()
    masked = masks.mask(values.view(np.uint64), label)
    tags.protect(values, none, label)
    masks.unblind(masked, label)
    tags._tags(values, none, label)  # what opening a sum costs beside
    return time.process_time() - began


def server_sum(n_sites: int, n_values: int) -> dict[str, float]:
    """Let all sites' contributions arrive in turns of pieces. Units: processor seconds, messages of memory."""
    sites = [f"site-{number:04}" for number in range(n_sites)]
    aggregator = Aggregator(sites, ATTEMPT, 3600.0)
    answers: list[bytes] = []
    words = bytes(8 * (n_values + 2))

    def frame(rank: int) -> bytes:
        moment = TrainingStep(Phase.UPDATE)
        salt = b"s" * SALT_BYTES
        types = (FrameType.CONTRIBUTION, Operation.SUM, Kind.HISTOGRAM, moment, Codec.MASKED)
        return Frame(*types, rank, 0, ATTEMPT, n_values, words, b"", salt, 16).pack()

    # One frame in this process's memory at a time, as many on their way as there are sites: pieces come in turns.
    gc.collect()
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    began = time.process_time()
    arriving = []
    for rank, site in enumerate(sites):
        data = frame(rank)
        arriving.append((aggregator.begin(site, data[:CHUNK_BYTES], len(data)), rank))
    data = None
    head = frame(0)
    own = tracemalloc.get_traced_memory()[0]
    for start in range(0, len(head), CHUNK_BYTES):
        for part, rank in arriving:
            assert part is not None
            piece = head[start : start + CHUNK_BYTES]
            if not start:  # the rank stands in the header
                piece = piece[:39] + rank.to_bytes(2, "little") + piece[41:]
            part.feed(piece)
    for part, _ in arriving:
        assert part is not None
        part.finish(answers.append)
    seconds = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1] - base
    tracemalloc.stop()
    assert len(answers) == n_sites and len(set(map(id, answers))) == 1
    return {
        "cpu_s": seconds,
        "memory_messages": (peak - len(head)) / len(words),  # less the bytes of the one frame that stands for the sites
        "memory_at_opening_messages": (own - base - len(head)) / len(words),
    }


def measure(n_sites: int) -> dict[str, Any]:
    """Return all figures for so many sites."""
    opened, sessions = handshake(n_sites)
    session = sessions[n_sites // 2]
    site_s = min(protect_and_open(session, counter, WIDEST) for counter in range(3))
    server = server_sum(n_sites, WIDEST)
    for one in sessions:
        one.close()
    round_s = (site_s + server["cpu_s"]) * ROUND / WIDEST
    return {
        "handshake": {name: round(value, 3) for name, value in opened.items()},
        "round": {
            "values": ROUND,
            "site_cpu_s": round(site_s * ROUND / WIDEST, 3),
            "server_cpu_s": round(server["cpu_s"] * ROUND / WIDEST, 3),
            "protection_s": round(round_s, 3),
        },
        "server_memory_messages": round(server["memory_messages"], 2),
        "server_memory_messages_of_four_times_the_size": round(server_sum(n_sites, 4 * WIDEST)["memory_messages"], 2),
    }


def law(few: dict[str, Any], many: dict[str, Any], sites: tuple[int, int], target: int) -> dict[str, float]:
    """Draw a power of the number of sites through two measurements and go on to ``target``."""
    found = {}
    for part in ("handshake", "round"):
        for name, value in few[part].items():
            other = many[part][name]
            if name == "values" or not value or not other:
                continue
            power = float(np.log(other / value) / np.log(sites[1] / sites[0]))
            found[f"{part}.{name}"] = {"power": round(power, 2), "at": round(other * (target / sites[1]) ** power, 3)}
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, nargs=2, default=[100, 300])
    parser.add_argument("--one", type=int, nargs="+", help="only open a session at one site among so many")
    parser.add_argument("--gigabyte", action="store_true", help="only add messages of 1 GB of three sites")
    options = parser.parse_args()
    if options.gigabyte:
        print(json.dumps({name: round(value, 2) for name, value in server_sum(3, 125_000_000).items()}))
        return 0
    if options.one:
        print(json.dumps({n_sites: handshake_of_one(n_sites) for n_sites in options.one}))
        return 0
    figures = {}
    for n_sites in options.sites:
        figures[n_sites] = measure(n_sites)
        print(f"{n_sites} sites: {json.dumps(figures[n_sites])}", flush=True)
    few, many = options.sites
    at_1000 = law(figures[few], figures[many], (few, many), 1000)
    print(json.dumps({"measured": figures, "at 1000 sites": at_1000}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
