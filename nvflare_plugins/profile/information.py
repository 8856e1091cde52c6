"""Weight of evidence, information value and stability index, from counts.

Of a class c against all other rows, with n_b rows of c and m_b others in cell b, of N and M in all:

    weight of evidence  w_b = ln((n_b / N) / (m_b / M)), above 0 where c is more frequent than over all rows
    information value   sum over b of (n_b / N - m_b / M) w_b

Cells hold rows of every class, so that all logarithms are finite and no count is smoothed. Where a feature tells
nothing of the label, its information value is not 0 but about (cells - 1) (1/N + 1/M), which is stated beside it.

The stability index of a site against the rest is the same sum over shares of the site's rows and of the others', with
half a row added to every cell, because a site may have none in a cell.

Source: Siddiqi, Credit Risk Scorecards, chapters 6 and 12; Kullback, Information Theory and Statistics (divergence).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def weights_of_evidence(counts: Ints) -> Floats:
    """Return the weights of each class in each cell. Shapes: counts, result: [n_cells, n_classes]; counts above 0."""
    share, share_of_others = _shares(counts)
    weights: Floats = np.log(share / share_of_others)
    return weights


def information_values(counts: Ints) -> Floats:
    """Return the information value of each class. Shapes: counts: int64[n_cells, n_classes]; result: [n_classes]."""
    share, share_of_others = _shares(counts)
    values: Floats = ((share - share_of_others) * np.log(share / share_of_others)).sum(axis=0)
    return values


def values_by_chance(counts: Ints) -> Floats:
    """Return about what each class's information value would be if the feature told nothing. Shapes: [n_classes]."""
    of_class = counts.sum(axis=0).astype(np.float64)
    values: Floats = (counts.shape[0] - 1) * (1 / of_class + 1 / (of_class.sum() - of_class))
    return values


def stability_index(own: Ints, rest: Ints) -> float:
    """Return how far one site's rows lie from the others'. Shapes: own, rest: int64[n_cells], rows of each cell."""
    share, share_of_rest = ((rows + 0.5) / (rows + 0.5).sum() for rows in (own, rest))
    return float(((share - share_of_rest) * np.log(share / share_of_rest)).sum())


def _shares(counts: Ints) -> tuple[Floats, Floats]:
    others = counts.sum(axis=1, keepdims=True) - counts
    return counts / counts.sum(axis=0), others / others.sum(axis=0)
