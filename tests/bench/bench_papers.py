"""Runs the tables of the five papers, keeps what was measured, and writes the page ``PAPERS.md``.

    make bench-papers DATA=folder                                              every table, on the sets at hand
    python -m tests.bench.bench_papers --only maddock/3 dpboost --repeats 1    some of them, fewer runs
    python -m tests.bench.bench_papers --page                                  the page alone, from what is kept
    python -m tests.bench.bench_papers --stale                                 which figures are of older code

Each finished table is kept at once in ``papers/measured.json``: a run that is broken off goes on where it was with
``--missing``. DATA is a folder with files under the names that their publishers give them; a set without a file is
left out, and the page says so. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvflare_plugins.base.files import write_atomically
from tests.bench.papers import dpboost, federboost, maddock, nvidia, secureboost
from tests.bench.papers.page import page, pictures
from tests.bench.papers.sets import Library, Missing
from tests.bench.papers.table import Effort, PaperTable, to_json
from tests.bench.record import ROOT, git, kept, origin

PAPERS = (maddock.PAPER_OF, secureboost.PAPER_OF, federboost.PAPER_OF, dpboost.PAPER_OF, nvidia.PAPER_OF)
KEPT = ROOT / "tests" / "bench" / "papers" / "measured.json"
FIGURES = ROOT / "tests" / "bench" / "figures"
PAGE = ROOT / "tests" / "bench" / "PAPERS.md"


def chosen(only: list[str]) -> Iterator[tuple[str, PaperTable]]:
    """Yield the tables that an option names: ``maddock/3``, or ``maddock`` for all of a paper.

    Raises:
        SystemExit: there is none of that name.
    """
    tables = {f"{paper.key}/{name}": table for paper in PAPERS for name, table in paper.tables.items()}
    for wanted in only:
        if not any(wanted in (key, key.partition("/")[0]) for key in tables):
            sys.exit(f"there is no table {wanted!r}: choose papers or tables of {', '.join(tables)}")
    for key, table in tables.items():
        if not only or key in only or key.partition("/")[0] in only:
            yield key, table


def measure(key: str, table: PaperTable, library: Library, effort: Effort) -> dict[str, Any]:
    """Run one table on the sets at hand; return what is kept of it."""
    at_hand, missing = [], {}
    for name in table.sets:
        try:
            library.source(name)
            at_hand.append(name)
        except Missing as reason:
            missing[name] = str(reason)
    if table.sets and not at_hand:
        return {"missing": missing}
    print(f"{key}: {', '.join(at_hand) or 'generated tables'}", file=sys.stderr, flush=True)
    began, cpu = time.perf_counter(), _cpu_s()
    cells = table.measure(library, at_hand, effort)
    return {
        "cells": to_json(cells),
        "missing": missing,
        "runs": [effort.splits, effort.repeats],
        "wall_s": round(time.perf_counter() - began),
        "cpu_s": round(_cpu_s() - cpu),
        **origin(),
    }


def stale() -> list[str]:
    """Return the tables that were measured on code which has changed since, with what changed."""
    found = []
    for key, table in chosen([]):
        commit = kept(KEPT).get(key, {}).get("commit")
        if commit is None or not table.lanes:
            continue
        if not git("cat-file", "-t", commit):
            found.append(f"{key}, measured at {commit}: no commit of this repository")
            continue
        changed = git("diff", "--shortstat", commit, "HEAD", "--", *table.lanes)
        if changed:
            found.append(f"{key}, measured at {commit}: {changed.strip()}")
    return found


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with files of further sets")
    parser.add_argument("--only", nargs="+", default=[], help="papers or tables")
    parser.add_argument("--missing", action="store_true", help="only tables of which nothing is kept")
    parser.add_argument("--repeats", type=int, default=3, help="runs on each split")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--keep", type=Path, default=KEPT, help="where figures are kept")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept, and nothing else")
    parser.add_argument(
        "--stale", action="store_true", help="name figures of changed code; exit code 1 if there are any"
    )
    options = parser.parse_args()
    if options.stale:
        found = stale()
        print("\n".join(found), json.dumps({"stale": found}), sep="\n")
        sys.exit(1 if found else 0)
    if options.data is not None and not options.data.is_dir():
        sys.exit(f"there is no folder {options.data}")
    done: dict[str, int] = {}
    results = kept(options.keep)
    if not options.page:
        with tempfile.TemporaryDirectory(prefix="veilboost-papers-") as folder:
            library, effort = Library(options.data, Path(folder)), Effort(options.repeats, options.splits, options.jobs)
            for key, table in chosen(options.only):
                if options.missing and "cells" in results.get(key, {}):
                    continue
                results[key] = measure(key, table, library, effort)
                done[key] = results[key].get("cpu_s", 0)
                write_atomically(options.keep, (json.dumps(results, indent=1) + "\n").encode())
    if options.keep == KEPT:
        for name, picture in pictures(PAPERS, results):
            (FIGURES / name).write_text(picture, encoding="utf-8")
        PAGE.write_text(page(PAPERS, results), encoding="utf-8")
    print(json.dumps({"cpu_s": done, "tables": len(results)}))


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
