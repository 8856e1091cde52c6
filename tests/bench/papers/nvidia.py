"""NVIDIA's secure federated XGBoost (2024): its figures 3 and 4, end to end through FLARE's processes, on CPU.

Ten trees of depth 5, 256 bins; vertical training of two parties, 10 + 18 and 799 + 1,201 features, horizontal training
of three sites. Tables are generated, with the sets' numbers of rows and features. The post prints no seconds: it says
that its GPU plugin is 4.6 to 36 times as fast as the other vertical solution.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xgboost as xgb

from tests.bench.flare_jobs import run_in_flare, tables_of_parties
from tests.bench.horizontal_data import TableShape, arrays, generate
from tests.bench.papers.sets import Library
from tests.bench.papers.table import Cell, Cells, Effort, Paper, PaperTable

PARAMS = {"objective": "binary:logistic", "max_depth": 5, "max_bin": 256, "nthread": 1, "seed": 0}
TREES = 10
SHARE = {"CreditCard": 1.0, "HIGGS": 0.1, "Epsilon": 0.05}
"""Part of each set's rows that is trained on: what two cores finish in minutes."""


@dataclass(frozen=True)
class Shape:
    """One of the post's sets, and its columns at the party with the label and at the other."""

    rows: int
    widths: tuple[int, int]
    positive: float


SHAPES = {
    "CreditCard": Shape(227_845, (10, 18), 0.0017),
    "HIGGS": Shape(4_000_000, (10, 18), 0.53),
    "Epsilon": Shape(320_000, (799, 1_201), 0.5),
}


def _table(name: str) -> TableShape:
    shape = SHAPES[name]
    return TableShape(round(shape.rows * SHARE[name]), sum(shape.widths), shape.positive)


def _central(name: str) -> float:
    features, label = arrays(generate(_table(name)))
    started = time.perf_counter()
    xgb.train({**PARAMS, "tree_method": "hist"}, xgb.DMatrix(features, label=label), TREES)
    return time.perf_counter() - started


def _rows_of(name: str) -> str:
    return f"{name}, {_table(name).n_rows:,} rows" + ("" if SHARE[name] == 1 else f" (1 / {1 / SHARE[name]:g})")


def _vertical(library: Library, sets: Sequence[str], effort: Effort) -> Cells:
    cells: Cells = {}
    for name, shape in SHAPES.items():
        features, label = arrays(generate(_table(name)))
        tables = tables_of_parties(np.split(features, [shape.widths[0]], axis=1), label)
        row = cells.setdefault(_rows_of(name), {"XGBoost alone": Cell(round(_central(name), 2))})
        lanes = {"ElGamal": {"profile": "elgamal"}, "ElGamal, 20 bits, short points": {"profile": "elgamal"}}
        lanes["ElGamal, 20 bits, short points"] |= {"fraction_bits": 20, "point_bytes": 32}
        for lane, fields in lanes.items():
            fields |= {"params": PARAMS, "num_rounds": TREES, "preset": "exact", "checkpoint_every": 0}
            row[lane] = Cell(round(run_in_flare("vertical", fields, tables).whole_s, 1))
        trees = TREES if name == "CreditCard" else 1
        fields = {"params": PARAMS, "num_rounds": trees, "preset": "exact", "profile": "paillier"}
        lane = "Paillier-3072" if trees == TREES else "Paillier-3072, one tree"
        row[lane] = Cell(round(run_in_flare("vertical", fields, tables).whole_s, 1))
    return cells


def _horizontal(library: Library, sets: Sequence[str], effort: Effort) -> Cells:
    cells: Cells = {}
    for name in SHAPES:
        frame = generate(_table(name))
        row = cells.setdefault(_rows_of(name), {"XGBoost alone": Cell(round(_central(name), 2))})
        parts = [frame.iloc[rows] for rows in np.array_split(np.arange(len(frame)), 3)]
        for profile in ("plain", "ckks", "bfv", "masks"):
            fields = {"params": PARAMS, "num_rounds": TREES, "profile": profile}
            row[profile] = Cell(round(run_in_flare("horizontal", fields, parts).whole_s, 1))
    return cells


_WHOLE = "Start and end of all processes are in it, some ten seconds on two cores, and so is reading."
TABLES = {
    "figure-3": PaperTable(
        "Figure 3",
        "Seconds of the whole job, two parties.",
        _vertical,
        (),
        ("he_processors", "nvflare_plugins/kinds/vertical"),
        higher=False,
        digits=1,
        remarks=(_WHOLE,),
    ),
    "figure-4": PaperTable(
        "Figure 4",
        "Seconds of the whole job, three sites; the post compares plain and CKKS.",
        _horizontal,
        (),
        ("he_processors", "nvflare_plugins/pooled", "nvflare_plugins/growth"),
        higher=False,
        digits=1,
        remarks=(_WHOLE,),
    ),
}
PAPER_OF = Paper(
    "nvidia", "NVIDIA, Security for Data Privacy in Federated Learning with CUDA-Accelerated HE in XGBoost", TABLES
)
