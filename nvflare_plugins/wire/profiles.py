"""Profiles: which processor protects the sums of a job.

A processor turns this site's integers into bytes that the server can add without a key, and the added bytes back into
the integers' sum. There is no way to send a private kind in clear by accident: the plain processor must be named.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.masks import MessageLabel, PairwiseMasks
from nvflare_plugins.wire.envelope import Codec

if TYPE_CHECKING:  # the lattice library takes long to import: only jobs that use it pay for it
    from he_processors.bfv import BfvProcessor
    from he_processors.ckks import CkksProcessor


class Profile(Enum):
    """Protection of every private sum of a job."""

    PLAIN = "plain"
    MASKS = "masks"
    BFV = "bfv"
    CKKS = "ckks"


class SumProcessor(Protocol):
    """Protects vectors of integers that the server adds."""

    codec: Codec
    capacity_bits: int  # the sum of all sites' integers must stay at most 2^capacity_bits in magnitude

    def protect(self, integers: NDArray[np.int64], label: MessageLabel) -> bytes:
        """Return what leaves the site. Shapes: integers: int64[n]."""

    def reveal(self, payload: bytes, label: MessageLabel) -> NDArray[np.int64]:
        """Return the sum over all sites. Raises: ProtocolError on malformed bytes."""


def words(payload: bytes, label: MessageLabel) -> NDArray[np.uint64]:
    """Read 64-bit words. Raises: ProtocolError, if there are not exactly ``label.n_values`` of them."""
    if len(payload) != 8 * label.n_values:
        raise ProtocolError(f"{label.kind}: {len(payload)} bytes where {label.n_values} values of 8 bytes are due")
    return np.frombuffer(payload, dtype="<u8")


class PlainSums:
    """Integers in clear. Privacy: the server and every site see each site's values."""

    codec = Codec.PLAIN
    capacity_bits = 62

    def protect(self, integers: NDArray[np.int64], label: MessageLabel) -> bytes:
        """Return the integers as 64-bit words."""
        return integers.astype("<i8").tobytes()

    def reveal(self, payload: bytes, label: MessageLabel) -> NDArray[np.int64]:
        """Read the words of the sum."""
        return words(payload, label).view(np.int64)


class MaskedSums:
    """Pairwise masks modulo 2^64, the sum itself blinded from the server (he_processors/masks.py)."""

    codec = Codec.MASKED
    capacity_bits = 62

    def __init__(self, masks: PairwiseMasks):
        self._masks = masks

    def protect(self, integers: NDArray[np.int64], label: MessageLabel) -> bytes:
        """Add the masks of this message."""
        return self._masks.mask(integers.view(np.uint64), label).astype("<u8", copy=False).tobytes()

    def reveal(self, payload: bytes, label: MessageLabel) -> NDArray[np.int64]:
        """Take the blinding off; the pairwise masks have cancelled in the sum."""
        return self._masks.unblind(words(payload, label), label).view(np.int64)


class BfvSums:
    """Pairwise masks modulo the plain modulus, inside BFV ciphertexts (he_processors/bfv.py)."""

    codec = Codec.BFV

    def __init__(self, processor: BfvProcessor, masks: PairwiseMasks):
        self._processor = processor
        self._masks = masks
        self._modulus = processor.plain_modulus
        self.capacity_bits = self._modulus.bit_length() - 2

    def protect(self, integers: NDArray[np.int64], label: MessageLabel) -> bytes:
        """Mask modulo the plain modulus, then encrypt."""
        residues = np.where(integers < 0, integers + np.int64(self._modulus), integers).view(np.uint64)
        return self._processor.encrypt_residues(self._masks.mask(residues, label, modulus=self._modulus))

    def reveal(self, payload: bytes, label: MessageLabel) -> NDArray[np.int64]:
        """Decrypt, take the blinding off, centre around zero."""
        masked = self._processor.decrypt_residues(payload, label.n_values)
        residues = self._masks.unblind(masked, label, modulus=self._modulus).view(np.int64)
        return np.where(residues > self._modulus // 2, residues - np.int64(self._modulus), residues)


class CkksSums:
    """CKKS on an integer grid, so that the rounded sum is exact (he_processors/ckks.py)."""

    codec = Codec.CKKS

    def __init__(self, processor: CkksProcessor):
        self._processor = processor
        self.capacity_bits = int(processor.capacity).bit_length() - 1

    def protect(self, integers: NDArray[np.int64], label: MessageLabel) -> bytes:
        """Encrypt."""
        return self._processor.encrypt(integers)

    def reveal(self, payload: bytes, label: MessageLabel) -> NDArray[np.int64]:
        """Decrypt and round to the grid."""
        return self._processor.decrypt(payload, label.n_values)
