"""What the product makes of a vector of messages and sessions: one function for each format, JSON values in and out.

The reader beside this file does the same from the protocol's text alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from he_processors import bfv, ckks
from he_processors.errors import ProtocolError
from he_processors.key_agreement import (
    EphemeralKey,
    Participant,
    SealedBox,
    check_confirmation,
    confirm_key,
    derive_group_secret,
    derive_key,
    derive_pair_secret,
    encode_fields,
    expand_key,
    extract_key,
    hash_transcript,
)
from he_processors.masks import MessageLabel, PairwiseMasks, ResidueMasks
from he_processors.ring_ciphertexts import KeyFacts, MessageSum, RingMessage, RingScheme, split_secret
from he_processors.sum_tags import PairMacs, SumTags
from nvflare_plugins.attempt.session import Hello, Proof, Terms, handshake_statement
from nvflare_plugins.data.schema import Schema
from nvflare_plugins.flare.transport import Label
from nvflare_plugins.kinds.vertical.messages import Bits, VerticalTerms
from nvflare_plugins.wire.aggregation import open_sum
from nvflare_plugins.wire.envelope import Codec, commitment, unpack, unpack_list
from nvflare_plugins.wire.profiles import MaskedSums, ShortMaskedSums
from tests.vectors.form import Given, blob, formats, numbers

Gives = dict[str, Any]
RING: dict[str, RingScheme] = {"bfv": bfv._SCHEME, "ckks": ckks._SCHEME}


class _Given:
    """A source of given random bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def bytes(self, n: int) -> bytes:
        head, self._data = self._data[:n], self._data[n:]
        assert len(head) == n
        return head


def fields_of(document: list[dict[str, Any]]) -> list[bytes | str | int]:
    """Return typed fields: {"s": text}, {"i": integer} or {"b": hexadecimal}."""
    return [blob(f["b"]) if "b" in f else f.get("s", f.get("i")) for f in document]


def plain(value: Any) -> Any:
    """Return the fields of a message as JSON values."""
    if isinstance(value, Bits):
        return "".join("01"[int(bit)] for bit in value.unpack())
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return value.hex() if isinstance(value, bytes) else value


def _frame(given: Given) -> Gives:
    frame = unpack(blob(given["data"]))
    return {
        **{name: getattr(frame, name).name for name in ("type", "operation", "codec", "kind")},
        "private": frame.kind.private,
        "phase": str(frame.moment),
        "counter": frame.counter,
        "attempt": frame.attempt.hex(),
        "rank": frame.rank,
        "values": frame.n_values,
        "payload": bytes(frame.payload).hex(),
        "attachment": frame.attachment.hex(),
        "tail": frame.tail,
        "salt": frame.salt.hex(),
        "commitment": commitment(bytes(frame.payload), frame.salt),
    }


def _list(given: Given) -> Gives:
    return {"parts": [part.hex() for part in unpack_list(blob(given["data"]), given["parts"])]}


class _Message:
    """As much of FLARE's message as a label is read from."""

    def __init__(self, label: Any) -> None:
        self.get_header = {"veilboost": label}.get


def _label(given: Given) -> Gives:
    label = Label.of(_Message(given["label"]))
    return {"attempt": label.attempt, "number": label.number, "size": label.size, "offset": label.offset}


def _commitment(given: Given) -> Gives:
    return {"sha256": commitment(blob(given["payload"]), blob(given["salt"]))}


def _fields(given: Given) -> Gives:
    return {"data": encode_fields(*fields_of(given["fields"])).hex()}


def _key(given: Given) -> Gives:
    context = fields_of(given["context"])
    key = derive_key(blob(given["secret"]), blob(given["salt"]), given["purpose"], *context, length=given["length"])
    return {"key": key.hex()}


def _message_key(given: Given) -> Gives:
    return {"key": expand_key(extract_key(blob(given["secret"])), encode_fields(*fields_of(given["info"]))).hex()}


