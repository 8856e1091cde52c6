"""The Gaussian mechanism on integers: a sum plus discrete Gaussian noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.events import DiscreteGaussianEvent, Release
from dp_components.mechanisms.discrete_gaussian import sample_discrete_gaussian
from dp_components.randomness import OS_RANDOMNESS, RandomSource
from dp_components.sensitivity import Norm, Sensitivity

# Covers the few roundings between a scale and the multiplier that is accounted for it.
_DOWN = 1 - 2.0**-49


def add_gaussian_noise(
    sums: ArrayLike,
    sensitivity: Sensitivity,
    noise_multiplier: float,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Add fresh noise to each coordinate of one query.

    Shapes:  sums: int64[..., n_coordinates], the last axis as the sensitivity's weights; or any shape for weight 1.
    Units:   grid units, as the sensitivity.
    Privacy: one query; the release is 1/noise_multiplier-GDP up to what accounting/discrete_slack.py adds. Coordinate i
        has standard deviation noise_multiplier * bound / weights[i]. Every coordinate is noised, empty ones too.

    Args:
        sums: the exact query, of integers.
        sensitivity: its L2 sensitivity.
        noise_multiplier: standard deviation over sensitivity.
        randomness: source of the noise.

    Returns:
        The noised sums with a ``DiscreteGaussianEvent``.

    Raises:
        ValueError: not an L2 sensitivity, not integers, another number of coordinates, a noise out of range.
    """
    exact = require_integers(sums, sensitivity)
    value = exact + draw_noise(exact.shape, share_scales(sensitivity, noise_multiplier), randomness)
    return Release(value, gaussian_event(exact.size, sensitivity, noise_multiplier))


def gaussian_event(
    n_values: int, sensitivity: Sensitivity, noise_multiplier: float, n_shares: int = 1
) -> DiscreteGaussianEvent:
    """Return the event that a release will carry, for a plan made before anything is drawn.

    Args:
        n_values: number of values of the query in all.
        sensitivity: the query's.
        noise_multiplier: as it will be given to the mechanism.
        n_shares: 1, or the shares unknown to a coalition (``NoiseShares.n_honest``).
    """
    scales = share_scales(sensitivity, noise_multiplier, n_shares)
    # What is accounted is computed back from the scales that are really sampled.
    least = min(scale * weight for scale, weight in zip(scales, sensitivity.weights, strict=True))
    multiplier = least * math.sqrt(n_shares) / sensitivity.bound * _DOWN
    each = n_values // len(scales)
    return DiscreteGaussianEvent(multiplier, sensitivity.relation, tuple((scale, each) for scale in scales), n_shares)


def share_scales(sensitivity: Sensitivity, noise_multiplier: float, n_shares: int = 1) -> tuple[float, ...]:
    """Return the parameter of one share per weight: multiplier * bound / weight / sqrt(n_shares), rounded up.

    Units: grid units.

    Raises:
        ValueError: it is not an L2 sensitivity, or the multiplier is not a number above 0.
    """
    if sensitivity.norm is not Norm.L2:
        raise ValueError("Gaussian noise needs an L2 sensitivity")
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError("noise_multiplier must be a finite number above 0")
    whole = noise_multiplier * sensitivity.bound / math.sqrt(n_shares)
    return tuple(whole / weight * (1 + 2.0**-50) for weight in sensitivity.weights)


def require_integers(sums: ArrayLike, sensitivity: Sensitivity) -> NDArray[np.int64]:
    """Return the query as int64.

    Raises:
        ValueError: it has no values, is not of integers, comes near the end of int64, or its last axis does not match.
    """
    exact = np.asarray(sums)
    if exact.dtype.kind not in "iu" or exact.size == 0 or exact.ndim == 0:
        raise ValueError("a query is a non-empty array of integers: use grid_integers for sums of grid values")
    exact = exact.astype(np.int64)
    if np.any((exact > 1 << 60) | (exact < -(1 << 60))):
        raise ValueError("sums beyond 2^60 grid units: use a coarser grid")
    if len(sensitivity.weights) > 1 and exact.shape[-1] != len(sensitivity.weights):
        raise ValueError("the last axis of the query must have one coordinate per weight of the sensitivity")
    return exact


def draw_noise(shape: tuple[int, ...], scales: tuple[float, ...], randomness: RandomSource) -> NDArray[np.int64]:
    """Draw noise for a query whose last axis has one coordinate per scale (any shape for a single scale).

    Shapes: result: int64[shape].
    """
    each = math.prod(shape) // len(scales)
    columns = [sample_discrete_gaussian(scale, each, randomness) for scale in scales]
    return np.stack(columns, axis=-1).reshape(shape)
