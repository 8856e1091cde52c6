"""Sums under Paillier's scheme (1999), 14 values to a ciphertext: a profile whose messages only it can add.

An example: 1024 bits protect nothing for long.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
from cryptography.hazmat.primitives.asymmetric import rsa
from numpy.typing import NDArray

from he_processors.masks import MessageLabel
from nvflare_plugins.evidence.threat_model import Statement
from nvflare_plugins.pooled.processors import SumContext, SumProfile
from nvflare_plugins.wire.envelope import Codec

KEY_BITS, SLOT_BITS, PER_TEXT, OFFSET = 1024, 72, 14, 1 << 60
CIPHERTEXT_BYTES = KEY_BITS // 4


class AcmePaillier:
    """One processor: rank 0 draws the key and shares it with the other sites; the server gets its modulus alone."""

    codec = Codec.PLUGIN_BYTES
    capacity_bits = 59

    def __init__(self, context: SumContext) -> None:
        self._world = context.world
        drawn = None
        if context.rank == 0:
            numbers = rsa.generate_private_key(65537, KEY_BITS).private_numbers()
            drawn = b"".join(prime.to_bytes(KEY_BITS // 16, "big") for prime in (numbers.p, numbers.q))
        shared = context.share_secret(drawn)
        half = KEY_BITS // 16
        p, q = (int.from_bytes(shared[place : place + half], "big") for place in (0, half))
        self._n = p * q
        self._order = math.lcm(p - 1, q - 1)
        context.publish(self._n.to_bytes(KEY_BITS // 8, "big"))

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Encrypt the integers, each with an offset in a slot of its own."""
        square, texts = self._n * self._n, []
        for first in range(0, len(integers), PER_TEXT):
            slots = [int(value) + OFFSET for value in integers[first : first + PER_TEXT]]
            message = sum(slot << (SLOT_BITS * place) for place, slot in enumerate(slots))
            blind = pow(1 + secrets.randbelow(self._n - 1), self._n, square)
            texts.append(((1 + message * self._n) * blind % square).to_bytes(CIPHERTEXT_BYTES, "big"))
        return b"".join(texts)

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Decrypt the sums."""
        square, found = self._n * self._n, []
        inverse = pow(self._order, -1, self._n)
        for place in range(0, len(payload), CIPHERTEXT_BYTES):
            text = int.from_bytes(payload[place : place + CIPHERTEXT_BYTES], "big")
            message = (pow(text, self._order, square) - 1) // self._n * inverse % self._n
            for slot in range(PER_TEXT):
                found.append((message >> (SLOT_BITS * slot) & ((1 << SLOT_BITS) - 1)) - self._world * OFFSET)
        return np.array(found[: label.n_values], dtype=np.int64)


class Product:
    """The server's sum: products of ciphertexts. It holds no key."""

    def __init__(self, parameters: bytes, n_values: int) -> None:
        self._square = int.from_bytes(parameters, "big") ** 2
        self._texts = [1] * -(-n_values // PER_TEXT)

    def add(self, payload: bytes | memoryview) -> None:
        """Multiply ciphertext by ciphertext. Raises: ValueError for another length."""
        if len(payload) != CIPHERTEXT_BYTES * len(self._texts):
            raise ValueError("another number of ciphertexts")
        for place in range(len(self._texts)):
            text = bytes(payload[CIPHERTEXT_BYTES * place : CIPHERTEXT_BYTES * (place + 1)])
            self._texts[place] = self._texts[place] * int.from_bytes(text, "big") % self._square

    def pack(self) -> bytes:
        """Return the products."""
        return b"".join(text.to_bytes(CIPHERTEXT_BYTES, "big") for text in self._texts)


PROFILE = SumProfile(
    name="acme_paillier",
    open=AcmePaillier,
    statement=Statement(
        summary="Paillier under a key that all sites share.",
        server_alone="Sizes, order and timing of the messages. No contribution and no sum.",
        one_site="The pooled sums that training needs.",
        server_and_one_site="Every contribution: the site has the key.",
        all_but_one="Everything the last site sends.",
        notes=("An example. Nobody has reviewed it.",),
    ),
    codec=Codec.PLUGIN_BYTES,
    capacity_bits=59,
    add=Product,
)
