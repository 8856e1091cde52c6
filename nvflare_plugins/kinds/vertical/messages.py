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
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ProtocolError
from he_processors.histogram.planner import BinLayout
from nvflare_plugins.base.errors import JobAborted
from nvflare_plugins.evidence.format import Content, Protection
from nvflare_plugins.kinds.vertical.conversation import Requester
from nvflare_plugins.kinds.vertical.job import MAX_BINS, VerticalProfile

_HEADER = struct.Struct("<4sBB")
_MAGIC, _VERSION = b"VLBV", 2
MAX_NODES = 1 << 24
MAX_ROWS = (1 << 31) - 1
_MAX_FEATURES = 1 << 20
_MAX_NAME_BYTES = 1 << 10

T = TypeVar("T")


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


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def numbers(self, layout: str, *values: int) -> None:
        self.parts.append(struct.pack("<" + layout, *values))

    def blob(self, data: bytes) -> None:
        self.numbers("Q", len(data))
        self.parts.append(data)

    def text(self, text: str) -> None:
        self.blob(text.encode())

    def bits(self, bits: Bits) -> None:
        self.numbers("I", bits.n)
        self.parts.append(bits.data)

    def items(self, items: Sequence[T], write: Callable[[T], None]) -> None:
        self.numbers("I", len(items))
        for item in items:
            write(item)


class _Reader:
    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._position = 0

    def numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def number(self, code: str, most: int, least: int = 0) -> int:
        value = self.numbers(code)[0]
        if not least <= value <= most:
            raise ProtocolError("a number in a vertical message is out of range")
        return int(value)

    def flag(self) -> bool:
        return bool(self.number("B", 1))

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._position:
            raise ProtocolError("a vertical message is cut short")
        self._position += size
        return self._data[self._position - size : self._position]

    def blob(self, most: int = 1 << 40) -> bytes:
        return bytes(self.take(self.number("Q", most)))

    def text(self) -> str:
        try:
            return self.blob(_MAX_NAME_BYTES).decode()
        except UnicodeDecodeError:
            raise ProtocolError("a name in a vertical message is not text") from None

    def bits(self) -> Bits:
        n = self.number("I", MAX_ROWS)
        data = bytes(self.take(-(-n // 8)))
        if n % 8 and data[-1] >> n % 8:
            raise ProtocolError("a bit list in a vertical message is longer than it says")
        return Bits(n, data)

    def items(self, read: Callable[[], T], most: int = MAX_NODES) -> tuple[T, ...]:
        return tuple(read() for _ in range(self.number("I", most)))

    def node(self) -> int:
        return self.number("I", MAX_NODES)

    def finish(self) -> None:
        if self._position != len(self._data):
            raise ProtocolError("a vertical message has trailing bytes")


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

    def _write(self, out: _Writer) -> None:
        out.items(self.set_rows, lambda n: out.numbers("I", n))
        out.items(self.n_bins, lambda n: out.numbers("I", n))
        out.items(self.aliases, out.text)
        out.items(self.categories, lambda words: out.items(words, out.text))

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        rows = data.items(lambda: data.number("I", MAX_ROWS), 1 << 10)
        n_bins = data.items(lambda: data.number("I", MAX_BINS, 1), _MAX_FEATURES)
        aliases = data.items(data.text, _MAX_FEATURES)
        categories = data.items(lambda: data.items(data.text, MAX_BINS), _MAX_FEATURES)
        if not rows or not n_bins or len(aliases) != len(n_bins) or len(set(aliases)) != len(aliases):
            raise ProtocolError("a party's schema needs rows, and one distinct alias for each feature")
        if len(categories) != len(n_bins) or any(
            words and (len(words) < n or len(set(words)) != len(words))
            for words, n in zip(categories, n_bins, strict=True)
        ):
            raise ProtocolError("a party's schema needs a list of distinct categories for each categorical feature")
        return cls(rows, n_bins, aliases, categories)


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

    def _write(self, out: _Writer) -> None:
        out.numbers("BHI", self.scheme, self.fraction_bits, self.max_additions)
        out.blob(self.public_key)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.number("B", 255), data.number("H", 62), data.number("I", MAX_ROWS, 1), data.blob(1 << 20))


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

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)
        out.bits(self.features)
        out.blob(self.gradients)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.node(), data.bits(), data.blob())


@dataclass(frozen=True, slots=True)
class MoreGradients:
    """The encrypted gradient pairs of the tree's next block of rows."""

    CODE: ClassVar[int] = 10
    tree: int
    gradients: bytes

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)
        out.blob(self.gradients)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.node(), data.blob())


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

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)

        def write(part: NodePartition) -> None:
            out.numbers("III", part.node, part.left, part.right)
            out.bits(part.goes_left)

        out.items(self.partitions, write)
        out.items(self.own, lambda part: out.numbers("III", part.node, part.left, part.right))

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        def read() -> NodePartition:
            return NodePartition(data.node(), data.node(), data.node(), data.bits())

        def read_own() -> OwnDivision:
            return OwnDivision(data.node(), data.node(), data.node())

        return cls(data.node(), data.items(read), data.items(read_own))


