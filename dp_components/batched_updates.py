"""Batched updates (A2): B trees are fitted to the same gradients, and their outputs are averaged."""

from __future__ import annotations

# Batched updates (A2): B trees are fitted to the same gradients, and their outputs are averaged.
#
# Between boosting (B = 1) and a random forest's averaging (B = T). Each tree of a batch is a query of its own; fewer
# rounds of communication are the gain, and less of the noise comes back through the gradients.


def batch_sizes(n_trees: int, batch_size: int) -> list[int]:
    """Divide the trees into batches; the last one holds what is left.

    Privacy: no effect; every tree remains one query.

    Raises:
        ValueError: unless 1 <= batch_size.
    Reference: Maddock et al., section 5.2.
    """
    if batch_size < 1 or n_trees < 1:
        raise ValueError("at least one tree, and one tree per batch")
    full, rest = divmod(n_trees, batch_size)
    return [batch_size] * full + [rest] * bool(rest)


def tree_scale(learning_rate: float, batch_size: int) -> float:
    """Return what each tree's weight is multiplied with: the batch answers with its mean, times the learning rate."""
    return learning_rate / batch_size
