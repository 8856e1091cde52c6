"""Microsoft SEAL through TenSEAL's bindings, with residues as numpy arrays.

TenSEAL's own vectors encrypt with the public key, keep a prime that sums never need, and serialise through a slow
compressor that both ends must run. The lower-level ``tenseal.sealapi`` does the same arithmetic with the secret key at
half the cost. It reads and writes files only; an anonymous file in memory serves, so no secret touches a disk.

Only bytes of our own making, with residues checked to lie below their primes, ever reach SEAL.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import tenseal.sealapi as seal
from numpy.typing import NDArray

from he_processors.errors import BackendUnavailable
from he_processors.ring_ciphertexts import RingScheme

_HEADER = struct.Struct("<HBBBBHQ")  # magic, header size, major, minor, compression, reserved, total size
_MAGIC = 0xA15E
_NOT_COMPRESSED, _ZSTANDARD = 0, 2


@functools.cache
def make_context(scheme: RingScheme, plain_modulus: int, special_prime: int | None = None) -> seal.SEALContext:
    """Build SEAL's context of public constants.

    Args:
        scheme: its primes carry the ciphertexts.
        plain_modulus: t of BFV; 0 means CKKS.
        special_prime: a prime that SEAL may insist on at the level of keys; it carries nothing.

    Raises:
        BackendUnavailable: SEAL refuses the parameters as insecure or would use other ones for ciphertexts.
    """
    kind = seal.SCHEME_TYPE.BFV if plain_modulus else seal.SCHEME_TYPE.CKKS
    parameters = seal.EncryptionParameters(kind)
    parameters.set_poly_modulus_degree(scheme.poly_degree)
    key_primes = scheme.primes if special_prime is None else (*scheme.primes, special_prime)
    parameters.set_coeff_modulus([seal.Modulus(prime) for prime in key_primes])
    if plain_modulus:
        parameters.set_plain_modulus(plain_modulus)
    context = seal.SEALContext(parameters, special_prime is not None, seal.SEC_LEVEL_TYPE.TC128)
    if not context.parameters_set():
        raise BackendUnavailable(f"SEAL refuses the parameters of {scheme.name}: {context.parameters_error_name()}")
    carried = context.first_context_data().parms().coeff_modulus()
    if tuple(modulus.value() for modulus in carried) != scheme.primes:
        raise BackendUnavailable(f"SEAL would not use the agreed primes for {scheme.name} ciphertexts")
    return context


class ResidueCodec:
    """Moves residues between SEAL objects of one shape and numpy.

    SEAL writes an object as a prefix of fixed length, equal for all objects of one shape, and its residues. The prefix
    is taken from a sample made here and then used to write objects back.
    """

    def __init__(self, shape: tuple[int, ...], sample: Callable[[str], None]) -> None:
        """Learn the prefix from a sample's ``save``."""
        self._shape = shape
        self._residue_bytes = 8 * math.prod(shape)
        self._prefix = _read_object(sample)[: -self._residue_bytes]

    def export(self, save: Callable[[str], None]) -> NDArray[np.uint64]:
        """Return the residues of a SEAL object, given its ``save``."""
        content = _read_object(save)
        if content[: -self._residue_bytes] != self._prefix:
            raise BackendUnavailable("SEAL wrote an object of another shape than expected")
        return np.frombuffer(content, dtype="<u8", offset=len(self._prefix)).reshape(self._shape)

    def restore(self, residues: NDArray[np.uint64], load: Callable[[str], None]) -> None:
        """Let a SEAL object's ``load`` read residues that the caller has checked."""
        size = _HEADER.size + len(self._prefix) + self._residue_bytes
        header = _HEADER.pack(_MAGIC, _HEADER.size, *_seal_version(), _NOT_COMPRESSED, 0, size)
        with _MemoryFile() as file:
            file.write(b"".join((header, self._prefix, residues.astype("<u8", copy=False).tobytes())))
            load(file.path)


def _read_object(save: Callable[[str], None]) -> bytes:
    """Return the content, uncompressed, of what a SEAL object's ``save`` writes."""
    with _MemoryFile() as file:
        save(file.path)
        data = file.read()
    magic, header_size, _, _, compression, _, size = _HEADER.unpack_from(data)
    if (magic, header_size, size) != (_MAGIC, _HEADER.size, len(data)):
        raise BackendUnavailable("SEAL writes another format than this version of VeilBoost reads")
    content = memoryview(data)[_HEADER.size :]
    if compression == _NOT_COMPRESSED:
        return bytes(content)
    if compression != _ZSTANDARD:
        raise BackendUnavailable("SEAL was built with a compressor that VeilBoost does not read")
    return bytes(pa.Codec("zstd").decompress(content, decompressed_size=_frame_content_size(content), asbytes=True))


def _frame_content_size(frame: memoryview) -> int:
    """Return the length that a Zstandard frame written by SEAL announces (RFC 8878, section 3.1.1.1)."""
    descriptor = frame[4]
    is_single_segment = bool(descriptor & 0x20)
    n_bytes = (int(is_single_segment), 2, 4, 8)[descriptor >> 6]
    start = 5 + (0 if is_single_segment else 1)
    size = int.from_bytes(frame[start : start + n_bytes], "little")
    return size + 256 if n_bytes == 2 else size


@functools.cache
def _seal_version() -> tuple[int, int]:
    with _MemoryFile() as file:
        seal.Plaintext().save(file.path)
        _, _, major, minor, *_ = _HEADER.unpack_from(file.read())
    return major, minor


class _MemoryFile:
    """An anonymous file in memory with a path that C++ streams can open."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable("BFV and CKKS need Linux: SEAL's objects pass through anonymous memory files")
        self._descriptor = os.memfd_create("veilboost")
        self.path = f"/proc/self/fd/{self._descriptor}"

    def __enter__(self) -> _MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes) -> None:
        os.write(self._descriptor, data)

    def read(self) -> bytes:
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
