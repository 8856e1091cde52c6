"""What the active and the passive parties say to each other in vertical training and prediction.

Values with a strict byte form: one type code, fixed fields, length-prefixed parts, nothing after the end. Bytes from a
peer are either exactly a message or a ``ProtocolError``. Sealing and transport belong to the layer above.

Rows are bits, least significant first; a bit list says how many bits it has and pads with zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.histogram.planner import BinLayout
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.evidence.log import EvidenceLog
from nvflare_plugins.kinds.vertical.conversation import Requester
from nvflare_plugins.kinds.vertical.job import MAX_BINS, VerticalProfile

_HEADER = struct.Struct("<4sBB")
_MAGIC, _VERSION = b"VLBV", 2
MAX_NODES = 1 << 24
MAX_ROWS = (1 << 31) - 1
_MAX_FEATURES = 1 << 20
_MAX_NAME_BYTES = 1 << 10


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

    CODE: ClassVar[int] = 1
    set_rows: tuple[int, ...]
    n_bins: tuple[int, ...]
    aliases: tuple[str, ...]
    categories: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.categories:
            object.__setattr__(self, "categories", ((),) * len(self.n_bins))


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The active party announces the number format and its public key.

    Privacy: the format depends on the number of rows alone; the gradients' scale stays with the active party.

    Attributes:
        public_key: parameters of the additive scheme; empty for the stand-in without encryption.
    """

    CODE: ClassVar[int] = 2
    scheme: int
    fraction_bits: int
    max_additions: int
    public_key: bytes


@dataclass(frozen=True, slots=True)
class TreeGradients:
    """Begins a tree with the encrypted gradient pairs of its first block of rows.

    Attributes:
        features: which of the party's features the tree may use (column sampling).
    """

    CODE: ClassVar[int] = 3
    tree: int
    features: Bits
    gradients: bytes


@dataclass(frozen=True, slots=True)
class MoreGradients:
    """The encrypted gradient pairs of the tree's next block of rows."""

    CODE: ClassVar[int] = 10
    tree: int
    gradients: bytes


@dataclass(frozen=True, slots=True)
class NodePartition:
    """How the rows of a node fall to its two children. Shapes: goes_left: one bit for each row of the node."""

    node: int
    left: int
    right: int
    goes_left: Bits


@dataclass(frozen=True, slots=True)
class OwnDivision:
    """The children of a node that the party itself split: it knows which rows go left."""

    node: int
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class HistogramRequest:
    """Asks for the sums of one child of each divided node, the one with fewer rows; of the root if none is divided.

    The answer holds the first block of features (``feature_blocks``), answers to ``MoreSums`` the further ones.

    Privacy: tells the party how the rows of these nodes are divided.

    Attributes:
        partitions: nodes that another party split, the active one included.
        own: nodes that this party split. Sums are due of the partitions' children first.
    """

    CODE: ClassVar[int] = 4
    tree: int
    partitions: tuple[NodePartition, ...]
    own: tuple[OwnDivision, ...] = ()


@dataclass(frozen=True, slots=True)
class MoreSums:
    """Asks for the next block of features of the sums that were asked for last."""

    CODE: ClassVar[int] = 11
    tree: int


@dataclass(frozen=True, slots=True)
class HistogramAnswer:
    """Sums per node, feature and bin of one block of features, protected by the additive scheme.

    Attributes:
        nodes: nodes whose sums are here, in the order of the request; the same in every block.
        withheld: nodes whose sums this party's guard keeps, in the order of the request.
    """

    CODE: ClassVar[int] = 5
    tree: int
    nodes: tuple[int, ...]
    sums: bytes
    withheld: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnedSplit:
    """A split that the party won: rows up to a bin of one of its features go left; bin -1: none with a value does.

    Attributes:
        right_bins: of a categorical feature, the bins that go right, ascending; ``bin`` is -1 then.
    """

    node: int
    feature: int
    bin: int
    default_left: bool
    right_bins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """Tells a party which of its splits are taken, and asks which rows go left."""

    CODE: ClassVar[int] = 6
    tree: int
    splits: tuple[OwnedSplit, ...]


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """For each split of a request one bit for each row of its node, in the order of rows: does it go left?

    Privacy: rows without a value are not told apart from the others.
    """

    CODE: ClassVar[int] = 7
    tree: int
    goes_left: tuple[Bits, ...]


