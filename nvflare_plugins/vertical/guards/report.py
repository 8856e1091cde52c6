"""What a passive party's report says about its bins: sums and split bits per row, and what an attack makes of sums."""

from __future__ import annotations

from nvflare_plugins.report.run_record import PointCurve, ReportSection
from nvflare_plugins.vertical.guards.guards import SUMS_PER_SET, Exposure

_Points = tuple[tuple[float, float], ...]

MEASURED: dict[str, _Points] = {
    "breast, 569 rows, depth 5": (
        (3, 0.10),
        (6, 0.16),
        (9, 0.20),
        (16, 0.24),
        (25, 0.30),
        (40, 0.42),
        (70, 0.73),
        (122, 0.93),
        (169, 0.95),
    ),
    "credit2, 2,000 rows, depth 5": (
        (4, 0.20),
        (7, 0.25),
        (11, 0.34),
        (18, 0.47),
        (28, 0.61),
        (40, 0.78),
        (65, 0.93),
        (118, 1.00),
        (349, 1.00),
    ),
    "credit2, 20,000 rows, depth 3": (
        (2, 0.17),
        (5, 0.18),
        (8, 0.20),
        (14, 0.22),
        (21, 0.27),
        (32, 0.32),
        (53, 0.41),
        (93, 0.52),
        (265, 0.84),
    ),
}
"""Table -> (sums that a row is in, on average; part of all bins that the attack recovers), after more and more trees.

Measured by ``tests/bench/bin_attack_rates.py`` with 32 bins and the preset exact, on public tables.
"""


def bins_section(found: Exposure, preset: str, sums_per_set: int = SUMS_PER_SET) -> ReportSection:
    """Describe what this party has released, and draw what that was worth elsewhere.

    Privacy: for the party's own report: counts alone, no value, bin or row.
    """
    so_far = found.per_row_mean
    here: _Points = ((so_far, 0.0), (so_far, 1.0))
    digits = (
        " This job's profile shows the active party two digits of every sum: a bin of a node counts as "
        f"{sums_per_set} sums where others show {SUMS_PER_SET}."
        if sums_per_set > SUMS_PER_SET
        else ""
    )
    return ReportSection(
        title="What bins reveal: sums per row and feature",
        paragraphs=(
            f"Preset {preset}. Sums of one feature that this party has released, over all jobs on this data set. Each "
            f"is a linear equation in the bins of the rows, and the active party knows its coefficients.{digits}",
            "A split of this party shows the active party one ordered bit of each row of its node: below the threshold "
            "or not. These bits are part of the model, and are counted over all features together.",
            "The curves show how many bins of other tables an active party recovered from as many sums, by guessing "
            "and by the splits of the model included. They are no bound: the guards are heuristics, and a better "
            "attack needs fewer sums. The upright line is this data set.",
        ),
        columns=("", "so far", "cap"),
        rows=(
            ("sums that a row is in, most", str(found.per_row_max), _cap(found.per_row_cap)),
            ("sums that a row is in, mean", f"{found.per_row_mean:.1f}", ""),
            ("equations per row, most", f"{found.share_max:.3f}", ""),
            ("equations per row, mean over the rows of a node", f"{found.share_mean:.3f}", _cap(found.share_cap)),
            ("splits that divided a row, most", str(found.split_bits_max), _cap(found.split_bits_cap)),
            ("splits that divided a row, mean", f"{found.split_bits_mean:.1f}", ""),
            ("sums of this job", str(found.n_sums), ""),
            ("nodes released by this job", str(found.nodes_released), ""),
            ("nodes withheld by this job", str(found.nodes_withheld), ""),
        ),
        curves=(*(PointCurve(name, points) for name, points in MEASURED.items()), PointCurve("this data set", here)),
        x_label="sums that a row is in, mean",
        y_label="bins recovered",
    )


def _cap(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
