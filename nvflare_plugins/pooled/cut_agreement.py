"""How the sites of one job come to their cut points: searched together, kept from an earlier job, or spaced."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.pooled.growing import check_words
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.preparation import Prepared
from nvflare_plugins.site.memory.registry import Registry, Reservation
from nvflare_plugins.wire.channel import Channel
from nvflare_plugins.wire.envelope import Kind, pack_list
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.cuts import CutMode, Cuts, PassedValues, SortedValues, search_quantiles, spaced_cuts

_log = logging.getLogger(__name__)

Prove = Callable[[int, str, bytes], bytes]
"""Returns what the site of a rank shows to prove that it holds some data, for a purpose."""


class CutAgreement:
    """The cut points of one job at one site.

    Attributes:
        rows: pooled number of rows, and then of values of each feature, once ``run`` has asked. Shapes:
            int64[1 + n_features].

    Privacy: every site learns the pooled number of rows, of values per feature, and the counts of the search.
    """

    def __init__(
        self,
        job: HorizontalJob,
        prepared: Prepared,
        channel: Channel,
        registry: Registry,
        reservation: Reservation,
        prove: Prove,
        kept: Cuts | None = None,
    ):
        """Prepare to agree; ``kept`` are the cuts of what the job goes on from, the same at all sites."""
        self._job = job
        self._table = prepared.table
        self._parameters = prepared.parameters
        self._max_bin = prepared.parameters.max_bin
        self._kept = kept
        self._channel = channel
        self._registry = registry
        self._reservation = reservation
        self._prove = prove
        self.rows = np.zeros(1, dtype=np.int64)

    def run(self, sums: ProtectedSums) -> tuple[Cuts, int | None]:
        """Return the cuts and a feature that no site lacks values in, if there is one.

        Raises:
            ConfigurationError: there are more pooled rows than the job's words are for.
        """
        table = self._table
        local = np.array([table.n_rows, *(table.n_rows - np.asarray(table.n_missing))], dtype=np.int64)
        self.rows = sums.sum_counts(Kind.CUT_COUNTS, local)
        check_words(self._job, self._parameters, int(self.rows[0]))
        dense = np.flatnonzero(self.rows[1:] == self.rows[0])
        root_feature = int(dense[0]) if dense.size else None
        if self._kept is not None:
            return self._kept, root_feature
        mode = CutMode(self._job.cuts)
        if mode in (CutMode.UNIFORM, CutMode.LOGARITHMIC):
            return self._space(mode), root_feature
        return self._search(sums, mode), root_feature

    def _space(self, mode: CutMode) -> Cuts:
        """Space the cuts by the job's public bounds.

        A job could otherwise narrow its bins around single rows, step by step: the registry treats other bounds for
        the same rows like a second search.
        """
        job, table = self._job, self._table
        numeric = [name for name in table.feature_names if name not in table.categories]
        found = dict(zip(numeric, spaced_cuts(numeric, job.cut_bounds, self._max_bin, mode).of_feature, strict=True))
        bounds = {name: job.cut_bounds[name] for name in numeric}
        settings = json.dumps({"mode": job.cuts, "max_bin": self._max_bin, "bounds": bounds}, sort_keys=True).encode()
        plan = self._registry.plan_cuts(self._reservation, numeric, settings)
        if plan.to_search:
            self._registry.save_cuts(self._reservation, {name: found[name] for name in plan.to_search})
        return _spread(found, table.feature_names)

    def _search(self, sums: ProtectedSums, mode: CutMode) -> Cuts:
        """Search the pooled quantiles, or reuse the cuts that an earlier job of the same sites found."""
        job, table = self._job, self._table
        max_bin = self._max_bin
        # A categorical column has one bin per public category, and nothing to search.
        numeric = [position for position, kind in enumerate(table.feature_types) if kind != "c"]
        names = [table.feature_names[position] for position in numeric]
        floor = None if mode is CutMode.EXACT else job.min_rows_per_cut
        settings = json.dumps({"max_bin": max_bin, "min_rows": floor}).encode()
        plan = self._registry.plan_cuts(self._reservation, names, settings)
        known = pack_list([name.encode() + plan.known[name].tobytes() for name in names if name in plan.known])
        proofs = self._channel.gather(Kind.CUT_PLAN, self._prove(self._channel.rank, "cut plan", known))
        all_know = all(proof == self._prove(rank, "cut plan", known) for rank, proof in enumerate(proofs))
        if not plan.to_search and all_know:
            _log.info("the cut points of an earlier job of these sites are used again")
            return _spread(dict(plan.known), table.feature_names)
        # Where a site has lost its memory, the same search is simply done again: it releases the same counts.
        started = time.perf_counter()
        counted = (
            SortedValues(table.features[:, numeric]) if table.passes is None else PassedValues(table.blocks, numeric)
        )
        cuts = search_quantiles(counted, max_bin, floor, lambda counts: sums.sum_counts(Kind.CUT_COUNTS, counts))
        found = dict(zip(names, cuts.of_feature, strict=True))
        if plan.to_search:
            self._registry.save_cuts(self._reservation, {name: found[name] for name in plan.to_search})
        n_cuts, seconds = sum(c.size for c in cuts.of_feature), time.perf_counter() - started
        _log.info("agreed on %d cut points of %d numeric features in %.1f s", n_cuts, len(names), seconds)
        return _spread(found, table.feature_names)


def _spread(found: Mapping[str, NDArray[np.float32]], names: Sequence[str]) -> Cuts:
    """Return cuts for all columns; those without a search have none."""
    return Cuts(tuple(found.get(name, np.empty(0, dtype=np.float32)) for name in names))
