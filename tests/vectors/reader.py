"""A second reader of what PROTOCOL.md and FILES.md in `nvflare_plugins/wire` describe, written from their text alone.

Nothing of the product is imported, here or in the modules beside it: only the standard library, numpy and
`cryptography`. `python -m tests.vectors.reader` checks every vector.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tests.vectors.form import Given, Vector, blob, files, formats, read

PROTOCOL = Path(__file__).parents[2] / "nvflare_plugins" / "wire" / "PROTOCOL.md"
P = 2**61 - 1


class Refused(Exception):
    """What was given is refused: "malformed", "forged" or "damaged"."""

    def __init__(self, word: str = "malformed") -> None:
        super().__init__(word)


def require(condition: object, word: str = "malformed") -> None:
    if not condition:
        raise Refused(word)


class Cursor:
    """Bytes that are read from front to back."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, n: int) -> bytes:
        require(0 <= n <= len(self.data) - self.place)
        self.place += n
        return self.data[self.place - n : self.place]

    def number(self, code: str, low: float = -(2.0**70), high: float = 2.0**70) -> Any:
        value = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        require(low <= value <= high)
        return value

    def end(self) -> None:
        require(self.place == len(self.data))

    def head(self, magic: bytes, version: int = 1, code: str = "B") -> None:
        require(self.take(4) == magic)
        require(self.number(code) == version)


# -- 2. Frames --------------------------------------------------------------------------------------------------------

TYPES = {1: "CONTRIBUTION", 2: "RESULT", 3: "ABORT", 4: "RESCALE"}
OPERATIONS = {1: "GATHER", 2: "BROADCAST", 3: "SUM", 4: "ROUTE"}
CODECS = dict(
    enumerate(("PUBLIC", "PLAIN", "MASKED", "BFV", "CKKS", "SEALED", "PLUGIN", "MASKED_32", "PLAIN_32", "PLUGIN_BYTES"))
)
PHASES = {1: "setup", 2: "update", 3: "evaluate", 4: "finish"}
_ROW = re.compile(r"(?m)^\| (\d+) \| `([A-Z_]+)` \| (yes|no) \|")
_SECTION = PROTOCOL.read_text(encoding="utf-8").partition("\n## 3. Kinds\n")[2].partition("\n## ")[0]
KINDS = {int(code): (name, private == "yes") for code, name, private in _ROW.findall(_SECTION)}


def commitment(payload: bytes, salt: bytes) -> str:
    return hashlib.sha256(b"veilboost evidence payload v1\0" + bytes([len(salt)]) + salt + payload).hexdigest()


def frame(given: Given) -> Any:
    c = Cursor(blob(given["data"]))
    c.head(b"VLBF", 3)
    codes = [c.number("B"), c.number("B"), c.number("B"), c.number("H"), c.number("B")]
    for code, known in zip(codes, (TYPES, OPERATIONS, CODECS, KINDS, PHASES), strict=True):
        require(code in known)
    type_, operation, codec = TYPES[codes[0]], OPERATIONS[codes[1]], CODECS[codes[2]]
    round_, counter, attempt, rank = c.number("I"), c.number("Q"), c.take(16), c.number("H")
    values, n_payload = c.number("Q", 0, 2**32), c.number("Q")
    n_attachment, tail, salt = c.number("I", 0, 2**20), c.number("I"), c.take(16)
    require(type_ == "RESCALE" or tail <= n_payload)
    require((salt == bytes(16)) == (codec in ("PUBLIC", "SEALED")))
    payload, attachment = c.take(n_payload), c.take(n_attachment)
    c.end()
    salt = salt if any(salt) else b""
    name, private = KINDS[codes[3]]
    return {
        "type": type_,
        "operation": operation,
        "codec": codec,
        "kind": name,
        "private": private,
        "phase": f"{PHASES[codes[4]]}:{round_}",
        "counter": counter,
        "attempt": attempt.hex(),
        "rank": rank,
        "values": values,
        "payload": payload.hex(),
        "attachment": attachment.hex(),
        "tail": tail,
        "salt": salt.hex(),
        "commitment": commitment(payload, salt),
    }


def parts_of(data: bytes, n: int) -> list[bytes]:
    c = Cursor(data)
    require(c.number("I") == n)
    lengths = [c.number("Q") for _ in range(n)]
    parts = [c.take(length) for length in lengths]
    c.end()
    return parts


def list_(given: Given) -> Any:
    return {"parts": [part.hex() for part in parts_of(blob(given["data"]), given["parts"])]}


