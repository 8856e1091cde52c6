"""What the product makes of a vector of messages between parties, ciphertexts and files: as ``product.py``."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from dp_components.events import event_document
from dp_components.ledger import Head, Journal, LedgerState
from he_processors.bignum.registry import open_backend
from he_processors.ciphertext_wire import CiphertextHeader, Content, decode_for_decryption, public_key_from_bytes
from he_processors.curve.registry import open_curve
from he_processors.elgamal.bin_sums import Content as PointContent
from he_processors.elgamal.bin_sums import PointHeader, decode_points
from he_processors.elgamal.encryption import DigitFormat, ElGamalPublicKey
from he_processors.errors import ProtocolError
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.randomness import OS_RANDOMNESS
from nvflare_plugins.evidence.format import SignedHead, seal_statement
from nvflare_plugins.evidence.reader import read_log
from nvflare_plugins.kinds.alignment.intersection import BlindingKey, Proofs, unpack_block
from nvflare_plugins.kinds.bagging.model import SharedTree
from nvflare_plugins.kinds.federboost_vertical.tables import BucketBlock
from nvflare_plugins.kinds.vertical.conversation import ConversationStep
from nvflare_plugins.kinds.vertical.messages import DecisionAnswer, DecisionRequest, Message, from_bytes
from nvflare_plugins.kinds.vertical_inference import serving
from nvflare_plugins.kinds.vertical_inference.explanations import RowPositions
from nvflare_plugins.pooled.mediated.communicator import request_class
from tests.vectors.form import Given, blob, formats
from tests.vectors.product import plain

Gives = dict[str, Any]


class _Secret:
    """A source that draws one scalar: what is drawn is below the order, so that it is taken at once."""

    def __init__(self, scalar: int) -> None:
        self._scalar = scalar - 1

    def bytes(self, n: int) -> bytes:
        return (self._scalar << (8 * n - 253)).to_bytes(n, "little")


def _public_key(given: Given) -> Gives:
    key = public_key_from_bytes(blob(given["data"]), allow_toy_keys=given["toy"])
    return {"scheme": key.scheme.name, "bits": key.key_bits, "fingerprint": key.fingerprint}


def ciphertext_header(given: Given) -> CiphertextHeader:
    """Return the header that the receiver of a vector's ciphertexts expects."""
    key = public_key_from_bytes(blob(given["key"]), allow_toy_keys=True)
    pairs = PairFormat.logistic(given["fraction_bits"], given["max_additions"])
    packing = PackingLayout.fit(pairs, key.plaintext_bits)
    return CiphertextHeader(key, Content[given["content"]], packing, given["count"])


def _ciphertexts(given: Given) -> Gives:
    header = ciphertext_header(given)
    rows = decode_for_decryption(blob(given["data"]), header, open_backend("reference", header.public_key.modulus))
    return {"ciphertexts": [row.tobytes().hex() for row in rows]}


def _elgamal_key(given: Given) -> Gives:
    key = ElGamalPublicKey.from_bytes(blob(given["data"]), open_curve())
    return {"points": [point.hex() for point in key.points], "fingerprint": key.fingerprint}


def point_header(given: Given) -> PointHeader:
    """Return the header that the receiver of a vector's points expects."""
    key = ElGamalPublicKey.from_bytes(blob(given["key"]), open_curve())
    digits = DigitFormat.of(given["fraction_bits"], given["max_additions"], point_bytes=given["point_bytes"])
    return PointHeader(key, PointContent[given["content"]], digits, given["count"])


def _points(given: Given) -> Gives:
    curve = open_curve()
    rows = decode_points(blob(given["data"]), point_header(given), curve)
    columns = [curve.to_affine(column) for column in rows.columns]
    return {"columns": [[point.tobytes().hex() for point in column] for column in columns]}


def _blinded(given: Given) -> Gives:
    key = BlindingKey(blob(given["domain"]), _Secret(int(given["secret"])))
    if "items" in given:
        points = key.blind_items([blob(item) for item in given["items"]])
    else:
        points = getattr(key, given["do"])([blob(point) for point in given["points"]])
    return {"points": [point.hex() for point in points]}


def _block(given: Given) -> Gives:
    return {"points": [point.hex() for point in unpack_block(blob(given["data"]), given["size"])]}


def _chain(given: Given) -> Gives:
    domain, committed = blob(given["domain"]), tuple(map(blob, given["commitments"]))
    proofs = Proofs(domain, committed, 0, BlindingKey(domain), OS_RANDOMNESS)
    place = given["first"], given["number"], [blob(point) for point in given["common"]]
    points = proofs.check(blob(given["data"]), *place, given["size"], given["links"])
    return {"points": [point.hex() for point in points]}


def _step(given: Given) -> Gives:
    step = ConversationStep.from_bytes(blob(given["data"]))
    fragments = [[f.message, f.is_last, f.data.hex()] for f in step.fragments]
    return {"flag": step.flag.name, "number": step.number, "turn": step.turn, "fragments": fragments}


def _vertical_message(given: Given) -> Gives:
    message = from_bytes(blob(given["data"]))
    return {"message": type(message).__name__, **plain(message)}


