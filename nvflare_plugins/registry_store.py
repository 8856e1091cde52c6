"""The registry's content as values, and its file form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nvflare_plugins.data_identity import DataRecord
from nvflare_plugins.files import write_durably

_VERSION = 1
_STATES = ("reserved", "complete")


@dataclass(frozen=True, slots=True)
class Run:
    """One job of this site: ``state`` is "reserved" from the reservation on, and "complete" at the end."""

    run_id: str
    job_id: str
    fingerprint: str
    sites: tuple[str, ...]
    parameters: str
    started: str
    state: str = "reserved"
    trees: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """One quantile search: the keyed hashes of its columns, and the file with its cuts once it has ended."""

    run_id: str
    sites: tuple[str, ...]
    settings: str
    n_rows: int
    columns: Mapping[str, str]
    file: str | None

    def concerns(self, sites: tuple[str, ...], n_rows: int) -> bool:
        return self.sites == sites and self.n_rows == n_rows


@dataclass(frozen=True, slots=True)
class Ledger:
    """All that the registry remembers."""

    data: Mapping[str, DataRecord] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    searches: tuple[Search, ...] = ()


def read_ledger(path: Path) -> Ledger:
    """Read the file; no file is an empty ledger.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It is not what ``write_ledger`` writes.
    """
    if not path.exists():
        return Ledger()
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["version"] != _VERSION:
        raise ValueError("unknown version")
    data = {
        fingerprint: DataRecord(**{**record, "identifying": tuple(record["identifying"])})
        for fingerprint, record in document["data"].items()
    }
    runs = tuple(Run(**{**run, "sites": tuple(run["sites"])}) for run in document["runs"])
    searches = tuple(Search(**{**search, "sites": tuple(search["sites"])}) for search in document["searches"])
    if any(run.fingerprint not in data or run.state not in _STATES for run in runs):
        raise ValueError("a run without data, or in an unknown state")
    return Ledger(data, runs, searches)


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Write the file whole, readable by a person."""
    document = {
        "version": _VERSION,
        "data": {fingerprint: asdict(record) for fingerprint, record in ledger.data.items()},
        "runs": [asdict(run) for run in ledger.runs],
        "searches": [asdict(search) for search in ledger.searches],
    }
    write_private(path, (json.dumps(document, indent=1) + "\n").encode())


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, durably: it must not be forgotten if the machine stops right after."""
    write_durably(path, content, mode=0o600)
