"""The reader's part for ciphertexts and for messages between single parties; see `reader.py`."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.vectors import reader_curve
from tests.vectors.form import Given, blob, formats
from tests.vectors.reader import Cursor, Refused, fields, require, text

# -- ciphertexts of rings ---------------------------------------------------------------------------------------------

RINGS = {
    "bfv": (1, 4096, 4096, (1152921504606830593,), 1489),
    "ckks": (2, 8192, 8192, (1152921504606748673, 1125899906826241), 1024),
}


def _ring_head(given: Given, magic: bytes, data: bytes) -> tuple[Cursor, int]:
    c, (code, *_, most) = Cursor(data), RINGS[given["scheme"]]
    c.head(magic)
    require(c.number("B") == code)
    return c, c.number("I", 1, most)


def ring_parameters(given: Given, magic: bytes = b"VLHP") -> Any:
    c, summands = _ring_head(given, magic, blob(given["data"]))
    key_id = c.take(16)
    if magic == b"VLHP":
        c.end()
        return {"key_id": key_id.hex(), "summands": summands}
    return {"key_id": key_id.hex(), "summands": summands, "body": len(c.data) - c.place}


def _ring(given: Given, data: bytes) -> tuple[int, int, list[np.ndarray]]:
    _, degree, per, primes, _ = RINGS[given["scheme"]]
    known = ring_parameters({**given, "data": given["parameters"]})
    c, summands = _ring_head(given, b"VLHC", data)
    require(summands <= known["summands"] and c.take(16).hex() == known["key_id"])
    values = c.number("Q", 1, 2**32)
    n, found = -(-values // per), []
    for prime in primes:
        residues, shift, width = np.zeros(n * 2 * degree, np.uint64), 0, -(-prime.bit_length() // 8)
        while width:
            size = next(size for size in (4, 2, 1) if size <= width)
            plane = np.frombuffer(c.take(size * residues.size), dtype=f"<u{size}")
            residues |= plane.astype(np.uint64) << np.uint64(shift)
            shift, width = shift + 8 * size, width - size
        require(int(residues.max()) < prime)
        found.append(residues.reshape(n, 2, degree))
    c.end()
    return values, summands, found


def _summary(values: int, summands: int, residues: list[np.ndarray]) -> Any:
    first = [one[0, :, :3].tolist() for one in residues]
    return {"values": values, "summands": summands, "ciphertexts": len(residues[0]), "residues": first}


def ring_sum(given: Given) -> Any:
    known = ring_parameters({**given, "data": given["parameters"]})
    messages = [_ring(given, blob(message)) for message in given["messages"]]
    require(0 < len(messages) <= known["summands"])
    require(all(one[1] == 1 and one[0] == messages[0][0] for one in messages))
    primes = RINGS[given["scheme"]][3]
    total = [
        sum(one[2][k].astype(object) for one in messages) % prime  # type: ignore[union-attr]
        for k, prime in enumerate(primes)
    ]
    return _summary(messages[0][0], len(messages), total)


# -- additive schemes -------------------------------------------------------------------------------------------------


def _is_prime(n: int) -> bool:
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, odd, n)
        if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True


def _root(n: int, k: int) -> int:
    low, high = 1, 1 << (n.bit_length() // k + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**k <= n else (low, middle - 1)
    return low


def _additive_key(data: bytes, toy: bool) -> int:
    c = Cursor(data)
    c.head(b"VBPK")
    c.number("B", 1, 1)
    raw = c.take(c.number("H", 1))
    c.end()
    require(raw[-1] != 0)
    n = int.from_bytes(raw, "little")
    bits = n.bit_length()
    require((256 if toy else 2048) <= bits <= 16384 and bits % 64 == 0)
    require(all(n % small for small in range(2, 4096)) and not _is_prime(n))
    require(all(_root(n, k) ** k != n for k in range(2, bits // 11)))
    return n


def _fingerprint(n: int) -> bytes:
    raw = n.to_bytes(-(-n.bit_length() // 8), "big")
    return hashlib.sha256(b"veilboost public key PAILLIER" + len(raw).to_bytes(4, "big") + raw).digest()


def public_key(given: Given) -> Any:
    n = _additive_key(blob(given["data"]), given["toy"])
    return {"scheme": "PAILLIER", "bits": n.bit_length(), "fingerprint": _fingerprint(n).hex()}


def ciphertexts(given: Given) -> Any:
    n, f, most = _additive_key(blob(given["key"]), True), given["fraction_bits"], given["max_additions"]
    modulus, bits = n * n, n.bit_length() - 2
    h_bits = (most * 2**f // 4).bit_length()
    pair_bits = h_bits + (2 * most * 2**f).bit_length()
    content = {"PAIRS": 1, "PACKED_BINS": 2}[given["content"]]
    pairs, width = 1 if content == 1 else (bits - 64) // pair_bits, -(-modulus.bit_length() // 8)
    c = Cursor(blob(given["data"]))
    c.head(b"VBHE", code="H")
    due = (1, content, n.bit_length(), width, f, pair_bits, h_bits, pairs, most, given["count"])
    require(tuple(c.number(code) for code in "BBIIiHHIQQ") == due)
    require(c.take(32) == _fingerprint(n))
    rows = [c.take(width) for _ in range(given["count"])]
    c.end()
    for row in rows:
        number = int.from_bytes(row, "little")
        require(0 < number < modulus and math.gcd(number, n) == 1)
    return {"ciphertexts": [row.hex() for row in rows]}


# -- points ------------------------------------------------------------------------------------------------------------


def blinded(given: Given) -> Any:
    secret = int(given["secret"])
    if "items" in given:
        tag = b"VeilBoost alignment, ristretto255_XMD:SHA-512_R255MAP_RO_, " + blob(given["domain"])
        points = [reader_curve.hashed(blob(item), tag) for item in given["items"]]
    else:
        points = [reader_curve.decoded(blob(point)) for point in given["points"]]
        require(all(any(blob(point)) for point in given["points"]))
        secret = secret if given["do"] == "blind" else pow(secret, -1, reader_curve.ORDER)
    return {"points": [reader_curve.encoded(reader_curve.times(secret, point)).hex() for point in points]}


def elgamal_key(given: Given) -> Any:
    data = blob(given["data"])
    c = Cursor(data)
    c.head(b"VBPK")
    require(c.number("B") == 3)
    n = c.number("B")
    require(n in (2, 4))
    points = [c.take(64) for _ in range(n)]
    c.end()
    for raw in points:
        point = reader_curve.affine(raw)
        require(
            not reader_curve.is_neutral(point)
            and reader_curve.is_neutral(reader_curve.times(reader_curve.ORDER, point))
        )
    fingerprint = hashlib.sha256(b"veilboost public key " + data).hexdigest()
    return {"points": [point.hex() for point in points], "fingerprint": fingerprint}


def points(given: Given) -> Any:
    key = elgamal_key({"data": given["key"]})
    n = len(key["points"])
    c = Cursor(blob(given["data"]))
    c.head(b"VBEG", code="H")
    content = {"PAIRS": 1, "BINS": 2}[given["content"]]
    size, bits = given["point_bytes"], given["fraction_bits"]
    require(bits in {2: (14, 20), 4: (40,)}[n])
    due = (3, content, 1 + n, bits, {64: 0, 32: 32}[size], 0, given["max_additions"], given["count"])
    require(tuple(c.number(code) for code in "BBBBBBQQ") == due)
    require(c.take(32).hex() == key["fingerprint"])
    columns = [[c.take(size) for _ in range(given["count"])] for _ in range(1 + n)]
    c.end()
    read = {64: reader_curve.affine, 32: reader_curve.compressed}[size]
    found = [[read(point) for point in column] for column in columns]
    return {
        "columns": [
            [f"{x.to_bytes(32, 'little').hex()}{y.to_bytes(32, 'little').hex()}" for x, y, *_ in one] for one in found
        ]
    }


def block(given: Given) -> Any:
    c, size = Cursor(blob(given["data"])), given["size"]
    n = c.number("I", 0, size)
    found = [c.take(32).hex() for _ in range(n)]
    require(not any(c.take(32 * (size - n))))
    c.end()
    return {"points": found}


def _sum(scalars: list[int], points: list[bytes]) -> reader_curve.Point:
    total = reader_curve.NEUTRAL
    for scalar, point in zip(scalars, points, strict=True):
        total = reader_curve.plus(total, reader_curve.times(scalar, reader_curve.decoded(point)))
    return total


def chain(given: Given) -> Any:
    domain, committed = blob(given["domain"]), [blob(one) for one in given["commitments"]]
    data, before = blob(given["data"]), [blob(point) for point in given["common"]]
    length = 4 + 32 * given["size"] + 64
    require(len(data) == length * given["links"])
    for place in range(given["links"]):
        link = data[place * length : (place + 1) * length]
        after = [blob(p) for p in block({"data": link[:-64].hex(), "size": given["size"]})["points"]]
        require(len(after) == len(before) and all(any(point) for point in after))
        rank = (given["first"] + place) % len(committed)
        about = (domain, b"".join(committed), rank, given["first"], given["number"], b"".join(before), b"".join(after))
        transcript = hashlib.sha512(fields("veilboost/1", "alignment, key taken off", *about)).digest()
        seed = fields("veilboost/1", "equal logarithms, weights", transcript)
        stream = hashlib.shake_256(seed).digest(16 * len(after))
        weights = [int.from_bytes(stream[i : i + 16], "little") for i in range(0, len(stream), 16)]
        p, q = reader_curve.encoded(_sum(weights, before)), reader_curve.encoded(_sum(weights, after))
        c, s = (int.from_bytes(link[start : start + 32], "little") for start in (length - 64, length - 32))
        require(max(c, s) < reader_curve.ORDER)
        a = reader_curve.plus(
            reader_curve.times(s, reader_curve.BASE), reader_curve.times(c, reader_curve.decoded(committed[rank]))
        )
        b = reader_curve.plus(
            reader_curve.times(s, reader_curve.decoded(q)), reader_curve.times(c, reader_curve.decoded(p))
        )
        told = (transcript, committed[rank], q, p, reader_curve.encoded(a) + reader_curve.encoded(b))
        due = hashlib.sha512(fields("veilboost/1", "equal logarithms, challenge", *told)).digest()
        require(c == int.from_bytes(due, "little") % reader_curve.ORDER)
        before = after
    return {"points": [point.hex() for point in before]}


# -- 6. Conversations, vertical messages; 7. Other kinds of job -------------------------------------------------------

FLAGS = {1: "MORE", 2: "COLLECT", 3: "END", 4: "ANSWERS"}
NODES, ROWS = 2**24, 2**31 - 1


def step(given: Given) -> Any:
    c = Cursor(blob(given["data"]))
    c.head(b"VLBC")
    flag, number, turn = c.number("B", 1, 4), c.number("Q"), c.number("I")
    fragments = []
    for _ in range(c.number("I", 0, 2**16)):
        message, is_last = c.number("Q"), c.number("B", 0, 1)
        fragments.append([message, bool(is_last), c.take(c.number("Q")).hex()])
    c.end()
    return {"flag": FLAGS[flag], "number": number, "turn": turn, "fragments": fragments}


Read = Callable[[Cursor], Any]


def _bits(c: Cursor) -> str:
    n = c.number("I", 0, ROWS)
    data = int.from_bytes(c.take(-(-n // 8)), "little")
    require(data < 1 << n)
    return "".join("01"[data >> i & 1] for i in range(n))


def _number(code: str, low: float = 0, high: float = 2.0**70) -> Read:
    return lambda c: c.number(code, low, high)


def _blob(most: int = 2**40) -> Read:
    return lambda c: c.take(c.number("Q", 0, most)).hex()


def _text(c: Cursor) -> str:
    return text(bytes.fromhex(_blob(2**10)(c)))


def _many(read: Read, most: int = NODES) -> Read:
    return lambda c: [read(c) for _ in range(c.number("I", 0, most))]


def _record(**parts: Read) -> Read:
    return lambda c: {name: read(c) for name, read in parts.items()}


_NODE, _BINS, _FEATURES = _number("I", 0, NODES), 2**16 - 1, 2**20
_DIVISION = {"node": _NODE, "left": _NODE, "right": _NODE}
_SPLIT = _record(
    node=_NODE,
    feature=_number("I", 0, _FEATURES),
    bin=_number("i", -1, 2**16),
    default_left=lambda c: bool(c.number("B", 0, 1)),
    right_bins=_many(_number("H"), _BINS),
)
MESSAGES: dict[int, tuple[str, dict[str, Read]]] = {
    1: (
        "PartySchema",
        {"set_rows": _many(_number("I", 0, ROWS), 2**10), "n_bins": _many(_number("I", 1, _BINS), _FEATURES)}
        | {"aliases": _many(_text, _FEATURES), "categories": _many(_many(_text, _BINS), _FEATURES)},
    ),
    2: (
        "TrainingSetup",
        {"scheme": _number("B"), "fraction_bits": _number("H", 0, 62), "max_additions": _number("I", 1, ROWS)}
        | {"public_key": _blob(2**20)},
    ),
    3: ("TreeGradients", {"tree": _NODE, "features": _bits, "gradients": _blob()}),
    4: (
        "HistogramRequest",
        {"tree": _NODE, "partitions": _many(_record(**_DIVISION, goes_left=_bits)), "own": _many(_record(**_DIVISION))},
    ),
    5: ("HistogramAnswer", {"tree": _NODE, "nodes": _many(_NODE), "sums": _blob(), "withheld": _many(_NODE)}),
    6: ("SplitRequest", {"tree": _NODE, "splits": _many(_SPLIT)}),
    7: ("SplitAnswer", {"tree": _NODE, "goes_left": _many(_bits)}),
    8: ("DecisionRequest", {"data_set": _NODE, "queries": _many(_record(tree=_NODE, node=_NODE, rows=_bits))}),
    9: ("DecisionAnswer", {"goes_left": _many(_bits)}),
    10: ("MoreGradients", {"tree": _NODE, "gradients": _blob()}),
    11: ("MoreSums", {"tree": _NODE}),
    12: ("Transfers", {"offer": _blob(2**10), "choices": _blob(2**16)}),
    13: ("TransfersAnswer", {"offer": _blob(2**10), "choices": _blob(2**16)}),
    14: ("SealedRequest", {"tree": _NODE, "step": _number("B", 0, 2), "nodes": _many(_NODE), "data": _blob()}),
    15: ("SealedAnswer", {"tree": _NODE, "data": _blob()}),
}


def vertical_message(given: Given) -> Any:
    c = Cursor(blob(given["data"]))
    c.head(b"VLBV", 2)
    name, parts = MESSAGES[c.number("B", 1, 15)]
    found = {"message": name, **_record(**parts)(c)}
    c.end()
    if name == "PartySchema":
        sets, bins, aliases, lists = (found[part] for part in parts)
        require(sets and bins and len(bins) == len(aliases) == len(set(aliases)))
        require(len(lists) == len(bins) and all(len(set(words)) == len(words) for words in lists))
        require(all(not words or len(words) >= n for words, n in zip(lists, bins, strict=True)))
    return found


def buckets(given: Given) -> Any:
    c, rows, features = Cursor(blob(given["data"])), given["rows"], given["features"]
    c.head(b"VLBB")
    require((c.number("Q"), c.number("H")) == (rows, features))
    sizes = [c.number("B", 1) for _ in range(features)]
    ids = [[c.number("B", 0, size - 1) for _ in range(rows)] for size in sizes]
    c.end()
    return {"buckets": sizes, "ids": ids}


def positions(given: Given) -> Any:
    c = Cursor(blob(given["data"]))
    c.head(b"VLBP", 2)
    used, n_splits, rows, n_groups = (c.number("I") for _ in range(4))
    require(rows == given["rows"] and len(c.data) == 21 + 4 * (used + 4 * n_splits + rows * used + 2 * n_groups))
    features = [c.number("I") for _ in range(used)]
    splits = [
        [c.number("I"), c.number("I"), c.number("I", 0, used - 1), c.number("I", 0, 2**24 - 1)] for _ in range(n_splits)
    ]
    found = [[c.number("I") for _ in range(used)] for _ in range(rows)]
    require(features == sorted(set(features)))
    require(all(place < 2**24 or place == 2**32 - 1 for row in found for place in row))
    groups = [[c.number("I"), c.number("I", 0, 2**16 - 1)] for _ in range(n_groups)]
    require({place for place, _ in groups} == {i for i, split in enumerate(splits) if split[3] == 0})
    return {"features": features, "splits": splits, "positions": found, "groups": groups}


def tree(given: Given) -> Any:
    depth, c = given["depth"], Cursor(blob(given["data"]))
    most = 2 ** (depth + 1) - 1
    require(len(c.data) == 4 + 17 * most)
    n = c.number("I", 1, most)
    nodes = [list(struct.unpack("<iiIfB", c.take(17))) for _ in range(n)]
    require(not any(c.take(17 * (most - n))))
    level = [0] + [-1] * (n - 1)
    for number, (left, right, feature, value, default) in enumerate(nodes):
        require(level[number] >= 0 and default <= 1)
        if left == right == -1:
            require(feature == default == 0 and abs(value) <= np.float32(1e30))
            continue
        require(feature < given["features"] and math.isfinite(value) and level[number] < depth)
        for child in (left, right):
            require(number < child < n and level[child] == -1)
            level[child] = level[number] + 1
    return {"nodes": nodes}


def call(given: Given) -> Any:
    """XGBoost's own request: a protocol buffer of at most five fields."""
    names = ["sequence_number", "rank", "send_buffer"]
    names += {"Allreduce": ["data_type", "reduce_operation"], "Broadcast": ["root"]}.get(given["call"], [])
    found: dict[str, Any] = {name: "" if name == "send_buffer" else 0 for name in names}
    c = Cursor(blob(given["data"]))

    def varint() -> int:
        value = shift = 0
        while (byte := c.number("B")) >= 128:
            value, shift = value | (byte & 127) << shift, shift + 7
        return value | byte << shift

    while c.place < len(c.data):
        tag = varint()
        found[names[(tag >> 3) - 1]] = c.take(varint()).hex() if tag & 7 == 2 else varint()
    return found


FORMATS: dict[str, Callable[[Given], Any]] = {
    **formats(globals()),
    "ring parameters": ring_parameters,
    "ring secret": lambda given: ring_parameters(given, b"VLHS"),
    "ring message": lambda given: _summary(*_ring(given, blob(given["data"]))),
}
__all__ = ["FORMATS", "Refused"]
