"""Side by side: our big-number backends, phe, a gmpy2 loop and sf-heu, and one whole CreditCard round.

Every figure is per core of CPU time, on one thread. The last line of the output is one JSON object: for each
key length the four rates of every implementation, the ratios of our fastest CPU backend to each peer,
``round_core_s``, and ``gpu_stage_s_per_tree``, the wall-clock seconds of encryption, histograms, packing and
decryption on a GPU. What is not installed or needs a missing GPU is null.

Run: make bench-he, or python -m tests.bench.bench_he [--quick] [--cases paillier-2048 ...] [--backends ifma ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time

os.environ.setdefault("VEILBOOST_THREADS", "1")  # read when a backend opens: one thread, whose CPU time is a core's

from he_processors.additive_schemes import security_bits
from he_processors.bignum.registry import available_backends
from he_processors.paillier import PaillierPrivateKey, generate_paillier_key
from tests.bench.he_ours import Rates, measure_ours
from tests.bench.he_peers import measure_peers
from tests.bench.he_round import RoundResult, measure_round

CASES = {f"paillier-{bits}": bits for bits in (2048, 3072)}
ROUND_ROWS = 227_845
METRICS = ("encrypt_per_s", "add_per_s", "pack_per_s", "decrypt_per_s")


def main() -> None:
    """Measure, print tables, and print the JSON object last."""
    options = _options()
    print(f"{platform.processor() or platform.machine()}, backends here: {', '.join(available_backends())}")
    results = {name: _measure_case(CASES[name], options) for name in options.cases}
    print(json.dumps(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backends", nargs="+", default=list(available_backends()))
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows in the round")
    return parser.parse_args()


def _measure_case(key_bits: int, options: argparse.Namespace) -> dict[str, object]:
    print(f"\npaillier, {key_bits} bits ({security_bits(key_bits)}-bit strength), per core second")
    key = generate_paillier_key(key_bits)
    ours: dict[str, Rates] = {}
    for backend in options.backends:
        ours[backend] = measure_ours(key, backend)
        _print_rates(backend, ours[backend])
    peers = measure_peers(key)
    for name, rates in peers.items():
        _print_rates(name, rates)
    n_rows = ROUND_ROWS // 10 if options.quick else ROUND_ROWS
    on_cpu = [name for name in options.backends if name != "cuda"]
    return {
        **{name: _rounded(rates) for name, rates in (ours | peers).items()},
        "ratios": {name: _ratios(ours[on_cpu[0]], rates) if on_cpu else None for name, rates in peers.items()},
        "round_core_s": _round_core_s(key, on_cpu[0], n_rows) if on_cpu else None,
        "gpu_stage_s_per_tree": _gpu_stage_s(key, n_rows) if "cuda" in options.backends else None,
    }


def _round_core_s(key: PaillierPrivateKey, backend: str, n_rows: int) -> float:
    result = measure_round(key, backend, n_rows)
    _print_round(backend, result)
    return round(result.total_s, 2)


def _gpu_stage_s(key: PaillierPrivateKey, n_rows: int) -> float:
    result = measure_round(key, "cuda", n_rows, time.perf_counter)
    _print_round("cuda (wall clock)", result)
    return round(result.arithmetic_s, 3)


def _ratios(ours: Rates, peer: Rates | None) -> dict[str, float] | None:
    if peer is None:
        return None
    return {metric: round(ours[metric] / peer[metric], 1) for metric in METRICS if metric in peer}


def _rounded(rates: Rates | None) -> dict[str, float] | None:
    return None if rates is None else {metric: float(f"{rate:.4g}") for metric, rate in rates.items()}


def _print_rates(name: str, rates: Rates | None) -> None:
    if rates is None:
        print(f"  {name:<12} absent")
        return
    columns = [f"{metric} {rates[metric]:>12,.0f}" if metric in rates else f"{metric} {'-':>12}" for metric in METRICS]
    print(f"  {name:<12} " + "  ".join(columns), flush=True)


def _print_round(backend: str, result: RoundResult) -> None:
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in result.stage_s.items())
    print(f"  round on {backend}: {result.total_s:.2f} s ({stages})")
    sizes = f"{result.uploaded_bytes / 1e6:.1f} MB up, {result.returned_bytes / 1e6:.2f} MB back"
    print(f"  {result.n_products:,} ciphertext products, {sizes}", flush=True)


if __name__ == "__main__":
    main()
