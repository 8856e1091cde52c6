"""How far discrete Gaussian noise is from a rounded continuous one.

A rounded Gaussian added to an integer is a Gaussian mechanism, rounded afterwards, so exact Gaussian accounting holds
for it. What is sampled is a discrete Gaussian. The total variation distance between the two is small and enters delta:
if the noise is within t of the accounted noise, (epsilon, delta) becomes (epsilon, delta + (1 + e^epsilon) t).

Where the constant comes from: the mass that N(0, s^2) gives to [k - 1/2, k + 1/2] differs from the density at k by the
factor 1 + (x^2 - 1) / (24 s^2) + O(s^-4) with x = k / s, so the distance is E|x^2 - 1| / (48 s^2) = phi(1) / (12 s^2)
= 0.02016 / s^2.
"""

from __future__ import annotations

import math

LEAST_SCALE = 4.0
"""Below this the expansion is not relied on."""

_CONSTANT = 0.0202


def rounded_gaussian_distance(scale: float) -> float:
    """Bound the total variation distance of a discrete Gaussian from the rounded Gaussian of equal parameter.

    Raises:
        ValueError: ``scale`` is below 4 grid units.
    """
    if not scale >= LEAST_SCALE:
        raise ValueError(f"the noise must have a scale of at least {LEAST_SCALE:g} grid units: use a finer grid")
    return _CONSTANT / scale**2


def summed_shares_distance(share_scale: float, n_shares: int) -> float:
    """Bound the total variation distance of a sum of discrete Gaussians from one discrete Gaussian.

    Args:
        share_scale: Parameter of each share, in grid units, at least 4.
        n_shares: Number of independent shares.

    Reference: Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism (arXiv 2102.06387), Theorem 9:
        likelihood ratios within exp(+-t), t = 10 sum_{k < n} exp(-2 pi^2 s^2 k / (k + 1)); the distance is below t.
    """
    if not share_scale >= LEAST_SCALE:
        raise ValueError(f"each share must have a scale of at least {LEAST_SCALE:g} grid units: use a finer grid")
    # The term for k = 1 is the largest, so n - 1 times it bounds the sum.
    return 10 * (n_shares - 1) * math.exp(-(math.pi**2) * share_scale**2)


def discrete_distance(scales: tuple[tuple[float, int], ...], n_shares: int) -> float:
    """Return the total distance over all coordinates of one query.

    Args:
        scales: Pairs (parameter of one share in grid units, number of coordinates).
        n_shares: Independent shares per coordinate.
    """
    return math.fsum(
        n_coordinates
        * (rounded_gaussian_distance(scale * math.sqrt(n_shares)) + summed_shares_distance(scale, n_shares))
        for scale, n_coordinates in scales
    )
