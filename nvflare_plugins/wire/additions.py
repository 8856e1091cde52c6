"""What the server adds: words modulo 2^64 or 2^32, or ciphertexts, and behind them residues modulo 2^61 - 1.

It needs no key.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

import numpy as np

from he_processors import field61
from he_processors.errors import ProtocolError
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import Codec, Frame, FrameType, Operation

_RESIDUE = 8
_SHORT = 4
_SHORT_KINDS = (Kind.HISTOGRAM, Kind.HISTOGRAM_METRIC)  # that may travel in 32-bit words


class Summing(Protocol):
    """A sum to which whole contributions are added, one after the other."""

    def add(self, payload: bytes | memoryview) -> None:
        """Add one. Raises: ProtocolError; it has not been added then."""

    def pack(self) -> bytes | memoryview:
        """Return the sum as it travels."""


class WordSum:
    """A sum of vectors of words: of values modulo 2^64, or 2^32, then of residues modulo 2^61 - 1."""

    def __init__(self, n_values: int, n_residues: int = 0, word_bytes: int = 8) -> None:
        n_bytes = word_bytes * n_values
        # Takes memory where something is added, not before.
        self._total = np.zeros(n_bytes + _RESIDUE * n_residues, dtype=np.uint8)
        self._values, self._residues = self._total[:n_bytes].view(f"<u{word_bytes}"), self._total[n_bytes:].view("<u8")

    def add(self, payload: bytes | memoryview) -> None:
        """Add a whole vector. Raises: ProtocolError if it has another length, or a residue is none."""
        if len(payload) != self._total.size:
            raise ProtocolError(f"sent {len(payload)} bytes where words of {self._total.size} bytes are due")
        self.add_at(0, payload)

    def add_at(self, start: int, piece: bytes | memoryview) -> int:
        """Add the whole words of a piece of a vector.

        Args:
            start: the byte at which the piece begins, and with it a word.

        Returns:
            Bytes of the words that were added: all but those of a word that ends behind the piece.

        Raises:
            ProtocolError: as ``add``.
        """
        width, data = self._values.itemsize, np.frombuffer(piece, dtype=np.uint8)
        n_bytes = min(max(self._values.nbytes - start, 0), data.size)
        n_bytes -= n_bytes % width
        words, first = data[:n_bytes].view(self._values.dtype), start // width
        is_behind = start + n_bytes >= self._values.nbytes
        rest = data[n_bytes : data.size - (data.size - n_bytes) % _RESIDUE] if is_behind else data[:0]
        residues = rest.view("<u8").copy()
        if residues.size and int(residues.max()) >= field61.MODULUS:
            raise ProtocolError("sent a residue that is not below its modulus")
        self._values[first : first + words.size] += words
        place = (start + n_bytes - self._values.nbytes) // _RESIDUE if is_behind else 0
        where = slice(place, place + residues.size)
        self._residues[where] = field61.add(self._residues[where], residues)
        return n_bytes + rest.size

    def pack(self) -> memoryview:
        """Return the sum, without a copy."""
        return self._total.data


class _TailedSum:
    """A sum of ciphertexts with residues behind each."""

    def __init__(self, ciphertexts: Summing, n_residues: int) -> None:
        self._ciphertexts, self._residues = ciphertexts, WordSum(0, n_residues)
        self._tail = _RESIDUE * n_residues

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
    return is_contribution and frame.codec.word_bytes > 0


def check_size(frame: Frame, n_bytes: int) -> None:
    """Refuse a sum whose size does not fit its header. Raises: ProtocolError."""
    width = frame.codec.word_bytes
    if width == _SHORT and frame.kind not in _SHORT_KINDS:
        raise ProtocolError(f"{frame.kind.name} does not travel in words of 32 bits")
    if frame.tail % _RESIDUE:
        raise ProtocolError(f"sent a sum with {frame.tail} bytes of residues, which have 8 bytes each")
    if adds_words(frame) and n_bytes != width * frame.n_values + frame.tail:
        raise ProtocolError(
            f"sent {n_bytes} bytes for {frame.n_values} values of {width} bytes and {frame.tail} bytes of residues"
        )


def sum_of_words(frame: Frame) -> WordSum:
    """Return an empty sum for contributions like this one, of words and of the right size."""
    return WordSum(frame.n_values, frame.tail // _RESIDUE, frame.codec.word_bytes)


def open_sum(frame: Frame, public_parameters: Mapping[Codec, bytes]) -> Summing:
    """Return an empty sum for contributions like this one. Raises: ProtocolError."""
    check_size(frame, len(frame.payload))  # before memory is taken for what a header only claims
    if adds_words(frame):
        return sum_of_words(frame)
    if frame.codec in (Codec.BFV, Codec.CKKS):
        parameters = public_parameters.get(frame.codec)
        if parameters is None:
            raise ProtocolError(f"{frame.codec.name} contribution before its public parameters")
        total: Summing = _lattice(frame.codec).open_sum(parameters)
        return _TailedSum(total, frame.tail // _RESIDUE)
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
