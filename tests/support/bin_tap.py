"""Listens at the active party of a training with one passive party: what it knows of that party's bins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.histogram.planner import BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal
from nvflare_plugins.kinds.vertical.messages import (
    HistogramAnswer,
    HistogramRequest,
    SplitAnswer,
    SplitRequest,
    from_bytes,
)
from nvflare_plugins.kinds.vertical.party_sums import ROOT
from nvflare_plugins.kinds.vertical.schemes import ClearGradientOwner
from tests.support.bin_attack import KnownSplit, TreeSums
from tests.support.in_process_link import InProcessLink


class Tap(ClearGradientOwner):
    """The key owner, which notes gradients and opened sums, and the way to the party, which notes the nodes' rows."""

    def __init__(self, pair_format, n_rows: int):
        super().__init__(pair_format)
        self._n_rows = n_rows
        self._gradients: list[NDArray[np.int64]] = []
        self._rows: dict[int, NDArray[np.int32]] = {}
        self._sides: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        self._nodes: list[NDArray[np.int32]] = []
        self._sums: list[NDArray[np.int64]] = []
        self._splits: list[KnownSplit] = []
        self.layout: BinLayout | None = None
        self.trees: list[TreeSums] = []

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> bytes:
        if sum(map(len, self._gradients)) == self._n_rows:
            self.finish()
        self._gradients.append(np.stack([g, h], axis=1))
        return super().encrypt(g, h)

    def open_sums(self, sums: bytes, layout: BinLayout, totals: Sequence[NodeTotal]) -> list[BinSums]:
        opened = super().open_sums(sums, layout, totals)
        self.layout = layout
        [words] = {len(one.g) for one in opened}
        if words != 1:
            raise ValueError("sums in two words: the attack reads one")
        self._sums += [np.stack([one.g[0], one.h[0]], axis=1) for one in opened]
        return opened

    def finish(self) -> None:
        """Close the tree that grew last."""
        if self._sums:
            g, h = np.concatenate(self._gradients).T
            self.trees.append(TreeSums(g, h, tuple(self._nodes), np.stack(self._sums), tuple(self._splits)))
        self._gradients, self._nodes, self._sums, self._splits = [], [], [], []

    def listen(self, link: InProcessLink) -> InProcessLink:
        """Note the nodes whose sums come over a link."""
        honest = link._answer

        def answer(sent: bytes):
            request, reply = from_bytes(sent), honest(sent)
            if isinstance(request, HistogramRequest):
                self._divide(request)
            if isinstance(reply, HistogramAnswer):
                self._nodes += [self._rows[node] for node in reply.nodes]
            elif isinstance(reply, SplitAnswer):
                self._note_splits(request, reply)
            return reply

        link._answer = answer
        return link

    def _divide(self, request: HistogramRequest) -> None:
        if not request.partitions and not request.own:
            self._rows, self._sides = {ROOT: np.arange(self._n_rows, dtype=np.int32)}, {}
        for part in request.partitions:
            rows, goes_left = self._rows[part.node], part.goes_left.unpack()
            self._rows[part.left], self._rows[part.right] = rows[goes_left], rows[~goes_left]
        for part in request.own:
            self._rows[part.left], self._rows[part.right] = self._sides[part.node]

    def _note_splits(self, request: SplitRequest, reply: SplitAnswer) -> None:
        for split, bits in zip(request.splits, reply.goes_left, strict=True):
            rows, goes_left = self._rows[split.node], bits.unpack()
            sides = rows[goes_left], rows[~goes_left]
            self._sides[split.node] = sides
            self._splits.append(KnownSplit(split.feature, split.bin, split.default_left, *sides))
