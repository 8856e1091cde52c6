"""The form of the vectors: bytes in JSON, and which of them are long enough to be written as a rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
Given = dict[str, Any]
Vector = dict[str, Any]


def blob(value: str | list[Any]) -> bytes:
    """Return the bytes that a vector gives: hexadecimal, or a list of it and of what is repeated."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    return b"".join(blob(p) if isinstance(p, str) else blob(p["repeat"]) * p["times"] for p in value)


def numbers(value: list[int] | dict[str, int]) -> list[int]:
    """Return the integers that a vector gives: a list, or ``(times * i + plus) mod modulo - less`` for i below n."""
    if isinstance(value, list):
        return value
    return [(value["times"] * i + value["plus"]) % value["modulo"] - value["less"] for i in range(value["n"])]


def formats(module: Mapping[str, Any]) -> dict[str, Callable[[Given], Any]]:
    """Return the functions of a module that read what is given, by their formats, after which they are called."""
    signatures = ({"given": "Given", "return": "Gives"}, {"given": "Given", "return": "Any"})
    return {
        name.strip("_").replace("_", " "): one
        for name, one in module.items()
        if getattr(one, "__annotations__", None) in signatures and one.__module__ == module["__name__"]
    }


def files() -> list[Path]:
    """Return the files of vectors, by name."""
    return sorted(FOLDER.glob("*.json"))


def read(path: Path) -> list[Vector]:
    """Return the vectors of a file."""
    return list(json.loads(path.read_text(encoding="ascii"))["vectors"])


def document(about: str, vectors: Iterable[Vector]) -> str:
    """Return a file of vectors, a line each, so that a difference shows which one has changed."""
    lines = ",\n".join(json.dumps(vector, sort_keys=True) for vector in vectors)
    return f'{{"about": {json.dumps(about)},\n"vectors": [\n{lines}\n]}}\n'
