"""The blocks of features in which sums travel: each is sent as soon as it is done.

Both sides derive them from what both know, so that none is named on the way. A passive party holds the sums of one or
two blocks and not those of a level, and the active party opens one block while the next is added up.
"""

from __future__ import annotations

from collections.abc import Sequence

from he_processors.histogram.bins import BinLayout

MOST_SLOTS = (
    1 << 15
)  # of all nodes in a block: some 30 MB of ciphertexts of Paillier-3072, and thrice that while packed
MOST_ADDITIONS = 1 << 20  # to a block: about a second of Paillier, a tenth of one of elgamal
_STEP = 2  # features that can share cells (histogram/planner.py)


def feature_blocks(layout: BinLayout, n_nodes: int, n_rows: int, is_streamed: bool = True) -> tuple[slice, ...]:
    """Divide the features of a tree.

    Args:
        layout: of the features that the tree uses.
        n_nodes: whose sums are asked for.
        n_rows: most rows that these nodes hold together.
        is_streamed: False for a scheme whose sums cost less than dividing them.

    Returns:
        Features by position in the layout, in order; each block holds two, more where they fit, or the last one.
    """
    n_features, starts = layout.n_features, layout.starts
    if not is_streamed:
        return (slice(0, n_features),)
    blocks, start = [], 0
    while start < n_features:
        end = start + _STEP
        while end < n_features:
            further = min(end + _STEP, n_features)
            n_slots = n_nodes * int(starts[further] - starts[start])
            if n_slots > MOST_SLOTS or n_rows * (further - start) > MOST_ADDITIONS:
                break
            end = further
        blocks.append(slice(start, min(end, n_features)))
        start = end
    return tuple(blocks)


def layout_of(layout: BinLayout, block: slice) -> BinLayout:
    """Return the layout of a block's features."""
    return BinLayout(layout.n_bins[block])


def most_slots(n_bins: Sequence[int], n_nodes: int, is_streamed: bool = True) -> int:
    """Return the most slots of one block, whichever of the features a tree uses.

    Args:
        n_bins: of each of the party's features.
        n_nodes: whose sums are asked for at most.
    """
    slots = sorted((n + 1 for n in n_bins), reverse=True)  # one more for rows without a value
    if not is_streamed:
        return n_nodes * sum(slots)
    return n_nodes * min(sum(slots), max(sum(slots[:_STEP]), MOST_SLOTS // n_nodes))