@dataclass(frozen=True, slots=True)
class PathQuery:
    """Rows that reach a node of a finished tree. Shapes: rows: one bit for each row of the data set."""

    tree: int
    node: int
    rows: Bits


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """Asks an owner which of the rows that reach its nodes go left there.

    Privacy: tells the party which rows reach its nodes; asks for no bit off a row's path.

    Attributes:
        data_set: position among the agreed sets; 0 is the training set.
    """

    CODE: ClassVar[int] = 8
    data_set: int
    queries: tuple[PathQuery, ...]


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """For each query one bit for each row it named, in the order of rows: does it go left?"""

    CODE: ClassVar[int] = 9
    goes_left: tuple[Bits, ...]


Request = TrainingSetup | TreeGradients | MoreGradients | HistogramRequest | MoreSums | SplitRequest | DecisionRequest
Answer = PartySchema | HistogramAnswer | SplitAnswer | DecisionAnswer
Message = Request | Answer


# The byte form of messages: a message is its fields, one after the other, each in the form that the table gives.


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
    """How one kind of value is appended to a message, and read from one. Raises: ProtocolError, when it is read."""

    write: Callable[[list[bytes], Any], None]
    read: Callable[[_Reader], Any]


def _number(code: str, most: int, least: int = 0) -> _Form:
    layout = struct.Struct("<" + code)

    def read(data: _Reader) -> int:
        value: int = layout.unpack(data.take(layout.size))[0]
        if not least <= value <= most:
            raise ProtocolError("a number in a vertical message is out of range")
        return value

    return _Form(lambda out, value: out.append(layout.pack(value)), read)


def _blob(most: int = 1 << 40) -> _Form:
    size = _number("Q", most)

    def write(out: list[bytes], data: bytes) -> None:
        size.write(out, len(data))
        out.append(data)

    return _Form(write, lambda data: bytes(data.take(size.read(data))))


def _items(form: _Form, most: int = MAX_NODES) -> _Form:
    count = _number("I", most)

    def write(out: list[bytes], items: Sequence[Any]) -> None:
        count.write(out, len(items))
        for item in items:
            form.write(out, item)

    return _Form(write, lambda data: tuple(form.read(data) for _ in range(count.read(data))))


def _record(kind: type, *forms: _Form, check: Callable[..., None] = lambda *values: None) -> _Form:
    """Return the form of a dataclass. Args: check: refuses fields that do not fit one another."""
    names = [one.name for one in fields(kind)]

    def write(out: list[bytes], value: Any) -> None:
        for name, form in zip(names, forms, strict=True):
            form.write(out, getattr(value, name))

    def read(data: _Reader) -> Any:
        values = [form.read(data) for form in forms]
        check(*values)
        return kind(*values)

    return _Form(write, read)


