"""The kernel source, and the shapes it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

WORD_BITS = 32
THREADS_PER_BLOCK = 128

# warp.cuh is all that knows the machine; tests put a CPU version in its place.
_MACHINE = "warp.cuh"
_ARITHMETIC = ("mont.cuh", "kernels.cuh")

KERNELS = ("k_mul", "k_enter", "k_leave", "k_add", "k_segprod", "k_fixedbase", "k_power", "k_horner")


@dataclass(frozen=True, slots=True)
class Shape:
    """How numbers are spread: ``limbs`` 32-bit words over ``lanes`` lanes of a warp."""

    limbs: int
    lanes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one number in device memory."""
        return 4 * self.limbs

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options that fix the shape."""
        return ("-std=c++17", f"-DLIMBS={self.limbs}", f"-DTPI={self.lanes}")


@dataclass(frozen=True, slots=True)
class ShapePair:
    """Two ways to spread numbers of one size; rows in memory are the same for both.

    ``narrow`` does the fewest instructions for each product, ``wide`` finishes one product soonest and serves
    batches too small to fill a device.
    """

    narrow: Shape
    wide: Shape

    @property
    def limbs(self) -> int:
        return self.narrow.limbs


# At 16 words a lane a kernel takes about 110 registers, at 24 about 150: no spills, and enough warps to hide latency.
SHAPES: tuple[ShapePair, ...] = (
    ShapePair(Shape(64, 4), Shape(64, 16)),  # 2048 bits
    ShapePair(Shape(96, 8), Shape(96, 8)),  # 3072
    ShapePair(Shape(128, 8), Shape(128, 32)),  # 4096
    ShapePair(Shape(192, 8), Shape(192, 16)),  # 6144
    ShapePair(Shape(256, 16), Shape(256, 32)),  # 8192
)


def shapes_for(modulus_bits: int) -> ShapePair | None:
    """Return the smallest shapes that hold a modulus, or None if it is too long."""
    return next((pair for pair in SHAPES if pair.limbs * WORD_BITS >= modulus_bits), None)


@cache
def kernel_source() -> str:
    """Return the whole CUDA source as one translation unit that includes nothing."""
    return read_source(_MACHINE) + arithmetic_source()


@cache
def arithmetic_source() -> str:
    """Return the source without the machine layer."""
    return "".join(read_source(name) for name in _ARITHMETIC)


def read_source(name: str) -> str:
    """Return one source file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")
