"""What BFV and CKKS share: the key of the sites, ciphertexts as residues, and Microsoft SEAL below them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import tenseal.sealapi as seal
from numpy.typing import NDArray

from he_processors.errors import BackendUnavailable, CapacityExceeded, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource

# Ciphertexts of BFV and CKKS as plain residues: wire format and key-less addition.
#
# A symmetric RLWE ciphertext is two polynomials over a product of primes. What travels are their residues, nothing of
# SEAL's own serialisation: a header of fixed length, then per prime the residues in as many bytes as the prime needs.
# Adding two ciphertexts adds residues modulo each prime, so the server needs numpy only: no key, no context, and no
# parser of a C++ library ever sees bytes that came over the network.


KEY_ID_BYTES = 16
POLYNOMIALS = 2
MAX_VALUES = 1 << 32

_Value = TypeVar("_Value", bound=np.generic)

_PUBLIC_MAGIC = b"VLHP"
_CIPHERTEXT_MAGIC = b"VLHC"
_VERSION = 1
_SECRET_MAGIC = b"VLHS"
_FACTS = struct.Struct("<4sBBI16s")  # magic, version, scheme, summands, key id; of a secret its residues follow
_HEADER = struct.Struct("<4sBBI16sQ")
_PLANES = (("<u4", 32), ("<u2", 16), ("u1", 8))


@dataclass(frozen=True, slots=True)
class RingScheme:
    """The constants of one scheme; they never travel, only ``code`` does.

    Attributes:
        name: for messages.
        code: number on the wire.
        poly_degree: N, coefficients per polynomial.
        primes: the ciphertext modulus as a product of primes, each = 1 mod 2N.
        values_per_ciphertext: how many values one ciphertext holds.
        max_summands: how many ciphertexts may be added before noise could reach a result.
    """

    name: str
    code: int
    poly_degree: int
    primes: tuple[int, ...]
    values_per_ciphertext: int
    max_summands: int

    def n_ciphertexts(self, n_values: int) -> int:
        """Return how many ciphertexts hold ``n_values`` values."""
        return -(-n_values // self.values_per_ciphertext)

    def body_size(self, n_values: int) -> int:
        """Return the bytes behind the header of a message of ``n_values`` values."""
        bytes_per_position = sum(_width(prime) for prime in self.primes)
        return self.n_ciphertexts(n_values) * POLYNOMIALS * self.poly_degree * bytes_per_position

    def message_size(self, n_values: int) -> int:
        """Return the bytes of a whole message of ``n_values`` values."""
        return _HEADER.size + self.body_size(n_values)


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """What everyone, the server included, may know of a key.

    Attributes:
        key_id: 16 random bytes drawn with the key.
        n_summands: how many sites' messages are added at most.
    """

    key_id: bytes
    n_summands: int

    @classmethod
    def new(cls, scheme: RingScheme, n_summands: int, randomness: RandomSource = OS_RANDOMNESS) -> KeyFacts:
        """Draw the id of a new key. Raises: ValueError, if the scheme cannot add that many messages."""
        if not 1 <= n_summands <= scheme.max_summands:
            raise ValueError(f"{scheme.name} adds between 1 and {scheme.max_summands} messages")
        return cls(randomness.bytes(KEY_ID_BYTES), n_summands)

    def pack(self, scheme: RingScheme) -> bytes:
        """Return the public parameters that the server gets."""
        return _FACTS.pack(_PUBLIC_MAGIC, _VERSION, scheme.code, self.n_summands, self.key_id)

    @classmethod
    def unpack(cls, data: bytes, scheme: RingScheme) -> KeyFacts:
        """Parse what ``pack`` wrote. Raises: ProtocolError."""
        if len(data) != _FACTS.size:
            raise ProtocolError(f"{scheme.name} parameters of {len(data)} bytes, {_FACTS.size} are due")
        return cls.read(data, scheme, _PUBLIC_MAGIC)

    @classmethod
    def read(cls, data: bytes, scheme: RingScheme, expected: bytes) -> KeyFacts:
        """Read the facts with which bytes of this magic begin. Raises: ProtocolError."""
        magic, version, code, n_summands, key_id = _FACTS.unpack_from(data)
        if (magic, version, code) != (expected, _VERSION, scheme.code):
            raise ProtocolError(f"not a key, or parameters, of {scheme.name} in this version of VeilBoost")
        if not 1 <= n_summands <= scheme.max_summands:
            raise ProtocolError(f"a {scheme.name} key, or its parameters, of {n_summands} summands")
        return cls(key_id, n_summands)


@dataclass(frozen=True, slots=True)
class RingMessage:
    """One encrypted vector.

    Attributes:
        n_values: how many values it holds.
        n_summands: how many fresh ciphertexts were added into it.
        residues: per prime, uint64[n_ciphertexts, 2, poly_degree], each below the prime.
    """

    n_values: int
    n_summands: int
    residues: tuple[NDArray[np.uint64], ...]

    def pack(self, scheme: RingScheme, key_id: bytes) -> bytes:
        """Return the bytes that travel."""
        header = _HEADER.pack(_CIPHERTEXT_MAGIC, _VERSION, scheme.code, self.n_summands, key_id, self.n_values)
        parts = [header]
        for prime, values in zip(scheme.primes, self.residues, strict=True):
            parts += [(values >> np.uint64(shift)).astype(dtype).tobytes() for dtype, shift, _ in _planes(prime)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes, scheme: RingScheme, facts: KeyFacts) -> RingMessage:
        """Parse and check a message, fresh or added.

        Raises:
            ProtocolError: other scheme, version or key, more summands than agreed, a length that does not fit the
                announced number of values, a residue that is not below its prime.
        """
        if len(data) < _HEADER.size:
            raise ProtocolError(f"{scheme.name} message of {len(data)} bytes is shorter than its header")
        magic, version, code, n_summands, key_id, n_values = _HEADER.unpack_from(data)
        if (magic, version, code) != (_CIPHERTEXT_MAGIC, _VERSION, scheme.code):
            raise ProtocolError(f"not a {scheme.name} message of this version of VeilBoost")
        if key_id != facts.key_id:
            raise ProtocolError(f"{scheme.name} message under another key")
        if not 1 <= n_summands <= facts.n_summands:
            raise ProtocolError(f"{scheme.name} message of {n_summands} summands, at most {facts.n_summands} are due")
        if not 1 <= n_values <= MAX_VALUES or len(data) - _HEADER.size != scheme.body_size(n_values):
            raise ProtocolError(f"{scheme.name} message of {len(data)} bytes does not hold {n_values} values")
        return cls(n_values, n_summands, _unpack_body(memoryview(data)[_HEADER.size :], scheme, n_values))


class MessageSum:
    """The sum of fresh messages of several sites, added as they come; the order does not matter.

    Security: needs no key and learns nothing but sizes. Every byte is checked before it is used: a message that is
        refused has not been added.
    Capacity: at most the number of summands in the public parameters.
    """

    def __init__(self, public_parameters: bytes, scheme: RingScheme) -> None:
        """Raises: ProtocolError, for malformed parameters."""
        self._scheme, self._facts = scheme, KeyFacts.unpack(public_parameters, scheme)
        self._total: RingMessage | None = None
        self._n_added = 0

    def add(self, payload: bytes) -> None:
        """Add a message. Raises: ProtocolError if it is malformed, of another length, or one too many."""
        scheme, total = self._scheme, self._total
        if self._n_added == self._facts.n_summands:
            n_due = self._facts.n_summands
            raise ProtocolError(f"{self._n_added + 1} {scheme.name} messages to add, between 1 and {n_due} are due")
        message = RingMessage.unpack(payload, scheme, self._facts)
        if message.n_summands != 1:
            raise ProtocolError(f"{scheme.name} message of a site is a sum already")
        if total is None:
            self._total = message
        elif message.n_values != total.n_values:
            raise ProtocolError(f"{scheme.name} messages of {message.n_values} and {total.n_values} values")
        else:
            for prime, sums, values in zip(scheme.primes, total.residues, message.residues, strict=True):
                _add_modulo(sums, values, np.uint64(prime))
        self._n_added += 1

    def pack(self) -> bytes:
        """Return the sum as it travels. Raises: ProtocolError if nothing was added."""
        if self._total is None:
            raise ProtocolError(f"no {self._scheme.name} message to add, at least one is due")
        total = RingMessage(self._total.n_values, self._n_added, self._total.residues)
        return total.pack(self._scheme, self._facts.key_id)


def add_messages(public_parameters: bytes, payloads: Sequence[bytes], scheme: RingScheme) -> bytes:
    """Add the fresh messages of several sites (see ``MessageSum``).

    Raises:
        ProtocolError: malformed parameters or messages, messages of different lengths, too many of them.
    """
    total = MessageSum(public_parameters, scheme)
    for payload in payloads:
        total.add(payload)
    return total.pack()


def _add_modulo(sums: NDArray[np.uint64], values: NDArray[np.uint64], prime: np.uint64) -> None:
    for total, value in zip(sums, values, strict=True):  # one ciphertext at a time stays in the cache
        total += value
        np.minimum(total, total - prime, out=total)  # below the prime already: total - prime wraps and is larger


def _width(prime: int) -> int:
    return (prime.bit_length() + 7) // 8


def _planes(prime: int) -> list[tuple[str, int, int]]:
    """Return (dtype, shift, bytes) of the pieces that a residue is cut into.

    Pieces of 4, 2 and 1 bytes in arrays of their own convert at memory speed; rows of 5 or 7 bytes do not.
    """
    pieces, shift, missing = [], 0, _width(prime)
    for dtype, n_bits in _PLANES:
        while missing * 8 >= n_bits:
            pieces.append((dtype, shift, n_bits // 8))
            shift += n_bits
            missing -= n_bits // 8
    return pieces


def _unpack_body(body: memoryview, scheme: RingScheme, n_values: int) -> tuple[NDArray[np.uint64], ...]:
    shape = (scheme.n_ciphertexts(n_values), POLYNOMIALS, scheme.poly_degree)
    n_residues = shape[0] * shape[1] * shape[2]
    start, residues = 0, []
    for prime in scheme.primes:
        values = np.zeros(n_residues, dtype=np.uint64)
        for dtype, shift, n_bytes in _planes(prime):
            piece = np.frombuffer(body, dtype=dtype, count=n_residues, offset=start).astype(np.uint64)
            values |= piece << np.uint64(shift)
            start += n_residues * n_bytes
        if int(values.max()) >= prime:
            raise ProtocolError(f"{scheme.name} message holds a residue that is not below its prime")
        residues.append(values.reshape(shape))
    return tuple(residues)


# Microsoft SEAL through TenSEAL's bindings, with residues as numpy arrays.
#
# TenSEAL's own vectors encrypt with the public key, keep a prime that sums never need, and serialise through a slow
# compressor that both ends must run. The lower-level ``tenseal.sealapi`` does the same arithmetic with the secret key
# at half the cost. It reads and writes files only; an anonymous file in memory serves, so no secret touches a disk.
#
# Only bytes of our own making, with residues checked to lie below their primes, ever reach SEAL.


_SEAL_HEADER = struct.Struct("<HBBBBHQ")  # magic, header size, major, minor, compression, reserved, total size
_SEAL_MAGIC = 0xA15E
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
        size = _SEAL_HEADER.size + len(self._prefix) + self._residue_bytes
        header = _SEAL_HEADER.pack(_SEAL_MAGIC, _SEAL_HEADER.size, *_seal_version(), _NOT_COMPRESSED, 0, size)
        with _memory_file() as (file, path):
            file.write(b"".join((header, self._prefix, residues.astype("<u8", copy=False).tobytes())))
            load(path)


def _read_object(save: Callable[[str], None]) -> bytes:
    """Return the content, uncompressed, of what a SEAL object's ``save`` writes."""
    with _memory_file() as (file, path):
        save(path)
        data = file.read()
    magic, header_size, _, _, compression, _, size = _SEAL_HEADER.unpack_from(data)
    if (magic, header_size, size) != (_SEAL_MAGIC, _SEAL_HEADER.size, len(data)):
        raise BackendUnavailable("SEAL writes another format than this version of VeilBoost reads")
    content = memoryview(data)[_SEAL_HEADER.size :]
    if compression == _NOT_COMPRESSED:
        return bytes(content)
    if compression != _ZSTANDARD:
        raise BackendUnavailable("SEAL was built with a compressor that VeilBoost does not read")
    return bytes(pa.CompressedInputStream(pa.BufferReader(content), "zstd").read())


