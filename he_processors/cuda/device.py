"""The machine that runs the kernels, and the source they are compiled from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import resources
from typing import Any, Protocol, TypeVar

import numpy as np

from he_processors.errors import BackendUnavailable

# The kernel source, and the shapes it is compiled for.


WORD_BITS = 32
THREADS_PER_BLOCK = 128

# warp.cuh is all that knows the machine; tests put a CPU version in its place.
_MACHINE = "warp.cuh"
_RESIDUES = ("mont.cuh", "kernels.cuh")

KERNELS = ("k_mul", "k_enter", "k_leave", "k_add", "k_segprod", "k_fixedbase", "k_power", "k_horner")
CURVE_KERNELS = ("k_enter", "k_leave", "k_add", "k_double", "k_sum_read", "k_sum_made", "k_fixed", "k_mul")


@dataclass(frozen=True, slots=True)
class Shape:
    """What is computed by which files, and how numbers are spread: ``limbs`` words over ``lanes`` lanes of a warp."""

    limbs: int
    lanes: int
    files: tuple[str, ...] = field(default=_RESIDUES, repr=False)

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


CURVE = Shape(8, 1, ("curve.cuh",))

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
def kernel_source(files: tuple[str, ...] = _RESIDUES) -> str:
    """Return the whole CUDA source as one translation unit that includes nothing."""
    return read_source(_MACHINE) + arithmetic_source(files)


@cache
def arithmetic_source(files: tuple[str, ...] = _RESIDUES) -> str:
    """Return the source without the machine layer."""
    return "".join(read_source(name) for name in files)


def read_source(name: str) -> str:
    """Return one source file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


# The machine that runs the kernels: NVIDIA GPUs through CuPy, loaded only when asked for.
#
# Memory comes from plain device allocations, never from managed memory.


_MIN_CAPABILITY = (7, 5)
_TABLE_BYTES = 40 << 20  # a fixed-base table that stays in the second-level cache beside the batch

Result = TypeVar("Result")

Array = Any
"""An array in device memory: cupy.ndarray, or numpy.ndarray where tests emulate a device."""


class Device(Protocol):
    """One device. Launches and array operations are queued; ``download`` waits for them.

    ``xp`` is the array library (numpy's functions on this device's arrays), ``errors`` what it raises when the
    device fails, ``block_bytes`` how much of a batch to work on at a time, ``table_bytes`` how large a table may be.
    """

    xp: Any
    errors: tuple[type[BaseException], ...]
    multiprocessors: int
    block_bytes: int
    table_bytes: int

    def active(self) -> AbstractContextManager[Any]:
        """Make this device current for allocations and launches."""

    def free_bytes(self) -> int:
        """Return the memory that can still be allocated."""

    def upload(self, array: np.ndarray) -> Array:
        """Copy an array from host memory."""

    def download(self, array: Array) -> np.ndarray:
        """Copy an array to host memory, after all work queued before."""

    def launch(self, shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
        """Queue a kernel over ``groups`` numbers. Arguments are arrays, numpy scalars of the C type, or None."""


class CupyDevice:
    """A CUDA device through CuPy."""

    def __init__(self, cupy: Any, index: int) -> None:
        self.xp = cupy
        self.errors = cuda_errors(cupy)
        self._device = cupy.cuda.Device(index)
        self._modules: dict[Shape, Any] = {}
        with self._device:
            properties = cupy.cuda.runtime.getDeviceProperties(index)
        if (properties["major"], properties["minor"]) < _MIN_CAPABILITY:
            raise BackendUnavailable(f"CUDA device {index} is older than compute capability 7.5")
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.block_bytes = int(properties["totalGlobalMem"]) // 8
        self.table_bytes = _TABLE_BYTES

    def active(self) -> AbstractContextManager[Any]:
        result: AbstractContextManager[Any] = self._device
        return result

    def free_bytes(self) -> int:
        with self._device:
            free, _ = self.xp.cuda.runtime.memGetInfo()
            return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def upload(self, array: np.ndarray) -> Array:
        with self._device:
            return self.xp.asarray(array)

    def download(self, array: Array) -> np.ndarray:
        with self._device:
            result: np.ndarray = self.xp.asnumpy(array)
            return result

    def launch(self, shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
        blocks = -(-groups * shape.lanes // THREADS_PER_BLOCK)
        passed = tuple(np.uint64(0) if argument is None else argument for argument in arguments)
        with self._device:
            self._module(shape).get_function(kernel)((blocks,), (THREADS_PER_BLOCK,), passed)

    def _module(self, shape: Shape) -> Any:
        if shape not in self._modules:
            source = kernel_source(shape.files)
            self._modules[shape] = self.xp.RawModule(code=source, options=shape.options, backend="nvrtc")
        return self._modules[shape]


def guarded(method: Callable[..., Result]) -> Callable[..., Result]:
    """Turn a device's failure into BackendUnavailable, for methods of objects that list ``device_errors``."""

    @wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Result:
        try:
            return method(self, *args, **kwargs)
        except self.device_errors as error:
            raise BackendUnavailable(f"CUDA failed in {method.__name__}: {type(error).__name__}") from error

    return wrapper


def cuda_errors(cupy: Any) -> tuple[type[BaseException], ...]:
    """Return what CuPy raises when a device, its driver or its compiler fails.

    Errors of the runtime, the driver and NVRTC, and a library that cannot be loaded, are RuntimeErrors to CuPy.
    """
    return (RuntimeError, cupy.cuda.memory.OutOfMemoryError, cupy.cuda.compiler.CompileException)


def open_devices() -> tuple[Device, ...]:
    """Return every CUDA device of this machine.

    Raises:
        BackendUnavailable: CuPy, a driver or a device is missing.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailable("CuPy is not installed") from error
    try:
        devices = tuple(CupyDevice(cupy, index) for index in range(cupy.cuda.runtime.getDeviceCount()))
    except cuda_errors(cupy) as error:
        raise BackendUnavailable("no CUDA device answers") from error
    if not devices:
        raise BackendUnavailable("this machine has no CUDA device")
    return devices
