"""Queries of a ranking: which rows of a site are ranked together, and what the sites agree on of all queries.

A query's rows lie at one site. Equal names at two sites are two queries, as they are in tables that number their
queries by themselves; a query whose rows are at several sites is ranked in parts, which no site can see. Where names
mean the same at all sites, ``check_apart`` finds such queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.fixed_point import exponent_of
from nvflare_plugins.base.errors import DataRefusal
from nvflare_plugins.data.declaration import DataSet
from nvflare_plugins.data.table import Table, log_count
from nvflare_plugins.growth.ranking import PairRules, Queries
from nvflare_plugins.growth.site_sums import WIDE_BITS, rows_on_grid
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import Family, ProtectedSums
from nvflare_plugins.xgb.objectives import Task
from nvflare_plugins.xgb.parameters import TrainingParameters


def queries_of(parameters: TrainingParameters, table: Table, spec: DataSet) -> Queries | None:
    """Return the queries of a table, where rows are ranked; None elsewhere.

    Raises:
        DataRefusal: a row has no query, or rows of one query have unlike weights.
    """
    if parameters.objective.task is not Task.RANKING:
        return None
    try:
        numbers, _ = table.group_numbers(spec.missing)
    except DataRefusal:
        raise DataRefusal("the query column lacks values: remove those rows, or give each a query of its own") from None
    found = Queries.of(numbers, table.weight)
    if table.weight is not None and not np.array_equal(found.weight[numbers], table.weight):  # type: ignore[index]
        raise DataRefusal("the weights of some query differ from row to row: a query has one weight, the same in each")
    return found


def counted_rows(table: Table, queries: Queries | None) -> Table:
    """Return the table with the weight 0 for rows of queries whose labels are all alike: they have no gradient.

    A column that leaves all others alone would pick a few rows out, as weights of 0 would.
    """
    if queries is None:
        return table
    weight = np.ones(table.n_rows, np.float32) if table.weight is None else table.weight
    return dataclasses.replace(table, weight=np.where(queries.have_pairs(table.label), weight, np.float32(0)))


def asked_counts(queries: Queries, parameters: TrainingParameters, rank: int, world: int) -> list[int]:
    """Return what this site adds to the counts of rows. Args: rank: its number, of so many sites (``world``).

    Privacy: under ``mean``, which draws pairs by the number of a query among all, the number of each site's queries
        becomes known to all sites; with weights, that of all sites together; else nothing.
    """
    if not PairRules.of(parameters.agreed).is_mean:
        return [queries.n] if queries.weight is not None else []
    return [queries.n if one == rank else 0 for one in range(world)]


def place_queries(
    queries: Queries, counted: NDArray[np.int64], rank: int, sums: ProtectedSums, largest_weight: float
) -> Queries:
    """Return this site's queries as some of all sites'; with weights after one more sum.

    Args:
        counted: the sums over all sites of what was asked for.
        largest_weight: no weight of any site is above it, a power of two.

    Privacy: every site learns the sum of the weights of all queries.
    """
    first = int(counted[:rank].sum()) if counted.size > 1 else 0
    n_all, total = int(counted.sum()), 0.0
    if queries.weight is not None:
        name, exponent = str(Family.WEIGHTS), exponent_of(largest_weight) + n_all.bit_length() - WIDE_BITS
        own = rows_on_grid(name, queries.weight.astype(np.float64), exponent, n_all).sum(dtype=np.int64)
        pooled = sums.add(Kind.LABEL_MEAN, np.array([own], dtype=np.int64), 1, wide=True)
        total = float(np.ldexp(float(pooled[0]), exponent))
    return queries.among(first, n_all, total)


_SLOTS_OF_EACH = 8
_LEAST_SLOTS = 1024
_PASSES = 4
"""Of n queries whose names are all different, n / 8^4 / 8^3 or so share a slot in three passes, and none in four."""

SPREAD = (
    "query: some queries have rows at several sites, or are called alike there. Bring a query's rows to one site, or "
    "let names tell sites apart"
)


def check_apart(sums: ProtectedSums, hashed: Callable[[str, bytes], bytes], names: Sequence[str]) -> None:
    """Refuse queries whose name stands at several sites; every site decides alike.

    Args:
        hashed: (purpose, bytes) -> what all sites make of them, and the server cannot (``Session.hmac``).
        names: of this site's queries, each once.

    Privacy: each site learns which of its queries stand at another one, and the number of all queries. Who guesses a
        name can test whether some site has a query in its slot.

    Raises:
        ConfigurationError: some do.
    """
    n_all = int(sums.sum_counts(Kind.QUERY_SLOTS, np.array([len(names)], dtype=np.int64))[0])
    n_slots = max(_LEAST_SLOTS, 1 << max(_SLOTS_OF_EACH * n_all - 1, 0).bit_length())
    left = list(names)
    for number in range(_PASSES):
        slots = [int.from_bytes(hashed(f"queries {number}", one.encode())[:8], "little") % n_slots for one in left]
        used = np.zeros(n_slots, dtype=np.int64)
        used[slots] = 1
        pooled = sums.sum_counts(Kind.QUERY_SLOTS, used)
        left = [one for one, slot in zip(left, slots, strict=True) if pooled[slot] > 1]
    if int(sums.sum_counts(Kind.QUERY_SLOTS, np.array([int(bool(left))], dtype=np.int64))[0]):
        log_count("queries whose name stands at another site, too", len(left), len(names))
        raise ConfigurationError(SPREAD)
