"""How far the noise of a private training may have moved a score: from the model and public figures alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_noise import N_DRAWS, NORMAL_95, LeafMaking, NoisedLeaves, drawn_again
from dp_components.leaf_weights import GradientWeights, LeafQuery, LeafWeights, NewtonWeights
from nvflare_plugins.pages.run_record import FILE_NAME, LeafNoise, RunRecord
from nvflare_plugins.scoring.model import FinishedModel, ScoringError
from nvflare_plugins.xgb.continuation import recalibrated
from nvflare_plugins.xgb.model_json import numbers_of, trees_model

_SAMPLE = 1000
_AT_ONCE = 4000  # rows, whose moves are held
_WEIGHTS: Mapping[str, type[LeafWeights]] = {
    "gradient": GradientWeights,
    "newton": NewtonWeights,
}


class NoiseOfScores:
    """What other noise would have made of a private model's scores; see ``drawn_again``.

    Later trees take back a part of what earlier ones did wrong, which depends on how the training rows lie. Nothing is
    known of them but the noised sums: the sample has each feature as these have it, and features independent.

    Attributes:
        of_sample: deviations of the sample's margins. Shapes: float64[n].

    Raises:
        ScoringError: leaves were made in a way that is not known.
    """

    def __init__(self, model: FinishedModel, noise: LeafNoise) -> None:
        self._model, inside = model, trees_model(model.document()["learner"])
        try:
            weights, query = _WEIGHTS[noise.update](), LeafQuery[noise.query.upper()]
        except KeyError:
            raise ScoringError(
                f"the run of {model.name} names leaves that are not known here: {noise.update}, {noise.query}. Ask "
                "with the VeilBoost that trained it."
            ) from None
        std = noise.gradient, noise.hessian
        making = LeafMaking(weights, query, std, noise.ridge, noise.clip, noise.scale)
        trees = [_Arrays(tree) for tree in inside["trees"]]
        sample = _sample(trees, len(model.features))
        nodes, self._nodes = model.leaves(sample), [tree.leaves for tree in trees]
        noised = [
            NoisedLeaves(tree.sums(noise), np.searchsorted(tree.leaves, of_rows))
            for tree, of_rows in zip(trees, nodes.T, strict=True)
        ]
        ends = inside["iteration_indptr"]
        self._moves = drawn_again([noised[a:b] for a, b in pairwise(ends)], making)
        self.of_sample = self.deviations(sample)

    @classmethod
    def of_run(cls, folder: Path, model: FinishedModel) -> Self | None:
        """Return the noise in a private model's scores by the record of its run; None where it tells none of it."""
        if not (folder / FILE_NAME).exists():
            return None
        noise = RunRecord.read(folder).leaf_noise
        is_its_own = noise is not None and noise.model_sha256 == hashlib.sha256(model.content).hexdigest()
        return cls(model, noise) if noise is not None and is_its_own else None

    def deviations(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return each row's deviation of the margin. Shapes: float32[n_rows, n_features] -> float64[n_rows]."""
        found = np.empty(len(values))
        for first in range(0, len(values), _AT_ONCE):
            nodes = self._model.leaves(values[first : first + _AT_ONCE])
            moved = np.zeros((len(nodes), N_DRAWS), dtype=np.float32)
            for of_rows, leaves, moves in zip(nodes.T, self._nodes, self._moves, strict=True):
                moved += moves[np.searchsorted(leaves, of_rows)]
            found[first : first + _AT_ONCE] = moved.std(axis=1)
        return found

    def columns(self, values: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Return the margin's deviation, and the ends of 95 % for the second class's probability, or the number."""
        deviation, margin = self.deviations(values), self._model.predict(values, output_margin=True).astype(np.float64)
        ends = [self._answer(margin + sign * NORMAL_95 * deviation) for sign in (-1, 1)]
        return {"noise_std": deviation.astype(np.float32), "noise_low": ends[0], "noise_high": ends[1]}

    def _answer(self, margin: NDArray[np.float64]) -> NDArray[np.float32]:
        if not self._model.has_probabilities:
            return margin.astype(np.float32)
        p = (1 / (1 + np.exp(-np.clip(margin, -80, 80)))).astype(np.float32)
        return p if self._model.clipped_at is None else recalibrated(p, self._model.clipped_at)


class _Arrays:
    """A tree of a model document."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.left, self.right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
        self.feature, self.value = int(tree["split_indices"][0]), numbers_of(tree["split_conditions"])
        self.features = np.asarray(tree["split_indices"])
        self.cover, self.leaves = numbers_of(tree["sum_hessian"]), np.flatnonzero(self.left < 0)

    def sums(self, noise: LeafNoise) -> NDArray[np.float64]:
        """Return the leaves' G and H, as their answers and covers tell. Shapes: float64[n_leaves, 2]."""
        hessian, weight = self.cover[self.leaves], self.value[self.leaves] / noise.scale
        return np.stack([-weight * (hessian + noise.ridge), hessian], axis=1)


def _sample(trees: Sequence[_Arrays], n_features: int) -> NDArray[np.float32]:
    """Draw rows with independent features; each root's noised covers weigh its feature's two sides."""
    random, columns = np.random.default_rng(1), []
    for feature in range(n_features):
        split = [tree.value[(tree.left >= 0) & (tree.features == feature)] for tree in trees]
        cuts = np.unique(np.concatenate(split).astype(np.float32))
        share = np.full(cuts.size + 1, 1 / (cuts.size + 1))
        for tree in trees:
            if tree.left[0] >= 0 and tree.feature == feature:
                middle = np.searchsorted(cuts, np.float32(tree.value[0])) + 1
                for side, child in ((share[:middle], tree.left[0]), (share[middle:], tree.right[0])):
                    side *= (max(tree.cover[child], 0) + 1) / (side.sum() * max(tree.cover[0], 0) + 1)
                share /= share.sum()
        below = np.nextafter(cuts[:1], np.float32(-np.inf)) if cuts.size else np.zeros(1, dtype=np.float32)
        columns.append(np.concatenate([below, cuts])[random.choice(share.size, _SAMPLE, p=share)])
    return np.stack(columns, axis=1).astype(np.float32)
