"""What the curve's backends do in a second of one core: ``python -m tests.bench.bench_curve``.

Times are CPU time with one thread, the best of several runs; the last line is one JSON object. Stages are a tree of the
CreditCard shape under ElGamal with four digits a row (five points), from the operations that they are made of: points
that are encrypted, read, added into bins, hidden again and decrypted. Searching small logarithms is not among them. The
reference is measured at a thousandth of the size, where a stage says nothing: only its operations are shown.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from he_processors.curve import native, registry
from he_processors.curve.interface import BASE_POINT, Curve, Points

ROWS, FEATURES, DEPTH, BINS = 227_845, 18, 5, 256
POINTS_A_ROW = 5
# The root's rows, then the smaller child of every node: half of them at each further level.
ADDED_ROWS = ROWS * FEATURES * (1 + (DEPTH - 1) / 2)
RETURNED_BINS = FEATURES * BINS * (1 + sum(2**level for level in range(DEPTH - 1)))
TARGETS = {"encrypt": 1.3, "receive": 0.6, "add": 1.7, "rerandomise": 0.4, "decrypt": 1.3}
RUNS = 5


def best_seconds(function: Callable[[], object], runs: int) -> float:
    """CPU time of the fastest run: others were disturbed."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def random_scalars(rng: np.random.Generator, n: int, width: int = 32) -> np.ndarray:
    scalars = rng.integers(0, 256, (n, width), dtype=np.uint8)
    if width == 32:
        scalars[:, -1] &= 0x0F
    return scalars


def bin_order(rng: np.random.Generator, n_rows: int, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows in order of node and bin, as one feature of one level has them."""
    cell = rng.integers(0, n_nodes, n_rows) * BINS + rng.integers(0, BINS, n_rows)
    starts = np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=n_nodes * BINS))])
    return np.argsort(cell, kind="stable").astype(np.int32), starts.astype(np.int64)


def measure(curve: Curve, scale: float, runs: int) -> dict[str, float]:
    """Operations a second and core."""
    rng = np.random.default_rng(1)
    rates: dict[str, float] = {}

    def rate(name: str, n: int, function: Callable[[], object]) -> None:
        rates[name] = n / best_seconds(function, runs)

    n = max(64, int(ROWS * scale))
    table = curve.fixed_base(curve.from_affine(np.frombuffer(BASE_POINT, dtype=np.uint8).reshape(1, 64)))
    small_table = curve.fixed_base(curve.from_affine(np.frombuffer(BASE_POINT, dtype=np.uint8).reshape(1, 64)))
    scalars, digits = random_scalars(rng, n), random_scalars(rng, n, 3)
    summed = table.mul(scalars)
    small_table.mul(digits)
    rows = curve.to_affine(summed)
    points: Points = curve.from_affine(rows)
    rate("fixed_base", n, lambda: table.mul(scalars))
    rate("fixed_base_24_bits", n, lambda: small_table.mul(digits))
    rate("to_affine", n, lambda: curve.to_affine(summed))
    rate("from_affine", n, lambda: curve.from_affine(rows))
    rate("add", n, lambda: curve.add(summed, summed))
    rate("double", 8 * n, lambda: curve.double(summed, 8))
    rate("y_words", n, lambda: curve.y_words(summed))
    for name, nodes in (("add_into_bins_of_1_node", 1), ("add_into_bins_of_8_nodes", 8)):
        order, starts = bin_order(rng, n, nodes)
        rate(name, n, lambda order=order, starts=starts: curve.segment_sums(order, starts, n)(points))
    few = max(8, n // 100)
    taken = curve.take(summed, np.arange(few))
    rate("times_4_scalars", few, lambda: curve.mul_by_each(taken, scalars[:4]))
    rate("times_a_scalar_of_its_own", few, lambda: curve.mul(taken, scalars[:few]))
    rate("to_ristretto", few, lambda: curve.to_ristretto(taken))
    encoded = curve.to_ristretto(taken)
    rate("from_ristretto", few, lambda: curve.from_ristretto(encoded))
    uniform = rng.integers(0, 256, (few, 64), dtype=np.uint8)
    rate("from_uniform", few, lambda: curve.from_uniform(uniform))
    return rates


def stages(rates: dict[str, float]) -> dict[str, float]:
    """Core-seconds of a tree."""
    cost = {name: 1 / rate for name, rate in rates.items()}
    points, returned = POINTS_A_ROW * ROWS, POINTS_A_ROW * RETURNED_BINS
    messages = POINTS_A_ROW - 1
    hide = cost["fixed_base"] + cost["add"] + 3 * cost["double"] + cost["to_affine"]
    into_bins = (ADDED_ROWS / 2) * (cost["add_into_bins_of_1_node"] + cost["add_into_bins_of_8_nodes"])
    return {
        "encrypt": points * (cost["fixed_base"] + cost["to_affine"])
        + messages * ROWS * (cost["fixed_base_24_bits"] + cost["add"]),
        "receive": points * cost["from_affine"],
        "add": POINTS_A_ROW * into_bins,
        "rerandomise": returned * hide,
        "decrypt": returned * cost["from_affine"]
        + RETURNED_BINS * (cost["times_4_scalars"] + messages * (cost["add"] + cost["y_words"])),
    }


def main() -> None:
    """Measure every backend that runs here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", default=list(registry.available_backends()))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the CreditCard shape's rows to measure with")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    result: dict[str, object] = {"rows": ROWS, "returned_bins": RETURNED_BINS, "targets": TARGETS}
    for name in options.backends:
        is_slow = name == "reference"
        curve = registry.load_backend(name) if is_slow else native.load(name, threads=1)
        rates = measure(curve, options.scale / 1000 if is_slow else options.scale, 1 if is_slow else options.runs)
        seconds = {} if is_slow else stages(rates)
        print(f"\n{name}: operations a second and core" + "; core-seconds of a tree's stage (target)" * (not is_slow))
        for operation, rate in rates.items():
            print(f"  {operation:28} {rate:14,.0f}")
        for stage, value in seconds.items():
            print(f"  {stage:28} {value:14.2f} ({TARGETS[stage]})")
        result[name] = {
            "operations_per_s": {operation: round(rate) for operation, rate in rates.items()},
            "stages_s": {stage: round(value, 4) for stage, value in seconds.items()},
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
