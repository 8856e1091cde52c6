"""The contract of all big-number backends on real GPUs, with each kernel shape and with blocks on several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest

from he_processors.bignum import registry
from he_processors.bignum.cuda import CudaBatch, load
from he_processors.cuda.device import CupyDevice, Device, open_devices
from he_processors.errors import BackendUnavailable
from tests.conformance import test_bignum_backends as contract
from tests.conformance.test_bignum_backends import *  # noqa: F403  (collects the contract's tests here)

pytestmark = pytest.mark.gpu


@cache
def why_no_gpu() -> str | None:
    try:
        load()
    except BackendUnavailable as error:
        return str(error)
    return None


def _changed(devices: tuple[Device, ...], **settings: int) -> tuple[Device, ...]:
    for device in devices:
        for name, value in settings.items():
            setattr(device, name, value)
    return devices


# Small batches take the wide shapes by themselves; a device that claims one multiprocessor takes the narrow ones.
# Blocks of a few rows, on two views of each device, take the paths for several devices and rows beyond their memory.
_SETUPS: dict[str, Callable[[], tuple[Device, ...]]] = {
    "gpu-wide": open_devices,
    "gpu-narrow": lambda: _changed(open_devices(), multiprocessors=1),
    "gpu-blocks": lambda: _changed(open_devices() + open_devices(), block_bytes=5 * 1024),
    "gpu-host": lambda: _changed((_FullDevice(open_devices()[0].xp, 0),), block_bytes=5 * 1024),
}


class _FullDevice(CupyDevice):
    """A device that can keep nothing."""

    def free_bytes(self) -> int:
        return 0


@pytest.fixture(scope="module", autouse=True)
def gpu_backends() -> Iterator[None]:
    """Offer the setups as backends for this module."""
    if why_no_gpu() is not None:
        pytest.skip(why_no_gpu())
    with pytest.MonkeyPatch.context() as patch:
        for name, setup in _SETUPS.items():
            devices = setup()
            patch.setitem(registry._LOADERS, name, partial(partial, CudaBatch, devices=devices))
        patch.setattr("he_processors.bignum.cuda._MIN_ROWS_TO_SPREAD", 4)
        yield


@pytest.fixture(params=_SETUPS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=contract.MODULI)
def arithmetic(request: pytest.FixtureRequest, backend: str) -> CudaBatch:
    return contract._open(backend, request.param)
