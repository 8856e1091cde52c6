"""The best splits of a tree under seal, from synthetic shares: seconds, bytes and messages between two processes.

Two processes exchange what he_processors/two_party says, for a tree of 63 nodes on 30,000 rows, level by level. Every
message is delayed by half a round trip. Each winner is compared with the function in the clear. The last line of the
output is one JSON object:

    wall_s                      of the tree, round trips included; the transfers on the curve before it are ``setup_s``
    active_cpu_s, passive_cpu_s processor seconds of each party
    bytes, messages             of the tree; ``bytes_per_candidate``
    candidates, differing       of how many candidates; nodes whose winner is not that of the function in the clear

Run: python -m tests.bench.bench_sealed [--candidates 229] [--rows 30000] [--depth 6] [--round-trip-ms 10]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.registry import open_curve
from he_processors.randomness import OS_RANDOMNESS
from he_processors.two_party.oblivious_transfer import BitChooser, OffsetOwner, TransferChooser, TransferSender
from he_processors.two_party.split_argmax import NO_SPLIT, ActiveLevel, NodeSums, PassiveLevel, Terms, score

FRACTION_BITS = 14
TERMS = Terms(1 << FRACTION_BITS, 1 << (FRACTION_BITS - 2), 1 << FRACTION_BITS, 1 << FRACTION_BITS)
"""Logistic loss, lambda and min_child_weight 1."""
TARGETS = {"wall_s": 3.0, "bytes": 160e6}


@dataclass(frozen=True)
class Level:
    """A level as it is: what each party has. Shapes: sums and shares: [n_nodes, n_candidates]."""

    nodes: list[NodeSums]
    left: tuple[NDArray[np.int64], NDArray[np.int64]]
    of_active: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    of_passive: tuple[NDArray[np.uint64], NDArray[np.uint64]]


class Line:
    """One party's end of the line: counts, and delays what comes."""

    def __init__(self, end: Connection, round_trip_s: float) -> None:
        self._end, self._delay_s = end, round_trip_s / 2
        self.sizes: list[int] = []

    def send(self, data: bytes) -> None:
        """Send a message."""
        self.sizes.append(len(data))
        self._end.send_bytes(data)

    def receive(self) -> bytes:
        """Wait for a message."""
        data = self._end.recv_bytes()
        time.sleep(self._delay_s)
        return data


def drawn_level(rng: np.random.Generator, n_rows: int, n_nodes: int, n_candidates: int) -> Level:
    """Draw a level of equal nodes: rows of a rare class, of which each candidate takes some."""
    nodes, left = [], []
    for _ in range(n_nodes):
        p = rng.beta(0.5, 3.0, n_rows)
        g = np.rint((p - (rng.random(n_rows) < p)) * TERMS.g_bound).astype(np.int64)
        h = np.rint(4 * p * (1 - p) * TERMS.h_bound).astype(np.int64)
        order, cut = rng.permutation(n_rows), rng.integers(0, n_rows + 1, n_candidates)
        running = [np.concatenate([[0], np.cumsum(values[order])]) for values in (g, h)]
        nodes.append(NodeSums(int(g.sum()), int(h.sum()), n_rows))
        left.append((running[0][cut], running[1][cut]))
    sums = np.array([one[0] for one in left]), np.array([one[1] for one in left])
    drawn = [np.frombuffer(OS_RANDOMNESS.bytes(8 * s.size), "<u8").reshape(s.shape).astype(np.uint64) for s in sums]
    others = [s.view(np.uint64) - d for s, d in zip(sums, drawn, strict=True)]
    return Level(nodes, sums, (others[0], others[1]), (drawn[0], drawn[1]))


def transfers(line: Line) -> tuple[OffsetOwner, BitChooser]:
    """Make the transfers of both directions; both parties offer, then both choose."""
    curve, offset = open_curve(), int.from_bytes(OS_RANDOMNESS.bytes(16), "little") | 1
    sender = TransferSender(curve)
    line.send(sender.offer)
    chooser = TransferChooser(curve, line.receive(), offset)
    line.send(chooser.choices)
    return OffsetOwner(offset, chooser.keys), BitChooser(sender.key_pairs(line.receive()))


def play_active(line: Line, levels: Sequence[Level]) -> dict[str, float]:
    """Garble all levels; return seconds."""
    began = time.perf_counter()
    owner, chooser = transfers(line)
    line.sizes.clear()
    ready, cpu = time.perf_counter(), time.process_time()
    for level in levels:
        active = ActiveLevel(TERMS, level.nodes, level.left[0].shape[1], chooser, owner)
        line.send(active.ask())
        line.send(active.garble(line.receive(), *level.of_active))
        line.send(active.decide(line.receive(), [NO_SPLIT] * len(level.nodes)))
        line.receive()  # who wins
    done = time.perf_counter()
    return {"setup_s": ready - began, "wall_s": done - ready, "active_cpu_s": time.process_time() - cpu}


def play_passive(end: Connection, round_trip_s: float, levels: Sequence[Level], result: Connection) -> None:
    """Evaluate all levels, and report."""
    line, winners = Line(end, round_trip_s), []
    owner, chooser = transfers(line)
    line.sizes.clear()
    cpu = time.process_time()
    for level in levels:
        shape = level.left[0].shape
        passive = PassiveLevel(TERMS, [node.n_rows for node in level.nodes], shape[1], chooser, owner)
        line.send(passive.offer(line.receive(), *level.of_passive, np.ones(shape, dtype=bool)))
        line.send(passive.score(line.receive()))
        winners.append(passive.winners(line.receive()))
        line.send(np.packbits(winners[-1] >= 0).tobytes())
    result.send((time.process_time() - cpu, line.sizes, winners))


def n_differing(levels: Sequence[Level], winners: Sequence[NDArray[np.int64]]) -> int:
    """Count the nodes whose winner is not the first of the best in the clear."""
    found = 0
    for level, won in zip(levels, winners, strict=True):
        for node, g, h, winner in zip(level.nodes, *level.left, won.tolist(), strict=True):
            keys = score(TERMS.widths(node.n_rows), node, g, h)
            best = int(np.argmax(keys))
            found += winner != (best if keys[best] > NO_SPLIT else -1)
    return found


def measure(n_rows: int, depth: int, n_candidates: int, round_trip_s: float) -> dict[str, float]:
    """Return the figures of one tree."""
    rng = np.random.default_rng(0)
    levels = [drawn_level(rng, n_rows >> level, 1 << level, n_candidates) for level in range(depth)]
    here, there = multiprocessing.Pipe()
    result, reports = multiprocessing.Pipe()
    other = multiprocessing.Process(target=play_passive, args=(there, round_trip_s, levels, reports))
    other.start()
    line = Line(here, round_trip_s)
    figures = play_active(line, levels)
    passive_cpu_s, sizes, winners = result.recv()
    other.join()
    total, n = sum(line.sizes) + sum(sizes), n_candidates * sum(len(level.nodes) for level in levels)
    return {
        **{name: round(value, 3) for name, value in figures.items()},
        "passive_cpu_s": round(passive_cpu_s, 3),
        "bytes": total,
        "bytes_per_candidate": round(total / n),
        "messages": len(line.sizes) + len(sizes),
        "candidates": n,
        "differing": n_differing(levels, winners),
    }


def main() -> None:
    """Measure, and print the JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=229, help="of each node")
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--round-trip-ms", type=float, default=10.0)
    options = parser.parse_args()
    found = measure(options.rows, options.depth, options.candidates, options.round_trip_ms / 1000)
    for name, target in TARGETS.items():
        sys.stderr.write(f"{name} = {found[name]:g} (target {target:g})\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
