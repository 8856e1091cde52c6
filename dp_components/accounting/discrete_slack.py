"""What discrete Gaussian noise costs beyond the continuous Gaussian that is accounted.

What is sampled is a discrete Gaussian of parameter s on the integers, P(k) proportional to exp(-k^2 / (2 s^2)). It is,
but for a total variation distance t below 10^-76 a coordinate, a post-processing of a continuous Gaussian that is
hardly narrower, so that the exact accounting of Gaussians holds for it at a multiplier smaller by sqrt(1 - r^2 / s^2),
and (epsilon, delta) becomes (epsilon, delta + (1 + e^epsilon) t).

The argument, with r = 3 and q the exact query. Draw x from N(q, s^2 - r^2) and round it at random to the integer k with
probability exp(-(x - k)^2 / (2 r^2)) / Z(x). The rounding knows x alone, so it is post-processing. By Poisson summation
Z(x) = r sqrt(2 pi) (1 + 2 sum_j e^(-2 pi^2 r^2 j^2) cos(2 pi j x)) is the same for all x within a factor 1 +- theta,
theta < 2.001 e^(-2 pi^2 r^2). Were it constant, k would have the density of N(q, s^2) at k: convolving adds variances.
So its probability is that density within 1 / (1 +- theta), the sampled probability is the density within 1 + theta,
and the two distributions are within t = 1.01 theta < 3 e^(-2 pi^2 r^2) of each other. Coordinates are independent.
"""

from __future__ import annotations

import math

LEAST_SCALE = 4.0
"""Grid units; noise on a coarser grid is refused."""

_ROUNDING = 3.0  # r
_DISTANCE = 3 * math.exp(-2 * math.pi**2 * _ROUNDING**2)


def narrowed(scale: float) -> float:
    """Return (s^2 - r^2) / s^2: the variance of the Gaussian that is accounted over that of the noise.

    Raises:
        ValueError: ``scale`` is below 4 grid units.
    """
    if not scale >= LEAST_SCALE:
        raise ValueError(f"the noise must have a scale of at least {LEAST_SCALE:g} grid units: use a finer grid")
    return (1 - (_ROUNDING / scale) ** 2) * (1 - 2.0**-50)


def summed_shares_distance(share_scale: float, n_shares: int) -> float:
    """Bound the total variation distance of a sum of discrete Gaussians from one discrete Gaussian.

    Args:
        share_scale: parameter of each share, in grid units, at least 4.
        n_shares: number of independent shares.

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
        scales: pairs (parameter of one share in grid units, number of coordinates).
        n_shares: independent shares per coordinate.
    """
    return math.fsum(
        n_coordinates * (_DISTANCE + summed_shares_distance(scale, n_shares)) for scale, n_coordinates in scales
    )


def least_narrowed(scales: tuple[tuple[float, int], ...], n_shares: int) -> float:
    """Return ``narrowed`` of the summed noise of the coordinate that has the least. Arguments as above."""
    return narrowed(min(scale for scale, _ in scales) * math.sqrt(n_shares))
