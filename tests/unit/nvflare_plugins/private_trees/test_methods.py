"""The presets' parameters."""

from __future__ import annotations

from nvflare_plugins.private_trees.default_2026_11 import DEFAULT, FEW_ROUNDS
from nvflare_plugins.private_trees.methods import dp_rf


def test_a_forest_of_averages_is_one_batch_without_boosting() -> None:
    forest = dp_rf(50)
    assert (forest.batch_size, forest.learning_rate, forest.ridge, forest.clip) == (50, 1.0, 0.0, 1.0)


def test_the_frozen_defaults_stay_as_they_were_frozen() -> None:
    assert (DEFAULT.n_trees, DEFAULT.depth, DEFAULT.n_candidates, DEFAULT.batch_size) == (200, 4, 32, 1)
    assert (DEFAULT.learning_rate, DEFAULT.ridge, DEFAULT.noise_ridge, DEFAULT.clip) == (0.3, 1.0, 3.0, 2.0)
    assert (FEW_ROUNDS.n_trees, FEW_ROUNDS.batch_size, FEW_ROUNDS.learning_rate) == (240, 10, 1.5)
    assert FEW_ROUNDS.n_trees // FEW_ROUNDS.batch_size + 1 <= 25  # with the message for private quantiles
