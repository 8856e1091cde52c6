"""The papers' data sets: where their files are looked for, and what a file has to hold.

Sets of the project's own folder need no file. Others are files under the names that their publishers give them; they
are read once, checked, and kept as Parquet in a folder of this run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from tests.bench.dp_data import SHARED


@dataclass(frozen=True)
class NamedSet:
    """One data set.

    Attributes:
        files: names under which it is looked for, in this order; the project's own sets have none.
        label: its column; a number is its position in a file without a header or in LIBSVM's format.
        columns: how many features the papers' files have.
        ignored: columns that are no features.
        about: where a user gets it.
    """

    files: tuple[str, ...] = ()
    label: str | int = "label"
    columns: int = 0
    ignored: tuple[str, ...] = ()
    about: str = ""


SETS = {
    "credit1": NamedSet(
        ("cs-training.csv", "GiveMeSomeCredit.csv"), "SeriousDlqin2yrs", 10, ("Unnamed: 0",), "Kaggle, GiveMeSomeCredit"
    ),
    "credit2": NamedSet(),
    "adult": NamedSet(),
    "bank": NamedSet(),
    "a9a": NamedSet(),
    "nomao": NamedSet(),
    "abalone": NamedSet(),
    "higgs": NamedSet(("HIGGS.csv", "HIGGS.csv.gz"), 0, 28, (), "UCI 280"),
    "susy": NamedSet(("SUSY.csv", "SUSY.csv.gz"), 0, 18, (), "UCI 279"),
    "covtype": NamedSet(("covtype.libsvm.binary", "covtype.libsvm.binary.bz2"), 0, 54, (), "LIBSVM, binary"),
    "cod-rna": NamedSet(("cod-rna", "cod-rna.txt"), 0, 8, (), "LIBSVM, binary"),
    "creditcard": NamedSet(("creditcard.csv",), "Class", 30, (), "Kaggle, Credit Card Fraud Detection"),
    "epsilon": NamedSet(("epsilon_normalized", "epsilon_normalized.bz2"), 0, 2000, (), "LIBSVM, binary"),
}


class Missing(Exception):
    """A set that no file is at hand for; its text says which file would do."""


@dataclass(frozen=True)
class Library:
    """Finds sets: the project's own, and those whose files lie in a folder that the user names.

    Attributes:
        folder: the user's; None where there is none.
        kept: a folder of this run for what was read.
    """

    folder: Path | None
    kept: Path

    def source(self, name: str) -> str:
        """Return what ``dp_data.load`` reads: the name of a set of the project, or the path of a Parquet file.

        Raises:
            Missing: neither.
            ValueError: the file is not the one that the papers use, or cannot be read.
        """
        wanted = SETS[name]
        if not wanted.files:
            if not (SHARED / f"{name}.parquet").is_file():
                raise Missing(f"needs {name}.parquet in {SHARED.name}")
            return name
        found = [self.folder / file for file in wanted.files if self.folder and (self.folder / file).is_file()]
        if not found:
            raise Missing(f"needs `{wanted.files[0]}` ({wanted.about})")
        kept = self.kept / f"{name}.parquet"
        if not kept.is_file():
            _read(found[0], wanted).to_parquet(kept)
        return str(kept)


def _read(path: Path, wanted: NamedSet) -> pd.DataFrame:
    """Return features and a column ``label`` of a user's file. Raises: ValueError, with what is wrong and a remedy."""
    if isinstance(wanted.label, str):
        frame = pd.read_csv(path)
        if wanted.label not in frame:
            raise ValueError(f"{path.name} has no column {wanted.label!r}: get the file from {wanted.about}")
        frame = frame.drop(columns=[c for c in wanted.ignored if c in frame]).rename(columns={wanted.label: "label"})
    elif ".csv" in path.name:
        frame = pd.read_csv(path, header=None, dtype=np.float32)
        frame.columns = ["label", *(f"f{i}" for i in range(1, frame.shape[1]))]
    else:
        from sklearn.datasets import load_svmlight_file

        features, label = load_svmlight_file(str(path), n_features=wanted.columns)
        frame = pd.DataFrame(features.toarray().astype(np.float32)).rename(columns=lambda i: f"f{i}")
        frame["label"] = label
    if frame.shape[1] - 1 != wanted.columns:
        raise ValueError(
            f"{path.name} has {frame.shape[1] - 1} features, the papers' file {wanted.columns}: get it from "
            f"{wanted.about}, and do not change its columns"
        )
    return frame
