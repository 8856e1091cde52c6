"""``make bench-load``: 100 and 300 sites of one job under `masks`, in one process, with tags; then laws for 1,000.

Measured: bytes and seconds of the handshake; processor seconds of a round at a site and at the server; memory of the
server while all contributions of a histogram arrive in pieces, as FLARE brings them. The last line is one JSON object.
Seconds of the handshake are those of all sites together, which share this process: a site has its own machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
import tracemalloc
from typing import Any

import numpy as np

from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.sum_tags import SumTags
from nvflare_plugins.attempt.session import Session, open_session
from nvflare_plugins.site.certificates import Identity
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.catalogue import Kind, Phase, TrainingStep
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.commitments import SALT_BYTES
from nvflare_plugins.wire.envelope import CHUNK_BYTES, Codec, Frame, FrameType, Operation
from tests.support.sessions import Policy

ATTEMPT, BINDING = bytes(16), b"b" * 32
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
            sessions[rank] = open_session(channel, Identity.unsigned(sites[rank]), Policy(True), BINDING)
        except Exception as error:
            aggregator.abort(str(error))
            raise

    began, cpu = time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(n_sites)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {
        "wall_s": time.perf_counter() - began,
        "cpu_s_per_site": (time.process_time() - cpu) / n_sites,
        "bytes_sent_by_a_site": transports[0].n_out,
        "bytes_received_by_a_site": transports[0].n_in,
        "bytes_sent_by_the_server": sum(transport.n_in for transport in transports),
    }
    return found, sessions


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
    parser.add_argument("--gigabyte", action="store_true", help="only add messages of 1 GB of three sites")
    options = parser.parse_args()
    if options.gigabyte:
        print(json.dumps({name: round(value, 2) for name, value in server_sum(3, 125_000_000).items()}))
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
