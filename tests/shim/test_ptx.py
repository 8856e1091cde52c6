"""What NVIDIA's compiler emits for the kernels, run without a GPU: tests of kernels, the contract, planted faults."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from he_processors.bignum import registry
from he_processors.bignum.cuda import CudaBatch
from he_processors.cuda.device import KERNELS, Shape
from tests.conformance import test_bignum_backends as contract
from tests.conformance.test_bignum_backends import *  # noqa: F403  (collects the contract's tests here)
from tests.shim import ptx_device, test_kernels
from tests.shim.ptx_device import PtxDevice, PtxError, compiled, has_emulation, kernels_of, run, translate
from tests.shim.test_kernels import *  # noqa: F403  (collects the kernels' tests here)
from tests.shim.test_kernels import ALL_SHAPES, Numbers, moduli, to_ints, to_words

pytestmark = pytest.mark.skipif(not has_emulation(), reason="the compiler (NVRTC) or gcc is missing")

QUICK = Shape(64, 16)
_SETUPS = {"ptx-wide": PtxDevice(multiprocessors=1 << 20), "ptx-narrow": PtxDevice(multiprocessors=1)}
_SLOW = [pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def emitted_code() -> None:
    """Run kernels as they are emitted, alone and below the backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_kernels, "run_kernel", ptx_device.run_kernel)
        for name, device in _SETUPS.items():
            patch.setitem(registry._LOADERS, name, partial(partial, CudaBatch, devices=(device,)))
        patch.setattr("he_processors.bignum.cuda._MIN_ROWS_TO_SPREAD", 4)
        yield


@pytest.fixture(
    params=[
        pytest.param((shape, name), marks=[] if (shape, name) == (QUICK, "R - 1") else _SLOW, id=f"{shape} {name}")
        for shape in ALL_SHAPES
        for name in moduli(QUICK)
    ]
)
def numbers(request: pytest.FixtureRequest) -> Numbers:
    shape, name = request.param
    return Numbers(shape, moduli(shape)[name])


_CASES = [pytest.param((setup, modulus), marks=_SLOW) for setup in _SETUPS for modulus in contract.MODULI]


@pytest.fixture(params=[pytest.param(name, marks=_SLOW) for name in _SETUPS])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=_CASES, ids="-".join)
def arithmetic(request: pytest.FixtureRequest) -> CudaBatch:
    return contract._open(*request.param)


raising = arithmetic


def product_of(ptx: str, a: list[int], b: list[int], numbers: Numbers) -> list[int]:
    """Return what ``k_mul`` of a module makes of two lists of numbers."""
    out = to_words([0] * len(a), numbers.shape)
    rows = (to_words(a, numbers.shape), to_words(b, numbers.shape))
    count = np.uint64(len(a))
    run(
        translate(ptx)["k_mul"],
        -(-len(a) * numbers.shape.lanes // 128),
        (out, *rows, np.uint64(1), count, *numbers.tail),
    )
    return to_ints(out)


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s == QUICK else _SLOW, id=str(s)) for s in ALL_SHAPES])
def test_every_shape_is_emitted_in_known_instructions(shape: Shape) -> None:
    assert set(kernels_of(shape)) == set(KERNELS)


@pytest.mark.parametrize(
    ("right", "wrong", "which"),
    [
        ("addc.cc.u32", "add.cc.u32", 0),
        ("madc.hi.cc.u32", "madc.lo.cc.u32", 3),
        ("madc.lo.cc.u32", "mad.lo.cc.u32", 5),
        ("addc.u32", "add.s32", 1),
        ("setp.ne.s32", "setp.eq.s32", 0),
    ],
)
def test_a_wrong_instruction_is_found(right: str, wrong: str, which: int) -> None:
    numbers = Numbers(QUICK, moduli(QUICK)["R - 1"])
    values = numbers.operands()
    a, b = values, values[::-1]
    ptx = compiled(QUICK)
    assert test_kernels.is_product(numbers, product_of(ptx, a, b, numbers)[0], a[0], b[0])
    start = ptx.index("k_mul(")
    for _ in range(which + 1):
        start = ptx.index(f"{right} ", start + 1)
    planted = ptx[:start] + wrong + ptx[start + len(right) :]
    results = product_of(planted, a, b, numbers)
    assert not all(test_kernels.is_product(numbers, *three) for three in zip(results, a, b, strict=True))


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(PtxError, match=r"add\.f32"):
        translate(compiled(QUICK).replace("sub.s32", "add.f32", 1))


def test_memory_beyond_what_was_given_is_refused() -> None:
    numbers = Numbers(QUICK, moduli(QUICK)["three"])
    rows, room = to_words([1, 2, 3, 4], QUICK), to_words([0] * 12, QUICK)
    with pytest.raises(PtxError, match="outside the memory"):
        ptx_device.run_kernel(QUICK, "k_mul", 4, (room[4:7], rows, rows, np.uint64(1), np.uint64(4), *numbers.tail))


def test_an_exchange_that_some_lanes_miss_is_refused() -> None:
    """The control: half of the lanes jump over the first exchange between lanes."""
    ptx = compiled(QUICK)
    at = ptx.index("shfl.sync", ptx.index("k_mul("))
    planted = ptx[:at] + "setp.lt.u32 %p9001, %tid.x, 16;\n@%p9001 bra $MISSED;\n" + ptx[at:]
    end = planted.index("\n", planted.index("shfl.sync", at))
    numbers = Numbers(QUICK, moduli(QUICK)["three"])
    with pytest.raises(PtxError, match="some are elsewhere"):
        product_of(planted[:end] + "\n$MISSED:" + planted[end:], [1, 2], [1, 2], numbers)
