"""CKKS: sums of integers under approximate homomorphic encryption, made exact by rounding.

CKKS adds approximate numbers. Sites therefore give it integers (grid steps of a fixed-point format), and the decryptor
rounds the sum to integers before anyone sees it: the result is exact, and the noise, which would tell about the key
(Li and Micciancio, "On the Security of Homomorphic Encryption on Approximate Numbers", 2021), never leaves.

All sites hold one secret key, the server none. The server together with any one site opens every site's vectors: masks
cannot be put inside, because CKKS does not add modulo anything. Policy may forbid the profile for that.

Parameters: N = 8192; primes of 60 and 50 bits carry the ciphertext, a third of 60 bits exists only because SEAL asks
for one. Every complex slot carries two integers, so a ciphertext holds 8192, twice what real slots hold. One integer
step is 2^40 in the plaintext.

Noise below the grid. Encoding rounds every coefficient, and what it rounds off depends on the integers of one site
alone. A site that decrypts the sum would see the sum of these remainders under three units of lattice noise, and could
test guesses of another site's vector by them: for a message of one count, all candidates, which finds the count
(tests/soundness/test_ckks_sum_noise.py). So each site adds uniform noise of at most 0.05 / W steps to all slots, used
or not, before it encodes: 2^27 units in a coefficient for W = 3, 2^18 for W = 1024, where a remainder is at most 1/2.
That hides the remainders of any number of messages a job has. It does not hide the errors of the FFT (part 3 below) as
far where integers come near the capacity: there a site that already knew another's whole vector to the last grid step
could confirm it.

Why rounding fails with probability below 2^-40 per message. The error of a decrypted sum of W messages, in integer
steps, with sum bounded by K = 2^44 (and each site's magnitude by K / W), has four parts:
  1. The noise below the grid: at most 0.05, whatever is drawn.
  2. Lattice noise. A coefficient of a fresh ciphertext is sub-Gaussian with variance 10.5 (42 halves of fair signs); a
     slot's real or imaginary part sums N of them with cosine weights: standard deviation sqrt(10.5 N/2 W) = 207 sqrt(W)
     plaintext units. With the rounding of coefficients, at most W N/2 * 2/pi = 2608 W units in a slot, it stays below
     10^-5 steps for W = 1024.
  3. Double-precision FFTs, once per site and once in the decryptor. Under independent rounding errors of size
     u = 2^-53 (Higham and Mary, 2019) each of the 13 stages adds at most 4 u^2 times the mean energy of a slot, 2 K^2,
     to the variance: standard deviation at most sqrt(13 * 4 * 2) u K = 10.2 u K = 0.02 steps. Measured: at most 3.7 u K
     over constant, one-signed, alternating, oscillating and random vectors.
  4. The sum of integer and noise is a double itself: at most u K = 0.002 steps over all sites.
9.5 standard deviations of 3 (0.19), plus the others make less than 1/4 steps, and a Gaussian (or sub-Gaussian) exceeds
9.5 standard deviations with probability 2^-64, which leaves 2^-40 over 2^24 values. A residual above 1/4 aborts the
job; a wrong integer would need one above 3/4.

Reference: Cheon, Kim, Kim and Song, "Homomorphic Encryption for Arithmetic of Approximate Numbers" (2017).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import tenseal.sealapi as seal
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_uint64
from he_processors.ring_ciphertexts import MessageSum, RingKey, RingProcessor, RingScheme, add_messages, make_context

_SCHEME = RingScheme(
    name="CKKS",
    code=2,
    poly_degree=8192,
    primes=(1152921504606748673, 1125899906826241),
    values_per_ciphertext=8192,
    max_summands=1 << 10,
)
_SPECIAL_PRIME = 1152921504606830593
_SCALE = 2.0**40
_MAX_RESIDUAL = 0.25
_NOISE_OF_ALL_SITES = 0.05  # of a step, at most


class CkksProcessor(RingProcessor):
    """Encrypts and decrypts vectors of one job attempt.

    Security: holds the secret key that all sites share. What ``encrypt`` returns may go to the server; what ``decrypt``
        returns is the rounded sum. Nothing unrounded is returned, logged or put into a message. A site that takes the
        decryptor apart finds noise below the grid, in which single sites' remainders are lost.
    """

    scheme = _SCHEME
    capacity = 1 << 44

    def __init__(self, secret: bytes, randomness: RandomSource = OS_RANDOMNESS) -> None:
        """Build the processor from what ``generate`` returned at one site. Raises: ProtocolError."""
        self._randomness, context = randomness, self._context()
        self._encoder = seal.CKKSEncoder(context)
        self._key = RingKey(_SCHEME, context, secret, self._encode(np.zeros(_SCHEME.values_per_ciphertext)))

    @staticmethod
    def _context(n_summands: int = 1) -> seal.SEALContext:
        return make_context(_SCHEME, 0, _SPECIAL_PRIME)

    def encrypt(self, integers: NDArray[np.int64]) -> bytes:
        """Encrypt signed integers.

        Shapes: integers: int64[n_values], n_values >= 1.
        Capacity: each at most capacity / n_summands in magnitude.

        Raises:
            CapacityExceeded: an integer is too large; nothing was encoded then.
            TypeError: another dtype or shape.
            ValueError: no integer.
        """
        if integers.dtype != np.int64 or integers.ndim != 1:
            raise TypeError("integers must be a one-dimensional array of int64")
        if not integers.size:
            raise ValueError("there must be at least one integer")
        self._check_capacity(integers)
        plaintexts = (self._encode(self._with_noise(chunk)) for chunk in self._chunks(integers))
        return self._key.encrypt(plaintexts, integers.size)

    def decrypt(self, payload: bytes, n_values: int) -> NDArray[np.int64]:
        """Decrypt the sum of all sites' integers.

        Shapes: result: int64[n_values], exact.

        Raises:
            ProtocolError: the payload is malformed, under another key or of another length, or if the sum does not lie
                on the integer grid.
        """
        slots = [self._encoder.decode_complex(plaintext) for plaintext in self._key.decrypt(payload, n_values)]
        values = np.array(slots, dtype=np.complex128).view(np.float64).reshape(-1)[:n_values]
        rounded = np.rint(values)
        on_grid = np.abs(values - rounded).max() <= _MAX_RESIDUAL  # false for NaN as well
        if not (on_grid and np.abs(rounded).max() <= self.capacity):  # one message: it must not tell which
            raise ProtocolError("a decrypted CKKS sum is not on the agreed grid: the ciphertexts were damaged")
        return rounded.astype(np.int64)

    def _with_noise(self, integers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return all slots of one ciphertext: the integers, zeros behind them, and noise below the grid in each.

        Shapes: integers: int64[n]; result: float64[values_per_ciphertext].
        """
        words = random_uint64(_SCHEME.values_per_ciphertext // 2, self._randomness).view("<i4")
        slots = words * (_NOISE_OF_ALL_SITES / self.n_summands / 2**31)
        slots[: integers.size] += integers
        return slots

    def _encode(self, slots: NDArray[np.float64]) -> seal.Plaintext:
        plaintext = seal.Plaintext()
        self._encoder.encode(slots.view(np.complex128).tolist(), _SCALE, plaintext)
        return plaintext


message_size = _SCHEME.message_size
"""(n_values) -> the bytes of a message of so many values, fresh or added."""

open_sum = partial(MessageSum, scheme=_SCHEME)
"""(public parameters) -> an empty sum, to which messages are added as they come. Raises: ProtocolError."""

add_ciphertexts = partial(add_messages, scheme=_SCHEME)
"""(public parameters, payloads) -> the sum of the fresh messages of all sites, at the server.

Security: needs no key; hostile bytes are refused before they are used, and SEAL is not involved.

Raises:
    ProtocolError: a message that is malformed, or under another key.
"""
