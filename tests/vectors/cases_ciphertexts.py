"""Vectors of ciphertexts and public keys. The keys are short and protect nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from he_processors.bignum.interface import byte_width
from he_processors.ciphertext_wire import public_key_to_bytes
from he_processors.curve.interface import FIELD_PRIME, base_point
from he_processors.curve.registry import open_curve
from he_processors.elgamal.bin_sums import write_column
from he_processors.elgamal.encryption import generate_elgamal_key
from he_processors.ring_ciphertexts import KeyFacts, RingScheme
from tests.support.he_toys import SeededRandomness, toy_paillier
from tests.vectors import product_parties
from tests.vectors.drawn import Case, at, cut_and_longer, damages, drawn, flipped, word
from tests.vectors.form import Given
from tests.vectors.product import RING

_RING_HEADER = struct.Struct("<4sBBI16sQ")


def _body(scheme: RingScheme, n_ciphertexts: int, planes: list[str]) -> list[dict[str, Any]]:
    """Return the residues of a message as planes that repeat four, two or one bytes."""
    times = n_ciphertexts * 2 * scheme.poly_degree
    return [{"repeat": plane, "times": times} for plane in planes]


_PLANES = {
    "bfv": ["11223344", "5566770e"],  # four bytes and four bytes of each residue
    "ckks": ["11223344", "5566770e", "99aabbcc", "0201", "03"],  # 4 + 4, then 4 + 2 + 1
}


def _ring(name: str) -> Iterator[Case]:
    scheme = RING[name]
    key_id = drawn(f"key of {name}", 16)
    parameters = KeyFacts(key_id, 3).pack(scheme)
    of: Given = {"scheme": name}
    yield f"{name} parameters", "ring parameters", {**of, "data": parameters.hex()}
    most = KeyFacts(key_id, scheme.max_summands).pack(scheme)
    yield f"{name} parameters, most", "ring parameters", {**of, "data": most.hex()}
    changes = {
        **cut_and_longer(parameters),
        "magic": at(parameters, 0, b"VLHX"),
        "version": at(parameters, 4, b"\2"),
        "scheme": at(parameters, 5, b"\3"),
        "no summand": at(parameters, 6, bytes(4)),
        "too many summands": at(parameters, 6, struct.pack("<I", scheme.max_summands + 1)),
    }
    yield from damages(f"{name} parameters", "ring parameters", of, changes)
    secret = b"VLHS" + parameters[4:] + bytes(40)
    yield f"{name} secret", "ring secret", {**of, "data": secret.hex()}
    changes = {"magic": at(secret, 0, b"VLHC"), "scheme": at(secret, 5, b"\0"), "short": secret[:25]}
    yield from damages(f"{name} secret", "ring secret", of, changes)

    of["parameters"] = parameters.hex()

    def message(n_values: int, summands: int = 1, planes: list[str] | None = None, **more: Any) -> list[Any]:
        header = _RING_HEADER.pack(
            more.get("magic", b"VLHC"), more.get("version", 1), scheme.code, summands, more.get("id", key_id), n_values
        )
        return [header.hex(), *_body(scheme, more.get("ciphertexts", 1), planes or _PLANES[name])]

    per = scheme.values_per_ciphertext
    for n_values, n_ciphertexts in ((1, 1), (per, 1), (per + 1, 2)):
        data = message(n_values, ciphertexts=n_ciphertexts)
        yield f"{name} message of {n_values}", "ring message", {**of, "data": data}
    yield f"{name} message of three sites", "ring message", {**of, "data": message(9, 3)}
    big = ["ffffffff", "ffffff0f", *_PLANES[name][2:]]
    bad: dict[str, list[Any]] = {
        "header alone": message(9)[:1],
        "cut header": ["00" * 33],
        "magic": message(9, magic=b"VLHP"),
        "version": message(9, version=2),
        "another key": message(9, id=bytes(16)),
        "no summand": message(9, 0),
        "four summands": message(9, 4),
        "no value": message(0),
        "too many values": message((1 << 32) + 1),
        "a value too many for its length": message(per + 1),
        "a byte too long": [*message(9), "00"],
        "a residue that is not below its prime": message(9, planes=big),
    }
    for what, data in bad.items():
        yield f"{name} message: {what}", "ring message", {**of, "data": data}
    three = [message(9), message(9), message(9)]
    yield f"{name} sum of three", "ring sum", {**of, "messages": three}
    yield f"{name} sum: one too many", "ring sum", {**of, "messages": [*three, message(9)]}
    yield f"{name} sum: other lengths", "ring sum", {**of, "messages": [message(9), message(8)]}
    yield f"{name} sum: a sum among them", "ring sum", {**of, "messages": [message(9), message(9, 2)]}
    yield f"{name} sum: nothing", "ring sum", {**of, "messages": []}


def _additive() -> Iterator[Case]:
    key = toy_paillier().public_key
    name = key.scheme.name.lower()
    data = public_key_to_bytes(key)
    yield f"{name} key", "public key", {"data": data.hex(), "toy": True}
    yield f"{name} key: too short to protect", "public key", {"data": data.hex(), "toy": False}
    length = struct.unpack_from("<H", data, 6)[0]
    even = bytes([data[8] & 0xFE])
    changes = {
        **cut_and_longer(data),
        "magic": at(data, 0, b"VBPX"),
        "version": at(data, 4, b"\2"),
        "another scheme": at(data, 5, b"\4"),
        "the scheme that was removed": at(data, 5, b"\2"),
        "even": at(data, 8, even),
        "leading zero": at(data, 7 + length, b"\0"),
    }
    yield from damages(f"{name} key", "public key", {"toy": True}, changes)
    for content, count in (("PAIRS", 3), ("PACKED_BINS", 2)):
        given = {"key": data.hex(), "content": content, "fraction_bits": 40, "max_additions": 1000, "count": count}
        header = product_parties.ciphertext_header(given).to_bytes()
        width, modulus = byte_width(key.modulus), key.modulus
        rows = [(1 + word(f"{name} {i}", modulus - 1)).to_bytes(width, "little") for i in range(count)]
        good = header + b"".join(rows)
        yield f"{name} {content}", "ciphertexts", {**given, "data": good.hex()}
        yield f"{name} {content}: none", "ciphertexts", {**given, "count": 0, "data": good.hex()}
        start = len(header)
        changes = {
            **cut_and_longer(good),
            "zero": at(good, start, bytes(width)),
            "the modulus": at(good, start, modulus.to_bytes(width, "little")),
            "a multiple of n": at(good, start, (key.n % modulus or modulus).to_bytes(width, "little")),
            "another fingerprint": flipped(good, start - 1),
            "another count": flipped(good, 36),
            "another layout": flipped(good, 16),
            "version": flipped(good, 4),
        }
        yield from damages(f"{name} {content}", "ciphertexts", given, changes)


def _elgamal() -> Iterator[Case]:
    curve = open_curve()
    for n_messages in (2, 4):
        key = generate_elgamal_key(n_messages, curve, SeededRandomness(n_messages)).public_key
        data = key.to_bytes()
        name = f"elgamal key of {n_messages}"
        yield name, "elgamal key", {"data": data.hex()}
        changes = {
            **cut_and_longer(data),
            "version": at(data, 4, b"\2"),
            "scheme": at(data, 5, b"\1"),
            "three points": at(data, 6, b"\3"),
            "off the curve": flipped(data, 7),
            "neutral point": at(data, 7, bytes(32) + b"\1" + bytes(31)),
            "small order": at(data, 7, _TORSION[64]),
        }
        yield from damages(name, "elgamal key", {}, changes)
        for fraction_bits, point_bytes in _POINTS[n_messages]:
            yield from _points(data, fraction_bits, point_bytes)


_POINTS = {2: ((14, 64), (20, 64), (20, 32)), 4: ((40, 64), (40, 32))}
"""Points of a key -> fraction bits and bytes of a point."""
_TORSION = {64: bytes(32) + (FIELD_PRIME - 1).to_bytes(32, "little"), 32: (FIELD_PRIME - 1).to_bytes(32, "little")}
"""The point (0, -1), of order 2."""
_ABOVE = (FIELD_PRIME + 1).to_bytes(32, "little")


def _points(key: bytes, fraction_bits: int, point_bytes: int) -> Iterator[Case]:
    curve = open_curve()
    n_messages = (len(key) - 7) // 64
    further = (
        f", {fraction_bits} bits, {point_bytes} bytes"
        if (point_bytes, fraction_bits) not in ((64, 14), (64, 40))
        else ""
    )
    for content in ("PAIRS", "BINS"):
        given: dict[str, Any] = {"key": key.hex(), "content": content, "fraction_bits": fraction_bits}
        given |= {"point_bytes": point_bytes, "max_additions": 500, "count": 2}
        header = product_parties.point_header(given)
        scalars = np.zeros((header.n_columns * 2, 32), np.uint8)
        scalars[:, 0] = np.arange(1, len(scalars) + 1)
        good = (
            header.to_bytes()
            + write_column(header.digits, curve, curve.fixed_base(base_point(curve)).mul(scalars)).tobytes()
        )
        start = len(header.to_bytes())
        name = f"points of {n_messages}, {content}{further}"
        yield name, "points", {**given, "data": good.hex()}
        yield f"{name}: small order", "points", {**given, "data": at(good, start, _TORSION[point_bytes]).hex()}
        changes = {
            **cut_and_longer(good),
            "off the curve": flipped(good, start),
            "above the prime": at(good, start, bytes(32) + _ABOVE),
            "another key": flipped(good, start - 1),
            "another count": flipped(good, 20),
            "content": flipped(good, 7),
            "bytes of a point": flipped(good, 10),
        }
        if point_bytes == 32:
            changes |= {
                "off the curve": at(good, start, b"\2" + bytes(31)),
                "above the prime": at(good, start, _ABOVE),
                "no x to be odd": at(good, start, b"\1" + bytes(30) + b"\x80"),
            }
        yield from damages(name, "points", given, changes)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in RING:
        yield from _ring(name)
    yield from _additive()
    yield from _elgamal()
