"""What the attack on bins recovers from real trainings, under each preset, and after how many trees.

Tables split in two halves, 32 bins: breast (569 rows, 50 trees of depth 5), 2,000 rows of credit2 (100 trees of depth
5), and 20,000 rows of it (100 trees of depth 3). The active party's knowledge is recorded in the training itself; a
sample of the passive party's features is attacked. Guarded trainings vary a little with the guards' secret keys.

The last line of the output is one JSON object. Its curves are the ones that reports show (kinds/vertical/guards.py).

Run: python -m tests.bench.bin_attack_rates [folder of the Parquet files]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from nvflare_plugins.kinds.vertical.guards import SUMS_PER_SET
from tests.support.bin_attack import PRESETS, Recovery, Trial, attack, breast, credit2, try_preset

DATA = Path(__file__).parents[3] / "shared" / "data"
TABLES = {
    "breast": (lambda folder: breast(folder / "breast.parquet"), 50, 5, (0, 3, 7, 11, 14)),
    "credit2_2000": (lambda folder: credit2(folder / "credit2.parquet", 2000), 100, 5, (1, 4, 8)),
    "credit2_20000": (lambda folder: credit2(folder / "credit2.parquet", 20000), 100, 3, (1, 4, 8)),
}
"""Name -> how to read it, trees, depth, the passive party's features that are attacked."""
CURVE_TREES = (1, 2, 3, 5, 8, 12, 20, 35)


def main() -> None:
    """Attack every table under every preset; print each result on stderr, all last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    folder = parser.parse_args().data
    results: dict[str, dict] = {}
    for table, (read, n_trees, depth, features) in TABLES.items():
        joined = read(folder)
        results[table] = {}
        for preset in PRESETS:
            with tempfile.TemporaryDirectory(prefix="veilboost-bins-") as place:
                trial = try_preset(joined, preset, Path(place), n_trees, depth, features)
            results[table][preset] = document(trial)
            print(table, preset, results[table][preset], file=sys.stderr, flush=True)
            if preset == "exact":
                results[table]["curve"] = curve(trial, features)
    print(json.dumps(results))


def document(trial: Trial) -> dict:
    """Return the numbers of one training."""
    exposure = {name: value for name, value in asdict(trial.exposure).items() if not name.endswith("cap")}
    return {**rounded(trial.recovery), "trees_with_sums": len(trial.tap.trees), **_rounded(exposure)}


def curve(trial: Trial, features: tuple[int, ...]) -> list[dict]:
    """Return what the attack recovers after the first trees, and how many sums a row is in by then, on average."""
    points = []
    for n in (n for n in CURVE_TREES if n < len(trial.tap.trees)):
        trees = trial.tap.trees[:n]
        found = attack(trees, trial.tap.layout, trial.codes, features)
        n_memberships = SUMS_PER_SET * sum(rows.size for tree in trees for rows in tree.nodes)
        points.append({"trees": n, "per_row_mean": n_memberships / trial.codes.shape[1], **rounded(found)})
    return points


def rounded(recovery: Recovery) -> dict:
    """Return a recovery's numbers as people read them."""
    return _rounded(asdict(recovery))


def _rounded(values: dict) -> dict:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


if __name__ == "__main__":
    main()
