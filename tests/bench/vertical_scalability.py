"""SecureBoost's scalability figures, redrawn: one boosting round against depth, features and rows.

Every point is a training of two rounds with Paillier at full key length, one process for each party; the second round
counts (CPU seconds: the mean of both). Progress goes to stderr; the last line is one JSON object. With --figure the
curves are drawn as one SVG.

Run: python -m tests.bench.vertical_scalability [--figure FILE.svg]
Reference: SecureBoost (Cheng et al., 2021), figure 5.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("VEILBOOST_THREADS", "1")

from nvflare_plugins.pages.charts import Line, line_chart
from tests.bench.horizontal_data import TableShape, arrays, generate
from tests.bench.vertical_parties import Workload, run_vertical

ROWS, FEATURES, DEPTH, BINS = 20_000, 20, 5, 32
DEPTHS = (3, 4, 5, 6, 7, 8)
FEATURE_COUNTS = (10, 20, 40, 80)
ROW_COUNTS = (5_000, 10_000, 20_000, 40_000)
STYLE = (
    "svg{font:12px sans-serif;background:#fff}.grid{stroke:#ddd}.axis{stroke:#555}"
    ".line{fill:none;stroke-width:2}.hit{fill:transparent}.tick,.name,.label{fill:#444}"
)


def measure(rows: int, features: int, depth: int, key_bits: int) -> dict[str, float]:
    """Return wall and CPU seconds of one boosting round, half of the columns at each party."""
    table, label = arrays(generate(TableShape(rows, features, 0.3)))
    params = {"objective": "binary:logistic", "max_depth": depth, "max_bin": BINS, "nthread": 1}
    workload = Workload(table, label, (features // 2, features - features // 2), params, 2)
    run = run_vertical(workload, "paillier", key_bits)
    return {"s": run.round_s[-1], "core_s": sum(p.cpu_s for p in run.parties) / 2}


def main() -> None:
    """Measure all points, draw them if asked to, and print the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--key-bits", type=int, default=2048)
    parser.add_argument("--figure", type=Path, help="write the curves as SVG")
    options = parser.parse_args()
    axes: dict[str, Sequence[tuple[int, tuple[int, int, int]]]] = {
        "depth": [(d, (ROWS, FEATURES, d)) for d in DEPTHS],
        "features": [(f, (ROWS, f, DEPTH)) for f in FEATURE_COUNTS],
        "rows": [(n, (n, FEATURES, DEPTH)) for n in ROW_COUNTS],
    }
    results: dict[str, list[dict[str, float]]] = {}
    for axis, points in axes.items():
        results[axis] = []
        for value, (rows, features, depth) in points:
            figures = measure(rows, features, depth, options.key_bits)
            results[axis].append({axis: value, **figures})
            print(f"{axis} {value}: {figures['core_s']:.2f} core-seconds a round", file=sys.stderr, flush=True)
    if options.figure is not None:
        options.figure.write_text(draw(results))
    print(json.dumps({"key_bits": options.key_bits, "rows": ROWS, "features": FEATURES, "depth": DEPTH, **results}))


def draw(results: dict[str, list[dict[str, float]]]) -> str:
    """Return the three curves, one below the other, as one SVG."""
    parts, top = [], 0
    for axis, points in results.items():
        line = Line("core-seconds", 1, tuple((p[axis], p["core_s"]) for p in points))
        chart = line_chart([line], axis, "core-seconds a round", height=240).replace("var(--c1)", "#1f6feb")
        parts.append(chart.replace("<svg ", f'<svg x="0" y="{top}" width="760" height="240" ', 1))
        top += 250
    inner = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {top}"><style>{STYLE}</style>{inner}</svg>\n'


if __name__ == "__main__":
    main()
