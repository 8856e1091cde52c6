"""Profiles: which processor protects the sums of a job.

A processor turns this site's integers into bytes that the server can add without a key, and the added bytes back into
the integers' sum. There is no way to send a private kind in clear by accident: the plain processor must be named.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.masks import MessageLabel, PairwiseMasks
from he_processors.sum_tags import CAPACITY_BITS
from nvflare_plugins.wire.envelope import Codec

if TYPE_CHECKING:  # the lattice library takes long to import: only jobs that use it pay for it
    from he_processors.bfv import BfvProcessor
    from he_processors.ckks import CkksProcessor


class Profile(Enum):
    """Protections of private sums that code speaks of by name; site/profiles.py has all."""

    PLAIN = "plain"
    MASKS = "masks"
    BFV = "bfv"
    CKKS = "ckks"


PLUGIN = re.compile(r"^plugin\.([A-Za-z0-9_]{1,64})$")
SCHEME = re.compile(r"^scheme\.([A-Za-z0-9_]{1,64})$")
"""Profiles of vertical jobs whose additive scheme is a plugin's."""


def plugin_of(profile: str) -> str | None:
    """Return the plugin that a profile names, ``plugin.NAME`` or ``scheme.NAME``; None for a profile of our own."""
    match = PLUGIN.fullmatch(profile) or SCHEME.fullmatch(profile)
    return match[1] if match else None


WIDE_CAPACITY_BITS = CAPACITY_BITS
SHORT_BITS = 31
"""What a word of 32 bits carries: a sum below 2^31 in magnitude, and not one of 2^31 as the other capacities are."""
_LIMB_BITS = np.uint64(32)


class SumProcessor(Protocol):
    """Protects vectors of integers that the server adds.

    Capacity: the sum of all sites' integers must stay at most 2^capacity_bits in magnitude; of a wide message
        2^WIDE_CAPACITY_BITS, under every profile. A wide message is added modulo 2^64.
    """

    codec: Codec
    capacity_bits: int

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Return what leaves the site. Shapes: integers: int64[n]."""

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Return the sum over all sites. Raises: ProtocolError on malformed bytes."""


def _split(masked: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the low halves of the words, then the high halves.

    Privacy: added without a carry between them, the halves of all sites tell how often the low ones overflowed. The
        words are masked: given their sum, all but one site's are uniform, so that these overflows say nothing of
            values.
    """
    return np.concatenate([masked & np.uint64((1 << 32) - 1), masked >> _LIMB_BITS])


def _join(limbs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the words modulo 2^64 from sums of their halves."""
    low, high = limbs.reshape(2, -1)
    return low + (high << _LIMB_BITS)


def words(payload: bytes | memoryview, label: MessageLabel, word_bytes: int = 8) -> NDArray[Any]:
    """Read words. Raises: ProtocolError, if there are not exactly ``label.n_values`` of them."""
    if len(payload) != word_bytes * label.n_values:
        raise ProtocolError(
            f"{label.kind}: {len(payload)} bytes where {label.n_values} values of {word_bytes} bytes are due"
        )
    return np.frombuffer(payload, dtype=f"<u{word_bytes}")


class PlainSums:
    """Integers in clear. Privacy: the server and every site see each site's values."""

    codec = Codec.PLAIN
    capacity_bits = WIDE_CAPACITY_BITS

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Return the integers as words, modulo 2^64, or 2^32 in short ones."""
        return integers.astype(f"<i{self.codec.word_bytes}", copy=False).tobytes()

    def reveal(self, payload: bytes | memoryview, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Read the words of the sum."""
        return _signed(words(payload, label, self.codec.word_bytes))


class ShortPlainSums(PlainSums):
    """As ``PlainSums`` in words of 32 bits."""

    codec = Codec.PLAIN_32
    capacity_bits = SHORT_BITS


class MaskedSums:
    """Pairwise masks modulo 2^64, the sum itself blinded from the server (he_processors/masks.py)."""

    codec = Codec.MASKED
    capacity_bits = WIDE_CAPACITY_BITS

    def __init__(self, masks: PairwiseMasks):
        self._masks = masks

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Add the masks of this message."""
        return bytes(self.protected(integers, label))

    def protected(self, integers: NDArray[np.int64], label: MessageLabel) -> memoryview:
        """As ``protect``, without a copy of what may be long."""
        dtype = f"u{self.codec.word_bytes}"
        unsigned = integers.view(np.uint64).astype(dtype, copy=False)  # modulo 2^32 where words are short
        return self._masks.mask(unsigned, label).astype(f"<{dtype}", copy=False).data.cast("B")

    def reveal(self, payload: bytes | memoryview, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Take the blinding off; the pairwise masks have cancelled in the sum."""
        return _signed(self._masks.unblind(words(payload, label, self.codec.word_bytes), label))


class ShortMaskedSums(MaskedSums):
    """As ``MaskedSums`` in words of 32 bits, modulo 2^32."""

    codec = Codec.MASKED_32
    capacity_bits = SHORT_BITS


def _signed(unsigned: NDArray[Any]) -> NDArray[np.int64]:
    """Return words as the integers that they are in two's complement."""
    return unsigned.view(f"i{unsigned.itemsize}").astype(np.int64, copy=False)


class BfvSums:
    """Pairwise masks modulo the plain modulus, inside BFV ciphertexts (he_processors/bfv.py).

    A wide message is masked modulo 2^64, as under ``masks``, and every word travels as two halves.
    """

    codec = Codec.BFV

    def __init__(self, processor: BfvProcessor, masks: PairwiseMasks):
        self._processor = processor
        self._masks = masks
        self._modulus = processor.plain_modulus
        self.capacity_bits = self._modulus.bit_length() - 2

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Mask modulo the plain modulus, then encrypt."""
        if wide:
            return self._processor.encrypt_residues(_split(self._masks.mask(integers.view(np.uint64), label)))
        residues = np.where(integers < 0, integers + np.int64(self._modulus), integers).view(np.uint64)
        return self._processor.encrypt_residues(self._masks.mask(residues, label, modulus=self._modulus))

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Decrypt, take the blinding off, centre around zero."""
        if wide:
            limbs = self._processor.decrypt_residues(payload, 2 * label.n_values)
            return self._masks.unblind(_join(limbs), label).view(np.int64)
        masked = self._processor.decrypt_residues(payload, label.n_values)
        residues = self._masks.unblind(masked, label, modulus=self._modulus).view(np.int64)
        return np.where(residues > self._modulus // 2, residues - np.int64(self._modulus), residues)


class CkksSums:
    """CKKS on an integer grid, so that the rounded sum is exact (he_processors/ckks.py).

    A wide message is masked modulo 2^64, as under ``masks``, and every word travels as two halves.
    """

    codec = Codec.CKKS

    def __init__(self, processor: CkksProcessor, masks: PairwiseMasks):
        self._processor = processor
        self._masks = masks
        self.capacity_bits = int(processor.capacity).bit_length() - 1

    def protect(self, integers: NDArray[np.int64], label: MessageLabel, *, wide: bool = False) -> bytes:
        """Encrypt."""
        if wide:
            integers = _split(self._masks.mask(integers.view(np.uint64), label)).view(np.int64)
        return self._processor.encrypt(integers)

    def reveal(self, payload: bytes, label: MessageLabel, *, wide: bool = False) -> NDArray[np.int64]:
        """Decrypt and round to the grid."""
        if wide:
            limbs = self._processor.decrypt(payload, 2 * label.n_values).view(np.uint64)
            return self._masks.unblind(_join(limbs), label).view(np.int64)
        return self._processor.decrypt(payload, label.n_values)
