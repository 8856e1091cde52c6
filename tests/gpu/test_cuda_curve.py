"""The contract of all curve backends on a real GPU, and batches that fill one, compared with the CPU row by row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from he_processors.curve import registry
from he_processors.curve.interface import Curve, base_point
from he_processors.errors import BackendUnavailable
from tests.bench.bench_curve import bin_order, random_scalars
from tests.conformance import test_curve_backends as contract
from tests.conformance.test_curve_backends import *  # noqa: F403  (collects the contract's tests here)
from tests.conformance.test_curve_oracles import *  # noqa: F403  (and those against libsodium)
from tests.support.curve_toys import segment_sums

pytestmark = pytest.mark.gpu


@cache
def why_no_gpu() -> str | None:
    try:
        registry.load_backend("cuda")
    except BackendUnavailable as error:
        return str(error)
    return None


@pytest.fixture(scope="module", autouse=True)
def gpu_backend() -> Iterator[None]:
    """Let tests that go through all backends take this one."""
    if why_no_gpu() is not None:
        pytest.skip(why_no_gpu())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "BACKENDS", ("cuda",))
        yield


@pytest.fixture
def curve() -> Curve:
    return registry.load_backend("cuda")


compiled = curve


def test_batches_that_fill_a_device(curve: Curve) -> None:
    rng, host = np.random.default_rng(1), registry.open_curve("auto")
    n = 200_000
    scalars, digits = random_scalars(rng, n), random_scalars(rng, n, 3)
    rows, sums, multiples = [], [], []
    for one in (curve, host):
        table = one.fixed_base(base_point(one))
        points = one.add(table.mul(scalars), table.mul(digits))
        rows.append(one.to_affine(points))
        read = one.from_affine(rows[-1])
        sums += [
            one.to_affine(segment_sums(one, p, *bin_order(np.random.default_rng(2), n, 8))) for p in (points, read)
        ]
        multiples.append(one.to_affine(one.mul(read[:20_000], scalars[:20_000])))
    assert np.array_equal(*rows)
    assert all(np.array_equal(sums[0], other) for other in sums[1:])
    assert np.array_equal(*multiples)
