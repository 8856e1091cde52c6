"""What a site can rebuild of the other sites' rows from horizontal training, with and without privacy: an illustration.

    python -m tests.bench.reconstruction                      credit2 of the shared data
    python -m tests.bench.reconstruction adult --rows 300
    python -m tests.bench.reconstruction /path/to/table.parquet

In the manner of TimberStrike (Di Gennaro et al., arXiv 2506.07605), but much smaller: one exact step instead of an
optimisation. The adversary is a site. In ordinary horizontal training it knows the trees and, once its own part is
taken away, the sums of gradients and Hessians of the other sites' rows in every leaf.

* A leaf that holds a single row shows it: for one row H = |G| (1 - |G|). The sign of G is the row's class, and G itself
  its score, to seven digits.
* That score is the sum of one output of each tree before. Hardly ever do two ways through those trees have the same
  sum, so the row's leaf in every one of them is known, and the row lies where all their boxes of thresholds meet.
* Each value is then guessed as the median of the adversary's own values between the thresholds.

A row counts as found if exactly this row is in the box; a value as rebuilt if it is within 5 % of the true one, in
ranks. The same guesses without any box, the medians of the adversary's own rows of that class, say what is no
reconstruction. The server learns nothing of this under masks; sites that collude against one learn that one's rows.

Under noise no leaf looks like a single row, and this attack finds nothing; that alone would prove nothing, the audit is
in tests/audit. Feature bounds are taken from the rows; delta is 1e-6. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from dp_components.accounting import gaussian_limit
from dp_components.events import Release
from dp_components.leaf_weights import UNIT
from dp_components.mechanisms import add_gaussian_noise
from dp_components.sensitivity import Sensitivity
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.kinds.private_trees.methods import DEFAULT_2026_12
from nvflare_plugins.kinds.private_trees.noisy_sums import Mechanism
from tests.bench.dp_data import load
from tests.bench.membership_inference import no_noise
from tests.support.private_simulation import Simulation, Table
from tests.support.private_trees import plan_with

DELTA, WITHIN = 1e-6, 0.05
MAX_TREES, MAX_WAYS = 12, 200_000
EPSILONS = (1.0, 0.5)
PARAMETERS = {
    "objective": "binary:logistic",
    "max_depth": 6,
    "eta": 0.3,
    "lambda": 1.0,
    "base_score": 0.5,
    "min_child_weight": 0,
    "tree_method": "hist",
    "nthread": 1,
    "verbosity": 0,
}
Floats = NDArray[np.float64]
Columns = NDArray[np.float32]


@dataclass(frozen=True)
class SeenTree:
    """A tree with its leaf sums, as the adversary sees it.

    Shapes: low, high: float32[n_leaves, n_features], the leaf's box low <= x < high; sums: float64[n_leaves, 2] of
        (G, H); outputs: float64[n_leaves].
    """

    low: Columns
    high: Columns
    sums: Floats
    outputs: Floats


@dataclass(frozen=True)
class FoundRow:
    """A row's class and the box it must lie in. Shapes: low, high: float32[n_features]."""

    label: int
    low: Columns
    high: Columns
    path: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """Rows that the adversary claims, rows of them that are right, and shares of their values."""

    claimed: int
    found: int
    found_share: float
    values_rebuilt: float
    values_guessed_without: float


