"""Protected sums over three sites: exactness, scales that grow, and what must not happen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from he_processors.errors import AuthenticationError, CapacityExceeded, ProtocolError
from he_processors.field61 import MODULUS
from he_processors.fixed_point import Grid, Grids, exponent_of
from he_processors.masks import PairwiseMasks
from he_processors.sum_tags import SumTags
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.wire import profiles
from nvflare_plugins.wire.aggregation import Aggregator
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Codec, FrameType, Kind, Phase, TrainingStep, unpack
from nvflare_plugins.wire.sums import Family, ProtectedSums, metric_quantity
from tests.support.examples import examples
from tests.support.federation import DirectTransport, run_in_threads

SITES = ("a", "b", "c")
ATTEMPT = bytes(16)


def lattice(scheme: str):
    """A key that all sites share."""
    if scheme == "bfv":
        from he_processors.bfv import BfvProcessor as Processor
    else:
        from he_processors.ckks import CkksProcessor as Processor
    return Processor(Processor.generate(len(SITES)))


def federate(work, plain: bool = False, finest: int | None = None, scheme: str | None = None, short: bool = False):
    key = lattice(scheme) if scheme else None
    aggregator = Aggregator(SITES, ATTEMPT, 10.0)
    sent: list[tuple[str, bytes]] = []

    def take_part(site: str, way: DirectTransport) -> object:
        rank, channel = SITES.index(site), Channel(site, SITES, "job", ATTEMPT, way, 10.0)
        channel.moment = TrainingStep(Phase.UPDATE, 0)
        secrets = {peer: bytes([min(rank, peer), max(rank, peer)]) * 16 for peer in range(3) if peer != rank}
        keys = (b"session-" * 4, rank, secrets, b"g" * 32)
        processor = profiles.PlainSums() if plain else profiles.MaskedSums(PairwiseMasks(*keys))
        if key is not None:
            wrapper, codec = (profiles.BfvSums, Codec.BFV) if scheme == "bfv" else (profiles.CkksSums, Codec.CKKS)
            processor = wrapper(key, PairwiseMasks(b"lattice-" * 4, rank, secrets, b"g" * 32))
            channel.gather(Kind.HE_PUBLIC, key.public_parameters() if rank == 0 else b"", codec)
        pairs = None
        if short:
            pairs = profiles.ShortPlainSums() if plain else profiles.ShortMaskedSums(PairwiseMasks(*keys))
        sums = ProtectedSums(channel, processor, SumTags(*keys), finest, pairs=pairs)
        return work(sums, rank)

    results = run_in_threads(aggregator, SITES, take_part, frames=sent)
    wires = {site: SimpleNamespace(frames=[unpack(data) for of, data in sent if of == site]) for site in SITES}
    return results, wires


def test_masked_sums_are_exact_on_the_grid_and_equal_at_all_sites():
    values = [np.random.default_rng(rank).normal(size=1000).astype(np.float32).astype(np.float64) for rank in range(3)]

    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: 16.0, Family.HESSIANS: 16.0})
        return sums.sum(Kind.HISTOGRAM, values[rank])

    masked, _ = federate(work)
    plain, _ = federate(work, plain=True)
    grid = Grid.for_sum(4, 3, 59)
    exact = np.ldexp(sum(np.rint(np.ldexp(v, -grid.exponent)) for v in values), grid.exponent)
    for results in (masked, plain):
        for site in SITES:
            assert np.array_equal(results[site], exact)


def test_no_two_messages_of_a_site_repeat_a_keystream():
    """Equal values sent twice, under equal kinds and moments, must differ on the wire in every word."""

    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: 1.0, Family.HESSIANS: 1.0})
        for _ in range(2):
            sums.sum(Kind.HISTOGRAM, np.zeros(64))

    _, wires = federate(work)
    for wire in wires.values():
        first, second = (np.frombuffer(f.payload, "<u8") for f in wire.frames if f.kind is Kind.HISTOGRAM)
        assert not (first == second).any()


def test_the_agreed_scale_is_that_of_the_largest_site_and_found_under_masks():
    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: [0.3, 1000.0, 2.0][rank], Family.LABELS: 1.0})
        return sums.scale_of(Family.GRADIENTS).bound_exponent, sums.scale_of(Family.LABELS).bound_exponent

    results, wires = federate(work)
    assert set(results.values()) == {(10, 0)}
    assert all(frame.codec is Codec.MASKED for wire in wires.values() for frame in wire.frames)


def test_a_value_that_outgrows_its_scale_changes_the_scale_and_is_never_summed_partly():
    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: 1.0, Family.HESSIANS: 1.0})
        total = sums.sum(Kind.HISTOGRAM, np.array([0.5, 5000.0 if rank == 1 else 0.25])).tolist()
        assert sums.scale_of(Family.GRADIENTS).bound_exponent == 0, "only the quantity that outgrew its scale changes"
        return total

    results, wires = federate(work)
    assert all(result == [1.5, 5000.5] for result in results.values())
    kinds = [(frame.type, frame.kind, frame.counter) for frame in wires["b"].frames]
    assert kinds == [
        (FrameType.CONTRIBUTION, Kind.SCALE, 0),
        (FrameType.RESCALE, Kind.HISTOGRAM, 1),
        (FrameType.CONTRIBUTION, Kind.SCALE, 2),
        (FrameType.CONTRIBUTION, Kind.HISTOGRAM, 3),
    ]
    assert [f.payload for f in wires["b"].frames if f.type is FrameType.RESCALE] == [b""]


def ask_for_another_scale(data: bytes) -> bytes:
    return replace(unpack(data), type=FrameType.RESCALE, payload=b"").pack()


@pytest.mark.parametrize("what", ["scale", "counts"])
def test_a_new_scale_for_what_has_none_is_refused_by_name(what):
    class Lying(DirectTransport):
        def exchange(self, data: bytes, timeout_s: float) -> bytes:
            return ask_for_another_scale(super().exchange(data, timeout_s))

    channel = Channel("a", ("a",), "job", ATTEMPT, Lying(Aggregator(("a",), ATTEMPT, 10.0), "a"), 10.0)
    keys = (b"s" * 32, 0, {}, b"g" * 32)
    sums = ProtectedSums(channel, profiles.MaskedSums(PairwiseMasks(*keys)), SumTags(*keys))
    with pytest.raises(ProtocolError, match="which has none"):
        if what == "scale":
            sums.agree_scales({Family.GRADIENTS: 1.0})
        else:
            sums.sum_counts(Kind.CUT_COUNTS, np.array([1], dtype=np.int64))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stop_the_job_without_naming_them(bad):
    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.LABELS: 1.0})
        return sums.sum(Kind.LABEL_MEAN, np.array([bad if rank == 2 else 1.0]))

    results, _ = federate(work)
    assert isinstance(results["c"], CapacityExceeded)
    assert isinstance(results["a"], JobAborted)


def test_counts_are_exact_and_bounded():
    def work(sums: ProtectedSums, rank: int):
        return sums.sum_counts(Kind.ROW_COUNT, np.array([2**40 + rank, -5], dtype=np.int64)).tolist()

    results, _ = federate(work)
    assert all(result == [3 * 2**40 + 3, -15] for result in results.values())

    def too_large(sums: ProtectedSums, rank: int):
        return sums.sum_counts(Kind.ROW_COUNT, np.array([2**60], dtype=np.int64))

    results, _ = federate(too_large)
    assert isinstance(results["a"], CapacityExceeded)


def test_a_server_that_changes_the_secure_maximum_is_noticed():
    class Lying(DirectTransport):
        def exchange(self, data: bytes, timeout_s: float) -> bytes:
            answer = bytearray(super().exchange(data, timeout_s))
            answer[-24] ^= 1  # the highest threshold, which no honest site reaches
            return bytes(answer)

    aggregator = Aggregator(("a",), ATTEMPT, 10.0)
    channel = Channel("a", ("a",), "job", ATTEMPT, Lying(aggregator, "a"), 10.0)
    keys = (b"s" * 32, 0, {}, b"g" * 32)
    sums = ProtectedSums(channel, profiles.MaskedSums(PairwiseMasks(*keys)), SumTags(*keys))
    with pytest.raises(AuthenticationError, match=r"SCALE \(setup:0\).*the server or a site"):
        sums.agree_scales({Family.GRADIENTS: 1.0})


@given(
    st.lists(st.floats(-1024, 1024, allow_nan=False), min_size=1, max_size=20), st.integers(1, 50), st.integers(30, 59)
)
@settings(max_examples=examples(200))
def test_grid_round_trips_within_half_a_step_and_sums_stay_in_capacity(values, n_summands, capacity_bits):
    grid = Grid.for_sum(10, n_summands, capacity_bits)
    integers = grid.encode(np.array(values))
    assert np.abs(grid.decode(integers) - values).max() <= 2.0 ** (grid.exponent - 1)
    assert n_summands * int(np.abs(integers).max()) <= 2**capacity_bits


@given(st.integers(0, 2**32 - 1), st.integers(1, 400))
@settings(max_examples=50)
def test_runs_of_neighbours_are_off_by_less_than_a_step(seed, n_bins):
    values = np.random.default_rng(seed).normal(size=2 * n_bins)
    grid = Grid(-8, 4)
    integers = Grids((grid, grid)).encode_running(values)
    assert np.abs(integers - np.ldexp(values, 8)).max() <= 1.5
    for component in (0, 1):
        exact = np.concatenate([[0], np.cumsum(np.ldexp(values[component::2], 8))])
        carried = np.concatenate([[0], np.cumsum(integers[component::2])])
        errors = carried - exact
        assert np.abs(errors).max() <= 0.5 + 1e-9, "sums from the start"
        assert errors.max() - errors.min() <= 1 + 1e-9, "sums over any run"


def test_a_tighter_scale_follows_from_what_all_know_and_gives_way_when_it_is_too_small():
    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: 1000.0, Family.HESSIANS: 1.0})
        sums.tighten(Family.GRADIENTS, 3.0)
        tightened = sums.scale_of(Family.GRADIENTS).bound_exponent
        sums.tighten(Family.GRADIENTS, 1e9)
        total = sums.sum(Kind.HISTOGRAM, np.array([50.0 if rank == 0 else 0.5, 0.25]))
        return tightened, sums.scale_of(Family.GRADIENTS).bound_exponent, total.tolist()

    results, _ = federate(work)
    assert set(map(str, results.values())) == {str((2, 9, [51.0, 0.75]))}


def test_grid_refuses_what_does_not_fit():
    for value in (1.0000001, -2.0, np.nan, np.inf):
        with pytest.raises(CapacityExceeded):
            Grid(-40, 0).encode(np.array([0.0, value]))


@pytest.mark.parametrize(("bound", "exponent"), [(1.0, 0), (1.0000001, 1), (0.5, -1), (3.0, 2), (0.0, -1022)])
def test_exponent_of(bound, exponent):
    assert exponent_of(bound) == exponent


def test_gradients_and_hessians_keep_their_own_digits():
    """Incomes as labels: gradients near 1e12 beside counts of rows."""
    pairs = [np.array([1e12 / 3, 100.0 + rank, -1e9 / 7, 3.0]) for rank in range(3)]

    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: 1e18, Family.HESSIANS: 1000.0})
        return sums.sum(Kind.HISTOGRAM, pairs[rank])

    results, _ = federate(work)
    assert results["a"][[1, 3]].tolist() == [303.0, 9.0]
    assert results["a"][[0, 2]] == pytest.approx([1e12, -3e9 / 7], abs=16.0)  # two steps of 2^(60 + 2 - 59)


def test_a_metrics_numerator_takes_no_digits_from_its_count():
    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({metric_quantity("rmse"): 1e18, metric_quantity("mae"): 1e3, Family.WEIGHTS: 1000.0})
        return [
            sums.sum(Kind.METRIC, np.array([x, 100.0 + rank]), name).tolist()
            for name, x in (("rmse", 1e17 / 3), ("mae", 0.1))
        ]

    results, _ = federate(work)
    assert results["b"][0] == [pytest.approx(1e17), 303.0] and results["b"][1] == [pytest.approx(0.3, rel=1e-12), 303.0]


@pytest.mark.parametrize(("bad", "seen"), [(np.inf, np.inf), (np.nan, np.nan)])
def test_a_metric_that_is_no_number_at_one_site_is_so_for_all_and_the_site_stays_hidden(bad, seen):
    """Mape of a row with label 0: XGBoost gives infinity on the pooled rows as well."""

    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({metric_quantity("mape"): 8.0, Family.WEIGHTS: 8.0})
        return [sums.sum(Kind.METRIC, np.array([bad if rank in where else 1.0, 2.0]), "mape") for where in ((2,), ())]

    results, wires = federate(work)
    for site in SITES:
        assert np.array_equal(results[site], [[seen, 6.0], [3.0, 6.0]], equal_nan=True)
    for wire in wires.values():
        frames = [frame for frame in wire.frames if frame.kind is Kind.METRIC]
        assert {(frame.type, len(frame.payload), frame.tail) for frame in frames} == {(FrameType.CONTRIBUTION, 48, 32)}


METRIC_SCALES = {metric_quantity("rmse"): 8.0, metric_quantity("auc"): 8.0, Family.WEIGHTS: 8.0}


@pytest.mark.parametrize("plain", [False, True])
def test_metrics_beside_a_root_are_those_that_are_summed_alone(plain):
    """Negative, infinite, of no number, and each on a grid of its own; the root's integers are as they were."""
    parts = [
        [("rmse", np.array([x, 2.0])), ("auc", np.array([-x, 1.0 / 3])), ("rmse", np.array([bad, 1.0]))]
        for x, bad in ((0.1, 1.0), (-7.9, np.inf), (1e-9, 1.0))
    ]
    root = [np.array([rank - (1 << 57), 5, -rank], dtype=np.int64) for rank in range(3)]

    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales(METRIC_SCALES)
        assert sums.takes_metrics
        together = sums.add_with_metrics(root[rank], 3, wide=True, parts=parts[rank])
        return together, sums.add(Kind.HISTOGRAM, root[rank], 3, wide=True), sums.sum_metrics(parts[rank])

    results, wires = federate(work, plain=plain)
    for site in SITES:
        (added, metrics), alone, metrics_alone = results[site]
        assert added.tolist() == alone.tolist() == [3 - 3 * (1 << 57), 15, -3]
        assert [m.tolist() for m in metrics] == [m.tolist() for m in metrics_alone]
        assert metrics[2][0] == np.inf
    [frame] = [frame for frame in wires["a"].frames if frame.kind is Kind.HISTOGRAM_METRIC]
    assert (frame.n_values, frame.tail) == (3, 8 * (6 + 6 + (0 if plain else 2))), "parts, flags, tags"
    numbers = np.frombuffer(frame.payload, "<u8")[3:9]
    assert not set(numbers.tolist()) & set(range(1 << 20)), "masked, under plain too"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("part", [(1 << 59) + 1, -(1 << 60) + 1])
