"""Sums under CKKS from TenSEAL: a profile of messages of bytes whose sums are exact, because limbs are short.

An example; TenSEAL is needed where it is loaded, at sites and server alike.
"""

from __future__ import annotations

import struct

import numpy as np
import tenseal as ts
from numpy.typing import NDArray

from he_processors.masks import MessageLabel
from nvflare_plugins.evidence.threat_model import Statement
from nvflare_plugins.pooled.processors import SumContext, SumProfile
from nvflare_plugins.wire.envelope import Codec

SLOTS, LIMB_BITS, LIMBS, OFFSET = 4096, 12, 6, 1 << 70
_LENGTH = struct.Struct("<I")


class AcmeCkks:
    """One processor: rank 0 draws the key and shares it with the other sites; the server gets the parameters alone."""

    codec = Codec.PLUGIN_BYTES
    capacity_bits = 59

    def __init__(self, context: SumContext) -> None:
        self._world = context.world
        drawn = None
        if context.rank == 0:
            made = ts.context(ts.SCHEME_TYPE.CKKS, 2 * SLOTS, coeff_mod_bit_sizes=[60, 60])
            made.global_scale = 2.0**36
            drawn = made.serialize(save_secret_key=True)
        self._keys = ts.context_from(context.share_secret(drawn))
        public = self._keys.copy()
        public.make_context_public()
        context.publish(public.serialize(save_galois_keys=False, save_relin_keys=False))

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Encrypt the limbs of the integers."""
        values = [int(value) + OFFSET for value in integers]
        limbs = [value >> (LIMB_BITS * place) & ((1 << LIMB_BITS) - 1) for place in range(LIMBS) for value in values]
        blocks = (limbs[first : first + SLOTS] for first in range(0, len(limbs), SLOTS))
        return _packed([ts.ckks_vector(self._keys, block).serialize() for block in blocks])

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Decrypt and round the sums of limbs, and put them together."""
        limbs: list[int] = []
        for part in _parts(payload):
            limbs += [round(value) for value in ts.ckks_vector_from(self._keys, part).decrypt()]
        n = label.n_values
        sums = [sum(limbs[place * n + i] << (LIMB_BITS * place) for place in range(LIMBS)) for i in range(n)]
        return np.array([total - self._world * OFFSET for total in sums], dtype=np.int64)


class CiphertextSum:
    """The server's sum. It holds no key."""

    def __init__(self, parameters: bytes, n_values: int) -> None:
        self._context, self._n_parts = ts.context_from(parameters), -(-n_values * LIMBS // SLOTS)
        self._total: list[ts.CKKSVector] = []

    def add(self, payload: bytes | memoryview) -> None:
        """Add a message. Raises: ValueError for another number of ciphertexts."""
        parts = [ts.ckks_vector_from(self._context, part) for part in _parts(bytes(payload))]
        if len(parts) != self._n_parts:
            raise ValueError("another number of ciphertexts")
        self._total = [a + b for a, b in zip(self._total, parts, strict=True)] if self._total else parts

    def pack(self) -> bytes:
        """Return the sums."""
        return _packed([part.serialize() for part in self._total])


def _packed(parts: list[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _parts(payload: bytes) -> list[bytes]:
    """Cut a message. Raises: ValueError, if it does not end where its last part does."""
    parts, place = [], 0
    while place < len(payload):
        (size,) = _LENGTH.unpack_from(payload, place)
        parts.append(payload[place + 4 : place + 4 + size])
        place += 4 + size
    if place != len(payload):
        raise ValueError("a part is cut short")
    return parts


PROFILE = SumProfile(
    name="acme_ckks",
    open=AcmeCkks,
    statement=Statement(
        summary="CKKS under a key that all sites share.",
        server_alone="Sizes, order and timing of the messages. No contribution and no sum.",
        one_site="The pooled sums that training needs.",
        server_and_one_site="Every contribution: the site has the key.",
        all_but_one="Everything the last site sends.",
        notes=("An example. Nobody has reviewed it.",),
    ),
    codec=Codec.PLUGIN_BYTES,
    capacity_bits=59,
    add=CiphertextSum,
)
