"""One target for each parser: what reads bytes, how it may refuse them, and a small corpus.

The corpus is that of the vectors, and the golden files. A crash is anything but an answer or the parser's own refusal.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from operator import attrgetter
from typing import Any

from dp_components.errors import LedgerDamaged
from he_processors.errors import AuthenticationError, ProtocolError
from tests.vectors.form import blob, files, read

Parse = Callable[[bytes], object]
_OF_PRODUCT = (ProtocolError, AuthenticationError, LedgerDamaged)


@dataclass(frozen=True)
class Target:
    """A parser under test.

    Attributes:
        refusals: the errors by which it says no.
        most: bytes of the longest input.
    """

    parse: Parse
    corpus: list[bytes]
    refusals: tuple[type[Exception], ...] = _OF_PRODUCT
    most: int = 1 << 12
    note: str = field(default="")


def of_format(format_: str) -> Iterator[dict[str, Any]]:
    """Yield what the vectors of a format give."""
    for path in files():
        yield from (vector["given"] for vector in read(path) if vector["format"] == format_)


def _vectors(format_: str, key: str = "data", most: int = 1 << 12) -> Callable[[], Target]:
    """Return the target that reads one field of a format's vectors, the rest as one of them has it."""

    def build() -> Target:
        from tests.vectors.make import FORMATS  # every parser's libraries, which other targets need not wait for

        good = [given for given in of_format(format_) if isinstance(given.get(key), str | list)]
        rest = {name: value for name, value in good[0].items() if name != key}
        judge = FORMATS[format_]
        is_text = key in ("log", "journal", "head")

        def parse(data: bytes) -> object:
            value = data.decode("latin-1") if is_text else data.hex()
            return judge({**rest, key: value})

        corpus = [given[key].encode("latin-1") if is_text else blob(given[key]) for given in good]
        return Target(parse, corpus, most=most)

    return build


def _direct(format_: str, make: Callable[[], Parse]) -> Callable[[], Target]:
    """Return the target that hands the bytes of a format's vectors to a parser at once, which is faster."""
    return lambda: Target(make(), [blob(given["data"]) for given in of_format(format_)])


def parser(path: str) -> Callable[[], Parse]:
    """Return what imports a parser by "module:name"; other targets need not wait for it."""
    module, _, name = path.partition(":")
    return lambda: attrgetter(name)(import_module(module))


def _heads() -> Parse:
    from nvflare_plugins.wire.envelope import unpack_head

    return lambda data: unpack_head(data, len(data))


def _lists() -> Parse:
    from nvflare_plugins.wire.envelope import unpack_list

    return lambda data: unpack_list(data, data[0] if data else 0)


def _messages() -> Parse:
    from nvflare_plugins.kinds.vertical.messages import from_bytes, to_bytes

    def parse(data: bytes) -> object:
        message = from_bytes(data)
        if to_bytes(message) != data:
            raise AssertionError("two encodings of one message")
        return message

    return parse


def _blocks() -> Parse:
    from nvflare_plugins.kinds.alignment.intersection import unpack_block

    return lambda data: unpack_block(data, 4)


def _public_keys() -> Parse:
    from he_processors.ciphertext_wire import public_key_from_bytes

    return lambda data: public_key_from_bytes(data, allow_toy_keys=True)


def _calls() -> Target:
    from google.protobuf.message import DecodeError

    from nvflare_plugins.pooled.mediated.communicator import CALLS, reply_class, request_class

    def parse(data: bytes) -> None:
        for call in CALLS:
            for kind in (request_class(call), reply_class(call)):
                kind().ParseFromString(data)

    return Target(parse, [blob(given["data"]) for given in of_format("call")], (DecodeError,))


