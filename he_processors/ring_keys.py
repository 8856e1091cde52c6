"""The symmetric key that the sites of one job share under BFV or CKKS, and what it does to plaintexts."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator

import numpy as np
import tenseal.sealapi as seal

from he_processors.errors import ProtocolError
from he_processors.ring_ciphertexts import POLYNOMIALS, KeyFacts, RingMessage, RingScheme
from he_processors.seal_access import ResidueCodec

_SECRET = struct.Struct("<4sBBI16s")  # magic, version, scheme, summands, key id; the key's residues follow
_MAGIC = b"VLHS"
_VERSION = 1


def generate_secret(scheme: RingScheme, context: seal.SEALContext, n_summands: int) -> bytes:
    """Draw a fresh key and return it as bytes.

    Security: whoever has the bytes opens every ciphertext of the job: seal them to the other sites, keep them in memory
        only. Randomness of keys and ciphertexts is SEAL's own: seeds from the operating system, expanded by BLAKE2xb.

    Raises:
        ValueError: the scheme cannot add that many messages.
    """
    facts = KeyFacts.new(scheme, n_summands)
    key = seal.KeyGenerator(context).secret_key()
    header = _SECRET.pack(_MAGIC, _VERSION, scheme.code, facts.n_summands, facts.key_id)
    return header + _secret_codec(scheme, context).export(key.save).tobytes()


class RingKey:
    """A key with its encryptor and decryptor.

    Security: nothing of it leaves the site; ``facts`` may be known to all.
    """

    def __init__(self, scheme: RingScheme, context: seal.SEALContext, secret: bytes, sample: seal.Plaintext) -> None:
        """Rebuild a key from the bytes of ``generate_secret``.

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
    if len(secret) < _SECRET.size:
        raise ProtocolError(f"a {scheme.name} key is too short")
    magic, version, code, n_summands, key_id = _SECRET.unpack_from(secret)
    if (magic, version, code) != (_MAGIC, _VERSION, scheme.code):
        raise ProtocolError(f"not a key of {scheme.name} in this version of VeilBoost")
    if not 1 <= n_summands <= scheme.max_summands:
        raise ProtocolError(f"a {scheme.name} key for {n_summands} summands")
    return KeyFacts(key_id, n_summands), secret[_SECRET.size :]


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