@dataclass(frozen=True, slots=True)
class MoreSums:
    """Asks for the next block of features of the sums that were asked for last."""

    CODE: ClassVar[int] = 11
    tree: int

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.node())


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

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)
        out.items(self.nodes, lambda node: out.numbers("I", node))
        out.blob(self.sums)
        out.items(self.withheld, lambda node: out.numbers("I", node))

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.node(), data.items(data.node), data.blob(), data.items(data.node))


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

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)

        def write(split: OwnedSplit) -> None:
            out.numbers("IIiB", split.node, split.feature, split.bin, split.default_left)
            out.items(split.right_bins, lambda n: out.numbers("H", n))

        out.items(self.splits, write)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        def read() -> OwnedSplit:
            return OwnedSplit(
                data.node(),
                data.number("I", _MAX_FEATURES),
                data.number("i", 1 << 16, -1),
                data.flag(),
                data.items(lambda: data.number("H", MAX_BINS), MAX_BINS),
            )

        return cls(data.node(), data.items(read))


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """For each split of a request one bit for each row of its node, in the order of rows: does it go left?

    Privacy: rows without a value are not told apart from the others.
    """

    CODE: ClassVar[int] = 7
    tree: int
    goes_left: tuple[Bits, ...]

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.tree)
        out.items(self.goes_left, out.bits)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.node(), data.items(data.bits))


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

    def _write(self, out: _Writer) -> None:
        out.numbers("I", self.data_set)

        def write(query: PathQuery) -> None:
            out.numbers("II", query.tree, query.node)
            out.bits(query.rows)

        out.items(self.queries, write)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.node(), data.items(lambda: PathQuery(data.node(), data.node(), data.bits())))


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """For each query one bit for each row it named, in the order of rows: does it go left?"""

    CODE: ClassVar[int] = 9
    goes_left: tuple[Bits, ...]

    def _write(self, out: _Writer) -> None:
        out.items(self.goes_left, out.bits)

    @classmethod
    def _read(cls, data: _Reader) -> Self:
        return cls(data.items(data.bits))


Request = TrainingSetup | TreeGradients | MoreGradients | HistogramRequest | MoreSums | SplitRequest | DecisionRequest
Answer = PartySchema | HistogramAnswer | SplitAnswer | DecisionAnswer
Message = Request | Answer

_TYPES: dict[int, type[Message]] = {
    type_.CODE: type_
    for type_ in (
        PartySchema,
        TrainingSetup,
        TreeGradients,
        MoreGradients,
        HistogramRequest,
        MoreSums,
        HistogramAnswer,
        SplitRequest,
        SplitAnswer,
        DecisionRequest,
        DecisionAnswer,
    )
}


def to_bytes(message: Message) -> bytes:
    """Return the bytes that travel."""
    out = _Writer()
    message._write(out)
    return b"".join((_HEADER.pack(_MAGIC, _VERSION, message.CODE), *out.parts))


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
    message = _TYPES[code]._read(reader)
    reader.finish()
    return message


# A lock-step conversation over routed exchanges: one site asks, the others answer.


# The blocks of features in which sums travel: each is sent as soon as it is done.
#
# Both sides derive them from what both know, so that none is named on the way. A passive party holds the sums of one or
# two blocks and not those of a level, and the active party opens one block while the next is added up.


MOST_SLOTS = (
    1 << 15
)  # of all nodes in a block: some 30 MB of ciphertexts of Paillier-3072, and thrice that while packed
MOST_ADDITIONS = 1 << 20  # to a block: about a second of Paillier, a tenth of one of elgamal
_STEP = 2  # features that can share cells (histogram/planner.py)


def feature_blocks(layout: BinLayout, n_nodes: int, n_rows: int, is_streamed: bool = True) -> tuple[slice, ...]:
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


def most_slots(n_bins: Sequence[int], n_nodes: int, is_streamed: bool = True) -> int:
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


class ContentLog(Protocol):
    """What the link needs of an evidence log."""

    def content(self, direction: str, peer: str, what: Content, protection: Protection, size_bytes: int) -> None: ...


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

    def __init__(self, evidence: ContentLog, profile: str):
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

    def __init__(self, asking: Requester, rank: int, name: str, notes: MessageNotes):
        self._asking, self._rank, self._name, self._notes = asking, rank, name, notes

    def ask(self, request: Request) -> Future[Answer | None]:
        """Queue a request."""
        data = to_bytes(request)
        self._notes.sent(self._name, request, len(data))
        return self._asking.ask(self._rank, data, self._read)

    def flush(self) -> None:
        """Let requests go that wait for further ones."""
        self._asking.flush()

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
