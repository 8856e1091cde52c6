"""The default private trees beside other people's programs: same splits, epsilon, delta and neighbouring relation.

    make bench-dp                                           credit2, adult and bank, 10 splits
    python -m tests.bench.bench_dp_rivals --sets credit2 own.parquet --splits 10 --figure auc.svg

All see the pooled rows (a trusted server), public bounds, delta = 1/n of the training rows, and protect the adding or
removing of one row:

* ``default``: ours, of the pooled rows; through the protocol with a trusted server the models are the same.
* ``dp_ebm``: the DP-EBM of the package interpret-core, its own defaults, all features of public bounds.
* ``s_bdt``: reimplemented (``rival_s_bdt``).
* ``forest``: diffprivlib's random forest (``rival_forest``), pure epsilon, its own defaults. It does not load beside
  newer scikit-learn: ``--forest-python`` names a Python that has it.
* ``xgboost``: 50 trees of depth 4, no privacy.

What is not installed is left out, and said. Statistics as in ``bench_dp``; ``default`` against each rival. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from nvflare_plugins.kinds.private_trees.methods import DEFAULT_2026_12
from nvflare_plugins.kinds.private_trees.plan import Trust
from tests.bench.dp_data import SEEDS, Split, load, preparation, set_name, split
from tests.bench.dp_runs import in_twin
from tests.bench.dp_statistics import Scored, Series, mean_and_sd, verdict
from tests.bench.rival_s_bdt import s_bdt
from tests.bench.rivals_figure import draw
from tests.support.private_trees import mu_of

EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
OURS, WITHOUT = "default", "xgboost"
Train = Callable[[Split, float, int], Scored]
"""Trains on a split at an epsilon with a seed, and scores the test rows."""


def _scored(data: Split, probability: NDArray[np.float64], started: float) -> Scored:
    seconds, label = time.process_time() - started, data.test.label
    return Scored(float(roc_auc_score(label, probability)), float(log_loss(label, probability)), seconds)


def ours(data: Split, epsilon: float, seed: int) -> Scored:
    """Train the default on the pooled rows."""
    return in_twin(DEFAULT_2026_12, data, epsilon, Trust(), 1000 * seed)


def by_s_bdt(data: Split, epsilon: float, seed: int) -> Scored:
    """Train S-BDT."""
    started = time.process_time()
    raw = s_bdt(data, epsilon, mu_of(epsilon, data.delta), seed)
    return _scored(data, 1.0 / (1.0 + np.exp(-raw)), started)


def by_xgboost(data: Split, epsilon: float, seed: int) -> Scored:
    """Train stock XGBoost without privacy."""
    started = time.process_time()
    matrix = xgb.DMatrix(data.train.columns.T, label=data.train.label, nthread=1)
    booster = xgb.train({"objective": "binary:logistic", "max_depth": 4, "nthread": 1, "seed": seed}, matrix, 50)
    return _scored(data, booster.predict(xgb.DMatrix(data.test.columns.T, nthread=1)), started)


def by_dp_ebm(data: Split, epsilon: float, seed: int) -> Scored:
    """Train the package's DP-EBM. Its noise comes from the operating system: a run is never the same twice."""
    from interpret.privacy import DPExplainableBoostingClassifier

    started = time.process_time()
    model = DPExplainableBoostingClassifier(
        feature_types=["continuous"] * data.n_features,
        epsilon=epsilon,
        delta=data.delta,
        privacy_bounds=_bounds(data),
        n_jobs=1,
        random_state=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(data.train.columns.T, data.train.label.astype(int))
    return _scored(data, model.predict_proba(data.test.columns.T)[:, 1], started)


def by_forest(python: str, splits: Sequence[Split], seeds: Sequence[int]) -> dict[float, list[Scored]]:
    """Train diffprivlib's forest on all splits by another Python; return the results of each epsilon.

    Raises: CalledProcessError, if that Python lacks the package.
    """
    found: dict[float, list[Scored]] = {epsilon: [] for epsilon in EPSILONS}
    with tempfile.TemporaryDirectory() as name:
        for data, seed in zip(splits, seeds, strict=True):
            arrays = {"train": data.train.columns.T, "label": data.train.label.astype(int), "test": data.test.columns.T}
            public = {"bounds": _bounds(data), "epsilons": np.array(EPSILONS), "seed": np.array(seed)}
            np.savez(Path(name) / f"{seed:06d}.npz", **arrays, **public)
        program = Path(__file__).with_name("rival_forest.py")
        subprocess.run([python, "-W", "ignore", str(program), name], check=True)
        for data, seed in zip(splits, seeds, strict=True):
            scores = np.load(Path(name) / f"{seed:06d}.scores.npy")
            for epsilon, probability in zip(EPSILONS, scores, strict=True):
                found[epsilon].append(_scored(data, probability, time.process_time()))
    return found


def _bounds(data: Split) -> NDArray[np.float64]:
    return np.array([(b.low, b.high) for b in data.bounds])


def measure(splits: Sequence[Split], seeds: Sequence[int], forest_python: str | None) -> dict[str, dict[float, Series]]:
    """Return every method's results on one table, by epsilon."""
    methods: dict[str, Train] = {OURS: ours, "s_bdt": by_s_bdt}
    try:
        import interpret.privacy  # noqa: F401

        methods["dp_ebm"] = by_dp_ebm
    except ImportError:
        print("dp_ebm left out: pip install interpret-core (the extra bench)", flush=True)
    found: dict[str, dict[float, Series]] = {}
    for name, train in methods.items():
        found[name] = {
            epsilon: Series.of([[train(data, epsilon, seed)] for data, seed in zip(splits, seeds, strict=True)])
            for epsilon in EPSILONS
        }
    without = Series.of([[by_xgboost(data, 0.0, seed)] for data, seed in zip(splits, seeds, strict=True)])
    found[WITHOUT] = dict.fromkeys(EPSILONS, without)
    if forest_python is None:
        print("forest left out: name a Python with diffprivlib by --forest-python", flush=True)
    else:
        forests = by_forest(forest_python, splits, seeds)
        found["forest"] = {epsilon: Series.of([[one] for one in runs]) for epsilon, runs in forests.items()}
    return found


def cells(found: dict[str, dict[float, Series]]) -> dict[str, dict[str, object]]:
    """Return for each method and epsilon mean AUC and log loss, and how the default compares with it."""
    table: dict[str, dict[str, object]] = {}
    for name, of_epsilon in found.items():
        table[name] = {}
        for epsilon, series in of_epsilon.items():
            outcome, p = verdict(found[OURS][epsilon], series)
            table[name][f"{epsilon:g}"] = {
                "auc": mean_and_sd(series.auc),
                "log_loss": mean_and_sd(series.log_loss),
                "seconds": round(series.seconds, 2),
                **({} if name == OURS else {"default": outcome, "p": round(p, 5)}),
            }
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark and print progress and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["credit2", "adult", "bank"], help="names, parquet or CSV files")
    parser.add_argument("--label", default="label", help="column of the binary label")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--forest-python", help="a Python that has diffprivlib")
    parser.add_argument("--figure", type=Path, help="where to draw AUC over epsilon")
    options = parser.parse_args(arguments)
    if not 2 <= options.splits <= len(SEEDS):
        parser.error(f"--splits from 2 to {len(SEEDS)}")
    started, seeds, tables = time.time(), SEEDS[: options.splits], {}
    for source in options.sets:
        try:
            arrays = load(source, options.label)
        except ValueError as error:
            sys.exit(f"bench-dp: {error}")
        print(preparation(source, options.label), flush=True)
        tables[set_name(source)] = cells(
            measure([split(*arrays, seed) for seed in seeds], seeds, options.forest_python)
        )
        print(f"{time.time() - started:6.0f} s  {json.dumps(tables[set_name(source)])}", flush=True)
    if options.figure is not None:
        options.figure.write_text(draw(tables, EPSILONS, WITHOUT))
    print(json.dumps({"splits": options.splits, "tables": tables}))


if __name__ == "__main__":
    main()
