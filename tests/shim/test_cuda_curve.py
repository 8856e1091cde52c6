"""The contract of all curve backends, held by the CUDA backend on emulated devices, and what it does beyond that."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.cuda.device import CURVE, CURVE_KERNELS, kernel_source
from he_processors.curve import cuda, registry
from he_processors.curve.cuda import CudaCurve, first_disagreement, shifted_digits
from he_processors.curve.interface import FIELD_PRIME, GROUP_ORDER, Curve
from he_processors.elgamal import decryption
from he_processors.elgamal.encryption import PointColumns
from he_processors.errors import BackendUnavailable
from he_processors.fixed_point import join
from tests.conformance import test_curve_backends as contract
from tests.conformance.test_curve_backends import *  # noqa: F403  (collects the contract's tests here)
from tests.conformance.test_curve_oracles import *  # noqa: F403  (and those against libsodium)
from tests.shim import ptx_device, shim_device
from tests.shim.ptx_device import PtxDevice, has_emulation, kernels_of, run, translate
from tests.shim.ptx_device import compiled as compiled_ptx
from tests.shim.shim_device import FailingDevice, ShimDevice, has_compiler
from tests.support.curve_toys import base_rows, sample_rows, scalar_rows, segment_sums
from tests.support.elgamal_toys import ToyLevel

pytestmark = pytest.mark.skipif(not has_compiler(), reason="the emulation needs g++")
needs_ptx = pytest.mark.skipif(not has_emulation(), reason="the compiler (NVRTC) or gcc is missing")

# One that sums in several passes and multiplies five rows at a time, and what NVIDIA's compiler emits.
_DEVICES = {"shim": lambda: ShimDevice(block_bytes=5 * 1024), "ptx": PtxDevice}
_PARAMS = ["shim", pytest.param("ptx", marks=[pytest.mark.slow, needs_ptx])]


@pytest.fixture(scope="module", autouse=True)
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Offer the emulated devices as backends for this module; where a test goes through all, it takes the first."""
    curves = {name: CudaCurve(make()) for name, make in _DEVICES.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, one in curves.items():
            patch.setitem(registry._LOADERS, name, lambda one=one: one)
        patch.setattr(contract, "BACKENDS", ("shim",))
        yield


@pytest.fixture(params=_PARAMS)
def curve(request: pytest.FixtureRequest) -> Curve:
    return registry.load_backend(request.param)


@pytest.fixture(params=_PARAMS)
def compiled(request: pytest.FixtureRequest) -> Curve:
    return registry.load_backend(request.param)


test_every_backend_runs_on_this_machine = None


def to_words(values: list[int]) -> np.ndarray:
    return rows_from_ints(values, 32).view("<u4").reshape(len(values), 8)


# Products and sums of a field are not kernels by themselves: X, Y, Z, T of a point are any representatives below 2^256.
EDGES = [
    *(0, 1, 2, 18, 19, 37, 38, 39, 2**32 - 1, 2**64 - 38, 2**128 - 1, 2**224, 2**255 - 20, 2**255 - 1, 2**255),
    *(FIELD_PRIME - 1, FIELD_PRIME, FIELD_PRIME + 1, 2 * FIELD_PRIME - 1, 2 * FIELD_PRIME, 2 * FIELD_PRIME + 1),
    *(2**256 - 39, 2**256 - 38, 2**256 - 37, 2**256 - 2, 2**256 - 1, 2**256 - 2**32, 2**256 - 2**224),
    *(int("f0" * 32, 16), int("0f" * 32, 16), int("ffffffff00000000" * 4, 16), int("00000000ffffffff" * 4, 16)),
]


def doubled(x: int, y: int, z: int) -> list[int]:
    h, g = x * x + y * y, x * x - y * y
    e, f = h - (x + y) ** 2, 2 * z * z + g
    return [value % FIELD_PRIME for value in (e * f, g * h, f * g, e * h)]


def coordinates() -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(9)
    drawn = [tuple(ints_from_rows(rng.integers(0, 256, (3, 32), dtype=np.uint8))) for _ in range(200)]
    return [*((x, y, x ^ y) for x in EDGES for y in EDGES), *drawn]  # type: ignore[list-item]


def doubles_of(points: list[tuple[int, int, int]], launch: object) -> list[list[int]]:
    """Double by ``k_double``. No points of the curve: the formula is one of the field."""
    rows = np.hstack([to_words([point[i] for point in points]) for i in (0, 1, 2, 0)])
    out = np.full_like(rows, 0xA5A5A5A5)
    launch(out, np.ascontiguousarray(rows), np.uint32(32), np.uint32(1), np.uint32(0), np.uint64(len(points)))  # type: ignore[operator]
    return [[value % FIELD_PRIME for value in ints_from_rows(row.reshape(4, 8).view(np.uint8))] for row in out]


@pytest.mark.parametrize("machine", [shim_device, pytest.param(ptx_device, marks=[needs_ptx, pytest.mark.slow])])
def test_field_elements_at_all_edges_of_their_words(machine: object) -> None:
    points = coordinates()
    found = doubles_of(points, lambda *a: machine.run_kernel(CURVE, "k_double", len(points), a))  # type: ignore[attr-defined]
    assert found == [doubled(*point) for point in points]


@pytest.mark.slow
@needs_ptx
@pytest.mark.parametrize(
    ("right", "wrong", "which"),
    [
        ("addc.cc.u32", "add.cc.u32", 5),
        ("addc.u32", "add.s32", 1),
        ("madc.hi.cc.u32", "madc.lo.cc.u32", 3),
        ("madc.lo.cc.u32", "mad.lo.cc.u32", 20),
    ],
)
def test_a_wrong_carry_is_found(right: str, wrong: str, which: int) -> None:
    ptx, points = compiled_ptx(CURVE), coordinates()
    start = ptx.index(".visible .entry k_double(")
    start += (ptx.index("\n}\n", start) - start) // 2  # inside the loop: rows of the other form have code of their own
    for _ in range(which + 1):
        start = ptx.index(f"{right} ", start + 1)
    planted = translate(ptx[:start] + wrong + ptx[start + len(right) :])["k_double"]
    found = doubles_of(points, lambda *a: run(planted, -(-len(points) // 128), a))
    assert found != [doubled(*point) for point in points]


class Planted(ShimDevice):
    """A device on which one kernel gives a wrong bit in its first result."""

    wrong = ""

    def launch(self, shape, kernel, groups, arguments):  # type: ignore[no-untyped-def]
        super().launch(shape, kernel, groups, arguments)
        if kernel == self.wrong:
            arguments[0][0, 0] ^= 1


def test_a_device_that_is_wrong_in_any_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("", *CURVE_KERNELS):
        device = Planted()
        device.wrong = kernel
        monkeypatch.setattr(cuda, "open_devices", lambda device=device: (device,))
        cuda.load.cache_clear()
        if kernel:
            with pytest.raises(BackendUnavailable, match="computes wrong"):
                cuda.load()
        else:
            assert cuda.load().device is device
    cuda.load.cache_clear()


def test_a_failing_device_is_an_error_of_its_own() -> None:
    device = ShimDevice()
    one = CudaCurve(device)
    points, scalars = one.identity(2), scalar_rows(2, 1)
    sums = one.segment_sums(np.zeros(2, np.int32), np.array([0, 2]), 2)

    def fail(*_: object) -> None:
        raise FailingDevice("planted")

    device.launch = fail  # type: ignore[method-assign]
    for work in (lambda: sums(points), lambda: one.mul(points, scalars), lambda: one.add(points, points)):
        with pytest.raises(BackendUnavailable, match="FailingDevice"):
            work()


def test_points_of_another_device_are_refused() -> None:
    one, other = CudaCurve(ShimDevice()), CudaCurve(ShimDevice())
    points = other.identity(1)
    for work in (
        lambda: one.add(points, points),
        lambda: one.to_affine(points),
        lambda: one.concat([points]),
        lambda: one.take(points, np.zeros(1, np.int64)),
        lambda: segment_sums(one, points, np.zeros(1, np.int32), np.array([0, 1])),
        lambda: one.mul(one.host.identity(1), scalar_rows(1, 1)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="another backend"):
            work()


def test_scalars_are_erased_from_device_memory() -> None:
    device = ShimDevice()
    one = CudaCurve(device)
    base = one.from_affine(base_rows())
    table, scalars = one.fixed_base(base), scalar_rows(12, 2)
    table.mul(scalars)
    points = one.from_affine(sample_rows()[:12])
    for work in (
        lambda: table.mul(scalars),
        lambda: one.mul(points, scalars),
        lambda: one.mul_by_each(points, scalars),
    ):
        device.uploaded.clear()
        work()
        held = [array for array in device.uploaded if array.shape[1:] == (8,)]
        assert held and not any(array.any() for array in held)
    assert np.array_equal(scalars, scalar_rows(12, 2)), "the caller's scalars were erased"


def test_digits_less_eight_stand_for_their_scalars() -> None:
    for width, digits in ((1, 3), (3, 7), (31, 63), (32, 64)):
        scalars = scalar_rows(40, width)[:, :width]
        if width < 32:
            scalars = np.concatenate([scalars, np.full((1, width), 0xFF, np.uint8)])
        shifted = ints_from_rows(shifted_digits(scalars, digits).view(np.uint8))
        values = [sum(((each >> 4 * j & 15) - 8) << 4 * j for j in range(digits)) for each in shifted]
        assert values == ints_from_rows(scalars)
        assert max(shifted) < 16**digits


def test_a_column_takes_points_of_its_device_as_they_were_read() -> None:
    one = CudaCurve(ShimDevice())
    read = one.identity(1)
    for points in (one.double(read, 1), CudaCurve(ShimDevice()).identity(1)):
        with pytest.raises(ValueError, match="as they were read"):
            one.column(3).append(points)


def test_auto_leaves_cuda_to_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setitem(registry._LOADERS, "cuda", lambda: pytest.fail("tried"))
    registry.BACKENDS.forget()
    assert registry.open_curve().name != "cuda"
    monkeypatch.setenv(registry.ENVIRONMENT_VARIABLE, "cuda")
    monkeypatch.setitem(registry._LOADERS, "cuda", lambda: registry.load_backend("shim"))
    assert registry.open_curve().name == "cuda"
    registry.BACKENDS.forget()


@needs_ptx
@pytest.mark.slow
def test_the_way_of_a_kernel_and_its_addresses_do_not_depend_on_scalars() -> None:
    """Of what the compiler emits; the control is the kernel of sums, whose order is public."""
    n = 5
    kernels = kernels_of(CURVE)
    assert set(kernels) == set(CURVE_KERNELS)
    one = registry.load_backend("ptx")
    base = one.from_affine(base_rows())
    table, rows = one.multiples_table(base), one.from_affine(sample_rows()[:n]).rows
    out, scratch = np.zeros((n, 32), np.uint32), np.zeros((n * 8, 32), np.uint32)
    scalars = np.zeros((n, 8), np.uint32)
    traces: dict[str, set[int]] = {"k_fixed": set(), "k_mul": set()}
    edges = rows_from_ints([0, GROUP_ORDER - 1, 2**252 - 1], 32)
    for given in (*(np.tile(edge, (n, 1)) for edge in edges), scalar_rows(n, 3), scalar_rows(20, 4)[-n:]):
        scalars[:] = shifted_digits(given, 64)
        traces["k_fixed"].add(run(kernels["k_fixed"], 1, (out, table, scalars, np.uint32(64), np.uint64(n))))
        arguments = out, rows, np.uint32(24), scalars, np.uint64(1), scratch, np.uint64(n)
        traces["k_mul"].add(run(kernels["k_mul"], 1, arguments))
        assert np.array_equal(one.to_affine(one._points(out)), one.to_affine(one.mul(one._points(rows), given)))
    assert [len(found) for found in traces.values()] == [1, 1]

    order, begin = np.arange(n, dtype=np.int32), np.zeros(1, np.int64)
    length, target = np.full(1, n, np.int32), np.zeros(1, np.int32)
    control = set()
    for given in (order, order[::-1].copy()):
        order[:] = given
        control.add(run(kernels["k_sum_read"], 1, (out, rows, order, begin, length, target, np.uint64(1))))
    assert len(control) == 2


def test_all_machine_code_is_in_one_file() -> None:
    source = kernel_source(CURVE.files)
    assert source.isascii() and "#include" not in source and "asm" not in source.split("constexpr u32 READ", 1)[1]


@pytest.mark.parametrize("fraction_bits", [14, pytest.param(40, marks=pytest.mark.slow)])
def test_elgamal_gives_what_it_gives_on_the_cpu(fraction_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows encrypted here are added on both, to the same bytes; the other way round they are opened here."""
    monkeypatch.setattr(decryption, "_LATEST", {})  # tables by a backend's name
    ours, theirs = ToyLevel(fraction_bits), ToyLevel(fraction_bits)
    ours.curve = CudaCurve(ShimDevice())
    rows = ours.encrypt()
    read = [theirs.curve.from_affine(ours.curve.to_affine(column)) for column in rows.columns]
    added = ours.bins(rows).columns, theirs.bins(PointColumns(tuple(read))).columns
    for mine, other in zip(*added, strict=True):
        assert np.array_equal(ours.curve.to_affine(mine), theirs.curve.to_affine(other))

    for answering, opening in ((ours, theirs), (theirs, ours)):
        answer = answering.answer(answering.encrypt())
        columns = (opening.curve.from_affine(answering.curve.to_affine(column)) for column in answer.columns)
        given = PointColumns(tuple(columns)), opening.digits, opening.layout, opening.totals
        for node, sums in enumerate(opening.decryptor.open_level(*given)):
            values = [join(sums.g[:, i]) for i in range(opening.layout.n_slots)]
            assert values == opening.expected(opening.g, node)


def test_a_whole_check_of_a_device_passes_and_shows_nothing() -> None:
    one = CudaCurve(ShimDevice())
    assert first_disagreement(one) is None
    assert repr(one.identity(3)) == "CudaPoints(3 rows)"