def _key_agreement(given: Given) -> Gives:
    own = EphemeralKey(_Given(blob(given["private"])))
    shared = own.agree(blob(given["peer"]))
    return {"public": own.public.hex(), "shared": shared.hex()}


def _pair_secret(given: Given) -> Gives:
    return {"key": derive_pair_secret(blob(given["shared"]), blob(given["session"]), *given["ranks"]).hex()}


def _group_secret(given: Given) -> Gives:
    return {"key": derive_group_secret([blob(share) for share in given["shares"]], blob(given["session"])).hex()}


def _transcript(given: Given) -> Gives:
    names = ("nonce", "public_key", "certificate_fingerprint", "policy_hash")
    sites = [
        Participant(s["site"], s["role"], *(blob(s[name]) for name in names), tuple(s["protocols"]))
        for s in given["sites"]
    ]
    session = hash_transcript(given["job"], given["attempt"], blob(given["binding"]), given["protocol"], sites)
    return {"session": session.hex(), "statements": [handshake_statement(session, r).hex() for r in range(len(sites))]}


def _confirmation(given: Given) -> Gives:
    place = (blob(given["secret"]), blob(given["session"]), given["purpose"], given["sender"], given["recipient"])
    if "mac" in given:
        check_confirmation(blob(given["mac"]), *place)
        return {"accepted": True}
    return {"mac": confirm_key(*place).hex()}


def _sealed(given: Given) -> Gives:
    box = SealedBox(blob(given["secret"]), blob(given["session"]), given["sender"], given["recipient"])
    return {"plain": [box.open(blob(message), given["purpose"].encode()).hex() for message in given["messages"]]}


def _gathered(given: Given) -> Gives:
    secrets = {int(rank): blob(secret) for rank, secret in given["pair_secrets"].items()}
    macs = PairMacs(blob(given["session"]), given["rank"], secrets)
    place = tuple(given["place"])
    if "content" in given:
        return {"message": macs.append(blob(given["content"]), place).hex()}
    return {"content": macs.check(given["sender"], blob(given["message"]), place).hex()}


def _label_of(given: Given, n_values: int) -> MessageLabel:
    return MessageLabel(given["counter"], given["kind"], given["phase"], n_values)


def _keys(given: Given) -> tuple[Any, ...]:
    secrets = {int(rank): blob(secret) for rank, secret in given["pair_secrets"].items()}
    return blob(given["session"]), given["rank"], secrets, blob(given["group_secret"])


def _masked(given: Given) -> Gives:
    values, modulus, bits = numbers(given["values"]), given["modulus"], given.get("bits", 64)
    words = np.array([value % (modulus or 1 << bits) for value in values], dtype=f"u{bits // 8}")
    masks = PairwiseMasks(*_keys(given), blinder=None if given.get("readable") else 0)
    masked = masks.mask(words, _label_of(given, len(values)), modulus)
    return {"masked": masked.astype(f"<u{bits // 8}").tobytes().hex()}


def _masked_residues(given: Given) -> Gives:
    residues = ResidueMasks(*_keys(given)).mask(np.array(given["residues"], dtype=np.uint64), given["counter"])
    return {"masked": residues.astype("<u8").tobytes().hex()}


def _contribution(given: Given) -> Gives:
    """The payload of a site's sum under masks, its tail included."""
    values = np.array(numbers(given["values"]), dtype=np.int64)
    label, residues = _label_of(given, values.size), np.array(given["residues"], dtype=np.uint64)
    words = _sums_of(given).protect(values, label)
    tail = SumTags(*_keys(given)).protect(values, residues, label)
    return {"payload": (words + tail.astype("<u8").tobytes()).hex(), "tail": 8 * tail.size}


def _sums_of(given: Given) -> MaskedSums:
    kind = MaskedSums if given.get("bits", 64) == 64 else ShortMaskedSums
    return kind(PairwiseMasks(*_keys(given)))


