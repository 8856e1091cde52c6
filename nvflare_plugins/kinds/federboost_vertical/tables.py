"""Randomised buckets of several parties, tables of sums over them, and the splits that they give."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_components.split_candidates.candidates import Candidates
from he_processors.errors import ConfigurationError, ProtocolError
from nvflare_plugins.attempt.job_context import SiteContext
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.identity import canonical_ids
from nvflare_plugins.data.tabular_files import TabularFile
from nvflare_plugins.kinds.alignment.job import load_alignment
from nvflare_plugins.kinds.vertical.model import PrivateSplit, PrivateTable, structures
from nvflare_plugins.site.memory.forgetting import Forgetting

# A party's rows in the order that all parties share: that of an alignment job, or ascending by identifier.
#
# Identifiers stay at the site: all that the others see is a keyed hash over all of them, which is equal or not.


_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartyRows:
    """Rows in the common order.

    Shapes: columns: float32[n_features, n_rows], NaN is missing; label: float32[n_rows], NaN is missing, or None at
        passive parties.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    columns: NDArray[np.float32]
    label: NDArray[np.float32] | None = None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.ids)

    def id_bytes(self) -> bytes:
        """Return the identifiers in order, in a form in which no two lists are alike."""
        encoded = [identifier.encode() for identifier in self.ids]
        return b"".join(len(item).to_bytes(4, "little") + item for item in encoded)


def column_names(spec: DataSet, label: str) -> list[str]:
    """Return the columns of a file that may be features: all but the label and the identifiers."""
    return [name for name in TabularFile(spec).column_names if name not in {label, *spec.no_features}]


def load_rows(
    spec: DataSet, features: Sequence[str], label: str | None, context: SiteContext, alignment: str | None
) -> PartyRows:
    """Load a party's columns and put the rows in the common order.

    Args:
        spec: from the site's policy; it must name the id column.
        features: columns to load; none is allowed.
        label: the label column, at the active party.
        alignment: id of the job that aligned the data set; None takes all rows, which must be the same everywhere.

    Privacy: everything stays at the site. Values that are no numbers are missing, those beyond float32 become its
        largest number; which rows there are is known to all parties, and none is left out.

    Raises:
        ConfigurationError: the data set lacks a column, or has no alignment; a ``DataRefusal``: it cannot be read, or
            some identifier is not usable.
    """
    if spec.id is None:
        raise ConfigurationError(f"data set {spec.name!r} has no id column. Policy key: data_sets.{spec.name}.id.")
    spec.check_may_be_held("this mechanism holds all rows at once")
    file = TabularFile(spec, repair=True)
    wanted = [*features, *([label] if label is not None else [])]
    for name in (*wanted, spec.id):
        if name not in file.column_names:
            raise ConfigurationError(f"data set {spec.name!r} has no column {name!r}")
    if len(set(wanted)) != len(wanted) or spec.id in wanted:
        raise ConfigurationError("features name a column twice, or name the label or the id column")
    columns = file.read(wanted, [spec.id])  # at once: a file replaced between two readings gives rows the ids of others
    encoded = canonical_ids(columns[spec.id], spec.name, spec.missing, spec.id_form)
    Forgetting(context.policy).refuse(encoded, spec)
    ids = [name.decode() for name in encoded]
    if alignment is not None:
        order = load_alignment(context, alignment, spec.name).positions
    else:
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__))
    matrix = np.empty((len(features), order.size), dtype=np.float32)
    for position, name in enumerate(features):
        matrix[position] = _floats(file.numbers(name, columns[name]))[order]
    labels = None if label is None else _floats(file.numbers(label, columns[label]))[order]
    return PartyRows(tuple(ids[i] for i in order), tuple(features), matrix, labels)


def _floats(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)


# The one message of training data: randomised buckets of some features of all rows, in a strict byte form.
#
# magic, version, n_rows u64, n_features u16, n_buckets u8 per feature, then one byte per value, feature by feature
#
# More than ``BLOCK_BYTES`` travel as several blocks of whole features.


BLOCK_BYTES = 64 << 20
_HEADER = struct.Struct("<4sBQH")
_MAGIC, _VERSION = b"VLBB", 1


@dataclass(frozen=True, slots=True, eq=False)
class BucketBlock:
    """Buckets of some features. Shapes: n_buckets: one per feature; ids: uint8[n_features, n_rows]."""

    n_buckets: tuple[int, ...]
    ids: NDArray[np.uint8]

    def to_bytes(self) -> bytes:
        """Return the bytes that travel, sealed."""
        n_features, n_rows = self.ids.shape
        header = _HEADER.pack(_MAGIC, _VERSION, n_rows, n_features)
        return b"".join((header, bytes(self.n_buckets), np.ascontiguousarray(self.ids).tobytes()))

    @classmethod
    def from_bytes(cls, data: bytes, n_rows: int, n_features: int) -> BucketBlock:
        """Read a block of a peer.

        Raises:
            ProtocolError: not exactly one block for so many rows and features, or a bucket that its feature does not
                have.
        """
        if len(data) < _HEADER.size:
            raise ProtocolError("a block of buckets is shorter than its header")
        magic, version, rows, features = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise ProtocolError("not a block of buckets of this version: all sites must run the same one")
        start = _HEADER.size + n_features
        if rows != n_rows or features != n_features or len(data) != start + n_features * n_rows:
            raise ProtocolError("a block of buckets has another size than it should")
        n_buckets = np.frombuffer(data, np.uint8, n_features, _HEADER.size)
        ids = np.frombuffer(data, np.uint8, n_features * n_rows, start).reshape(n_features, n_rows)
        if (n_buckets < 1).any() or (n_rows and (ids.max(axis=1) >= n_buckets).any()):
            raise ProtocolError("a block of buckets holds a bucket that its feature does not have")
        return cls(tuple(map(int, n_buckets)), ids)


def blocks_of(n_rows: int, n_features: int) -> list[slice]:
    """Return which features travel together. At least one block, of no feature if there is none."""
    width = max(1, BLOCK_BYTES // max(1, n_rows))
    return [slice(i, min(i + width, n_features)) for i in range(0, n_features, width)] or [slice(0, 0)]


def joined(blocks: Sequence[BucketBlock]) -> BucketBlock:
    """Put the blocks of one party together again."""
    n_buckets = tuple(n for block in blocks for n in block.n_buckets)
    return BucketBlock(n_buckets, np.concatenate([block.ids for block in blocks]))


# What the active party tells each passive party after training: which splits of the model are its own.
#
# A passive party turns them into a private table with true thresholds, in the same form as in exact vertical training.
# The active party keeps the model with those thresholds masked.


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
