"""Pairwise masks: a sum over sites of which the server sees only uniform noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.field61 import MODULUS
from he_processors.key_agreement import DOMAIN, KEY_SIZE_BYTES, derive_key, encode_fields, expand_key, extract_key

# Pairwise masks: a sum over sites of which the server sees only uniform noise.
#
# For every ordered pair of sites i < j both derive the same keystream m_ij; site i adds it, site j subtracts it, so all
# masks cancel in the sum over all sites. Each single message is uniform to anyone who lacks one of the pair keys.
#
# The sum itself is blinded as well: one site, the blinder, adds a keystream from the key that all sites share, and
# every site subtracts it from the total. Without it the server would read every aggregate.
#
# Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017), section
# 4.0.1. There is no recovery from a lost site: a collective of XGBoost cannot lose a worker, so the attempt is
# restarted under fresh keys.


MAX_MODULUS = 2**63
"""Residues below this can be added in 64 bits without a carry."""

_CHUNK_VALUES = 1 << 15  # 256 KiB of keystream: stays in the second-level cache between AES and the addition
_BLOCK_BYTES = 16
_ZEROS = bytes(8 * _CHUNK_VALUES)
_WORD = np.dtype("<u8")

Word = TypeVar("Word", np.uint32, np.uint64)


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """Names one message of a session; every field enters the key of its masks.

    Attributes:
        counter: number of the exchange within the session, never reset. XGBoost's own sequence numbers restart with
            each communicator and would not do.
        kind: what is summed, as the catalogue of messages calls it.
        phase: where in training it is summed.
        n_values: how many values the message holds.
    """

    counter: int
    kind: str
    phase: str
    n_values: int

    def __post_init__(self) -> None:
        if not 0 <= self.counter < 2**64:
            raise ValueError("counter must lie in [0, 2^64)")
        if self.n_values < 0:
            raise ValueError("n_values must not be negative")


class PairwiseMasks:
    """Masks the messages of one site and unblinds their sums, for one session.

    Security: to anyone who lacks a pair key of this site, what ``mask`` returns is uniform (under AES-256-CTR as a
        keystream) and independent of the values. The server alone learns nothing, not even the sum. The server
        together with one other site learns the sums, as that site does; only the server together with all other
        sites learns this site's values. A counter encodes once: a second encoding under one counter would reveal
        the difference of the two messages, so it is refused. A retry resends the bytes of the first encoding.
    Capacity: exact modulo 2^64, modulo 2^32 for words of 32 bits, or modulo the given modulus; the caller keeps the
        true sum inside that range.
    """

    def __init__(
        self,
        session_id: bytes,
        rank: int,
        pair_secrets: Mapping[int, bytes],
        group_secret: bytes,
        blinder: int | None = 0,
    ) -> None:
        """Prepare the keys of a session.

        Args:
            session_id: identifies the job attempt; equal at all sites.
            rank: this site's number, 0 to number of sites - 1.
            pair_secrets: by rank of each other site, the secret shared with it alone.
            group_secret: the secret that all sites share and the server lacks.
            blinder: rank of the site that blinds the sum; None leaves the sum readable by the server, which only a
                profile with a trusted aggregator may ask for. Masks are then of other keys: a message that has both
                kinds would show its blinding.

        Raises:
            ValueError: ranks or lengths of secrets do not fit together.
        """
        _check_session(session_id, rank, pair_secrets, group_secret)
        if blinder is not None and not 0 <= blinder <= len(pair_secrets):
            raise ValueError("the blinder must be a rank of the session")
        self._rank = rank
        self._blinder = blinder
        self._last_counter = -1
        self._is_closed = False
        purpose = "masks/readable/pair" if blinder is None else "masks/pair"
        self._pair_keys = {
            peer: extract_key(derive_key(secret, session_id, purpose, min(rank, peer), max(rank, peer)))
            for peer, secret in sorted(pair_secrets.items())
        }
        self._group_key = extract_key(derive_key(group_secret, session_id, "masks/group"))

    def mask(self, values: NDArray[Word], label: MessageLabel, modulus: int | None = None) -> NDArray[Word]:
        """Return the values plus this site's masks for the message ``label``.

        Shapes: values: uint64[n_values], each below the modulus, or uint32[n_values]; result: as values, a new array.
        Security: the result may be shown to the server.

        Args:
            values: two's complement or residues; not changed.
            label: names the message; its counter must exceed that of every message masked before.
            modulus: None for 2^64, or 2^32 of uint32; else at most 2^63, and masks are uniform below it.

        Raises:
            ProtocolError: the counter has been used already, or is smaller than one that has.
            TypeError, ValueError: wrong dtype, length, modulus, or residues not below it.
        """
        self._require_open()
        _check_values(values, label, modulus)
        if label.counter <= self._last_counter:
            raise ProtocolError(f"counter {label.counter} was passed already: a message is masked only once")
        self._last_counter = label.counter
        masked, info = values.copy(), _info(label, _modulus_in_keys(values, modulus))
        for peer, key in self._pair_keys.items():
            _apply_keystream(masked, key, info, modulus, subtract=peer < self._rank)
        if self._rank == self._blinder:
            _apply_keystream(masked, self._group_key, info, modulus, subtract=False)
        return masked

    def unblind(self, total: NDArray[Word], label: MessageLabel, modulus: int | None = None) -> NDArray[Word]:
        """Return the sum over all sites from the total that came back from the server.

        Shapes: total: uint64[n_values], or uint32[n_values]; result: as total, a new array.

        Raises:
            ProtocolError: this message has not been masked here.
            TypeError, ValueError: as ``mask``.
        """
        self._require_open()
        _check_values(total, label, modulus)
        if label.counter > self._last_counter:
            raise ProtocolError(f"counter {label.counter} has not been masked by this site yet")
        result = total.copy()
        if self._blinder is not None:
            info = _info(label, _modulus_in_keys(total, modulus))
            _apply_keystream(result, self._group_key, info, modulus, subtract=True)
        return result

    def close(self) -> None:
        """Forget all keys; every later call fails."""
        self._pair_keys.clear()
        self._group_key = b""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise ProtocolError("the session of these masks is closed: its keys are gone")


def _check_session(session_id: bytes, rank: int, pair_secrets: Mapping[int, bytes], group_secret: bytes) -> None:
    if set(pair_secrets) | {rank} != set(range(len(pair_secrets) + 1)):
        raise ValueError("pair_secrets must hold exactly the other ranks of the session")
    if not session_id or any(len(s) != KEY_SIZE_BYTES for s in (*pair_secrets.values(), group_secret)):
        raise ValueError(f"a session id and secrets of {KEY_SIZE_BYTES} bytes are required")


def _check_values(values: NDArray[Word], label: MessageLabel, modulus: int | None) -> None:
    if values.dtype not in ((np.uint32, np.uint64) if modulus is None else (np.uint64,)) or values.ndim != 1:
        raise TypeError("values must be a one-dimensional array of uint64, or of uint32 without a modulus")
    if values.size != label.n_values:
        raise ValueError(f"the label announces {label.n_values} values, the array holds {values.size}")
    if modulus is None:
        return
    if not 2 <= modulus <= MAX_MODULUS:
        raise ValueError("the modulus must lie in [2, 2^63]")
    if values.size and int(values.max()) >= modulus:
        raise ValueError("residues must be below the modulus")


class _Keystream:
    """Uniform words, or uniform residues, from AES-256-CTR under a key that is used for one message only."""

    def __init__(self, key: bytes, modulus: int | None, most: int, word: np.dtype[Any] = _WORD) -> None:
        """Take the key of the message; ``most`` numbers, at most, are asked for at once."""
        self._aes: CipherContext = Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK_BYTES))).encryptor()
        self._buffer = bytearray(word.itemsize * most + 2 * _BLOCK_BYTES)  # whole blocks, and the one that AES wants
        self._modulus, self._word = modulus, word

    def next(self, n: int) -> NDArray[Any]:
        """Return the next ``n`` numbers; the array is valid until the next call."""
        if self._modulus is None:
            return self._words(n)
        return self._residues(n, self._modulus)

    def _words(self, n: int) -> NDArray[Any]:
        # The key stream is the encryption of zeros. One whole number of 16-byte blocks at a time keeps the position
        # independent of how callers slice their requests.
        n_bytes = -(-self._word.itemsize * n // _BLOCK_BYTES) * _BLOCK_BYTES
        for start in range(0, n_bytes, len(_ZEROS)):
            zeros = memoryview(_ZEROS)[: n_bytes - start]
            self._aes.update_into(zeros, memoryview(self._buffer)[start:])
        return np.frombuffer(self._buffer, dtype=self._word, count=n)

    def _residues(self, n: int, modulus: int) -> NDArray[np.uint64]:
        # Rejection: cut to the modulus's bit length, keep what lies below it. Both sites of a pair read the same
        # words, hence reject the same ones.
        excess = np.uint64(64 - (modulus - 1).bit_length())
        bound = np.uint64(modulus)
        kept: list[NDArray[np.uint64]] = []
        n_missing = n
        while n_missing:
            candidates = self._words(n_missing) >> excess  # a copy: excess >= 1, and the buffer is used again
            accepted = candidates if int(candidates.max()) < modulus else candidates[candidates < bound]
            kept.append(accepted)
            n_missing -= accepted.size
        if len(kept) == 1:
            return kept[0]
        return np.concatenate(kept) if kept else np.empty(0, dtype=np.uint64)


def uniform_residues(key: bytes, modulus: int, n: int) -> NDArray[np.uint64]:
    """Expand a key, used for nothing else, to uniform residues. Shapes: result: uint64[n], each below the modulus."""
    return _Keystream(key, modulus, n).next(n)  # a new array: residues are never words as they stand in the buffer


def _modulus_in_keys(values: NDArray[Any], modulus: int | None) -> int | None:
    """Return what stands for the modulus in a message's keys: words of each width have keys of their own."""
    return modulus if values.itemsize == _WORD.itemsize else 1 << (8 * values.itemsize)