def _buckets(given: Given) -> Gives:
    block = BucketBlock.from_bytes(blob(given["data"]), given["rows"], given["features"])
    return {"buckets": list(block.n_buckets), "ids": block.ids.tolist()}


def _positions(given: Given) -> Gives:
    told = RowPositions.from_bytes(blob(given["data"]), given["rows"])
    return {
        "features": told.features.tolist(),
        "splits": told.splits.tolist(),
        "positions": told.positions.tolist(),
        "groups": told.groups.tolist(),
    }


def _tree(given: Given) -> Gives:
    nodes = SharedTree.from_bytes(blob(given["data"]), given["depth"], given["features"]).nodes
    return {"nodes": [[part if i != 3 else float(part) for i, part in enumerate(node)] for node in nodes.tolist()]}


def _call(given: Given) -> Gives:
    request = request_class(given["call"])()
    request.ParseFromString(blob(given["data"]))
    values = {field.name: getattr(request, field.name) for field in request.DESCRIPTOR.fields}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}


def _evidence(given: Given) -> Gives:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(given["log"].encode())
        log = read_log(path)
    return {
        "role": log.role,
        "site": log.site,
        "job_id": log.job_id,
        "attempt": log.attempt,
        "profile": log.profile,
        "link": [log.number, *((None, None) if log.earlier is None else (log.earlier.attempt, log.earlier.digest))],
        "records": len(log.digests),
        "head": log.digests[-1].hex(),
        "messages": [[m.direction, m.counter, m.kind, m.size, m.sha256, m.salt] for m in log.messages],
        "contents": [[part.direction, part.peer, part.what, part.protection, part.size] for part in log.parts],
        "spends": [[spend.query, spend.epsilon, spend.delta] for spend in log.spends],
        "rounds": [number for _, number in log.rounds],
        "heads": [[head.site for head in heads] for _, heads in log.heads],
        "completed": log.completed,
        "sealed": not log.unfinished,
    }


def _head(given: Given) -> Gives:
    head = SignedHead.from_bytes(blob(given["data"]))
    signature = None if head.signature is None else head.signature.hex()
    return {
        "site": head.site,
        "records": head.n_records,
        "digest": head.digest.hex(),
        "signature": signature,
        "statement": head.statement(given["job_id"], given["attempt"]).decode(),
    }


def _seal(given: Given) -> Gives:
    return {"statement": seal_statement(given["body"], blob(given["previous"])).decode()}


def _counted(counts: Any) -> list[Any]:
    return sorted(([event_document(event), count] for event, count in counts.items()), key=_sorted)


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def ledger_state(journal: bytes, head: bytes | None) -> tuple[LedgerState, int, bool | None]:
    """Return what a ledger adds up to, the bytes of whole lines, and whether it has all that its head says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ledger"
        path.write_bytes(journal)
        state, file = LedgerState(), Journal(path)
        for record in file.read_new()[1]:
            state.apply(record)
        is_whole = None
        if head is not None:
            head_path = Path(folder) / "x.head"
            head_path.write_bytes(head)
            said = Head(head_path).read()
            assert said is not None
            is_whole = said.is_met_by(file)
        return state, path.stat().st_size, is_whole


def _ledger(given: Given) -> Gives:
    head = given.get("head")
    state, n_bytes, is_whole = ledger_state(given["journal"].encode(), None if head is None else head.encode())
    identity = None if state.identity is None else {**dataclasses.asdict(state.identity)}
    if identity is not None:
        identity["relation"] = state.identity.relation.value
    jobs = {
        name: {
            "plan": _counted(job.plan),
            "spent": _counted(job.spent),
            "releases": job.n_releases,
            "replies": {query: reply.tolist() for query, reply in job.replies.items()},
            "interrupted": job.is_interrupted,
        }
        for name, job in state.jobs.items()
    }
    closed = {
        name: [job.opened, job.closed, job.n_releases, _counted(state.closed.spendings[job.spending])]
        for name, job in state.closed.jobs.items()
    }
    return {
        "identity": identity,
        "budget": None if state.budget is None else dataclasses.asdict(state.budget),
        "open": jobs,
        "closed": closed,
        "lost": list(state.lost.parts()),
        "has_head": state.has_head,
        "bytes": n_bytes,
        "whole": is_whole,
    }


def _serving_question(given: Given) -> Gives:
    what, content = serving.split_question(blob(given["data"]))
    if what is serving.Question.OPEN:
        return {"question": what.name, "rows": serving.opened_rows(content, given["rows"], given["most"]).tolist()}
    if what is serving.Question.ASK:
        return {"question": what.name, "asks": _of_kind(content, DecisionRequest)}
    return {"question": what.name, "alignment": serving.read_next_step(content)}


def _serving_answer(given: Given) -> Gives:
    content, limit = serving.read_answer(blob(given["data"]))
    if limit is not None:
        return {"refused": True, "limit": limit or None}
    if given["to"] == "ASK":
        return {"refused": False, "told": _of_kind(content, DecisionAnswer)}
    serving._nothing(content)
    return {"refused": False, "told": None}


def _of_kind(content: bytes, kind: type[Message]) -> Gives:
    message = from_bytes(content)
    if not isinstance(message, kind):
        raise ProtocolError("another message than belongs there")
    return {"message": type(message).__name__, **plain(message)}


FORMATS = formats(globals())
