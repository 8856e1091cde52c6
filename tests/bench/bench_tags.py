"""What tags add to masks: CPU milliseconds of one site's thread for the sums of a round.

Three lanes in one process take turns round by round: plain sums, masks without tags, masks with tags. Each does what a
site of three does with the histograms of one round on the shape of CreditCard (28 features, 256 bins, depth 5): round
to the grid, protect, open, check, back to real numbers. The other sites and the server are in the same process, and
their time is not counted. Between messages the caches are emptied, as XGBoost empties them; ``--warm`` leaves them.
The last line of the output is one JSON object:

    plain_ms, untagged_ms, masks_ms   medians over rounds
    masks_over_untagged               what masks with tags add to plain over what masks without them add (target 1.3)

Run: python -m tests.bench.bench_tags [--rounds 200] [--warm]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from he_processors.field61 import MODULUS
from he_processors.masks import PairwiseMasks
from he_processors.sum_tags import SumTags
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.profiles import MaskedSums, PlainSums
from nvflare_plugins.wire.sums import Family, ProtectedSums

WORLD = 3
LANES = ("plain", "untagged", "masks")
NODE = 2 * 28 * 256  # gradient pairs of a node's bins
MESSAGES = (NODE, NODE, 2 * NODE, 4 * NODE, 8 * NODE)
CACHE_BYTES = 64 << 20  # more than the last cache holds
TARGET = 1.3


class _Contributed(Exception):
    """Carries a site's payload past the answer that it would wait for."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload


class _Channel:
    """The channel of one site: it hands over what the site sends, or adds what the others send."""

    world, moment = WORLD, "update:0"

    def __init__(self) -> None:
        self.counter = self.uncounted_ns = 0
        self.others: list[tuple[ProtectedSums, _Channel]] = []
        self.values: Sequence[NDArray[np.float64]] = ()

    def sum(self, kind: Kind, codec: object, payload: bytes, n_values: int, tail: int = 0) -> bytes:
        """Return the sum of this payload and the others', as the server does."""
        began, payload = time.thread_time_ns(), bytes(payload)
        if not self.others:
            raise _Contributed(payload)
        total = np.frombuffer(payload, dtype="<u8").copy()
        for (sums, channel), values in zip(self.others, self.values, strict=True):
            channel.counter = self.counter
            try:
                sums.sum(kind, values)
            except _Contributed as sent:
                total += np.frombuffer(sent.payload, dtype="<u8")
        total[n_values:] %= np.uint64(MODULUS)
        reply = total.tobytes()
        self.counter += 1
        self.uncounted_ns += time.thread_time_ns() - began
        return reply


def _lane(name: str) -> tuple[ProtectedSums, _Channel]:
    """Return the measured site of a lane, which knows the others."""
    sites = []
    for rank in range(WORLD):
        secrets = {peer: bytes([min(rank, peer), max(rank, peer)]) * 16 for peer in range(WORLD) if peer != rank}
        keys = (b"s" * 32, rank, secrets, b"g" * 32)
        channel = _Channel()
        processor = PlainSums() if name == "plain" else MaskedSums(PairwiseMasks(*keys))
        sums = ProtectedSums(channel, processor, SumTags(*keys))  # type: ignore[arg-type]
        sums._is_tagged = name == "masks"
        sums.take_scales({Family.GRADIENTS: 1, Family.HESSIANS: 0})
        sites.append((sums, channel))
    sites[1][1].others = [sites[0], sites[2]]  # rank 0 also blinds the sum, the others do not
    return sites[1]


def measure(rounds: int, is_warm: bool) -> dict[str, float]:
    """Return medians of CPU milliseconds of a round by lane."""
    random, trash = np.random.default_rng(0), np.zeros(CACHE_BYTES // 8)
    values = {n: [random.normal(0, 0.1, n) for _ in range(WORLD)] for n in set(MESSAGES)}
    lanes = {name: _lane(name) for name in LANES}
    found: dict[str, list[float]] = {name: [] for name in LANES}
    for number in range(rounds + 3):
        shift = number % len(LANES)  # no lane always follows the same one
        for name in LANES[shift:] + LANES[:shift]:
            sums, channel = lanes[name]
            spent = 0
            for n in MESSAGES:
                own, *channel.values = values[n]
                channel.uncounted_ns = 0
                trash += 0 if is_warm else 1
                began = time.thread_time_ns()
                sums.sum(Kind.HISTOGRAM, own)
                spent += time.thread_time_ns() - began - channel.uncounted_ns
            found[name].append(spent / 1e6)
    return {name: median(of[3:]) for name, of in found.items()}


def main() -> None:
    """Measure, and print the JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warm", action="store_true", help="leave what the caches hold")
    options = parser.parse_args()
    ms = measure(options.rounds, options.warm)
    quotient = (ms["masks"] - ms["plain"]) / (ms["untagged"] - ms["plain"])
    sys.stderr.write(f"masks_over_untagged = {quotient:.2f} (target {TARGET})\n")
    print(json.dumps({**{f"{name}_ms": round(of, 3) for name, of in ms.items()}, "masks_over_untagged": quotient}))


if __name__ == "__main__":
    main()
