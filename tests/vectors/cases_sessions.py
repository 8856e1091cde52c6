"""Vectors of the handshake, its keys, what is sealed under them, and MACs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from he_processors.key_agreement import EphemeralKey, SealedBox
from he_processors.sum_tags import PairMacs
from nvflare_plugins.attempt.session import Hello, Proof, Terms
from nvflare_plugins.data.schema import Column, Schema
from nvflare_plugins.kinds.vertical.messages import VerticalTerms
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.site.protocols import Span
from nvflare_plugins.wire.envelope import pack_list, unpack_list
from tests.vectors.drawn import Case, at, cut_and_longer, damages, drawn, flipped

SESSION = drawn("session")
PLACE = ["AGREEMENT", "setup:0", "SEALED", 4]
_ORDER_8 = "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"
_ORDER_4 = "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"


class _Stream:
    def __init__(self, name: str) -> None:
        self._name, self._n = name, 0

    def bytes(self, n: int) -> bytes:
        self._n += 1
        return drawn(f"{self._name} {self._n}", n)


def hello(site: str = "site-1", chain: tuple[bytes, ...] = ()) -> Hello:
    """Return a hello whose site fixes it."""
    parts = (drawn(f"{what} of {site}") for what in ("nonce", "key", "policy", "binding"))
    return Hello(site, *parts, "0.14.0", Span(1, 2), chain)


def _keys() -> Iterator[Case]:
    fields: list[list[dict[str, Any]]] = [
        [],
        [{"s": ""}],
        [{"s": "ab"}, {"s": "c"}],
        [{"s": "a"}, {"s": "bc"}],
        [{"b": "00ff"}, {"i": 0}, {"i": 2**64 - 1}, {"s": "größe"}],
    ]
    for number, one in enumerate(fields):
        yield f"fields {number}", "fields", {"fields": one}
    secret, pair = drawn("secret").hex(), [{"i": 0}, {"i": 2}]
    of = {"secret": secret, "salt": SESSION.hex(), "length": 32}
    for purpose, context in (
        ("pair-secret", pair),
        ("group-secret", [{"i": 3}]),
        ("sealing", [{"s": "pair"}, *pair]),
        ("sealing", [{"s": "group"}, {"i": 1}]),
        ("masks/pair", pair),
        ("masks/readable/pair", pair),
        ("masks/group", []),
        ("residues/pair", pair),
        ("residues/group", []),
        ("sum-tags", []),
        ("pair-macs", []),
        ("confirmation-key", [{"s": "pair"}]),
        ("hmac", [{"s": "result"}]),
    ):
        yield f"key: {purpose} {len(context)}", "key", {**of, "purpose": purpose, "context": context}
    yield "key without salt", "key", {**of, "salt": "", "purpose": "registry: draw", "context": []}
    yield "key of 80 bytes", "key", {**of, "length": 80, "purpose": "hmac", "context": [{"s": "cuts"}]}
    label = [{"i": 12}, {"s": "HISTOGRAM"}, {"s": "update:0"}, {"i": 512}]
    for modulus in (0, 4503599627149313):
        info = [{"s": "veilboost/1/masks/message"}, *label, {"i": modulus}]
        yield f"key of a mask modulo {modulus}", "message key", {"secret": secret, "info": info}
    info = [{"s": "veilboost/1/sum-tags/coefficients"}, *label, {"i": 2}]
    yield "key of tags", "message key", {"secret": secret, "info": info}
    for name in ("a", "b"):
        given = {"private": drawn(f"private {name}").hex(), "peer": EphemeralKey(_Stream(f"peer {name}")).public.hex()}
        yield f"key agreement {name}", "key agreement", given
    for name, peer in {
        "zero": "00" * 32,
        "one": "01" + "00" * 31,
        "order 8": _ORDER_8,
        "its twin": _ORDER_4,
        "short": "09",
        "long": "09" + "00" * 32,
    }.items():
        yield f"key agreement: {name}", "key agreement", {"private": drawn("private a").hex(), "peer": peer}
    for ranks in ([0, 2], [2, 0], [1, 2]):
        given = {"shared": drawn("shared").hex(), "session": SESSION.hex(), "ranks": ranks}
        yield f"pair secret of {ranks}", "pair secret", given
    for n in (1, 3):
        shares = [drawn(f"share {i}").hex() for i in range(n)]
        yield f"group secret of {n}", "group secret", {"shares": shares, "session": SESSION.hex()}


def _transcripts() -> Iterator[Case]:
    for name, role, n in (("unsigned", "unsigned site", 2), ("signed", "site", 3)):
        sites = [
            {
                "site": f"site-{i}",
                "role": role,
                **{what: drawn(f"{what} {i}").hex() for what in ("nonce", "public_key", "policy_hash")},
                "certificate_fingerprint": drawn(f"certificate {i}").hex() if role == "site" else "",
                "protocols": [1, 2 + i],
            }
            for i in range(n)
        ]
        given = {"job": "job-1", "attempt": "00" * 16, "binding": drawn("binding").hex(), "protocol": 2, "sites": sites}
        yield f"transcript, {name}", "transcript", given
        if role == "site":
            yield "transcript, other order", "transcript", {**given, "sites": sites[::-1]}
    given = {"secret": drawn("secret").hex(), "session": SESSION.hex()}
    for purpose, sender, recipient in (("pair", 0, 2), ("pair", 2, 0), ("group", 1, 3)):
        of = {**given, "purpose": purpose, "sender": sender, "recipient": recipient}
        yield f"confirmation, {purpose} {sender} to {recipient}", "confirmation", of
        yield f"confirmation refused, {purpose} {sender}", "confirmation", {**of, "mac": drawn("no mac").hex()}


def _sealed() -> Iterator[Case]:
    secret = drawn("secret")
    for name, sender, recipient in (("pair", 2, 0), ("group", 1, None)):
        box = SealedBox(secret, SESSION, sender, recipient)
        messages = [box.seal(text, b"agreement") for text in (b"", b"content", drawn("long", 200))]
        given = {
            "secret": secret.hex(),
            "session": SESSION.hex(),
            "sender": sender,
            "recipient": recipient,
            "purpose": "agreement",
        }
        yield f"sealed, {name}", "sealed", {**given, "messages": [m.hex() for m in messages]}
        yield f"sealed, {name}: one left out", "sealed", {**given, "messages": [messages[2].hex()]}
        good = messages[1]
        bad = {
            **{what: [data] for what, data in cut_and_longer(good).items()},
            "replayed": [messages[0], messages[0]],
            "out of order": [messages[1], messages[0]],
            "magic": [at(good, 0, b"VLSX")],
            "version": [at(good, 4, b"\2")],
            "counter": [flipped(good, 5)],
            "a bit": [flipped(good, 15)],
            "tag": [flipped(good, -1)],
        }
        for what, these in bad.items():
            yield f"sealed, {name}: {what}", "sealed", {**given, "messages": [m.hex() for m in these]}
        yield f"sealed, {name}: other purpose", "sealed", {**given, "purpose": "x", "messages": [good.hex()]}
        yield f"sealed, {name}: other sender", "sealed", {**given, "sender": 0, "messages": [good.hex()]}
    yield (
        "sealed, pair: back to its author",
        "sealed",
        {
            **given,
            "sender": 0,
            "recipient": 2,
            "messages": [SealedBox(secret, SESSION, 2, 0).seal(b"x", b"agreement").hex()],
        },
    )


def _macs() -> Iterator[Case]:
    pairs = {(0, 1): drawn("pair 01"), (0, 2): drawn("pair 02"), (1, 2): drawn("pair 12")}

    def of(rank: int) -> dict[int, bytes]:
        return {a + b - rank: secret for (a, b), secret in pairs.items() if rank in (a, b)}

    for content in (b"", b"content"):
        message = PairMacs(SESSION, 1, of(1)).append(content, tuple(PLACE))
        given = {"session": SESSION.hex(), "place": PLACE}
        secrets = [{str(peer): secret.hex() for peer, secret in of(rank).items()} for rank in range(3)]
        name = f"MACs behind {len(content)} bytes"
        yield name, "gathered", {**given, "rank": 1, "pair_secrets": secrets[1], "content": content.hex()}
        check = {**given, "sender": 1, "message": message.hex()}
        for rank in (0, 2):
            yield f"{name}, at {rank}", "gathered", {**check, "rank": rank, "pair_secrets": secrets[rank]}
        check |= {"rank": 0, "pair_secrets": secrets[0]}
        yield f"{name}: as another's", "gathered", {**check, "sender": 2}
        yield f"{name}: other counter", "gathered", {**check, "place": [*PLACE[:3], 5]}
        yield f"{name}: other kind", "gathered", {**check, "place": ["CLOSING", *PLACE[1:]]}
        for what, data in {
            "own MAC changed": flipped(message, len(content)),
            "a byte more": b"x" + message,
            "cut short": message[:-1],
            "no MAC": b"",
        }.items():
            yield f"{name}: {what}", "gathered", {**check, "message": data.hex()}
        yield f"{name}: another's MAC changed", "gathered", {**check, "message": flipped(message, -1).hex()}


def _hellos() -> Iterator[Case]:
    yield "hello, unsigned", "hello", {"data": hello().pack().hex()}
    signed = hello("hospital a", (drawn("leaf", 60), drawn("root", 50)))
    yield "hello, with certificates", "hello", {"data": signed.pack().hex()}
    good = unpack_list(hello().pack(), 10)
    exchanges = {
        "other version": (0, b"veilboost-hello-2"),
        "name that is no text": (1, b"\xff"),
        "short nonce": (2, bytes(31)),
        "long key": (3, bytes(33)),
        "short policy hash": (4, bytes(16)),
        "release that is no text": (6, b"\xc3"),
        "protocols of three bytes": (7, bytes([1, 0, 1])),
        "protocol 0": (7, bytes([0, 0, 1, 0])),
        "protocols from 2 to 1": (7, bytes([2, 0, 1, 0])),
        "one certificate announced": (8, b"\1"),
        "count of two bytes": (8, b"\0\0"),
        "nine certificates": (8, b"\x09"),
        "chain that is no list": (9, b"\0"),
    }
    changes = {what: pack_list([*good[:i], new, *good[i + 1 :]]) for what, (i, new) in exchanges.items()}
    yield from damages("hello", "hello", {}, {**cut_and_longer(hello().pack()), **changes})
    start, name, end = pack_list([good[0], b"s" * (1 << 17), *good[2:]]).partition(b"s" * (1 << 17))
    long = [start.hex(), {"repeat": b"s".hex(), "times": len(name)}, end.hex()]
    yield "hello: too long", "hello", {"data": long}
    proof = Proof(drawn("mac 1"), SealedBox(drawn("secret"), SESSION, 0, 1).seal(drawn("share"), b"group")).pack()
    yield "proof", "proof", {"data": proof.hex()}
    three = pack_list([*unpack_list(proof, 2), b""])
    yield from damages("proof", "proof", {}, {**cut_and_longer(proof), "of three parts": three})


def _schema() -> Schema:
    columns = (Column("age", "float"), Column("größe", "float"), Column("sex", "c", ("f", "m")))
    return Schema(columns, "y", ("no", "yes"), "w")


def _terms() -> Iterator[Case]:
    schema = _schema().to_bytes()
    yield "schema", "schema", {"data": schema.hex()}
    yield "schema, least", "schema", {"data": Schema((Column("a", "float"),), "y").to_bytes().hex()}
    changes = {
        "white space": schema + b" ",
        "version 2": schema.replace(b'"version":1', b'"version":2'),
        "version true": schema.replace(b'"version":1', b'"version":true'),
        "a column twice": schema.replace(b'"gr\\u00f6\\u00dfe"', b'"age"'),
        "unknown type": schema.replace(b'"type":"c"', b'"type":"d"'),
        "numbers with categories": schema.replace(b'"type":"c"', b'"type":"float"'),
        "empty classes": schema.replace(b'["no","yes"]', b"[]"),
        "a class twice": schema.replace(b'["no","yes"]', b'["no","no"]'),
        "another field": schema.replace(b'"label":', b'"labels":'),
        "a key twice": schema.replace(b'"label":', b'"label":"x","label":'),
        "other escapes": schema.replace(b"\\u00f6", "ö".encode()),
        "control character": schema.replace(b'"age"', b'"a\\u000ae"'),
        "no columns": json.dumps(
            {"columns": [], "label": "y", "label_classes": None, "version": 1, "weight": None}, separators=(",", ":")
        ).encode(),
    }
    yield from damages("schema", "schema", {}, {"empty": b"", "nested": b"[" * 3000, **changes})
    terms = Terms(
        {"xgboost": "3.2.0", "veilboost": "0.4.0"},
        {"num_rounds": 3},
        {"eta": 0.5},
        _schema(),
        {"cuts": "ab"},
        {"2": "cd"},
        Floors(100, 4, 2),
    )
    data = terms.to_bytes()
    yield "terms", "terms", {"data": data.hex()}
    parts = unpack_list(data, 7)
    floors = json.loads(parts[5])
    exchanges = {
        "no JSON": (0, b"{"),
        "no object": (1, b"[]"),
        "a floor missing": (5, b"{}"),
        "a negative floor": (5, json.dumps({**floors, "sites": -1}).encode()),
        "a floor that is a fraction": (5, json.dumps({**floors, "sites": 1.5}).encode()),
        "a floor that is true": (5, json.dumps({**floors, "sites": True}).encode()),
        "a schema that is none": (6, b"{}"),
    }
    changes = {what: pack_list([*parts[:i], new, *parts[i + 1 :]]) for what, (i, new) in exchanges.items()}
    yield from damages("terms", "terms", {}, {**cut_and_longer(data), **changes})
    vertical = VerticalTerms({"xgboost": "3.2.0"}, {"max_bin": 16}, {}, [10, 3], ["ab", ""], "m1", {"1": "t"})
    document = json.loads(vertical.to_bytes())
    yield "vertical terms", "vertical terms", {"data": vertical.to_bytes().hex()}
    bad: dict[str, Any] = {
        "no object": [],
        "a field missing": {k: v for k, v in document.items() if k != "model"},
        "another field": {**document, "x": 1},
        "rows that are no numbers": {**document, "n_rows": [1, True]},
        "proofs that are no text": {**document, "rows": [1]},
        "proof beyond ASCII": {**document, "rows": ["ä"]},
        "model that is no text": {**document, "model": None},
        "job that is no object": {**document, "job": []},
    }
    yield from damages("vertical terms", "vertical terms", {}, {k: json.dumps(v).encode() for k, v in bad.items()})
    yield from damages("vertical terms", "vertical terms", {}, {"cut short": vertical.to_bytes()[:-1]})


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for salt in ("", drawn("salt", 16).hex()):
        for payload in (b"", b"payload", struct.pack("<4Q", 1, 2, 3, 4)):
            given = {"payload": payload.hex(), "salt": salt}
            yield f"commitment of {len(payload)} bytes, salt of {len(salt) // 2}", "commitment", given
    for part in (_keys, _transcripts, _sealed, _macs, _hellos, _terms):
        yield from part()
