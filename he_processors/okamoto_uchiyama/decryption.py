"""Okamoto-Uchiyama decryption in batches.

Reference: Okamoto and Uchiyama 1998, section 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.one_prime import OnePrimeLogarithm, check_ciphertexts
from he_processors.bignum import registry
from he_processors.okamoto_uchiyama.keys import OkamotoUchiyamaPrivateKey
from he_processors.paillier.decryption import centred


class OkamotoUchiyamaDecryptor:
    """Decryption modulo p.

    Security: a plaintext of p or more wraps, and the wrapped result reveals p to whoever knows the true one. Use it
        with a packing layout fitted to ``plaintext_bits``, and never show a result that failed its checks.
    Capacity: |plaintext| < 2^plaintext_bits.
    """

    def __init__(self, private_key: OkamotoUchiyamaPrivateKey, backend: str = registry.AUTO) -> None:
        self.public_key = private_key.public_key
        self.plaintext_bits = self.public_key.plaintext_bits
        self._logarithm = OnePrimeLogarithm(private_key.p, private_key.g, backend)

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt.

        Shapes: ciphertexts: uint8[n, width] in wire form; result: n signed integers.

        Raises:
            ProtocolError: a ciphertext is not a unit below n.
        """
        check_ciphertexts(ciphertexts, self.public_key)
        return [centred(plaintext, self._logarithm.p) for plaintext in self._logarithm.recover(ciphertexts)]