def _server() -> Target:
    """The server's aggregator, whole: any frame from any of its sites."""
    from nvflare_plugins.wire.aggregation import Aggregator
    from nvflare_plugins.wire.envelope import unpack
    from tests.vectors.cases_frames import ATTEMPT

    def parse(data: bytes) -> None:
        server = Aggregator(("a", "b"), ATTEMPT, 60.0)
        answers: list[bytes] = []
        for site in ("a", "b"):
            server.submit(site, data, answers.append)
        if arriving := server.begin("b", data[:81], len(data)):
            arriving.feed(data)
            arriving.finish(answers.append)
        for answer in answers:
            unpack(answer)

    corpus = []
    for given in of_format("frame"):
        data = bytearray(blob(given["data"]))
        if len(data) >= 81:
            data[15:23], data[39:41] = bytes(8), bytes(2)  # counter and rank that are due
        corpus.append(bytes(data))
    return Target(parse, corpus)


def _sums() -> Target:
    """Sums of two sites' frames: the first is whole, the second any."""
    from nvflare_plugins.wire.aggregation import open_sum
    from nvflare_plugins.wire.envelope import unpack

    good = [unpack(blob(given["frames"][0])) for given in of_format("added") if len(given["frames"]) == 3]

    def parse(data: bytes) -> None:
        frame = unpack(data)
        first = next((one for one in good if one.tail == frame.tail), good[0])
        for parts in ((first, frame), (frame, first)):
            total = open_sum(parts[0], {})
            for part in parts:
                total.add(part.payload)
            total.pack()

    return Target(parse, [blob(frame) for given in of_format("added") for frame in given["frames"]])


def _sealed() -> Target:
    from he_processors.key_agreement import SealedBox

    given = next(of_format("sealed"))
    secret, session = blob(given["secret"]), blob(given["session"])

    def parse(data: bytes) -> object:
        return SealedBox(secret, session, 2, 0).open(data, b"agreement")

    return Target(parse, [blob(m) for given in of_format("sealed") for m in given["messages"]])


def _label() -> Target:
    from tests.vectors.product import FORMATS

    def parse(data: bytes) -> object:
        try:
            label = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return FORMATS["label"]({"label": label})

    return Target(parse, [json.dumps(given["label"]).encode() for given in of_format("label")])