def test_a_metric_beside_a_root_that_is_beyond_any_sum_is_refused(plain, part):
    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales(METRIC_SCALES)
        if rank != 1:
            return sums.add_with_metrics(np.zeros(2, np.int64), 2, wide=True, parts=[("auc", np.zeros(2))])
        residues = np.array([part % MODULUS, 0, 0, 0], dtype=np.uint64)
        return sums._sum_integers(Kind.HISTOGRAM_METRIC, np.zeros(2, np.int64), 2, residues, wide=True)

    results, _ = federate(work, plain=plain)
    for site in ("a", "c"):
        assert isinstance(results[site], AuthenticationError) and "not the sum" in str(results[site])


@pytest.mark.parametrize("scheme", ["bfv", "ckks"])
def test_metrics_are_taken_along_where_masks_protect_them_as_the_profile_does(scheme):
    results, _ = federate(lambda sums, rank: sums.takes_metrics, scheme=scheme)
    assert set(results.values()) == {False}


@pytest.mark.parametrize("scheme", ["bfv", "ckks"])
def test_wide_sums_under_lattice_schemes_are_those_of_masks(scheme):
    values = [np.random.default_rng(rank).normal(size=60) * 10.0 ** np.arange(0, 12, 0.2) for rank in range(3)]

    def work(sums: ProtectedSums, rank: int):
        sums.agree_scales({Family.GRADIENTS: 2.0**43, Family.HESSIANS: 2.0**43})
        return sums.sum(Kind.HISTOGRAM, values[rank])

    masked, _ = federate(work)
    wide, _ = federate(work, scheme=scheme)
    for site in SITES:
        assert np.array_equal(wide[site], masked[site])


