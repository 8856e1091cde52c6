"""Our own frames between a site and the server: what they are about, and commitments to their bytes."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from he_processors.errors import ProtocolError

# What messages and frames are about, and the moments of a training to which they belong.


CURVE_METRICS = ("auc", "aucpr")  # XGBoost averages these over the sites
RANK_METRICS = ("ndcg", "map", "pre")  # means over queries


def is_larger_better(metric: str) -> bool:
    """Tell whether a larger value of a metric is a better one. Args: metric: with or without "set-" before it."""
    return metric.rsplit("-", 1)[-1].split("@")[0] in (*CURVE_METRICS, *RANK_METRICS)


class Kind(Enum):
    """What a message is about.

    Attributes:
        code: its number; in our own frames it travels.
        private: whether the content is derived from rows, or secret for another reason.
        meaning: one phrase for people.
    """

    code: int
    private: bool
    meaning: str

    # XGBoost's own messages
    FEATURE_COUNT = 1, False, "number of features"
    EMPTY_SITES = 2, False, "which sites have no rows"
    ROW_COUNT = 3, True, "number of training rows"
    WEIGHT_TOTAL = 4, True, "sum of weights behind the first estimate"
    LABEL_MEAN = 5, True, "label mean, local median or class counts behind the first estimate"
    STUMP_SUM = 6, True, "gradient sums behind the first estimate"
    MODEL_PARAMETERS = 7, False, "model parameters with the base score"
    SAMPLER_SEED = 8, False, "seed of the column sampler"
    HISTOGRAM = 9, True, "gradient histograms"
    ROOT_SUM = 10, True, "gradient sum of all rows"
    LEAF_COUNT = 11, False, "number of leaves of the tree"
    LEAF_VALID = 12, True, "number of sites with rows in each leaf"
    LEAF_QUANTILE = 13, True, "sum of the sites' residual quantiles per leaf"
    METRIC_SIZE = 14, False, "largest evaluation set"
    METRIC = 15, True, "parts of an evaluation metric"
    NODE_STATS = 16, True, "leaf sums of random trees"
    # Our own exchanges
    HANDSHAKE = 32, False, "public keys and signatures of the session"
    GROUP_KEY = 33, True, "sealed shares of the group key"
    AGREEMENT = 34, True, "sealed schema, parameters and versions"
    HE_SECRET = 35, True, "sealed homomorphic key of the sites"
    HE_PUBLIC = 36, False, "public parameters of the homomorphic scheme, for the server"
    SCALE = 37, True, "secure maximum of exponents"
    CUT_COUNTS = 38, True, "counts below candidate cut points"
    CUT_PLAN = 39, False, "keyed hash of cut points known from an earlier job"
    MODEL_CHECK = 40, False, "keyed hash of the final model"
    CLOSING = 41, False, "signed heads of the evidence chains; then that every site has its result"
    CELL_COUNTS = 42, True, "rows per cell of a public grid, for private quantiles"
    LEFT_SUMS = 44, True, "gradient sums to the left of drawn candidates of private trees"
    HESSIANS = 45, True, "Hessian sums between candidates, to refine these"
    EFFECTIVE_ROWS = 46, True, "rows and sites that carry weight, or were added, counted up to what is needed"
    LEAF_ROWS = 47, True, "number of training rows in each leaf"
    OWN_TREES = 48, True, "sealed trees that each site grew on its own rows"
    SCORE_COUNTS = 51, True, "rows of each class by bins of the predicted probability"
    CELL_FLAGS = 52, True, "whether some site has so many rows of a class in runs of bins, and whether all have"
    CLASS_COUNTS = 53, True, "rows of each class in merged bins of each feature"
    RESIDUAL_SCALE = 54, True, "sum behind the scale of a smooth absolute or quantile error"
    HISTOGRAM_METRIC = 55, True, "gradient histogram of a root, and parts of the evaluation metrics of the round before"
    RISK_SUMS = 56, True, "sums of weights, or of weights times hazard ratios, of rows by bins of times"
    QUERY_SLOTS = 57, True, "sites that have a query in each slot of a table of keyed hashes"
    CONVERSATION = 43, True, "sealed requests and answers between single parties"

    def __init__(self, code: int, private: bool, meaning: str) -> None:  # noqa: FBT001 - a member is a tuple
        self.code, self.private, self.meaning = code, private, meaning


KIND_BY_CODE = {kind.code: kind for kind in Kind}


class Phase(Enum):
    """Where the training loop stands; the loop announces it to the mediator."""

    SETUP = 1
    UPDATE = 2
    EVALUATE = 3
    FINISH = 4


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A phase and the boosting round it belongs to."""

    phase: Phase
    round: int = 0

    def __str__(self) -> str:
        return f"{self.phase.name.lower()}:{self.round}"