def _info(label: MessageLabel, modulus: int | None) -> bytes:
    """Return what the keys of a message are derived for; the same for all pairs."""
    fields = (label.counter, label.kind, label.phase, label.n_values, modulus or 0)
    return encode_fields(f"{DOMAIN}/masks/message", *fields)


def _apply_keystream(values: NDArray[Any], key: bytes, info: bytes, modulus: int | None, *, subtract: bool) -> None:
    """Add or subtract the keystream of one message in place, modulo ``modulus`` (None: that of the words)."""
    word = values.dtype.newbyteorder("<")
    stream = _Keystream(expand_key(key, info), modulus, min(values.size, _CHUNK_VALUES), word)
    for start in range(0, values.size, _CHUNK_VALUES):
        part = values[start : start + _CHUNK_VALUES]
        mask = stream.next(part.size)
        if modulus is None:
            (np.subtract if subtract else np.add)(part, mask, out=part)
            continue
        bound = np.uint64(modulus)
        part += (bound - mask) if subtract else mask
        np.minimum(part, part - bound, out=part)  # below the modulus already: part - bound wraps and is larger


# Pairwise masks modulo p = 2^61 - 1 for the few words that travel with every sum: its tags, and flags.
#
# As above: for every pair of sites i < j both derive the same keystream, site i adds it, site j subtracts it, and
# one site adds a keystream of the key that all share, which every site takes off the total. What is masked is short and
# comes with every message, so that setting up a cipher for each message and pair would be most of the cost: here a pair
# has one AES-256 key for the whole session, and the block for residue k of message c is the encryption of (c, k).
# Messages are numbered by the session's never-reset counter, so no block is used twice. A block of 128 bits, taken
# modulo p, is uniform up to 2^-67.


