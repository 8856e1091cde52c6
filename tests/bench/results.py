"""Writes tables and headline figures into the documents: from ``results/*.json``, and ``measured.json`` (``record``).

    python -m tests.bench.results            writes them, and marks those whose code has changed since as stale
    python -m tests.bench.results --stale    names these; exit code 1 if there are any, before a release

A file of ``results`` says program, command, date and machine, and its tables by name, cells as they are printed. Who
measures again writes the new figures there, with the new date and machine, and runs this. A test compares documents
and files, but for the marks: a change of code makes figures stale, and no test red.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.bench import record
from tests.generated_tables import DOCUMENTS, STALE, filled, table

Figures = Mapping[str, Any]


def _round_of(lane: str) -> Callable[[Figures], str]:
    def shown(found: Figures) -> str:
        lanes = found["sites"]["lanes"]
        ours, central = lanes[lane]["wall_s"], lanes["central"]["wall_s"]
        times, seconds = ours / central, "".join(f"{one:.3f}"[1 if one < 1 else 0 :] + " " for one in (ours, central))
        return f"{times:.{0 if times >= 10 else 1}f} times ({' to '.join(seconds.split())} s)"

    return shown


def _core_s_of(scheme: str) -> Callable[[Figures], str]:
    return lambda found: f"{(s := found[scheme]['core_s_per_tree']):.{0 if s >= 10 else 1}f}"


_ROUNDS, _TREES = "bench_horizontal", "bench_vertical"
HEADLINES: dict[str, tuple[str, str, Callable[[Figures], str]]] = {
    "plain": ("a round under `plain` beside centralized XGBoost", _ROUNDS, _round_of("own_plain")),
    "masks": ("a round under `masks`", _ROUNDS, _round_of("own_masks")),
    "bfv": ("a round under `bfv`", _ROUNDS, _round_of("own_bfv")),
    "ckks": ("a round under `ckks`", _ROUNDS, _round_of("own_ckks")),
    "elgamal": ("core-seconds of a vertical tree under ElGamal", _TREES, _core_s_of("elgamal")),
    "paillier": ("the same under Paillier with 3,072 bits", _TREES, _core_s_of("paillier_3072")),
}
"""What the first page says: in words, whose figure it is, and how it is written."""


def figure(name: str) -> str:
    """Return a headline figure as documents show it; its mark stands in the table of all (``headlines``)."""
    _, program, shown = HEADLINES[name]
    return shown(record.kept()[program]["figures"])


def headlines() -> str:
    """Return the table of all headline figures, with what each is from."""
    rows = []
    for name, (words, program, _) in HEADLINES.items():
        entry = record.kept()[program]
        commit = entry["commit"] or "unknown"
        mark = STALE if record.is_stale(entry) else ""
        rows.append((words, figure(name) + mark, f"`{program}`, {entry['date']}, commit {commit}; {entry['machine']}"))
    return table(("figure", "", "measured"), rows)


def main() -> int:
    """Write all documents, or name what is stale; return the exit code."""
    if sys.argv[1:] == ["--stale"]:
        found = [name for name, entry in record.kept().items() if record.is_stale(entry)]
        print("\n".join(found))
        return 1 if found else 0
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
