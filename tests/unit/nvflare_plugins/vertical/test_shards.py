"""Vertical training with rows in shards at workers: the same model, bit for bit, for any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from he_processors.ciphertext_wire import secret_key_from_bytes, secret_key_to_bytes
from he_processors.curve.registry import available_backends, open_curve
from he_processors.elgamal.encryption import DigitFormat, generate_elgamal_key
from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.fixed_point import REFUSED, PairFormat
from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinNoise, NodeTotal
from nvflare_plugins.kinds.vertical import histogram_maker as passive
from nvflare_plugins.kinds.vertical import key_owner
from nvflare_plugins.kinds.vertical.histogram_maker import PairsForm, histogram_maker
from nvflare_plugins.workers.workers import Workers
from tests.support.examples import slow
from tests.support.he_toys import toy_paillier
from tests.support.vertical_federation import Joined, central, federate, first_difference
from tests.support.workers_here import workers_here

HAS_CURVE = set(available_backends()) - {"reference"}
SCHEMES = ("plain", "paillier", "elgamal")
needs_curve = pytest.mark.skipif(not HAS_CURVE, reason="the C extension was not built")
LOGISTIC = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 8}


def data(n_rows: int = 300) -> Joined:
    rng = np.random.default_rng(5)
    features = rng.normal(size=(n_rows, 7)).astype(np.float32)
    features[:, 4] = rng.integers(0, 3, n_rows)
    features[rng.random(features.shape) < 0.1] = np.nan
    label = (np.nan_to_num(features[:, 0] + features[:, 3] * features[:, 5]) > 0.2).astype(np.float32)
    return Joined(features, label, (2, 3, 2))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows so small that shards begin and end within them."""
    monkeypatch.setattr(passive, "GRADIENT_BLOCK_ROWS", 128)
    monkeypatch.setattr("nvflare_plugins.kinds.vertical.active_party.GRADIENT_BLOCK_ROWS", 128)
    monkeypatch.setattr(key_owner, "GRADIENT_BLOCK_ROWS", 128)
    monkeypatch.setattr(key_owner, "LEAST_ROWS", 32)
    monkeypatch.setattr(key_owner, "LEAST_SLOTS", 5)
    monkeypatch.setattr(key_owner, "LEAST_CIPHERTEXTS", 1)


@pytest.fixture
def workers() -> Iterator[Callable[[int], Workers]]:
    with ExitStack() as stack:
        yield lambda n: stack.enter_context(workers_here(n))


def owner_of(scheme: str, n_rows: int, tails: tuple[int, int] = (0, 0)):
    """Return the owner in this process, what passive parties need, and the secret that workers get.

    Args: tails: of the noise on sums, which have a coarser format then.
    """
    is_noised = any(tails)
    if scheme == "elgamal":
        points = key_owner.elgamal_owner(DigitFormat.of(14 if is_noised else 40, n_rows, tails))
        return points, points.setup, points.secret_bytes()
    pairs = PairFormat(20, n_rows, 1.0, 0.0, 1.0, tails) if is_noised else key_owner.pair_format(n_rows)
    if scheme == "plain":
        clear = key_owner.ClearGradientOwner(pairs)
        return clear, clear.setup, b""
    key = toy_paillier(512) if is_noised else toy_paillier()
    owner = key_owner.gradient_owner(key, pairs)
    return owner, owner.setup, secret_key_to_bytes(key)


def sharded(scheme: str, n_active: int, n_passive: int, workers):
    def make(n_rows: int):
        owner, setup, secret = owner_of(scheme, n_rows)
        if n_active:
            owner = key_owner.ShardedOwner(owner, workers(n_active), "auto", secret)

        def maker():
            at = workers(n_passive) if n_passive else None
            return histogram_maker(setup, n_rows, at, allow_clear=True, allow_toy_keys=True)

        return owner, maker

    return make


