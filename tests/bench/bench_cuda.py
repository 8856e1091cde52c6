"""What the CUDA backend does on this machine's GPUs: ``python -m tests.bench.bench_cuda``.

Every figure comes with a check of the values against Python integers (or gmpy2's) on the same run. Times are wall clock
with the devices drained before and after, medians of several runs, and include the host's planning and the launches.
The last line is one JSON object. Without a GPU it says so and measures nothing; ``--emulate`` runs the same code at toy
size on the emulated device of tests/shim, to check this program itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import gmpy2
import numpy as np
from numpy.typing import NDArray

from he_processors.bignum import cuda
from he_processors.bignum.cuda import CudaBatch, CudaResidues
from he_processors.bignum.interface import ints_from_rows
from he_processors.cuda.arithmetic import DeviceArithmetic
from he_processors.cuda.device import Device, Shape, ShapePair, read_source
from he_processors.curve.cuda import CudaCurve
from he_processors.curve.interface import base_point
from he_processors.errors import BackendUnavailable
from tests.bench.bench_curve import bin_order, random_scalars
from tests.bench.cuda_stages import PaillierOnDevice, key_of, level_orders, segment_product

PRODUCT_BITS = (2048, 3072, 4096, 6144)
SWEPT_SHAPES = ((64, 4), (64, 8), (96, 4), (96, 8), (128, 4), (128, 8), (128, 16), (192, 8), (192, 16), (256, 16))
CREDIT_CARD = (227_845, 18)
HIGGS = (4_000_000, 18)
N_BINS = 256
DEPTH = 5
N_ENCRYPTED = 4_000_000
# What the project asks for on an H200: name, the figure, whether more is better.
TARGETS = (
    ("products_per_s_4096", 150e6, True),
    ("fraction_of_limit_4096", 0.6, True),
    ("credit_card_histograms_s_2048", 0.1, False),
    ("higgs_histograms_s_2048", 1.5, False),
    ("encryption_of_4m_s_2048", 1.5, False),
    ("gpu_stage_s_per_tree_2048", 0.5, False),
)

# Two interleaved carry chains of 8 wide multiply-adds each, as the product's inner loop has them.
_LIMIT_KERNEL = """
KERNEL k_limit(u32* out, u32 rounds) {
    u32 even[16], odd[16], factor = threadIdx.x | 1;
#pragma unroll
    for (u32 k = 0; k < 16; ++k) even[k] = odd[k] = k;
#pragma unroll 1
    for (u32 round = 0; round < rounds; ++round) {
#pragma unroll
        for (u32 again = 0; again < 8; ++again) {
            even[0] = mad_lo_cc(factor, factor, even[0]);
            even[1] = madc_hi_cc(factor, factor, even[1]);
#pragma unroll
            for (u32 k = 2; k < 16; k += 2) {
                even[k] = madc_lo_cc(factor + k, factor, even[k]);
                even[k + 1] = madc_hi_cc(factor + k, factor, even[k + 1]);
            }
            odd[0] = mad_lo_cc(factor, factor, odd[0]);
            odd[1] = madc_hi_cc(factor, factor, odd[1]);
#pragma unroll
            for (u32 k = 2; k < 16; k += 2) {
                odd[k] = madc_lo_cc(factor + k, factor, odd[k]);
                odd[k + 1] = madc_hi_cc(factor + k, factor, odd[k + 1]);
            }
        }
    }
    u32 sum = 0;
#pragma unroll
    for (u32 k = 0; k < 16; ++k) sum += even[k] ^ odd[k];
    out[thread_index()] = sum;
}
"""
_LIMIT_PER_ROUND = 8 * 16


def limit_source() -> str:
    """Return the source of the kernel that measures the multiplier."""
    return read_source("warp.cuh") + _LIMIT_KERNEL


@dataclass
class Bench:
    """One run: devices, sizes and the figures found so far."""

    devices: tuple[Device, ...]
    scale: float
    repeats: int
    is_emulated: bool
    figures: dict[str, float] = field(default_factory=dict)

    def rows(self, full: int) -> int:
        """Return a number of rows at this run's scale."""
        return max(24, int(full * self.scale))

    def note(self, name: str, value: float) -> None:
        """Keep a figure and print it."""
        self.figures[name] = value
        print(f"{name:44s} {value:.4g}", flush=True)

    def drain(self) -> None:
        """Wait for all queued work."""
        for device in self.devices:
            device.download(device.upload(np.zeros(1, dtype=np.uint32)))

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of a piece of work, after one run to warm up."""
        times = []
        for _ in range(self.repeats + 1):
            self.drain()
            start = time.perf_counter()
            work()
            self.drain()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def random_modulus(bits: int) -> int:
    """Return an odd modulus whose highest byte is 255."""
    return int.from_bytes(np.random.default_rng(bits).bytes(bits // 8), "little") | 1 | 255 << (bits - 8)


def random_rows(n: int, bits: int, seed: int) -> NDArray[np.uint8]:
    """Return rows below ``random_modulus(bits)``. Shapes: result: uint8[n, bits / 8]."""
    rows = np.random.default_rng(seed).integers(0, 1 << 64, (n, bits // 64), dtype=np.uint64).view(np.uint8)
    rows[:, -1] %= 255
    return rows


def check(is_right: bool, what: str) -> None:
    """Stop the benchmark on a wrong value: its times would mean nothing."""
    if not is_right:
        sys.exit(f"wrong values: {what}")


def measure_limit(bench: Bench) -> float:
    """Return the wide multiply-adds per second that the first device reaches when it does nothing else."""
    cupy = bench.devices[0].xp
    with bench.devices[0].active():
        module = cupy.RawModule(code=limit_source(), options=Shape(64, 4).options, backend="nvrtc")
        kernel = module.get_function("k_limit")
        best = 0.0
        for blocks_each in (2, 4, 8, 16):  # of 4 warps on a multiprocessor
            blocks = bench.devices[0].multiprocessors * blocks_each
            out = cupy.empty(blocks * 128, dtype=np.uint32)
            rounds = 20_000 // blocks_each
            elapsed = bench.seconds(partial(kernel, (blocks,), (128,), (out, np.uint32(rounds))))
            best = max(best, blocks * 128 * rounds * _LIMIT_PER_ROUND / elapsed)
    bench.note("wide_multiply_adds_per_s", best)
    return best


def measure_products(bench: Bench, bits: int, limit: float | None) -> None:
    """Products of a large batch: row by row, and in segments of a random row order."""
    modulus = random_modulus(bits)
    batch = CudaBatch(modulus, devices=bench.devices[:1])
    n = bench.rows((1 << 30) // (bits // 8))
    rows = random_rows(n, bits, 1)
    residues = batch.from_wire(rows)
    elapsed = bench.seconds(lambda: batch.mul(residues, residues))
    bench.note(f"row_products_per_s_{bits}", n / elapsed)
    sample = np.linspace(0, n - 1, 200).astype(np.int64)
    squares = ints_from_rows(batch.to_wire(batch.take(batch.mul(residues, residues), sample)))
    check(squares == [value * value % modulus for value in ints_from_rows(rows[sample])], f"products at {bits} bits")

    order = np.random.default_rng(2).integers(0, n, 4 * n).astype(np.int32)
    starts = np.arange(0, 4 * n + 1, min(500, n), dtype=np.int64)
    elapsed = bench.seconds(lambda: batch.segprod(residues, order, starts))
    rate = (int(starts[-1]) - len(starts) + 1) / elapsed
    bench.note(f"products_per_s_{bits}", rate)
    if limit is not None:
        bench.note(f"fraction_of_limit_{bits}", rate * 2 * (bits // 32) ** 2 / limit)
    products = ints_from_rows(batch.to_wire(batch.segprod(residues, order, starts)))
    for segment in (0, len(products) - 1):
        check(products[segment] == segment_product(rows, order, starts, segment, modulus), f"segments at {bits} bits")


def sweep_lanes(bench: Bench, limit: float | None) -> None:
    """Products in segments on every sensible number of lanes, to choose the shapes in source.py by."""
    for limbs, lanes in SWEPT_SHAPES:
        bits, n = 32 * limbs, bench.rows(1 << 19)
        modulus, rows = random_modulus(bits), random_rows(n, bits, 1)
        shape = Shape(limbs, lanes)
        unit = DeviceArithmetic(bench.devices[0], modulus, ShapePair(shape, shape))
        order = np.random.default_rng(2).integers(0, n, 8 * n).astype(np.int32)
        starts = np.arange(0, 8 * n + 1, min(500, n), dtype=np.int64)
        with bench.devices[0].active():
            entered, positions = unit.enter(unit.upload(rows)), bench.devices[0].upload(order)
            elapsed = bench.seconds(partial(unit.segment_products, entered, positions, starts))
            raw = bench.devices[0].download(unit.leave(unit.segment_products(entered, positions, starts)[:1]))
        product = int.from_bytes(raw.tobytes(), "little")
        check(product == segment_product(rows, order, starts, 0, modulus), f"{limbs} words on {lanes} lanes")
        rate = (int(starts[-1]) - len(starts) + 1) / elapsed
        bench.note(f"products_per_s_{bits}_on_{lanes}_lanes", rate)
        if limit is not None:
            bench.note(f"fraction_of_limit_{bits}_on_{lanes}_lanes", rate * 2 * limbs**2 / limit)


def measure_histograms(bench: Bench, name: str, shape: tuple[int, int], key_bits: int) -> None:
    """Ciphertext histograms of one tree: the root, then the smaller child of every node."""
    bits = 2 * key_bits
    modulus = random_modulus(bits)
    batch = CudaBatch(modulus, devices=bench.devices)
    n, n_features = bench.rows(shape[0]), shape[1]
    rows = random_rows(n, bits, 3)
    entering = time.perf_counter()
    residues = batch.from_wire(rows)
    bench.note(f"{name}_upload_s_{key_bits}", time.perf_counter() - entering)
    levels = level_orders(n, n_features, N_BINS, DEPTH, seed=4)
    total = 0.0
    for order, starts in levels:
        total += bench.seconds(partial(batch.segprod, residues, order, starts))
        products = batch.to_wire(batch.segprod(residues, order, starts))
        for segment in np.linspace(0, len(starts) - 2, 5).astype(int):
            expected = segment_product(rows, order, starts, segment, modulus)
            check(ints_from_rows(products[segment : segment + 1]) == [expected], f"{name} at {key_bits} bits")
    bench.note(f"{name}_histograms_s_{key_bits}", total)
    bench.note(f"{name}_additions_per_s_{key_bits}", sum(len(order) for order, _ in levels) / total)


def measure_encryption(bench: Bench, key_bits: int) -> None:
    """Owner encryption of many pairs; exponents are drawn ahead, as the pool of randomisers does."""
    paillier = PaillierOnDevice(key_of(key_bits), bench.devices)
    n = bench.rows(N_ENCRYPTED)
    plaintexts = np.random.default_rng(5).integers(0, 256, (n, 15), dtype=np.uint8)
    exponents = paillier.random_exponents(n, seed=6)
    result: list[CudaResidues] = []

    def encrypt() -> None:
        result.clear()  # before the next run, or two copies are held
        result.append(paillier.encrypt(plaintexts, exponents))

    bench.note(f"encryption_of_4m_s_{key_bits}", bench.seconds(encrypt) * N_ENCRYPTED / n)
    sample = np.linspace(0, n - 1, 50).astype(np.int64)
    batch = paillier.arithmetic
    ciphertexts = ints_from_rows(batch.to_wire(batch.take(result[0], sample)))
    for row, ciphertext in zip(sample, ciphertexts, strict=True):
        check(ciphertext == paillier.expected(plaintexts[row], [part[row] for part in exponents]), "encryption")


def measure_tree(bench: Bench, key_bits: int) -> None:
    """One tree of CreditCard's shape with a real key: encrypt, histograms, pack, decrypt; all sums checked."""
    paillier = PaillierOnDevice(key_of(key_bits), bench.devices)
    n, n_features = bench.rows(CREDIT_CARD[0]), CREDIT_CARD[1]
    values = np.random.default_rng(7).integers(0, 1 << 40, (n, 2), dtype=np.uint64)
    plaintexts = paillier.plaintexts(values)
    exponents = paillier.random_exponents(n, seed=8)
    levels = level_orders(n, n_features, N_BINS if bench.scale == 1 else 8, DEPTH, seed=9)
    totals: dict[str, list[float]] = {}
    for repeat in range(bench.repeats + 1):
        spent, sums = paillier.tree(plaintexts, exponents, levels, bench.drain)
        for stage, elapsed in spent.items() if repeat else ():
            totals.setdefault(stage, []).append(elapsed)
    for (order, starts), decrypted in zip(levels, sums, strict=True):
        check((decrypted == paillier.plain_sums(values, order, starts)).all(), "sums of a tree")
    for stage, times in totals.items():
        bench.note(f"tree_{stage}_s_{key_bits}", statistics.median(times))
    whole = [sum(stages) for stages in zip(*totals.values(), strict=True)]
    bench.note(f"gpu_stage_s_per_tree_{key_bits}", statistics.median(whole))