def main() -> None:
    """Train, rebuild, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="credit2", help="name in the shared data, or a Parquet file")
    parser.add_argument("--rows", type=int, default=400, help="rows of the other sites, and of the adversary")
    parser.add_argument("--features", type=int, default=6, help="the features with the most gain")
    parser.add_argument("--trees", type=int, default=20)
    options = parser.parse_args()
    target, own = choose(options.data, options.rows, options.features)
    bounds = [FeatureBounds(float(c.min()), float(c.max())) for c in target.columns]
    print(f"{options.data}: {target.label.size} rows, {len(bounds)} features, {options.trees} trees, delta {DELTA:g}")
    print(f"{'':<34}{'rows':>8}{'rows':>8}{'share of':>10}{'values of them':>16}{'guessed':>10}")
    print(f"{'':<34}{'claimed':>8}{'found':>8}{'all rows':>10}{'rebuilt':>16}{'without':>10}")
    outcomes = {}
    for name, trees in seen_trainings(target, bounds, options.trees).items():
        outcomes[name] = o = compare(target, own, find_rows(trees))
        print(
            f"{name:<34}{o.claimed:>8}{o.found:>8}{o.found_share:>10.1%}"
            f"{o.values_rebuilt:>16.1%}{o.values_guessed_without:>10.1%}"
        )
    print(json.dumps({name: {k: round(v, 4) for k, v in vars(o).items()} for name, o in outcomes.items()}))


def choose(data: str, n_rows: int, n_features: int) -> tuple[Table, Table]:
    """Draw the others' rows, and as many of the adversary's own, with the most telling features."""
    features, label = load(data)
    if label.size < 2 * n_rows:
        raise SystemExit(f"{data} has {label.size} rows; {2 * n_rows} are needed: choose fewer with --rows")
    booster = xgb.train(PARAMETERS, xgb.DMatrix(features, label, nthread=1), 5)
    gain = booster.get_score(importance_type="total_gain")
    best = sorted(range(features.shape[1]), key=lambda f: -gain.get(f"f{f}", 0.0))[:n_features]
    order = np.random.default_rng(0).permutation(label.size)
    parts = order[:n_rows], order[n_rows : 2 * n_rows]
    first, second = (Table(np.ascontiguousarray(features[part][:, best].T), label[part]) for part in parts)
    return first, second


# -- what the adversary sees ------------------------------------------------------------------------------------------


def seen_trainings(target: Table, bounds: list[FeatureBounds], n_trees: int) -> dict[str, list[SeenTree]]:
    """Train in every way; the adversary's own rows are taken away already."""
    preset = replace(DEFAULT_2026_12, n_trees=n_trees)
    seen = {
        "XGBoost, depth 6": xgboost_trees(target, n_trees),
        "default's trees without noise": private_trees(target, bounds, n_trees, 1e6, no_noise),
    }
    for epsilon in EPSILONS:
        mu = math.sqrt(gaussian_limit(epsilon, DELTA).mu_squared)
        seen[f"{preset.name}, epsilon {epsilon:g}"] = private_trees(target, bounds, n_trees, mu, add_gaussian_noise)
    return seen


def xgboost_trees(target: Table, n_trees: int) -> list[SeenTree]:
    """Read boxes, sums and outputs out of a model of stock XGBoost."""
    booster = xgb.train(PARAMETERS, xgb.DMatrix(target.columns.T, target.label, nthread=1), n_trees)
    model = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]
    return [_xgboost_tree(tree, target.columns.shape[0]) for tree in model["trees"]]


def _xgboost_tree(tree: dict, n_features: int) -> SeenTree:
    left, right = tree["left_children"], tree["right_children"]
    low, high, leaves = _boxes(left, right, tree["split_indices"], tree["split_conditions"], n_features)
    outputs = np.array(tree["split_conditions"])[leaves]  # a leaf's output stands where a threshold would
    hessian = np.array(tree["sum_hessian"])[leaves]
    gradient = -outputs / PARAMETERS["eta"] * (hessian + PARAMETERS["lambda"])
    return SeenTree(low, high, np.stack([gradient, hessian], axis=1), outputs)


def private_trees(
    target: Table, bounds: list[FeatureBounds], n_trees: int, mu: float, mechanism: Mechanism
) -> list[SeenTree]:
    """Train the default, with so many trees, and keep what is released."""
    method, released = replace(DEFAULT_2026_12, n_trees=n_trees), []

    def watched(sums: NDArray[np.int64], sensitivity: Sensitivity, multiplier: float) -> Release:
        release = mechanism(sums, sensitivity, multiplier)
        released.append(release.value)
        return release

    simulation = Simulation(plan_with(method, bounds, mu, seed=1), target, target, watched)
    simulation.run()
    trees = []
    for (tree, outputs), sums in zip(simulation.trees, released[1:], strict=True):  # the first are counts for quantiles
        cuts = simulation.candidates.of_feature
        inner = [int(f) >= 0 for f in tree.feature]
        thresholds = [
            float(np.nextafter(cuts[f][c], np.float32(np.inf))) if is_inner else 0.0
            for f, c, is_inner in zip(tree.feature, tree.candidate, inner, strict=True)
        ]
        low, high, _ = _boxes(tree.left.tolist(), tree.right.tolist(), tree.feature, thresholds, len(bounds))
        trees.append(SeenTree(low, high, sums / UNIT, outputs.astype(np.float64)))
    return trees


def _boxes(
    left: list[int], right: list[int], feature: list[int], threshold: list[float], n_features: int
) -> tuple[Columns, Columns, list[int]]:
    """Return every leaf's box and node number, in the order of the nodes."""
    boxes = {0: (np.full(n_features, -np.inf, np.float32), np.full(n_features, np.inf, np.float32))}
    leaves = [node for node, child in enumerate(left) if child == -1]
    for node, child in enumerate(left):  # children come after their parent
        if child == -1:
            continue
        low, high = boxes[node]
        boxes[child], boxes[right[node]] = (low, high.copy()), (low.copy(), high)
        boxes[child][1][feature[node]] = boxes[right[node]][0][feature[node]] = np.float32(threshold[node])
    return np.stack([boxes[n][0] for n in leaves]), np.stack([boxes[n][1] for n in leaves]), leaves