@pytest.mark.parametrize(
    ("scheme", "n_active", "n_passive"),
    [
        ("plain", 0, 2),
        ("paillier", 2, 3),
        pytest.param("elgamal", 0, 2, marks=needs_curve),
        *slow(("plain", 1, 1), ("plain", 2, 3), ("paillier", 1, 1), ("paillier", 0, 2)),
        *(pytest.param("elgamal", *n, marks=[needs_curve, pytest.mark.slow]) for n in ((1, 1), (2, 3))),
    ],
)
def test_the_model_is_the_centralized_one_for_any_number_of_workers(scheme, n_active, n_passive, workers) -> None:
    joined = data()
    params = {**LOGISTIC, "subsample": 0.8, "colsample_bytree": 0.7, "seed": 4}
    outcome = federate(joined, params, 2, sharded(scheme, n_active if scheme != "plain" else 0, n_passive, workers))
    assert first_difference(outcome.merged(), bytes(central(joined, params, 2).save_raw("json"))) == ""


def test_workers_encrypt_even_parts_and_several_each() -> None:
    for n_rows, n_workers, n_parts in ((0, 2, 0), (1, 3, 1), (10, 2, 2), (300, 2, 8), (301, 1, 4), (10_000, 2, 28)):
        bounds = key_owner.part_bounds(n_rows, n_workers)
        lengths = np.diff(bounds)
        assert (bounds[0], bounds[-1], len(lengths)) == (0, n_rows, n_parts)
        assert lengths.size == 0 or 0 < lengths.min() >= lengths.max() - 1


def test_more_workers_than_slots_or_rows_of_a_node_change_nothing(workers) -> None:
    joined = data(40)
    params = {**LOGISTIC, "max_bin": 2, "min_child_weight": 0}
    outcome = federate(joined, params, 2, sharded("paillier", 3, 9, workers))
    assert first_difference(outcome.merged(), bytes(central(joined, params, 2).save_raw("json"))) == ""


def test_weights_whose_sums_take_two_words(workers) -> None:
    joined = data()
    joined.weight = np.random.default_rng(1).uniform(0.5, 2, len(joined.label)).astype(np.float32)

    def make(n_workers: int):
        def scheme(n_rows: int):
            owner = key_owner.ClearGradientOwner(key_owner.pair_format(n_rows, weighted=True))
            at = workers(2 * n_workers) if n_workers else None
            return owner, lambda: histogram_maker(owner.setup, n_rows, at, allow_clear=True)

        return scheme

    joined.widths = (2, 5)
    here, there = (federate(joined, LOGISTIC, 2, make(n_workers)).merged() for n_workers in (0, 1))
    assert first_difference(there, here) == ""


@pytest.mark.parametrize("scheme", [pytest.param(s, marks=needs_curve if s == "elgamal" else ()) for s in SCHEMES])
@pytest.mark.parametrize("n_workers", [1, 3])
def test_noise_is_added_once_where_sums_are_joined(scheme, n_workers, workers) -> None:
    n_rows, tails, rng = 90, (1 << 22, 1 << 21), np.random.default_rng(3)
    layout, nodes = BinLayout((4, 3)), [np.arange(90, dtype=np.int32), np.arange(5, 60, dtype=np.int32)]
    codes = np.stack([rng.integers(0, n + 1, n_rows) for n in layout.n_bins]).astype(np.uint8)
    owner, setup, secret = owner_of(scheme, n_rows, tails)
    if secret:
        owner = key_owner.ShardedOwner(owner, workers(2), "auto", secret)
    maker = histogram_maker(
        setup, n_rows, workers(n_workers), allow_clear=True, allow_toy_keys=True, form=PairsForm(tails)
    )
    g, h = rng.integers(-(1 << 14), 1 << 14, n_rows), rng.integers(0, 1 << 14, n_rows)
    noise = BinNoise(*(rng.integers(-tail, tail, 2 * layout.n_slots) for tail in tails))
    maker.hold(codes)
    maker.begin_tree(n_rows)
    owner.begin_tree(g, h)
    maker.add_gradients(owner.encrypt(g, h))
    sums = maker.sum_bins(codes, layout, nodes, np.arange(2), noise)
    opened = owner.open_sums(sums, layout, [NodeTotal.of_rows(g[rows], h[rows]) for rows in nodes])
    exact = [
        np.concatenate([np.bincount(codes[f, rows], of[rows], n + 1) for f, n in enumerate(layout.n_bins)])
        for rows in nodes
        for of in (g, h)
    ]
    found = np.concatenate([np.ravel(part) for one in opened for part in (one.g, one.h)])
    drawn = np.stack([noise.g.reshape(2, -1), noise.h.reshape(2, -1)], axis=1).reshape(-1)
    assert np.array_equal(found, np.concatenate(exact).astype(np.int64) + drawn)


