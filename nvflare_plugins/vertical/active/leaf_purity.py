"""Leaf purity: how much the leaves of a tree tell about labels, for those who see which rows share a leaf.

A passive party that owns the last split above two leaves knows their rows. It can guess that the rows of a leaf have
one label; the guess is as good as the leaf is pure. Later trees fit residuals, so their leaves are less pure: the
first trees are the ones to keep to the active party (``own_rounds``, Completely SecureBoost).

Reference: SecureBoost (Cheng et al., 2021), sections "Analysis of Information Leakage" and "Performance of Completely
SecureBoost", table 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class LeafPurity:
    """Measures the trees of one training.

    Privacy: computed where the labels are; a single number a tree, for the active party's own report.
    """

    def __init__(self, label: NDArray[np.float32]) -> None:
        """Args: label: one distinct value for each class. Shapes: float32[n_rows]."""
        if not label.size:
            raise ValueError("leaf purity needs rows")
        classes, class_of_row = np.unique(label, return_inverse=True)
        self._n_classes, self._class_of_row = classes.size, class_of_row.astype(np.int32)

    def of(self, leaf_of_row: NDArray[np.int32]) -> float:
        """Return the mean purity of a tree's leaves, weighted by rows: the part of rows in their leaf's largest class.

        Shapes: leaf_of_row: int32[n_rows].
        """
        n_leaves = int(leaf_of_row.max()) + 1
        cells = leaf_of_row.astype(np.int64) * self._n_classes + self._class_of_row
        counts = np.bincount(cells, minlength=n_leaves * self._n_classes)
        return float(counts.reshape(n_leaves, self._n_classes).max(axis=1).sum() / leaf_of_row.size)


@dataclass(frozen=True, slots=True)
class PurityReport:
    """Leaf purity of first and later trees, each the mean over the trees of its rounds.

    Attributes:
        guess: part of the largest class: what no tree at all tells.
        first_round, second_round, later_rounds: of the first round, the second, and of all but the first; None
            without such rounds.
        first_shared_round: of the first round in which passive parties took part; None if they took part in none.
        own_rounds: rounds on the active party's columns alone.
    """

    guess: float
    first_round: float | None
    second_round: float | None
    later_rounds: float | None
    first_shared_round: float | None
    own_rounds: int

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return them in words, each once: without own rounds the first round is the first with passive parties."""
        known = {
            "largest class alone": self.guess,
            "first round": self.first_round,
            "second round": self.second_round,
            "later rounds": self.later_rounds,
            "first round with passive parties": self.first_shared_round if self.own_rounds else None,
        }
        return tuple((name, f"{value:.4f}") for name, value in known.items() if value is not None)


def purity_report(
    purities: Sequence[float], trees_per_round: int, own_rounds: int, label: NDArray[np.float32]
) -> PurityReport:
    """Sum up the trees' purities, in order. Shapes: label: float32[n_rows]."""
    rounds = [float(np.mean(purities[i : i + trees_per_round])) for i in range(0, len(purities), trees_per_round)]
    guess = np.unique(label, return_counts=True)[1].max() / label.size

    def of(number: int) -> float | None:
        return rounds[number] if number < len(rounds) else None

    later = float(np.mean(rounds[1:])) if len(rounds) > 1 else None
    return PurityReport(float(guess), of(0), of(1), later, of(own_rounds), own_rounds)
