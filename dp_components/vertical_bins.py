"""Noised sums per bin of a party that has features but no label: what a change of its rows can do to all of them.

A party P holds features x of n rows. Another party A holds a gradient pair (g, h) for each row and tree, which it sends
encrypted, asks P for sums of pairs per bin of P's features over the rows of tree nodes, and may choose everything it
asks by what it got before. P answers each question on sums with sums plus noise; besides, P tells for splits of its own
which rows go left (partition bits).

**Statement.** Let b be any function that answers A's questions on splits from the question and what was said before,
and let M_b(x) be all that A receives when P's bits are taken from b, in the place of x, and everything else is computed
from x: cut points by a noisy descent (split_candidates/dp_quantiles.py), and of each tree sums per bin for at most
one node of a level on every path, in at most K features, over at most D levels, each plus noise of its own. For every
strategy of A, every b, and all x and x' that differ in the features of one row, M_b(x) and M_b(x') are
(epsilon, delta)-close, with epsilon and delta composed from the events of ``tree_event`` and ``descent_event``.

What it says of the real protocol, in which the bits are those of x: **given** the bits, the noised sums tell no more of
one row's features than (epsilon, delta). The bits themselves are outside: they adapt to the data, they are exact, and
whoever sees them learns on which side of each such split every row of the node lies. They are not covered by epsilon;
P counts them and caps them (``vertical.max_split_bits_per_row`` in its policy).

**Proof.** Condition on all that was said so far. Node membership is a function of that and of b, not of x: the two
worlds ask for the same nodes with the same rows. Where x is changed in row i, the pair of row i leaves one bin and
enters another, in each of the K features of each node that holds row i; nodes of one level are disjoint, so there are D
such nodes of a tree at most, and 2 D K changed sums of g and of h. In encoded integers |g| <= U and 0 <= h <= U by the
number format, so the weighted square of the change of a tree is at most 2 D K U^2 (1 + w^2), w the weight of h. That
bounds the step of an adaptive Gaussian mechanism at each answer, and the sum of the squares bounds the whole tree
(Gaussian differential privacy composes adaptively). Both children of a divided node may be asked for: they are
disjoint. Cut points do depend on x, through many rows at once; they are found with noise and paid for, and after that
every row is binned by itself. []

Sample weights are A's, and the same in both worlds. They scale what A encrypts: U is the encoded bound of the heaviest
row's pair, so that the bound above holds for every row, and noise counts rows of that weight. No weight has to be
public for it.

Workers: where P's rows lie at workers of its own, what they return is joined before noise is added, once for P. Noise
of each worker's own would be more than is paid for and no better; the statement is on what leaves P.

A tree that is begun again, because a party was lost, is a further tree: it has noise of its own and is paid for again,
whatever A says of the sums that it had. P adds noise to ciphertexts and never sees what A opens, so that it cannot send
the same noised numbers again; and the same noise on sums of other gradients would show their difference exactly.

Not in the statement: what an A that sends other than gradient pairs within U learns. P cannot see what it adds; such
an A needs no more than one row with a pair beyond the format. So A is honest but curious.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dp_components.events import DiscreteGaussianEvent, NeighbouringRelation
from dp_components.mechanisms import draw_noise, gaussian_event, share_scales
from dp_components.sensitivity import Norm, Sensitivity
from he_processors.randomness import OS_RANDOMNESS, RandomSource

HESSIAN_WEIGHT = 0.5
"""Noise on sums of h is twice that on sums of g, in encoded integers: weights 1/4 to 1 made no difference to AUC."""


def tree_sensitivity(n_features: int, depth: int, largest: int) -> Sensitivity:
    """Return the joint sensitivity of all sums per bin of one tree.

    Args:
        n_features: most features of the party that the tree uses.
        depth: most nodes on a path whose sums are asked for: the levels of the tree that are split.
        largest: U, the largest |g| and the largest h of a row, as encoded integers.

    Raises:
        ValueError: a number below 1.
    """
    if min(n_features, depth, largest) < 1:
        raise ValueError("a tree needs features, levels and pairs that are not all zero")
    bound = largest * math.sqrt(2 * depth * n_features * (1 + HESSIAN_WEIGHT**2)) * (1 + 2.0**-50)
    return Sensitivity(bound, Norm.L2, NeighbouringRelation.REPLACE_ROW, (1.0, HESSIAN_WEIGHT))


def tree_event(n_sums: int, sensitivity: Sensitivity, noise_multiplier: float) -> DiscreteGaussianEvent:
    """Return what one tree costs. Args: n_sums: most bins over all nodes and features, of which each has two sums."""
    return gaussian_event(2 * n_sums, sensitivity, noise_multiplier)


def bin_scales(sensitivity: Sensitivity, noise_multiplier: float) -> tuple[float, float]:
    """Return the noise on one sum of g and on one of h. Units: encoded integers."""
    g, h = share_scales(sensitivity, noise_multiplier)
    return g, h


def draw_bin_noise(
    n_bins: int, scales: tuple[float, float], randomness: RandomSource = OS_RANDOMNESS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw noise for the sums of g and of h of some bins, empty ones too: each value is used once.

    Shapes:  results: int64[n_bins] each.
    Privacy: the event of the bins' tree must be charged before it is called.
    """
    drawn = draw_noise((n_bins, 2), scales, randomness)
    return np.ascontiguousarray(drawn[:, 0]), np.ascontiguousarray(drawn[:, 1])