def label(given: Given) -> Any:
    fields = given["label"]
    require(isinstance(fields, list) and len(fields) == 4 and isinstance(fields[0], str))
    require(all(type(field) is int for field in fields[1:]))
    attempt, number, size, offset = fields
    require(number >= 1 and 0 <= offset <= size <= 2**31)
    return {"attempt": attempt, "number": number, "size": size, "offset": offset}


# -- 4. A session -----------------------------------------------------------------------------------------------------


def fields(*values: bytes | str | int) -> bytes:
    out = b""
    for value in values:
        letter, data = (
            (b"i", struct.pack("<Q", value))
            if isinstance(value, int)
            else (b"s", value.encode())
            if isinstance(value, str)
            else (b"b", value)
        )
        out += letter + struct.pack("<Q", len(data)) + data
    return out


def typed(document: list[dict[str, Any]]) -> list[bytes | str | int]:
    return [blob(one["b"]) if "b" in one else one["s"] if "s" in one else one["i"] for one in document]


def derive(secret: bytes, salt: bytes, purpose: str, *context: bytes | str | int, length: int = 32) -> bytes:
    info = fields(f"veilboost/1/{purpose}", *context)
    return HKDF(hashes.SHA256(), length, salt or bytes(32), info).derive(secret)


def mac(key: bytes, *values: bytes | str | int) -> bytes:
    return hmac.digest(key, fields(*values), "sha256")


def message_key(secret: bytes, info: bytes) -> bytes:
    return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\1", "sha256")


def key(given: Given) -> Any:
    context = typed(given["context"])
    found = derive(blob(given["secret"]), blob(given["salt"]), given["purpose"], *context, length=given["length"])
    return {"key": found.hex()}


def key_agreement(given: Given) -> Any:
    own = X25519PrivateKey.from_private_bytes(blob(given["private"]))
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(blob(given["peer"])))
    except ValueError:
        raise Refused from None
    require(any(shared))
    return {"public": own.public_key().public_bytes_raw().hex(), "shared": shared.hex()}


def pair_secret(given: Given) -> Any:
    return {"key": derive(blob(given["shared"]), blob(given["session"]), "pair-secret", *sorted(given["ranks"])).hex()}


def group_secret(given: Given) -> Any:
    shares = [blob(share) for share in given["shares"]]
    return {"key": derive(fields(*shares), blob(given["session"]), "group-secret", len(shares)).hex()}


def transcript(given: Given) -> Any:
    sites = given["sites"]
    values: list[Any] = ["veilboost/1/transcript", given["job"], given["attempt"], blob(given["binding"])]
    values += [given["protocol"], len(sites)]
    for rank, s in enumerate(sites):
        names = ("nonce", "public_key", "certificate_fingerprint", "policy_hash")
        values += [rank, s["site"], s["role"], *(blob(s[name]) for name in names), *s["protocols"]]
    session = hashlib.sha256(fields(*values)).digest()
    statements = [fields("veilboost/1/handshake", session, rank).hex() for rank in range(len(sites))]
    return {"session": session.hex(), "statements": statements}


def confirmation(given: Given) -> Any:
    key = derive(blob(given["secret"]), blob(given["session"]), "confirmation-key", given["purpose"])
    due = mac(key, "veilboost/1/confirmation", given["purpose"], given["sender"], given["recipient"])
    if "mac" not in given:
        return {"mac": due.hex()}
    require(blob(given["mac"]) == due, "forged")
    return {"accepted": True}


def hello(given: Given) -> Any:
    data = blob(given["data"])
    require(len(data) <= 2**17)
    parts = parts_of(data, 10)
    require(parts[0] == b"veilboost-hello-3" and all(len(parts[i]) == 32 for i in (2, 3, 4)))
    require(len(parts[7]) == 4 and len(parts[8]) == 1 and parts[8][0] <= 8)
    protocols = struct.unpack("<HH", parts[7])
    require(1 <= protocols[0] <= protocols[1])
    names = ("nonce", "public_key", "policy_hash", "binding")
    return {
        "site": text(parts[1]),
        "release": text(parts[6]),
        **{name: part.hex() for name, part in zip(names, parts[2:6], strict=True)},
        "protocols": list(protocols),
        "chain": [part.hex() for part in parts_of(parts[9], parts[8][0])],
    }


def text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refused from None


def proof(given: Given) -> Any:
    mac_, share = parts_of(blob(given["data"]), 2)
    return {"confirmation": mac_.hex(), "share": share.hex()}


def parsed(data: bytes, kind: type = dict) -> Any:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused from None
    require(isinstance(document, kind))
    return document


def is_name(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 256 and value.isprintable()


def are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_name, value)) and len(set(value)) == len(value)