@functools.cache
def _seal_version() -> tuple[int, int]:
    with _memory_file() as (file, path):
        seal.Plaintext().save(path)
        _, _, major, minor, *_ = _SEAL_HEADER.unpack_from(file.read())
    return major, minor


@contextlib.contextmanager
def _memory_file() -> Iterator[tuple[BinaryIO, str]]:
    """Open an anonymous file in memory, with a path that C++ streams can open."""
    if not hasattr(os, "memfd_create"):
        raise BackendUnavailable("BFV and CKKS need Linux: SEAL's objects pass through anonymous memory files")
    with open(os.memfd_create("veilboost"), "w+b", buffering=0) as file:
        yield file, f"/proc/self/fd/{file.fileno()}"


# The symmetric key that the sites of one job share under BFV or CKKS, and what it does to plaintexts.


class RingProcessor:
    """What the processors of both schemes share: a key of one job attempt, and sums of signed integers under it.

    Attributes:
        n_summands: how many sites the key was made for.
        capacity: the magnitudes of all sites' integers must not add up to more than this.
    """

    scheme: ClassVar[RingScheme]
    capacity: int
    _key: RingKey

    @staticmethod
    def _context(n_summands: int) -> seal.SEALContext:
        """Return SEAL's constants for sums over so many sites. Raises: ValueError: the scheme cannot add so many."""
        raise NotImplementedError

    @classmethod
    def generate(cls, n_summands: int) -> bytes:
        """Draw a fresh key for sums over ``n_summands`` sites and return its secret bytes.

        Security: whoever has the bytes opens every ciphertext of the job: seal them to the other sites, keep them in
            memory only. Randomness of keys and ciphertexts is SEAL's own: seeds from the operating system, expanded by
            BLAKE2xb.

        Raises:
            ValueError: the scheme cannot add that many messages.
        """
        context, facts = cls._context(n_summands), KeyFacts.new(cls.scheme, n_summands)
        key = seal.KeyGenerator(context).secret_key()
        header = _FACTS.pack(_SECRET_MAGIC, _VERSION, cls.scheme.code, facts.n_summands, facts.key_id)
        return header + _secret_codec(cls.scheme, context).export(key.save).tobytes()

    @property
    def n_summands(self) -> int:
        """How many sites the key was made for."""
        return self._key.facts.n_summands

    def public_parameters(self) -> bytes:
        """Return what the server needs to add; no secret is in it."""
        return self._key.facts.pack(self.scheme)

    def _check_capacity(self, integers: NDArray[np.int64]) -> None:
        """Raises: CapacityExceeded: an integer exceeds a site's part of the capacity."""
        bound = self.capacity // self.n_summands
        if integers.size and not -bound <= int(integers.min()) <= int(integers.max()) <= bound:
            raise CapacityExceeded(
                f"an integer exceeds 1/{self.n_summands} of {self.scheme.name}'s capacity of {self.capacity}"
            )

    def _chunks(self, values: NDArray[_Value]) -> Iterator[NDArray[_Value]]:
        """Yield what each ciphertext of a message holds."""
        step = self.scheme.values_per_ciphertext
        return (values[i : i + step] for i in range(0, values.size, step))


