"""What stands on a worker of a passive party: bin codes and protected pairs of one shard's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.histogram.bin_noise import BinNoise
from he_processors.histogram.bins import BinCodes, BinLayout
from nvflare_plugins.cluster.desk import WorkerPart
from nvflare_plugins.cluster.peers import reduce_scatter
from nvflare_plugins.vertical.protocol.messages import TrainingSetup
from nvflare_plugins.vertical.shards.pair_shards import open_pairs

PART = f"{__name__}:SumShard"
Drawn = tuple[NDArray[np.int64], NDArray[np.int64]] | None
Nodes = list[NDArray[np.int32]] | None


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
        self, features: NDArray[np.int64], n_bins: tuple[int, ...], noise: Drawn, node_rows: Nodes
    ) -> list[bytes]:
        """Add the pairs of the nodes into the bins of some features, pack and hide: what the only worker does.

        Args:
            n_bins: of each of these features.
            noise: of the preset noised, on these sums of g and of h, int64[n] each; None where sums are exact.
            node_rows: of each node int32[n_node_rows]; None for those of the last call.

        Returns:
            By column.
        """
        return self._pairs.finish(self._sum(features, n_bins, node_rows), _noise(noise))

    def sum_share(
        self,
        exchange: int,
        features: NDArray[np.int64],
        n_bins: tuple[int, ...],
        bounds: tuple[int, ...],
        noise: Drawn,
        node_rows: Nodes,
    ) -> tuple[list[bytes], int, float]:
        """Do the same with the other workers: each packs and hides a share of the sums, with its share of the noise.

        Args:
            exchange: its number.
            bounds: worker w has the slots from bounds[w] to bounds[w + 1].

        Returns:
            By column, nothing where there is no share; bytes sent to other workers; seconds waited for them.
        """
        if self.peers is None:
            raise TypeError("this worker has no other to add sums with")
        sent, waited = self.peers.sent_bytes, self.peers.waited_s
        sums = self._sum(features, n_bins, node_rows)
        share = reduce_scatter(self.peers, exchange, bounds, sums, self._pairs.part, self._pairs.add)
        columns = [] if share is None else self._pairs.finish(share, _noise(noise))
        return columns, self.peers.sent_bytes - sent, self.peers.waited_s - waited

    def prepare(self, is_last: bool) -> bool:
        """Make a little of what hides later sums; return whether more is due."""
        return self._pairs.prepare(is_last)

    def _sum(self, features: NDArray[np.int64], n_bins: tuple[int, ...], node_rows: Nodes) -> Any:
        if node_rows is not None:
            self._node_rows = node_rows
        whole = np.array_equal(features, np.arange(features[0], features[-1] + 1))
        codes = self._codes[features[0] : features[-1] + 1] if whole else self._codes[features]
        return self._pairs.sum(codes, BinLayout(tuple(n_bins)), self._node_rows)


def _noise(drawn: Drawn) -> BinNoise | None:
    return None if drawn is None else BinNoise(*drawn)
