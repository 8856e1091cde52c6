"""The attack on exact sums per bin: an active party solves for the bins of a passive party's rows.

For one bin, every node's sum of gradients is a linear equation in the 0/1 vector "row i is in this bin"; so is its sum
of hessians. The active party knows all coefficients: its own gradients, and which rows reached the node. With as many
independent equations as rows, least squares solves them; with fewer, it helps that a row is in exactly one bin.

The splits that the party won tell more: on which side of a threshold every row of a node lies. That is the model
itself, with any preset, and the attack says how far it leads without any sum.

This is a tool to judge settings with, run on data whose bins are known. It needs what an honest active party sees in
any training, and nothing else.

Security: nothing secret is used or kept; whoever can open the sums can run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import linalg

from he_processors.histogram.planner import BinCodes, BinLayout
from he_processors.histogram.sums import BinSums, NodeTotal
from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.guards import MAX_SHARE, Exposure, Guard
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner, pair_format
from nvflare_plugins.kinds.vertical.tree_growth import ROOT
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.in_process_link import InProcessLink
from tests.support.vertical_federation import Joined, federate

_SMALLEST = 1e-10  # singular values below this part of the largest are rounding errors
_NEVER = -1e6  # membership in a slot that cannot be


@dataclass(frozen=True, slots=True, repr=False)
class KnownSplit:
    """A split that the passive party won. Shapes: left, right: int32[n], the rows of the children."""

    feature: int
    bin: int
    default_left: bool
    left: NDArray[np.int32]
    right: NDArray[np.int32]


@dataclass(frozen=True, slots=True, repr=False)
class TreeSums:
    """What the active party knows from one tree.

    Shapes: g, h: int64[n_rows]; nodes: int32[n_node_rows] each, the nodes whose sums were sent; sums:
        int64[n_nodes, n_slots, 2].
    Units:  encoded integers of the pair format.
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]
    nodes: Sequence[NDArray[np.int32]]
    sums: NDArray[np.int64]
    splits: Sequence[KnownSplit] = ()


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the attack makes of a training.

    Attributes:
        n_sums: independent sums of one feature.
        sums_per_row: those, per row of the table: equations per unknown.
        by_least_squares: part of all rows and features whose bin plain least squares recovers.
        by_all: the same with the knowledge that a row is in exactly one bin, and of the splits.
        by_splits: for somebody who names the fullest bin that the splits leave, without any sum.
        by_guessing: for somebody who always names the fullest bin of the feature.
    """

    n_sums: int
    sums_per_row: float
    by_least_squares: float
    by_all: float
    by_splits: float
    by_guessing: float


def attack(
    trees: Sequence[TreeSums],
    layout: BinLayout,
    codes: BinCodes,
    features: Sequence[int] | None = None,
    n_projections: int = 60,
) -> Recovery:
    """Recover the bins of all rows and compare them with the truth.

    Shapes: codes: uint8 or uint16[n_features, n_rows], the truth.

    Args:
        features: the features to attack; all by default. They are attacked one by one, so a sample tells the rate.
        n_projections: steps of the search that knows that a row is in one bin.
    """
    chosen = range(layout.n_features) if features is None else features
    allowed = _left_by_splits(trees, layout, codes.shape[1])
    slots = np.concatenate([np.arange(layout.starts[f], layout.starts[f + 1]) for f in chosen])
    layout, codes, allowed = BinLayout(tuple(layout.n_bins[f] for f in chosen)), codes[list(chosen)], allowed[:, slots]
    n_rows = codes.shape[1]
    equations = _Equations.of(trees, slots, n_rows)
    plain = equations.least_squares()
    sharper = equations.with_one_bin_per_row(plain, allowed, layout, n_projections)
    # The hessians of a first tree are all alike, so their sums tell how full every bin is.
    frequency = np.concatenate([np.bincount(c, minlength=n + 1) for c, n in zip(codes, layout.n_bins, strict=True)])
    frequency = np.tile(frequency / n_rows, (n_rows, 1))
    solutions = (plain, sharper, np.where(allowed, frequency, -1.0), frequency)
    return Recovery(equations.rank, equations.rank / n_rows, *(_part_recovered(x, layout, codes) for x in solutions))


@dataclass(frozen=True, slots=True, repr=False)
class _Equations:
    """The equations in orthogonal form: ``basis @ x == values`` for the rows' membership x in every slot.

    Shapes: basis: float64[rank, n_rows]; values: float64[rank, n_slots].
    """

    basis: NDArray[np.float64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, trees: Sequence[TreeSums], slots: NDArray[np.int64], n_rows: int) -> _Equations:
        lines, sums = [], []
        for tree in trees:
            for rows, node_sums in zip(tree.nodes, tree.sums, strict=True):
                for values, its_sums in zip((tree.g, tree.h), node_sums[slots].T, strict=True):
                    line = np.zeros(n_rows)
                    line[rows] = values[rows]
                    size = np.linalg.norm(line) or 1.0
                    lines.append(line / size)
                    sums.append(its_sums / size)
        if not lines:
            return cls(np.empty((0, n_rows)), np.empty((0, slots.size)))
        left, sizes, right = linalg.svd(np.array(lines), full_matrices=False, lapack_driver="gesdd")
        rank = int(np.count_nonzero(sizes > _SMALLEST * sizes[0]))
        values = (left[:, :rank].T @ np.array(sums)) / sizes[:rank, None]
        return cls(right[:rank], values)

    @property
    def rank(self) -> int:
        return self.basis.shape[0]

    def least_squares(self) -> NDArray[np.float64]:
        """Return the smallest solution. Shapes: float64[n_rows, n_slots]."""
        return self.basis.T @ self.values

    def with_one_bin_per_row(
        self, start: NDArray[np.float64], allowed: NDArray[np.bool_], layout: BinLayout, n_projections: int
    ) -> NDArray[np.float64]:
        """Search a solution in which a row's memberships in a feature's allowed slots are positive and add up to one.

        Projects in turn on both conditions (Douglas-Rachford). Shapes: allowed: bool[n_rows, n_slots].
        """
        x = start.copy()
        for _ in range(n_projections):
            on_simplex = _project_on_simplex(x, allowed, layout)
            reflected = 2 * on_simplex - x
            x += reflected - self.basis.T @ (self.basis @ reflected - self.values) - on_simplex
        return _project_on_simplex(x, allowed, layout)


def _left_by_splits(trees: Sequence[TreeSums], layout: BinLayout, n_rows: int) -> NDArray[np.bool_]:
    """Return which slots the splits leave possible for each row. Shapes: bool[n_rows, n_slots]."""
    allowed = np.ones((n_rows, layout.n_slots), dtype=bool)
    for split in (split for tree in trees for split in tree.splits):
        start, missing = layout.starts[split.feature], layout.starts[split.feature + 1] - 1
        middle = start + split.bin + 1
        allowed[split.left, middle:missing] = False
        allowed[split.right, start:middle] = False
        allowed[split.right if split.default_left else split.left, missing] = False
    return allowed


def _project_on_simplex(x: NDArray[np.float64], allowed: NDArray[np.bool_], layout: BinLayout) -> NDArray[np.float64]:
    """Return the nearest memberships that are at least zero and add up to one for each feature."""
    x = np.where(allowed, x, _NEVER)
    result = np.empty_like(x)
    for start, end in zip(layout.starts[:-1], layout.starts[1:], strict=True):
        part = x[:, start:end]
        descending = -np.sort(-part, axis=1)
        excess = (np.cumsum(descending, axis=1) - 1) / np.arange(1, end - start + 1)
        last = np.count_nonzero(descending > excess, axis=1) - 1
        result[:, start:end] = np.maximum(part - excess[np.arange(x.shape[0]), last][:, None], 0)
    return result


def _part_recovered(x: NDArray[np.float64], layout: BinLayout, codes: BinCodes) -> float:
    """Return how often a row's likeliest slot of a feature is its own."""
    ranges = zip(layout.starts[:-1], layout.starts[1:], strict=True)
    return float(np.mean(np.stack([np.argmax(x[:, start:end], axis=1) for start, end in ranges]) == codes))


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
            request, reply = messages.from_bytes(sent), honest(sent)
            if isinstance(request, messages.HistogramRequest):
                self._divide(request)
            if isinstance(reply, messages.HistogramAnswer):
                self._nodes += [self._rows[node] for node in reply.nodes]
            elif isinstance(reply, messages.SplitAnswer):
                self._note_splits(request, reply)
            return reply

        link._answer = answer
        return link

    def _divide(self, request: messages.HistogramRequest) -> None:
        if not request.partitions and not request.own:
            self._rows, self._sides = {ROOT: np.arange(self._n_rows, dtype=np.int32)}, {}
        for part in request.partitions:
            rows, goes_left = self._rows[part.node], part.goes_left.unpack()
            self._rows[part.left], self._rows[part.right] = rows[goes_left], rows[~goes_left]
        for part in request.own:
            self._rows[part.left], self._rows[part.right] = self._sides[part.node]

    def _note_splits(self, request: messages.SplitRequest, reply: messages.SplitAnswer) -> None:
        for split, bits in zip(request.splits, reply.goes_left, strict=True):
            rows, goes_left = self._rows[split.node], bits.unpack()
            sides = rows[goes_left], rows[~goes_left]
            self._sides[split.node] = sides
            self._splits.append(KnownSplit(split.feature, split.bin, split.default_left, *sides))