def measure_curve(bench: Bench) -> None:
    """Points: encryption's multiples of one base, bytes in and out, a level's sums into bins, and decryption's."""
    curve = CudaCurve(bench.devices[0])
    rng, n = np.random.default_rng(10), bench.rows(CREDIT_CARD[0])
    scalars, base = random_scalars(rng, n), base_point(curve)
    table = curve.fixed_base(base)
    summed = table.mul(scalars)
    rows = curve.to_affine(summed)
    read = curve.from_affine(rows)
    sample = np.linspace(0, n - 1, 50).astype(np.int64)
    host = curve.host
    multiples = host.fixed_base(base_point(host)).mul(scalars[sample])
    check(np.array_equal(rows[sample], host.to_affine(multiples)), "multiples of one base")
    bench.note("curve_fixed_base_per_s", n / bench.seconds(lambda: table.mul(scalars)))
    bench.note("curve_from_affine_per_s", n / bench.seconds(lambda: curve.from_affine(rows)))
    bench.note("curve_to_affine_per_s", n / bench.seconds(lambda: curve.to_affine(summed)))
    bench.note("curve_mul_by_each_per_s", n / bench.seconds(lambda: curve.mul_by_each(read, scalars[:1])))
    order, starts = bin_order(rng, n, 8)
    prepared = curve.segment_sums(order, starts, n)
    expected = host.to_affine(host.segment_sums(order, starts, n)(host.from_affine(rows)))
    for form, points in (("read", read), ("made", summed)):
        check(np.array_equal(curve.to_affine(prepared(points)), expected), "sums of points")
        bench.note(f"curve_additions_of_{form}_per_s", n / bench.seconds(partial(prepared, points)))


