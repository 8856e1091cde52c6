"""What stands on a worker of the active party: encryption of gradient pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import Scheme
from he_processors.elgamal.encryption import ElGamalEncryptor
from he_processors.elgamal.keys import ElGamalPrivateKey
from he_processors.errors import ProtocolError
from he_processors.fixed_pairs import PairFormat
from he_processors.okamoto_uchiyama import encryption as okamoto_uchiyama
from he_processors.okamoto_uchiyama.keys import OkamotoUchiyamaPrivateKey
from he_processors.paillier import encryption as paillier
from he_processors.paillier.keys import PaillierPrivateKey
from he_processors.secret_key_bytes import secret_key_from_bytes
from nvflare_plugins.cluster.desk import WorkerPart
from nvflare_plugins.vertical.protocol.elgamal_scheme import ElGamalTerms
from nvflare_plugins.vertical.protocol.encrypted_scheme import announced_format
from nvflare_plugins.vertical.protocol.messages import TrainingSetup

PART = f"{__name__}:EncryptShard"


class EncryptShard(WorkerPart):
    """Encrypts pairs, each with a fresh randomiser of its own.

    Security: sees gradient pairs, and gets the job's secret key, because encryption with the public key alone costs
        half as much again under elgamal and several times as much under the others: a party's workers are that party.
    """

    def __init__(self, setup: tuple[int, int, int, bytes], backend: str, secret: bytes, tails: tuple[int, int]) -> None:
        """Args: setup: the fields of ``TrainingSetup``; secret: of ``secret_key_to_bytes``; tails: of the format."""
        announced = TrainingSetup(*setup)
        self._encrypt: Any
        if announced.scheme == Scheme.ELGAMAL.value:
            self._encrypt = _Points(ElGamalTerms.of(announced, backend, tails), secret)
        else:
            self._encrypt = _Ciphertexts(announced_format(announced, tails), backend, secret)

    def encrypt(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Encrypt each pair.

        Shapes: g, h: int64[n]; result: uint8[n, width] for each column of a message, without its header.
        """
        columns: list[NDArray[np.uint8]] = self._encrypt(g, h)
        return columns

    def fill(self, n_rows: int) -> None:
        """Make randomisers until so many rows can be encrypted with them."""
        self._encrypt.fill(n_rows)


class _Points:
    def __init__(self, terms: ElGamalTerms, secret: bytes) -> None:
        self._terms = terms
        key = secret_key_from_bytes(secret, terms.public_key)
        if not isinstance(key, ElGamalPrivateKey):
            raise ProtocolError("the secret key is not one of the announced scheme")
        self._encryptor = ElGamalEncryptor(key, terms.curve)
        self.fill = self._encryptor.fill

    def __call__(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        rows = self._encryptor.encrypt(self._terms.digits.digits_of(g, h))
        return [self._terms.curve.to_affine(column) for column in rows.columns]


class _Ciphertexts:
    def __init__(self, pairs: PairFormat, backend: str, secret: bytes) -> None:
        self._format = pairs
        key = secret_key_from_bytes(secret)
        self._encryptor: Any
        if isinstance(key, PaillierPrivateKey):
            self._encryptor = paillier.owner_encryptor(key, backend)
        elif isinstance(key, OkamotoUchiyamaPrivateKey):
            self._encryptor = okamoto_uchiyama.owner_encryptor(key, backend)
        else:
            raise ProtocolError("the secret key is not one of the announced scheme")

    def __call__(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        encrypted = self._encryptor.encrypt(self._format.plaintext_rows(g, h))
        return [self._encryptor.arithmetic.to_wire(encrypted)]

    def fill(self, n_rows: int) -> None:
        fill = getattr(self._encryptor.randomisers, "fill", None)
        if fill is not None:
            fill(n_rows)