class BaseScoreSource(Enum):
    """How XGBoost estimates the base score, hence which messages precede the first tree."""

    GIVEN = "given"  # base_score set
    CONTINUED = "continued"  # training continues from a model
    MEAN = "mean"  # logistic, squared error, poisson, gamma, tweedie
    MEDIAN = "median"  # absolute error
    CLASSES = "classes"  # softmax, softprob
    QUANTILE = "quantile"  # quantile error
    STUMP = "stump"  # every other objective
    CONSTANT = "constant"  # survival: XGBoost estimates none and takes 0.5


# Commitments to wire bytes: the hash by which evidence names a payload.


SALT_BYTES = 16
UNSALTED_CODECS = frozenset({"PUBLIC", "SEALED"})
"""Codecs of which a hash tells nobody more than he has; every other payload is committed to with a salt.

PUBLIC holds nothing of a row. SEALED is authenticated encryption under a fresh key and nonce: who lacks the key cannot
compute the bytes of a guess, who has it reads the content anyway. The others are guessable by somebody who sees
evidence but not the payload: sums in clear (PLAIN) by anyone; masked sums (MASKED) by those who know the masks, which
are the W - 1 other sites together, or the only other one. Where the sites receive exact sums they could subtract their
own parts anyway; where a trusted server adds noise they could not, and an unsalted hash would show them the exact sums.
BFV and CKKS bring randomness of their own; one rule for all sums is easier to check.
"""
_PAYLOAD_DOMAIN = b"veilboost evidence payload v1\0"


