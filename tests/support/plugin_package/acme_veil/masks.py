"""Pairwise masks from ChaCha20: a profile of sums as somebody else would write one."""

from __future__ import annotations

import hashlib

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.masks import MessageLabel
from nvflare_plugins.evidence.threat_model import Statement
from nvflare_plugins.pooled.processors import SumContext, SumProfile
from nvflare_plugins.wire.envelope import Codec


class AcmeMasks:
    """Words modulo 2^64: each pair of sites adds and subtracts one key stream, rank 0 blinds the sum by another."""

    codec = Codec.PLUGIN
    capacity_bits = 62

    def __init__(self, context: SumContext) -> None:
        self._context = context
        self._last_counter = -1

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Return the integers under this site's masks. Raises: ProtocolError, if a counter comes again."""
        if label.counter <= self._last_counter:
            raise ProtocolError("a message is masked only once")
        self._last_counter = label.counter
        words = integers.astype(np.int64).view(np.uint64)
        for peer in range(self._context.world):
            if peer != self._context.rank:
                mask = _stream(self._context.pair_key(peer), label)
                words = words - mask if peer < self._context.rank else words + mask
        if self._context.rank == 0:
            words = words + _stream(self._context.group_key(), label)
        return words.astype("<u8").tobytes()

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Return the sum over all sites."""
        blinded = np.frombuffer(payload, "<u8")
        return (blinded - _stream(self._context.group_key(), label)).view(np.int64)


def _stream(key: bytes, label: MessageLabel) -> NDArray[np.uint64]:
    """Return the words that a key gives for one message."""
    name = repr((label.counter, label.kind, label.phase, label.n_values)).encode()
    message_key = hashlib.blake2b(name, key=key, digest_size=32).digest()
    cipher = Cipher(algorithms.ChaCha20(message_key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * label.n_values)), "<u8")


PROFILE = SumProfile(
    name="acme_masks",
    open=AcmeMasks,
    statement=Statement(
        summary="Pairwise masks from ChaCha20 on exact integers; the sum itself is blinded from the server.",
        server_alone="Sizes, order and timing of the messages. No contribution and no sum.",
        one_site="The pooled sums that training needs.",
        server_and_one_site="The pooled sums, as that site does.",
        all_but_one="Everything the last site sends.",
        notes=("An example. Nobody has reviewed it.",),
    ),
)
