"""The format of evidence: its lines, and what they may say."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from he_processors.errors import ProtocolError
from nvflare_plugins.base.files import create_held, for_owner, make_folder, sync_folder

# The format of evidence: canonical JSON lines in a hash chain, commitments to wire bytes, signed heads.
#
# A log is a text file of JSON lines. Line ``n`` holds one record in canonical form (sorted keys, no blanks, ASCII, no
# floats) with its number ``n`` and its ``hash``; the hash covers the previous hash and every other byte of the line:
#
# hash_n = SHA-256("veilboost evidence record v1" || 0 || hash_(n-1) || canonical record without its hash)
#
# with 32 zero bytes before the first line. Because only the canonical form is accepted, every changed byte shows. The
# writer is ``evidence/log.py``, the checker is ``evidence/verification.py``; both use only what stands here.
#
# Opening, session and end carry the time by their party's clock, in UTC and whole seconds. The opening tells of which
# attempt of the job a log is, and names the party's own log of the attempt before by that attempt and by the hash of
# its last record, so that nobody can leave out an attempt of which a later log is shown.


FORMAT = "veilboost-evidence-3"
FORMATS_BEFORE = ("veilboost-evidence-1", "veilboost-evidence-2")
EXPORT_SUFFIX = ".evidence.jsonl"
SALTS_SUFFIX = ".evidence.salts"
SERVER = "server"
GENESIS = bytes(32)

MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
MAX_DEPTH = 32  # of lists and objects in each other; a record has six
MAX_DIGITS = 19  # no count or size of a log comes near


CLEAR_CODECS = frozenset({"PUBLIC", "PLAIN", "PLAIN_32"})
"""Codecs under which a payload can be read by whoever carries it. A private kind travels so under ``plain`` only."""

_RECORD_DOMAIN = b"veilboost evidence record v1\0"
_HEAD_DOMAIN = "veilboost evidence head v1"
_SEAL_DOMAIN = "veilboost evidence seal v1"

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.@ -]{0,126}[A-Za-z0-9_])?")
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_HEX = re.compile(r"(?:[0-9a-f]{2})+")

_EXACT = frozenset({type(None), str, int, bool})
# Several records per message, each encoded twice: building an encoder for each would cost as much as encoding.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)

Record = dict[str, Any]


def canonical(value: Mapping[str, Any]) -> bytes:
    """Encode a record in the only form that is accepted.

    Raises:
        ValueError: the record holds a value that JSON cannot state exactly (a float, a key that is not text).
    """
    _refuse_inexact(value)
    return _encode(value)


def chain_line(previous: bytes, body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the line of a record that follows ``previous``, and its hash; ``body`` is the record without it.

    Raises: ValueError as ``canonical``.
    """
    _refuse_inexact(body)
    before, after = _around_hash(body)
    digest = _digest(previous, _joined(before, after))
    return _joined(before, _member_hash(digest.hex()), after), digest