class Commitment:
    """The SHA-256 that stands for wire bytes in a log, of bytes that may come in pieces. Its length is theirs.

    Privacy: with 16 random bytes that only the payload's sender and its receivers know, the result tells nobody else
        anything, whatever he guesses (SHA-256 taken for a random function): each of 2^128 salts makes every payload as
        likely as any other. Salts travel in the frame and never in evidence.
    """

    def __init__(self, salt: bytes = b"", payload: bytes | memoryview = b"") -> None:
        self.salt = salt
        self._digest = hashlib.sha256(_PAYLOAD_DOMAIN + bytes([len(salt)]) + salt)
        self._size = 0
        self.update(payload)

    def update(self, piece: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(piece)
        self._size += len(piece)

    def __len__(self) -> int:
        return self._size

    def hexdigest(self) -> str:
        """Return the hash of the bytes so far."""
        return self._digest.hexdigest()


def commitment(payload: bytes, salt: bytes = b"") -> str:
    """Return the hex SHA-256 that stands for wire bytes in a log (see ``Commitment``)."""
    return Commitment(salt, payload).hexdigest()


# Our own frames between a site and the server: a fixed header, a payload, an optional attachment.
#
# A frame says who sends it, where in the job it belongs (attempt, counter, kind, moment) and how the payload is
# protected (codec). The server adds, forwards or collects payloads by the header alone; it needs no key. At the end of
# a payload may stand what others check it by: of a sum, residues modulo 2^61 - 1 (he_processors/sum_tags.py), which the
# server adds as such; of a gathered message, MACs (he_processors/sum_tags.py). The header also has the salt with which
# both ends commit to the payload in their evidence.


_HEADER = struct.Struct("<4sBBBBHBIQ16sHQQII16s")
_MAGIC = b"VLBF"
_VERSION = 3
ATTEMPT_BYTES = 16
MAX_ATTACHMENT = 1 << 20
MAX_VALUES = 1 << 32
MAX_FRAME_BYTES = 2 << 30
"""Of one message, header and attachment included; it travels in pieces (flare/transport.py)."""
CHUNK_BYTES = 2 << 20  # of a piece: small enough that a slow link shows progress between two queries
_NO_SALT = bytes(SALT_BYTES)


class Codec(IntEnum):
    """How a payload is protected on its way."""

    PUBLIC = 0  # nothing to protect
    PLAIN = 1  # a private kind in clear: only the profile `plain` does that
    MASKED = 2
    BFV = 3
    CKKS = 4
    SEALED = 5  # end to end between sites
    # Words that a site's own plugin has protected. The server may assume nothing of them but their number, and has
    # nothing of the plugin: it adds 64-bit words modulo 2^64, as under MASKED.
    PLUGIN = 6
    # As MASKED and PLAIN in 32-bit words, added modulo 2^32: histograms of jobs with word_bits=32.
    MASKED_32 = 7
    PLAIN_32 = 8
    # Bytes that a site's own plugin has protected, of a length and form that only the plugin knows. The server adds
    # them by the same plugin, which its own policy pins.
    PLUGIN_BYTES = 9

    @property
    def word_bytes(self) -> int:
        """Bytes of a word that the server adds; 0 where a payload is not of words."""
        if self in (Codec.MASKED_32, Codec.PLAIN_32):
            return 4
        return 8 if self in (Codec.PLAIN, Codec.MASKED, Codec.PLUGIN) else 0

    @property
    def is_salted(self) -> bool:
        """Whether frames carry a salt for the evidence's commitment to their payload (evidence/format.py)."""
        return self.name not in UNSALTED_CODECS


class FrameType(IntEnum):
    """What a frame asks for or answers."""

    CONTRIBUTION = 1
    RESULT = 2
    ABORT = 3
    RESCALE = 4  # "my value does not fit the agreed scale": all sites agree on a new one, nothing is summed


class Operation(IntEnum):
    """What the server does with the contributions of all sites."""

    GATHER = 1
    BROADCAST = 2
    SUM = 3
    ROUTE = 4  # part r of every contribution goes to rank r, and to no one else


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between a site and the server.

    Attributes:
        payload: all of it, its tail included.
        tail: bytes at the payload's end that are residues of a sum, or MACs of a gathered message.
        salt: what sender and receiver salt their commitments to the payload with; empty where there is none.
    """

    type: FrameType
    operation: Operation
    kind: Kind
    moment: TrainingStep
    codec: Codec
    rank: int
    counter: int
    attempt: bytes
    n_values: int
    payload: bytes | memoryview
    attachment: bytes = b""
    salt: bytes = b""
    tail: int = 0

    def pack(self) -> bytes:
        """Return the bytes that travel."""
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.type,
            self.operation,
            self.codec,
            self.kind.code,
            self.moment.phase.value,
            self.moment.round,
            self.counter,
            self.attempt,
            self.rank,
            self.n_values,
            len(self.payload),
            len(self.attachment),
            self.tail,
            self.salt or _NO_SALT,
        )
        return b"".join((header, self.payload, self.attachment))

    def place(self) -> tuple[object, ...]:
        """Return what must be equal in the frames of all sites of one exchange."""
        return (self.operation, self.kind, self.moment, self.codec, self.counter, self.n_values, self.tail)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One frame that was sent or received, as an evidence log wants it.

    Attributes:
        sites: with whom; at the server the sender of a received frame, all receivers of a sent one.
        direction: "received" or "sent".
        frame: without payload if it was added piece by piece.
        commitment: to the payload, under the frame's salt.
    """

    sites: tuple[str, ...]
    direction: str
    frame: Frame
    commitment: Commitment


def unpack(data: bytes) -> Frame:
    """Parse a frame strictly.

    Raises:
        ProtocolError: wrong magic, version, code, length, or trailing bytes.
    """
    head, payload = unpack_head(data, len(data))
    view = memoryview(data)
    return replace(head, payload=bytes(view[payload]), attachment=bytes(view[payload.stop :]))


def unpack_head(data: bytes, size: int) -> tuple[Frame, slice]:
    """Parse the beginning of a frame of ``size`` bytes strictly.

    Returns:
        The frame without payload and attachment, and where the payload lies in the whole.

    Raises:
        ProtocolError: as ``unpack``.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"frame of {len(data)} bytes is shorter than its header")
    fields = _HEADER.unpack_from(data)
    magic, version, type_, operation, codec, kind, phase, round_ = fields[:8]
    counter, attempt, rank, n_values, n_payload, n_attachment, tail, salt = fields[8:]
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError("not a frame of this version of VeilBoost: all sites and the server must run the same one")
    if n_attachment > MAX_ATTACHMENT or n_values > MAX_VALUES:
        raise ProtocolError("frame announces more values or a longer attachment than any message has")
    if size != _HEADER.size + n_payload + n_attachment:
        raise ProtocolError(f"frame of {size} bytes announces {_HEADER.size + n_payload + n_attachment}")
    try:
        about = FrameType(type_), Operation(operation), KIND_BY_CODE[kind]
        moment, protection = TrainingStep(Phase(phase), round_), Codec(codec)
    except (ValueError, KeyError):
        raise ProtocolError("frame holds an unknown type, operation, kind, phase or codec") from None
    if type_ != FrameType.RESCALE and tail > n_payload:  # a request for another scale stands in a sum's place, empty
        raise ProtocolError("frame announces a tail that is longer than its payload")
    if protection.is_salted != (salt != _NO_SALT):
        raise ProtocolError("frame lacks the salt that its codec needs, or has one that it does not")
    salt = salt if any(salt) else b""
    head = Frame(*about, moment, protection, rank, counter, attempt, n_values, payload=b"", salt=salt, tail=tail)
    return head, slice(_HEADER.size, _HEADER.size + n_payload)


def pack_list(parts: list[bytes]) -> bytes:
    """Join byte strings so that ``unpack_list`` can take them apart."""
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    return b"".join((lengths, *parts))


def unpack_list(data: bytes, n_parts: int) -> list[bytes]:
    """Take apart what ``pack_list`` joined.

    Raises:
        ProtocolError: not exactly ``n_parts`` parts that fill the data to the last byte.
    """
    start = 4 + 8 * n_parts
    if len(data) < start or struct.unpack_from("<I", data)[0] != n_parts:
        raise ProtocolError(f"expected a list of {n_parts} parts")
    lengths = struct.unpack_from(f"<{n_parts}Q", data, 4)
    if start + sum(lengths) != len(data):
        raise ProtocolError("the lengths of a list do not fill its data")
    parts, position = [], start
    for length in lengths:
        parts.append(data[position : position + length])
        position += length
    return parts
