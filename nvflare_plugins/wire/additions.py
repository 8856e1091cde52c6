"""What the server adds: words modulo 2^64 or ciphertexts, and behind them residues modulo 2^61 - 1. It needs no key."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

import numpy as np

from he_processors import field61
from he_processors.errors import ProtocolError
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Operation

_WORD = 8


class Summing(Protocol):
    """A sum to which whole contributions are added, one after the other."""

    def add(self, payload: bytes | memoryview) -> None:
        """Add one. Raises: ProtocolError; it has not been added then."""

    def pack(self) -> bytes | memoryview:
        """Return the sum as it travels."""


class WordSum:
    """A sum of vectors of 64-bit words: of values modulo 2^64, then of residues modulo 2^61 - 1."""

    def __init__(self, n_values: int, n_residues: int = 0) -> None:
        self._n_values = n_values
        self._total = np.zeros(n_values + n_residues, dtype="<u8")  # takes memory where something is added, not before

    def add(self, payload: bytes | memoryview) -> None:
        """Add a whole vector. Raises: ProtocolError if it has another length, or a residue is none."""
        if len(payload) != _WORD * self._total.size:
            raise ProtocolError(f"sent {len(payload)} bytes for {self._total.size} words of 8 bytes")
        self.add_at(0, payload)

    def add_at(self, start: int, words: bytes | memoryview) -> None:
        """Add some whole words of a vector, from the word number ``start`` on. Raises: ProtocolError, as ``add``."""
        added = np.frombuffer(words, dtype="<u8")
        n_plain = min(max(self._n_values - start, 0), added.size)
        residues = added[n_plain:]
        if residues.size and int(residues.max()) >= field61.MODULUS:
            raise ProtocolError("sent a residue that is not below its modulus")
        self._total[start : start + n_plain] += added[:n_plain]
        rest = slice(start + n_plain, start + added.size)
        self._total[rest] = field61.add(self._total[rest], residues)

    def pack(self) -> memoryview:
        """Return the sum, without a copy."""
        return self._total.data.cast("B")


class _TailedSum:
    """A sum of ciphertexts with residues behind each."""

    def __init__(self, ciphertexts: Summing, n_residues: int) -> None:
        self._ciphertexts, self._residues = ciphertexts, WordSum(0, n_residues)
        self._tail = _WORD * n_residues

    def add(self, payload: bytes | memoryview) -> None:
        """Add one. Raises: ProtocolError; the attempt ends then."""
        body = memoryview(payload)[: len(payload) - self._tail]
        self._ciphertexts.add(bytes(body))
        self._residues.add(memoryview(payload)[len(body) :])

    def pack(self) -> bytes:
        """Return the sum as it travels."""
        return b"".join((self._ciphertexts.pack(), self._residues.pack()))


def adds_words(frame: Frame) -> bool:
    """Tell whether a frame holds words that are added."""
    is_contribution = frame.operation is Operation.SUM and frame.type is FrameType.CONTRIBUTION
    return is_contribution and frame.codec in (Codec.PLAIN, Codec.MASKED, Codec.PLUGIN)


def check_size(frame: Frame, n_bytes: int) -> None:
    """Refuse a sum whose size does not fit its header. Raises: ProtocolError."""
    if frame.tail % _WORD:
        raise ProtocolError(f"sent a sum with {frame.tail} bytes of residues, which have 8 bytes each")
    if adds_words(frame) and n_bytes != _WORD * frame.n_values + frame.tail:
        raise ProtocolError(
            f"sent {n_bytes} bytes for {frame.n_values} values of 8 bytes and {frame.tail} bytes of residues"
        )


def open_sum(frame: Frame, public_parameters: Mapping[Codec, bytes]) -> Summing:
    """Return an empty sum for contributions like this one. Raises: ProtocolError."""
    check_size(frame, len(frame.payload))  # before memory is taken for what a header only claims
    if adds_words(frame):
        return WordSum(frame.n_values, frame.tail // _WORD)
    if frame.codec in (Codec.BFV, Codec.CKKS):
        parameters = public_parameters.get(frame.codec)
        if parameters is None:
            raise ProtocolError(f"{frame.codec.name} contribution before its public parameters")
        total: Summing = _lattice(frame.codec).open_sum(parameters)
        return _TailedSum(total, frame.tail // _WORD)
    raise ProtocolError(f"{frame.kind.name}: codec {frame.codec.name} cannot be summed")


def add_words(payloads: Sequence[bytes], n_values: int) -> bytes:
    """Add vectors of 64-bit words modulo 2^64.

    Raises:
        ProtocolError: a payload does not hold exactly ``n_values`` words.
    """
    total = WordSum(n_values)
    for payload in payloads:
        total.add(payload)
    return bytes(total.pack())


def _lattice(codec: Codec) -> ModuleType:
    # Imported when first needed: the lattice library takes long to load and most jobs do without it.
    return importlib.import_module("he_processors.bfv" if codec is Codec.BFV else "he_processors.ckks")
