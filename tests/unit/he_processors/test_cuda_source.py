"""The CUDA source compiled as a GPU would get it, without a GPU: NVRTC from PyPI, resources read from the machine code.

Asserted for every kernel, shape and architecture: it compiles, takes no stack and no local memory (so nothing is
spilled), stays within the registers that leave enough warps, and multiplies by exactly 2 * LIMBS^2 / TPI^2 wide
multiply-adds a lane and pass. What a GPU makes of it in time or in values is not asserted here: the values are held by
tests/shim on the same source, and by tests/gpu where there is a device.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from he_processors.cuda.device import (
    CURVE,
    CURVE_KERNELS,
    KERNELS,
    SHAPES,
    Shape,
    kernel_source,
    read_source,
    shapes_for,
)
from tests.support import nvrtc

needs_tools = pytest.mark.skipif(not nvrtc.has_tools(), reason="NVRTC and cuobjdump are not installed")

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
# Kernels whose factors are arbitrary: the compiler cannot drop a product.
FULL_PRODUCTS = ("k_mul", "k_enter", "k_segprod", "k_fixedbase", "k_power", "k_horner")
ADDRESS_PRODUCTS = 16  # wide multiply-adds outside the product: addresses of rows


def register_ceiling(shape: Shape, architecture: str) -> int:
    """Return the registers that leave 16 warps on a multiprocessor, or 12 (8 on sm_100) for the longest lanes."""
    if shape.limbs // shape.lanes <= 16:
        return 128
    return 192 if architecture == "sm_100" else 168


def _cases() -> list[object]:
    cases = []
    for architecture in ARCHITECTURES:
        for pair in SHAPES:
            for shape in sorted({pair.narrow, pair.wide}, key=lambda s: s.lanes):
                # The long ones take the compiler up to a minute each: the shortest stands for all others.
                is_quick = (shape.limbs, architecture) == (64, "sm_100") and shape == pair.narrow
                marks = [] if is_quick else [pytest.mark.slow]
                name = f"{shape.limbs}/{shape.lanes} {architecture}"
                cases.append(pytest.param(shape, architecture, marks=marks, id=name))
    return cases


def compiled(source: str, shape: Shape, architecture: str, folder: Path) -> dict[str, nvrtc.Usage]:
    cubin = folder / "kernels.cubin"
    cubin.write_bytes(nvrtc.compile_cubin(source, shape.options, architecture))
    return nvrtc.usage(cubin)


def check_memory(kernels: dict[str, nvrtc.Usage], most_registers: int) -> None:
    for name, usage in kernels.items():
        assert (usage.stack_bytes, usage.local_bytes) == (0, 0), f"{name} spills"
        assert not any(code.startswith(("LDL", "STL")) for code in usage.instructions), f"{name} uses local memory"
        assert usage.registers <= most_registers, name


def wide_products(usage: nvrtc.Usage) -> int:
    return sum(n for code, n in usage.instructions.items() if code.startswith("IMAD.WIDE"))


@needs_tools
@pytest.mark.parametrize(("shape", "architecture"), _cases())
def test_kernels_compile_without_spills(shape: Shape, architecture: str, tmp_path: Path) -> None:
    if not nvrtc.has_architecture(architecture):
        pytest.skip(f"this compiler does not know {architecture}")
    kernels = compiled(kernel_source(), shape, architecture, tmp_path)
    assert set(kernels) == set(KERNELS)
    check_memory(kernels, register_ceiling(shape, architecture))
    words = shape.limbs // shape.lanes
    for name in FULL_PRODUCTS:
        # For each of the L words of a factor that a lane holds, L products with a and L with n.
        assert 2 * words * words <= wide_products(kernels[name]) <= 2 * words * words + ADDRESS_PRODUCTS, name


@needs_tools
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_curve_kernels_compile_without_spills(architecture: str, tmp_path: Path) -> None:
    if not nvrtc.has_architecture(architecture):
        pytest.skip(f"this compiler does not know {architecture}")
    kernels = compiled(kernel_source(CURVE.files), CURVE, architecture, tmp_path)
    assert set(kernels) == set(CURVE_KERNELS)
    moved = Counter({code: n for code, n in kernels["k_mul"].instructions.items() if code.startswith(("LDL", "STL"))})
    if architecture == "sm_100" and moved:  # the compiler keeps eight bytes aside once: they leave and come back
        assert kernels.pop("k_mul").stack_bytes == 8 and moved.total() == 2
    check_memory(kernels, register_ceiling(CURVE, architecture))
    for name, products in {"k_fixed": 7, "k_sum_read": 8, "k_sum_made": 9, "k_add": 10}.items():
        # 64 of words, and 8 that fold the upper half; less what one constant word saves, and those of addresses.
        assert abs(wide_products(kernels[name]) - 72 * products) <= ADDRESS_PRODUCTS, name


@needs_tools
def test_the_check_for_spills_can_fail(tmp_path: Path) -> None:
    crowded = kernel_source().replace("LIMBS / TPI <= 16 ? 4 : 2", "16")
    assert crowded != kernel_source()
    kernels = compiled(crowded, Shape(64, 16), "sm_90", tmp_path)
    assert any(usage.stack_bytes for usage in kernels.values())
    assert any(code.startswith("STL") for code in kernels["k_segprod"].instructions)


@needs_tools
def test_compiler_errors_come_with_their_log() -> None:
    with pytest.raises(RuntimeError, match="no_such_type"):
        nvrtc.compile_cubin("no_such_type x;", ("-std=c++17",), "sm_90")


def test_all_machine_code_is_in_one_file() -> None:
    for name in ("mont.cuh", "kernels.cuh"):
        text = read_source(name)
        assert "asm" not in text and "__" not in text.replace("__restrict__", "")
    assert kernel_source().isascii() and "#include" not in kernel_source()


def test_shapes_cover_every_length_up_to_8192_bits() -> None:
    assert [shapes_for(bits).limbs * 32 for bits in (2, 2048, 2049, 4096, 6143, 6145, 8192)] == [
        2048,
        2048,
        3072,
        4096,
        6144,
        8192,
        8192,
    ]
    assert shapes_for(8193) is None
