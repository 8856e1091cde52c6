"""diffprivlib's random forest, in a Python of its own: it does not load beside newer scikit-learn.

    python rival_forest.py FOLDER

reads FOLDER/*.npz (train, label, test, bounds, epsilons, seed) and writes FOLDER/*.scores.npy, a row for each epsilon.
The library's own defaults: 10 trees of depth 5 on disjoint rows, random splits within public bounds, leaves that answer
with a class drawn by permute-and-flip. Its promise is the pure epsilon, which is more than (epsilon, delta).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from diffprivlib.models import RandomForestClassifier


def main(folder: Path) -> None:
    """Train a forest for each epsilon of each file."""
    for path in sorted(folder.glob("*.npz")):
        data = np.load(path)
        scores = []
        for epsilon in data["epsilons"]:
            forest = RandomForestClassifier(
                epsilon=float(epsilon),
                bounds=(data["bounds"][:, 0], data["bounds"][:, 1]),
                classes=[0, 1],
                n_jobs=1,
                random_state=int(data["seed"]),
            )
            forest.fit(data["train"], data["label"])
            scores.append(forest.predict_proba(data["test"])[:, 1])
        np.save(path.with_suffix(".scores.npy"), np.stack(scores))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
