"""Floors over pooled rows: how many there must be, which are new, which take part in a tree."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from he_processors.errors import ConfigurationError
from he_processors.key_agreement import derive_key
from nvflare_plugins.attempt.site_attempt import Reservations
from nvflare_plugins.base.errors import DataRefusal, Decider, PolicyRefusal, TooFewRows
from nvflare_plugins.data.identity import row_tags
from nvflare_plugins.data.table import Table
from nvflare_plugins.growth.training import Draws
from nvflare_plugins.site.memory.registry import ADDED_ROWS, ADDED_SITES, Verdict
from nvflare_plugins.site.policy_values import Consents, Floors
from nvflare_plugins.wire.envelope import Kind
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb import stock as xgb
from nvflare_plugins.xgb.model_json import trees_model, walked_leaves
from nvflare_plugins.xgb.objectives import COX
from nvflare_plugins.xgb.parameters import TrainingParameters, obeys_child_weight

# Whether the rows that the sites have added since earlier jobs are enough for training again without consents.
#
# The difference of two runs is a sum over the added rows, which should say no more of them than a job on them alone. So
# at least three sites (more where policies ask for more) have to have added rows, ``registry.ADDED_ROWS`` in all, and
# no site may have put other rows in the place of those before. Nothing added anywhere is allowed, too: all that such a
# run could be compared with was released before. What is compared are counts under the job's protection.
#
# A job that trains a model again without persons (``forgets``) takes rows away in the place of adding some: the same
# holds of the rows that it leaves out, and of those that stay beside them (``site/memory/forgetting.py``).


N_COUNTS, N_OF_FORGETTING = 4, 6
_LEAST_OF_A_SITE = 10
"""A site with fewer added rows does not count among those that have some: its rows would not hide the others'."""


def may_grow(table: Table, draw: str, parameters: TrainingParameters) -> bool:
    """Tell whether added rows can be counted.

    Where rows weigh differently, or some are drawn, one may stand alone; so may one of few in a bin of times.
    """
    scale = parameters.number("scale_pos_weight", 1.0)
    alike = table.weight is None and not draw and scale == 1
    return alike and not parameters.objective.adaptive_leaf and parameters.objective.name != COX


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What one site knows of its training set.

    Attributes:
        asks: its registry allows the run only if the sites' counts do.
        consents: its policy would allow the run without; so it asks for nothing.
        is_new: no earlier job of the site concerns its rows, so that they took the place of others, if any did.
        n_rows: rows that no earlier job has used, or that this one leaves out, where it asks.
        n_left: of a job that leaves rows out, those of all earlier jobs that stay; else None.
    """

    asks: bool
    consents: bool
    is_new: bool
    n_rows: int
    n_left: int | None = None

    @classmethod
    def of(cls, reservations: Reservations, consents: Consents, *, forgets: bool = False) -> AddedRows:
        """Return what the registry found of the training set. Args: forgets: the job leaves persons out."""
        entry, n_left = reservations.entries[0], reservations.entries[0].n_left if forgets else None
        asks = entry.verdict in (Verdict.GROWN, Verdict.SHRUNK)
        return cls(asks, consents.recompute_with_changes, entry.verdict is Verdict.NEW, entry.n_added, n_left)

    def needs_consent(self, pooled: NDArray[np.int64], least_sites: int) -> bool:
        """Tell whether the consent alone lets this site go on."""
        as_asked = np.array([1, *pooled[1:]])
        return self.asks and self.consents and not are_enough(as_asked, least_sites)

    def counts(self) -> list[int]:
        """Return what this site adds to the sums; rows are counted no further than what is needed of all."""
        counts = [n for n in (self.n_rows, self.n_left) if n is not None]
        of_rows = [part for n in counts for part in (int(n >= _LEAST_OF_A_SITE), min(n, ADDED_ROWS))]
        return [int(self.asks and not self.consents), int(self.is_new), *of_rows]


def are_enough(pooled: NDArray[np.int64], least_sites: int) -> bool:
    """Tell, at all sites alike, whether a run with added rows may go on.

    Args:
        pooled: the sums of ``AddedRows.counts`` over the sites.
        least_sites: the most that any site's policy asks for.

    Shapes: pooled: int64[4], or int64[6] of a job that leaves rows out.
    """
    n_asking, n_new, *of_rows = map(int, pooled)
    if n_asking == 0 or of_rows[1] == 0:
        return n_asking == 0 or n_new == 0
    least = max(ADDED_SITES, least_sites)
    return n_new == 0 and all(n >= least for n in of_rows[::2]) and all(n >= ADDED_ROWS for n in of_rows[1::2])


# Which rows a round trains on: drawn by each site from a secret of its own, never from the job's seed.
#
# XGBoost draws a site's rows from the job's public seed. Whoever knows the seed knows the rows, and the sum over a few
# known rows is an answer about these very people. So XGBoost gets ``subsample=1`` and keeps its seed for columns and
# dropped trees, and each round the site sets the weights of the rows that it has not drawn to zero. That is what
# XGBoost's own sampling amounts to: it sets their gradient pairs to zero. First estimate, metrics and evaluation see
# the true weights.
#
# All trees of a round use the same rows. Under absolute and quantile error XGBoost takes weighted quantiles for the
# leaves, as it does for any weighted training.


_PURPOSE = "row sampling"


def row_fraction(parameters: TrainingParameters) -> float:
    """Return the job's ``subsample``, 1 if it has none."""
    return parameters.number("subsample", 1.0)


