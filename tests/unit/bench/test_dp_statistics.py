"""When the benchmark calls a difference a win."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.bench_dp import Report
from tests.bench.dp_statistics import Scored, Series, calibration_error, reliability, verdict


def series(auc: list[float]) -> Series:
    return Series(np.array(auc), np.zeros(len(auc)), seconds=2.0, epsilon_spent=0.1, messages=25)


def test_repeats_are_averaged_within_their_split() -> None:
    runs = [[Scored(0.6, 0.5, 1.0, 0.1, 3), Scored(0.8, 0.3, 3.0, 0.2, 4)], [Scored(0.5, 0.5), Scored(0.5, 0.5)]]
    result = Series.of(runs)
    assert result.auc == pytest.approx([0.7, 0.5])
    assert result.log_loss == pytest.approx([0.4, 0.5])
    assert (result.seconds, result.epsilon_spent, result.messages) == (1.0, 0.2, 4)


def test_the_variance_is_corrected_for_overlapping_splits() -> None:
    """Differences 1, 2, 3: mean 2, sd 1, so t = 2 / sqrt(1/3 + 3/7) = 2.2913 with 2 degrees of freedom, p = 0.1490."""
    outcome, p = verdict(series([1.0, 2.0, 3.0]), series([0.0, 0.0, 0.0]))
    assert outcome == "ties"
    assert p == pytest.approx(0.1490, abs=1e-4)


def test_probabilities_that_are_shares_have_no_calibration_error() -> None:
    """Bins 0.2 and 0.7: 2 of 10 and 7 of 10 rows are positive; moved up by .02 each is .02 apart, shuffled far more."""
    p = np.repeat([0.2, 0.7], 10)
    label = (np.tile(np.arange(10), 2) < np.repeat([2, 7], 10)).astype(np.float32)
    assert calibration_error(label, p) == pytest.approx(0, abs=1e-12)
    assert calibration_error(label, p + 0.02) == pytest.approx(0.02)
    assert calibration_error(label, np.ones(20)) == pytest.approx(0.55)
    assert calibration_error(label, p[::-1]) == pytest.approx(0.5)


def test_a_tenth_of_the_rows_has_its_mean_probability_and_its_share() -> None:
    p = np.repeat(np.arange(10) / 10, 4)
    label = np.tile([0, 1, 1, 1], 10).astype(np.float32)
    table = reliability(label[::-1].copy(), p[::-1].copy())
    assert np.array(table) == pytest.approx(np.array([(k / 10, 0.75) for k in range(10)]))
    runs = [[Scored(0.5, 0.5, reliability=table), Scored(0.5, 0.5, reliability=((0.0, 0.25),) * 10)]]
    assert np.array(Series.of(runs).reliability) == pytest.approx(np.array([(k / 20, 0.5) for k in range(10)]))


def test_wins_and_losses_are_told_apart() -> None:
    low, high = series([0.70, 0.71, 0.72, 0.70]), series([0.75, 0.76, 0.775, 0.75])
    assert verdict(high, low)[0] == "wins"
    assert verdict(low, high)[0] == "losses"
    assert verdict(low, low)[0] == "ties"


def test_the_report_counts_outcomes_per_arm() -> None:
    report = Report()
    low, high = series([0.70, 0.71, 0.72, 0.70]), series([0.75, 0.76, 0.775, 0.75])
    report.add("trusted", "a 0.1", high, low)
    report.add("trusted", "a 1", high, low)
    report.add("distributed", "a 0.1", low, high)
    text = report.as_json(extra=1)
    for part in (
        '"wins": {"trusted": 2, "distributed": 0}',
        '"losses": {"trusted": 0, "distributed": 1}',
        '"rounds": {"trusted": 25, "distributed": 25}',
        '"extra": 1',
    ):
        assert part in text
    assert "\n" not in text
