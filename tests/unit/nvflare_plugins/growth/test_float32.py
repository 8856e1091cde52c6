from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nvflare_plugins.growth import float32

Floats = np.ndarray
NATIVE = {"exp": float32.exp, "log": float32.log, "log1p": float32.log1p, "tanh": float32.tanh}
EVERY = {**NATIVE, "lgamma": float32.lgamma}
TWINS = {
    "exp": float32.exp_in_numpy,
    "log": float32.log_in_numpy,
    "logistic": float32.logistic_in_numpy,
}
_FUSED = {0x42022423, 0xC27C65D9}  # where exp with fused operations rounds the other way

_library, _release = platform.libc_ver()
needs_this_library = pytest.mark.skipif(
    _library != "glibc" or platform.machine() != "x86_64" or tuple(map(int, _release.split("."))) >= (2, 41),
    reason="another C library, or a later one: it has other functions",
)


def _has_fused_operations() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and " fma " in info.read_text()


def _special() -> Floats:
    edges = [0.0, 1.0, 2.0, 22.0, 88.72, 88.73, 103.9, 104.0, 1e-45, 1e-38, 1.17549435e-38, 3.4e38, np.inf, np.nan]
    near = np.array([0.41422, 0.2929, 0.34657, 1.0397, 1.23, 1.7316, 8.0, 2.0**26, 2.0**-29, 2.0**-54], np.float32)
    positive = np.concatenate([np.array(edges, np.float32), near, np.nextafter(near, np.float32(0))])
    fused = np.array(sorted(_FUSED), np.uint32).view(np.float32)
    return np.concatenate([positive, -positive, fused])


def _sample(n: int) -> Floats:
    rng = np.random.default_rng(26)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32)
    usual = rng.normal(size=n).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.concatenate([_special(), bits, usual, 30 * usual, np.abs(usual) + 1])


def _differ(one: Floats, other: Floats) -> Floats:
    """Return where results differ; what is no number may be another one."""
    return (one.view(np.uint32) != other.view(np.uint32)) & ~(np.isnan(one) & np.isnan(other))


def _of_library(name: str, values: Floats) -> Floats:
    function = getattr(ctypes.CDLL("libm.so.6"), f"{name}f")
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    return np.array([function(float(value)) for value in values], np.float32)


def _allowed(name: str, values: Floats) -> Floats:
    if name == "exp" and not _has_fused_operations():
        return np.isin(values.view(np.uint32), sorted(_FUSED))
    if name == "lgamma":
        return ~(values >= 1)
    return np.zeros(values.size, bool)


@needs_this_library
@pytest.mark.parametrize("name", EVERY)
def test_every_function_is_the_library_s_on_a_sample_and_at_the_edges(name: str) -> None:
    values = _sample(20_000)
    differ = _differ(EVERY[name](values), _of_library(name, values)) & ~_allowed(name, values)
    assert not values[differ].size


@pytest.mark.parametrize("name", TWINS)
def test_c_and_numpy_agree_on_a_sample_and_at_the_edges(name: str) -> None:
    values = _sample(200_000)
    if float32.native is None:
        pytest.skip("no C here: there is one of the two")
    twin = float32._by_blocks(TWINS[name], values)
    assert not values[_differ(getattr(float32, name)(values), twin)].size


def test_numpy_s_own_exp_is_another_function() -> None:
    values = np.random.default_rng(1).normal(size=10_000).astype(np.float32)
    assert np.count_nonzero(_differ(np.exp(values), float32.exp(values))) > 100


def test_results_keep_the_shape_of_what_they_are_of() -> None:
    values = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    for function in (*EVERY.values(), float32.logistic):
        assert function(values[:, ::2]).shape == (3, 2) and function(values[:, ::2]).dtype == np.float32
        assert np.array_equal(function(values[:, ::2]), function(values)[:, ::2])


def test_hypot_of_large_numbers_does_not_overflow() -> None:
    large = np.array([3e38, 3.0], np.float32)
    assert float32.hypot(large, np.array([1e38, 4.0], np.float32)).tolist() == [np.float32(np.hypot(large[0], 1e38)), 5]


_CHECKER = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
void fill(uint32_t start, uint32_t n, float *exps, float *logs)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = start + i;
        float x;
        memcpy(&x, &bits, 4);
        exps[i] = expf(x);
        logs[i] = logf(x);
    }
}
"""


@needs_this_library
@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("form", ["C", "numpy"])
def test_exp_and_log_are_the_library_s_on_all_float32(form: str, part: int, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or (form == "C" and float32.native is None):
        pytest.skip("no C compiler")
    source, library = tmp_path / "checker.c", tmp_path / "checker.so"
    source.write_text(_CHECKER)
    options = ["-O1", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
    subprocess.run([compiler, *options], check=True)
    fill = ctypes.CDLL(str(library)).fill
    n = 1 << 20
    exps, logs = np.empty(n, np.float32), np.empty(n, np.float32)
    pointer = ctypes.POINTER(ctypes.c_float)
    for start in range(part << 28, (part + 1) << 28, n):
        fill(ctypes.c_uint32(start), ctypes.c_uint32(n), exps.ctypes.data_as(pointer), logs.ctypes.data_as(pointer))
        values = np.arange(start, start + n, dtype=np.uint32).view(np.float32)
        for name, expected in (("exp", exps), ("log", logs)):
            own = getattr(float32, name)(values) if form == "C" else float32._by_blocks(TWINS[name], values)
            if own.tobytes() != expected.tobytes():  # quick, and true of all but a few
                assert not (_differ(own, expected) & ~_allowed(name, values)).any(), (name, hex(start))