def check_sampling(parameters: TrainingParameters) -> None:
    """Refuse what the rows of a round cannot be drawn for. Raises: ConfigurationError."""
    if row_fraction(parameters) < 1 and int(parameters.effective.get("num_parallel_tree", 1)) > 1:
        raise ConfigurationError(
            "num_parallel_tree above 1 with subsample below 1: the parallel trees of a round would all get the same "
            "rows. Leave num_parallel_tree out, or subsample."
        )


class RowNumbers:
    """Numbers of this site's rows that nobody else can tell from random ones: a pseudorandom function of its secret.

    A row is known by the rank of its keyed hash, so that neither the order of the file nor a restart changes them.
    """

    def __init__(self, secret: bytes, table: Table, purpose: str) -> None:
        """Rank the rows. Args: secret: 32 bytes of this site, see ``Registry.secret``."""
        self._secret, self._purpose = secret, purpose
        # Rows that are equal share a hash, and which of them has which number makes no difference.
        tags = row_tags(table, derive_key(secret, b"", f"{purpose}: rows"))
        self._ranks = np.argsort(np.argsort(tags, kind="stable"), kind="stable")

    def of(self, what: str, *context: str | int) -> NDArray[np.uint64]:
        """Return the rows' numbers for one use. Shapes: uint64[n_rows]."""
        key = derive_key(self._secret, b"", f"{self._purpose}: {what}", *context)
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * self._ranks.size))
        numbers: NDArray[np.uint64] = np.frombuffer(stream, dtype="<u8")[self._ranks]
        return numbers


class RowDraws:
    """Draws the rows of each round.

    Security: a pseudorandom function of the site's secret, the round and the row; whoever lacks the secret cannot tell
        the draws from independent coins. The same secret, rows and round give the same draw: jobs that repeat each
        other draw the same rows, and their difference shows none.
    """

    def __init__(self, secret: bytes, table: Table, fraction: float, *, at_least_one: bool = False):
        """Draw from a secret.

        Args:
            secret: 32 bytes of this site, see ``Registry.secret``.
            table: this site's training rows.
            fraction: chance of a row, in (0, 1).
            at_least_one: where a round draws none of the rows with weight, one takes part all the same. XGBoost 3.2
                confuses the leaves of absolute and quantile error at a site without rows, and the models then differ.
        """
        self._numbers = RowNumbers(secret, table, _PURPOSE)
        self._at_least_one_of = None
        if at_least_one:
            weight = np.ones(table.n_rows, np.float32) if table.weight is None else table.weight
            self._at_least_one_of = np.flatnonzero(weight > 0)
        self._threshold = np.uint64(min(math.ceil(fraction * 2.0**64), 2**64 - 1))

    def of_round(self, number: int) -> NDArray[np.bool_]:
        """Return which rows take part in a round. Shapes: bool[n_rows]."""
        numbers = self._numbers.of("round", number)
        drawn = numbers < self._threshold
        candidates = self._at_least_one_of
        if candidates is not None and candidates.size and not drawn[candidates].any():
            drawn[candidates[np.argmin(numbers[candidates])]] = True
        return drawn