def test_narrow_pairs_are_used_only_where_their_step_will_do():
    def work(sums: ProtectedSums, rank: int):
        steps = []
        for bound in (2.0**10, 2.0**30):
            sums.agree_scales({Family.GRADIENTS: bound, Family.HESSIANS: bound}, coarsest_pairs=2.0**-24)
            steps.append(sums.scale_of(Family.HESSIANS).exponent)
        return steps

    results, _ = federate(work, scheme="ckks")
    assert results["a"] == [10 + 2 - 44, 30 + 2 - 59]


def test_halves_of_masked_words_add_up_for_any_number_of_sites():
    words = np.random.default_rng(0).integers(0, 2**64, size=(1000, 7), dtype=np.uint64)
    limbs = sum(profiles._split(w) for w in words)
    assert np.array_equal(profiles._join(limbs), words.sum(axis=0, dtype=np.uint64))


@pytest.mark.parametrize("plain", [True, False])
def test_pairs_that_are_not_wide_travel_in_short_words_and_all_else_in_long_ones(plain):
    most = (1 << 31) - 1
    values = np.array([[most, -most - 1, 5, -7], [0, 0, most, -9], [0, 0, -6, 1]], dtype=np.int64)

    def work(sums: ProtectedSums, rank: int):
        assert sums.pair_capacity_bits == 31
        short = sums.add(Kind.HISTOGRAM, values[rank], 4, wide=False)
        wide = sums.add(Kind.RESIDUAL_SCALE, values[rank] << 20, 4, wide=True)
        return short, wide, sums.sum_counts(Kind.CUT_COUNTS, values[rank])

    results, wires = federate(work, plain, short=True)
    for found in results.values():
        short, wide, counts = found
        assert short.dtype == np.int64 and np.array_equal(short, values.sum(axis=0))
        assert np.array_equal(wide, short << 20) and np.array_equal(counts, short)
    tail = 0 if plain else 16
    for wire in wires.values():
        sent = [(frame.kind, frame.codec, len(frame.payload), frame.tail) for frame in wire.frames]
        of_short, of_long = (Codec.PLAIN_32, Codec.PLAIN) if plain else (Codec.MASKED_32, Codec.MASKED)
        assert sent == [
            (Kind.HISTOGRAM, of_short, 4 * 4 + tail, tail),
            (Kind.RESIDUAL_SCALE, of_long, 8 * 4 + tail, tail),
            (Kind.CUT_COUNTS, of_long, 8 * 4 + tail, tail),
        ]


def test_a_sum_that_would_wrap_in_a_short_word_is_never_used():
    """Grids leave room for all rows (growth/site_sums.py); were one to leave too little, the tags would say so."""

    def work(sums: ProtectedSums, rank: int):
        return sums.add(Kind.HISTOGRAM, np.array([1 << 30, 3], dtype=np.int64), 2, wide=False)

    results, _ = federate(work, short=True)
    assert all("is not the sum of what the sites sent" in str(error) for error in results.values())


def test_a_site_of_another_width_is_named_and_nothing_is_summed():
    def work(sums: ProtectedSums, rank: int):
        return sums.add(Kind.HISTOGRAM, np.arange(4, dtype=np.int64), 4, wide=rank == 1)

    results, _ = federate(work, short=True)
    assert len({str(error) for error in results.values()}) == 1
    text = str(results["a"])
    assert "no longer in step" in text and "MASKED_32" in text and "MASKED," in text
