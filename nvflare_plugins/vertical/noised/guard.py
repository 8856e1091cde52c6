"""The guard of a passive party in the preset noised: it counts and caps split bits, which no noise covers.

Sums are paid for from the budget, so that neither floors on nodes nor caps on sums decide: the guarantee holds for a
node of one row as for one of many. A row that has shown as many split bits as the policy allows keeps the sums of its
nodes at home, as in guarded jobs, so that it is not divided any more.
"""

from __future__ import annotations

from dp_components.split_candidates.candidates import Columns
from he_processors.histogram.bins import BinCodes
from nvflare_plugins.site.memory.released_sums import Released
from nvflare_plugins.vertical.guards.guards import Guard, Step
from nvflare_plugins.vertical.passive.cut_points import CutPoints


class NoisedGuard(Guard):
    """Charges split bits durably; sums are the ledger's. Bins stay as the cut points are: those are paid for."""

    def check_bins(self, max_bin: int) -> None:
        """Allow any: the noise is on each."""

    def merge_rare_bins(self, cuts: CutPoints, columns: Columns) -> CutPoints:
        """Merge none: which bins are rare would be told without noise."""
        return cuts

    def codes(self, cuts: CutPoints, columns: Columns) -> BinCodes:
        """Return the bins of the training rows, a missing value in none. Shapes: as ``Guard.codes``."""
        return cuts.codes(columns)

    def _admit(self, released: Released, step: Step) -> bool:
        most = self._rules.max_split_bits_per_row
        if any(rows.size and released.split_bits[rows].max() >= most for rows in step.sets):
            self._n_withheld += len(step.sets)
            return False
        self._n_sums += step.n_sums * len(step.sets)
        self._n_released += len(step.sets)
        return True
