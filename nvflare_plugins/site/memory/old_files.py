"""Where versions before 0.3 kept what is one file now. They are read no more, and never taken for nothing.

They had ``registry.json`` with ``rows``, ``cuts`` and a key, the folders ``alignments``, ``released_bins`` and
``predictions``, ``data_refusals.json``, and beside the ledgers the rows whose buckets were sent. Versions from 0.3 to
0.10 copied all of it into the memory, renamed it to ``*.migrated``, and left a text in the place of some files.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

_IN_REGISTRY = (
    "registry.json",
    "key",
    "rows",
    "cuts",
    "alignments",
    "released_bins",
    "predictions",
    "data_refusals.json",
)
_BESIDE_LEDGERS = "rows_of_buckets.jsonl"
_COPIED = b"This site's memory has moved to veilboost_memory.sqlite, which older versions of VeilBoost cannot read.\n"


def not_copied(registry: Path, ledgers: Path | None) -> list[str]:
    """Return the names of files and folders that tell of releases and that no memory holds."""
    return [place.name for place in _places(registry, ledgers) if any(map(_tells, _files(place)))]


def copied(registry: Path, ledgers: Path | None) -> list[str]:
    """Return the names of what shows that a memory was made of such files: it was there."""
    places = _places(registry, ledgers)
    kept = [found for place in places for found in place.parent.glob(f"{glob.escape(place.name)}.migrated*")]
    return sorted(path.name for path in (*kept, *(place for place in places if any(_files(place)))))


def _places(registry: Path, ledgers: Path | None) -> list[Path]:
    found = [registry / name for name in _IN_REGISTRY]
    return found if ledgers is None else [*found, ledgers / _BESIDE_LEDGERS]


def _files(path: Path) -> Iterator[Path]:
    """Yield a file, or those in a folder; not what a write that was cut short has left."""
    if path.is_dir():
        for inner in path.iterdir():
            yield from _files(inner)
    elif path.exists() and not (path.name.startswith(".") and path.name.endswith(".partial")):
        yield path


def _tells(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_COPIED) + 1) != _COPIED
