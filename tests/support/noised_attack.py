"""The attack on noised sums per bin: the likeliest bin of every row, given the splits and all that the noise leaves.

A row's memberships in the slots of a feature start as the splits leave them, filled as the feature is. Every node's
noised sum is a linear measurement of them, whose noise the active party knows the size of; the best linear estimate
weighs both, and the largest membership is named. With noise of nearly nothing it is least squares from that start, so
that the same attack is its own control.

Noised sums also tell how bins go with labels over all rows, as they are meant to, and this helps to guess bins of rows
that are not among them. Ghosts tell this from what is learnt of a row: rows drawn anew, given all that the active party
knows of a row without the sums. What the attack on the sums of the true rows names of their bins, above what it names
of their ghosts', comes of the row being in the data; and that is what epsilon bounds: true row and ghost are alike to
whoever has not seen the sums, and the sums of neighbouring tables are alike but for the total variation between them.

Security: a tool to judge settings with, as ``bin_attack``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from he_processors.histogram.planner import BinCodes, BinLayout
from nvflare_plugins.kinds.vertical.noised import NoisePlan, NoiseSource
from nvflare_plugins.kinds.vertical.passive_party import PassiveParty
from tests.support.bin_attack import Tap, TreeSums, _left_by_splits, _part_recovered
from tests.support.clear_maker import ClearHistogramMaker
from tests.support.seeded_randomness import SeededRandomness
from tests.support.vertical_federation import Joined, federate, noised_cuts

_JITTER = 1e-9


@dataclass(frozen=True, slots=True)
class NoisedRecovery:
    """Parts of all rows and features whose bin is named rightly: with sums and splits, splits alone, by guessing."""

    with_sums: float
    by_splits: float
    by_guessing: float

    @property
    def gain(self) -> float:
        """What the sums add to the splits."""
        return self.with_sums - self.by_splits


def attack_noised(
    trees: Sequence[TreeSums],
    layout: BinLayout,
    codes: BinCodes,
    scales: tuple[float, float],
    features: Sequence[int] | None = None,
) -> NoisedRecovery:
    """Name the bins of all rows.

    Shapes: codes: uint8 or uint16[n_features, n_rows], the truth.

    Args:
        scales: noise on one sum of g and on one of h. Units: encoded integers.
    """
    chosen = range(layout.n_features) if features is None else features
    n_rows = codes.shape[1]
    allowed = _left_by_splits(trees, layout, n_rows)
    slots = [np.arange(layout.starts[f], layout.starts[f + 1]) for f in chosen]
    lines, sums = _measurements(trees, n_rows, scales)
    found, splits, guess = [], [], []
    for feature, of_feature in zip(chosen, slots, strict=True):
        own = BinLayout((layout.n_bins[feature],))
        truth = codes[[feature]]
        frequency = np.bincount(codes[feature], minlength=of_feature.size) / n_rows
        prior = np.where(allowed[:, of_feature], frequency, 0.0)
        prior /= np.maximum(prior.sum(axis=1, keepdims=True), 1e-12)
        spread = (prior * (1 - prior)).mean(axis=1) + _JITTER  # of a membership that is 0 or 1
        gram = (lines * spread) @ lines.T
        gram[np.diag_indices_from(gram)] += 1.0
        off = sums[:, of_feature] - lines @ prior
        moved = prior + spread[:, None] * (lines.T @ linalg.solve(gram, off, assume_a="pos"))
        found.append(_part_recovered(np.where(allowed[:, of_feature], moved, -1e6), own, truth))
        splits.append(_part_recovered(prior, own, truth))
        guess.append(_part_recovered(np.tile(frequency, (n_rows, 1)), own, truth))
    return NoisedRecovery(float(np.mean(found)), float(np.mean(splits)), float(np.mean(guess)))


def _measurements(
    trees: Sequence[TreeSums], n_rows: int, scales: tuple[float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return equations with noise of size 1. Shapes: float64[n_sums, n_rows], float64[n_sums, n_slots]."""
    lines, sums = [], []
    for tree in trees:
        for rows, node_sums in zip(tree.nodes, tree.sums, strict=True):
            for k, values in enumerate((tree.g, tree.h)):
                line = np.zeros(n_rows)
                line[rows] = values[rows] / scales[k]
                lines.append(line)
                sums.append(node_sums[:, k] / scales[k])
    return np.array(lines), np.array(sums)


