"""What stands on a worker of a passive party: bin codes and protected pairs of one shard's rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.histogram.bin_noise import BinNoise
from he_processors.histogram.bins import BinCodes, BinLayout
from nvflare_plugins.cluster.desk import WorkerPart
from nvflare_plugins.vertical.protocol.messages import TrainingSetup
from nvflare_plugins.vertical.shards.pair_shards import open_pairs

PART = f"{__name__}:SumShard"


class SumShard(WorkerPart):
    """Adds the pairs of its rows into bins. Rows are numbered from the shard's first.

    Security: sees the shard's bin codes, protected pairs, which of its rows are in which node, and the noise on sums
        that it hides; no key but the public one, no value of a feature, no threshold.
    """

    def __init__(
        self,
        number: int,
        setup: tuple[int, int, int, bytes],
        backend: str,
        codes: BinCodes,
        allow_toy_keys: bool,
        tails: tuple[int, int],
    ) -> None:
        """Args: number: of the worker; setup: the fields of ``TrainingSetup``; tails: see ``open_pairs``.

        Shapes: codes: uint8 or uint16[n_features, n_shard_rows].
        """
        self._number, self._codes = number, codes
        self._pairs = open_pairs(TrainingSetup(*setup), backend, allow_toy_keys, tails)
        self._node_rows: Sequence[NDArray[np.int32]] = ()
        self._sums: Any = None

    def add_gradients(self, is_first: bool, blocks: list[tuple[NDArray[np.uint8], int, int, int]]) -> None:
        """Take rows of some blocks.

        Args:
            is_first: a tree begins: the pairs of the one before are forgotten.
            blocks: of each its bytes, how many rows it has, and which are taken, from one to before another.
        """
        if is_first:
            self._pairs.begin(self._codes.shape[1])
            self._node_rows = ()
        for block, n_block_rows, start, stop in blocks:
            self._pairs.take(block.data, n_block_rows, slice(start, stop))

    def sum_bins(
        self,
        features: NDArray[np.int64],
        n_bins: tuple[int, ...],
        bounds: tuple[int, ...],
        noise: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
        node_rows: list[NDArray[np.int32]] | None,
    ) -> list[list[bytes]]:
        """Add the pairs of the nodes into the bins of some features.

        Args:
            n_bins: of each of these features.
            bounds: worker w finishes the slots from bounds[w] to bounds[w + 1].
            noise: as ``finish``, if this worker is alone; None if it is not.
            node_rows: of each node int32[n_node_rows]; None for those of the last call.

        Returns:
            For each worker its slots, column by column; for this one nothing, or what ``finish`` gives if it is alone.
        """
        if node_rows is not None:
            self._node_rows = node_rows
        whole = np.array_equal(features, np.arange(features[0], features[-1] + 1))
        codes = self._codes[features[0] : features[-1] + 1] if whole else self._codes[features]
        self._sums = self._pairs.sum(codes, BinLayout(tuple(n_bins)), self._node_rows)
        if len(bounds) == 2:
            return [self._pairs.finish(self._sums, _noise(noise))]
        slots = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
        return [[] if number == self._number else self._pairs.part(self._sums, one) for number, one in enumerate(slots)]

    def finish(
        self,
        start: int,
        stop: int,
        others: list[list[bytes]],
        noise: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    ) -> list[bytes]:
        """Add what the other workers have in this one's slots, in their order; pack and hide. Returns: by column.

        Args:
            noise: of the preset noised, on these sums of g and of h; None where sums are exact.
                Shapes: int64[stop - start] each.
        """
        sums, self._sums = self._sums, None
        if stop == start:
            return []
        return self._pairs.finish(self._pairs.add(sums, slice(start, stop), others), _noise(noise))

    def prepare(self, is_last: bool) -> bool:
        """Make a little of what hides later sums; return whether more is due."""
        return self._pairs.prepare(is_last)


def _noise(drawn: tuple[NDArray[np.int64], NDArray[np.int64]] | None) -> BinNoise | None:
    return None if drawn is None else BinNoise(*drawn)