def schema_of(data: bytes) -> Any:
    require(len(data) <= 2**24 and data.isascii())
    d = parsed(data)
    require(set(d) == {"version", "columns", "label", "label_classes", "weight"})
    require(type(d["version"]) is int and d["version"] == 1 and isinstance(d["columns"], list) and d["columns"])
    for column in d["columns"]:
        require(isinstance(column, dict) and set(column) == {"name", "type", "categories"} and is_name(column["name"]))
        is_numeric = column["type"] == "float" and column["categories"] == []
        require(is_numeric or (column["type"] == "c" and are_names(column["categories"])))
    require(are_names([column["name"] for column in d["columns"]]) and is_name(d["label"]))
    require(d["label_classes"] is None or are_names(d["label_classes"]))
    require(d["weight"] is None or is_name(d["weight"]))
    require(json.dumps(d, sort_keys=True, separators=(",", ":")).encode() == data)
    columns = [[column["name"], column["type"], column["categories"]] for column in d["columns"]]
    return {"columns": columns, "label": d["label"], "label_classes": d["label_classes"], "weight": d["weight"]}


def terms(given: Given) -> Any:
    data = blob(given["data"])
    require(len(data) <= 2**24)
    *parts, schema = parts_of(data, 7)
    names = ("versions", "job", "parameters", "start", "checkpoints", "floors")
    found = {name: parsed(part) for name, part in zip(names, parts, strict=True)}
    floors = found["floors"]
    require(set(floors) == {"effective_rows", "rows_per_node", "sites"})
    require(all(type(floor) is int and 0 <= floor <= 2**53 for floor in floors.values()))
    return {**found, "schema": schema_of(schema)}


def vertical_terms(given: Given) -> Any:
    d = parsed(blob(given["data"]))
    require(set(d) == {"versions", "job", "parameters", "checkpoints", "n_rows", "rows", "model"})
    require(all(isinstance(d[name], dict) for name in ("versions", "job", "parameters", "checkpoints")))
    require(isinstance(d["n_rows"], list) and all(type(n) is int for n in d["n_rows"]) and isinstance(d["model"], str))
    require(isinstance(d["rows"], list) and all(isinstance(one, str) and one.isascii() for one in d["rows"]))
    return d


# -- 5. Sealed messages -----------------------------------------------------------------------------------------------


def sealed(given: Given) -> Any:
    sender, recipient = given["sender"], given["recipient"]
    direction = ("group", sender) if recipient is None else ("pair", sender, recipient)
    key = derive(blob(given["secret"]), blob(given["session"]), "sealing", *direction)
    plain, due = [], 0
    for message in given["messages"]:
        c = Cursor(blob(message))
        c.head(b"VLSB")
        counter = c.number("Q", due)
        require(len(c.data) >= 13 + 16)
        associated = fields(c.data[:13], given["purpose"].encode())
        try:
            plain.append(AESGCM(key).decrypt(counter.to_bytes(12, "little"), c.data[13:], associated).hex())
        except InvalidTag:
            raise Refused("forged") from None
        due = counter + 1
    return {"plain": plain}


FORMATS: dict[str, Callable[[Given], Any]] = {
    **formats(globals()),
    "commitment": lambda given: {"sha256": commitment(blob(given["payload"]), blob(given["salt"]))},
    "fields": lambda given: {"data": fields(*typed(given["fields"])).hex()},
    "message key": lambda given: {"key": message_key(blob(given["secret"]), fields(*typed(given["info"]))).hex()},
    "schema": lambda given: schema_of(blob(given["data"])),
}


def judge(vector: Vector) -> Vector:
    """Return what this reader gets from a vector, or how it refuses it."""
    from tests.vectors import reader_files, reader_parties, reader_serving, reader_sums  # they read with what is above

    known = {**FORMATS, **reader_sums.FORMATS, **reader_parties.FORMATS, **reader_files.FORMATS}
    known |= reader_serving.FORMATS
    try:
        return {"gives": known[vector["format"]](vector["given"])}
    except reader_parties.Refused as refused:  # the module's own name, where this one runs as a program
        return {"refuses": str(refused)}


def main() -> int:
    """Check all vectors; say which ones differ."""
    n_wrong = n = 0
    for path in files():
        for vector in read(path):
            n += 1
            found = judge(vector)
            if found != {key: vector[key] for key in ("gives", "refuses") if key in vector}:
                n_wrong += 1
                print(f"{path.name}: {vector['name']}: {str(found)[:200]}", file=sys.stderr)  # noqa: T201
    print(json.dumps({"vectors": n, "differ": n_wrong}))  # noqa: T201
    return 1 if n_wrong else 0


if __name__ == "__main__":
    from tests.vectors import reader  # by the name that the modules beside this one know

    sys.exit(reader.main())