def _elements() -> Target:
    import numpy as np

    from he_processors.curve.registry import available_backends, load_backend

    curves = [load_backend(name) for name in available_backends()]

    def parse(data: bytes) -> None:
        rows = np.frombuffer(data[: len(data) // 32 * 32], np.uint8).reshape(-1, 32)[:4]
        said = []
        for curve in curves:
            try:
                said.append(curve.to_ristretto(curve.from_ristretto(rows)).tobytes())
            except ProtocolError:
                said.append(b"no")
        if len(set(said)) > 1 or said[0] not in (rows.tobytes(), b"no"):
            raise AssertionError("the backends disagree, or an element has two encodings")

    points = [blob(point) for given in of_format("blinded") for point in given.get("points", ())]
    return Target(parse, points, most=128)


def _points_of(size: int) -> Target:
    import numpy as np

    from he_processors.curve.registry import available_backends, load_backend

    curves = [load_backend(name) for name in available_backends()]

    def parse(data: bytes) -> None:
        rows = np.frombuffer(data[: len(data) // size * size], np.uint8).reshape(-1, size)[:4]
        said = []
        for curve in curves:
            try:
                points = (curve.from_affine if size == 64 else curve.from_compressed)(rows)
                said.append(curve.to_affine(curve.add(points, points)).tobytes() + curve.to_affine(points).tobytes())
            except ProtocolError:
                said.append(b"no")
        if len(set(said)) > 1:
            raise AssertionError("the backends disagree")

    data = [blob(given["data"]) for given in of_format("elgamal key")]
    points = [one[71 + 64 * i - size : 71 + 64 * i] for one in data for i in range(2) if len(one) >= 71 + 64 * i]
    return Target(parse, [*points, *(b"".join(points[i : i + 3]) for i in range(6))], most=256)


def _dossier() -> Target:
    from nvflare_plugins.dossier.archive import Dossier, open_dossier, pack, seal
    from nvflare_plugins.evidence.audit import FlareAuthority
    from nvflare_plugins.site.certificates import Identity

    authority, created = FlareAuthority(None), datetime(2026, 11, 22, tzinfo=UTC)
    members = {"index.html": b"<p>cover", "evidence/site-1.evidence.jsonl": b"{}"}
    whole = seal(Dossier("job", "a1", "site-1", "masks", created, members, False), Identity.unsigned("site-1"))
    return Target(lambda data: open_dossier(data, authority), [whole, pack(members), pack({})])


def _decision() -> Target:
    from nvflare_plugins.dossier.decision import FORMAT, Decision, Judged, open_decision
    from nvflare_plugins.evidence.audit import FlareAuthority
    from nvflare_plugins.evidence.format import canonical

    names = dict.fromkeys(("site", "job_id", "attempt", "profile", "by"), "a")
    hashes = dict.fromkeys(("model", "copy", "rules", "facts", "evidence"), "0" * 64)
    said = {"format": FORMAT, "time": "2026-11-24T00:00:00Z", "released": True, "certificate": None, "signature": None}
    decision = Decision(
        judged=[Judged(rule="min_leaf_rows", limit="at least 10 rows", holds=True)], **names, **hashes, **said
    )
    whole = canonical(dataclasses.asdict(decision))
    return Target(lambda data: open_decision(data, FlareAuthority(None)), [whole, whole.replace(b"true", b"false")])


def _agreement() -> Target:
    """Whether a reader of the protocol's text alone judges any bytes as the product does."""
    from tests.vectors.make import judged
    from tests.vectors.reader import judge

    vectors = []
    for path in files():
        for vector in read(path):
            key = next((key for key in ("data", "log", "journal") if isinstance(vector["given"].get(key), str)), None)
            if key is not None and len(vector["given"][key]) < 6000 and vector["format"] not in ("call", "elgamal key"):
                vectors.append((vector["format"], key, vector["given"]))

    def parse(data: bytes) -> None:
        number, content = int.from_bytes(data[:2], "little"), data[2:]
        format_, key, given = vectors[number % len(vectors)]
        value = content.decode("latin-1") if key != "data" else content.hex()
        vector = {"format": format_, "given": {**given, key: value}}
        mine, theirs = judged(format_, vector["given"]), judge(vector)
        if _json(mine) != _json(theirs):
            raise AssertionError(f"{format_}: the product says {_json(mine)[:200]}, the reader {_json(theirs)[:200]}")

    corpus = []
    for number, (_, key, given) in enumerate(vectors):
        content = blob(given["data"]) if key == "data" else given[key].encode("latin-1")
        corpus.append(number.to_bytes(2, "little") + content)
    return Target(parse, corpus)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _serving_questions() -> Target:
    import numpy as np

    from nvflare_plugins.kinds.vertical_inference import serving

    def parse(data: bytes) -> None:
        what, content = serving.split_question(data)
        if what is serving.Question.OPEN:
            serving.opened_rows(content, 1000, 100)
        elif what is serving.Question.NEXT:
            serving.read_next_step(content)

    return Target(parse, [serving.open_rows(np.array([0, 7, 999])), serving.next_step("job-1"), b"\x02VLBV"])


def _serving_answers() -> Target:
    from nvflare_plugins.kinds.vertical_inference import serving

    return Target(serving.read_answer, [serving.answered(b"bits"), serving.refused("scoring_bits_per_row")])


def _sealed_splits() -> Target:
    """Both parties' halves of a comparison under seal: the first byte says which message is another one."""
    import numpy as np

    from he_processors.curve.registry import open_curve
    from he_processors.two_party.oblivious_transfer import TransferChooser, TransferSender
    from he_processors.two_party.split_argmax import NO_SPLIT, NodeSums, Terms
    from tests.support.two_party import Parties, messages_of_level

    parties, node, curve = Parties.of(Terms(512, 4, 0, 1)), NodeSums(300, 12, 3), open_curve()
    sums, may = np.array([[4, 8]], dtype=np.uint64), np.ones((1, 2), dtype=bool)

    def parse(data: bytes) -> None:
        number, content = data[0] % 7 if data else 0, data[1:]
        if number == 5:
            TransferChooser(curve, content, 1)
        elif number == 6:
            TransferSender(curve).key_pairs(content)
        else:
            active, passive = parties.level([node], 2)
            steps: tuple[Callable[[bytes], Any], ...] = (
                lambda said: passive.offer(said, sums, sums, may),
                lambda said: active.garble(said, sums, sums),
                passive.score,
                lambda said: active.decide(said, [NO_SPLIT]),
                passive.winners,
            )
            said = active.ask()
            for place, step in enumerate(steps[: number + 1]):
                said = step(content if place == number else said)

    honest, _ = messages_of_level(*parties.level([node], 2), sums.view(np.int64), sums.view(np.int64), may)
    sender = TransferSender(curve)
    honest += [sender.offer, TransferChooser(curve, sender.offer, 1).choices]
    return Target(parse, [bytes([number]) + one for number, one in enumerate(honest)], most=1 << 17)


def _requests_for_scores() -> Target:
    """A caller's line never raises; everything it can ask for here is refused."""
    from pathlib import Path
    from types import SimpleNamespace

    from nvflare_plugins.kinds.vertical_inference.score_socket import RequestQueue, ScoreSocket

    queue = RequestQueue()
    queue.close("nobody is there")
    rows = SimpleNamespace(n_rows=3, places=lambda ids: [0] * len(ids), status=dict)
    door = ScoreSocket(Path(), queue, lambda: rows, 5)

    def parse(line: bytes) -> None:
        if set(door.reply(line)) - {"error"}:
            raise AssertionError("a request was answered")

    texts = ('{"rows": [0, 2]}', '{"ids": ["a"]}', '{"status": true}', '{"refresh": "job-1"}', '{"stop": true}')
    return Target(parse, [text.encode() for text in texts])


TARGETS: dict[str, Callable[[], Target]] = {
    "frame": _direct("frame", parser("nvflare_plugins.wire.envelope:unpack")),
    "frame head": _direct("frame", _heads),
    "server": _server,
    "sums": _sums,
    "list": _direct("list", _lists),
    "label": _label,
    "call": _calls,
    "hello": _direct("hello", parser("nvflare_plugins.attempt.session:Hello.unpack")),
    "proof": _direct("proof", parser("nvflare_plugins.attempt.session:Proof.unpack")),
    "terms": _direct("terms", parser("nvflare_plugins.attempt.session:Terms.from_bytes")),
    "vertical terms": _direct(
        "vertical terms", parser("nvflare_plugins.kinds.vertical.messages:VerticalTerms.from_bytes")
    ),
    "schema": _direct("schema", parser("nvflare_plugins.data.schema:Schema.from_bytes")),
    "sealed": _sealed,
    "gathered": _vectors("gathered", "message"),
    "opened sum": _vectors("opened sum", "payload"),
    "step": _direct("step", parser("nvflare_plugins.kinds.vertical.conversation:ConversationStep.from_bytes")),
    "vertical message": _direct("vertical message", _messages),
    "block": _direct("block", _blocks),
    "chain": _vectors("chain"),
    "serving question": _serving_questions,
    "serving answer": _serving_answers,
    "request for scores": _requests_for_scores,
    "sealed splits": _sealed_splits,
    "buckets": _vectors("buckets"),
    "positions": _vectors("positions"),
    "tree": _vectors("tree"),
    "bfv message": _vectors("ring message", most=1 << 17),
    "ring parameters": _vectors("ring parameters"),
    "ring secret": _vectors("ring secret"),
    "public key": _direct("public key", _public_keys),
    "ciphertexts": _vectors("ciphertexts"),
    "elgamal key": _vectors("elgamal key"),
    "points": _vectors("points"),
    "element": _elements,
    "affine point": lambda: _points_of(64),
    "compressed point": lambda: _points_of(32),
    "evidence": _vectors("evidence", "log", 1 << 14),
    "evidence head": _direct("head", parser("nvflare_plugins.evidence.format:SignedHead.from_bytes")),
    "dossier": _dossier,
    "decision": _decision,
    "ledger": _vectors("ledger", "journal", 1 << 14),
    "ledger head": _vectors("ledger", "head"),
    "two readers": _agreement,
}
