"""Whether the rows that the sites have added since earlier jobs are enough for training again without consents.

The difference of two runs is a sum over the added rows, which should say no more of them than a job on them alone. So
at least three sites (more where policies ask for more) have to have added rows, ``registry.ADDED_ROWS`` in all, and no
site may have put other rows in the place of those before. Nothing added anywhere is allowed, too: all that such a run
could be compared with was released before. What is compared are counts under the job's protection.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.attempt.reservations import Reservations
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.site.memory.registry import ADDED_ROWS, ADDED_SITES, Verdict
from nvflare_plugins.site.policy.values import Consents
from nvflare_plugins.xgb.parameters import TrainingParameters

N_COUNTS = 4
_LEAST_OF_A_SITE = 10
"""A site with fewer added rows does not count among those that have some: its rows would not hide the others'."""


def may_grow(table: Table, draw: str, parameters: TrainingParameters) -> bool:
    """Tell whether added rows can be counted: where rows weigh differently, or some are drawn, one may stand alone."""
    scale = float(parameters.agreed.get("scale_pos_weight", 1.0))  # type: ignore[arg-type]
    return table.weight is None and not draw and scale == 1 and not parameters.objective.adaptive_leaf


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What one site knows of its training set.

    Attributes:
        asks: its registry allows the run only if the sites' counts do.
        consents: its policy would allow the run without; so it asks for nothing.
        is_new: no earlier job of the site concerns its rows, so that they took the place of others, if any did.
        n_rows: rows that no earlier job has used, where it asks.
    """

    asks: bool
    consents: bool
    is_new: bool
    n_rows: int

    @classmethod
    def of(cls, reservations: Reservations, consents: Consents) -> AddedRows:
        """Return what the registry found of the training set."""
        entry = reservations.entries[0]
        asks = entry.verdict is Verdict.GROWN
        return cls(asks, consents.recompute_with_changes, entry.verdict is Verdict.NEW, entry.n_added)

    def needs_consent(self, pooled: NDArray[np.int64], least_sites: int) -> bool:
        """Tell whether the consent alone lets this site go on."""
        as_asked = np.array([1, *pooled[1:]])
        return self.asks and self.consents and not are_enough(as_asked, least_sites)

    def counts(self) -> list[int]:
        """Return what this site adds to the sums; rows are counted no further than what is needed of all."""
        is_some = self.n_rows >= _LEAST_OF_A_SITE
        return [int(self.asks and not self.consents), int(self.is_new), int(is_some), min(self.n_rows, ADDED_ROWS)]


def are_enough(pooled: NDArray[np.int64], least_sites: int) -> bool:
    """Tell, at all sites alike, whether a run with added rows may go on.

    Args:
        pooled: the sums of ``AddedRows.counts`` over the sites.
        least_sites: the most that any site's policy asks for.

    Shapes: pooled: int64[4].
    """
    n_asking, n_new, n_sites, n_rows = map(int, pooled)
    if n_asking == 0 or n_rows == 0:
        return n_asking == 0 or n_new == 0
    return n_new == 0 and n_sites >= max(ADDED_SITES, least_sites) and n_rows >= ADDED_ROWS