# -- the attack -------------------------------------------------------------------------------------------------------


def find_rows(trees: list[SeenTree]) -> list[FoundRow]:
    """Follow every leaf of a single row through the trees before it; a row that is met again is kept once."""
    found: dict[tuple[int, ...], FoundRow] = {}
    for number, tree in enumerate(trees[:MAX_TREES]):
        for leaf in single_rows(tree):
            row = follow(trees[:number], tree, leaf)
            if row is not None:
                # A way that passes a leaf where a row was alone is that row's, seen longer.
                found = {path: known for path, known in found.items() if row.path[: len(path)] != path}
                found[row.path] = row
    return list(found.values())


def single_rows(tree: SeenTree) -> NDArray[np.intp]:
    """Return the leaves that hold one row. Several rows have a larger Hessian for their gradient."""
    gradient, hessian = np.abs(tree.sums[:, 0]), tree.sums[:, 1]
    return np.flatnonzero((np.abs(hessian - gradient * (1 - gradient)) < 1e-5) & (gradient > 1e-3) & (gradient < 0.999))


def follow(before: list[SeenTree], tree: SeenTree, leaf: int) -> FoundRow | None:
    """Find the one way through the trees before that gives the score of a leaf's only row."""
    gradient = tree.sums[leaf, 0]
    label, p = (0, gradient) if gradient > 0 else (1, 1 + gradient)
    score, tolerance = math.log(p / (1 - p)), 2e-6 / (p * (1 - p))
    low, high, total = tree.low[leaf][None], tree.high[leaf][None], np.zeros(1)
    paths = np.zeros((1, 0), dtype=np.intp)
    for i, earlier in enumerate(before):
        a, b = np.maximum(low[:, None], earlier.low), np.minimum(high[:, None], earlier.high)
        reached = total[:, None] + earlier.outputs
        rest = before[i + 1 :]
        least, most = (score - sum(extreme(t.outputs) for t in rest) for extreme in (np.max, np.min))
        state, chosen = np.nonzero((a < b).all(axis=2) & (reached > least - tolerance) & (reached < most + tolerance))
        if not 0 < state.size <= MAX_WAYS:
            return None
        low, high, total = a[state, chosen], b[state, chosen], reached[state, chosen]
        paths = np.concatenate([paths[state], chosen[:, None]], axis=1)
    [ways] = np.nonzero(np.abs(total - score) < tolerance)
    if ways.size != 1:
        return None
    return FoundRow(label, low[ways[0]], high[ways[0]], (*paths[ways[0]].tolist(), int(leaf)))


# -- how near it came -------------------------------------------------------------------------------------------------


def compare(target: Table, own: Table, claims: list[FoundRow]) -> Outcome:
    """Check every claim against the truth and measure the guesses."""
    rows, near, without = target.columns.T, [], []
    for claim in claims:
        inside = ((rows >= claim.low) & (rows < claim.high)).all(axis=1) & (target.label == claim.label)
        if inside.sum() != 1:
            continue
        truth = rows[inside][0]
        of_class = own.columns[:, own.label == claim.label]
        for guesses, box in ((near, claim), (without, None)):
            made = [guess(c, box and (box.low[f], box.high[f])) for f, c in enumerate(of_class)]
            gaps = [abs(rank_in(c, t) - rank_in(c, m)) for c, t, m in zip(target.columns, truth, made, strict=True)]
            guesses.append(np.mean(np.array(gaps) <= WITHIN))
    share = (float(np.mean(near)), float(np.mean(without))) if near else (0.0, 0.0)
    return Outcome(len(claims), len(near), len(near) / target.label.size, *share)


def guess(own: Columns, interval: tuple[float, float] | None) -> float:
    """Return the median of the own values in an interval, or its middle if there are none."""
    if interval is None:
        return float(np.median(own))
    low, high = interval
    inside = own[(own >= low) & (own < high)]
    if inside.size:
        return float(np.sort(inside)[inside.size // 2])
    return float((max(low, own.min()) + min(high, own.max())) / 2)


def rank_in(column: Columns, value: float) -> float:
    """Return the middle rank of a value in a column, from 0 to 1."""
    return float((np.sum(column < value) + np.sum(column <= value)) / (2 * column.size))


if __name__ == "__main__":
    main()
