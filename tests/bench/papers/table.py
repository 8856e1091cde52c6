"""One table of a paper: its cells, theirs and ours, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench.papers.sets import Library

NEAR = 0.015
"""Scores that are no farther apart are taken for the same, whatever their spread."""


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        ours: the mean of our runs; None where it was not measured.
        sd: its standard deviation over ``n`` runs.
        paper: the paper's number; None where the copy at hand lost it.
        code: that of the authors' own code, run for comparison.
    """

    ours: float | None
    sd: float = 0.0
    n: int = 1
    paper: float | None = None
    code: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], paper: float | None = None, code: float | None = None) -> Cell:
        """Return the cell of some runs."""
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
        return cls(round(mean, 5), round(spread, 5), len(values), paper, code)

    def distance(self) -> float | None:
        """Return ours less theirs, the paper's where it has one; None if either is missing."""
        theirs = self.code if self.paper is None else self.paper
        return None if theirs is None or self.ours is None else self.ours - theirs

    def is_near(self) -> bool:
        """Whether the two differ by no more than ``NEAR`` or three standard errors of our mean."""
        found = self.distance()
        return found is not None and abs(found) <= max(NEAR, 3 * self.sd / math.sqrt(self.n))


Cells = dict[str, dict[str, Cell]]
"""Row -> column -> cell."""


@dataclass(frozen=True)
class Effort:
    """How much is run: ``repeats`` of noise on each of ``splits``, in ``jobs`` processes."""

    repeats: int = 3
    splits: int = 5
    jobs: int = 1


@dataclass(frozen=True)
class PaperTable:
    """One table or figure.

    Attributes:
        name: as the paper calls it.
        about: what it shows, in a sentence.
        measure: returns the cells of the sets at hand.
        sets: those that it has; each is run if it is at hand.
        lanes: product folders that its figures depend on: when they change, the figures are stale.
        higher: whether more is better; False for errors, None for what is no contest.
        remarks: what a reader has to know, such as where the paper contradicts itself.
        digits: shown after the point.
        axis: what its rows are values of, if it is a figure; columns are then "set, method".
    """

    name: str
    about: str
    measure: Callable[[Library, Sequence[str], Effort], Cells]
    sets: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    higher: bool | None = True
    remarks: tuple[str, ...] = ()
    digits: int = 4
    axis: str | None = None


@dataclass(frozen=True)
class Paper:
    """One of the five systems."""

    key: str
    title: str
    tables: Mapping[str, PaperTable] = field(default_factory=dict)


def to_json(cells: Cells) -> dict[str, Any]:
    """Return cells as values of JSON, without what is empty."""
    return {
        row: {
            column: {name: value for name, value in vars(cell).items() if value is not None}
            for column, cell in of_row.items()
        }
        for row, of_row in cells.items()
    }


def from_json(found: Mapping[str, Any]) -> Cells:
    """Return cells that ``to_json`` wrote."""
    return {
        row: {column: Cell(**{"ours": None, **cell}) for column, cell in of_row.items()}
        for row, of_row in found.items()
    }