class RingKey:
    """A key with its encryptor and decryptor.

    Security: nothing of it leaves the site; ``facts`` may be known to all.
    """

    def __init__(self, scheme: RingScheme, context: seal.SEALContext, secret: bytes, sample: seal.Plaintext) -> None:
        """Rebuild a key from the bytes of ``RingProcessor.generate``.

        Args:
            scheme, context: constants of the scheme.
            secret: comes from another site as a rule, sealed.
            sample: any plaintext of the shape that will be encrypted.

        Raises:
            ProtocolError: ``secret`` is not a key of this scheme.
        """
        self.scheme = scheme
        self.context = context
        self.facts, key = _parse_secret(scheme, context, secret)
        self._encryptor = seal.Encryptor(context, key)
        self._decryptor = seal.Decryptor(context, key)
        self._shape = (POLYNOMIALS, len(scheme.primes), scheme.poly_degree)
        self._codec = ResidueCodec(self._shape, self._encrypt_one(sample).save)

    def encrypt(self, plaintexts: Iterable[seal.Plaintext], n_values: int) -> bytes:
        """Encrypt the plaintexts of one message, with fresh randomness each."""
        residues = np.empty((self.scheme.n_ciphertexts(n_values), *self._shape), dtype=np.uint64)
        for index, plaintext in enumerate(plaintexts):
            residues[index] = self._codec.export(self._encrypt_one(plaintext).save)
        by_prime = tuple(residues[:, :, k] for k in range(len(self.scheme.primes)))
        return RingMessage(n_values, 1, by_prime).pack(self.scheme, self.facts.key_id)

    def decrypt(self, payload: bytes, n_values: int) -> Iterator[seal.Plaintext]:
        """Yield the plaintexts of a message, one per ciphertext.

        Raises:
            ProtocolError: malformed, under another key, or not of ``n_values`` values.
        """
        message = RingMessage.unpack(payload, self.scheme, self.facts)
        if message.n_values != n_values:
            raise ProtocolError(f"{self.scheme.name} message of {message.n_values} values where {n_values} are due")
        for index in range(self.scheme.n_ciphertexts(n_values)):
            residues = np.stack([by_prime[index] for by_prime in message.residues], axis=1)
            ciphertext, plaintext = seal.Ciphertext(), seal.Plaintext()
            self._codec.restore(residues, functools.partial(ciphertext.load, self.context))
            self._decryptor.decrypt(ciphertext, plaintext)
            yield plaintext

    def _encrypt_one(self, plaintext: seal.Plaintext) -> seal.Ciphertext:
        ciphertext = seal.Ciphertext()
        self._encryptor.encrypt_symmetric(plaintext, ciphertext)
        return ciphertext


