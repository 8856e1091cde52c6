"""The active party's half of the preset sealed: it garbles the comparison of splits, and hears who wins each node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.registry import open_curve
from he_processors.errors import CapacityExceeded, ProtocolError
from he_processors.fixed_point import exact_sum
from he_processors.histogram.sums import BinSums, NodeTotal
from he_processors.two_party.oblivious_transfer import BitChooser, OffsetOwner, TransferChooser, TransferSender
from he_processors.two_party.split_argmax import NO_SPLIT, OCTAVE, ActiveLevel, NodeSums, Widths, score
from nvflare_plugins.growth import arithmetic as tree_arithmetic
from nvflare_plugins.growth import splits as growth_splits
from nvflare_plugins.growth.tree import SMALLEST_CHANGE
from nvflare_plugins.kinds.vertical import messages
from nvflare_plugins.kinds.vertical.key_owner import EncodedGradients
from nvflare_plugins.kinds.vertical.sealed import FRACTION_BITS, Candidates, SealedPlan, new_offset
from nvflare_plugins.kinds.vertical.tree_growth import OwnRows, PartySums, SumsOfTraining

_ALL = np.array([True])
_FREE = np.zeros(1, dtype=np.int8)


class SealedTraining:
    """What all trees of a sealed training share at the active party: plan and transfers, made for this attempt."""

    def __init__(self, plan: SealedPlan, party: messages.Party, deadline_s: float) -> None:
        """Make the transfers with the passive party. Raises: ProtocolError, JobAborted."""
        self.plan = plan
        curve, offset = open_curve(), new_offset()
        sender = TransferSender(curve)
        asked = party.link.ask(messages.Transfers(sender.offer, b""))
        party.link.flush()
        answer = messages.collect(party.name, asked, messages.TransfersAnswer, deadline_s)
        chooser = TransferChooser(curve, answer.offer, offset)
        self.chooser = BitChooser(sender.key_pairs(answer.choices))
        self.owner = OffsetOwner(offset, chooser.keys)
        sent = party.link.ask(messages.Transfers(b"", chooser.choices))
        party.link.flush()
        messages.collect(party.name, sent, type(None), deadline_s)


class SealedSums(PartySums):
    """The passive party's part in one tree. What it opens are shares; no sum is known here but those of nodes.

    Attributes:
        decides: a split that wins here is taken.
    """

    decides = True

    def __init__(
        self,
        training: SumsOfTraining,
        party: messages.Party,
        tree: int,
        columns: NDArray[np.bool_],
        gradients: EncodedGradients,
        own: OwnRows,
        sealed: SealedTraining,
    ) -> None:
        """Prepare for one tree. Shapes: columns: bool[n_columns], that the tree may use.

        Raises:
            CapacityExceeded: hessians are on another grid than the plan's bounds are.
        """
        super().__init__(training, party, tree, columns, gradients.unit)
        if gradients.unit.h_exponent != sealed.plan.h_exponent - FRACTION_BITS:
            raise CapacityExceeded("a hessian is larger than its objective allows")
        self._formula, self._gradients, self._rows, self._sealed = training.formula, gradients, own.rows, sealed
        self._candidates = Candidates(self._layout)
        self._goes_left: dict[int, messages.Bits] = {}

    def evaluate(
        self,
        nodes: list[int],
        totals: Sequence[NodeTotal],
        facts: list[tree_arithmetic.NodeToSplit],
        rivals: Sequence[growth_splits.Split | None] = (),
    ) -> list[growth_splits.Split | None]:
        """Wait for the shares, and find out where the party's best split beats this party's.

        The result names the party's first column: which one splits, it alone knows.

        Args:
            rivals: this party's best split of each node.
        """
        self._take_in(totals)
        known = [i for i, node in enumerate(nodes) if node in self._opened]
        at_once = self._candidates.nodes_at_once
        won: list[int] = []
        for start in range(0, len(known), at_once):
            part = known[start : start + at_once]
            wins = self._compare([nodes[i] for i in part], [facts[i] for i in part], [rivals[i] for i in part])
            won += [i for i, is_won in zip(part, wins, strict=True) if is_won]
        found: list[growth_splits.Split | None] = [None] * len(nodes)
        for i, split in zip(won, self._decided([nodes[i] for i in won], [facts[i] for i in won]), strict=True):
            found[i] = split
        return found

    def split(self, splits: list[messages.OwnedSplit]) -> Future[Any]:
        """Return what the party has told of splits that it won."""
        told: Future[Any] = Future()
        told.set_result(messages.SplitAnswer(self._tree, tuple(self._goes_left.pop(one.node) for one in splits)))
        return told

    def _sibling(self, parent: BinSums, child: BinSums, total: NodeTotal) -> BinSums:
        return BinSums(parent.g - child.g, parent.h - child.h)  # modulo 2^64

    def _compare(
        self,
        nodes: list[int],
        facts: list[tree_arithmetic.NodeToSplit],
        rivals: list[growth_splits.Split | None],
    ) -> list[bool]:
        """Play the three steps for some nodes; return where the party wins."""
        sealed, terms = self._sealed, self._sealed.plan.terms
        sums = [NodeSums(fact.total.g, fact.total.h, fact.total.n_rows) for fact in facts]
        of_g, of_h = (
            self._candidates.left_sums(np.stack([getattr(self._opened[n], s) for n in nodes]).view(np.uint64))
            for s in ("g", "h")
        )
        widths = [terms.widths(one.n_rows) for one in sums]
        keys = [self._key(*of) for of in zip(widths, sums, facts, rivals, strict=True)]
        with self._timer("compare"):
            level = ActiveLevel(terms, sums, self._candidates.n, sealed.chooser, sealed.owner)
            data = level.ask()
        offer = self._step(0, nodes, data)
        with self._timer("compare"):
            data = level.garble(offer, of_g, of_h)
        scores = self._step(1, nodes, data)
        with self._timer("compare"):
            data = level.decide(scores, keys)
        wins = self._step(2, nodes, data)
        if len(wins) != -(-len(nodes) // 8):
            raise ProtocolError(f"{self.party.name} told of other nodes than it was asked about")
        found: list[bool] = messages.Bits(len(nodes), wins).unpack().tolist()
        return found

    def _step(self, step: int, nodes: list[int], data: bytes) -> bytes:
        asked = self.party.link.ask(messages.SealedRequest(self._tree, step, tuple(nodes), data))
        self.party.link.flush()
        answer = messages.collect(self.party.name, asked, messages.SealedAnswer, self._deadline_s)
        if answer.tree != self._tree:
            raise ProtocolError(f"{self.party.name} answered for another tree")
        return answer.data

    def _key(
        self,
        widths: Widths,
        node: NodeSums,
        fact: tree_arithmetic.NodeToSplit,
        rival: growth_splits.Split | None,
    ) -> int:
        """Return what a candidate has to exceed: this party's best split, and the least loss change of a split."""
        unit, params = self._gradients.unit, self._formula.params
        g, h = unit.decode_total(fact.total)
        least = max(float(params.min_split_loss), float(SMALLEST_CHANGE))
        # A score is of the gain beside G^2 / (H + 2 lambda), the loss change of the one beside the node's gain.
        total = h + 2 * float(params.reg_lambda)
        beside = g * g / total if total > 0 else 0.0
        gain = max(least + float(fact.root_gain) - beside, least) / 2.0 ** (2 * unit.g_exponent - unit.h_exponent)
        floor = NO_SPLIT + 1 + min(max(round(OCTAVE * (math.log2(gain) + widths.h_bits)), 0), NO_SPLIT - 1)
        if rival is None:
            return floor
        left = (np.array([side], dtype=np.int64) for side in rival.left)
        return max(floor, int(score(widths, node, *left)[0]))

    def _decided(self, nodes: list[int], facts: list[tree_arithmetic.NodeToSplit]) -> list[growth_splits.Split | None]:
        """Ask how the party divides the nodes that it won; return the splits, with their exact loss changes."""
        if not nodes:
            return []
        rows = [self._rows.rows_of(node) for node in nodes]
        owned = [messages.OwnedSplit(node, 0, -1, default_left=False) for node in nodes]
        asked = super().split(owned)
        self.party.link.flush()
        answers = self.split_answer(asked, [one.size for one in rows])
        found: list[growth_splits.Split | None] = []
        for node, fact, of_node, goes_left in zip(nodes, facts, rows, answers, strict=True):
            self._goes_left[node] = messages.Bits.of(goes_left)
            left = tuple(exact_sum(v[of_node[goes_left]]) for v in (self._gradients.g, self._gradients.h))
            change = self._loss_change(left, fact)
            first = int(self._features[0])
            found.append(growth_splits.Split(change, first, -1, default_left=False, left=(left[0], left[1])))
        return found

    def _loss_change(self, left: tuple[int, ...], fact: tree_arithmetic.NodeToSplit) -> float:
        sums = [np.array([[[side]]], dtype=np.int64) for side in (*left, fact.total.g, fact.total.h)]
        pairs = (sums[0], sums[1]), (sums[2], sums[3])
        changes = tree_arithmetic.loss_changes(self._formula, self._gradients.unit, *pairs, [fact], _FREE, _ALL[None])
        # The party keeps a split that has won, also where a little less than the least is gained: so the tree has it.
        least = np.nextafter(max(self._formula.params.min_split_loss, SMALLEST_CHANGE), np.float32(np.inf))
        return float(max(changes[0, 0], least))
