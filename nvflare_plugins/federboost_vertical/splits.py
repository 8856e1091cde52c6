"""What the active party tells each passive party after training: which splits of the model are its own.

A passive party turns them into a private table with true thresholds, in the same form as in exact vertical training.
The active party keeps the model with those thresholds masked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ProtocolError
from nvflare_plugins.vertical.model.model import structures
from nvflare_plugins.vertical.model.private_table import PrivateSplit, PrivateTable

MAX_SPLITS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class OwnedSplits:
    """Splits at one party's features: rows up to a bucket go left.

    Privacy: the party learns at which of its features and buckets the model divides rows, which the active party's
    labels have decided. No epsilon covers it.

    Shapes: entries: uint32[n_splits, 4]: tree, node, the party's feature, last bucket to the left.
    """

    entries: NDArray[np.uint32]

    def to_bytes(self) -> bytes:
        """Return the bytes that travel, sealed."""
        return len(self.entries).to_bytes(4, "little") + self.entries.astype("<u4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> OwnedSplits:
        """Read a peer's splits. Raises: ProtocolError."""
        n_splits = int.from_bytes(data[:4], "little")
        if n_splits > MAX_SPLITS or len(data) != 4 + 16 * n_splits:
            raise ProtocolError("a list of splits has another length than it says")
        return cls(np.frombuffer(data, "<u4", offset=4).reshape(n_splits, 4))

    def private_table(self, edges: Candidates) -> PrivateTable:
        """Return the party's table, in which true values take the place of buckets.

        A bucket holds edge[b-1] < x <= edge[b], XGBoost sends x < threshold to the left: the threshold is the next
        number after the edge. A missing value lies in the last bucket and goes right.

        Raises:
            ProtocolError: a split of a feature or bucket that the party has not, or two at one node.
        """
        table: PrivateTable = {}
        for tree, node, feature, bucket in self.entries.tolist():
            if feature >= len(edges.of_feature) or bucket >= edges.counts[feature] or (tree, node) in table:
                raise ProtocolError("the active party named a split that this party cannot have")
            threshold = np.nextafter(edges.of_feature[feature][bucket], np.float32(np.inf))
            table[tree, node] = PrivateSplit(feature, threshold, default_left=False)
        return table


def divide_model(model: bytes, n_own: int, n_features: list[int]) -> tuple[bytes, list[OwnedSplits]]:
    """Take the other parties' thresholds out of a model that was trained on buckets.

    Args:
        model: in XGBoost's JSON form; the active party's own columns come first, then each passive party's.
        n_own: number of own columns.
        n_features: number of columns of each passive party.

    Returns:
        The model with masked thresholds, and each passive party's splits.
    """
    document: dict[str, Any] = json.loads(model)
    ends = n_own + np.cumsum(n_features)
    of_party: list[list[tuple[int, int, int, int]]] = [[] for _ in n_features]
    trees = document["learner"]["gradient_booster"]["model"]["trees"]
    for number, (tree, structure) in enumerate(zip(trees, structures(model), strict=True)):
        for node in np.flatnonzero((structure.left >= 0) & (structure.feature >= n_own)).tolist():
            column = int(structure.feature[node])
            party = int(np.searchsorted(ends, column, side="right"))
            first = int(ends[party]) - n_features[party]
            # Buckets are whole numbers: those below the threshold go left.
            bucket = int(np.ceil(structure.threshold[node])) - 1
            of_party[party].append((number, node, column - first, bucket))
            tree["split_conditions"][node] = 0.0
            tree["default_left"][node] = 0
    entries = [np.array(splits, dtype=np.uint32).reshape(-1, 4) for splits in of_party]
    return json.dumps(document).encode(), [OwnedSplits(item) for item in entries]
