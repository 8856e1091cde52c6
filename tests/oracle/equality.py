"""Which releases of XGBoost grow the trees that we grow, setting by setting.

python -m tests.oracle.equality [FILE ...]     compare with the trees in files of growth_trees.py; of the stored ones,
                                               where none is named
                  --write PAGE                 put the table into a page, in the place of the one before

A release whose arithmetic is not known is compared with the newest that is. Exit status 0: all fields of all trees are
equal; 1: some are not, and what differs first is said of each.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare_plugins.base.files import write_atomically
from nvflare_plugins.growth.arithmetic import ARITHMETICS
from tests.oracle.growth_trees import CATEGORY_FIELDS, FIELDS, SETTINGS
from tests.support.growth import as_float32, fields, grow

STORED = Path(__file__).parent
EQUAL, STRUCTURE, NOT = "equal", "structure", "not"
_OF_STRUCTURE = ("left_children", "right_children", "parents", "split_indices", "default_left", "split_type")
_START, _END = "<!-- table of equality -->\n\n", "\n<!-- end -->"


@dataclass(frozen=True)
class Compared:
    """One release.

    Attributes:
        version: of XGBoost.
        arithmetic: name of the row that it is compared with.
        found: of each setting how far trees are equal, and what differs first.
    """

    version: str
    arithmetic: str
    found: dict[str, tuple[str, str]]


def read(path: Path) -> dict[str, Any]:
    """Return what growth_trees.py wrote."""
    with gzip.open(path) as file:
        return dict(json.load(file))


def compare(document: dict[str, Any]) -> Compared:
    """Grow the trees of all settings and compare them with those of a release."""
    release = ".".join(document["xgboost"].split(".")[:2])
    arithmetic = ARITHMETICS.get(release) or list(ARITHMETICS.values())[-1]
    found = {}
    for name, setting in SETTINGS.items():
        if name not in document["trees"]:
            found[name] = NOT, document.get("refused", {}).get(name, "no trees")
            continue
        ours = [fields(tree) for tree in grow(setting, arithmetic)]
        found[name] = difference(ours, list(map(as_float32, document["trees"][name])))
    return Compared(document["xgboost"], arithmetic.name, found)


def difference(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return how far trees are equal, and where they differ first: the tree, the field, the node."""
    if len(ours) != len(theirs):
        return NOT, f"{len(theirs)} trees for {len(ours)}"
    first = next(_differences(ours, theirs), "")
    if not first:
        return EQUAL, ""
    alike = all(_structure(one) == _structure(other) for one, other in zip(ours, theirs, strict=True))
    return STRUCTURE if alike else NOT, first


def _differences(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in (*FIELDS, *CATEGORY_FIELDS):
            a, b = one[name], other.get(name)
            if a == b:
                continue
            if b is None or len(a) != len(b):
                yield f"tree {number}, {name}: {'none' if b is None else len(b)} entries for {len(a)}"
                continue
            at = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
            yield f"tree {number}, {name}[{at}]: {b[at]} for {a[at]}"


def _structure(tree: dict[str, Any]) -> list[Any]:
    """Return what decides where rows go: splits, without the values of leaves."""
    inner = [x for x, left in zip(tree["split_conditions"], tree["left_children"], strict=True) if left >= 0]
    return [inner, *(tree.get(name) for name in (*_OF_STRUCTURE, *CATEGORY_FIELDS))]


def table(releases: Sequence[Compared]) -> str:
    """Return the table of all settings, as documents have it."""
    heads = [f"XGBoost {one.version} (arithmetic {one.arithmetic})" for one in releases]
    rows = [[name.replace("_", " "), *(one.found[name][0] for one in releases)] for name in SETTINGS]
    lines = [["setting", *heads], ["---"] * (len(heads) + 1), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def in_page(text: str, new: str) -> str:
    """Return a page with another table. Raises: ValueError: the page has no place for it."""
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ValueError("the page has no place for a table of equality")
    return before + start + new + end + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the table and what differs first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="written by growth_trees.py")
    parser.add_argument("--write", type=Path, help="the page that shows the table")
    options = parser.parse_args(arguments)
    releases = [compare(read(path)) for path in options.files or sorted(STORED.glob("growth_trees_*.json.gz"))]
    said = table(releases)
    for one in releases:
        unlike = {name: first for name, (how_far, first) in one.found.items() if how_far != EQUAL}
        n, n_equal = len(one.found), len(one.found) - len(unlike)
        said += f"XGBoost {one.version}: {n_equal} of {n} settings equal in all fields\n"
        said += "".join(f"  {name}: {one.found[name][0]}: {first}\n" for name, first in unlike.items())
    sys.stdout.write(said)
    if options.write is not None:
        write_atomically(options.write, in_page(options.write.read_text(encoding="utf-8"), table(releases)).encode())
    return int(any(how_far != EQUAL for one in releases for how_far, _ in one.found.values()))


if __name__ == "__main__":
    sys.exit(main())
