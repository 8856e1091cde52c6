"""XGBoost's random numbers: which rows and columns it samples.

XGBoost draws them from its own generators, and these draw the same: a Mersenne twister seeded with ``seed``
for each training, another one for columns (3.2: one for the training; 3.3: a fresh one for each sample), and a linear
congruential sequence for the rows of a tree. The shuffle is
that of the standard library that the wheel is built with (libstdc++ of GCC 10).

Security: reproducible by design: who knows the seed knows which rows each tree sampled, and a tree of few rows tells a
    party that sees how nodes divide which of those rows have equal labels. The seed in the job is known to all, so rows
    are drawn from one that the active party makes (``with_own_seed``). XGBoost's generator takes 32 bits of it: a party
    that searches them all may find it, from the columns drawn or from nodes of few rows.
Reference: XGBoost 3.2 and 3.3, src/common/random.h, src/common/random.cc, src/tree/hist/sampler.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below
from nvflare_plugins.growth.arithmetic import Arithmetic, TreeParameters
from nvflare_plugins.xgb.parameters import TrainingParameters

_SEEDS = 2**32  # all that the generator tells apart
_TWISTER_RANGE = 2**32 - 1  # largest output minus smallest
_ROW_FACTOR = np.uint64(16807)
_SEED_OF_ROUND = 127
_ROW_MASK = np.uint64(2**63 - 1)


def with_own_seed(params: TrainingParameters, randomness: RandomSource = OS_RANDOMNESS) -> TrainingParameters:
    """Return the parameters with a fresh secret seed if rows are sampled; the job's seed is known to all parties.

    The model then equals the centralized one that is trained with this seed.
    """
    if float(params.effective["subsample"]) >= 1:
        return params
    return dataclasses.replace(params, agreed={**params.agreed, "seed": random_below(_SEEDS, randomness)})


class XGBoostRandom:
    """std::mt19937 with the integer distribution of libstdc++."""

    def __init__(self, seed: int):
        self._bits = np.random.MT19937()
        state: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)
        self._bits.state = state

    def draw(self) -> int:
        """Return the next 32 bits."""
        return int(self._bits.random_raw())

    def below(self, n: int) -> int:
        """Draw from [0, n) as std::uniform_int_distribution does, by scaling down with rejection."""
        scaling = _TWISTER_RANGE // n
        while True:
            value = self.draw()
            if value < n * scaling:
                return value // scaling

    def shuffle(self, items: list[int]) -> None:
        """Permute in place as std::shuffle does: two positions from one draw where that fits."""

        def swap(i: int, j: int) -> None:
            items[i], items[j] = items[j], items[i]

        n = len(items)
        if n < 2:
            return
        if _TWISTER_RANGE // n < n:
            for i in range(1, n):
                swap(i, self.below(i + 1))
            return
        first = 1
        if n % 2 == 0:
            swap(1, self.below(2))
            first = 2
        for i in range(first, n, 2):
            one, two = divmod(self.below((i + 1) * (i + 2)), i + 2)
            swap(i, one)
            swap(i + 1, two)


def sampled_rows(n_rows: int, subsample: np.float32, tree_seed: int) -> NDArray[np.bool_]:
    """Return which rows a tree keeps; the same for every number of threads.

    Shapes: result: bool[n_rows].

    Args:
        tree_seed: the draw of the global generator that belongs to the tree.
    """
    state = np.full(n_rows + 1, _ROW_FACTOR, dtype=np.uint64)
    state[0] = tree_seed or 1
    # Products wrap modulo 2^64, which the sequence's modulus 2^63 divides.
    outputs = np.multiply.accumulate(state)[1:] & _ROW_MASK
    uniform = (outputs - np.uint64(1)).astype(np.float64) / 2.0**63
    return uniform < np.float64(subsample)


def first_pair_seed(arithmetic: Arithmetic, seed: int, n_queries: int) -> int:
    """Return what pairs of rows are drawn from for the base score: the training's first number, or its round 0."""
    return XGBoostRandom(seed).draw() if arithmetic.draws_pair_seeds else n_queries


