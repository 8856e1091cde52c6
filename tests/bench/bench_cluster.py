"""A party on workers of its own: what two workers save, what one costs, what goes between the processes.

Vertical data: generated, 10 features at the active and 18 at the passive party, 32 bins, a full tree of depth 5; a
scheduler and single-threaded workers on this machine's loopback. Each party in turn is in one process, on one worker
and on two. The last line of the output is one JSON object: of ``elgamal`` and of ``paillier`` what follows, and of
``horizontal`` what cluster_horizontal.py says; of ``alignment`` the same of a party's blindings in an alignment of two
sets of so many ids, half of them common, and connect_s, what it takes to reach and look at so many workers.

    active, passive, opening    encryption of a tree's pairs; the sums of all its levels, from the blocks of pairs on;
                           the opening of all sums by the active party
        in_process, workers_1, workers_2
            wall_s         what a tree takes; on a busy machine more than it needs
            path_core_s    CPU seconds of the party's process and of its busiest worker, one after the other: what a
                           tree takes where each has a core of its own
            bytes_to, bytes_from, bytes_between      to and from all workers, and among them, for a tree
        speed_up_2         path_core_s of one worker over that of two
        overhead_1         of one worker, over the party's own process, less one
    tree                   encryption, sums and opening one after the other: path_core_s without workers, with one and
                           with two at each party, and speed_up_2 of it
    curve                  path of a tree for 1 to 64 workers at each party, from these rates and bytes on a line of
                           10 Gbit/s, in seconds
    targets_met            speed_up_2 of the tree >= 1.7; overhead_1 <= 0.15

Run: make bench-cluster, or python -m tests.bench.bench_cluster [--only elgamal] [--rows N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VEILBOOST_THREADS", "1")  # a worker is one thread, and so is a party without one

import numpy as np
from numpy.typing import NDArray

from he_processors.ciphertext_wire import secret_key_to_bytes
from he_processors.elgamal.encryption import DigitFormat
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import NodeTotal
from he_processors.paillier import generate_paillier_key
from nvflare_plugins.data.declaration import Cluster
from nvflare_plugins.kinds.alignment.intersection import BLOCK, PART, BlindingKey, SpreadKey
from nvflare_plugins.kinds.vertical.histogram_maker import GRADIENT_BLOCK_ROWS, histogram_maker
from nvflare_plugins.kinds.vertical.key_owner import ShardedOwner, elgamal_owner, gradient_owner, pair_format
from nvflare_plugins.kinds.vertical.messages import feature_blocks, layout_of
from nvflare_plugins.workers.dask_workers import DaskWorkers, open_workers
from nvflare_plugins.workers.workers import begin
from tests.bench.cluster_horizontal import measure
from tests.support.local_cluster import LocalDask, local_cluster

N_FEATURES, N_BINS, DEPTH = 18, 32, 5
LINE_BYTES_PER_S = 1.25e9
CURVE = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 5
ROWS = {"elgamal": 200_000, "paillier": 20_000, "horizontal": 2_000_000, "alignment": 200_000}
"""Rows of each part, or ids."""
TARGETS = {"tree_speed_up_2": 1.7, "overhead_1": 0.15}


@dataclass(frozen=True, slots=True)
class Tree:
    """What one tree gives both parties to do. Shapes: codes: uint8[n_features, n_rows]; g, h: int64[n_rows]."""

    codes: NDArray[np.uint8]
    levels: list[list[NDArray[np.int32]]]  # rows of the nodes whose sums are asked for, level by level
    g: NDArray[np.int64]
    h: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step took. Units: seconds; bytes."""

    wall_s: float
    party_core_s: float
    worker_core_s: float
    bytes_to: int
    bytes_from: int
    bytes_between: int

    @property
    def path_core_s(self) -> float:
        """CPU seconds of the party's process, then of its busiest worker."""
        return self.party_core_s + self.worker_core_s

    def figures(self) -> dict[str, float]:
        """Return the figures of the output."""
        return {
            "wall_s": round(self.wall_s, 3),
            "path_core_s": round(self.path_core_s, 3),
            "party_core_s": round(self.party_core_s, 3),
            "bytes_to": self.bytes_to,
            "bytes_from": self.bytes_from,
            "bytes_between": self.bytes_between,
        }


