"""Membership inference against the finished model, without privacy and with the default preset: an illustration.

    python -m tests.bench.membership_inference                    credit2 of the shared data
    python -m tests.bench.membership_inference adult --models 32
    python -m tests.bench.membership_inference /path/to/table.parquet

Many models are trained, each on half of a pool of rows drawn at random. For each model in turn, the adversary has the
model, the pool and all other models, and asks for every row of the pool whether it was trained on. Two attacks:

* loss: rows that the model answers with more confidence are members (Yeom et al., 2018);
* LiRA: for each row, how its confidence is distributed over the other models that had it, and over those that had it
  not; the likelihood ratio of the two (Carlini et al., 2022).

Forests have the same public structure in all models, which helps the adversary. Advantage is true positives minus
false positives at the best threshold of the attack, which flatters it: chance alone gives 0.02 here. "bound" is what no
adversary can exceed, from the guarantee alone. An attack that finds nothing proves nothing: the audit is in
tests/audit.

The training is the sites' own on the pooled rows: models equal those of the federation for equal noise. Delta is 1e-6;
feature bounds are taken from the pool. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from dp_components.accounting import gaussian_limit
from dp_components.events import ComposedEvent, Release
from dp_components.mechanisms import add_gaussian_noise
from dp_components.sensitivity import Sensitivity
from dp_components.split_candidates.candidates import FeatureBounds
from nvflare_plugins.kinds.private_trees.methods import DEFAULT_2026_12
from nvflare_plugins.kinds.private_trees.noisy_sums import Mechanism
from tests.bench.dp_data import load
from tests.support.private_simulation import Simulation, Table
from tests.support.private_trees import plan_with

DELTA, STRUCTURE_SEED = 1e-6, 1
EPSILONS = (1.0, 0.5)
WIDTHS = (7, 10, 10, 10, 10, 10, 8)
Scores = NDArray[np.float64]
Train = Callable[[Table, Table], Scores]
"""(members, pool) -> raw scores of the pool."""


@dataclass(frozen=True)
class Found:
    """What the attacks found, averaged over the models; ``test_auc`` is the model's on rows it had not seen."""

    test_auc: float
    loss_auc: float
    loss_advantage: float
    lira_auc: float
    lira_advantage: float
    lira_tpr_at_1_percent: float
    bound: float


