"""What the parties of a vertical job say to each other: terms first, then requests and answers.

Values with a strict byte form: one type code, fixed fields, length-prefixed parts, nothing after the end. Bytes from a
peer are either exactly a message or a ``ProtocolError``. Sealing and transport belong to the layer above.

Rows are bits, least significant first; a bit list says how many bits it has and pads with zeros.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, NamedTuple, Protocol, Self, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError, ProtocolError
from he_processors.histogram.planner import BinLayout
from nvflare_plugins.attempt.session import ARITHMETIC, Session, compare_documents, compare_versions, lower_arithmetic
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.vertical.conversation import Requester
from nvflare_plugins.kinds.vertical.job import MAX_BINS

_HEADER = struct.Struct("<4sBB")
_MAGIC, _VERSION = b"VLBV", 2
MAX_NODES = 1 << 24
MAX_ROWS = (1 << 31) - 1
_MAX_FEATURES = 1 << 20
_MAX_NAME_BYTES = 1 << 10


# The byte form of messages: a message is its fields, one after the other, each in the form that its type states.


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data, self._position = data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._position:
            raise ProtocolError("a vertical message is cut short")
        self._position += size
        return self._data[self._position - size : self._position]

    def finish(self) -> None:
        if self._position != len(self._data):
            raise ProtocolError("a vertical message has trailing bytes")


class _Form(NamedTuple):
    """How one kind of value is appended to a message, and read from one. Raises: ProtocolError, when it is read.

    Attributes: words: the form as wire/PROTOCOL.md says it.
    """

    write: Callable[[list[bytes], Any], None]
    read: Callable[[_Reader], Any]
    words: str


def _limit(most: int) -> str:
    power = most.bit_length() - (most & (most - 1) == 0)
    return str(most) if most < 256 else f"2^{power}" + (" - 1" if most + 1 == 1 << power else "")


def _number(code: str, most: int, least: int = 0) -> _Form:
    layout = struct.Struct("<" + code)

    def read(data: _Reader) -> int:
        value: int = layout.unpack(data.take(layout.size))[0]
        if not least <= value <= most:
            raise ProtocolError("a number in a vertical message is out of range")
        return value

    words = f"{'i' if code.islower() else 'u'}{8 * layout.size} from {least} to {_limit(most)}"
    return _Form(lambda out, value: out.append(layout.pack(value)), read, words)


def _blob(most: int = 1 << 40) -> _Form:
    size = _number("Q", most)

    def write(out: list[bytes], data: bytes) -> None:
        size.write(out, len(data))
        out.append(data)

    return _Form(write, lambda data: bytes(data.take(size.read(data))), f"blob to {_limit(most)}")


def _items(form: _Form, most: int = MAX_NODES) -> _Form:
    count = _number("I", most)

    def write(out: list[bytes], items: Sequence[Any]) -> None:
        count.write(out, len(items))
        for item in items:
            form.write(out, item)

    words = f"n* ({form.words}), n to {_limit(most)}"
    return _Form(write, lambda data: tuple(form.read(data) for _ in range(count.read(data))), words)


def _read_text(data: _Reader) -> str:
    try:
        return str(_NAME.read(data), "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("a name in a vertical message is not text") from None


def _record(kind: type, check: Callable[..., None] = lambda *values: None) -> _Form:
    """Return the form of a dataclass, whose fields state theirs. Args: check: refuses fields that do not fit."""
    hints = get_type_hints(kind, include_extras=True)
    forms = {one.name: hints[one.name].__metadata__[0] for one in fields(kind)}

    def write(out: list[bytes], value: Any) -> None:
        for name, form in forms.items():
            form.write(out, getattr(value, name))

    def read(data: _Reader) -> Any:
        values = [form.read(data) for form in forms.values()]
        check(*values)
        return kind(*values)

    return _Form(write, read, "; ".join(f"`{name}` {form.words}" for name, form in forms.items()))


_NODE, _N_ROWS, _NAME = _number("I", MAX_NODES), _number("I", MAX_ROWS), _blob(_MAX_NAME_BYTES)
_TEXT = _Form(lambda out, text: _NAME.write(out, text.encode()), _read_text, f"text in a {_NAME.words}")
_FLAG = _Form(_number("B", 1).write, lambda data: bool(_number("B", 1).read(data)), _number("B", 1).words)
_Node = Annotated[int, _NODE]
_Nodes = Annotated[tuple[int, ...], _items(_NODE)]


class _MessageType(NamedTuple):
    code: int
    content: Content
    form: _Form


_TYPES: dict[int, type] = {}
_OF_TYPE: dict[type, _MessageType] = {}
T = TypeVar("T")


def _message(
    code: int, content: Content, check: Callable[..., None] = lambda *values: None
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass a message. Args: content: what the evidence calls it; check: see ``_record``."""

    def listed(kind: type[T]) -> type[T]:
        _TYPES[code], _OF_TYPE[kind] = kind, _MessageType(code, content, _record(kind, check))
        return kind

    return listed