class TreeRandom:
    """What one training of XGBoost draws: the columns of trees, levels and nodes, and the seeds of its trees' rows."""

    def __init__(
        self, params: TreeParameters, n_columns: int, arithmetic: Arithmetic, seed: int, *, per_iteration: bool = False
    ) -> None:
        """Prepare for one training. Args: per_iteration: ``seed_per_iteration``: each round begins anew."""
        self._seed, self._per_iteration = seed, per_iteration
        self._shared = XGBoostRandom(seed)
        self._one_generator, self._draws_pairs = arithmetic.one_column_generator, arithmetic.draws_pair_seeds
        self._own: XGBoostRandom | None = None
        self.columns = ColumnSampler(params, n_columns, lambda: self._own or XGBoostRandom(self._shared.draw()))

    def begin_round(self, number: int) -> None:
        """Begin a round; call before anything of it is drawn."""
        if self._per_iteration:
            self._shared = XGBoostRandom(self._seed * _SEED_OF_ROUND + number)
        if self._one_generator and self._own is None:
            self._own = XGBoostRandom(self._shared.draw())
            self.columns.begin_tree()  # XGBoost 3.2 samples once more when it sets itself up

    def pair_seed(self, number: int, n_queries: int) -> int:
        """Return what a round draws pairs of rows from; call before its columns are drawn, once a round.

        Args:
            number: of the round; XGBoost draws for the base score as for round 0, before that begins.
            n_queries: of all sites.
        """
        return self._shared.draw() if self._draws_pairs else (number + 1) * n_queries

    def row_seed(self) -> int:
        """Draw the seed of a tree's ``sampled_rows``: before the tree's columns are drawn, and only below 1."""
        return self._shared.draw()


class ColumnSampler:
    """Which columns a tree, a level and a node may use.

    One sampler serves a whole training.
    """

    def __init__(self, params: TreeParameters, n_columns: int, generator: Callable[[], XGBoostRandom]):
        """Prepare for one training.

        Args:
            generator: gives what the next sample is drawn from: XGBoost 3.2 goes on with one generator from tree to
                tree, 3.3 seeds one for each sample.
        """
        self._params = params
        self._n_columns = n_columns
        self._generator = generator
        self._levels: dict[int, list[int]] = {}
        self._tree = list(range(n_columns))

    @property
    def samples_nodes(self) -> bool:
        """Whether nodes may use fewer columns than their tree."""
        return bool(self._params.colsample_bylevel != 1 or self._params.colsample_bynode != 1)

    def begin_tree(self) -> None:
        """Sample the columns of the next tree."""
        self._levels = {}
        self._tree = self._sample(list(range(self._n_columns)), self._params.colsample_bytree)

    def tree_columns(self) -> NDArray[np.bool_]:
        """Return the columns that the tree may use at all. Shapes: bool[n_columns]."""
        return self._mask(self._tree)

    def node_columns(self, depth: int) -> NDArray[np.bool_]:
        """Sample the columns of a node; call once for each node, in XGBoost's order. Shapes: bool[n_columns]."""
        params = self._params
        if not self.samples_nodes:
            return self._mask(self._tree)
        if depth not in self._levels:
            self._levels[depth] = self._sample(self._tree, params.colsample_bylevel)
        return self._mask(self._sample(self._levels[depth], params.colsample_bynode))

    def _sample(self, columns: list[int], share: np.float32) -> list[int]:
        if share == 1:
            return columns
        chosen = list(columns)
        self._generator().shuffle(chosen)
        return sorted(chosen[: max(1, int(share * np.float32(len(columns))))])

    def _mask(self, columns: list[int]) -> NDArray[np.bool_]:
        mask = np.zeros(self._n_columns, dtype=bool)
        mask[columns] = True
        return mask
