"""Vectors of protected sums: what a site sends, what the server answers, what a site makes of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from he_processors.field61 import MODULUS
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.envelope import Codec, Operation, unpack
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


def _messages() -> dict[str, list[Given]]:
    """Return the contributions of all sites, by name."""
    residues = [[word(f"residue {rank} {i}", MODULUS) for i in range(2)] for rank in range(WORLD)]
    empty: list[int] = []
    return {
        "five values": [{"values": _values(rank), "residues": empty} for rank in range(WORLD)],
        "values and residues": [{"values": _values(rank), "residues": residues[rank]} for rank in range(WORLD)],
        "residues alone": [{"values": empty, "residues": residues[rank]} for rank in range(WORLD)],
        "largest values": [{"values": [(1 << 59) // 4, -(1 << 59) // 4, 0], "residues": empty} for _ in range(WORLD)],
        "two blocks": [{"values": {**_LONG, "plus": rank}, "residues": [rank]} for rank in range(WORLD)],
    }


def _frame(name: str, payload: bytes, n_values: int, tail: int, codec: Codec = Codec.MASKED) -> str:
    return made(name, Kind.HISTOGRAM, Operation.SUM, codec, payload, n_values=n_values, tail=tail).hex()


def _sums() -> Iterator[Case]:
    for name, parts in _messages().items():
        of = [{**keys(rank), **_LABEL, **part} for rank, part in enumerate(parts)]
        for rank, given in enumerate(of):
            yield f"{name}, site {rank}", "contribution", given
        sent = [product.FORMATS["contribution"](given) for given in of]
        n = len(bytes.fromhex(sent[0]["payload"])) // 8 - sent[0]["tail"] // 8
        frames = [_frame(name, bytes.fromhex(one["payload"]), n, one["tail"]) for one in sent]
        yield f"{name}, added", "added", {"frames": frames}
        total = bytes.fromhex(product.FORMATS["added"]({"frames": frames})["payload"])
        opened: dict[str, Any] = {**_LABEL, "tail": sent[0]["tail"]}
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


def _masks() -> Iterator[Case]:
    for modulus in (None, 4503599627149313, 17592186028033):
        for rank in range(WORLD):
            given = {**keys(rank), **_LABEL, "values": _values(rank), "modulus": modulus}
            yield f"masks modulo {modulus or '2^64'}, site {rank}", "masked", given
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
