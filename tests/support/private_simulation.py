"""The sites' trainer on all rows in one process, without protocol: for experiments, and as an oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_components.mechanisms import add_noise
from dp_components.split_candidates.candidates import Candidates
from dp_components.split_methods.tree import Tree
from nvflare_plugins.kinds.private_trees.forest import ForestGrower, GrownTree
from nvflare_plugins.kinds.private_trees.noisy_sums import Mechanism
from nvflare_plugins.kinds.private_trees.plan import OwnRows, PrivateTreesPlan, ReleaseSchedule
from nvflare_plugins.wire.envelope import Kind


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to train on or to score. Shapes: columns: float32[n_features, n_rows]; label: float32[n_rows]."""

    columns: NDArray[np.float32]
    label: NDArray[np.float32]


class MechanismSums:
    """Noises each planned release by a mechanism; the sum of the sites' shares is drawn at once."""

    def __init__(self, plan: PrivateTreesPlan, mechanism: Mechanism) -> None:
        self._due, self._mechanism, self._factor = ReleaseSchedule(plan.releases), mechanism, plan.trust.noise_factor

    def release(
        self, kind: Kind, number: int, exact: NDArray[np.int64], tree: int | None = None, level: int | None = None
    ) -> NDArray[np.int64]:
        """Return noisy sums; see ``SumsOverSites``."""
        noise = self._due.take(kind, number, exact.size, tree, level).noise
        return self._mechanism(exact, noise.sensitivity, noise.multiplier * self._factor).value


class Simulation:
    """One training; ``run`` returns the scores of the test rows."""

    def __init__(self, plan: PrivateTreesPlan, train: Table, test: Table, mechanism: Mechanism = add_noise) -> None:
        self._test = test
        self._grower = ForestGrower(plan, OwnRows(train.columns, train.label), MechanismSums(plan, mechanism))
        self.candidates: Candidates | None = None
        self._bins = np.empty((0, 0), dtype=np.uint8)
        self._scores = np.zeros(len(test.label), dtype=np.float32)
        self.trees: list[tuple[Tree, NDArray[np.float32]]] = []

    def run(self) -> NDArray[np.float32]:
        """Train and score. Shapes: result: float32[n_test_rows], raw scores."""
        self._grower.run(lambda number: None, self._score)
        return self._scores

    def _score(self, number: int, trees: list[GrownTree]) -> None:
        for grown in trees:
            if grown.candidates is not self.candidates:  # they hardly ever change
                self.candidates, self._bins = grown.candidates, grown.candidates.bin_rows(self._test.columns)
            self._scores += grown.outputs[grown.tree.leaf_of_rows(self._bins)]
            self.trees.append((grown.tree, grown.outputs))