class SampledWeights:
    """The weights of the training matrix: the drawn rows' while XGBoost computes gradients, else the true ones."""

    def __init__(
        self,
        matrix: xgb.DMatrix,
        weight: NDArray[np.float32] | None,
        draws: Draws | None,
        *,
        estimates_base_score: bool,
    ):
        """Weigh the rows of a matrix.

        Args:
            matrix: what XGBoost trains on.
            weight: float32[n_rows], of the job's own; None for 1 each.
            draws: None, if every round trains on all rows: nothing is ever changed then.
            estimates_base_score: XGBoost's first update begins with an estimate from all rows.
        """
        self.matrix, self._weight, self._draws = matrix, weight, draws
        self._estimates = estimates_base_score
        self._number = 0

    def begin_update(self, number: int) -> None:
        """Set the weights of a round, unless XGBoost still has to estimate the base score."""
        self._number = number
        if not self._estimates:
            self._set_drawn()

    def base_score_known(self) -> None:
        """Set the weights of the first round: XGBoost has estimated the base score and waits for its tracker."""
        self._estimates = False
        self._set_drawn()

    def end_update(self) -> None:
        """Put the true weights back."""
        if self._draws is not None:
            self.matrix.set_weight(np.empty(0, np.float32) if self._weight is None else self._weight)

    def taking_part(self, number: int) -> NDArray[np.bool_]:
        """Return which rows have weight in a round. Shapes: bool[n_rows]."""
        has_weight = np.ones(self.matrix.num_row(), dtype=bool) if self._weight is None else self._weight > 0
        return has_weight if self._draws is None else has_weight & self._draws(number)

    def _set_drawn(self) -> None:
        if self._draws is not None:
            drawn = self._draws(self._number).astype(np.float32)
            self.matrix.set_weight(drawn if self._weight is None else drawn * self._weight)


# The least number of rows behind what a horizontal job releases, as the sites' policies ask for it.
#
# ``SitePolicy.min_effective_rows`` and ``min_rows_per_node`` say what is promised, and what is not.


TOO_FEW = (
    "too few rows or sites carry weight. Policy keys: min_effective_rows, min_sites, max_colluders, "
    "consents.fewer_than_three_sites. Remedy: train on more rows or at more sites, bring subsample nearer to one half "
    "or leave it out, choose weights (scale_pos_weight, too) that differ less, or ask the sites to lower the keys."
)
"""The same text at all sites, whatever was too few: it says neither where nor by how much."""
_ENOUGH_ROWS = 2.0**62  # nobody has so many


def largest_weight(sums: ProtectedSums, weights: list[NDArray[np.float32] | None]) -> list[float]:
    """Return a power of two that no weight exceeds at any site, for each set of rows; 1 without weights.

    Privacy: a secure maximum of exponents; each site learns the largest among the others.
    """
    if all(weight is None for weight in weights):
        return [1.0] * len(weights)
    exponents = sums.largest_exponents([1.0 if w is None else float(w.max(initial=0.0)) for w in weights])
    return [math.ldexp(1.0, exponent) for exponent in exponents]


def rows_needed(floors: Floors, parameters: TrainingParameters, n_sets: int) -> list[int]:
    """Return how many pooled rows must carry weight in each set of rows, the training set's first: public numbers."""
    fraction = row_fraction(parameters)
    share = fraction if fraction == 1 else min(fraction, 1 - fraction)
    in_training = math.ceil(min(floors.effective_rows / share, _ENOUGH_ROWS))
    return [in_training, *(floors.effective_rows for _ in range(n_sets - 1))]


def check_effective_rows(
    sums: ProtectedSums,
    floors: Floors,
    own: Floors,
    parameters: TrainingParameters,
    tables: list[Table],
    largest: list[float],
    n_sites: int,
    further: Sequence[int] = (),
) -> NDArray[np.int64]:
    """Have all sites together decide whether enough rows and sites carry weight.

    Where rounds draw some of the rows, enough must be left out as well: the difference of two rounds is a sum over the
    rows that one of them lacks, which two rounds with nearly all rows would show one by one.

    Args:
        floors: of all sites.
        own: of this site alone.
        tables: the training set and the evaluation set, if there is one: its metrics are sums over its rows.
        largest: see ``largest_weight``.
        further: counts that travel with these.

    Returns:
        The sums of all counts, those of the further ones at the end. Shapes: int64[2 n_sets + n_further].

    Privacy: two counts for each set: sites with positive weight, and effective rows, which no site counts beyond what
        is needed.

    Raises:
        TooFewRows: at all sites alike, with one text.
        DataRefusal: few of this site's own rows carry its weight. Other sites may lie about theirs.
    """
    needed = rows_needed(floors, parameters, len(tables))
    positive = [parameters.number("scale_pos_weight", 1.0), *(1.0 for _ in tables[1:])]
    counts, of_rows = [], []
    for table, top, factor, enough in zip(tables, largest, positive, needed, strict=True):
        weights = row_weights(table, factor)
        total = float(weights.sum()) / (top * max(1.0, factor))
        # A row of the largest weight is a site's least part: its exponent rounds it down to one half.
        counts += [int(total >= 0.5), min(math.floor(total), enough)]
        of_rows.append(weights)
    here = np.array(counts, dtype=np.int64).reshape(-1, 2)
    pooled = sums.sum_counts(Kind.EFFECTIVE_ROWS, np.array([*counts, *further], dtype=np.int64))
    found = pooled[: here.size].reshape(-1, 2)
    if (found[:, 0] < floors.sites).any() or (found[:, 1] < needed).any():
        raise TooFewRows(TOO_FEW, decider(found, here, own.effective_rows, max(needed)))
    # This site's own floor: what others ask for beyond it is not a question to this site's rows.
    if not all(_carry_their_weight(weights, own.effective_rows / n_sites) for weights in of_rows):
        raise DataRefusal("few of this site's rows would carry nearly all of its weight: choose another weight column")
    return pooled


