"""FederBoost's horizontal setting on Credit 2, beside the figures of its paper and centralized XGBoost.

20 trees of 3 layers, 24 buckets, two thirds of the rows for training and one third for testing, 5 repeats; three
sites, profile masks, cuts by the default search over securely summed counts. Each repeat draws another split, so the
sites' policies consent to training on changed rows, which the registry against differencing refuses otherwise.

The last line of the output is one JSON object: mean and standard deviation of the AUC on the pooled test rows, for the
federation, for centralized XGBoost with cuts of its own (24 and 256 bins) and as published.

Run: python -m tests.bench.federboost_credit2 [credit2.parquet]

Reference: FederBoost (Tian et al.), section 6, figure 5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from nvflare_plugins.pooled.job import HorizontalJob
from tests.support.federation import Federation, succeed

DATA = Path(__file__).parents[3] / "shared" / "data" / "credit2.parquet"
LABEL, DATA_SET = "label", "credit2"
N_REPEATS, N_TREES, N_LAYERS, N_BUCKETS = 5, 20, 3, 24
XGBOOST_BINS = 256


@dataclass(frozen=True)
class Forest:
    """What is trained."""

    bins: int
    layers: int = N_LAYERS
    trees: int = 0

    @property
    def n_trees(self) -> int:
        return self.trees or N_TREES

    @property
    def params(self) -> dict:
        return {"objective": "binary:logistic", "max_depth": self.layers, "max_bin": self.bins, "nthread": 1}


PUBLISHED = {"federboost_paper_auc": 0.7825, "xgboost_paper_auc": 0.7804}


def main() -> None:
    """Repeat, print each repeat on stderr and the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA, help="Parquet file with a column `label`")
    frame = pd.read_parquet(parser.parse_args().data).astype(np.float32)
    scores: dict[str, list[float]] = {"federation": [], "central_24_bins": [], "central_256_bins": []}
    with tempfile.TemporaryDirectory(prefix="veilboost-credit2-") as folder:
        federation = Federation(Path(folder))
        for repeat in range(N_REPEATS):
            training, test = split(frame, repeat)
            boosters = {
                "federation": federate(federation, training, repeat, Forest(N_BUCKETS)),
                "central_24_bins": centralize(training, Forest(N_BUCKETS)),
                "central_256_bins": centralize(training, Forest(XGBOOST_BINS)),
            }
            for name, booster in boosters.items():
                scores[name].append(auc(booster, test))
            line = ", ".join(f"{name} {values[-1]:.4f}" for name, values in scores.items())
            print(f"repeat {repeat + 1} of {N_REPEATS}: AUC {line}", file=sys.stderr, flush=True)
    for name, values in scores.items():
        print(f"{name:<18} AUC {np.mean(values):.4f} +- {np.std(values, ddof=1):.4f}")
    print(", ".join(f"{name} {value}" for name, value in PUBLISHED.items()))
    print(json.dumps(summary(scores)))


def split(frame: pd.DataFrame, repeat: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two thirds of the rows for training and the rest for testing, drawn anew in every repeat."""
    shuffled = frame.sample(frac=1, random_state=repeat)
    n_test = len(frame) // 3
    return shuffled.iloc[n_test:], shuffled.iloc[:n_test]


def federate(federation: Federation, training: pd.DataFrame, repeat: int, forest: Forest) -> xgb.Booster:
    """Train over the federation's sites; return the model that all of them hold."""
    federation.give_data(DATA_SET, training)
    job = HorizontalJob(DATA_SET, LABEL, forest.params, forest.n_trees, "masks", tracking=False)
    job_id = f"repeat-{repeat + 1}"
    succeed(federation.run(job, job_id))
    return xgb.Booster(model_file=bytearray(federation.model(job_id)))


def centralize(training: pd.DataFrame, forest: Forest) -> xgb.Booster:
    """Train on all rows in one place with XGBoost's own cuts."""
    matrix = xgb.DMatrix(training.drop(columns=LABEL), label=training[LABEL])
    return xgb.train({**forest.params, "tree_method": "hist"}, matrix, forest.n_trees)


def auc(booster: xgb.Booster, test: pd.DataFrame) -> float:
    """Return the AUC on the pooled test rows."""
    return float(roc_auc_score(test[LABEL], booster.predict(xgb.DMatrix(test.drop(columns=LABEL)))))


def summary(scores: dict[str, list[float]]) -> dict[str, float]:
    """Return means and standard deviations beside what the paper reports."""
    figures = {}
    for name, values in scores.items():
        figures[f"{name}_auc"] = round(float(np.mean(values)), 4)
        figures[f"{name}_auc_sd"] = round(float(np.std(values, ddof=1)), 4)
    return figures | PUBLISHED


if __name__ == "__main__":
    main()
