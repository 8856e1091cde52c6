"""The same training in one process with numpy alone: for experiments, and as the naive twin of the federated path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.leaf_weights.noise_ridge import noise_proportional_ridge
from dp_components.mechanisms.gaussian import add_gaussian_noise
from dp_components.split_candidates.candidates import Candidates, FeatureBounds
from dp_components.split_methods.tree import Tree
from nvflare_plugins.private_trees.forest_trainer import ForestGrower, GrownTree, OwnRows
from nvflare_plugins.private_trees.methods import Method
from nvflare_plugins.private_trees.noise_plan import Mechanism, NoisePlan
from nvflare_plugins.wire.catalogue import Kind


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to train on or to score. Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows]."""

    columns: NDArray[np.float32]
    label: NDArray[np.float32]


class Simulation:
    """One training; ``run`` returns the scores of the test rows."""

    def __init__(
        self,
        method: Method,
        train: Table,
        test: Table,
        bounds: Sequence[FeatureBounds],
        plan: NoisePlan,
        seed: int,
        mechanism: Mechanism = add_gaussian_noise,
        noise_factor: float = 1.0,
    ):
        """Args: noise_factor: total over needed noise where sites add shares (the sum of shares is drawn at once)."""
        self._test, self._plan, self._mechanism, self._noise_factor = test, plan, mechanism, noise_factor
        ridge = noise_proportional_ridge(method.ridge, method.noise_ridge, plan.gradient_std * noise_factor)
        rows = OwnRows(train.columns, train.label)
        self._grower = ForestGrower(method, rows, bounds, plan, seed, self._noisy, ridge, noise_factor)
        self._candidates: Candidates | None = None
        self._bins = np.empty((0, 0), dtype=np.uint8)
        self._scores = np.zeros(test.label.size, dtype=np.float32)
        self.trees: list[tuple[Tree, NDArray[np.float32]]] = []

    def run(self) -> NDArray[np.float32]:
        """Train and score. Shapes: result: float32[n_test_rows], raw scores."""
        self._grower.run(self._score, lambda batch: None)
        return self._scores

    def _score(self, batch: int, trees: list[GrownTree]) -> None:
        for grown in trees:
            if grown.candidates is not self._candidates:  # they hardly ever change
                self._candidates, self._bins = grown.candidates, grown.candidates.bin_rows(self._test.columns)
            self._scores += grown.outputs[grown.tree.leaf_of_rows(self._bins)]
            self.trees.append((grown.tree, grown.outputs))

    def _noisy(self, kind: Kind, sums: NDArray[np.int64], what: str, sizes: Sequence[int]) -> NDArray[np.int64]:
        planned = self._plan.of_kind(kind)
        return self._mechanism(sums, planned.sensitivity, planned.multiplier * self._noise_factor).value