_BLINDER = 0
_P = np.uint64(MODULUS)


class ResidueMasks:
    """Masks the residues of one site and unblinds their sums, for one session.

    Security: as ``PairwiseMasks``, modulo p. A counter masks once.
    """

    def __init__(self, session_id: bytes, rank: int, pair_secrets: Mapping[int, bytes], group_secret: bytes) -> None:
        """Prepare the keys of a session; arguments as of ``PairwiseMasks``. Raises: ValueError."""
        _check_session(session_id, rank, pair_secrets, group_secret)
        self._rank, self._last_counter = rank, -1
        self._pairs = {
            peer: _cipher(derive_key(secret, session_id, "residues/pair", min(rank, peer), max(rank, peer)))
            for peer, secret in sorted(pair_secrets.items())
        }
        self._group: CipherContext | None = _cipher(derive_key(group_secret, session_id, "residues/group"))

    def mask(self, residues: NDArray[np.uint64], counter: int) -> NDArray[np.uint64]:
        """Return the residues plus this site's masks for a message.

        Shapes: residues: uint64[k], each below p; result: uint64[k], each below p.

        Raises:
            ProtocolError: the counter was passed already, or the session is closed.
        """
        group = self._open_group()
        if counter <= self._last_counter:
            raise ProtocolError(f"counter {counter} was passed already: a message is masked only once")
        self._last_counter = counter
        blocks, masked = _blocks(counter, residues.size), residues % _P
        for peer, cipher in self._pairs.items():
            stream = _stream(cipher, blocks)
            masked = _added(masked, _P - stream if peer < self._rank else stream)
        if self._rank == _BLINDER:
            masked = _added(masked, _stream(group, blocks))
        return masked

    def unblind(self, total: NDArray[np.uint64], counter: int) -> NDArray[np.uint64]:
        """Return the sum over all sites from the total that came back. Shapes: total, result: uint64[k], below p.

        Raises:
            ProtocolError: this message has not been masked here, or the session is closed.
        """
        group = self._open_group()
        if counter > self._last_counter:
            raise ProtocolError(f"counter {counter} has not been masked by this site yet")
        return _added(total % _P, _P - _stream(group, _blocks(counter, total.size)))

    def close(self) -> None:
        """Forget all keys; every later call fails."""
        self._pairs.clear()
        self._group = None

    def _open_group(self) -> CipherContext:
        if self._group is None:
            raise ProtocolError("the session of these masks is closed: its keys are gone")
        return self._group


def _cipher(key: bytes) -> CipherContext:
    # Block by block: the blocks that are encrypted are numbers which never come again, as in counter mode.
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305


def _blocks(counter: int, n: int) -> bytes:
    numbers = np.empty((n, 2), "<u8")
    numbers[:, 0], numbers[:, 1] = counter, np.arange(n)
    return numbers.tobytes()


def _stream(cipher: CipherContext, blocks: bytes) -> NDArray[np.uint64]:
    """Return a residue for each block: its 128 bits modulo p, of which 2^64 is 8."""
    words = (np.frombuffer(cipher.update(blocks), "<u8") % _P).reshape(-1, 2)
    return _added(words[:, 0], (words[:, 1] << np.uint64(3)) % _P)


def _added(residues: NDArray[np.uint64], more: NDArray[np.uint64]) -> NDArray[np.uint64]:
    total = residues + more
    np.minimum(total, total - _P, out=total)  # below p already: total - p wraps and is larger
    return total
