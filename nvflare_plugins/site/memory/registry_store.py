"""The registry's content as values, and its file form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nvflare_plugins.data_sets.identity import DataRecord
from nvflare_plugins.files import write_private

_VERSION, _VERSION_OF_WHOLE_RUNS = 2, 1
_ENCODER = json.JSONEncoder()
_STATES = ("reserved", "complete")


@dataclass(frozen=True, slots=True)
class Run:
    """One job of this site: ``state`` is "reserved" from the reservation on, and "complete" at the end.

    ``draw`` says which of the rows took part and how much, see ``registry.describe_draw``.
    """

    run_id: str
    job_id: str
    fingerprint: str
    sites: tuple[str, ...]
    parameters: str
    started: str
    state: str = "reserved"
    trees: int = 0
    draw: str = ""


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
class RegistryState:
    """All that the registry remembers."""

    data: Mapping[str, DataRecord] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    searches: tuple[Search, ...] = ()


def read_ledger(path: Path) -> RegistryState:
    """Read the file; no file is an empty ledger.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not what ``write_ledger`` writes.
    """
    if not path.exists():
        return RegistryState()
    document = json.loads(path.read_text(encoding="utf-8"))
    data = {
        fingerprint: DataRecord(**{**record, "identifying": tuple(record["identifying"])})
        for fingerprint, record in document["data"].items()
    }
    if document["version"] == _VERSION:
        runs = _runs_of(document["terms"], document["runs"])
    elif document["version"] == _VERSION_OF_WHOLE_RUNS:
        runs = tuple(Run(**{**run, "sites": tuple(run["sites"])}) for run in document["runs"])
    else:
        raise ValueError("unknown version")
    searches = tuple(Search(**{**search, "sites": tuple(search["sites"])}) for search in document["searches"])
    if any(run.fingerprint not in data or run.state not in _STATES for run in runs):
        raise ValueError("a run without data, or in an unknown state")
    return RegistryState(data, runs, searches)


def write_ledger(path: Path, ledger: RegistryState) -> None:
    """Write the file whole: a run a line, and what many runs have in common once.

    A site that trains every day for years has thousands of runs, and the file is written after every checkpoint.
    """
    terms: dict[tuple[str, tuple[str, ...], str, str], int] = {}
    runs = [
        (
            run.run_id,
            run.job_id,
            terms.setdefault((run.fingerprint, run.sites, run.parameters, run.draw), len(terms)),
            run.started,
            run.state,
            run.trees,
        )
        for run in ledger.runs
    ]
    parts = {
        "version": str(_VERSION),
        "data": json.dumps({fingerprint: asdict(record) for fingerprint, record in ledger.data.items()}),
        "terms": _lines(list(terms)),
        "runs": _lines(runs),
        "searches": _lines([asdict(search) for search in ledger.searches]),
    }
    content = ",\n".join(f'"{name}": {text}' for name, text in parts.items())
    write_private(path, f"{{\n{content}\n}}\n".encode())


def _lines(entries: Sequence[object]) -> str:
    # With an indentation the standard library encodes in Python and not in C, which takes ten times as long.
    return "[\n" + ",\n".join(map(_ENCODER.encode, entries)) + "\n]"


def _runs_of(terms: list[list[Any]], rows: list[list[Any]]) -> tuple[Run, ...]:
    known = [
        (fingerprint, tuple(sites), parameters, *draw)  # files of before know no draws
        for fingerprint, sites, parameters, *draw in terms
    ]
    if any(len(facts) > 4 for facts in known):
        raise ValueError("terms with unknown facts")
    runs = []
    for run_id, job_id, number, started, state, trees in rows:
        if type(number) is not int or type(trees) is not int or number < 0 or trees < 0:
            raise TypeError("a run's terms and trees are whole numbers")
        fingerprint, sites, parameters, *draw = known[number]
        runs.append(Run(run_id, job_id, fingerprint, sites, parameters, started, state, trees, *draw))
    return tuple(runs)