def is_name(text: object) -> bool:
    """Tell whether ``text`` may name a site, job, attempt or kind: short, printable, never a path."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None and ".." not in text


def time_text(moment: datetime) -> str:
    """Return a moment as evidence states it."""
    return moment.astimezone(UTC).strftime(_TIME)


def read_time(text: str) -> datetime:
    """Read a moment as evidence states it, and in no other spelling. Raises: ProtocolError."""
    try:
        moment = datetime.fromisoformat(text) if text.endswith("Z") else None
    except ValueError:
        moment = None
    if moment is None or time_text(moment) != text:
        raise ProtocolError("a time in evidence is not of the form 2026-01-31T12:00:00Z")
    return moment.replace(tzinfo=UTC)


def export_name(site: str) -> str:
    """Return the file name under which the log of ``site`` is exported.

    Raises:
        ProtocolError: the name could lead out of a folder or is not printable.
    """
    if not is_name(site):
        raise ProtocolError("a site name in evidence must be short, printable and not a path")
    return site + EXPORT_SUFFIX


@dataclass(frozen=True, slots=True)
class Earlier:
    """A party's own log of the attempt before: its attempt, and the hash of its last record, 64 hexadecimal digits."""

    attempt: str
    digest: str

    @classmethod
    def read(cls, attempt: object, digest: object) -> Earlier:
        """Read it from JSON values. Raises: ProtocolError."""
        if not is_name(attempt) or not isinstance(digest, str) or len(digest) != 64 or _HEX.fullmatch(digest) is None:
            raise ProtocolError("an evidence log names no possible log before it")
        return cls(str(attempt), digest)


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The state of one log at one moment, as its owner states it to the others.

    Attributes:
        site: owner of the log.
        n_records: number of records that the head covers.
        digest: hash of the last of them, 32 bytes.
        signature: the owner's signature over ``statement``; None in an unsigned session.
    """

    site: str
    n_records: int
    digest: bytes
    signature: bytes | None = None

    def statement(self, job_id: str, attempt: str) -> bytes:
        """Return the bytes that the owner signs, bound to the job attempt so that a head cannot be reused."""
        head = self.to_dict()
        del head["signature"]
        return canonical({"domain": _HEAD_DOMAIN, "job_id": job_id, "attempt": attempt, **head})

    def to_dict(self) -> Record:
        """Return the head as JSON values."""
        signature = None if self.signature is None else self.signature.hex()
        return {"site": self.site, "n_records": self.n_records, "digest": self.digest.hex(), "signature": signature}

    def to_bytes(self) -> bytes:
        """Return the head as it travels to the other sites."""
        return canonical(self.to_dict())

    @classmethod
    def from_dict(cls, value: object) -> SignedHead:
        """Read a head from JSON values of a peer.

        Raises:
            ProtocolError: anything but exactly the four fields, each of its type and range.
        """
        if not isinstance(value, dict) or set(value) != {"site", "n_records", "digest", "signature"}:
            raise ProtocolError("an evidence head does not have the expected fields")
        n_records, signature = value["n_records"], value["signature"]
        if not is_name(value["site"]) or type(n_records) is not int or n_records < 1:
            raise ProtocolError("an evidence head names no valid site or number of records")
        digest = _hex_bytes(value["digest"], "digest")
        if len(digest) != 32:
            raise ProtocolError("the digest of an evidence head must have 32 bytes")
        return cls(value["site"], n_records, digest, None if signature is None else _hex_bytes(signature, "signature"))

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedHead:
        """Read a head received from a peer; raises ProtocolError as ``from_dict``."""
        return cls.from_dict(_parse_json(data))


def seal_statement(body: Mapping[str, Any], previous: bytes) -> bytes:
    """Return the bytes signed by the last record of a log (``body`` is that record without signature and hash)."""
    return canonical({"domain": _SEAL_DOMAIN, "previous": previous.hex(), "body": dict(body)})


def parse_line(line: bytes) -> Record:
    """Read one line of a log without looking at its place in the chain.

    Raises:
        ProtocolError: the line is too long or nested too deep, not JSON, not an object, or not in canonical form.
    """
    return _read_line(line)[0]


def read_chain(path: Path) -> Iterator[tuple[Record, bytes]]:
    """Yield every record of a log with its hash, having checked number, form and chain of each.

    Capacity: lines of at most ``MAX_LINE_BYTES``, files of at most ``MAX_FILE_BYTES``; read as a stream.

    Raises:
        ProtocolError: at the first record that does not follow from the one before it.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ProtocolError(f"the evidence file is larger than {MAX_FILE_BYTES} bytes")
    with path.open("rb") as file:
        previous = GENESIS
        for n, line in enumerate(_lines(file)):
            try:
                record, previous = read_link(line, previous, n)
            except ProtocolError as error:
                raise ProtocolError(f"record {n}: {error}") from None
            yield record, previous


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 2):
        if not line.endswith(b"\n"):
            raise ProtocolError("the evidence file ends in the middle of a line, or a line is too long")
        yield line[:-1]


