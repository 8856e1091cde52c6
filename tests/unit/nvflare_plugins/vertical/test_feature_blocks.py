"""Blocks of features: all features once and in order, no block too large, and both sides find the same ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from he_processors.histogram.planner import BinLayout
from nvflare_plugins.kinds.vertical.messages import MOST_ADDITIONS, MOST_SLOTS, feature_blocks, layout_of, most_slots

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
