"""The presets' parameters."""

from __future__ import annotations

from dp_components.leaf_weights import CLIPPED_AT
from nvflare_plugins.kinds.private_trees.methods import (
    DEFAULT_2026_11,
    DEFAULT_2026_12,
    FEW_ROUNDS,
    dp_rf,
    resolve_method,
)


def test_a_forest_of_averages_is_one_batch_without_boosting() -> None:
    forest = dp_rf(50)
    assert (forest.batch_size, forest.learning_rate, forest.ridge, forest.clip) == (50, 1.0, 0.0, 1.0)


def test_the_frozen_defaults_stay_as_they_were_frozen() -> None:
    assert (
        DEFAULT_2026_11.n_trees,
        DEFAULT_2026_11.depth,
        DEFAULT_2026_11.n_candidates,
        DEFAULT_2026_11.batch_size,
    ) == (200, 4, 32, 1)
    assert (
        DEFAULT_2026_11.learning_rate,
        DEFAULT_2026_11.ridge,
        DEFAULT_2026_11.noise_ridge,
        DEFAULT_2026_11.clip,
    ) == (0.3, 1.0, 3.0, 2.0)
    assert (FEW_ROUNDS.n_trees, FEW_ROUNDS.batch_size, FEW_ROUNDS.learning_rate) == (240, 10, 1.5)
    newer = DEFAULT_2026_12
    assert (newer.n_trees, newer.depth, newer.n_candidates, newer.batch_size) == (300, 4, 32, 1)
    assert (newer.learning_rate, newer.ridge, newer.noise_ridge, newer.clip) == (0.3, 1.0, 5.0, 2.0)
    assert (newer.query.name, newer.interactions.name, CLIPPED_AT) == ("CLIPPED", "INFORMED", 0.6)
    assert FEW_ROUNDS.n_trees // FEW_ROUNDS.batch_size + 1 <= 25  # with the message for private quantiles


def test_the_default_is_the_newest_and_older_ones_stay_selectable() -> None:
    assert resolve_method("default", {}, 5) == resolve_method("default_2026_12", {}, 5) == DEFAULT_2026_12
    assert resolve_method("default_2026_11", {}, 5) == DEFAULT_2026_11