# -- a training to attack ---------------------------------------------------------------------------------------------

DELTA = 1e-5
N_FEATURES = 3  # of each party


@dataclass(frozen=True, slots=True)
class Attacked:
    """One training on generated rows, attacked.

    Attributes:
        rows, ghosts: with noised sums; ghosts are named by the sums of the true rows.
        control, control_ghosts: with the same sums before they were noised.
        n_splits: that the passive party won.
    """

    rows: NoisedRecovery
    ghosts: NoisedRecovery
    control: NoisedRecovery
    control_ghosts: NoisedRecovery
    n_splits: int


def attack_generated(seed: int, epsilon: float, n_rows: int = 600) -> Attacked:
    """Train in the preset noised on generated rows, three columns at each party, all randomness seeded, and attack."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_rows, 2 * N_FEATURES)).astype(np.float32)
    label = _labels(features, rng)
    view = View.of(features, label, N_FEATURES, epsilon, seed)
    ghosts = view.party._cuts.codes(_ghosts(features, label, rng).T)
    return Attacked(
        view.attack(view.party._codes),
        view.attack(ghosts),
        view.attack(view.party._codes, is_exact=True),
        view.attack(ghosts, is_exact=True),
        sum(len(tree.splits) for tree in view.trees),
    )


@dataclass(frozen=True, slots=True, repr=False)
class View:
    """What the active party sees of one training of 20 trees, and the passive party, to judge guesses by."""

    plan: NoisePlan
    party: PassiveParty
    trees: Sequence[TreeSums]

    @classmethod
    def of(
        cls, features: NDArray[np.float32], label: NDArray[np.float32], n_own: int, epsilon: float, seed: int
    ) -> View:
        """Train in the preset noised, all features of the passive party in every tree."""
        n_rows, n_passive = len(label), features.shape[1] - n_own
        plan = NoisePlan(epsilon, DELTA, 20, 4, n_passive, 16, 20)
        tap = Tap(plan.pair_format(n_rows), n_rows)
        outcome = federate(
            Joined(features, label, (n_own, n_passive)),
            {"objective": "binary:logistic", "max_depth": 4, "max_bin": 32},
            plan.n_trees,
            scheme=lambda n: (tap, ClearHistogramMaker),
            planned=plan,
            guarded=True,
            listen=tap.listen,
            cuts_of=lambda plan, columns: noised_cuts(plan, columns, SeededRandomness(2 * seed)),
            noise_of=lambda plan, n: NoiseSource(plan.of_party(n), lambda tree: None, SeededRandomness(2 * seed + 1)),
        )
        tap.finish()
        return cls(plan, outcome.passives[0], tap.trees)

    def attack(self, codes: BinCodes, *, is_exact: bool = False) -> NoisedRecovery:
        """Name bins. Args: codes: what is right; is_exact: from the sums before they were noised."""
        layout = self.party._cuts.layout
        if not is_exact:
            return attack_noised(self.trees, layout, codes, self.plan.of_party(layout.n_features).scales)
        hardly = (1 << self.plan.fraction_bits) / 100
        exact = exact_sums(self.trees, layout, self.party._codes)
        return attack_noised(exact, layout, codes, (hardly, hardly))


def exact_sums(trees: Sequence[TreeSums], layout: BinLayout, codes: BinCodes) -> list[TreeSums]:
    """Return the same trees with the sums that the party had before it noised them."""
    found = []
    for tree in trees:
        sums = np.zeros_like(tree.sums)
        pairs = np.stack([tree.g, tree.h], axis=1)
        for node, rows in enumerate(tree.nodes):
            for feature, start in enumerate(layout.starts[:-1]):
                np.add.at(sums[node], start + codes[feature, rows], pairs[rows])
        found.append(dataclasses.replace(tree, sums=sums))
    return found


def _labels(features: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    score = features[:, 0] + 2 * features[:, 3] - features[:, 5] + rng.normal(size=len(features))
    return (score > 0).astype(np.float32)


def _ghosts(features: NDArray[np.float32], label: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw the passive party's columns anew, given those of the active one and the label, by rejection."""
    found = features.copy()
    left = np.arange(len(label))
    while left.size:
        found[left, N_FEATURES:] = rng.normal(size=(left.size, N_FEATURES))
        left = left[_labels(found[left], rng) != label[left]]
    return np.ascontiguousarray(found[:, N_FEATURES:])