@dataclass(frozen=True, slots=True)
class Bits:
    """A list of bits. Shapes: data holds ceil(n / 8) bytes, padded with zeros."""

    n: int
    data: bytes

    @classmethod
    def of(cls, values: NDArray[np.bool_]) -> Self:
        """Pack booleans. Shapes: values: bool[n]."""
        return cls(values.size, np.packbits(values, bitorder="little").tobytes())

    def unpack(self) -> NDArray[np.bool_]:
        """Return the booleans. Shapes: result: bool[n]."""
        packed = np.frombuffer(self.data, dtype=np.uint8)
        return np.unpackbits(packed, count=self.n, bitorder="little").view(bool)


def _write_bits(out: list[bytes], bits: Bits) -> None:
    _N_ROWS.write(out, bits.n)
    out.append(bits.data)


def _read_bits(data: _Reader) -> Bits:
    n = _N_ROWS.read(data)
    packed = bytes(data.take(-(-n // 8)))
    if n % 8 and packed[-1] >> n % 8:
        raise ProtocolError("a bit list in a vertical message is longer than it says")
    return Bits(n, packed)


_BITS = _Form(_write_bits, _read_bits, "bits")
_RowBits = Annotated[Bits, _BITS]


def _check_schema(
    rows: Sequence[int], n_bins: Sequence[int], aliases: Sequence[str], categories: Sequence[Sequence[str]]
) -> None:
    if not rows or not n_bins or len(aliases) != len(n_bins) or len(set(aliases)) != len(aliases):
        raise ProtocolError("a party's schema needs rows, and one distinct alias for each feature")
    if len(categories) != len(n_bins) or any(
        words and (len(words) < n or len(set(words)) != len(words)) for words, n in zip(categories, n_bins, strict=True)
    ):
        raise ProtocolError("a party's schema needs a list of distinct categories for each categorical feature")


@_message(1, Content.SCHEMA, _check_schema)
@dataclass(frozen=True, slots=True)
class PartySchema:
    """A passive party introduces its table.

    Privacy: row counts, how many bins each feature has, and the aliases it chose; no value and no threshold. Of a
        categorical feature the public list, which the job holds too; that a feature has fewer bins than categories
        tells that no training row has one of the last of them, or that a guard has put rare ones together.

    Attributes:
        set_rows: rows of the training set and of each further set, in the agreed order.
        categories: of each feature its public list; nothing for one of numbers.
    """

    set_rows: Annotated[tuple[int, ...], _items(_N_ROWS, 1 << 10)]
    n_bins: Annotated[tuple[int, ...], _items(_number("I", MAX_BINS, 1), _MAX_FEATURES)]
    aliases: Annotated[tuple[str, ...], _items(_TEXT, _MAX_FEATURES)]
    categories: Annotated[tuple[tuple[str, ...], ...], _items(_items(_TEXT, MAX_BINS), _MAX_FEATURES)] = ()

    def __post_init__(self) -> None:
        if not self.categories:
            object.__setattr__(self, "categories", ((),) * len(self.n_bins))


@_message(2, Content.SETUP)
@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The active party announces the number format and its public key.

    Privacy: the format depends on the number of rows alone; the gradients' scale stays with the active party.

    Attributes:
        public_key: parameters of the additive scheme; empty for the stand-in without encryption.
    """

    scheme: Annotated[int, _number("B", 255)]
    fraction_bits: Annotated[int, _number("H", 62)]
    max_additions: Annotated[int, _number("I", MAX_ROWS, 1)]
    public_key: Annotated[bytes, _blob(1 << 20)]


@_message(3, Content.GRADIENTS)
@dataclass(frozen=True, slots=True)
class TreeGradients:
    """Begins a tree with the encrypted gradient pairs of its first block of rows.

    Attributes:
        features: which of the party's features the tree may use (column sampling).
    """

    tree: _Node
    features: _RowBits
    gradients: Annotated[bytes, _blob()]


@_message(10, Content.GRADIENTS)
@dataclass(frozen=True, slots=True)
class MoreGradients:
    """The encrypted gradient pairs of the tree's next block of rows."""

    tree: _Node
    gradients: Annotated[bytes, _blob()]


@dataclass(frozen=True, slots=True)
class NodePartition:
    """How the rows of a node fall to its two children. Shapes: goes_left: one bit for each row of the node."""

    node: _Node
    left: _Node
    right: _Node
    goes_left: _RowBits


@dataclass(frozen=True, slots=True)
class OwnDivision:
    """The children of a node that the party itself split: it knows which rows go left."""

    node: _Node
    left: _Node
    right: _Node


@_message(4, Content.HISTOGRAM_REQUEST)
@dataclass(frozen=True, slots=True)
class HistogramRequest:
    """Asks for the sums of one child of each divided node, the one with fewer rows; of the root if none is divided.

    The answer holds the first block of features (``feature_blocks``), answers to ``MoreSums`` the further ones.

    Privacy: tells the party how the rows of these nodes are divided.

    Attributes:
        partitions: nodes that another party split, the active one included.
        own: nodes that this party split. Sums are due of the partitions' children first.
    """

    tree: _Node
    partitions: Annotated[tuple[NodePartition, ...], _items(_record(NodePartition))]
    own: Annotated[tuple[OwnDivision, ...], _items(_record(OwnDivision))] = ()


@_message(11, Content.HISTOGRAM_REQUEST)
@dataclass(frozen=True, slots=True)
class MoreSums:
    """Asks for the next block of features of the sums that were asked for last."""

    tree: _Node


@_message(5, Content.HISTOGRAMS)
@dataclass(frozen=True, slots=True)
class HistogramAnswer:
    """Sums per node, feature and bin of one block of features, protected by the additive scheme.

    Attributes:
        nodes: nodes whose sums are here, in the order of the request; the same in every block.
        withheld: nodes whose sums this party's guard keeps, in the order of the request.
    """

    tree: _Node
    nodes: _Nodes
    sums: Annotated[bytes, _blob()]
    withheld: _Nodes = ()


@dataclass(frozen=True, slots=True)
class OwnedSplit:
    """A split that the party won: rows up to a bin of one of its features go left; bin -1: none with a value does.

    Attributes:
        right_bins: of a categorical feature, the bins that go right, ascending; ``bin`` is -1 then.
    """

    node: _Node
    feature: Annotated[int, _number("I", _MAX_FEATURES)]
    bin: Annotated[int, _number("i", 1 << 16, -1)]
    default_left: Annotated[bool, _FLAG]
    right_bins: Annotated[tuple[int, ...], _items(_number("H", MAX_BINS), MAX_BINS)] = ()


@_message(6, Content.SPLITS)
@dataclass(frozen=True, slots=True)
class SplitRequest:
    """Tells a party which of its splits are taken, and asks which rows go left."""

    tree: _Node
    splits: Annotated[tuple[OwnedSplit, ...], _items(_record(OwnedSplit))]


@_message(7, Content.PARTITIONS)
@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """For each split of a request one bit for each row of its node, in the order of rows: does it go left?

    Privacy: rows without a value are not told apart from the others.
    """

    tree: _Node
    goes_left: Annotated[tuple[Bits, ...], _items(_BITS)]


@dataclass(frozen=True, slots=True)
class PathQuery:
    """Rows that reach a node of a finished tree. Shapes: rows: one bit for each row of the data set."""

    tree: _Node
    node: _Node
    rows: _RowBits


@_message(8, Content.DECISION_REQUEST)
@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """Asks an owner which of the rows that reach its nodes go left there.

    Privacy: tells the party which rows reach its nodes; asks for no bit off a row's path.

    Attributes:
        data_set: position among the agreed sets; 0 is the training set.
    """

    data_set: _Node
    queries: Annotated[tuple[PathQuery, ...], _items(_record(PathQuery))]


@_message(9, Content.DECISIONS)
@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """For each query one bit for each row it named, in the order of rows: does it go left?"""

    goes_left: Annotated[tuple[Bits, ...], _items(_BITS)]


@_message(12, Content.TRANSFERS)
@dataclass(frozen=True, slots=True)
class Transfers:
    """Points of the transfers on the curve, in the preset sealed: first the active party's offer, then its choices.

    The passive party answers the offer with an offer and choices of its own.
    """

    offer: Annotated[bytes, _blob(1 << 10)]
    choices: Annotated[bytes, _blob(1 << 16)]


@_message(13, Content.TRANSFERS)
@dataclass(frozen=True, slots=True)
class TransfersAnswer:
    """The passive party's offer, and its choices among the active party's."""

    offer: Annotated[bytes, _blob(1 << 10)]
    choices: Annotated[bytes, _blob(1 << 16)]


@_message(14, Content.SEALED_SPLITS)
@dataclass(frozen=True, slots=True)
class SealedRequest:
    """The active party's next message about the splits of some nodes, in the preset sealed (he_processors/two_party).

    Attributes:
        step: 0 chooses by means, 1 has the circuit of scores, 2 the circuit of comparisons.
        nodes: whose splits are compared; the same in the three steps.
    """

    tree: _Node
    step: Annotated[int, _number("B", 2)]
    nodes: _Nodes
    data: Annotated[bytes, _blob()]


@_message(15, Content.SEALED_SPLITS)
@dataclass(frozen=True, slots=True)
class SealedAnswer:
    """The passive party's message of the same step; after the last one a bit for each node: does its split win?"""

    tree: _Node
    data: Annotated[bytes, _blob()]


Request = (
    TrainingSetup
    | TreeGradients
    | MoreGradients
    | HistogramRequest
    | MoreSums
    | SplitRequest
    | DecisionRequest
    | Transfers
    | SealedRequest
)
Answer = PartySchema | HistogramAnswer | SplitAnswer | DecisionAnswer | TransfersAnswer | SealedAnswer
Message = Request | Answer


def to_bytes(message: Message) -> bytes:
    """Return the bytes that travel."""
    kind = _OF_TYPE[type(message)]
    parts = [_HEADER.pack(_MAGIC, _VERSION, kind.code)]
    kind.form.write(parts, message)
    return b"".join(parts)


def from_bytes(data: bytes) -> Message:
    """Read a message strictly.

    Raises:
        ProtocolError: the bytes are not exactly one message of this version.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError("a vertical message is shorter than its header")
    magic, version, code = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or code not in _TYPES:
        raise ProtocolError("not a vertical message of this version: all sites must run the same one")
    reader = _Reader(memoryview(data)[_HEADER.size :])
    message: Message = _OF_TYPE[_TYPES[code]].form.read(reader)
    reader.finish()
    return message


# The blocks of features in which sums travel: each is sent as soon as it is done.
#
# Both sides derive them from what both know, so that none is named on the way. A passive party holds the sums of one or
# two blocks and not those of a level, and the active party opens one block while the next is added up.


MOST_SLOTS = (
    1 << 15
)  # of all nodes in a block: some 30 MB of ciphertexts of Paillier-3072, and thrice that while packed
MOST_ADDITIONS = 1 << 20  # to a block: about a second of Paillier, a tenth of one of elgamal
_STEP = 2  # features that can share cells (histogram/planner.py)


def feature_blocks(layout: BinLayout, n_nodes: int, n_rows: int, *, is_streamed: bool = True) -> tuple[slice, ...]:
    """Divide the features of a tree.

    Args:
        layout: of the features that the tree uses.
        n_nodes: whose sums are asked for.
        n_rows: most rows that these nodes hold together.
        is_streamed: False for a scheme whose sums cost less than dividing them.

    Returns:
        Features by position in the layout, in order; each block holds two, more where they fit, or the last one.
    """
    n_features, starts = layout.n_features, layout.starts
    if not is_streamed:
        return (slice(0, n_features),)
    blocks, start = [], 0
    while start < n_features:
        end = start + _STEP
        while end < n_features:
            further = min(end + _STEP, n_features)
            n_slots = n_nodes * int(starts[further] - starts[start])
            if n_slots > MOST_SLOTS or n_rows * (further - start) > MOST_ADDITIONS:
                break
            end = further
        blocks.append(slice(start, min(end, n_features)))
        start = end
    return tuple(blocks)


def layout_of(layout: BinLayout, block: slice) -> BinLayout:
    """Return the layout of a block's features."""
    return BinLayout(layout.n_bins[block])


def most_slots(n_bins: Sequence[int], n_nodes: int, *, is_streamed: bool = True) -> int:
    """Return the most slots of one block, whichever of the features a tree uses.

    Args:
        n_bins: of each of the party's features.
        n_nodes: whose sums are asked for at most.
    """
    slots = sorted((n + 1 for n in n_bins), reverse=True)  # one more for rows without a value
    if not is_streamed:
        return n_nodes * sum(slots)
    return n_nodes * min(sum(slots), max(sum(slots[:_STEP]), MOST_SLOTS // n_nodes))


# How the active party reaches the passive ones: a request goes out, its answer is collected later.


A = TypeVar("A", bound=Answer | None)


class PassiveLink(Protocol):
    """Carries requests to one passive party in order; FLARE's transport seals them end to end."""

    def ask(self, request: Request) -> Future[Answer | None]:
        """Send a request; do not wait. The future fails with a VeilBoostError if the party or the way to it does."""

    def flush(self) -> None:
        """Let requests go that wait for further ones to travel with; waiting for an answer does as much."""


@dataclass(frozen=True, slots=True)
class Party:
    """One passive party as the active party knows it.

    Attributes:
        first_column: where its columns start among those of all parties.
    """

    name: str
    schema: PartySchema
    first_column: int
    link: PassiveLink

    @property
    def columns(self) -> slice:
        """Return the party's place among the columns of all parties."""
        return slice(self.first_column, self.first_column + len(self.schema.n_bins))


def place_parties(
    n_own_columns: int, introductions: Sequence[tuple[str, PartySchema, PassiveLink]]
) -> tuple[Party, ...]:
    """Order the columns of all parties: the active party's first, then each passive party's."""
    parties, column = [], n_own_columns
    for name, schema, link in introductions:
        parties.append(Party(name, schema, column, link))
        column += len(schema.n_bins)
    return tuple(parties)


def collect(name: str, future: Future[Any], expected: type[A], deadline_s: float) -> A:
    """Wait for a party's answer of the expected type.

    Raises:
        JobAborted: none came in time.
        ProtocolError: another type of answer came.
    """
    try:
        answer = future.result(deadline_s)
    except FutureTimeout:
        raise JobAborted(f"{name} did not answer within {deadline_s:.0f} s") from None
    if not isinstance(answer, expected):
        raise ProtocolError(f"{name} answered with {type(answer).__name__} where {expected.__name__} is due")
    return answer


# Requests of the active party and answers of the passive ones.


# The messages of training on their way through a conversation, each noted in the evidence by what it holds.


class ContentRecorder:
    """Notes in the evidence what passes between this site and the others.

    Attributes:
        has_told: whether this site has told more than its public key.
    """

    def __init__(self, evidence: EvidenceLog, ciphertexts: Protection):
        self._evidence = evidence
        self._ciphertexts = ciphertexts
        self.has_told = False

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave. Raises: ProtocolError, if its content must not."""
        self.has_told = self.has_told or not isinstance(message, TrainingSetup)
        self.note("sent", peer, _OF_TYPE[type(message)].content, size)

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""
        self.note("received", peer, _OF_TYPE[type(message)].content, size)

    def note(self, direction: str, peer: str, what: Content, size: int) -> None:
        """Note bytes that are about to leave, or that came."""
        protection = what.only or (self._ciphertexts if what.encrypted else Protection.CLEAR)
        self._evidence.content(direction, peer, what, protection, size)

    def of_decisions(self, active: str, answer: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        """Return what notes each question about rows before it is answered, and each answer before it leaves."""

        def noted(question: bytes) -> bytes:
            self.note("received", active, Content.DECISION_REQUEST, len(question))
            reply = answer(question)
            self.note("sent", active, Content.DECISIONS, len(reply))
            return reply

        return noted


class ConversationLink:
    """The active party's link to one passive party (a ``PassiveLink``)."""

    def __init__(self, requester: Requester, rank: int, name: str, notes: ContentRecorder):
        self._requester, self._rank, self._name, self._notes = requester, rank, name, notes

    def ask(self, request: Request) -> Future[Answer | None]:
        """Queue a request."""
        data = to_bytes(request)
        self._notes.sent(self._name, request, len(data))
        return self._requester.ask(self._rank, data, self._read)

    def flush(self) -> None:
        """Let requests go that wait for further ones."""
        self._requester.flush()

    def _read(self, data: bytes) -> Answer | None:
        if not data:
            return None
        answer = from_bytes(data)
        if not isinstance(answer, Answer):
            raise ProtocolError(f"{self._name} answered with a request")
        self._notes.received(self._name, answer, len(data))
        return answer


def answer_bytes(data: bytes, peer: str, answer: Callable[[Request], Answer | None], notes: ContentRecorder) -> bytes:
    """Answer a request in its byte form, at a passive party.

    Raises:
        ProtocolError: not a request, or one that has no place here.
    """
    request = from_bytes(data)
    if not isinstance(request, Request):
        raise ProtocolError("the active party sent an answer where a request is due")
    notes.received(peer, request, len(data))
    reply = answer(request)
    if reply is None:
        return b""
    encoded = to_bytes(reply)
    notes.sent(peer, reply, len(encoded))
    return encoded


# What all parties of a vertical job must have equal before anything private is sent, compared under the group key.
#
# The server relays sealed documents and learns sizes only. Other parties learn row counts, keyed proofs of the order of
# rows, and from which rounds a lost job can be resumed.


_MAX_DOCUMENT = 1 << 24


@dataclass(frozen=True, slots=True)
class VerticalTerms:
    """One party's terms.

    Attributes:
        versions: of XGBoost, VeilBoost and others.
        job: the job as JSON values.
        parameters: what XGBoost makes of the parameters.
        n_rows: rows of each data set.
        rows: for each data set a proof of its ids in order (``RowsProof``), in hex; empty without ids.
        model: id of the model that training continues; empty for none.
        checkpoints: tag of each checkpoint of the job to resume, by number of finished rounds.
    """

    versions: Mapping[str, str]
    job: Mapping[str, Any]
    parameters: Mapping[str, Any]
    n_rows: Sequence[int]
    rows: Sequence[str]
    model: str
    checkpoints: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Return a canonical encoding."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> VerticalTerms:
        """Parse a peer's terms. Raises: ProtocolError."""
        try:
            terms = cls(**json.loads(data)) if len(data) <= _MAX_DOCUMENT else None
        except (ValueError, TypeError, RecursionError):
            terms = None
        if terms is None or not terms._is_well_formed():
            raise ProtocolError("a party's terms are not of the expected form")
        return terms

    def _is_well_formed(self) -> bool:
        mappings = (self.versions, self.job, self.parameters, self.checkpoints)
        if not all(isinstance(part, dict) for part in mappings) or not isinstance(self.model, str):
            return False
        if not isinstance(self.n_rows, list) or not isinstance(self.rows, list):
            return False
        is_text = all(isinstance(proof, str) and proof.isascii() for proof in self.rows)
        return is_text and all(type(n) is int for n in self.n_rows)

    def compare(self, theirs: VerticalTerms, site: str, due: Sequence[str]) -> None:
        """Refuse a party that does not mean the same job, model and rows.

        Args:
            due: the proofs that the party sends if it holds this site's rows in this site's order.

        Raises:
            ConfigurationError: the first difference, named.
        """
        compare_versions(self.versions, theirs.versions, site)
        compare_documents("the job", self.job, theirs.job, site)
        compare_documents("the parameters", self.parameters, theirs.parameters, site)
        if self.model != theirs.model:
            raise ConfigurationError(f"{site} holds a part of another model than this site")
        if list(self.n_rows) != list(theirs.n_rows):
            raise ConfigurationError(f"{site} has another number of rows than this site: align the rows first")
        _compare_rows(due, theirs.rows, site)


def _compare_rows(due: Sequence[str], theirs: Sequence[str], site: str) -> None:
    if len(due) != len(theirs):
        raise ConfigurationError(f"{site} has another number of data sets than this site")
    for mine, other in zip(due, theirs, strict=True):
        if bool(mine) != bool(other):
            raise ConfigurationError(
                "some parties name an id column for a data set and others do not, so that the order of rows "
                "cannot be compared: all, or none. Policy key: data_sets.<name>.id."
            )
        if not hmac.compare_digest(mine.encode(), other.encode()):
            raise ConfigurationError(
                f"{site} has other rows than this site, or the same in another order: align the rows first"
            )


@dataclass(frozen=True, slots=True)
class RowsProof:
    """Proofs that a party holds rows in an order, which no other party can copy: each names the party that gives it.

    Attributes:
        contents: for each data set what the proof covers; empty without ids.
    """

    session: Session
    contents: Sequence[bytes]

    def of(self, rank: int) -> list[str]:
        """Return the proofs that the party of this rank gives if it holds these rows, in hex; empty without ids."""
        return [
            self.session.hmac(f"order of rows of data set {number}, {rank}", content).hex() if content else ""
            for number, content in enumerate(self.contents)
        ]


def agree(
    mine: VerticalTerms, received: Sequence[bytes], sites: Sequence[str], rank: int, proof: RowsProof
) -> tuple[int, str]:
    """Compare the terms of all parties.

    Args:
        received: encoded terms by rank, this site's own included.
        proof: of this site's rows; ``mine.rows`` is this site's own.

    Returns:
        The number of finished rounds of the latest checkpoint that all parties hold of the same attempt, 0 without; and
        the lowest arithmetic that any party named, "" where none grows trees.

    Raises:
        ConfigurationError: a difference, named.
    """
    own = VerticalTerms.from_bytes(mine.to_bytes())  # as the peers see it: JSON knows no tuples
    common, arithmetic = dict(own.checkpoints), own.versions.get(ARITHMETIC, "")
    for other, data in enumerate(received):
        if other == rank:
            continue
        theirs = VerticalTerms.from_bytes(data)
        own.compare(theirs, sites[other], proof.of(other))
        common = {n: tag for n, tag in common.items() if theirs.checkpoints.get(n) == tag}
        arithmetic = lower_arithmetic(arithmetic, theirs.versions.get(ARITHMETIC, ""))
    return max((int(n) for n in common if n.isdigit()), default=0), arithmetic


def rows_content(ids: Sequence[bytes] | None) -> bytes:
    """Return what the proof of the rows' order covers; empty without ids."""
    return b"" if ids is None else b"".join(len(one).to_bytes(4, "little") + one for one in ids)
