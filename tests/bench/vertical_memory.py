"""Largest memory of a passive party with a wide table: 20,000 rows, 1,000 features, 256 bins, Paillier-3072, depth 6.

A whole tree of that shape takes a quarter of an hour and more of one core, most of it packing; memory does not grow
with the number of blocks, so some blocks of each level are asked for and the rest is left out. The party's process
starts with numpy, XGBoost and its table; gradients are encrypted in another one.

Run: python -m tests.bench.vertical_memory [--features 1000] [--blocks 3]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time

os.environ.setdefault("VEILBOOST_THREADS", "1")

import numpy as np

from he_processors.paillier import generate_paillier_key
from nvflare_plugins.kinds.vertical.histogram_maker import GRADIENT_BLOCK_ROWS, histogram_maker
from nvflare_plugins.kinds.vertical.key_owner import gradient_owner, pair_format
from nvflare_plugins.kinds.vertical.messages import (
    Bits,
    HistogramRequest,
    MoreGradients,
    MoreSums,
    NodePartition,
    TreeGradients,
    to_bytes,
)
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty


def main() -> None:
    """Measure; the JSON object goes to stdout."""
    options = _options()
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, options.rows, options.features, options.depth, options.blocks)
    process = multiprocessing.get_context("spawn").Process(target=_party, args=arguments)
    process.start()
    theirs.close()  # or nobody would notice that the party has ended
    owner = gradient_owner(generate_paillier_key(options.key_bits), pair_format(options.rows))
    mine.send(owner.setup)
    rng = np.random.default_rng(0)
    g, h = owner.pair_format.encode_pairs(rng.uniform(-1, 1, options.rows), rng.uniform(0, 0.25, options.rows))
    for start in range(0, options.rows, GRADIENT_BLOCK_ROWS):
        block = slice(start, start + GRADIENT_BLOCK_ROWS)
        mine.send(owner.encrypt(g[block], h[block]))
    mine.send(None)
    print(json.dumps({**vars(options), **mine.recv()}))
    process.join()


def _party(pipe, n_rows: int, n_features: int, depth: int, n_blocks: int) -> None:
    features = np.random.default_rng(1).normal(size=(n_rows, n_features)).astype(np.float32)
    maker = histogram_maker(pipe.recv(), n_rows)
    party = PassiveParty([features.T], [f"x{i}" for i in range(n_features)], 256, maker)
    before_mb = _peak_mb()
    every = Bits.of(np.ones(n_features, dtype=bool))
    first = True
    while (gradients := pipe.recv()) is not None:
        party.answer(TreeGradients(0, every, gradients) if first else MoreGradients(0, gradients))
        first = False
    longest, levels_mb, seconds = 0, [], time.process_time()
    request = HistogramRequest(0, ())
    nodes, following = {0: n_rows}, 1
    for _ in range(depth):
        for number in range(n_blocks):
            answer = party.answer(request if number == 0 else MoreSums(0))
            longest = max(longest, len(to_bytes(answer)))
        party._due = None  # the level's other blocks: each lets go of its sums when it has answered
        levels_mb.append(_peak_mb())
        partitions, children = [], {}
        for node, size in nodes.items():
            goes_left = np.arange(size) % 2 == 0
            partitions.append(NodePartition(node, following, following + 1, Bits.of(goes_left)))
            children |= {following: int(goes_left.sum()), following + 1: int((~goes_left).sum())}
            following += 2
        request, nodes = HistogramRequest(0, tuple(partitions)), children
    found = {"before_mb": before_mb, "peak_mb_by_level": levels_mb, "longest_answer_bytes": longest}
    pipe.send({**found, "cpu_s": time.process_time() - seconds})


def _peak_mb() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--features", type=int, default=1_000)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=3, help="of each level")
    parser.add_argument("--key-bits", type=int, default=3072)
    return parser.parse_args()


if __name__ == "__main__":
    main()
