"""The longest messages of a vertical training, from what both sides know: no peer can make a site store more.

Bounds, not exact sizes: they hold for every honest message, and a few of them fit into the memory that the job needs
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from he_processors.curve.interface import AFFINE_BYTES
from he_processors.elgamal.encryption import DigitFormat
from he_processors.fixed_point import PackingLayout
from nvflare_plugins.growth.tree import MAX_BATCH
from nvflare_plugins.kinds.vertical.active.gradient_scale import pair_format
from nvflare_plugins.kinds.vertical.guards import TreeLimits
from nvflare_plugins.kinds.vertical.job import VerticalJob, VerticalProfile
from nvflare_plugins.kinds.vertical.noised import NoisePlan
from nvflare_plugins.kinds.vertical.protocol.conversation import most_slots
from nvflare_plugins.kinds.vertical.protocol.gradient_scheme import GRADIENT_BLOCK_ROWS

INTRODUCTION_BYTES = 1 << 26
"""Of a party's schema, before it is known how many features it has: some 60,000 with the longest names."""
CEILING_BYTES = 1 << 34
_FIELDS_BYTES = 1 << 20  # headers, a public key, counts
_NODE_BYTES = 32  # numbers of a node, and the length of its bits
_CLEAR_PAIR_BYTES = 16
_CATEGORY_BYTES = 2  # the number of a bin that goes right


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """What decides how long messages get.

    Units: bytes per ciphertext; of the clear profile, per pair; of elgamal, per row of points.

    Attributes:
        set_rows: rows of the training set and of further sets.
        pairs_per_ciphertext: bins of a histogram that share one.
        is_streamed: sums come in blocks of features.
    """

    set_rows: tuple[int, ...]
    ciphertext_bytes: int
    pairs_per_ciphertext: int
    trees_per_round: int
    limits: TreeLimits
    is_streamed: bool = True

    @classmethod
    def of(
        cls,
        job: VerticalJob,
        set_rows: Sequence[int],
        trees_per_round: int,
        limits: TreeLimits,
        noised: NoisePlan | None = None,
    ) -> MessageSizes:
        """Derive the sizes of one job.

        Args:
            noised: the plan of a job in the preset noised.

        Raises:
            CapacityExceeded: the job's keys are too short for so many rows.
        """
        n_rows, has_weight = set_rows[0], job.weight is not None
        pairs = pair_format(n_rows, has_weight) if noised is None else noised.pair_format(n_rows)
        if not job.is_encrypted:
            n_words = pairs.n_words
            return cls(tuple(set_rows), _CLEAR_PAIR_BYTES * n_words, 1, trees_per_round, limits, is_streamed=False)
        if job.profile == VerticalProfile.ELGAMAL.value:
            n_points = 1 + DigitFormat.of(job.fraction_bits, n_rows).n_messages
            return cls(tuple(set_rows), n_points * AFFINE_BYTES, 1, trees_per_round, limits)
        packing = PackingLayout.fit(pairs, job.key_bits - 2)
        return cls(tuple(set_rows), -(-job.key_bits // 4), packing.pairs_per_plaintext, trees_per_round, limits)

    def longest_question(self, n_features: int, n_earlier_splits: int, most_categories: int = 0) -> int:
        """Return the longest that a passive party may be sent.

        Args:
            n_features: of the party.
            n_earlier_splits: of the party, in the trees before the training: a question on a data set may name all.
            most_categories: of the party's feature with most, which a split may name.
        """
        gradients = min(self.set_rows[0], GRADIENT_BLOCK_ROWS) * self.ciphertext_bytes + n_features // 8
        partitions = self._level_nodes() * _NODE_BYTES + self.set_rows[0] // 8  # nodes of a level share the rows
        n_queries = n_earlier_splits + self.trees_per_round * self.limits.most_splits(self.set_rows[0])
        decisions = n_queries * (_NODE_BYTES + max(self.set_rows) // 8)
        splits = self._level_nodes() * (_NODE_BYTES + _CATEGORY_BYTES * most_categories)
        return _bounded(max(gradients, partitions, decisions, splits))

    def longest_answer(self, n_bins: Sequence[int], n_earlier_trees: int) -> int:
        """Return the longest that a passive party may send.

        Args:
            n_bins: of each of the party's features.
            n_earlier_trees: before the training.
        """
        n_slots = most_slots(n_bins, self._level_nodes(), self.is_streamed)
        histograms = (n_slots // self.pairs_per_ciphertext + 1) * self.ciphertext_bytes
        n_trees = n_earlier_trees + self.trees_per_round
        # A row is at one node of each tree, so that the bits of a tree are those of all rows at most.
        decisions = n_trees * (max(self.set_rows) // 8)
        n_nodes = self._level_nodes() + n_trees * self.limits.most_splits(self.set_rows[0])
        return _bounded(max(histograms, decisions) + n_nodes * _NODE_BYTES)

    def _level_nodes(self) -> int:
        """Return the nodes that one message is about at most: XGBoost splits so many at a time."""
        return max(min(MAX_BATCH, self.limits.most_splits(self.set_rows[0])), 1)


def _bounded(n_bytes: int) -> int:
    return min(n_bytes + _FIELDS_BYTES, CEILING_BYTES)