def split_secret(scheme: RingScheme, secret: bytes) -> tuple[KeyFacts, bytes]:
    """Read the header of a key and return what it says, and the key's residues. Raises: ProtocolError."""
    if len(secret) < _FACTS.size:
        raise ProtocolError(f"a {scheme.name} key is too short")
    return KeyFacts.read(secret, scheme, _SECRET_MAGIC), secret[_FACTS.size :]


def _parse_secret(scheme: RingScheme, context: seal.SEALContext, secret: bytes) -> tuple[KeyFacts, seal.SecretKey]:
    facts, body = split_secret(scheme, secret)
    moduli = np.array(_key_moduli(context), dtype=np.uint64)[:, None]
    if len(body) != 8 * moduli.size * scheme.poly_degree:
        raise ProtocolError(f"a {scheme.name} key has another length")
    residues = np.frombuffer(body, dtype="<u8").reshape(moduli.size, -1)
    if (residues >= moduli).any():
        raise ProtocolError(f"a {scheme.name} key is out of range")
    key = seal.SecretKey()
    _secret_codec(scheme, context).restore(residues, functools.partial(key.load, context))
    return facts, key


def _key_moduli(context: seal.SEALContext) -> tuple[int, ...]:
    return tuple(modulus.value() for modulus in context.key_context_data().parms().coeff_modulus())


@functools.cache
def _secret_codec(scheme: RingScheme, context: seal.SEALContext) -> ResidueCodec:
    sample = seal.KeyGenerator(context).secret_key()  # thrown away: only its format is of interest
    return ResidueCodec((len(_key_moduli(context)), scheme.poly_degree), sample.save)
