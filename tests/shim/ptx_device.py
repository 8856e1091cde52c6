"""A CUDA device that runs what NVIDIA's compiler makes of the kernels (PTX), instruction by instruction, without a GPU.

``shim_device`` compiles the kernels' source by g++; here NVRTC compiles it, and ``ptx.c`` runs the result over warps of
32 lanes with their carry flags. Only instructions of a list are known; another one is an error.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.cuda.device import THREADS_PER_BLOCK, Shape, kernel_source
from tests.shim.shim_device import ShimDevice
from tests.support import nvrtc

ARCHITECTURE = "compute_75"  # the least that the backend takes
_LANES, _OPERANDS, _OFFSET, _GUARD, _NEGATED = 32, 9, 6, 7, 8
_LIMIT = 1 << 32
_SOURCE = Path(__file__).with_name("ptx.c")
_ERRORS = {
    1: "an address outside the memory it was given",
    2: "an exchange between lanes of which some are elsewhere",
    3: "an unknown instruction",
    4: "no end",
    5: "an address that is no multiple of what is read there",
}
_SAME = {
    "mov": ("u32", "u64", "pred", "b32", "b64"),
    "cvta.to.global": ("u64",),
    "cvt": ("u64.u32",),
    "ld.param": ("u32", "u64"),
}
_OPS: dict[str, str] = {
    **{f"{name}.{kind}": "MOV" for name, kinds in _SAME.items() for kind in kinds},
    **{f"and.{kind}": "AND" for kind in ("b32", "b64", "pred")},
    **{f"or.{kind}": "OR" for kind in ("b32", "b64", "pred")},
    **{f"xor.{kind}": "XOR" for kind in ("b32", "b64", "pred")},
    **{f"selp.{kind}": "SELECT" for kind in ("b32", "b64", "s32", "u32", "u64", "s64")},
    **{f"setp.eq.{kind}": "EQ" for kind in ("s32", "u32", "b32", "s64", "u64", "b64")},
    **{f"setp.ne.{kind}": "NE" for kind in ("s32", "u32", "b32", "s64", "u64", "b64")},
    **{f"setp.{order}.{kind}": f"{order.upper()}_U" for order in ("lt", "le", "gt", "ge") for kind in ("u32", "u64")},
    **{f"setp.{order}.s32": f"{order.upper()}_S32" for order in ("lt", "le", "gt", "ge")},
    "not.b32": "NOT32",
    "not.pred": "NOT_PRED",
    "neg.s32": "NEG32",
    "shl.b32": "SHL32",
    "shl.b64": "SHL64",
    "shr.u32": "SHR_U32",
    "shr.u64": "SHR_U64",
    "shr.s32": "SHR_S32",
    "add.s32": "ADD32",
    "add.s64": "ADD64",
    "sub.s32": "SUB32",
    "sub.s64": "SUB64",
    "mul.lo.s32": "MUL32",
    "mul.lo.s64": "MUL64",
    "mul.wide.u32": "MUL_WIDE_U32",
    "mul.wide.s32": "MUL_WIDE_S32",
    "mad.lo.s32": "MAD32",
    "cvt.u32.u64": "LOW32",
    "cvt.s64.s32": "SIGN32",
    "add.cc.u32": "ADD_CC",
    "addc.cc.u32": "ADDC_CC",
    "addc.u32": "ADDC",
    "mad.lo.cc.u32": "MAD_LO_CC",
    "madc.lo.cc.u32": "MADC_LO_CC",
    "madc.hi.cc.u32": "MADC_HI_CC",
    "ld.global.u32": "LOAD32",
    "ld.global.s32": "LOAD32",
    "ld.global.u64": "LOAD64",
    "ld.global.v4.u32": "LOAD_V4",
    "st.global.u32": "STORE32",
    "st.global.v4.u32": "STORE_V4",
    "shfl.sync.idx.b32": "SHUFFLE",
    "vote.sync.ballot.b32": "BALLOT",
    "bra": "BRANCH",
    "bra.uni": "BRANCH",
    "ret": "RETURN",
    "prefetch.L1": "NOTHING",
}
"""Every instruction that may be emitted, and what it is in ``ptx.c``."""
_BITS_32 = re.compile(r"\.(?:[usb]32|pred)$")


class PtxError(Exception):
    """What the compiler emitted is not known here, or does what is undefined on a device."""


@dataclass(frozen=True)
class Kernel:
    """One kernel: its instructions, and the registers that are given before it runs.

    Shapes: code: int32[n, 10].
    """

    code: NDArray[np.int32]
    n_registers: int
    constants: dict[int, int]
    parameters: dict[int, int]
    """Register of each parameter that is read, by its number."""
    places: dict[str, int]
    """Registers of the thread's place."""


