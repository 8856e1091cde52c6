"""Fixed bytes and small damages for vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from tests.vectors.form import Given

Case = tuple[str, str, Given]


def drawn(name: str, n: int = 32) -> bytes:
    """Return ``n`` bytes that its name fixes."""
    return hashlib.shake_256(f"veilboost vectors, {name}".encode()).digest(n)


def word(name: str, below: int) -> int:
    """Return a number that its name fixes."""
    return int.from_bytes(drawn(name, 32), "little") % below


def at(data: bytes, place: int, new: bytes) -> bytes:
    """Return the bytes with some of them exchanged."""
    return data[:place] + new + data[place + len(new) :]


def flipped(data: bytes, place: int) -> bytes:
    """Return the bytes with one bit changed."""
    place %= len(data)
    return at(data, place, bytes([data[place] ^ 1]))


def damages(name: str, format_: str, given: Given, changes: Mapping[str, bytes], key: str = "data") -> Iterator[Case]:
    """Yield a vector with changed bytes for each change."""
    for what, data in changes.items():
        yield f"{name}: {what}", format_, {**given, key: data.hex()}


def cut_and_longer(data: bytes) -> dict[str, bytes]:
    """Return the changes that every parser must notice."""
    return {"empty": b"", "cut short": data[:-1], "a byte too long": data + b"\0"}