def _read_text(data: _Reader) -> str:
    try:
        return str(_NAME.read(data), "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("a name in a vertical message is not text") from None


def _write_bits(out: list[bytes], bits: Bits) -> None:
    _N_ROWS.write(out, bits.n)
    out.append(bits.data)


def _read_bits(data: _Reader) -> Bits:
    n = _N_ROWS.read(data)
    packed = bytes(data.take(-(-n // 8)))
    if n % 8 and packed[-1] >> n % 8:
        raise ProtocolError("a bit list in a vertical message is longer than it says")
    return Bits(n, packed)


def _check_schema(
    rows: Sequence[int], n_bins: Sequence[int], aliases: Sequence[str], categories: Sequence[Sequence[str]]
) -> None:
    if not rows or not n_bins or len(aliases) != len(n_bins) or len(set(aliases)) != len(aliases):
        raise ProtocolError("a party's schema needs rows, and one distinct alias for each feature")
    if len(categories) != len(n_bins) or any(
        words and (len(words) < n or len(set(words)) != len(words)) for words, n in zip(categories, n_bins, strict=True)
    ):
        raise ProtocolError("a party's schema needs a list of distinct categories for each categorical feature")


_NODE, _N_ROWS, _NAME = _number("I", MAX_NODES), _number("I", MAX_ROWS), _blob(_MAX_NAME_BYTES)
_TEXT = _Form(lambda out, text: _NAME.write(out, text.encode()), _read_text)
_FLAG = _Form(_number("B", 1).write, lambda data: bool(_number("B", 1).read(data)))
_BITS = _Form(_write_bits, _read_bits)
_PARTITION = _record(NodePartition, _NODE, _NODE, _NODE, _BITS)
_OWN = _record(OwnDivision, _NODE, _NODE, _NODE)
_SPLIT = _record(
    OwnedSplit,
    _NODE,
    _number("I", _MAX_FEATURES),
    _number("i", 1 << 16, -1),
    _FLAG,
    _items(_number("H", MAX_BINS), MAX_BINS),
)
_QUERY = _record(PathQuery, _NODE, _NODE, _BITS)
_FORMS: dict[type[Message], _Form] = {
    PartySchema: _record(
        PartySchema,
        _items(_N_ROWS, 1 << 10),
        _items(_number("I", MAX_BINS, 1), _MAX_FEATURES),
        _items(_TEXT, _MAX_FEATURES),
        _items(_items(_TEXT, MAX_BINS), _MAX_FEATURES),
        check=_check_schema,
    ),
    TrainingSetup: _record(
        TrainingSetup, _number("B", 255), _number("H", 62), _number("I", MAX_ROWS, 1), _blob(1 << 20)
    ),
    TreeGradients: _record(TreeGradients, _NODE, _BITS, _blob()),
    MoreGradients: _record(MoreGradients, _NODE, _blob()),
    HistogramRequest: _record(HistogramRequest, _NODE, _items(_PARTITION), _items(_OWN)),
    MoreSums: _record(MoreSums, _NODE),
    HistogramAnswer: _record(HistogramAnswer, _NODE, _items(_NODE), _blob(), _items(_NODE)),
    SplitRequest: _record(SplitRequest, _NODE, _items(_SPLIT)),
    SplitAnswer: _record(SplitAnswer, _NODE, _items(_BITS)),
    DecisionRequest: _record(DecisionRequest, _NODE, _items(_QUERY)),
    DecisionAnswer: _record(DecisionAnswer, _items(_BITS)),
}
_TYPES = {type_.CODE: type_ for type_ in _FORMS}


def to_bytes(message: Message) -> bytes:
    """Return the bytes that travel."""
    parts = [_HEADER.pack(_MAGIC, _VERSION, message.CODE)]
    _FORMS[type(message)].write(parts, message)
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
    message: Message = _FORMS[_TYPES[code]].read(reader)
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


def collect(party: Party, future: Future[Any], expected: type[A], deadline_s: float) -> A:
    """Wait for an answer of the expected type.

    Raises:
        JobAborted: none came in time.
        ProtocolError: another type of answer came.
    """
    try:
        answer = future.result(deadline_s)
    except FutureTimeout:
        raise JobAborted(f"{party.name} did not answer within {deadline_s:.0f} s") from None
    if not isinstance(answer, expected):
        raise ProtocolError(f"{party.name} answered with {type(answer).__name__} where {expected.__name__} is due")
    return answer


# Requests of the active party and answers of the passive ones.


# The messages of training on their way through a conversation, each noted in the evidence by what it holds.


_CONTENT: dict[type[Message], Content] = {
    PartySchema: Content.SCHEMA,
    TrainingSetup: Content.SETUP,
    TreeGradients: Content.GRADIENTS,
    MoreGradients: Content.GRADIENTS,
    HistogramRequest: Content.HISTOGRAM_REQUEST,
    MoreSums: Content.HISTOGRAM_REQUEST,
    HistogramAnswer: Content.HISTOGRAMS,
    SplitRequest: Content.SPLITS,
    SplitAnswer: Content.PARTITIONS,
    DecisionRequest: Content.DECISION_REQUEST,
    DecisionAnswer: Content.DECISIONS,
}
_CIPHERTEXTS = {
    VerticalProfile.PAILLIER.value: Protection.PAILLIER,
    VerticalProfile.ELGAMAL.value: Protection.ELGAMAL,
    VerticalProfile.PLAIN.value: Protection.CLEAR,
}


class MessageNotes(Protocol):
    """Takes note of the messages of a conversation."""

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave."""

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""


class ContentRecorder:
    """Notes in the evidence what passes between this site and the others.

    Attributes:
        has_told: whether this site has told more than its public key.
    """

    def __init__(self, evidence: EvidenceLog, profile: str):
        self._evidence = evidence
        self._ciphertexts = _CIPHERTEXTS[profile]
        self.has_told = False

    def sent(self, peer: str, message: Message, size: int) -> None:
        """Note a message that is about to leave. Raises: ProtocolError, if its content must not."""
        self.has_told = self.has_told or not isinstance(message, TrainingSetup)
        self._note("sent", peer, message, size)

    def received(self, peer: str, message: Message, size: int) -> None:
        """Note a message that came."""
        self._note("received", peer, message, size)

    def _note(self, direction: str, peer: str, message: Message, size: int) -> None:
        what = _CONTENT[type(message)]
        protection = self._ciphertexts if what.encrypted else Protection.CLEAR
        self._evidence.content(direction, peer, what, protection, size)


class ConversationLink:
    """The active party's link to one passive party (a ``PassiveLink``)."""

    def __init__(self, requester: Requester, rank: int, name: str, notes: MessageNotes):
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


def answer_bytes(data: bytes, peer: str, answer: Callable[[Request], Answer | None], notes: MessageNotes) -> bytes:
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
