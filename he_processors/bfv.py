"""BFV: exact sums of integers under homomorphic encryption.

All sites hold one secret key, the server holds none. Because the server together with any one site could then open
every site, callers mask the residues with pairwise masks modulo t before they encrypt them: such a pair opens masked
values only.

Parameters: N = 4096; one prime q of 60 bits (109 would still be 128-bit secure at this N); a plain modulus t, prime and
= 1 mod 2N so that one ciphertext holds 4096 values, of 44 to 52 bits by the number of summands. There is no special
prime: nothing is ever multiplied, so nothing needs key switching. Two primes would allow t of 60 bits at twice the
bytes and time.

Capacity: decryption is right with certainty, not only with high probability. A fresh symmetric ciphertext carries noise
of at most 21 per coefficient (SEAL's centred binomial distribution of 21 + 21 bits) plus at most 1/2 from scaling by
q/t; so a sum of W of them decrypts exactly if 22 W < q / (2t), and t is the largest prime of the table that allows it.

Reference: Fan and Vercauteren, "Somewhat Practical Fully Homomorphic Encryption" (2012); Homomorphic Encryption
Standard (2018), table 1, for the 128-bit limit on q.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from he_processors import ring_ciphertexts

_Q = 1152921504606830593
_NOISE_PER_SUMMAND = 22
_PLAIN_MODULI = (4503599627149313, 1125899906826241, 281474976694273, 70368743669761, 17592186028033)
_SCHEME = ring_ciphertexts.RingScheme(
    name="BFV",
    code=1,
    poly_degree=4096,
    primes=(_Q,),
    values_per_ciphertext=4096,
    max_summands=1489,
)


class BfvProcessor(ring_ciphertexts.RingProcessor):
    """Encrypts and decrypts vectors of one job attempt.

    Security: holds the secret key that all sites share. What ``encrypt`` returns may go to the server; what ``decrypt``
        returns is the sum, which all sites may know, and nothing else: BFV's result carries no noise.

    Attributes:
        plain_modulus: t; results are modulo it.
        capacity: the sum over sites must not exceed this in magnitude: (t - 1) / 2, 2^51 for up to 5 sites.
    """

    scheme = _SCHEME

    def __init__(self, secret: bytes) -> None:
        """Build the processor from what ``generate`` returned at one site. Raises: ProtocolError."""
        facts, _ = ring_ciphertexts.split_secret(_SCHEME, secret)
        self.plain_modulus = choose_plain_modulus(facts.n_summands)
        self.capacity = (self.plain_modulus - 1) // 2
        context = self._context(facts.n_summands)
        self._encoder = seal.BatchEncoder(context)
        self._key = ring_ciphertexts.RingKey(_SCHEME, context, secret, self._encode(np.zeros(1, dtype=np.uint64)))

    @staticmethod
    def _context(n_summands: int) -> seal.SEALContext:
        return ring_ciphertexts.make_context(_SCHEME, choose_plain_modulus(n_summands))

    def encrypt(self, integers: NDArray[np.int64]) -> bytes:
        """Encrypt signed integers, without masks inside.

        Shapes: integers: int64[n_values], n_values >= 1.
        Capacity: each at most capacity / n_summands in magnitude.

        Raises:
            CapacityExceeded: nothing was encrypted then.
        """
        self._check_capacity(integers)
        return self.encrypt_residues(to_residues(integers, self.plain_modulus))

    def decrypt(self, payload: bytes, n_values: int) -> NDArray[np.int64]:
        """Decrypt the sum of what sites encrypted with ``encrypt``.

        Shapes: result: int64[n_values].

        Raises:
            ProtocolError: the payload is malformed, under another key or of another length.
        """
        return from_residues(self.decrypt_residues(payload, n_values), self.plain_modulus)

    def encrypt_residues(self, residues: NDArray[np.uint64]) -> bytes:
        """Encrypt residues modulo t, masked ones as a rule.

        Shapes: residues: uint64[n_values], each below ``plain_modulus``; n_values >= 1.

        Raises:
            TypeError: another dtype or shape.
            ValueError: no residue, or one that is not below ``plain_modulus``.
        """
        if residues.dtype != np.uint64 or residues.ndim != 1:
            raise TypeError("residues must be a one-dimensional array of uint64")
        if not residues.size or int(residues.max()) >= self.plain_modulus:
            raise ValueError("residues must be at least one and below the plain modulus")
        return self._key.encrypt(map(self._encode, self._chunks(residues)), residues.size)

    def decrypt_residues(self, payload: bytes, n_values: int) -> NDArray[np.uint64]:
        """Decrypt a sum of residues modulo t.

        Shapes: result: uint64[n_values], each below ``plain_modulus``.

        Raises:
            ProtocolError: as ``decrypt``.
        """
        slots = [self._encoder.decode_uint64(plaintext) for plaintext in self._key.decrypt(payload, n_values)]
        return np.array(slots, dtype=np.uint64).reshape(-1)[:n_values]

    def _encode(self, residues: NDArray[np.uint64]) -> seal.Plaintext:
        plaintext = seal.Plaintext()
        self._encoder.encode(residues.tolist(), plaintext)
        return plaintext


message_size = _SCHEME.message_size
"""(n_values) -> the bytes of a message of so many values, fresh or added."""

open_sum = partial(ring_ciphertexts.MessageSum, scheme=_SCHEME)
"""(public parameters) -> an empty sum, to which messages are added as they come. Raises: ProtocolError."""

add_ciphertexts = partial(ring_ciphertexts.add_messages, scheme=_SCHEME)
"""(public parameters, payloads) -> the sum of the fresh messages of all sites, at the server.

Security: needs no key; hostile bytes are refused before they are used, and SEAL is not involved.

Raises:
    ProtocolError: a message that is malformed, or under another key.
"""


def choose_plain_modulus(n_summands: int) -> int:
    """Return the largest plain modulus under which ``n_summands`` messages add without error."""
    for modulus in _PLAIN_MODULI:
        if 2 * modulus * _NOISE_PER_SUMMAND * n_summands < _Q:
            return modulus
    raise ValueError(f"BFV adds at most {_SCHEME.max_summands} messages")


def to_residues(integers: NDArray[np.int64], modulus: int) -> NDArray[np.uint64]:
    """Map integers of magnitude below modulus / 2 to residues. Shapes: integers: int64[n]; result: uint64[n]."""
    return np.where(integers < 0, integers + np.int64(modulus), integers).view(np.uint64)


def from_residues(residues: NDArray[np.uint64], modulus: int) -> NDArray[np.int64]:
    """Map residues to integers around zero. Shapes: residues: uint64[n]; result: int64[n]."""
    signed = residues.view(np.int64)
    return np.where(signed > modulus // 2, signed - np.int64(modulus), signed)