def decider(found: NDArray[np.int64], here: NDArray[np.int64], own_floor: int, needed: int) -> Decider:
    """Say whose doing a refusal was. Shapes: found, here: int64[n_sets, 2], sites and rows, of all and of this site.

    A site that counts as many rows as its own policy asks for alone has told no more than that, whatever others count.
    """
    too_few = (found[:, 1] < own_floor) & (here[:, 1] < own_floor)
    if (too_few | (here[:, 0] == 0)).any():
        return Decider.OWN_ROWS
    return Decider.DEMAND if needed > own_floor else Decider.OTHERS


def row_weights(table: Table, positive: float = 1.0) -> NDArray[np.float64]:
    """Return what each row counts. Shapes: float64[n_rows]. Args: positive: the factor of rows with label 1."""
    weights = np.ones(len(table.label)) if table.weight is None else table.weight.astype(np.float64)
    return weights if positive == 1 else np.where(table.label == 1, weights * positive, weights)


def _carry_their_weight(weights: NDArray[np.float64], least: float) -> bool:
    """Tell whether this site's weight lies on so many rows, or on a quarter of its rows where it has few.

    The others' counts do not matter here: a site that claims rows which it does not have would otherwise get the sums
    over the few rows that a column of zeros and ones picks out. Measured by Kish's effective sample size.
    """
    top = float(weights.max(initial=0.0))
    if top == 0:
        return True
    shares = weights / top
    return float(shares.sum()) ** 2 / float(np.square(shares).sum()) >= min(least, weights.size / 4)


def counts_leaves(parameters: TrainingParameters, rows_per_node: int) -> bool:
    """Tell whether leaves are counted after each tree, because min_child_weight cannot keep them large enough."""
    return rows_per_node > 0 and not obeys_child_weight(parameters)


def leaf_counts(booster: xgb.Booster, matrix: xgb.DMatrix, takes_part: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count the rows in each leaf of the last round, tree by tree.

    Shapes: takes_part: bool[n_rows of matrix]; result: int64[leaves of the round's trees].
    """
    last = booster.num_boosted_rounds() - 1
    one_round = booster[last : last + 1]
    trees = trees_model(json.loads(one_round.save_raw("json"))["learner"])["trees"]
    of_trees = [np.array(sorted(walked_leaves(tree)), dtype=np.int64) for tree in trees]
    leaf_of = one_round.predict(matrix, pred_leaf=True).reshape(takes_part.size, len(of_trees))
    counts = []
    for column, leaves in zip(leaf_of[takes_part].astype(np.int64).T, of_trees, strict=True):
        counts.append(np.bincount(column, minlength=leaves.max() + 1)[leaves])
    return np.concatenate(counts).astype(np.int64)


def check_leaves(sums: ProtectedSums, counts: NDArray[np.int64], rows_per_node: int) -> None:
    """Add the rows in each leaf of the last round over all sites.

    Privacy: every site learns the pooled counts.

    Args:
        counts: those of this site's rows, see ``leaf_counts``.

    Raises:
        PolicyRefusal: at all sites alike, if some leaf holds fewer.
    """
    pooled = sums.sum_counts(Kind.LEAF_ROWS, counts)
    if pooled.min() < rows_per_node:
        raise PolicyRefusal(
            f"a leaf holds fewer than {rows_per_node} rows. Policy key: min_rows_per_node. Remedy: raise "
            "min_child_weight (not for multi_output_tree) or lower max_depth, or ask the sites to lower the key."
        )
