"""NVIDIA's secure federated XGBoost (2024): its figures 3 and 4, end to end through FLARE's processes, on CPU.

Ten trees of depth 5, 256 bins; vertical training of two parties, 10 + 18 and 799 + 1,201 features, horizontal training
of three sites. Shapes, tables and lanes are those of ``bench_peers``. The post prints no seconds: it says that its GPU
plugin is 4.6 to 36 times as fast as the other vertical solution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.bench import bench_peers
from tests.bench.papers.sets import Library
from tests.bench.papers.table import Cell, Cells, Effort, Paper, PaperTable

_SETS = ("creditcard", "higgs", "epsilon")
_WHOLE = "Start and end of all processes are in it, some ten seconds on two cores, and so is reading."


def _cells_of(names: Sequence[str], lanes: Sequence[str]) -> Callable[[Library, Sequence[str], Effort], Cells]:
    def measure(library: Library, sets: Sequence[str], effort: Effort) -> Cells:
        cells: Cells = {}
        for name in names:
            found = bench_peers.measure(name, ("xgboost", *lanes))
            row = cells.setdefault(f"{name}, {found['rows']:,} of {found['of_rows']:,} rows", {})
            for lane, figures in found["lanes"].items():
                column = lane if figures["trees"] == bench_peers.TREES else f"{lane}, one tree"
                row[f"{column}, wall"] = Cell(figures["wall_s"])
                row[f"{column}, processor"] = Cell(figures["cpu_s"])
        return cells

    return measure


def _vertical(name: str, lanes: Sequence[str]) -> PaperTable:
    """Return figure 3 of one shape and some schemes: a table of its own, since each takes minutes to hours."""
    return PaperTable(
        f"Figure 3, {name}, {' and '.join(lanes)}",
        "Seconds of the whole job, two parties.",
        _cells_of((name,), lanes),
        (),
        ("he_processors", "nvflare_plugins/kinds/vertical"),
        higher=False,
        digits=1,
        remarks=(_WHOLE, *_REMARKS.get((name, *lanes), ())),
    )


_ELGAMAL = tuple(lane for lane in bench_peers.VERTICAL if lane.startswith("elgamal"))
_REMARKS = {
    ("creditcard", *_ELGAMAL): (
        "SecretFlow's documentation has 38.9 s on 32 cores for at most 100 trees on this shape, Okamoto-Uchiyama of "
        "2,048 bits; a tree here takes 12 to 14 s of two cores without AVX-512 IFMA. A hundred were not run.",
    ),
    ("epsilon", *_ELGAMAL): ("A level has up to 1,201 x 256 sums a node to decrypt, so one tree is grown.",),
}
"""What a reader has to know of a shape and its schemes."""
TABLES = {
    **{f"figure-3-{name}": _vertical(name, _ELGAMAL) for name in _SETS},
    **{f"figure-3-{name}-paillier": _vertical(name, ("paillier_3072",)) for name in _SETS},
    "figure-4": PaperTable(
        "Figure 4",
        "Seconds of the whole job, three sites; the post compares plain and CKKS.",
        _cells_of(_SETS, bench_peers.HORIZONTAL),
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
