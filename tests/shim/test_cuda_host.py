"""What the CUDA backend does beyond the contract: blocks, devices, failures, erasing, wide integers."""

from __future__ import annotations

import builtins
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from he_processors import backends
from he_processors.bignum import cuda, registry
from he_processors.bignum.cuda import CudaBatch
from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.cuda import device as device_module
from he_processors.cuda.arithmetic import (
    chunk_rows,
    plan_chunks,
    power_program,
    segment_slabs,
    table_segments,
    table_window,
)
from he_processors.cuda.device import Shape
from he_processors.errors import BackendUnavailable
from tests.shim.shim_device import ShimDevice, has_compiler
from tests.support.he_toys import segment_products

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulation needs g++")

MODULUS = random.Random(8).getrandbits(700) | 1
ROW_BYTES = 256


def values_below(n: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(MODULUS) for _ in range(n)]


def enter(batch: CudaBatch, values: list[int]) -> cuda.CudaResidues:
    return batch.from_wire(rows_from_ints(values, batch.width))


def leave(batch: CudaBatch, residues: cuda.CudaResidues) -> list[int]:
    return ints_from_rows(batch.to_wire(residues))


def test_a_large_batch_is_spread_over_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MIN_ROWS_TO_SPREAD", 100)
    devices = tuple(ShimDevice() for _ in range(3))
    batch = CudaBatch(MODULUS, devices=devices)
    n = 102
    rows = np.zeros((n, batch.width), dtype=np.uint8)
    rows[:, 0] = np.arange(n) % 251
    residues = batch.from_wire(rows)
    assert [block.device for block in residues.blocks] == [0, 1, 2]
    assert max(len(block.rows) for block in residues.blocks) <= n // 3 + 1
    assert all(any(kernel == "k_enter" for _, kernel, _ in device.launched) for device in devices)
    wanted = np.array([n - 1, 0, n // 2], dtype=np.int64)
    assert leave(batch, batch.take(residues, wanted)) == (wanted % 251).tolist()


def test_rows_beyond_device_memory_wait_in_host_memory() -> None:
    roomy, full = ShimDevice(block_bytes=4 * ROW_BYTES), ShimDevice(block_bytes=4 * ROW_BYTES, free=0)
    values = values_below(11)
    for device, holder in ((roomy, 0), (full, None)):
        batch = CudaBatch(MODULUS, devices=(device,))
        residues = enter(batch, values)
        assert [(block.start, block.device) for block in residues.blocks] == [(0, holder), (4, holder), (8, holder)]
        order = np.array([10, 0, 5, 5, 3, 9, 1], dtype=np.int32)
        products = batch.segprod(residues, order, np.array([0, 3, 3, 7], dtype=np.int64))
        expected = [values[10] * values[0] * values[5], 1, values[5] * values[3] * values[9] * values[1]]
        assert leave(batch, products) == [product % MODULUS for product in expected]


def test_a_row_order_larger_than_a_slab_is_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MAX_POSITIONS", 4)
    batch = CudaBatch(MODULUS, devices=(ShimDevice(),))
    values = values_below(5)
    starts = np.array([1, 4, 4, 11, 12, 14], dtype=np.int64)
    order = np.random.default_rng(2).integers(0, 5, 15).astype(np.int32)
    products = batch.segprod(enter(batch, values), order, starts)
    assert leave(batch, products) == segment_products(values, order, starts, MODULUS)


def test_small_launches_take_the_wide_shape() -> None:
    for multiprocessors, lanes in ((1 << 20, 16), (1, 4)):
        device = ShimDevice(multiprocessors=multiprocessors)
        batch = CudaBatch(MODULUS, devices=(device,))
        batch.from_wire(np.zeros((64, batch.width), dtype=np.uint8))
        assert {shape.lanes for shape, _, _ in device.launched} == {lanes}


def test_integers_of_any_width_are_reduced() -> None:
    batch = CudaBatch(MODULUS, devices=(ShimDevice(),))
    rng = random.Random(3)
    for width in (1, 87, 88, 256, 257, 512, 700):
        values = [rng.getrandbits(8 * width) for _ in range(3)] + [(1 << (8 * width)) - 1, 0]
        entered = batch.from_wide(rows_from_ints(values, width))
        assert leave(batch, entered) == [value % MODULUS for value in values]


def test_residues_and_power_programs_show_nothing() -> None:
    batch = CudaBatch(MODULUS, devices=(ShimDevice(),))
    residues = enter(batch, [1, 2, 3])
    program = power_program(0x123456789)
    for thing in (residues, residues.blocks[0], program, batch):
        assert len(repr(thing)) < 120
        assert str(MODULUS) not in repr(thing) and "[" not in repr(thing)


def test_a_failing_device_is_an_error_of_its_own() -> None:
    device = ShimDevice()
    batch = CudaBatch(MODULUS, devices=(device,))
    table = batch.fixed_base(3, 40)
    device.is_broken = True
    for work in (
        lambda: batch.from_wire(np.zeros((1, batch.width), np.uint8)),
        lambda: table.pow(np.zeros((1, 5), np.uint8)),
        lambda: CudaBatch(MODULUS, devices=(device,)),
    ):
        with pytest.raises(BackendUnavailable, match="FailingDevice") as caught:
            work()
        assert "planted" not in str(caught.value)


def test_missing_cupy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_cupy(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cupy":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cupy)
    with pytest.raises(BackendUnavailable, match="CuPy"):
        device_module.open_devices()


def test_a_device_that_computes_wrong_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongDevice(ShimDevice):
        def download(self, array: np.ndarray) -> np.ndarray:
            return array ^ 1

    cuda._checked_devices.cache_clear()
    monkeypatch.setattr(cuda, "open_devices", lambda: (ShimDevice(), WrongDevice()))
    with pytest.raises(BackendUnavailable):
        cuda.load()
    cuda._checked_devices.cache_clear()
    monkeypatch.setattr(cuda, "open_devices", lambda: (ShimDevice(),))
    assert cuda.load()(MODULUS).name == "cuda"
    cuda._checked_devices.cache_clear()


class KernelFault(ShimDevice):
    """A device of which one kernel, in one shape, gives a wrong last word where numbers are long."""

    def __init__(self, kernel: str, lanes: int) -> None:
        super().__init__()
        self._fault = kernel, lanes

    def launch(self, shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
        super().launch(shape, kernel, groups, arguments)
        if (kernel, shape.lanes) == self._fault and arguments[0][:, -1].any():
            arguments[0][:, -1] ^= 1


@pytest.fixture
def fresh_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put these devices into the machine."""
    forget = (cuda._checked_devices.cache_clear, cuda._check_length.cache_clear, registry.BACKENDS.forget)
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)

    def insert(*devices: ShimDevice) -> None:
        for cached in forget:
            cached()
        monkeypatch.setattr(cuda, "open_devices", lambda: devices)

    yield insert
    for cached in forget:
        cached()


LONG = (1 << 2047) + 9


@pytest.mark.parametrize(
    ("kernel", "lanes", "operation"),
    [
        ("k_mul", 4, "products"),
        ("k_mul", 16, "products"),
        ("k_segprod", 4, "segprod"),
        ("k_power", 16, "powers"),
        ("k_fixedbase", 16, "powers of one base"),
        ("k_horner", 4, "horner"),
        ("k_leave", 4, "entering"),
    ],
)
def test_a_device_whose_long_numbers_are_wrong_is_left_for_the_cpu(
    fresh_devices: Callable[..., None], caplog: pytest.LogCaptureFixture, kernel: str, lanes: int, operation: str
) -> None:
    """Its small numbers are right: the check of one small product lets it pass."""
    fresh_devices(KernelFault(kernel, lanes))
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        batch = registry.open_backend("auto", LONG)
    assert batch.name != "cuda"
    assert f"cuda passed over: CUDA device 0 computes wrong {operation}" in caplog.text
    with pytest.raises(BackendUnavailable, match=operation):
        registry.open_backend("cuda", LONG)


def test_a_device_that_agrees_is_opened_and_checked_once_per_length(fresh_devices: Callable[..., None]) -> None:
    device = ShimDevice()
    fresh_devices(device)
    assert registry.open_backend("auto", LONG).name == "cuda"
    n_launched = len(device.launched)
    assert registry.open_backend("cuda", LONG + 2).name == "cuda"
    assert len(device.launched) == n_launched, "another modulus of the same length needs no second check"
    registry.open_backend("cuda", LONG >> 64 | 1)
    assert len(device.launched) > n_launched


def test_exponents_are_erased_from_device_memory() -> None:
    device = ShimDevice()
    batch = CudaBatch(MODULUS, devices=(device,))
    exponents = np.random.default_rng(4).integers(1, 256, (6, 8)).astype(np.uint8)
    before = exponents.copy()
    device.uploaded.clear()
    batch.fixed_base(5, 64).pow(exponents)
    held = [array for array in device.uploaded if array.nbytes == exponents.nbytes and array.shape == (6, 2)]
    assert len(held) == 1 and not held[0].any()
    assert (exponents == before).all(), "the caller's exponents were erased"

    residues = enter(batch, values_below(2))
    secret = random.Random(5).getrandbits(90)
    codes = power_program(secret).codes
    device.uploaded.clear()
    batch.pow_const(residues, secret)
    held = [array for array in device.uploaded if array.shape == codes.shape]
    assert len(held) == 1 and not held[0].any()


def test_a_modulus_beyond_the_kernels_is_passed_over() -> None:
    with pytest.raises(BackendUnavailable, match="8200"):
        CudaBatch((1 << 8199) + 1, devices=(ShimDevice(),))


def test_lifting_needs_the_same_devices_and_no_fewer_bits() -> None:
    device = ShimDevice()
    devices = (device,)
    batch, small = CudaBatch(MODULUS, devices=devices), CudaBatch(1009, devices=devices)
    elsewhere = CudaBatch(1009, devices=(ShimDevice(),))
    assert leave(batch, batch.lift(small, enter(small, [5, 1008]))) == [5, 1008]
    with pytest.raises(ValueError):
        batch.lift(elsewhere, enter(elsewhere, [5]))
    with pytest.raises(ValueError):
        small.lift(batch, enter(batch, [5]))


def test_residues_of_another_modulus_are_refused() -> None:
    devices = (ShimDevice(),)
    batch, other = CudaBatch(MODULUS, devices=devices), CudaBatch(MODULUS + 2, devices=devices)
    residues = enter(other, [1])
    for work in (
        lambda: batch.to_wire(residues),
        lambda: batch.mul(residues, residues),
        lambda: batch.pow_const(residues, 2),
        lambda: batch.concat([residues]),
    ):
        with pytest.raises(ValueError, match="another modulus"):
            work()


def test_chunks_cover_every_segment_once() -> None:
    rng = np.random.default_rng(6)
    lengths = np.concatenate([rng.integers(0, 2000, 30), [0, 1, 4, 5, 0]])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for rows in (4, 7, 512):
        plan = plan_chunks(starts, rows)
        assert plan.length.max() <= rows and (np.diff(plan.length) <= 0).all()
        in_order = np.argsort(plan.target)
        begin, length = plan.begin[in_order], plan.length[in_order]
        for segment in range(len(lengths)):
            own = slice(plan.starts[segment], plan.starts[segment + 1])
            positions = [np.arange(b, b + n) for b, n in zip(begin[own], length[own], strict=True)]
            assert len(positions) >= 1
            assert (np.concatenate(positions) == np.arange(starts[segment], starts[segment + 1])).all()
    assert chunk_rows(0, 100) == 4 and chunk_rows(10**9, 100) == 512


def test_slabs_cover_every_segment_once() -> None:
    starts = np.array([0, 5, 5, 9, 30, 30, 31, 33], dtype=np.int64)
    slabs = list(segment_slabs(starts, 10))
    assert slabs[0][0] == 0 and slabs[-1][1] == 7
    assert all(left[1] == right[0] for left, right in itertools.pairwise(slabs))
    assert all(starts[b] - starts[a] <= 10 or b == a + 1 for a, b in slabs)


def test_power_programs_compute_the_power() -> None:
    for exponent in [*range(1, 70), (1 << 200) - 1, 1 << 200, random.Random(7).getrandbits(300)]:
        program = power_program(exponent)
        power, saved = 1, [0] * program.slots  # exponents instead of residues
        for code in program.codes.tolist():
            kind, slot = code >> 16, code & 0xFFFF
            if kind == 0:
                power *= 2
            elif kind == 1:
                power += saved[slot]
            elif kind == 2:
                saved[slot] = power
            else:
                power = saved[slot]
        assert power == exponent


def test_table_plan_multiplies_the_powers_of_each_digit() -> None:
    order, starts = table_segments(3, 2)
    sums = [sum(1 << j for j in order[a:b]) for a, b in itertools.pairwise(starts)]
    assert sums == [d << (3 * i) for i in range(2) for d in range(8)]
    assert table_window(1024, 10**6, 256, 40 << 20) == 10
    window = table_window(3072, 10**9, 768, 40 << 20)
    assert (-(-3072 // window) << window) * 768 <= 40 << 20
    assert table_window(64, 1, 256, 40 << 20) <= 2
