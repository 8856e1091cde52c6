"""The preset sealed: no sum opens. Both parties hold shares of sums, and a circuit says who wins each node.

The passive party adds encrypted gradients into bins as in other presets, and adds a fresh uniform mask to each sum
before it leaves. The active party opens sum plus mask. From these shares both make those of every candidate's left
sums, and compare the candidates of each node with each other and with the active party's own best split
(he_processors/two_party). Who wins is opened to both, which candidate to the passive party alone. Then follow bits,
partitions and caps as in other presets.

Privacy: a simulator of the active party's view needs the party's schema (how many bins each column has), the nodes that
    its caps close, for each other node whether the passive party wins, and the bits of its splits. What else arrives
    are masked sums, each uniform but for 2^(b - 96) of a sum of b bits (histogram/sums.py), and choices of oblivious
    transfers, uniform under their assumptions. A simulator of the passive party's view needs the partitions, the nodes
    that it wins and its own candidate there: gradients are encrypted, and circuits are simulated from the outputs that
    they open. Both parties are honest but curious, and times are not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.registry import open_curve
from he_processors.errors import CapacityExceeded, ConfigurationError, ProtocolError
from he_processors.fixed_point import exponent_of
from he_processors.histogram.planner import BinCodes, BinLayout
from he_processors.histogram.sums import BinMasks, MaskedFormat
from he_processors.randomness import OS_RANDOMNESS
from he_processors.two_party.oblivious_transfer import (
    LABEL_BYTES,
    BitChooser,
    OffsetOwner,
    TransferChooser,
    TransferSender,
)
from he_processors.two_party.split_argmax import PassiveLevel, Shares, Terms
from nvflare_plugins.kinds.vertical.histogram_maker import Timer, untimed
from nvflare_plugins.kinds.vertical.job import Preset, VerticalJob
from nvflare_plugins.kinds.vertical.messages import Bits, SealedAnswer, SealedRequest, Transfers, TransfersAnswer
from nvflare_plugins.xgb.parameters import ALIASES, TrainingParameters

FRACTION_BITS = 14
"""Of gradients and hessians. More bits make circuits longer; a score keeps ten of them."""
MAX_BINS = 64
CANDIDATES_AT_ONCE = 1 << 13
"""Whose circuits travel together: some 80 MB."""
BYTES_PER_CANDIDATE = 1 << 15
"""No message has more for a candidate, whatever the number of rows."""

_PLAIN: dict[str, tuple[float, str]] = {
    "reg_alpha": (0.0, "0"),
    "max_delta_step": (0.0, "0"),
    "max_leaves": (0.0, "0"),
    "colsample_bylevel": (1.0, "1"),
    "colsample_bynode": (1.0, "1"),
}


@dataclass(frozen=True, slots=True)
class SealedPlan:
    """What is public of all trees of a sealed job.

    Attributes:
        h_exponent: of the power of two that bounds a hessian.
    """

    terms: Terms
    h_exponent: int

    def pair_format(self, n_rows: int) -> MaskedFormat:
        """Return the number format. Raises: ConfigurationError: sums of so many rows do not fit the circuits."""
        try:
            self.terms.widths(n_rows)
        except CapacityExceeded:
            raise ConfigurationError(
                f"preset sealed: sums of {n_rows} rows do not fit its circuits. Remedy: train on fewer rows, lower "
                "lambda, or choose preset guarded."
            ) from None
        return MaskedFormat(FRACTION_BITS, max(n_rows, 1), g_bound=1.0, h_low=0.0, h_high=1.0)


def _refuse(job: VerticalJob, effective: Mapping[str, str]) -> None:
    for name, (value, text) in _PLAIN.items():
        if float(effective.get(name, value)) != value:
            raise ConfigurationError(f"parameter {name!r} is refused in preset sealed: leave it at {text}.")
    for name in job.params:
        if ALIASES.get(name, name) in ("monotone_constraints", "interaction_constraints"):
            raise ConfigurationError(f"parameter {name!r} is refused in preset sealed: leave it out.")
    if effective.get("grow_policy", "depthwise") != "depthwise":
        raise ConfigurationError("preset sealed grows trees level by level: leave grow_policy out")


def sealed_plan(job: VerticalJob, parameters: TrainingParameters) -> SealedPlan | None:
    """Return the plan of a job; None for another preset.

    Raises:
        ConfigurationError: parameters that the circuits do not know, by name.
    """
    if job.preset != Preset.SEALED.value:
        return None
    effective = parameters.effective
    _refuse(job, effective)
    if parameters.max_bin > MAX_BINS:
        raise ConfigurationError(f"preset sealed compares at most {MAX_BINS} bins of a column: lower max_bin")
    bound = parameters.objective.hessian_bound
    if bound is None:
        raise ConfigurationError(
            "preset sealed needs an objective whose hessians have a public bound, such as binary:logistic, "
            "multi:softprob or reg:squarederror"
        )
    exponent = exponent_of(bound)
    steps = 2.0 ** (FRACTION_BITS - exponent)
    least = max(math.ceil(float(effective["min_child_weight"]) * steps), 1)
    one = 1 << FRACTION_BITS
    return SealedPlan(Terms(one, one, round(float(effective["reg_lambda"]) * steps), least), exponent)


# The candidates of a node: every threshold of every feature, rows that lack a value on the right, then on the left.


class Candidates:
    """The splits that a tree's bins allow, in one order at both parties."""

    def __init__(self, layout: BinLayout) -> None:
        self._layout = layout
        n_bins = np.array(layout.n_bins, dtype=np.int64)
        self._feature = np.repeat(np.arange(n_bins.size), n_bins)
        self._bin = np.arange(self._feature.size) - np.repeat(np.cumsum(n_bins) - n_bins, n_bins)
        self.n = 2 * self._feature.size
        self.nodes_at_once = max(CANDIDATES_AT_ONCE // self.n, 1)

    def left_sums(self, slots: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Add up what goes left, modulo 2^64. Shapes: slots: uint64[n_nodes, n_slots]; result: uint64[n_nodes, n]."""
        right, left = [], []
        for start, end in zip(self._layout.starts[:-1], self._layout.starts[1:], strict=True):
            bins, missing = slots[:, start : end - 1], slots[:, end - 1 : end]
            running = np.cumsum(bins, axis=1, dtype=np.uint64)
            right.append(running)
            left.append(running - bins + missing)
        return np.concatenate(right + left, axis=1)

    def allowed(self, counts: NDArray[np.int64], floor: int) -> NDArray[np.bool_]:
        """Tell which candidates leave ``floor`` rows on both sides, those with missing values left if there are any.

        Shapes: counts: int64[n_nodes, n_slots], rows of each slot; result: bool[n_nodes, n].
        """
        left = self.left_sums(counts.astype(np.uint64)).view(np.int64)
        first = self._layout.starts[0], self._layout.starts[1]
        totals = counts[:, first[0] : first[1]].sum(axis=1, keepdims=True)
        has_missing = counts[:, self._layout.starts[1:] - 1][:, self._feature] > 0
        differs = np.concatenate([np.ones_like(has_missing), has_missing], axis=1)
        result: NDArray[np.bool_] = (left >= floor) & (totals - left >= floor) & differs
        return result

    def split(self, candidate: int) -> tuple[int, int, bool]:
        """Return the place of a candidate's feature among the tree's, its last bin on the left, and the default."""
        place, default_left = candidate % self._feature.size, candidate >= self._feature.size
        return int(self._feature[place]), int(self._bin[place]) - default_left, bool(default_left)


# The passive party's half.


def new_offset() -> int:
    """Draw the offset of labels."""
    return int.from_bytes(OS_RANDOMNESS.bytes(LABEL_BYTES), "little") | 1


@dataclass(slots=True, repr=False)
class _Asked:
    nodes: tuple[int, ...]
    level: PassiveLevel
    step: int = 0


class SealedPassive:
    """What a passive party holds of one sealed training: transfers, shares of sums, and its candidates that won.

    Security: transfers and masks are drawn for this attempt alone. A resumed job makes new ones.
    """

    def __init__(self, plan: SealedPlan, floor: int, timer: Timer = untimed) -> None:
        """Args: floor: rows that this party wants on each side of a split; timer: measures the stage "compare"."""
        self._terms, self._floor, self._timer = plan.terms, max(floor, 1), timer
        self._sender: TransferSender | None = None
        self._owner: OffsetOwner | None = None
        self._chooser: BitChooser | None = None
        self._layout = BinLayout((1,))
        self._candidates = Candidates(self._layout)
        self._blocks: list[tuple[Shares, Shares]] = []
        self._shares: dict[int, tuple[Shares, Shares]] = {}
        self._asked: _Asked | None = None
        self._decided: set[int] = set()
        self._won: dict[int, int] = {}

    def transfers(self, request: Transfers) -> TransfersAnswer | None:
        """Answer the active party's offer, then take its choices. Raises: ProtocolError: out of order, or no points."""
        if bool(request.offer) != (self._sender is None) or bool(request.choices) == bool(request.offer):
            raise ProtocolError("transfers out of order")
        if self._sender is None:
            curve, offset = open_curve(), new_offset()
            chooser = TransferChooser(curve, request.offer, offset)
            self._owner, self._sender = OffsetOwner(offset, chooser.keys), TransferSender(curve)
            return TransfersAnswer(self._sender.offer, chooser.choices)
        if self._chooser is not None:
            raise ProtocolError("transfers are made twice")
        self._chooser = BitChooser(self._sender.key_pairs(request.choices))
        return None

    def begin_tree(self, layout: BinLayout) -> None:
        """Forget the tree before."""
        self._layout, self._candidates = layout, Candidates(layout)
        self._blocks, self._shares, self._asked, self._decided, self._won = [], {}, None, set(), {}

    def mask(self, n_nodes: int, layout: BinLayout) -> BinMasks:
        """Draw the masks of a block of features, and keep this party's shares."""
        masks = BinMasks.draw(n_nodes * layout.n_slots)
        g, h = (share.reshape(n_nodes, -1) for share in masks.shares())
        self._blocks.append((g, h))
        return masks

    def complete(self, nodes: Sequence[int], families: Sequence[tuple[int, int, int]]) -> None:
        """Take note that the sums of nodes have left.

        Args:
            families: of each divided node its number, the child whose sums have left, and the other one.
        """
        blocks, self._blocks = self._blocks, []
        if blocks and nodes:
            g, h = (np.concatenate(part, axis=1) for part in zip(*blocks, strict=True))
            self._shares |= {node: (g[i], h[i]) for i, node in enumerate(nodes)}
        for parent, child, sibling in families:
            whole = self._shares.pop(parent)
            if child in self._shares:
                part = self._shares[child]
                self._shares[sibling] = whole[0] - part[0], whole[1] - part[1]

    def answer(self, request: SealedRequest, rows: Sequence[NDArray[np.int32]], codes: BinCodes) -> SealedAnswer:
        """Answer the next message about some nodes.

        Shapes: rows: int32[n_node_rows] of each node; codes: of the tree's features, [n_features, n_rows].

        Raises:
            ProtocolError: a message out of order, or of another form.
        """
        with self._timer("compare"):
            return self._answer(request, rows, codes)

    def _answer(self, request: SealedRequest, rows: Sequence[NDArray[np.int32]], codes: BinCodes) -> SealedAnswer:
        if request.step == 0:
            self._asked = self._begin(request, rows)
            data = self._offer(self._asked.level, request, rows, codes)
            return SealedAnswer(request.tree, data)
        asked = self._asked
        if asked is None or asked.nodes != request.nodes or asked.step + 1 != request.step:
            raise ProtocolError("a message of sealed splits that is not the next one")
        asked.step = request.step
        if request.step == 1:
            return SealedAnswer(request.tree, asked.level.score(request.data))
        winners, self._asked = asked.level.winners(request.data), None
        self._won |= {node: won for node, won in zip(asked.nodes, winners.tolist(), strict=True) if won >= 0}
        return SealedAnswer(request.tree, Bits.of(winners >= 0).data)

    def winner(self, node: int) -> tuple[int, int, bool]:
        """Return the split that won a node: place of its feature, bin, default. Raises: ProtocolError: none did."""
        if node not in self._won:
            raise ProtocolError("a split of a node that this party has not won")
        return self._candidates.split(self._won.pop(node))

    def _begin(self, request: SealedRequest, rows: Sequence[NDArray[np.int32]]) -> _Asked:
        nodes = set(request.nodes)
        if len(nodes) < len(request.nodes) or not nodes or not nodes <= self._shares.keys() or nodes & self._decided:
            raise ProtocolError("sealed splits of nodes that are not due")
        if len(nodes) > self._candidates.nodes_at_once:  # what a party allocates for them is many times the request
            raise ProtocolError("sealed splits of more nodes than travel together")
        if self._asked is not None or self._owner is None or self._chooser is None:
            raise ProtocolError("a message of sealed splits that is not the next one")
        self._decided |= nodes
        sizes = [one.size for one in rows]
        level = PassiveLevel(self._terms, sizes, self._candidates.n, self._chooser, self._owner)
        return _Asked(request.nodes, level)

    def _offer(
        self, level: PassiveLevel, request: SealedRequest, rows: Sequence[NDArray[np.int32]], codes: BinCodes
    ) -> bytes:
        g, h = (
            self._candidates.left_sums(np.stack([self._shares[node][side] for node in request.nodes]))
            for side in (0, 1)
        )
        counts = np.stack([self._counts(codes[:, one]) for one in rows])
        return level.offer(request.data, g, h, self._candidates.allowed(counts, self._floor))

    def _counts(self, codes: BinCodes) -> NDArray[np.int64]:
        """Return how many rows each slot has. Shapes: codes: [n_features, n_node_rows]; result: int64[n_slots]."""
        lines = zip(codes, self._layout.n_bins, strict=True)
        return np.concatenate([np.bincount(line, minlength=n_bins + 1) for line, n_bins in lines])