@pytest.mark.parametrize("scheme", ["paillier", pytest.param("elgamal", marks=needs_curve)])
@pytest.mark.parametrize(("n_nodes", "n_features"), [(1, 5), (3, 2), (7, 1)])
def test_workers_open_a_share_each_as_one_process_does_and_refuse_alike(scheme, n_nodes, n_features, workers) -> None:
    n_rows, rng = 80, np.random.default_rng(2)
    layout = BinLayout(tuple(range(2, 2 + n_features)))
    nodes = [np.flatnonzero(rng.random(n_rows) < 0.6).astype(np.int32) for _ in range(n_nodes)]
    codes = np.stack([rng.integers(0, n + 1, n_rows) for n in layout.n_bins]).astype(np.uint8)
    owner, setup, secret = owner_of(scheme, n_rows)
    g, h = rng.integers(-(1 << 14), 1 << 14, n_rows), rng.integers(0, 1 << 14, n_rows)
    maker = histogram_maker(setup, n_rows, allow_toy_keys=True)
    maker.begin_tree(n_rows)
    maker.add_gradients(owner.encrypt(g, h))
    sums = maker.sum_bins(codes, layout, nodes)
    totals = [NodeTotal.of_rows(g[rows], h[rows]) for rows in nodes]
    here = owner.open_sums(sums, layout, totals)
    at = workers(3)
    spread = key_owner.ShardedOwner(owner, at, "auto", secret)
    calls = [work.calls for work in at.work]
    there = spread.open_sums(sums, layout, totals)
    assert sum(work.calls for work in at.work) > sum(calls), "the control: workers were asked"
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one.g, other.g) and np.array_equal(one.h, other.h) and one.g.shape == other.g.shape
    wrong = [NodeTotal(one.n_rows, one.g + 1, one.h, (one.lower[0] + 1, one.lower[1])) for one in totals]
    with pytest.raises(ProtocolError, match=f"^{REFUSED}$"):
        spread.open_sums(sums, layout, wrong)


def test_fewer_rows_than_workers_are_refused_and_the_worker_named(workers) -> None:
    _, setup, _ = owner_of("paillier", 3)
    with pytest.raises(ConfigurationError, match="worker 0 would have none"):
        histogram_maker(setup, 3, workers(4), allow_toy_keys=True)


@pytest.mark.parametrize("scheme", ["plain", "paillier", pytest.param("elgamal", marks=needs_curve)])
def test_gradients_that_are_none_are_refused_at_the_next_sums(scheme, workers) -> None:
    n_rows = 100
    owner, setup, _ = owner_of(scheme, n_rows)
    maker = histogram_maker(setup, n_rows, workers(2), allow_clear=True, allow_toy_keys=True)
    codes = np.zeros((1, n_rows), np.uint8)
    maker.hold(codes)
    maker.begin_tree(n_rows)
    good = owner.encrypt(np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64))
    maker.add_gradients(good[:-64])
    with pytest.raises(ProtocolError):
        maker.sum_bins(codes, BinLayout((2,)), [np.arange(n_rows, dtype=np.int32)], np.arange(1))


@needs_curve
def test_a_key_of_points_comes_back_with_its_public_half() -> None:
    key = generate_elgamal_key(2, open_curve("auto"))
    written = secret_key_to_bytes(key)
    assert secret_key_from_bytes(written, key.public_key) == key
    with pytest.raises(ProtocolError, match="no secret key"):
        secret_key_from_bytes(written)


def test_a_key_comes_back_from_its_bytes_and_damage_is_refused() -> None:
    key = toy_paillier()
    written = secret_key_to_bytes(key)
    assert secret_key_from_bytes(written) == key
    for damaged in (
        b"",
        written[:3],
        written[:-1],
        written + b"\0",
        b"x" + written[1:],
        written[:5] + b"\7" + written[6:],
    ):
        with pytest.raises(ProtocolError, match="no secret key") as error:
            secret_key_from_bytes(damaged)
        assert str(key.p)[:6] not in str(error.value)
