"""Both halves of two-party computations in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.curve.registry import open_curve
from he_processors.randomness import OS_RANDOMNESS
from he_processors.two_party.oblivious_transfer import BitChooser, OffsetOwner, TransferChooser, TransferSender
from he_processors.two_party.split_argmax import NO_SPLIT, ActiveLevel, NodeSums, PassiveLevel, Terms


def transfers() -> tuple[OffsetOwner, BitChooser]:
    """Return both ends of an extension: of who has the offset, and of who chooses."""
    curve, offset = open_curve(), int.from_bytes(OS_RANDOMNESS.bytes(16), "little") | 1
    sender = TransferSender(curve)
    chooser = TransferChooser(curve, sender.offer, offset)
    return OffsetOwner(offset, chooser.keys), BitChooser(sender.key_pairs(chooser.choices))


@dataclass(frozen=True)
class Parties:
    """The transfers of two parties in both directions."""

    terms: Terms
    labels: tuple[OffsetOwner, BitChooser]
    means: tuple[OffsetOwner, BitChooser]

    @classmethod
    def of(cls, terms: Terms) -> Parties:
        return cls(terms, transfers(), transfers())

    def level(self, nodes: Sequence[NodeSums], n_candidates: int) -> tuple[ActiveLevel, PassiveLevel]:
        """Return both halves of a level."""
        active = ActiveLevel(self.terms, nodes, n_candidates, self.means[1], self.labels[0])
        passive = PassiveLevel(self.terms, [node.n_rows for node in nodes], n_candidates, self.labels[1], self.means[0])
        return active, passive


def shared(values: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Share integers modulo 2^64."""
    drawn = np.frombuffer(OS_RANDOMNESS.bytes(8 * values.size), dtype="<u8").reshape(values.shape)
    return values.view(np.uint64) - drawn, drawn.astype(np.uint64)


def messages_of_level(
    active: ActiveLevel,
    passive: PassiveLevel,
    left_g: NDArray[np.int64],
    left_h: NDArray[np.int64],
    allowed: NDArray[np.bool_] | None = None,
    own: Sequence[int] | None = None,
) -> tuple[list[bytes], NDArray[np.int64]]:
    """Run a level; return its messages in order and who wins. Shapes: left_g, left_h: int64[n_nodes, n_candidates]."""
    (a_g, p_g), (a_h, p_h) = shared(left_g), shared(left_h)
    may_win = np.ones(left_g.shape, dtype=bool) if allowed is None else allowed
    said = [active.ask()]
    said.append(passive.offer(said[0], p_g, p_h, may_win))
    said.append(active.garble(said[1], a_g, a_h))
    said.append(passive.score(said[2]))
    said.append(active.decide(said[3], [NO_SPLIT] * len(left_g) if own is None else own))
    return said, passive.winners(said[4])
