"""Alignment of two parties' ids, sizes of both sets varied: ``python -m tests.bench.bench_alignment``.

Both parties run in this process with one thread each, with real sessions and sealed messages; figures are the CPU
seconds of the party that took longer, and of both. Half of the smaller set is common. Where openmined-psi is installed,
the same blindings by its P-256 stand beside. The last line is one JSON object.

Reference: SecureBoost (Cheng et al., 2021), table 1, varies the sizes in the same way.
"""

from __future__ import annotations

import argparse
import hmac
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VEILBOOST_THREADS", "1")  # a thread's CPU time is its party's

from he_processors.curve.equal_logarithms import PROOF_BYTES
from he_processors.curve.registry import open_curve
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.kinds.alignment.intersection import (
    BlindingKey,
    Lists,
    Proofs,
    block_bytes,
    intersect,
    unpack_chain,
)
from tests.support import alignment

SIZES = (1_000, 10_000, 100_000)
alignment.TIMEOUT_S = 3_600.0


def id_sets(n_a: int, n_b: int) -> tuple[list[bytes], list[bytes]]:
    """Return ids of which half of the smaller set is common."""
    first = n_a - min(n_a, n_b) // 2
    return [b"id-%d" % i for i in range(n_a)], [b"id-%d" % i for i in range(first, first + n_b)]


def align_s(n_a: int, n_b: int) -> list[float]:
    """Return the CPU seconds of each party."""
    sets = id_sets(n_a, n_b)
    least = min(n_a, n_b) // 2

    def take_part(channel: Any, session: Any, policy: Any) -> tuple[int, float]:
        start = time.thread_time()
        key = session.hmac("alignment items", b"bench")
        items = [hmac.digest(key, one, "sha256") for one in sets[channel.rank]]
        lists = Lists(channel, session, "bench", max(n_a, n_b))
        found = intersect(lists, items, (n_a, n_b), least, session.hmac("alignment domain", b"bench"))
        return len(found), time.thread_time() - start

    with tempfile.TemporaryDirectory() as folder:
        outcomes = alignment.run_parties(Path(folder), 2, take_part)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        if outcome[0] != least:
            raise AssertionError("another number of common ids than there are")
    return [outcome[1] for outcome in outcomes]


def proofs_ratio(n_parties: int, n: int, n_common: int) -> float:
    """Return the CPU time of one party's points with proofs over that without; both taken in turn."""
    keys = [BlindingKey(b"bench") for _ in range(n_parties)]
    committed = tuple(key.commitment() for key in keys)
    of = [Proofs(b"bench", committed, rank, key, OS_RANDOMNESS) for rank, key in enumerate(keys)]
    items = [b"%032d" % number for number in range(n)]

    def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        start = time.thread_time()
        return call(*args), time.thread_time() - start

    own, once = timed(keys[0].blind_items, items)
    points, again = timed(keys[0].blind, own)
    common, decoding_s = timed(keys[0].decoded, points[:n_common])
    without = once + (n_parties - 1) * again
    proven = without + decoding_s
    held, chain = common, b""
    for step in range(1, n_parties):
        first = -step % n_parties
        proven += timed(of[0].extend, chain, (first + 1) % n_parties, 0, held, n)[1]
        without += timed(keys[0].unblind, list(held))[1]
        block, chain = list(common), b""
        for rank in (place % n_parties for place in range(first, first + step)):
            chain = of[rank].extend(chain, first, 0, block, n)
            block = unpack_chain(chain, n, len(chain) // (block_bytes(n) + PROOF_BYTES))[-1][0]
        held, checking_s = timed(of[0].check, chain, first, 0, common, n, step)
        proven += checking_s
    return proven / without


def openmined_s(n: int) -> float | None:
    """CPU seconds of hashing and blinding ``n`` ids, blinding as many and unblinding half, if it is installed."""
    try:
        import private_set_intersection.python as psi
    except ImportError:
        return None
    items = [f"{i:064x}" for i in range(n)]
    client, server = psi.client.CreateWithNewKey(True), psi.server.CreateWithNewKey(True)
    start = time.process_time()
    request = client.CreateRequest(items)
    answer = server.ProcessRequest(request)
    half = list(answer.encrypted_elements)[: n // 2]
    server.ProcessRequest(psi.Request(reveal_intersection=True, encrypted_elements=half))
    return time.process_time() - start


def main() -> None:
    """Measure all pairs of sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--proofs", type=int, help="ids of each party; only what proofs on the way back cost")
    options = parser.parse_args()
    if options.proofs:
        quotients: dict[str, float] = {}
        for n_parties, parts in itertools.product((2, 3, 4, 5), (2, 1)):
            ratios = [proofs_ratio(n_parties, options.proofs, options.proofs // parts) for _ in range(5)]
            name = f"{n_parties} parties, 1 id of {parts} common"
            print(f"{name}: x {sorted(ratios)[2]:.2f} of 5, {sorted(ratios)}")
            quotients[name] = round(sorted(ratios)[2], 3)
        print(json.dumps({"ids": options.proofs, "with_proofs_over_without": quotients}))
        return
    rows: list[dict[str, float]] = []
    print(
        f"curve: {open_curve().name}\n{'ids of A':>10} {'ids of B':>10} {'slower party':>13} {'both':>9}   CPU seconds"
    )
    for n_a in options.sizes:
        for n_b in options.sizes:
            seconds = align_s(n_a, n_b)
            rows.append({"a": n_a, "b": n_b, "party_s": round(max(seconds), 3), "both_s": round(sum(seconds), 3)})
            print(f"{n_a:10,} {n_b:10,} {max(seconds):13.2f} {sum(seconds):9.2f}", flush=True)
    largest = max(options.sizes)
    other = openmined_s(largest)
    if other is not None:
        print(f"openmined-psi, the blindings of one party with {largest:,} ids: {other:.2f}")
    print(json.dumps({"curve": open_curve().name, "alignments": rows, "openmined_party_s": other}))


if __name__ == "__main__":
    main()
