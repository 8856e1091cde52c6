"""NVIDIA's run-time compiler and disassembler from PyPI: they need no GPU and no CUDA installation."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes of the device, as its machine code declares it, and how often it uses each instruction."""

    registers: int
    stack_bytes: int
    local_bytes: int
    instructions: Counter[str]


def has_tools() -> bool:
    """Tell whether the compiler and the disassembler are installed."""
    return bool(_files("lib/libnvrtc.so.*") and _files("bin/cuobjdump") and _files("bin/nvdisasm"))


def has_architecture(architecture: str) -> bool:
    """Tell whether this compiler knows an architecture, such as ``sm_90``."""
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(known))
    return int(architecture.removeprefix("sm_")) in list(known)


def compile_cubin(source: str, options: tuple[str, ...], architecture: str) -> bytes:
    """Compile CUDA C++ to machine code. Raises: RuntimeError with the compiler's log."""
    return _compile(source, options, architecture, "CUBIN")


def compile_ptx(source: str, options: tuple[str, ...], architecture: str) -> str:
    """Compile CUDA C++ for an architecture such as ``compute_75``. Raises: RuntimeError with the compiler's log."""
    return _compile(source, options, architecture, "PTX").rstrip(b"\0").decode()


def _compile(source: str, options: tuple[str, ...], architecture: str, form: str) -> bytes:
    library, program, size = _library(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    arguments = [option.encode() for option in (*options, f"-arch={architecture}")]
    failed = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    if failed:
        _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.value.decode())
    _check(getattr(library, f"nvrtcGet{form}Size")(program, ctypes.byref(size)))
    made = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{form}")(program, made))
    _check(library.nvrtcDestroyProgram(ctypes.byref(program)))
    return made.raw


def usage(cubin: Path) -> dict[str, Usage]:
    """Read what each kernel of a cubin uses."""
    resources = _dump("-res-usage", cubin)
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", resources)
    code = {part.split(None, 1)[0]: part for part in _dump("-sass", cubin).split("Function : ")[1:]}
    return {name: Usage(int(reg), int(stack), int(local), _count(code[name])) for name, reg, stack, local in found}


def _count(code: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE))


def _dump(option: str, cubin: Path) -> str:
    tool = _files("bin/cuobjdump")[0]
    # cuobjdump starts nvdisasm, which lies beside it.
    environment = {"PATH": f"{_files('bin/nvdisasm')[0].parent}:/usr/bin:/bin"}
    return subprocess.run((tool, option, cubin), env=environment, capture_output=True, text=True, check=True).stdout


def _files(pattern: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return sorted(path for folder in folders for path in Path(folder).glob(f"*/{pattern}") if "alt" not in path.name)


@cache
def _library() -> ctypes.CDLL:
    path = _files("lib/libnvrtc.so.*")[-1]
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # looked up by name while compiling
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC answers {status}")
