"""A CUDA device emulated on the CPU: the same kernel source, compiled by g++ over ``shim.h``.

The host code of the CUDA backend runs on it unchanged, with numpy arrays for device memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from he_processors.cuda.device import Shape, arithmetic_source

_HERE = Path(__file__).parent
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")


def has_compiler() -> bool:
    """Tell whether the shim can be built here."""
    return shutil.which("g++") is not None


class FailingDevice(Exception):
    """What a broken device raises."""


class ShimDevice:
    """One emulated device; see ``he_processors.cuda.device.Device``.

    ``multiprocessors=0`` makes every launch take the narrow shape, a large number the wide one.
    """

    def __init__(self, multiprocessors: int = 1, block_bytes: int = 1 << 30, free: int = 1 << 40) -> None:
        self.xp: ModuleType = np
        self.errors: tuple[type[BaseException], ...] = (FailingDevice,)
        self.multiprocessors = multiprocessors
        self.block_bytes = block_bytes
        self.table_bytes = 1 << 20
        self.free = free
        self.is_broken = False
        self.uploaded: list[np.ndarray] = []
        self.launched: list[tuple[Shape, str, int]] = []

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def free_bytes(self) -> int:
        return self.free

    def upload(self, array: np.ndarray) -> np.ndarray:
        if self.is_broken:
            raise FailingDevice("planted")
        self.uploaded.append(np.array(array, order="C"))
        return self.uploaded[-1]

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def launch(self, shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
        self.launched.append((shape, kernel, groups))
        run_kernel(shape, kernel, groups, arguments)


def run_kernel(shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
    """Run one kernel to its end. Arguments are contiguous numpy arrays, numpy scalars of the C type, or None."""
    held = [_as_c(argument) for argument in arguments]
    values = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
    if _library(shape).shim_launch(kernel.encode(), ctypes.c_uint64(groups), values, len(held)):
        raise ValueError(f"no kernel {kernel} with {len(held)} arguments")


def _as_c(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise ValueError("a kernel takes contiguous arrays only")
        return ctypes.c_void_p(argument.ctypes.data)
    return {np.uint32: ctypes.c_uint32, np.uint64: ctypes.c_uint64}[type(argument)](int(argument))


@cache
def _library(shape: Shape) -> ctypes.CDLL:
    arithmetic = arithmetic_source(shape.files)
    kernels = " ".join(f"LAUNCHABLE({name})" for name in re.findall(r"^KERNEL (\w+)\(", arithmetic, re.MULTILINE))
    source = f'#include "shim.h"\n{arithmetic}#define ALL_KERNELS {kernels}\n#include "launch.h"\n'
    headers = "".join((_HERE / name).read_text() for name in ("shim.h", "launch.h"))
    command = ("g++", *_FLAGS, *shape.options[1:], f"-I{_HERE}", "-x", "c++", "-")
    key = hashlib.sha256("\0".join((source, headers, *command)).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"veilboost_shim_{key}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as built:
            pass
        subprocess.run((*command, "-o", built.name), input=source, text=True, check=True)
        Path(built.name).replace(path)
    return ctypes.CDLL(str(path))