def _opened_sum(given: Given) -> Gives:
    """What a site makes of the server's answer to its sum."""
    payload, tail, width = blob(given["payload"]), given["tail"], given.get("bits", 64) // 8
    if len(payload) < tail or (len(payload) - tail) % width or tail % 8:
        raise ProtocolError("no words")  # a site knows how many are due
    words, n_values = payload[: len(payload) - tail], (len(payload) - tail) // width
    residues = np.frombuffer(payload[len(payload) - tail :], dtype="<u8").astype(np.uint64)
    label, nothing = _label_of(given, n_values), np.zeros(n_values, np.int64)
    sums, tags = _sums_of(given), SumTags(*_keys(given))
    sums.protect(nothing, label)
    tags.protect(nothing, np.zeros(residues.size - 2, np.uint64), label)
    values = sums.reveal(words, label)
    found = tags.open(values, residues, label)
    return {"values": values.tolist(), "residues": found.tolist()}


def _added(given: Given) -> Gives:
    """What the server answers to the sites' frames of one sum."""
    frames = [unpack(blob(data)) for data in given["frames"]]
    parameters = {Codec[name]: blob(data) for name, data in given.get("parameters", {}).items()}
    total = open_sum(frames[0], parameters)
    for frame in frames:
        total.add(frame.payload)
    return {"payload": bytes(total.pack()).hex()}


def _ring_summary(message: RingMessage) -> Gives:
    return {
        "values": message.n_values,
        "summands": message.n_summands,
        "ciphertexts": len(message.residues[0]),
        "residues": [residues[0, :, :3].tolist() for residues in message.residues],
    }


def _ring_message(given: Given) -> Gives:
    scheme = RING[given["scheme"]]
    facts = KeyFacts.unpack(blob(given["parameters"]), scheme)
    return _ring_summary(RingMessage.unpack(blob(given["data"]), scheme, facts))


def _ring_sum(given: Given) -> Gives:
    scheme, parameters = RING[given["scheme"]], blob(given["parameters"])
    total = MessageSum(parameters, scheme)
    for message in given["messages"]:
        total.add(blob(message))
    return _ring_summary(RingMessage.unpack(total.pack(), scheme, KeyFacts.unpack(parameters, scheme)))


def _ring_parameters(given: Given) -> Gives:
    facts = KeyFacts.unpack(blob(given["data"]), RING[given["scheme"]])
    return {"key_id": facts.key_id.hex(), "summands": facts.n_summands}


def _ring_secret(given: Given) -> Gives:
    facts, body = split_secret(RING[given["scheme"]], blob(given["data"]))
    return {"key_id": facts.key_id.hex(), "summands": facts.n_summands, "body": len(body)}


def _hello(given: Given) -> Gives:
    return dict(plain(Hello.unpack(blob(given["data"]))))


def _proof(given: Given) -> Gives:
    return dict(plain(Proof.unpack(blob(given["data"]))))


def _schema_document(schema: Schema) -> Gives:
    columns = [[column.name, column.type, list(column.categories)] for column in schema.columns]
    classes = None if schema.label_classes is None else list(schema.label_classes)
    return {"columns": columns, "label": schema.label, "label_classes": classes, "weight": schema.weight}


def _schema(given: Given) -> Gives:
    return _schema_document(Schema.from_bytes(blob(given["data"])))


def _terms(given: Given) -> Gives:
    terms = Terms.from_bytes(blob(given["data"]))
    floors = terms.floors
    return {
        "versions": terms.versions,
        "job": terms.job,
        "parameters": terms.parameters,
        "start": terms.start,
        "checkpoints": terms.checkpoints,
        "floors": {name: getattr(floors, name) for name in floors.__dataclass_fields__},
        "schema": _schema_document(terms.schema),
    }


def _vertical_terms(given: Given) -> Gives:
    terms = VerticalTerms.from_bytes(blob(given["data"]))
    return {name: getattr(terms, name) for name in terms.__dataclass_fields__}


FORMATS = formats(globals())
