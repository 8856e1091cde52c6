"""What stands on a worker of the active party: encryption of gradient pairs, and the opening of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.additive.scheme import Scheme
from he_processors.elgamal.decryption import ElGamalDecryptor
from he_processors.elgamal.encryption import ElGamalEncryptor
from he_processors.elgamal.keys import ElGamalPrivateKey
from he_processors.elgamal.wire import read_rows
from he_processors.errors import ProtocolError
from he_processors.fixed_pairs import PairFormat
from he_processors.histogram.bins import BinLayout
from he_processors.histogram.plain_sums import NodeTotal
from he_processors.paillier.decryption import PaillierDecryptor
from he_processors.paillier.encryption import owner_encryptor
from he_processors.paillier.keys import PaillierPrivateKey
from he_processors.secret_key_bytes import secret_key_from_bytes
from nvflare_plugins.cluster.desk import WorkerPart
from nvflare_plugins.vertical.protocol.elgamal_scheme import ElGamalTerms
from nvflare_plugins.vertical.protocol.encrypted_scheme import announced_format
from nvflare_plugins.vertical.protocol.messages import TrainingSetup

PART = f"{__name__}:EncryptShard"


class EncryptShard(WorkerPart):
    """Encrypts pairs, each with a fresh randomiser of its own; one of several opens a part of all sums, too.

    Security: sees gradient pairs, sums of them, and gets the job's secret key, because encryption with the public key
        alone costs half as much again under elgamal and several times as much under the others: a party's workers are
        that party.
    """

    def __init__(
        self, setup: tuple[int, int, int, bytes], backend: str, secret: bytes, tails: tuple[int, int], opens: bool
    ) -> None:
        """Args: setup: the fields of ``TrainingSetup``; secret: of ``secret_key_to_bytes``; tails: of the format."""
        announced = TrainingSetup(*setup)
        self._encrypt: Any
        if announced.scheme == Scheme.ELGAMAL.value:
            self._encrypt = _Points(ElGamalTerms.of(announced, backend, tails), secret, opens)
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

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        """Decrypt some of a message's ciphertexts. Shapes: uint8[n, width], in wire form."""
        values: list[int] = self._encrypt.decrypt(ciphertexts)
        return values

    def open_points(
        self, body: NDArray[np.uint8], n_bins: tuple[int, ...], totals: list[tuple[int, int, int, tuple[int, int]]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Decrypt and check the sums of some nodes for some features.

        Args:
            n_bins: of each of these features.
            totals: the fields of ``NodeTotal``, of each node.

        Shapes: body: uint8[n_columns, n_nodes * n_slots, 64]; results: of g and of h, int64[n_nodes, 2, n_slots].

        Raises:
            ProtocolError: with one fixed message.
        """
        opened: tuple[NDArray[np.int64], NDArray[np.int64]] = self._encrypt.open(
            body, BinLayout(tuple(n_bins)), [NodeTotal(*one) for one in totals]
        )
        return opened


class _Points:
    def __init__(self, terms: ElGamalTerms, secret: bytes, opens: bool) -> None:
        self._terms = terms
        key = secret_key_from_bytes(secret, terms.public_key)
        if not isinstance(key, ElGamalPrivateKey):
            raise ProtocolError("the secret key is not one of the announced scheme")
        self._encryptor = ElGamalEncryptor(key, terms.curve)
        self.fill = self._encryptor.fill
        self._decryptor = ElGamalDecryptor(key, terms.curve) if opens else None  # its table takes 30 MB and a second

    def __call__(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        rows = self._encryptor.encrypt(self._terms.digits.digits_of(g, h))
        return [self._terms.curve.to_affine(column) for column in rows.columns]

    def open(
        self, body: NDArray[np.uint8], layout: BinLayout, totals: list[NodeTotal]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._decryptor is None:
            raise TypeError("this worker opens no sums")
        rows = read_rows(body, self._terms.curve, slice(None))
        opened = self._decryptor.open_level(rows, self._terms.digits, layout, totals)
        return np.stack([one.g for one in opened]), np.stack([one.h for one in opened])


class _Ciphertexts:
    def __init__(self, pairs: PairFormat, backend: str, secret: bytes) -> None:
        self._format = pairs
        key = secret_key_from_bytes(secret)
        if not isinstance(key, PaillierPrivateKey):
            raise ProtocolError("the secret key is not one of the announced scheme")
        self._encryptor = owner_encryptor(key, backend)
        self._decryptor = PaillierDecryptor(key, backend)

    def __call__(self, g: NDArray[np.int64], h: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        encrypted = self._encryptor.encrypt(self._format.plaintext_rows(g, h))
        return [self._encryptor.arithmetic.to_wire(encrypted)]

    def fill(self, n_rows: int) -> None:
        fill = getattr(self._encryptor.randomisers, "fill", None)
        if fill is not None:
            fill(n_rows)

    def decrypt(self, ciphertexts: NDArray[np.uint8]) -> list[int]:
        return list(self._decryptor.decrypt(ciphertexts))
