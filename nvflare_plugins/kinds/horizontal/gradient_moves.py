"""Whether a site's gradients have moved since states that it has entered with other sites.

A state is new by its trees, and sums depend on predictions: where a round moves none, the sums of all sites before it
less those of the sites left after it are what the lost site sent. So each site looks at its own rows before it sends
anything at such a state. It keeps no gradient: it computes those of each state anew, from the model and its rows.

What it asks for: its |changes| add up to 1 % of its |gradients|, over all its rows, and in each leaf of the rounds that
lie between. Where one round lies between, that is in every leaf, for the bins of one that does not move come out
exactly. Where more do, it is in leaves with a fifth of the gradients or more: of many small leaves, over many pairs of
states, a few come back by chance, and nobody can tell which.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray

from nvflare_plugins.data.table import Table
from nvflare_plugins.pooled.row_floors import Draws, row_weights
from nvflare_plugins.xgb.matrices import every_nth
from nvflare_plugins.xgb.model_json import trees_model
from nvflare_plugins.xgb.objectives import gradients
from nvflare_plugins.xgb.parameters import TrainingParameters

LEAST_CHANGE = 0.01
_LARGE_LEAF = 0.2
_MOST_ROWS = 5_000  # more are looked at one in so many: a leaf is that of its rows, whichever these are


@dataclass(frozen=True, slots=True)
class States:
    """States that a model has passed through. Attributes: rounds: how many it had at each, in ascending order."""

    model: bytes
    rounds: Sequence[int]


@dataclass(frozen=True, slots=True)
class GradientMoves:
    """The rows of one site. Attributes: draws: which take part in each round; None for all."""

    table: Table
    parameters: TrainingParameters
    draws: Draws | None

    def have_moved(self, model: bytes, round_number: int, earlier: Sequence[States]) -> bool:
        """Tell whether this site's gradients at a model differ enough from those at states before.

        Args:
            round_number: of the round that begins with the model, which decides what rows take part.
        """
        # XGBoost of this thread may be in the middle of a training, and would ask the other sites.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._have_moved, model, round_number, earlier).result()

    def _have_moved(self, model: bytes, round_number: int, earlier: Sequence[States]) -> bool:
        every = max(1, -(-self.table.n_rows // _MOST_ROWS))
        label = self.table.label[::every].astype(np.float64)
        if not label.size:
            return True
        matrix = every_nth(self.table, every)
        params = self.parameters.effective
        weight = row_weights(self.table, float(params.get("scale_pos_weight", 1.0)))[::every]
        if self.draws is not None:
            weight = weight * self.draws.of_round(round_number)[::every]
        new = _Walk(model, matrix)
        *_, at_new = new.margins()
        gradient = gradients(params, at_new, label)
        for states in earlier:
            old = _Walk(states.model, matrix)
            n_alike = old.rounds_alike(new)
            for n_rounds, margins in enumerate(old.margins()):
                if n_rounds in states.rounds:
                    before = gradients(params, margins, label)
                    changed, mass = (np.abs(one) * weight[:, None] for one in (gradient - before, before))
                    first = min(n_alike, n_rounds)
                    is_next = max(new.n_rounds, n_rounds) - first <= 1
                    for walk, last in ((new, new.n_rounds), (old, n_rounds)):
                        if not walk.have_moved(first, last, changed, mass, 0.0 if is_next else _LARGE_LEAF):
                            return False
        return True


class _Walk:
    """A model's rounds over some rows."""

    def __init__(self, model: bytes, matrix: xgb.DMatrix) -> None:
        within = trees_model(json.loads(model)["learner"])
        self.trees, self._outputs, self._ends = within["trees"], within["tree_info"], within["iteration_indptr"]
        self.n_rounds = len(self._ends) - 1
        self._starts = np.cumsum([0, *(len(tree["left_children"]) for tree in self.trees)])
        self._booster = xgb.Booster({"nthread": 1}, model_file=bytearray(model))
        self._matrix = matrix

    @cached_property
    def _leaf(self) -> NDArray[np.int64]:
        found = self._booster.predict(self._matrix, pred_leaf=True)
        return found.reshape(self._matrix.num_row(), len(self.trees)).astype(np.int64)

    def margins(self) -> Iterator[NDArray[np.float64]]:
        """Yield the margins before the first round and after each. Shapes: float64[n_rows, n_outputs]."""
        n_rows = self._matrix.num_row()
        first = self._booster.predict(self._matrix, output_margin=True, iteration_range=(0, 1)).astype(np.float64)
        margins = first.reshape(n_rows, -1) - self._of_round(0, first.size // n_rows)
        yield margins.copy()
        for number in range(self.n_rounds):
            margins = margins + self._of_round(number, margins.shape[1])
            yield margins

    def have_moved(
        self, first: int, last: int, changed: NDArray[np.float64], mass: NDArray[np.float64], least_part: float
    ) -> bool:
        """Tell whether the rows have, together and in each leaf of some rounds that holds that part of their mass.

        Shapes: changed, mass: float64[n_rows, n_outputs], |changes| and |gradients|.
        """
        for output in range(mass.shape[1]):
            of_all = mass[:, output].sum()
            if changed[:, output].sum() < LEAST_CHANGE * of_all:
                return False
            of_rounds = range(self._ends[first], self._ends[last])
            trees = [tree for tree in of_rounds if self._outputs[tree] == output]
            places = (self._leaf[:, trees] + self._starts[trees]).reshape(-1)
            moved, of_leaf = (np.bincount(places, np.repeat(one[:, output], len(trees))) for one in (changed, mass))
            if np.any((moved < LEAST_CHANGE * of_leaf) & (of_leaf >= least_part * of_all)):
                return False
        return True

    def rounds_alike(self, other: _Walk) -> int:
        """Return how many rounds, from the first, are the same in both."""
        for number in range(min(self.n_rounds, other.n_rounds)):
            trees = slice(self._ends[number], self._ends[number + 1])
            if self.trees[trees] != other.trees[trees]:
                return number
        return min(self.n_rounds, other.n_rounds)

    def _of_round(self, number: int, n_outputs: int) -> NDArray[np.float64]:
        given = np.zeros((self._matrix.num_row(), n_outputs))
        for tree in range(self._ends[number], self._ends[number + 1]):
            values = np.array(self.trees[tree]["split_conditions"], dtype=np.float64)
            given[:, self._outputs[tree]] += values[self._leaf[:, tree]]
        return given
