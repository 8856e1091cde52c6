"""Noise on encrypted sums per bin: added by the party that summed them, before they are packed and hidden.

The key owner opens sum plus noise and nothing else: the ciphertext of the noise needs no randomiser of its own, because
what leaves is re-randomised as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum.batch_ops import constant
from he_processors.bignum.interface import ModBatch, Residues
from he_processors.errors import CapacityExceeded
from he_processors.fixed_pairs import PairFormat
from he_processors.paillier.encryption import PaillierEncryptor
from he_processors.paillier.keys import PaillierPublicKey


@dataclass(frozen=True, slots=True, repr=False)
class BinNoise:
    """Noise on the sums of some nodes, node by node and slot by slot. Secret of the party that adds it.

    Shapes: g, h: int64[n_nodes * n_slots].
    Units:  encoded integers of the pair format.
    """

    g: NDArray[np.int64]
    h: NDArray[np.int64]

    def check(self, pair_format: PairFormat, n_bins: int) -> None:
        """Refuse noise for other bins, or beyond what the format holds.

        Raises:
            ValueError: there is not exactly one value of each kind for each bin.
            CapacityExceeded: a value beyond the tails: a format that was not made for this noise.
        """
        if self.g.shape != (n_bins,) or self.h.shape != (n_bins,):
            raise ValueError("noise needs one value for each sum")
        largest = [int(np.abs(values).max(initial=0)) for values in (self.g, self.h)]
        if largest[0] > pair_format.tails[0] or largest[1] > pair_format.tails[1]:
            raise CapacityExceeded("noise on a sum is larger than the number format holds; nothing was sent")


class BareEncryptions:
    """Encrypts without hiding, for values that are added to what is hidden afterwards."""

    def __init__(self, public_key: PaillierPublicKey, arithmetic: ModBatch) -> None:
        self._encryptor = PaillierEncryptor(public_key, arithmetic, _Ones(arithmetic))

    def add(self, bins: Residues, noise: BinNoise, pair_format: PairFormat) -> Residues:
        """Add noise to encrypted sums. Shapes: bins, result: Residues[n_bins].

        Security: whoever knows the exact sums' ciphertexts could read the noise off the result: hide it first.

        Raises:
            ValueError, CapacityExceeded: as ``BinNoise.check``.
        """
        noise.check(pair_format, len(bins))
        arithmetic = self._encryptor.arithmetic
        return arithmetic.mul(bins, self._encryptor.encrypt(pair_format.plaintext_rows(noise.g, noise.h)))


class _Ones:
    """The randomiser 1, again and again."""

    def __init__(self, arithmetic: ModBatch) -> None:
        self._arithmetic, self._one = arithmetic, constant(arithmetic, 1)

    def draw(self, n: int) -> Residues:
        """Return ``n`` of them."""
        return self._arithmetic.take(self._one, np.zeros(n, dtype=np.int64))
