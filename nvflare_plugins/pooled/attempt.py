"""How every job over pooled rows begins at a site: agree, reserve, open sums, hold to floors, agree on cut points.

The order carries security. Nothing that depends on rows leaves the site before the policy has allowed the job, all
sites are authenticated, their terms are equal and every registry has allowed the run. A run that ends before sums of
rows have left is remembered nowhere. Nothing but counts leaves before enough rows and sites stand behind the sums.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from nvflare_plugins.attempt.session import ARITHMETIC, PLUGIN, Terms, agree, versions
from nvflare_plugins.attempt.site_attempt import Reservations, SiteAttempt, reserve_together
from nvflare_plugins.base.errors import DataRefusal, PolicyRefusal
from nvflare_plugins.data.schema import Schema
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.arithmetic import grown_document
from nvflare_plugins.growth.training import Draws
from nvflare_plugins.pages.run_record import ReportSection
from nvflare_plugins.pooled import row_floors
from nvflare_plugins.pooled.growing import Grown, arithmetic_here, check_words
from nvflare_plugins.pooled.job import HorizontalJob
from nvflare_plugins.pooled.preparation import Prepared
from nvflare_plugins.pooled.processors import open_sums
from nvflare_plugins.pooled.queries import asked_counts, check_apart, counted_rows, place_queries
from nvflare_plugins.pooled.value_bounds import coarsest_pairs, row_bounds, value_bounds
from nvflare_plugins.site.data_refusals import Question, RefusalCount
from nvflare_plugins.site.memory.registry import Registry, Reservation, ResumePoint, Wanted
from nvflare_plugins.site.policy_values import Floors
from nvflare_plugins.wire.envelope import Kind, pack_list
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.workers.workers import Workers, work_section
from nvflare_plugins.xgb.cuts import CutMode, Cuts, PassedValues, SortedValues, search_quantiles, spaced_cuts
from nvflare_plugins.xgb.parameters import TrainingParameters

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class Agreement:
    """What the sites have agreed on before they train or count.

    Attributes:
        root_feature: a feature that no site lacks values in, if there is one.
        rows: pooled number of rows, and then of values of each feature; none where an attempt goes on without a site.
            Shapes: int64[1 + n_features].
    """

    sums: ProtectedSums
    cuts: Cuts
    root_feature: int | None
    rows: NDArray[np.int64]


class PooledAttempt:
    """The steps of one attempt once its session is open; each kind of job adds its own.

    Attributes:
        COUNTS_ADDED: rows added since earlier jobs are counted, so that a run over enough of them needs no consent.
    """

    COUNTS_ADDED: ClassVar[bool] = True

    def __init__(
        self,
        attempt: SiteAttempt,
        rows: Prepared,
        training: HorizontalJob,
        *,
        is_grown: bool,
        workers: Workers | None = None,
    ) -> None:
        """Begin.

        Args:
            training: that the job is, or that says which rows and cut points it looks at.
            is_grown: the sites grow the trees themselves.
        """
        self._attempt, self._rows, self._training, self._workers = attempt, rows, training, workers
        self._context, self._policy, self._world = attempt.context, attempt.context.policy, attempt.channel.world
        self._parameters, self._is_grown = rows.parameters, is_grown
        self._registry = Registry.open(self._policy)
        self._reservations = Reservations(self._registry)
        self._floors = self._policy.floors(self._world)  # of all sites, once these have agreed
        self._arithmetic = ""  # in which the sites grow the trees, once they have agreed; "" where XGBoost does
        self._queries = rows.queries  # those of the training rows among those of all sites, once these are counted
        self._found: tuple[tuple[float, ...], tuple[int, ...]] = ((), ())  # largest weights; what was counted

    def begin(self) -> Agreement:
        """Do all that comes before training or counting."""
        attempt, training = self._attempt, self._training
        n_done, self._floors, self._arithmetic = agree(attempt.channel, attempt.session, self._terms())
        self._take_terms(n_done)
        self._reservations = self._reserve(n_done)
        with self._reservations.cancelled_by(BaseException):  # keys may travel, nothing of rows
            sums = open_sums(
                self._rows.chosen.profile,
                attempt.channel,
                attempt.session,
                training.finest_exponent,
                training.word_bits,
            )
        self._check_floors(sums)
        if training.compare_queries:
            with self._reservations.cancelled_by(ConfigurationError):
                for table, spec in self._rows.tables():
                    check_apart(sums, attempt.session.hmac, table.group_numbers(spec.missing)[1])
        return self._agree_on_cuts(sums, n_done)

    # -- what a kind says of itself -----------------------------------------------------------------------------------

    def _documents(self) -> dict[str, object]:
        """Return the parameters that all sites must have alike."""
        return grown_document(self._parameters) if self._is_grown else self._parameters.document()

    def _starts(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return start and checkpoints of the ``Terms``."""
        return {}, {}

    def _take_terms(self, n_done: int) -> None:
        """Take note of what the sites have agreed on. Args: n_done: finished rounds of the last common checkpoint."""

    def _wanted(self) -> list[Wanted]:
        """Return what the run wants to look at, the training set first."""
        grows = row_floors.may_grow(self._rows.table, "", self._parameters)
        return [Wanted(self._rows.table, self._rows.data_set, may_grow=grows, is_settled=True)]

    def _release(self) -> dict[str, object]:
        """Return what decides what the run releases about the rows, for the registry."""
        raise NotImplementedError

    def _resume(self, n_done: int) -> ResumePoint | None:
        """Return where the run goes on; None where it begins."""
        return None

    def _most_rows_needed(self, floors: Floors) -> int:
        """Return how many pooled rows the run needs where it needs most."""
        return max(row_floors.rows_needed(floors, self._parameters, len(self._tables())))

    def _take_largest_weights(self, largest: Sequence[float]) -> None:
        """Take note of the largest weight of each set of rows."""

    def _check_parts(self, sums: ProtectedSums) -> None:
        """Hold parts of the rows to floors, too."""

    def _kept_cuts(self, n_done: int) -> Cuts | None:
        """Return the cut points of what the run goes on from, the same at all sites."""
        return None

    # -- terms, registry, floors --------------------------------------------------------------------------------------

    def _tables(self) -> list[Table]:
        return [one for one in (self._rows.table, self._rows.eval_table) if one is not None]

    def _terms(self) -> Terms:
        releases = {**versions(), PLUGIN: self._rows.chosen.release}
        if self._is_grown:
            releases[ARITHMETIC] = arithmetic_here(self._training)
        job, schema = self._attempt.job.stated(), Schema.of(self._rows.table)
        return Terms(releases, job, self._documents(), schema, *self._starts(), self._floors)

    def _reserve(self, n_done: int) -> Reservations:
        """Have all sites' registries allow this run and remember it, before the first private byte."""
        release = json.dumps(self._release(), sort_keys=True).encode()
        return reserve_together(self._attempt, self._registry, self._wanted(), release, self._resume(n_done))

    def _check_floors(self, sums: ProtectedSums) -> None:
        """Go on if enough rows and sites carry weight; every site decides alike, and a refused run is not remembered.

        Privacy: a refusal releases counts that are capped at what was needed, and powers of two above the weights. So
            are the counts of rows that were added since earlier jobs; all sites learn how many have added some.
        """
        with self._reservations.cancelled_by(PolicyRefusal, DataRefusal):
            floors, own, tables = self._floors, self._policy.floors(self._world), self._tables()
            if self._parameters.objective.adaptive_leaf:  # see ``RowDraws``: every site must have rows
                floors = dataclasses.replace(floors, sites=self._world)
            if floors.sites > self._world:  # no row can change that
                raise PolicyRefusal(row_floors.TOO_FEW)
            if self._most_rows_needed(floors) > own.effective_rows:
                names = {data_set.name for _, data_set in self._rows.tables()}
                RefusalCount(self._policy).check(names, Question.DEMAND)
            largest = row_floors.largest_weight(sums, [table.weight for table in tables])
            self._take_largest_weights(largest)
            added = row_floors.AddedRows.of(
                self._reservations, self._policy.consents, forgets=self._training.forgets is not None
            )
            further = added.counts() if self.COUNTS_ADDED else ()
            tables = [counted_rows(*one) for one in zip(tables, self._queries, strict=False)]
            counted = row_floors.check_effective_rows(
                sums, floors, own, self._parameters, tables, largest, self._world, further
            ).tolist()
            self._found = tuple(largest), tuple(counted[: 2 * len(tables)])
            self._check_parts(sums)
            pooled = np.array(counted[2 * len(tables) :])
            if self.COUNTS_ADDED and added.needs_consent(pooled, floors.sites):
                self._policy.consents.gives("recompute_with_changes")
            self._reservations.grown(is_enough=not self.COUNTS_ADDED or row_floors.are_enough(pooled, floors.sites))

    # -- cut points ---------------------------------------------------------------------------------------------------

    def _agree_on_cuts(self, sums: ProtectedSums, n_done: int) -> Agreement:
        """Agree on cut points: searched together, kept from an earlier job, or spaced.

        Privacy: every site learns the pooled number of rows, of values per feature, and the counts of the search; of a
            ranking also what ``asked_counts`` and ``place_queries`` say.

        Raises:
            ConfigurationError: there are more pooled rows than the job's words are for.
        """
        table, mode = self._rows.table, CutMode(self._training.cuts)
        local = np.array([table.n_rows, *(table.n_rows - np.asarray(table.n_missing))], dtype=np.int64)
        channel, queries = self._attempt.channel, self._rows.queries[0]
        of_queries = [] if queries is None else asked_counts(queries, self._parameters, channel.rank, self._world)
        pooled = sums.sum_counts(Kind.CUT_COUNTS, np.array([*local, *of_queries], dtype=np.int64))
        rows = pooled[: local.size]
        if queries is not None:
            placed = place_queries(queries, pooled[local.size :], channel.rank, sums, self._found[0][0])
            self._queries = placed, self._queries[1]
        check_words(self._training, self._rows.parameters, int(rows[0]))
        dense = np.flatnonzero(rows[1:] == rows[0])
        cuts = self._kept_cuts(n_done)
        if cuts is None:
            is_spaced = mode in (CutMode.UNIFORM, CutMode.LOGARITHMIC)
            cuts = self._spaced_cuts(mode) if is_spaced else self._searched_cuts(sums, mode)
        cuts = self._with_own_thresholds(cuts)
        self._attempt.folder.write_cuts(cuts)
        return Agreement(sums, cuts, int(dense[0]) if dense.size else None, rows)

    def _with_own_thresholds(self, cuts: Cuts) -> Cuts:
        """Return the cut points with those that the run's model already has."""
        return cuts

    def _spaced_cuts(self, mode: CutMode) -> Cuts:
        """Space the cuts by the job's public bounds.

        A job could otherwise narrow its bins around single rows, step by step: the registry treats other bounds for
        the same rows like a second search.
        """
        job, table, max_bin = self._training, self._rows.table, self._rows.parameters.max_bin
        numeric = [name for name in table.feature_names if name not in table.categories]
        found = dict(zip(numeric, spaced_cuts(numeric, job.cut_bounds, max_bin, mode).of_feature, strict=True))
        bounds = {name: job.cut_bounds[name] for name in numeric}
        settings = json.dumps({"mode": job.cuts, "max_bin": max_bin, "bounds": bounds}, sort_keys=True).encode()
        plan = self._registry.plan_cuts(self._reservations.entries[0], numeric, settings)
        self._remember_cuts(self._reservations.entries[0], plan.to_search, found)
        return _spread(found, table.feature_names)

    def _searched_cuts(self, sums: ProtectedSums, mode: CutMode) -> Cuts:
        """Search the pooled quantiles, or reuse the cuts that an earlier job of the same sites found."""
        job, table, max_bin = self._training, self._rows.table, self._rows.parameters.max_bin
        # A categorical column has one bin per public category, and nothing to search.
        numeric = [position for position, kind in enumerate(table.feature_types) if kind != "c"]
        names = [table.feature_names[position] for position in numeric]
        floor = None if mode is CutMode.EXACT else job.min_rows_per_cut
        settings = json.dumps({"max_bin": max_bin, "min_rows": floor}).encode()
        entry = self._reservations.entries[0]
        to_search, known = self._planned_search(entry, names, settings)
        if known is not None:
            return _spread(known, table.feature_names)
        started = time.perf_counter()
        counted = (
            SortedValues(table.features[:, numeric]) if table.passes is None else PassedValues(table.blocks, numeric)
        )
        cuts = search_quantiles(counted, max_bin, floor, lambda counts: sums.sum_counts(Kind.CUT_COUNTS, counts))
        found = dict(zip(names, cuts.of_feature, strict=True))
        self._remember_cuts(entry, to_search, found)
        n_cuts, seconds = sum(c.size for c in cuts.of_feature), time.perf_counter() - started
        _log.info("agreed on %d cut points of %d numeric features in %.1f s", n_cuts, len(names), seconds)
        return _spread(found, table.feature_names)

    def _planned_search(
        self, entry: Reservation, names: Sequence[str], settings: bytes
    ) -> tuple[tuple[str, ...], dict[str, NDArray[np.float32]] | None]:
        """Return the columns to search, and what an earlier job of these sites found, if all sites remember it all.

        Where a site has lost its memory, the same search is simply done again: it releases the same counts.
        """
        channel, prove = self._attempt.channel, self._attempt.proof
        plan = self._registry.plan_cuts(entry, names, settings)
        known = pack_list([name.encode() + plan.known[name].tobytes() for name in names if name in plan.known])
        proofs = channel.gather(Kind.CUT_PLAN, prove(channel.rank, "cut plan", known))
        all_know = all(proof == prove(rank, "cut plan", known) for rank, proof in enumerate(proofs))
        if plan.to_search or not all_know:
            return plan.to_search, None
        _log.info("the cut points of an earlier job of these sites are used again")
        return (), dict(plan.known)

    def _remember_cuts(
        self, entry: Reservation, names: Sequence[str], found: Mapping[str, NDArray[np.float32]]
    ) -> None:
        if names:
            self._registry.save_cuts(entry, {name: found[name] for name in names})

    # -- what trainings share -----------------------------------------------------------------------------------------

    def _agree_scales(self, sums: ProtectedSums, parameters: TrainingParameters, tables: Sequence[Table]) -> None:
        """Agree on the scales of a training's sums. Args: tables: the rows that are trained on first."""
        bounds = value_bounds(parameters, tables)
        if self._arithmetic:
            bounds |= row_bounds(parameters, tables[0], self._queries[0])
        sums.agree_scales(bounds, coarsest_pairs(parameters, weighted=tables[0].weight is not None))

    def _counted_leaves(self, parameters: TrainingParameters) -> int | None:
        """Return the least rows of a leaf, where these are counted after each tree; else None."""
        floor = self._floors.rows_per_node
        return floor if row_floors.counts_leaves(parameters, floor) else None

    def _grown(
        self, parameters: TrainingParameters, cuts: Cuts, n_rows: int, table: Table, sets: tuple[str, ...]
    ) -> Grown:
        """Return a training whose trees the sites grow. Args: sets: names of the evaluation sets."""
        finest, least = self._training.finest_exponent, self._counted_leaves(parameters)
        return Grown(parameters, self._arithmetic, cuts, n_rows, table, finest, least, sets, queries=self._queries)

    def _draws_of(self, parameters: TrainingParameters, table: Table, sites: Sequence[str]) -> Draws | None:
        """Return how this site draws the rows of each round; None if it takes them all."""
        fraction = row_floors.row_fraction(parameters)
        if fraction == 1:
            return None
        secret = self._registry.secret("row sampling", repr(fraction), *sorted(sites))
        adaptive = parameters.objective.adaptive_leaf
        return row_floors.RowDraws(secret, table, fraction, at_least_one=adaptive).of_round

    # -- for the run's record -----------------------------------------------------------------------------------------

    def _record_of(self, cuts: Cuts) -> dict[str, Any]:
        """Return what the run's record says of registry and cut points."""
        points, job = sum(of_feature.size for of_feature in cuts.of_feature), self._training
        return {
            "registry": self._reservations.message,
            "cuts": {"mode": job.cuts, "points": points, "min_rows": job.min_rows_per_cut},
        }

    def _work_sections(self) -> tuple[ReportSection, ...]:
        return () if self._workers is None else (work_section(self._workers.work),)


def _spread(found: Mapping[str, NDArray[np.float32]], names: Sequence[str]) -> Cuts:
    """Return cuts for all columns; those without a search have none."""
    return Cuts(tuple(found.get(name, np.empty(0, dtype=np.float32)) for name in names))