def main() -> None:
    """Measure; progress goes to stderr, the JSON object to stdout at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="in the place of those of each part")
    parser.add_argument("--only", choices=tuple(ROWS))
    options = parser.parse_args()
    results = {}
    for part, rows in ROWS.items():
        if options.only in (None, part):
            _say(part)
            n_rows = options.rows or rows
            if part == "horizontal":
                results[part] = measure(n_rows, 28, 21)
            else:
                results[part] = measure_blinding(n_rows) if part == "alignment" else measure_vertical(part, n_rows)
    print(json.dumps(results))


def measure_vertical(scheme: str, n_rows: int) -> dict[str, Any]:
    """Return the figures of a tree under a scheme."""
    owner, secret = _owner(scheme, n_rows)
    tree = make_tree(n_rows, owner.pair_format)
    n_blocks = range(0, n_rows, GRADIENT_BLOCK_ROWS)
    cuts = [slice(start, start + GRADIENT_BLOCK_ROWS) for start in n_blocks]
    blocks = [owner.encrypt(tree.g[cut], tree.h[cut]) for cut in cuts]
    results: dict[str, Any] = {
        "rows": n_rows,
        "features": N_FEATURES,
        "bins": N_BINS,
        "depth": DEPTH,
        "load_average": os.getloadavg()[0],
    }
    maker = histogram_maker(owner.setup, n_rows)
    sums = add_up(maker, tree, blocks)
    active, passive, opening = {}, {}, {}
    for n_workers in (0, 1, 2):
        _say(f"{n_workers} workers")
        with local_cluster(max(n_workers, 1)) as cluster:
            opening[n_workers] = _measure(cluster, n_workers, lambda at: _opening(owner, at, secret, tree, sums))
            active[n_workers] = _measure(cluster, n_workers, lambda at: _encrypting(owner, at, secret, tree, cuts))
            passive[n_workers] = _measure(cluster, n_workers, lambda at: _summing(owner, at, tree, blocks))
    steps = (active, passive, opening)
    results |= {"active": _of(active), "passive": _of(passive), "opening": _of(opening)}
    path = {n: sum(one[n].path_core_s for one in steps) for n in (0, 1, 2)}
    overhead = path[1] / path[0] - 1
    results["tree"] = {f"workers_{n}" if n else "in_process": round(value, 3) for n, value in path.items()}
    results["tree"] |= {"speed_up_2": round(path[1] / path[2], 2), "overhead_1": round(overhead, 3)}
    results["curve"] = {n: round(_path_of(n, steps), 3) for n in CURVE}
    results["targets_met"] = {
        "tree_speed_up_2": path[1] / path[2] >= TARGETS["tree_speed_up_2"],
        "overhead_1": overhead <= TARGETS["overhead_1"],
    }
    return results


def measure_blinding(n_ids: int) -> dict[str, Any]:
    """Return the figures of one party's blindings of an alignment between two."""
    costs, connecting = {}, {}
    for n_workers in (0, 1, 2):
        _say(f"{n_workers} workers")
        with local_cluster(max(n_workers, 1)) as cluster:
            if n_workers:
                started = time.perf_counter()
                with open_workers(Cluster(cluster.address, n_workers)):
                    connecting[n_workers] = round(time.perf_counter() - started, 2)
            costs[n_workers] = _measure(cluster, n_workers, lambda at: _blinding(at, n_ids))
    return {"ids": n_ids, "load_average": os.getloadavg()[0], **_of(costs), "connect_s": connecting}


def make_tree(n_rows: int, pairs: Any) -> Tree:
    """Return a full tree over random rows: at each level below the root half of all rows, in half of its nodes."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, N_BINS + 1, (N_FEATURES, n_rows)).astype(np.uint8)
    leaf = rng.integers(0, 1 << DEPTH, n_rows)
    levels = [[np.arange(n_rows, dtype=np.int32)]]
    for depth in range(1, DEPTH):
        node = leaf >> (DEPTH - depth)
        levels.append([np.flatnonzero(node == left).astype(np.int32) for left in range(0, 1 << depth, 2)])
    g, h = pairs.encode_pairs(rng.uniform(-0.5, 0.5, n_rows), rng.uniform(0, 0.25, n_rows))
    return Tree(codes, levels, g, h)


def add_up(maker: Any, tree: Tree, blocks: Sequence[bytes]) -> list[tuple[BinLayout, list[NDArray[np.int32]], bytes]]:
    """Do a passive party's part of a tree; return the sums of each block of features."""
    layout, found = BinLayout((N_BINS,) * N_FEATURES), []
    maker.begin_tree(tree.g.size)
    for block in blocks:
        maker.add_gradients(block)
    for nodes in tree.levels:
        n_rows = sum(rows.size for rows in nodes)
        for part in feature_blocks(layout, len(nodes), n_rows):
            some = layout_of(layout, part)
            sums = maker.sum_bins(tree.codes[part], some, nodes, np.arange(part.start, part.stop))
            found.append((some, nodes, sums))
    return found


def _owner(scheme: str, n_rows: int) -> tuple[Any, bytes]:
    if scheme == "elgamal":
        points = elgamal_owner(DigitFormat.of(40, n_rows))
        return points, points.secret_bytes()
    key = generate_paillier_key(3072)
    return gradient_owner(key, pair_format(n_rows)), secret_key_to_bytes(key)


