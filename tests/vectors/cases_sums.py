"""Vectors of protected sums: what a site sends, what the server answers, what a site makes of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from he_processors.field61 import MODULUS
from nvflare_plugins.wire.envelope import Codec, Kind, Operation, unpack
from tests.vectors import product
from tests.vectors.cases_frames import made
from tests.vectors.cases_sessions import SESSION
from tests.vectors.drawn import Case, at, drawn, flipped, word
from tests.vectors.form import Given

WORLD = 3
_GROUP = drawn("group secret").hex()
_LABEL = {"counter": 12, "kind": "HISTOGRAM", "phase": "update:0"}
_LONG = {"n": 1030, "times": 7919, "plus": 11, "modulo": 1 << 20, "less": 1 << 19}  # two blocks of tags


def keys(rank: int, world: int = WORLD) -> Given:
    """Return what a site of this rank holds."""
    secrets = {
        str(peer): drawn(f"pair {min(rank, peer)} {max(rank, peer)}").hex() for peer in range(world) if peer != rank
    }
    return {"session": SESSION.hex(), "rank": rank, "pair_secrets": secrets, "group_secret": _GROUP}


def _values(rank: int) -> list[int]:
    return [word(f"value {rank} {i}", 1 << 40) - (1 << 39) for i in range(5)]


def _short_values(rank: int) -> list[int]:
    """Return values of words of 32 bits; the sums of the last two over all sites are the least and the largest."""
    last = [-(1 << 31), (1 << 31) - 1] if rank == 1 else [0, 0]
    return [*(word(f"short {rank} {i}", 1 << 24) - (1 << 23) for i in range(3)), *last]


def _messages() -> dict[str, list[Given]]:
    """Return the contributions of all sites, by name."""
    residues = [[word(f"residue {rank} {i}", MODULUS) for i in range(2)] for rank in range(WORLD)]
    empty: list[int] = []
    return {
        "five values": [{"values": _values(rank), "residues": empty} for rank in range(WORLD)],
        "values and residues": [{"values": _values(rank), "residues": residues[rank]} for rank in range(WORLD)],
        "residues alone": [{"values": empty, "residues": residues[rank]} for rank in range(WORLD)],
        "largest values": [{"values": [(1 << 59) // 4, -(1 << 59) // 4, 0], "residues": empty} for _ in range(WORLD)],
        "short words": [{"values": _short_values(rank), "residues": empty, "bits": 32} for rank in range(WORLD)],
        "short words and a residue": [
            {"values": [rank, -1, 7], "residues": [rank], "bits": 32} for rank in range(WORLD)
        ],
        "two blocks": [{"values": {**_LONG, "plus": rank}, "residues": [rank]} for rank in range(WORLD)],
    }


def _frame(
    name: str, payload: bytes, n_values: int, tail: int, codec: Codec = Codec.MASKED, kind: Kind = Kind.HISTOGRAM
) -> str:
    return made(name, kind, Operation.SUM, codec, payload, n_values=n_values, tail=tail).hex()


def _sums() -> Iterator[Case]:
    for name, parts in _messages().items():
        of = [{**keys(rank), **_LABEL, **part} for rank, part in enumerate(parts)]
        for rank, given in enumerate(of):
            yield f"{name}, site {rank}", "contribution", given
        sent = [product.FORMATS["contribution"](given) for given in of]
        width = {"bits": parts[0]["bits"]} if "bits" in parts[0] else {}
        codec = Codec.MASKED_32 if width else Codec.MASKED
        n = (len(bytes.fromhex(sent[0]["payload"])) - sent[0]["tail"]) // codec.word_bytes
        frames = [_frame(name, bytes.fromhex(one["payload"]), n, one["tail"], codec) for one in sent]
        yield f"{name}, added", "added", {"frames": frames}
        total = bytes.fromhex(product.FORMATS["added"]({"frames": frames})["payload"])
        opened: dict[str, Any] = {**_LABEL, "tail": sent[0]["tail"], **width}
        for rank in (0, 2):
            yield f"{name}, opened at {rank}", "opened sum", {**keys(rank), **opened, "payload": total.hex()}
        if name == "two blocks":
            continue
        twice = [*frames, frames[1]]
        doubled = product.FORMATS["added"]({"frames": twice})["payload"]
        lost = product.FORMATS["added"]({"frames": frames[:2]})["payload"]
        changed = {"a bit": flipped(total, 0).hex(), "a tag": flipped(total, -16).hex(), "doubled": doubled}
        changed |= {"one lost": lost, "residue that is none": at(total, len(total) - 8, b"\xff" * 8).hex()}
        for what, payload in changed.items():
            yield f"{name}: {what}", "opened sum", {**keys(1), **opened, "payload": payload}
        yield (
            f"{name}: another round",
            "opened sum",
            {
                **keys(1),
                **opened,
                "phase": "update:1",
                "payload": total.hex(),
            },
        )


def _out_of_range() -> Iterator[Case]:
    """A sum that is right modulo p and too large: changed by p in one place, which leaves every tag right."""
    parts = [{**keys(rank), **_LABEL, "values": [5, 6], "residues": []} for rank in range(WORLD)]
    sent = [bytes.fromhex(product.FORMATS["contribution"](part)["payload"]) for part in parts]
    frames = [_frame("p", data, 2, 16) for data in sent]
    total = bytes.fromhex(product.FORMATS["added"]({"frames": frames})["payload"])
    first = (struct.unpack_from("<Q", total)[0] + MODULUS) % (1 << 64)
    payload = at(total, 0, struct.pack("<Q", first)).hex()
    yield "a sum changed by p", "opened sum", {**keys(1), **_LABEL, "tail": 16, "payload": payload}
    parts = [{**keys(rank), **_LABEL, "values": [1 << 30, 6], "residues": [], "bits": 32} for rank in range(WORLD)]
    sent = [bytes.fromhex(product.FORMATS["contribution"](part)["payload"]) for part in parts]
    frames = [_frame("w", data, 2, 16, Codec.MASKED_32) for data in sent]
    payload = product.FORMATS["added"]({"frames": frames})["payload"]
    given = {**keys(1), **_LABEL, "tail": 16, "payload": payload, "bits": 32}
    yield "a sum that has wrapped in words of 32 bits", "opened sum", given


def _masks() -> Iterator[Case]:
    for modulus in (None, 4503599627149313, 17592186028033):
        for rank in range(WORLD):
            given = {**keys(rank), **_LABEL, "values": _values(rank), "modulus": modulus}
            yield f"masks modulo {modulus or '2^64'}, site {rank}", "masked", given
    for n in (1, 4, 7):
        for rank in range(WORLD):
            values = [word(f"word {rank} {i}", 1 << 32) for i in range(n)]
            given = {**keys(rank), **_LABEL, "values": values, "modulus": None, "bits": 32}
            yield f"masks of {n} words of 32 bits, site {rank}", "masked", given
    given = {**keys(1), **_LABEL, "values": _values(1), "modulus": None, "readable": True}
    yield "masks without blinding, site 1", "masked", given
    yield "masks without blinding, site 0", "masked", {**given, **keys(0)}
    for rank in range(WORLD):
        given = {**keys(rank), "residues": [0, 1, MODULUS - 1], "counter": 2}
        yield f"masks of residues, site {rank}", "masked residues", given


def _additions() -> Iterator[Case]:
    def words(*numbers: int) -> bytes:
        return np.array(numbers, dtype=np.uint64).astype("<u8").tobytes()

    good = [_frame(f"a{i}", words((1 << 64) - 1, i, MODULUS - 1), 2, 8) for i in range(2)]
    yield "words and a residue wrap", "added", {"frames": good}
    plain = [_frame("b", words(1, 2), 2, 0, codec) for codec in (Codec.PLAIN, Codec.PLUGIN)]
    yield "words in clear", "added", {"frames": plain}
    halves = np.array([(1 << 32) - 1, 5, 1 << 31], dtype="<u4").tobytes()
    for codec in (Codec.MASKED_32, Codec.PLAIN_32):
        short = [_frame(f"s{i}", halves + words(MODULUS - 1), 3, 8, codec) for i in range(2)]
        yield f"words of 32 bits wrap, {codec.name}", "added", {"frames": short}
        for name, bad in {
            "words of 64 bits": _frame("s", words(1, 2, 3, 4), 3, 8, codec),
            "one word too few": _frame("s", halves[4:] + words(4), 3, 8, codec),
            "one word too many": _frame("s", halves + halves[:4] + words(4), 3, 8, codec),
            "a residue that is none": _frame("s", halves + words(MODULUS), 3, 8, codec),
            "another kind": _frame("s", halves + words(4), 3, 8, codec, Kind.METRIC),
        }.items():
            yield f"added: {name}, {codec.name}", "added", {"frames": [bad]}
    for name, bad in {
        "a residue that is none": _frame("c", words(1, 2, MODULUS), 2, 8),
        "one word too few": _frame("c", words(1, 2), 2, 8),
        "one word too many": _frame("c", words(1, 2, 3, 4), 2, 8),
        "other bytes of residues": _frame("c", words(1, 2) + b"\0" * 7, 2, 7),
        "a codec that is not added": _frame("c", words(1, 2), 2, 0, Codec.SEALED),
        "BFV without parameters": _frame("c", words(1, 2), 2, 0, Codec.BFV),
    }.items():
        yield f"added: {name}", "added", {"frames": [bad]}
        if unpack(bytes.fromhex(bad)).codec is Codec.MASKED:
            yield f"added: {name}, as the second", "added", {"frames": [good[0], bad]}


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for part in (_masks, _sums, _out_of_range, _additions):
        yield from part()