ENDLESS = 10**9
PRESETS = {
    "exact": None,
    "floor of 20 rows only": (VerticalRules(max_sums_per_row=ENDLESS, max_split_bits_per_row=ENDLESS), ENDLESS),
    "guarded, 300 sums a row": (VerticalRules(max_sums_per_row=300, max_split_bits_per_row=ENDLESS), MAX_SHARE),
    "guarded": (VerticalRules(), MAX_SHARE),
}
"""Name -> the rules of the passive party and its cap on sums per row; None: everything leaves."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One training and the attack on it."""

    recovery: Recovery
    exposure: Exposure
    tap: Tap
    codes: np.ndarray


def breast(path: Path) -> Joined:
    frame = pd.read_parquet(path).drop(columns="split").astype(np.float32)
    label = frame.pop("label").to_numpy()
    return Joined(frame.to_numpy(), label, (15, 15))


def credit2(path: Path, n_rows: int) -> Joined:
    frame = pd.read_parquet(path).astype(np.float32).sample(n_rows, random_state=0)
    label = frame.pop("label").to_numpy()
    return Joined(frame.to_numpy(), label, (11, 12))


def try_preset(joined: Joined, preset: str, folder: Path, n_trees: int, depth: int, features, **params) -> Trial:
    """Train with one passive party, and attack a sample of its features."""
    n_rows = joined.features.shape[0]
    rules, max_share = PRESETS[preset] or (VerticalRules(), MAX_SHARE)
    is_exact = PRESETS[preset] is None
    guard = Guard(
        rules,
        ReleasedSums(Memory(folder / preset.replace(" ", "_"), "site"), "data"),
        [str(i) for i in range(n_rows)],
        enforce=not is_exact,
        max_share=max_share,
    )
    tap = Tap(pair_format(n_rows), n_rows)
    settings = {"objective": "binary:logistic", "max_depth": depth, "max_bin": 32, **params}
    outcome = federate(
        joined,
        settings,
        n_trees,
        scheme=lambda n: (tap, ClearHistogramMaker),
        guards=[guard],
        listen=tap.listen,
        guarded=not is_exact,
    )
    tap.finish()
    codes = outcome.passives[0]._codes
    return Trial(attack(tap.trees, tap.layout, codes, features), guard.exposure(), tap, codes)