def read_link(line: bytes, previous: bytes, n: int) -> tuple[Record, bytes]:
    """Return the record of a line with its hash, if it is record ``n`` and follows the one before.

    Raises:
        ProtocolError: as ``parse_line``, or the record has another number or hash.
    """
    record, body = _read_line(line)
    if type(record.get("n")) is not int or record["n"] != n:
        raise ProtocolError("the record number does not follow: a record is missing, repeated or out of order")
    digest = _digest(previous, body)
    if record.get("hash") != digest.hex():
        raise ProtocolError("the hash does not follow from the records before it")
    return record, digest


def _read_line(line: bytes) -> tuple[Record, bytes]:
    """Return the record of a line, and its canonical form without its hash."""
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"an evidence line is longer than {MAX_LINE_BYTES} bytes")
    record = _parse_json(line)
    if isinstance(record, dict) and not _is_deeper(record, line, MAX_DEPTH):
        with suppress(ValueError, RecursionError):  # nothing inexact came through there
            before, after = _around_hash(record)
            own = _member_hash(record["hash"]) if "hash" in record else b""
            if _joined(before, own, after) == line:
                return record, _joined(before, after)
    raise ProtocolError("an evidence line is not a record in canonical form")


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(
            data.decode("ascii"), parse_int=_whole_number, parse_float=_refuse_number, parse_constant=_refuse_number
        )
    except (ValueError, RecursionError):
        raise ProtocolError("evidence is not valid JSON in ASCII without fractions") from None