def run(bench: Bench, key_bits: list[int], product_bits: tuple[int, ...], is_sweep: bool) -> None:
    """Measure everything, cheapest first."""
    limit = None if bench.is_emulated else measure_limit(bench)
    if is_sweep:
        sweep_lanes(bench, limit)
    measure_curve(bench)
    for bits in product_bits:
        measure_products(bench, bits, limit)
    for bits in key_bits:
        measure_histograms(bench, "credit_card", CREDIT_CARD, bits)
        measure_tree(bench, bits)
        measure_histograms(bench, "higgs", HIGGS, bits)
        measure_encryption(bench, bits)


def targets_met(figures: dict[str, float]) -> dict[str, dict[str, float | bool]]:
    """Compare the figures with what the project asks for."""
    compared: dict[str, dict[str, float | bool]] = {}
    for name, target, is_more_better in TARGETS:
        if name in figures:
            is_met = figures[name] >= target if is_more_better else figures[name] <= target
            compared[name] = {"value": figures[name], "target": target, "is_met": is_met}
    return compared


def open_bench(arguments: argparse.Namespace) -> Bench:
    """Open the devices. Raises: BackendUnavailable."""
    if arguments.emulate:
        from tests.shim.shim_device import ShimDevice

        return Bench((ShimDevice(),), arguments.scale or 1e-5, 1, True)
    cuda.load()
    devices = cuda.open_devices()
    return Bench(devices[: arguments.devices], arguments.scale or 1.0, arguments.repeats, False)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--key-bits", type=int, nargs="+", help="Paillier key lengths (2048 3072)")
    parser.add_argument("--devices", type=int, help="use the first so many GPUs (all)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each piece (3)")
    parser.add_argument("--scale", type=float, help="fraction of the rows (1)")
    parser.add_argument("--sweep", action="store_true", help="also compare numbers of lanes for each length")
    parser.add_argument("--emulate", action="store_true", help="check this program on the emulated device")
    arguments = parser.parse_args()
    try:
        bench = open_bench(arguments)
    except BackendUnavailable as error:
        print(f"No CUDA device can be used here, so nothing was measured: {error}.")
        print(json.dumps({"is_available": False, "reason": str(error)}))
        return
    default_keys, product_bits = ([512], (2048, 3072)) if bench.is_emulated else ([2048, 3072], PRODUCT_BITS)
    run(bench, arguments.key_bits or default_keys, product_bits, arguments.sweep)
    report = {
        "is_available": True,
        "is_emulated": bench.is_emulated,
        "n_devices": len(bench.devices),
        "scale": bench.scale,
        "gmpy2": gmpy2.version(),
        "figures": bench.figures,
        "targets": {} if bench.is_emulated or bench.scale != 1 else targets_met(bench.figures),
        "is_checked": True,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
