"""Data for trying out vertical jobs: one table dealt out by columns, with the disorder that real parties have.

Every party has some rows that others lack, its own order of rows, and its own way of writing the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nvflare_plugins.base.files import make_folder, write_private_table

if TYPE_CHECKING:
    import pandas as pd

ID = "id"
LABEL = "target"
DATA_SETS = ("breast_columns", "breast_columns_test")
"""Names of the training and the test set in the vertical examples; horizontal ones have the same rows otherwise."""


def breast_cancer() -> pd.DataFrame:
    """Return scikit-learn's breast cancer set: 569 rows, 30 features and ``target``."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame
    table.columns = [name.replace(" ", "_") for name in table.columns]
    return table


def deal_columns(
    table: pd.DataFrame,
    label: str,
    folders: Sequence[Path],
    set_names: Sequence[str],
    test_share: float = 0.3,
    lacking: float = 0.1,
    seed: int = 0,
) -> None:
    """Give each party its columns of two data sets, ``<folder>/<set name>.csv``; the first party has the label.

    Args:
        folders: one for each party, made if they do not exist.
        set_names: names of the training and the test set.
        lacking: share of the rows that each party lacks.
        seed: of the rows lacking and of each party's order; nothing here is secret.
    """
    random = np.random.default_rng(seed)
    features = [name for name in table.columns if name != label]
    ids = np.array([f"P-{number:06d}" for number in random.choice(10**6, len(table), replace=False)])
    n_test = int(test_share * len(table))
    for party, columns in enumerate(np.array_split(features, len(folders))):
        own = table[[*columns, *([label] if party == 0 else [])]]
        own.insert(0, ID, [_spelled(name, party) for name in ids])
        make_folder(folders[party])
        for name, rows in zip(set_names, (np.arange(n_test, len(table)), np.arange(n_test)), strict=True):
            kept = random.permutation(rows)[: len(rows) - int(lacking * len(rows))]
            write_private_table(folders[party] / f"{name}.csv", own.iloc[kept])


def _spelled(name: str, party: int) -> str:
    """Write an id as this party's files do: alignment must not depend on white space."""
    return (name, f" {name}", f"{name}\t ")[party % 3]
