"""Writes the tables of RESULTS.md and dp_explored.md from the files of figures beside it: ``results/*.json``.

    python -m tests.bench.results

A file says program, command, date and machine, and its tables by name, cells as they are printed. Who measures again
writes the new figures there, with the new date and machine, and runs this. A test compares documents and files.
"""

from __future__ import annotations

from pathlib import Path

from tests.generated_tables import filled, measured

DOCUMENTS = tuple(Path(__file__).parent / name for name in ("RESULTS.md", "dp_explored.md"))


def main() -> None:
    """Write the tables of both documents."""
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
