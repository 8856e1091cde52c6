"""AUC of vertical training in the presets noised and sealed, beside exact, guarded and the active party alone.

Tables: credit2, adult (texts as codes) and the shape of CreditCard (generated), 80 % of the rows to train on, two
random divisions. 60 rounds of depth 4, eta 0.1; noised jobs leave 40 of them to the active party (own_rounds). Sums are
noised, and splits compared, as in a job; sums are not encrypted here, which changes no number.

The last line of the output is one JSON object.

Run: python -m tests.bench.bench_noised [folder of the Parquet files]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import xgboost as xgb
from sklearn.metrics import roc_auc_score

from nvflare_plugins.data.declaration import VerticalRules
from nvflare_plugins.kinds.vertical.guards import Guard
from nvflare_plugins.kinds.vertical.job import VerticalJob, check_vertical_parameters
from nvflare_plugins.kinds.vertical.key_owner import ClearGradientOwner
from nvflare_plugins.kinds.vertical.noised import FRACTION_BITS, NoisePlan
from nvflare_plugins.kinds.vertical.sealed import sealed_plan
from nvflare_plugins.site.memory.released import ReleasedSums
from nvflare_plugins.site.memory.store import Memory
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.clear_splits import clear_scheme, compared_in_the_clear, unmasked
from tests.support.vertical_federation import Joined, Outcome, federate

DATA = Path(__file__).parents[3] / "shared" / "data"
PARAMS = {"objective": "binary:logistic", "max_depth": 4, "eta": 0.1, "max_bin": 32, "nthread": 2}
ROUNDS, OWN_ROUNDS, DELTA = 60, 40, 1e-5
EPSILONS = (1.0, 3.0, 10.0)
DIVISIONS = 2


def credit2(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return columns, label, and how many columns the active party has."""
    frame = pd.read_parquet(folder / "credit2.parquet").astype(np.float32)
    return frame.drop(columns="label").to_numpy(), frame.label.to_numpy(), 11


def adult(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """As ``credit2``; texts become codes in the order of the alphabet."""
    frame = pd.read_parquet(folder / "adult.parquet").drop(columns="split")
    label = frame.pop("label").to_numpy(np.float32)
    for name in frame.columns[~frame.dtypes.map(pd.api.types.is_numeric_dtype)]:
        frame[name] = frame[name].astype("category").cat.codes
    return frame.to_numpy(np.float32), label, 7


def credit_card(folder: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """As ``credit2``: the published shape, 227,845 rows to train on, 0.17 % positive, a signal on both sides."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(284_807, 28)).astype(np.float32)
    score = features @ rng.normal(size=28) * 0.5 + rng.gumbel(size=len(features))
    return features, (score > np.quantile(score, 1 - 0.0017)).astype(np.float32), 10


TABLES = {"credit2": credit2, "adult": adult, "creditcard": credit_card}


def main() -> None:
    """Measure all; print each result on stderr as it comes, all last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--tables", nargs="+", choices=sorted(TABLES), default=list(TABLES))
    options = parser.parse_args()
    results = {}
    for name in options.tables:
        runs = [scores(*TABLES[name](options.data), seed) for seed in range(DIVISIONS)]
        results[name] = {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
        print(name, results[name], file=sys.stderr, flush=True)
    print(json.dumps(results))


def scores(features: np.ndarray, label: np.ndarray, n_own: int, seed: int) -> dict[str, float]:
    """Return the test AUC of each way to train on one division of the rows."""
    order = np.random.default_rng(seed).permutation(len(label))
    train, test = np.split(order, [int(0.8 * len(order))])
    joined = Joined(features[train], label[train], (n_own, features.shape[1] - n_own))
    found = {}

    def note(name: str, predicted: np.ndarray) -> None:
        found[name] = float(roc_auc_score(label[test], predicted))

    settings = {**PARAMS, "tree_method": "hist"}
    for name, columns in (("exact", slice(None)), ("active party alone", slice(n_own))):
        model = xgb.train(settings, xgb.DMatrix(features[train][:, columns], label=label[train]), ROUNDS)
        note(name, model.predict(xgb.DMatrix(features[test][:, columns])))
    with tempfile.TemporaryDirectory(prefix="veilboost-noised-") as folder:
        ids = [str(row) for row in range(len(train))]
        guard = Guard(VerticalRules(), ReleasedSums(Memory(Path(folder), "site"), "data"), ids)
        note("guarded", predict(federate(joined, PARAMS, ROUNDS, guards=[guard], guarded=True), features[test]))
    with compared_in_the_clear():
        job = VerticalJob(active="a", data_set="d", label="y", preset="sealed", params=PARAMS)
        sealed = sealed_plan(job, check_vertical_parameters(PARAMS, ["any"]))
        outcome = federate(joined, PARAMS, ROUNDS, clear_scheme, planned=sealed, noise_of=unmasked)
        note("sealed", predict(outcome, features[test]))
    for epsilon in EPSILONS:
        plan = NoisePlan(epsilon, DELTA, ROUNDS - OWN_ROUNDS, PARAMS["max_depth"], 8, 16, FRACTION_BITS)
        owner = ClearGradientOwner(plan.pair_format(len(train)))
        outcome = federate(
            joined,
            PARAMS,
            ROUNDS,
            scheme=lambda n, owner=owner: (owner, ClearHistogramMaker),
            planned=plan,
            own_rounds=OWN_ROUNDS,
            guarded=True,
        )
        note(f"noised, epsilon {epsilon:g}", predict(outcome, features[test]))
    return found


def predict(outcome: Outcome, rows: np.ndarray) -> np.ndarray:
    """Predict with the merged model."""
    model = xgb.Booster(model_file=bytearray(outcome.merged()))
    return model.predict(xgb.DMatrix(rows), validate_features=False)


if __name__ == "__main__":
    main()
