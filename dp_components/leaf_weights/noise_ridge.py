"""A ridge in proportion to the noise (ours)."""

from __future__ import annotations


def noise_proportional_ridge(ridge: float, factor: float, gradient_noise_std: float) -> float:
    """Return lambda + factor * standard deviation of the noise on a leaf's gradient sum.

    With an ordinary ridge of 1, a leaf whose Hessian sum is smaller than the noise answers with a random weight of any
    size. A ridge as large as the noise shrinks exactly those leaves.

    Privacy: post-processing; the noise's standard deviation is public.
    """
    return ridge + factor * gradient_noise_std
