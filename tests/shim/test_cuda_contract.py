"""The contract of all big-number backends, held by the CUDA backend on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from he_processors.bignum import registry
from he_processors.bignum.cuda import CudaBatch
from tests.conformance import test_bignum_backends as contract
from tests.conformance.test_bignum_backends import *  # noqa: F403  (collects the contract's tests here)
from tests.shim.shim_device import ShimDevice, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulation needs g++")

_MANY = 1 << 20
# Wide shapes, narrow ones, and three devices with memory for a few rows at a time, one of which can keep nothing.
_SETUPS: dict[str, tuple[ShimDevice, ...]] = {
    "shim-wide": (ShimDevice(multiprocessors=_MANY),),
    "shim-narrow": (ShimDevice(multiprocessors=1),),
    "shim-blocks": tuple(ShimDevice(block_bytes=5 * 1024, free=free) for free in (_MANY, 0, _MANY)),
}


@pytest.fixture(scope="module", autouse=True)
def shim_backends() -> None:
    """Offer the emulated devices as backends for this module."""
    loaders: dict[str, Callable[[], registry.ModBatchFactory]] = {
        name: partial(partial, CudaBatch, devices=devices) for name, devices in _SETUPS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, loader in loaders.items():
            patch.setitem(registry._LOADERS, name, loader)
        patch.setattr("he_processors.bignum.cuda._MIN_ROWS_TO_SPREAD", 4)
        yield


_QUICK = {
    "shim-narrow": {"three", "2047 + 1", "random 3072"},
    "shim-wide": {"2048 ones"},
    "shim-blocks": {"random 683"},
}
_QUICK_FOR_POWERS = {"shim-narrow": {"2^64 + 13"}, "shim-wide": {"520 ones"}, "shim-blocks": {"random 683"}}


def _cases(quick: dict[str, set[str]]) -> list[object]:
    """Every setup with every modulus; all but one or two moduli for each kernel shape are marked slow."""
    pairs = [(setup, modulus) for setup in _SETUPS for modulus in contract.MODULI]
    return [pytest.param(pair, marks=[] if pair[1] in quick[pair[0]] else [pytest.mark.slow]) for pair in pairs]


# Of the tests that choose their own moduli, one setup is quick: they do not look at how rows are spread.
@pytest.fixture(
    params=["shim-narrow", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shim-wide", "shim-blocks"))]
)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=_cases(_QUICK), ids="-".join)
def arithmetic(request: pytest.FixtureRequest) -> CudaBatch:
    return contract._open(*request.param)


@pytest.fixture(params=_cases(_QUICK_FOR_POWERS), ids="-".join)
def raising(request: pytest.FixtureRequest) -> CudaBatch:
    return contract._open(*request.param)