def main() -> None:
    """Train, attack, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="credit2", help="name in the shared data, or a Parquet file")
    parser.add_argument("--rows", type=int, default=2000, help="members of each model; the pool has twice as many")
    parser.add_argument("--models", type=int, default=24, help="models of each kind, at least 8")
    options = parser.parse_args()
    pool = draw_pool(options.data, 2 * options.rows)
    halves = draw_halves(2 * options.rows, options.models)
    print(f"{options.data}: {options.rows} members, {options.models} models of each kind, delta {DELTA:g}")
    print(f"{'':<28}{'model':>7}{'-- loss attack --':>20}{'------ LiRA ------':>30}")
    print(f"{'':<28}{'AUC':>7}{'AUC':>10}{'advant.':>10}{'AUC':>10}{'advant.':>10}{'TPR@1%':>10}{'bound':>8}")
    found = {}
    for name, (train, bound) in kinds(pool).items():
        found[name] = attack(train, pool, halves, bound)
        print(f"{name:<28}" + "".join(f"{v:>{w}.3f}" for v, w in zip(_row(found[name]), WIDTHS, strict=True)))
    print(json.dumps({name: {k: round(v, 4) for k, v in vars(f).items()} for name, f in found.items()}))


def _row(found: Found) -> tuple[float, ...]:
    return tuple(vars(found).values())


def draw_pool(data: str, n_rows: int) -> Table:
    """Take rows at random, always the same."""
    features, label = load(data)
    if label.size < n_rows:
        raise SystemExit(f"{data} has {label.size} rows; {n_rows} are needed: choose fewer with --rows")
    chosen = np.random.default_rng(0).permutation(label.size)[:n_rows]
    return Table(np.ascontiguousarray(features[chosen].T), label[chosen])


def draw_halves(n_rows: int, n_models: int) -> NDArray[np.bool_]:
    """Say which rows each model has; two by two, models share the pool. Shapes: bool[n_models, n_rows]."""
    rng, halves = np.random.default_rng(1), []
    for _ in range(n_models // 2):
        is_member = rng.permutation(np.arange(n_rows) % 2 == 0)
        halves += [is_member, ~is_member]
    return np.stack(halves)


# -- what is attacked -------------------------------------------------------------------------------------------------


def kinds(pool: Table) -> dict[str, tuple[Train, float]]:
    """Return how to train each kind of model, and the largest advantage that its guarantee allows."""
    attacked: dict[str, tuple[Train, float]] = {
        "XGBoost, 200 trees, depth 4": (stock, 1.0),
        "default without noise": (preset(pool, 1e6, no_noise), 1.0),
    }
    for epsilon in EPSILONS:
        mu = math.sqrt(gaussian_limit(epsilon, DELTA).mu_squared)
        attacked[f"default, epsilon {epsilon:g}"] = (preset(pool, mu, add_gaussian_noise), largest_advantage(mu))
    return attacked


def largest_advantage(mu: float) -> float:
    """Return 2 Phi(mu / 2) - 1: what mu-GDP leaves to any adversary who guesses one row."""
    return float(2 * stats.norm.cdf(mu / 2) - 1)


def stock(members: Table, pool: Table) -> Scores:
    """Train XGBoost as a data scientist would."""
    parameters = {"objective": "binary:logistic", "max_depth": 4, "eta": 0.3, "nthread": 1, "verbosity": 0}
    booster = xgb.train(parameters, xgb.DMatrix(members.columns.T, members.label, nthread=1), 200)
    return booster.predict(xgb.DMatrix(pool.columns.T, nthread=1), output_margin=True).astype(np.float64)


def preset(pool: Table, mu: float, mechanism: Mechanism) -> Train:
    """Return the training of the default under mu-GDP."""
    bounds = [FeatureBounds(float(c.min()), float(c.max())) for c in pool.columns]
    plan = plan_with(DEFAULT_2026_12, bounds, mu, seed=STRUCTURE_SEED)

    def train(members: Table, scored: Table) -> Scores:
        return Simulation(plan, members, scored, mechanism).run().astype(np.float64)

    return train


def no_noise(sums: NDArray[np.int64], sensitivity: Sensitivity, multiplier: float) -> Release:
    """Release the exact sums."""
    return Release(sums, ComposedEvent(()))


# -- the attacks ------------------------------------------------------------------------------------------------------


def attack(train: Train, pool: Table, halves: NDArray[np.bool_], bound: float) -> Found:
    """Train one model for each half and attack every one of them with the others."""
    signs = np.where(pool.label > 0, 1.0, -1.0)
    raw = np.stack([train(_members(pool, is_member), pool) for is_member in halves])
    confidence = raw * signs
    results = []
    for target, is_member in enumerate(halves):
        # Without the model of the other half, too: then each row was in half of the models that are left.
        others = np.arange(len(halves)) // 2 != target // 2
        lira = likelihood_ratio(confidence[target], confidence[others], halves[others])
        results.append(
            (
                roc_auc_score(pool.label[~is_member], raw[target][~is_member]),
                *_auc_and_advantage(is_member, confidence[target])[:2],
                *_auc_and_advantage(is_member, lira),
                bound,
            )
        )
    return Found(*np.mean(results, axis=0).tolist())


def likelihood_ratio(seen: Scores, others: Scores, was_member: NDArray[np.bool_]) -> Scores:
    """Return the log-likelihood ratio of "member" for every row, with Gaussians of one common spread for each case.

    Shapes: seen: float64[n_rows]; others, was_member: [n_models, n_rows].
    """

    def log_density(which: NDArray[np.bool_]) -> Scores:
        mean = np.nanmean(np.where(which, others, np.nan), axis=0)
        spread = np.sqrt(np.mean((others - mean)[which] ** 2)) + 1e-9
        return stats.norm.logpdf(seen, mean, spread)

    return log_density(was_member) - log_density(~was_member)


def _auc_and_advantage(is_member: NDArray[np.bool_], score: Scores) -> tuple[float, float, float]:
    false_positives, true_positives, _ = roc_curve(is_member, score)
    advantage = float((true_positives - false_positives).max())
    at_1_percent = float(true_positives[false_positives <= 0.01].max())
    return float(roc_auc_score(is_member, score)), advantage, at_1_percent


def _members(pool: Table, is_member: NDArray[np.bool_]) -> Table:
    return Table(np.ascontiguousarray(pool.columns[:, is_member]), pool.label[is_member])


if __name__ == "__main__":
    main()
