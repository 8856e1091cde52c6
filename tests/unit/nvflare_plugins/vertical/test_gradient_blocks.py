"""Gradients of a tree in blocks: the model does not change, and blocks that are missing or too many are refused."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from he_processors.errors import ProtocolError
from he_processors.fixed_point import PairFormat
from he_processors.histogram.planner import BinLayout
from nvflare_plugins.kinds.vertical import active_party as active
from nvflare_plugins.kinds.vertical import histogram_maker, key_owner
from nvflare_plugins.kinds.vertical import histogram_maker as makers
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, gradient_owner
from nvflare_plugins.kinds.vertical.messages import (
    MOST_ADDITIONS,
    MOST_SLOTS,
    TrainingSetup,
    feature_blocks,
    layout_of,
    most_slots,
)
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.he_toys import toy_paillier
from tests.support.vertical_federation import (
    Joined,
    central,
    federate,
    first_difference,
    make_clear,
    make_elgamal,
    make_paillier,
)

PARAMS = {"objective": "binary:logistic", "max_depth": 3, "max_bin": 8}
N_ROWS = 150


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (active, makers):
        monkeypatch.setattr(module, "GRADIENT_BLOCK_ROWS", 40)
    monkeypatch.setattr(key_owner, "_BLOCK_BINS", 1)  # each node's sums are opened by themselves


# Sums of so many rows leave 64 bits; what the parties have are a few of them.
LARGE = PairFormat(40, 11_000_000, g_bound=1.0, h_low=0.0, h_high=1.0)


def clear_in_two_words(n_rows: int):
    return ClearGradientOwner(LARGE), lambda: ClearHistogramMaker(n_words=LARGE.n_words)


def encrypted_in_two_words(n_rows: int):
    key = toy_paillier()
    return gradient_owner(key, LARGE), lambda: histogram_maker.HistogramMaker(
        histogram_maker.CiphertextPairs(key.public_key, LARGE)
    )


SCHEMES = {
    "clear": make_clear,
    "clear, two words": clear_in_two_words,
    "paillier": make_paillier,
    "paillier, two words": encrypted_in_two_words,
    "elgamal": make_elgamal,
}


def data() -> Joined:
    rng = np.random.default_rng(3)
    features = rng.normal(size=(N_ROWS, 4)).astype(np.float32)
    label = (features[:, 0] + features[:, 3] + rng.normal(size=N_ROWS) * 0.3 > 0).astype(np.float32)
    return Joined(features, label, (1, 2, 1))


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_model_is_the_centralized_one(small_blocks, kind):
    joined = data()
    outcome = federate(joined, PARAMS, 2, scheme=SCHEMES[kind])
    assert first_difference(outcome.merged(), central(joined, PARAMS, 2).save_raw("json")) == ""


@pytest.mark.parametrize("kind", SCHEMES)
def test_missing_surplus_and_wrong_blocks_are_refused(small_blocks, kind):
    owner, make = SCHEMES[kind](N_ROWS)
    maker = make()
    ones = np.ones(N_ROWS, dtype=np.int64)
    blocks = [owner.encrypt(ones[s : s + 40], ones[s : s + 40]) for s in range(0, N_ROWS, 40)]
    codes = np.zeros((1, N_ROWS), dtype=np.uint8)
    layout, rows = makers.BinLayout((1,)), [np.arange(N_ROWS, dtype=np.int32)]
    with pytest.raises(ProtocolError):
        maker.add_gradients(blocks[0])  # no tree has begun
    maker.begin_tree(N_ROWS)
    for block in blocks[:3]:
        maker.add_gradients(block)
    with pytest.raises(ProtocolError):
        maker.sum_bins(codes, layout, rows)
    with pytest.raises(ProtocolError):
        maker.add_gradients(blocks[0])  # a whole block where the last one is shorter
    maker.add_gradients(blocks[3])
    maker.sum_bins(codes, layout, rows)
    with pytest.raises(ProtocolError):
        maker.add_gradients(blocks[3])


@pytest.mark.parametrize("pair", [(1, 1), (-(1 << 40), 0), (1 << 40, 1 << 40)])
@pytest.mark.parametrize("beyond", [(1 << 40) + 1, -(1 << 40) - 1, (1 << 63) - 1, -(1 << 63)])
def test_pairs_in_the_clear_beyond_their_format_are_refused_where_they_come_in(pair, beyond):
    setup = TrainingSetup(histogram_maker.CLEAR_CODE, 40, 3, b"")
    for column in (0, 1):
        wrong = np.array([pair, pair, pair], dtype="<i8")
        wrong[1, column] = beyond
        for data, refused in ((wrong, True), (np.array([pair] * 3, dtype="<i8"), False)):
            maker = histogram_maker.histogram_maker(setup, 3, allow_clear=True)
            shard = histogram_maker.announced_pairs(setup)
            maker.begin_tree(3)
            shard.begin(3)
            for take in (
                lambda maker=maker, data=data: maker.add_gradients(data.tobytes()),
                lambda shard=shard, data=data: shard.take(memoryview(data.tobytes()), 3, slice(0, 3)),
            ):
                with pytest.raises(ProtocolError, match=r"fraction_bits 40.*Remedy") if refused else nullcontext():
                    take()


class Masks:
    """Counts what is made ahead."""

    def __init__(self):
        self.filled: list[int] = []

    def fill(self, n: int) -> None:
        self.filled.append(n)


def test_masks_are_made_ahead_as_the_last_tree_took_them_and_none_for_a_tree_that_never_comes():
    masks = Masks()
    stock = histogram_maker.MaskPool(masks, most=100, at_once=20)

    def make(is_last: bool = False) -> list[int]:
        masks.filled.clear()
        while stock.prepare(is_last=is_last):
            pass
        return list(masks.filled)

    stock.begin_tree()
    assert make() == []  # nothing is known of how many it takes
    stock.use(30)
    assert make() == [20, 30]
    stock.use(20)
    assert make() == [30, 50]
    stock.begin_tree()
    assert make() == []  # they are ready
    stock.use(50)
    stock.use(300)
    assert make() == [20, 40, 60, 80, 100]  # no more than fit
    stock.begin_tree()
    stock.use(80)
    assert make(is_last=True) == [40, 60, 80, 100]
    stock.use(290)
    assert make(is_last=True) == []


# -- blocks of features ------------------------------------------------------------------------------------------------


BINS = st.lists(st.sampled_from([1, 32, 255, 4000, 60_000]), min_size=1, max_size=60)


@given(BINS, st.integers(1, 256), st.integers(1, 5_000_000))
def test_blocks_hold_all_features_once_and_little_at_a_time(n_bins, n_nodes, n_rows):
    layout = BinLayout(tuple(n_bins))
    blocks = feature_blocks(layout, n_nodes, n_rows)
    assert [f for block in blocks for f in range(layout.n_features)[block]] == list(range(layout.n_features))
    for block in blocks:
        n_features, n_slots = block.stop - block.start, n_nodes * layout_of(layout, block).n_slots
        assert block.start % 2 == 0  # pairs of features stay together
        assert n_features <= 2 or (n_slots <= MOST_SLOTS and n_rows * n_features <= MOST_ADDITIONS)
    assert feature_blocks(layout, n_nodes, n_rows, is_streamed=False) == (slice(0, layout.n_features),)


@given(BINS, st.integers(1, 256), st.data())
def test_no_block_is_larger_than_its_bound_whatever_features_a_tree_uses(n_bins, n_nodes, data):
    chosen = data.draw(st.lists(st.sampled_from(range(len(n_bins))), min_size=1, unique=True).map(sorted))
    layout = BinLayout(tuple(n_bins[f] for f in chosen))
    nodes = data.draw(st.integers(1, n_nodes))
    largest = max(nodes * layout_of(layout, block).n_slots for block in feature_blocks(layout, nodes, 1))
    assert largest <= most_slots(n_bins, n_nodes)
    assert nodes * layout.n_slots <= most_slots(n_bins, n_nodes, is_streamed=False)