def _encode(value: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(value).encode("ascii")


def _around_hash(record: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Encode what stands before and after a record's hash in its line: each is encoded once, and hashed and written."""
    before = {key: value for key, value in record.items() if key < "hash"}
    after = {key: value for key, value in record.items() if key > "hash"}
    return _encode(before)[1:-1], _encode(after)[1:-1]


def _member_hash(value: object) -> bytes:
    return _encode({"hash": value})[1:-1]


def _joined(*members: bytes) -> bytes:
    return b"{" + b",".join(filter(None, members)) + b"}"


def _digest(previous: bytes, body: bytes) -> bytes:
    return hashlib.sha256(_RECORD_DOMAIN + previous + body).digest()


def _is_deeper(value: object, text: bytes, most: int) -> bool:
    """Tell whether lists and objects are nested more than ``most`` deep; how deep JSON is read, Python decides."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    level = [value]
    for _ in range(most):
        level = [part for one in level for part in _parts(one)]
    return any(isinstance(one, (dict, list)) for one in level)


def _parts(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _whole_number(text: str) -> int:
    if len(text.removeprefix("-")) > MAX_DIGITS:
        raise ValueError("a number of too many digits")
    return int(text)


def _refuse_number(text: str) -> Any:
    raise ValueError("a number that is not an integer")


def _refuse_inexact(value: object) -> None:
    if type(value) in _EXACT:
        return
    if isinstance(value, Mapping):
        if not {str}.issuperset(map(type, value)):
            raise ValueError("keys of evidence must be text")
        for item in value.values():
            if type(item) not in _EXACT:
                _refuse_inexact(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_inexact(item)
    else:
        raise ValueError(f"evidence cannot hold a value of type {type(value).__name__}")


def _hex_bytes(value: object, what: str) -> bytes:
    if not isinstance(value, str) or len(value) > 1 << 14 or _HEX.fullmatch(value) is None:
        raise ProtocolError(f"the {what} of an evidence head is not in hexadecimal form")
    return bytes.fromhex(value)


# Files that grow by lines, and room on the disk for their last ones.


class Lines:
    """A new file that grows by lines. What a full disk did not take stays in memory, so that no line is ever torn."""

    def __init__(self, path: Path, mode: int) -> None:
        make_folder(path.parent)
        self._descriptor = create_held(path, mode)
        self._folder: Path | None = path.parent  # until the file's name is on the disk
        self._pending = bytearray()

    def add(self, line: bytes) -> None:
        """Take a line, in memory."""
        self._pending += line

    def drain(self, most: int = 0) -> None:
        """Write what is pending if it is more than ``most`` bytes. Raises: OSError."""
        while len(self._pending) > most:
            del self._pending[: os.write(self._descriptor, self._pending)]

    def sync(self) -> None:
        """Write all, durably. Raises: OSError."""
        self.drain()
        os.fsync(self._descriptor)
        if self._folder is not None:
            sync_folder(self._folder)
            self._folder = None

    def close(self) -> None:
        """Let go of the file; what was not written is lost."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def set_room_aside(path: Path, n_bytes: int) -> None:
    """Fill a file that is deleted when the disk is full: else that would cost the record of the end."""
    with contextlib.suppress(OSError), open(path, "wb", opener=for_owner) as file:
        file.write(b"\1" * n_bytes)


# What single parties say to each other inside sealed messages, for evidence and report.
#
# A sealed message hides its content from the server. These names say what it was, and under which protection its reader
# received it: in clear, because the algorithm lets that reader see it, or under a scheme that it cannot open.


PAID_IN = "paid_in"
"""A fact of a session's protection: the job whose buckets this one was trained on; nothing new was sent or paid."""


class Protection(Enum):
    """How a content is protected from the party that receives it."""

    CLEAR = "readable by the party it was sent to, sealed from everyone else"
    PAILLIER = "Paillier ciphertexts: readable with the active party's key only"
    OKAMOTO_UCHIYAMA = "Okamoto-Uchiyama ciphertexts: readable with the active party's key only"
    ELGAMAL = "ElGamal ciphertexts on a curve: readable with the active party's key only"
    PLUGIN = "ciphertexts of a plugin's scheme, and what it claims: readable with the active party's key only"
    BLINDED = "blinded group elements of private set intersection"
    LOCAL_DP = "each value randomised at its owner (local differential privacy)"
    TWO_PARTY = (
        "choices of oblivious transfers and garbled circuits: of what they compute, the winners alone are readable"
    )


class Content(Enum):
    """One kind of content.

    Attributes:
        encrypted: whether profiles with an additive scheme send it as ciphertexts.
        meaning: what it is, for people.
        only: the one protection under which it may be sent; None if the profile decides.
        profile: the one profile under whose jobs it may be sent; None if there are several.
    """

    encrypted: bool
    meaning: str
    only: Protection | None
    profile: str | None

    SCHEMA = False, "row counts, numbers of bins, aliases of features"
    SETUP = False, "public key, number format, settings of the training"
    GRADIENTS = True, "gradient pairs of the rows"
    HISTOGRAM_REQUEST = False, "rows of the nodes whose sums are asked for"
    HISTOGRAMS = True, "sums of gradient pairs per bin"
    SPLITS = False, "bins of the splits that a party won"
    PARTITIONS = False, "one bit per row of a node that the sender splits"
    DECISION_REQUEST = False, "rows and nodes on their paths"
    DECISIONS = False, "one bit per row and node on its path"
    THRESHOLDS = False, "thresholds of the sender's splits, with its consent", None, "vertical_model"
    POSITIONS = False, "places of rows among the sender's thresholds, with its consent", None, "vertical_model"
    BLINDED_IDS = False, "blinded ids for private set intersection", Protection.BLINDED
    BUCKETS = False, "randomised bucket of each value", Protection.LOCAL_DP
    TRANSFERS = False, "points of oblivious transfers", Protection.TWO_PARTY
    SEALED_SPLITS = False, "comparison of splits, and which nodes the sender's win", Protection.TWO_PARTY

    def __init__(
        self,
        encrypted: bool,  # noqa: FBT001 - a member is a tuple
        meaning: str,
        only: Protection | None = None,
        profile: str | None = None,
    ) -> None:
        self.encrypted, self.meaning, self.only, self.profile = encrypted, meaning, only, profile
