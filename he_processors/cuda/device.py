"""The machine that runs the kernels: NVIDIA GPUs through CuPy, loaded only when asked for.

Memory comes from plain device allocations, never from managed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol, TypeVar

import numpy as np

from he_processors.cuda.source import THREADS_PER_BLOCK, Shape, kernel_source
from he_processors.errors import BackendUnavailable

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
            self._modules[shape] = self.xp.RawModule(code=kernel_source(), options=shape.options, backend="nvrtc")
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