@cache
def op_codes() -> dict[str, int]:
    """Return the numbers of ``ptx.c``'s operations, as it declares them."""
    declared = re.search(r"enum Op \{(.*?)\}", _SOURCE.read_text(), re.DOTALL)
    assert declared is not None
    return {name.strip(): number for number, name in enumerate(declared[1].split(","))}


class _Translation:
    """One kernel's text, line by line."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[list[int]] = []
        self.registers: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.parameters: dict[int, int] = {}
        self.labels: dict[str, int] = {}
        self.jumps: list[tuple[int, str]] = []

    def register(self, operand: str, is_32_bits: bool) -> int:
        """Return the register of an operand; a constant gets one of its own."""
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", operand):
            value = int(operand, 0) & (0xFFFFFFFF if is_32_bits else 0xFFFFFFFFFFFFFFFF)
            place = self.registers.setdefault(f"constant {value}", len(self.registers))
            self.constants[place] = value
            return place
        if not re.fullmatch(r"%[a-z]+\d+|%(?:tid|ctaid|ntid)\.x", operand):
            raise PtxError(f"{self.name}: operand {operand}")
        return self.registers.setdefault(operand, len(self.registers))

    def instruction(self, text: str) -> None:
        """Add one instruction."""
        found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)(?:\s+(.*))?", text)
        if found is None or found[3] not in _OPS:
            raise PtxError(f"{self.name}: {text}")
        negated, guard, name, rest = found.groups()
        row = [op_codes()[_OPS[name]], *([-1] * _OPERANDS)]
        row[1 + _GUARD] = -1 if guard is None else self.register(guard, False)
        row[1 + _NEGATED] = int(negated == "!")
        row[1 + _OFFSET] = 0
        op = _OPS[name]
        if op == "BRANCH":
            self.jumps.append((len(self.rows), rest))
        elif op not in ("RETURN", "NOTHING"):
            self._operands(row, name, rest)
        self.rows.append(row)

    def _operands(self, row: list[int], name: str, text: str) -> None:
        parts = [part for part in re.split(r"[\s,{}|]+", text) if part]
        for place, part in enumerate(parts):
            address = re.fullmatch(r"\[([\w.%]+)(?:\+(-?\d+))?\]", part)
            if address is not None and name.startswith("ld.param"):
                number = int(address[1].rpartition("_")[2])
                self.parameters[number] = self.registers.setdefault(f"parameter {number}", len(self.registers))
                row[1 + place] = self.parameters[number]
            elif address is not None:
                row[1 + place] = self.register(address[1], False)
                row[1 + _OFFSET] = int(address[2] or 0)
            else:
                row[1 + place] = self.register(part, bool(_BITS_32.search(name)))

    def kernel(self) -> Kernel:
        """Return what was translated, with jumps to instructions."""
        for at, label in self.jumps:
            self.rows[at][1] = self.labels[label]
        places = {
            name: self.registers[f"%{name}.x"] for name in ("tid", "ctaid", "ntid") if f"%{name}.x" in self.registers
        }
        code = np.array(self.rows, dtype=np.int32)
        return Kernel(code, len(self.registers), self.constants, self.parameters, places)


def translate(ptx: str) -> dict[str, Kernel]:
    """Return the kernels of a module.

    Raises:
        PtxError: an instruction or operand that is not known here.
    """
    kernels: dict[str, Kernel] = {}
    current: _Translation | None = None
    for line in re.sub(r"//[^\n]*", "", ptx).splitlines():
        text = line.strip()
        if text.startswith(".visible .entry"):
            current = _Translation(text.split()[2].rstrip("("))
        elif current is None or not text or text.startswith(".") or text in "{}()":
            if text == "}" and current is not None:
                kernels[current.name], current = current.kernel(), None
        elif text.endswith(":"):
            current.labels[text[:-1]] = len(current.rows)
        elif text.endswith(";"):
            current.instruction(text[:-1].strip())
    return kernels


@cache
def compiled(shape: Shape) -> str:
    """Return the PTX of all kernels in one shape."""
    return nvrtc.compile_ptx(kernel_source(shape.files), shape.options, ARCHITECTURE)


@cache
def kernels_of(shape: Shape) -> dict[str, Kernel]:
    """Return the kernels in one shape."""
    return translate(compiled(shape))


def has_emulation() -> bool:
    """Tell whether kernels can be compiled and run here."""
    return nvrtc.has_tools() and shutil.which("gcc") is not None


class PtxDevice(ShimDevice):
    """One emulated device that runs what the compiler emits; see ``ShimDevice``."""

    def launch(self, shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
        self.launched.append((shape, kernel, groups))
        run_kernel(shape, kernel, groups, arguments)


def run_kernel(shape: Shape, kernel: str, groups: int, arguments: tuple[Any, ...]) -> None:
    """Run one kernel to its end. Arguments as for ``shim_device.run_kernel``.

    Raises:
        PtxError: what the kernel does is undefined on a device.
    """
    run(kernels_of(shape)[kernel], -(-groups * shape.lanes // THREADS_PER_BLOCK), arguments)


def run(kernel: Kernel, blocks: int, arguments: tuple[Any, ...]) -> int:
    """Run a kernel over whole blocks of threads; return a hash of the way and the addresses of all warps."""
    held = [None if each is None else np.asarray(each) for each in arguments]
    memory = [(each.ctypes.data, each.ctypes.data + each.nbytes) for each in held if each is not None and each.ndim]
    ranges = np.array(memory, dtype=np.uint64)
    given = np.zeros((kernel.n_registers, _LANES), dtype=np.uint64)
    for place, value in kernel.constants.items():
        given[place] = value
    for number, place in kernel.parameters.items():
        value = held[number]
        given[place] = 0 if value is None else value.ctypes.data if value.ndim else int(value)
    trace = ctypes.c_uint64()
    for warp in range(blocks * THREADS_PER_BLOCK // _LANES):
        registers = given.copy()
        block, first = divmod(warp * _LANES, THREADS_PER_BLOCK)
        for name, lanes in (("tid", first + np.arange(_LANES)), ("ctaid", block), ("ntid", THREADS_PER_BLOCK)):
            if name in kernel.places:
                registers[kernel.places[name]] = lanes
        failed = _library().ptx_run_warp(
            ctypes.c_void_p(kernel.code.ctypes.data),
            ctypes.c_void_p(registers.ctypes.data),
            ctypes.c_uint32(0xFFFFFFFF),
            ctypes.c_void_p(ranges.ctypes.data),
            len(ranges),
            ctypes.c_uint64(_LIMIT),
            ctypes.byref(trace),
        )
        if failed:
            raise PtxError(f"the kernel asks for {_ERRORS[failed]}")
    return trace.value


@cache
def _library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="veilboost_ptx_"))
    try:
        command = (
            str(shutil.which("gcc")),
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            str(_SOURCE),
            "-o",
            str(folder / "ptx.so"),
        )
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(folder / "ptx.so"))
    finally:
        shutil.rmtree(folder)
