"""What the attack on noised sums names of rows' bins, beside the model's splits, ghosts, and sums without noise.

Generated rows (tests/support/noised_attack.py), 600 of them, and 2,000 rows of credit2 (11 + 12 columns; no ghosts can
be drawn of them): 20 trees of depth 4, 16 bins, all randomness seeded. Each number is a mean over trainings with other
rows, beside 1.96 standard errors of it.

The last line of the output is one JSON object.

Run: python -m tests.bench.noised_attack_rates [folder of the Parquet files] [--repetitions N] [--epsilons E ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench.bench_noised import DATA, credit2
from tests.support.noised_attack import NoisedRecovery, View, attack_generated


def main() -> None:
    """Measure all; print each case on stderr as it comes, all last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--tables", nargs="+", choices=("generated", "credit2"), default=["generated", "credit2"])
    parser.add_argument("--repetitions", type=int, default=32)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.2, 1.0, 4.0, 10.0])
    options = parser.parse_args()
    results = {}
    for table in options.tables:
        measured = of_generated if table == "generated" else partial(of_credit2, options.data)
        for epsilon in options.epsilons:
            runs = [measured(seed, epsilon) for seed in range(options.repetitions)]
            results[f"{table}, epsilon {epsilon:g}"] = found = {name: mean([r[name] for r in runs]) for name in runs[0]}
            print(table, epsilon, found, file=sys.stderr, flush=True)
    print(json.dumps(results))


def of_generated(seed: int, epsilon: float) -> dict[str, float]:
    """Return the rates of one training on generated rows."""
    run = attack_generated(seed, epsilon)
    ghosts = {"gain on ghosts": run.ghosts.gain, "gain above ghosts": run.rows.gain - run.ghosts.gain}
    return rates(run.rows, run.control, run.n_splits) | ghosts


def of_credit2(folder: Path, seed: int, epsilon: float) -> dict[str, float]:
    """Return the rates of one training on rows of credit2."""
    features, label, n_own = credit2(folder)
    chosen = np.random.default_rng(seed).permutation(len(label))[:2000]
    view = View.of(features[chosen], label[chosen], n_own, epsilon, seed)
    codes = view.party._codes
    n_splits = sum(len(tree.splits) for tree in view.trees)
    return rates(view.attack(codes), view.attack(codes, is_exact=True), n_splits)


def rates(found: NoisedRecovery, control: NoisedRecovery, n_splits: int) -> dict[str, float]:
    """Return what was named rightly, as parts of all."""
    return {
        "guessing": found.by_guessing,
        "splits": found.by_splits,
        "noised sums": found.with_sums,
        "gain": found.gain,
        "exact sums": control.with_sums,
        "splits won": float(n_splits),
    }


def mean(values: list[float]) -> tuple[float, float]:
    """Return the mean, and 1.96 standard errors of it."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return round(float(np.mean(values)), 4), round(float(1.96 * error), 4)


if __name__ == "__main__":
    main()
