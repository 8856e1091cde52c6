"""What noised sums give away of single rows: no more than epsilon allows, where exact sums give away most.

The attack names the likeliest bin of every row of every feature (tests/support/noised_attack.py). Whoever names bins
from a view that is mu-GDP for a change of one row's features names those of the row more often than those of its ghost
by the total variation between neighbours at most, 2 Phi(mu / 2) - 1. The bits of splits are outside of that: what
splits alone tell of the rows above their ghosts is added. Everything is seeded.
"""

from __future__ import annotations

import math

import pytest
from scipy import stats

from tests.support.calibration import mu_for
from tests.support.noised_attack import DELTA, N_FEATURES, attack_generated

N_ROWS = 600
SLACK = 3 * math.sqrt(0.5 / (N_ROWS * N_FEATURES))
"""Three standard deviations of a difference of two rates over so many guesses, were they independent."""


def most(epsilon: float) -> float:
    return 2 * stats.norm.cdf(mu_for(epsilon, DELTA) / 2) - 1


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_of_a_row_itself_noised_sums_tell_no_more_than_epsilon_allows(epsilon):
    found = attack_generated(4, epsilon, N_ROWS)
    of_bits = found.rows.by_splits - found.ghosts.by_splits
    assert found.rows.with_sums <= found.ghosts.with_sums + of_bits + most(epsilon) + SLACK
    # The attack works where there is no noise: it names rows' bins, and not those of their ghosts.
    assert found.control.with_sums > found.control_ghosts.with_sums + of_bits + most(epsilon) + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [4.0, 10.0])
def test_where_the_model_has_splits_of_the_party_sums_add_two_points_at_most(epsilon):
    found = attack_generated(4, epsilon, N_ROWS)
    assert found.n_splits > 3
    assert found.rows.gain <= 0.02
    assert found.control.gain > 0.15