def _encrypting(
    owner: Any, workers: DaskWorkers | None, secret: bytes, tree: Tree, cuts: Sequence[slice]
) -> Callable[[], None]:
    half = owner if workers is None else ShardedOwner(owner, workers, "auto", secret)

    def step() -> None:
        half.begin_tree(tree.g, tree.h)
        for cut in cuts:
            half.encrypt(tree.g[cut], tree.h[cut])

    return step


def _blinding(workers: DaskWorkers | None, n_ids: int) -> Callable[[], None]:
    items = [number.to_bytes(32, "little") for number in range(n_ids)]
    points = BlindingKey(b"bench").blind_items(items)  # of the other party
    own = BlindingKey(b"bench")
    if workers is not None:
        begin(workers, PART, [own.for_workers()] * len(workers))
    key = own if workers is None else SpreadKey(own, workers)

    def step() -> None:
        for start in range(0, n_ids, BLOCK):
            key.blind_items(items[start : start + BLOCK])
            key.blind(points[start : start + BLOCK])
        for start in range(0, n_ids // 2, BLOCK):
            key.unblind(points[start : min(start + BLOCK, n_ids // 2)])

    return step


def _summing(owner: Any, workers: DaskWorkers | None, tree: Tree, blocks: Sequence[bytes]) -> Callable[[], None]:
    setup, n_rows = owner.setup, tree.g.size
    maker = histogram_maker(setup, n_rows, workers)
    maker.hold(tree.codes)

    def step() -> None:
        add_up(maker, tree, blocks)

    return step


def _opening(
    owner: Any,
    workers: DaskWorkers | None,
    secret: bytes,
    tree: Tree,
    sums: Sequence[tuple[BinLayout, list[NDArray[np.int32]], bytes]],
) -> Callable[[], None]:
    totals = {id(nodes): [NodeTotal.of_rows(tree.g[rows], tree.h[rows]) for rows in nodes] for nodes in tree.levels}
    half = owner if workers is None else ShardedOwner(owner, workers, "auto", secret)

    def step() -> None:
        for layout, nodes, data in sums:
            half.open_sums(data, layout, totals[id(nodes)])

    return step


def _measure(cluster: LocalDask, n_workers: int, prepare: Callable[[DaskWorkers | None], Callable[[], None]]) -> Cost:
    """Return the cheapest of some repeats."""
    if not n_workers:
        return _repeat(prepare(None), None, ())
    with open_workers(Cluster(cluster.address, n_workers)) as workers:
        return _repeat(prepare(workers), workers, cluster.pids)


def _repeat(step: Callable[[], None], workers: DaskWorkers | None, pids: Sequence[int]) -> Cost:
    step()  # tables are made at the first use
    costs = []
    for _ in range(REPEATS):
        before = [_core_s(pid) for pid in pids]
        sent = _bytes_of(workers)
        started, own = time.perf_counter(), time.process_time()
        step()
        wall, party = time.perf_counter() - started, time.process_time() - own
        busiest = max((_core_s(pid) - then for pid, then in zip(pids, before, strict=True)), default=0.0)
        costs.append(
            Cost(wall, party, busiest, *(now - then for now, then in zip(_bytes_of(workers), sent, strict=True)))
        )
    return min(costs, key=lambda cost: cost.path_core_s)


def _bytes_of(workers: DaskWorkers | None) -> tuple[int, int, int]:
    work = workers.work if workers else ()
    return (
        sum(one.bytes_to for one in work),
        sum(one.bytes_from for one in work),
        sum(one.bytes_to_others for one in work),
    )


def _core_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _of(costs: dict[int, Cost]) -> dict[str, Any]:
    named = {f"workers_{n}" if n else "in_process": cost.figures() for n, cost in costs.items()}
    return {
        **named,
        "speed_up_2": round(costs[1].path_core_s / costs[2].path_core_s, 2),
        "overhead_1": round(costs[1].path_core_s / costs[0].path_core_s - 1, 3),
    }


def _path_of(n: int, steps: Sequence[dict[int, Cost]]) -> float:
    """Return a tree's path for ``n`` workers at each party.

    What a worker takes is one part that is divided by n, and one that is not, as one worker and two have shown; each
    worker more costs the party's process what the second did. Two have sent one another half of their sums each.
    """
    total = 0.0
    for costs in steps:
        one, two = costs[1], costs[2]
        fixed = min(max(2 * two.worker_core_s - one.worker_core_s, 0.0), one.worker_core_s)
        party = one.party_core_s + max(two.party_core_s - one.party_core_s, 0.0) * (n - 1)
        between = two.bytes_between * (n - 1) / n  # from each worker
        line = (one.bytes_to + one.bytes_from + between) / LINE_BYTES_PER_S
        total += fixed + (one.worker_core_s - fixed) / n + party + line
    return total


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
