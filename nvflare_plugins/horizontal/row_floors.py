"""The least number of rows behind what a horizontal job releases, as the sites' policies ask for it.

``SitePolicy.min_effective_rows`` and ``min_rows_per_node`` say what is promised, and what is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from he_processors.errors import PolicyRefusal
from nvflare_plugins.data_sets.table import Table
from nvflare_plugins.failures import DataRefusal, Decider, TooFewRows
from nvflare_plugins.horizontal.row_sampling import row_fraction
from nvflare_plugins.site.policy.values import Floors
from nvflare_plugins.wire.catalogue import Kind
from nvflare_plugins.wire.sums import ProtectedSums
from nvflare_plugins.xgb.node_floor import obeys_child_weight
from nvflare_plugins.xgb.parameters import TrainingParameters

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
    positive = [float(parameters.agreed.get("scale_pos_weight", 1.0)), *(1.0 for _ in tables[1:])]  # type: ignore[arg-type]
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
        raise TooFewRows(TOO_FEW, _decider(found, here, own.effective_rows, max(needed)))
    # This site's own floor: what others ask for beyond it is not a question to this site's rows.
    if not all(_carry_their_weight(weights, own.effective_rows / n_sites) for weights in of_rows):
        raise DataRefusal("few of this site's rows would carry nearly all of its weight: choose another weight column")
    return pooled


def _decider(found: NDArray[np.int64], here: NDArray[np.int64], own_floor: int, needed: int) -> Decider:
    """Say whose doing a refusal was. Shapes: found, here: int64[n_sets, 2], sites and rows, of all and of this site.

    A site that counts as many rows as its own policy asks for alone has told no more than that, whatever others count.
    """
    too_few = (found[:, 1] < own_floor) & (here[:, 1] < own_floor)
    if (too_few | (here[:, 0] == 0)).any():
        return Decider.OWN_ROWS
    return Decider.DEMAND if needed > own_floor else Decider.OTHERS


def row_weights(table: Table, positive: float) -> NDArray[np.float64]:
    """Return what each row counts. Shapes: float64[n_rows]. Args: positive: the factor of rows with label 1."""
    weights = np.ones(table.n_rows) if table.weight is None else table.weight.astype(np.float64)
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
    of_trees = _leaves(one_round)
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


def _leaves(one_round: xgb.Booster) -> list[NDArray[np.int64]]:
    """Return the numbers of each tree's leaves. Shapes: int64[n_leaves] each."""
    document = json.loads(one_round.save_raw("json"))["learner"]["gradient_booster"]
    found = []
    for tree in document.get("gbtree", document)["model"]["trees"]:
        left, right, leaves, to_do = tree["left_children"], tree["right_children"], [], [0]
        while to_do:
            node = to_do.pop()
            if left[node] == -1:
                leaves.append(node)
            else:
                to_do += [left[node], right[node]]
        found.append(np.array(sorted(leaves), dtype=np.int64))
    return found
