"""Proofs on the way back: each party shows, block by block, that it took off the key that it committed to.

The common points C go round once for each party. A block that has been with parties a, a + 1, ..., travels with the
blocks after each of them and a proof for each (``he_processors.curve.equal_logarithms``). Whoever gets it checks the
whole chain from its own copy of C before it takes off its key: a list in the place of C would have it unblind what
others choose. Proofs hold for one place of one session: its domain, all commitments, prover, first party, block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from he_processors.curve.equal_logarithms import PROOF_BYTES, draw_weights, holds
from he_processors.curve.registry import open_curve
from he_processors.errors import ProtocolError
from he_processors.key_agreement import DOMAIN, encode_fields
from he_processors.randomness import RandomSource
from nvflare_plugins.alignment.blind_shard import SpreadKey
from nvflare_plugins.alignment.blinding import BlindingKey
from nvflare_plugins.alignment.lists import block_bytes, pack_block, unpack_block

REFUSED = "a party's proof that it took off the key that it committed to, and no other, does not hold"


@dataclass(frozen=True, slots=True)
class Proofs:
    """Proves and checks the steps of one intersection.

    Attributes:
        domain: of the intersection; it is keyed by the session.
        commitments: to the parties' keys, by rank.
    """

    domain: bytes
    commitments: tuple[bytes, ...]
    rank: int
    key: BlindingKey | SpreadKey
    randomness: RandomSource

    def extend(self, chain: bytes, first: int, number: int, blinded: list[bytes], size: int) -> bytes:
        """Take this party's key off a block.

        Args:
            chain: what came with the block and has been checked; empty at the first party.
            first: rank of the first party of the chain.
            number: of the block, from 0.
            blinded: its points.
            size: of blocks.

        Returns:
            The chain with the unblinded block and its proof.
        """
        blinded = self.key.decoded(blinded)
        unblinded = self.key.unblind(blinded)
        transcript = self._transcript(self.rank, first, number, blinded, unblinded)
        total = self.key.weigh([blinded], draw_weights(transcript, len(blinded)))[0]
        return chain + pack_block(unblinded, size) + self.key.prove(transcript, total, self.randomness)

    def check(self, chain: bytes, first: int, number: int, common: list[bytes], size: int, n_links: int) -> list[bytes]:
        """Check every step of a chain, from the block of the common list on.

        Returns:
            The block after the last step.

        Raises:
            ProtocolError: it is malformed, or a proof does not hold.
        """
        block = self.key.decoded(common)
        for step, (points, proof) in enumerate(unpack_chain(chain, size, n_links)):
            if len(points) != len(common):
                raise ProtocolError("the common ids changed in number on their way back")
            unblinded, prover = self.key.decoded(points), (first + step) % len(self.commitments)
            transcript = self._transcript(prover, first, number, block, unblinded)
            weights = draw_weights(transcript, len(common))
            product, base = self.key.weigh([block, unblinded], weights)
            if not holds(open_curve(), transcript, self.commitments[prover], base, product, proof):
                raise ProtocolError(REFUSED)
            block = unblinded
        return block

    def _transcript(
        self, prover: int, first: int, number: int, blinded: Sequence[bytes], unblinded: Sequence[bytes]
    ) -> bytes:
        about = (self.domain, b"".join(self.commitments), prover, first, number)
        return hashlib.sha512(
            encode_fields(DOMAIN, "alignment, key taken off", *about, b"".join(blinded), b"".join(unblinded))
        ).digest()


def unpack_chain(data: bytes, size: int, n_links: int) -> list[tuple[list[bytes], bytes]]:
    """Return the block and the proof of each step. Raises: ProtocolError, if they are malformed."""
    link = block_bytes(size) + PROOF_BYTES
    if len(data) != n_links * link:
        raise ProtocolError("a block of the alignment has another size than agreed")
    links = [data[start : start + link] for start in range(0, len(data), link)]
    return [(unpack_block(one[:-PROOF_BYTES], size), one[-PROOF_BYTES:]) for one in links]
