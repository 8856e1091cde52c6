"""Mechanisms: each returns a ``Release``, noised data together with the event that pays for them; all draw exactly.

Noise in shares: each site adds a part, so that no one ever holds an exact sum.

Every site sees the model and knows its own share, and so does a coalition of sites. The noise that counts is the one
that remains when the shares of t colluders are known: each of W sites adds 1 / (W - t) of its variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from enum import Enum
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_components.errors import PrivacyRefusal
from dp_components.events import (
    DiscreteGaussianEvent,
    DiscreteLaplaceEvent,
    ExponentialEvent,
    LaplaceEvent,
    LocalRandomisedResponseEvent,
    NeighbouringRelation,
    Release,
)
from dp_components.sensitivity import GRID_BITS, Norm, Sensitivity
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_integers_below, random_uint64

# Exact coin tosses with irrational probabilities, fast.
#
# A coin with probability p is a uniform number U in [0, 1) with infinitely many bits, and the question whether U < p.
# The first 64 bits of U and p in double precision answer it unless the two are closer than the error of p, which
# happens about once in 10^11 tosses. Only then p is computed in decimal arithmetic with a proven error, and further
# bits of U are drawn, until the question is settled. So each outcome has exactly the probability p; floating point
# decides nothing by itself.


RELATIVE_ERROR = 2.0**-36
"""Callers promise that their double probabilities are this near, or that probability and value are below 2^-64."""

ExactProbability = Callable[[int, Context], Decimal]
"""(index of the toss, context) -> p, with a relative error below 10^(10 - precision of the context)."""


def toss(probabilities: NDArray[np.float64], exact: ExactProbability, randomness: RandomSource) -> NDArray[np.bool_]:
    """Toss one independent coin for each probability.

    Shapes:   probabilities: float64[n] in [0, 1]; result: bool[n].
    Security: takes a number of steps that depends on the outcome; timing is outside the threat model.

    Args:
        probabilities: approximate probabilities, as near as ``RELATIVE_ERROR`` says.
        exact: the exact ones, asked for only where the approximation does not decide.
        randomness: source of the bits.
    """
    words = random_uint64(probabilities.size, randomness)
    uniform = np.ldexp(words.astype(np.float64), -64)
    # The absolute part covers the 64 bits of U, and probabilities so small that they round to nothing.
    margin = probabilities * (2 * RELATIVE_ERROR) + 2.0**-62
    heads = uniform < probabilities
    for i in np.flatnonzero(np.abs(uniform - probabilities) <= margin):
        heads[i] = _settle(int(i), int(words[i]), exact, randomness)
    return heads


def _settle(i: int, word: int, exact: ExactProbability, randomness: RandomSource) -> bool:
    """Decide U < p, where ``word`` holds the first 64 bits of U, with as many digits and bits as it takes."""
    n_bits = 64
    while True:
        # The precision is always well beyond 2^-n_bits, so that 2^n_bits is held exactly.
        context = Context(prec=n_bits // 2 + 30, rounding=ROUND_HALF_EVEN, Emin=-999_999_999, Emax=999_999_999)
        p = exact(i, context)
        error = context.multiply(p, Decimal(10) ** (11 - context.prec))
        one = context.power(Decimal(2), n_bits)
        low, high = context.multiply(context.subtract(p, error), one), context.multiply(context.add(p, error), one)
        if word + 1 <= low:
            return True
        if word >= high:
            return False
        word = (word << 64) | int.from_bytes(randomness.bytes(8), "little")
        n_bits += 64


# Exact sampling from a symmetric distribution on the integers, by rejection from blocks of falling weight.
#
# Proposal: |y| = j w + r with P(j) = 2^-(j + 1), r uniform below a power of two w, and a fair sign; -0 is thrown away.
# All of that is bits of random words, hence exact. A proposal is kept with probability exp(-energy(y)) 2^j e, tossed
# exactly (``toss``), where the envelope e makes this at most 1. Kept values have exactly the distribution
# proportional to exp(-energy), without truncation; one proposal in two to four is kept.
#
# Reference: rejection on the integers with exact coins as in Canonne, Kamath and Steinke, The Discrete Gaussian for
# Differential Privacy, section 5; their coins are rational, ours are decided lazily, which works on whole arrays.


LARGEST_SCALE = 2.0**44
"""Values stay below 2^53 but for probabilities that no run will ever meet, so that doubles hold them exactly."""

_SIGN_BIT = 46
_J_BITS = 64 - _SIGN_BIT - 1


def _block_bits(scale: float) -> int:
    """Return log2 of the least power of two that is at least the scale, and at least 1."""
    fraction, exponent = math.frexp(scale)
    return max(0, exponent - 1 if fraction == 0.5 else exponent)


def _check_draw(scale: float, n: int) -> None:
    if n < 0:
        raise ValueError("n must not be negative")
    if not 0 < scale <= LARGEST_SCALE:
        raise ValueError("the noise scale must be above 0 and at most 2^44 grid units: use a coarser grid")


@dataclass(frozen=True, slots=True)
class _Target:
    """P(y) proportional to exp(-energy(|y|)): the energy is y^2 / (2 s^2) of a Gaussian, |y| / b of a Laplace value.

    Attributes:
        scale: s, or b, in grid units; the double itself is the parameter, not something near it.
        envelope: a dyadic e with exp(-energy(j w)) 2^j e <= 1 for every j >= 0 and block width w >= scale.
    """

    scale: float
    is_gaussian: bool
    envelope: float

    @property
    def block_bits(self) -> int:
        """log2 of the block width."""
        return _block_bits(self.scale)

    def energy(self, magnitude: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the energy in doubles, with a relative error of at most 10 * 2^-53."""
        ratio = magnitude / self.scale
        return ratio * ratio / 2 if self.is_gaussian else ratio

    def exact_energy(self, magnitude: int, context: Context) -> Decimal:
        """Return the energy with the relative precision of the context, up to a factor of 100."""
        # A double is a decimal fraction, so Decimal(scale) is the very parameter.
        ratio = context.divide(Decimal(magnitude), Decimal(self.scale))
        return context.divide(context.multiply(ratio, ratio), Decimal(2)) if self.is_gaussian else ratio


def _sample(target: _Target, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    """Draw ``n`` independent integers. Shapes: result: int64[n]."""
    _check_draw(target.scale, n)
    parts = [np.zeros(0, dtype=np.int64)]
    missing = n
    while missing > 0:
        # Proposals are independent, so dropping surplus values by their position favours none.
        parts.append(_keep(target, 3 * missing + 16, randomness)[:missing])
        missing -= parts[-1].size
    return np.concatenate(parts)


def _keep(target: _Target, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    """Make ``n`` proposals and return those that are kept, in order."""
    words = random_uint64(n, randomness)
    j = _geometric(words >> np.uint64(_SIGN_BIT + 1), randomness)
    offset = (words & np.uint64((1 << target.block_bits) - 1)).astype(np.int64)
    magnitude = (j << target.block_bits) + offset
    is_negative = (words >> np.uint64(_SIGN_BIT) & np.uint64(1)).astype(bool)

    def exact(i: int, context: Context) -> Decimal:
        # exp is correctly rounded; an energy of up to 10^5 with relative error e makes a relative error of 10^5 e.
        falling = context.exp(context.minus(target.exact_energy(int(magnitude[i]), context)))
        return context.multiply(context.multiply(falling, Decimal(target.envelope)), Decimal(2 ** int(j[i])))

    probability = np.ldexp(np.exp(-target.energy(magnitude.astype(np.float64))) * target.envelope, j)
    is_kept = toss(probability, exact, randomness) & ~(is_negative & (magnitude == 0))
    result: NDArray[np.int64] = np.where(is_negative, -magnitude, magnitude)[is_kept]
    return result


def _geometric(fields: NDArray[np.uint64], randomness: RandomSource) -> NDArray[np.int64]:
    """Return the number of zeros before the first one in endless random bits that begin with ``fields``."""
    one, field_mask = np.uint64(1), np.uint64((1 << _J_BITS) - 1)
    zeros = np.zeros(fields.size, dtype=np.int64)
    fields = fields & field_mask
    while (empty := np.flatnonzero(fields == 0)).size:
        zeros[empty] += _J_BITS
        fields[empty] = random_uint64(empty.size, randomness) & field_mask
    # f & -f keeps the lowest one; one less than that has as many ones as there were zeros below it.
    return zeros + np.bitwise_count((fields & (~fields + one)) - one).astype(np.int64)


def sample_discrete_gaussian(scale: float, n: int, randomness: RandomSource = OS_RANDOMNESS) -> NDArray[np.int64]:
    """Draw ``n`` independent discrete Gaussians, exactly: P(y) proportional to exp(-y^2 / (2 s^2)) on the integers.

    With w >= s, exp(-(j w)^2 / (2 s^2)) 2^j is largest at j = 1, where it is 2 / sqrt(e) = 1.2131, and 13/16 of that is
    below 1.

    Shapes:   result: int64[n].
    Units:    ``scale`` is the parameter s in grid units.
    Capacity: s up to 2^44.

    Raises:
        ValueError: ``scale`` is out of range or ``n`` is negative.
    """
    return _sample(_Target(float(scale), is_gaussian=True, envelope=13 / 16), n, randomness)


def sample_discrete_laplace(scale: float, n: int, randomness: RandomSource = OS_RANDOMNESS) -> NDArray[np.int64]:
    """Draw ``n`` independent discrete Laplace values, exactly: P(y) proportional to exp(-|y| / b) on the integers.

    Without a cut tail: pure epsilon would not bear one. With w >= b, exp(-j w / b) 2^j <= (2 / e)^j <= 1.

    Shapes:   result: int64[n].
    Units:    ``scale`` is the parameter b in grid units.
    Capacity: b up to 2^44.

    Raises:
        ValueError: ``scale`` is out of range or ``n`` is negative.
    """
    return _sample(_Target(float(scale), is_gaussian=False, envelope=1.0), n, randomness)


# A share of discrete Laplace noise, drawn exactly.
#
# Discrete Laplace noise of parameter b is X - X' with X, X' geometric: P(n) = (1 - q) q^n, q = exp(-1 / b). A geometric
# number is the sum of k negative binomials of order a = 1 / k, which have the generating function ((1 - q) / (1 - q
# z))^a = exp(sum over n >= 1 of (a q^n / n)(z^n - 1)). That is the sum of the points of a Poisson process on 1, 2, ..
# with the mean number a q^n / n at n. The process is drawn by thinning. With w = 2^J >= b the numbers below w lie in
# blocks [2^j, 2^(j + 1)), j < J, and those from w on in blocks [i w, (i + 1) w), i >= 1.
#
# * Proposals: Poisson(a) of them in each block j, uniform there, so a / 2^j at each n. From w on Poisson(a) of them in
#   all, in block i with probability 2^-i and uniform there, so a 2^-i / w at each n.
# * Kept with probability (2^j / n) q^n below w, and 2^i (w / n) q^n from there on: at most 1, as w / n <= 1 / i and q^n
#   <= e^-i. In both cases a q^n / n are left at n, independently: the process.
#
# Poisson(a), a = 1 / k <= 1 / 2: propose m with probability 2^-(m + 1), keep it with probability (2 a)^m / m!.
#
# All coins are exact (``toss``), nothing is cut off: the honest shares sum to discrete Laplace noise, without a delta.
#
# Reference: Harrison and Manurangsi, Infinitely Divisible Noise for Differential Privacy (arXiv 2504.05202), for the
# shares; Lewis and Shedler (1979) for thinning.


def sample_laplace_share(
    scale: float, n_shares: int, n: int, randomness: RandomSource = OS_RANDOMNESS
) -> NDArray[np.int64]:
    """Draw ``n`` independent shares, exactly: ``n_shares`` of them sum to discrete Laplace noise of parameter b.

    Shapes:   result: int64[n].
    Units:    ``scale`` is b in grid units.
    Capacity: b up to 2^44; about 2 log2(2 b) / n_shares coins each.

    Raises:
        ValueError: ``scale`` or ``n_shares`` is out of range, or ``n`` is negative.
    """
    if n_shares < 1:
        raise ValueError("n_shares must be at least 1")
    if n_shares == 1:
        return sample_discrete_laplace(scale, n, randomness)
    _check_draw(scale, n)
    last = _block_bits(scale)
    counts = _poisson_of_share(n_shares, n * 2 * (last + 1), randomness)
    point = np.repeat(np.arange(counts.size), counts)
    shift, place = point % (last + 1), point // (last + 1)
    words = random_uint64(point.size, randomness)
    offset = (words & ((np.uint64(1) << shift.astype(np.uint64)) - np.uint64(1))).astype(np.int64)
    beyond = np.where(shift == last, 1 + _geometric(words >> np.uint64(_SIGN_BIT + 1), randomness), 0)
    magnitude = (np.maximum(beyond, 1) << shift) + offset

    def exact(i: int, context: Context) -> Decimal:
        falling = context.exp(context.minus(context.divide(Decimal(int(magnitude[i])), Decimal(scale))))
        power = Decimal(2 ** int(shift[i] + beyond[i]))
        return context.divide(context.multiply(falling, power), Decimal(int(magnitude[i])))

    probability = np.ldexp(np.exp(-magnitude / scale) / magnitude, shift + beyond)
    kept = np.where(toss(probability, exact, randomness), magnitude, 0)
    shares = np.zeros(n, dtype=np.int64)
    np.add.at(shares, place // 2, np.where(place % 2 == 0, kept, -kept))
    return shares


def _poisson_of_share(n_shares: int, n: int, randomness: RandomSource) -> NDArray[np.int64]:
    """Draw ``n`` Poisson numbers of mean 1 / ``n_shares``, which is at most 1/2. Shapes: result: int64[n]."""
    parts = [np.zeros(0, dtype=np.int64)]
    missing = n
    while missing > 0:
        proposed = _geometric(random_uint64(2 * missing + 16, randomness), randomness)

        def exact(i: int, context: Context, proposed: NDArray[np.int64] = proposed) -> Decimal:
            m = int(proposed[i])
            return context.divide(Decimal(2**m), Decimal(n_shares**m * math.factorial(m)))

        ratios = np.array([1.0, *(2 / n_shares / m for m in range(1, int(proposed.max()) + 1))], dtype=np.float64)
        probability = np.multiply.accumulate(ratios)[proposed]
        parts.append(proposed[toss(probability, exact, randomness)][:missing])
        missing -= parts[-1].size
    return np.concatenate(parts)


# The exponential mechanism, drawn exactly.


_LARGEST_BLOCK = 1 << 16


def choose_exponentially(
    utilities: ArrayLike, sensitivity: Sensitivity, epsilon: float, randomness: RandomSource = OS_RANDOMNESS
) -> Release:
    """Choose candidate i with probability proportional to exp(epsilon * utility_i / (2 * sensitivity)).

    A candidate is proposed uniformly and kept with probability exp(epsilon (utility_i - largest) / (2 sensitivity)),
    tossed exactly. The best is always kept, so the expected number of proposals is at most that of candidates.

    Shapes:  utilities: int64[n_candidates], rounded onto a grid; the sensitivity holds after that rounding.
    Privacy: exactly ``epsilon``, delta 0. The list of candidates must not depend on the rows.

    Returns:
        The index of the chosen candidate, int64[1], with an ``ExponentialEvent``.

    Raises:
        ValueError: no candidates, no integers, not a utility sensitivity, or ``epsilon`` is out of range.
    Reference: McSherry and Talwar, Mechanism Design via Differential Privacy; DPBoost, Algorithm 1.
    """
    values = np.asarray(utilities)
    if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu" or np.any(np.abs(values) > 1 << 52):
        raise ValueError("utilities are a non-empty vector of integers up to 2^52")
    if sensitivity.norm is not Norm.UTILITY:
        raise ValueError("the exponential mechanism needs a utility sensitivity")
    event = ExponentialEvent(epsilon, sensitivity.relation)
    behind = int(values.max()) - values.astype(np.int64)
    rate = epsilon / (2 * sensitivity.bound)
    block = min(2 * values.size + 8, _LARGEST_BLOCK)
    while True:
        proposed = random_integers_below(values.size, block, randomness)

        def exact(i: int, context: Context, proposed: np.ndarray = proposed) -> Decimal:
            product = context.multiply(Decimal(epsilon), Decimal(int(behind[proposed[i]])))
            return context.exp(context.minus(context.divide(product, Decimal(2 * sensitivity.bound))))

        kept = np.flatnonzero(toss(np.exp(-rate * behind[proposed]), exact, randomness))
        if kept.size:
            return Release(proposed[kept[:1]], event)


def utility_sensitivity(bound: float, grid: float, sensitivity: Sensitivity) -> Sensitivity:
    """Return the sensitivity of real utilities after ``grid_utilities``: rounding adds at most one grid unit.

    Args:
        bound: the most that one neighbouring step changes any real utility.
        grid: the grid's step.
        sensitivity: of the rows; its relation is taken over.
    """
    units = bound / grid * (1 + 2.0**-40) + 1
    return Sensitivity(units, Norm.UTILITY, sensitivity.relation)


def grid_utilities(utilities: ArrayLike, grid: float) -> np.ndarray:
    """Round real utilities down onto a grid.

    Shapes: utilities: float64[n]; result: int64[n], in units of ``grid``.

    Raises:
        ValueError: they are not finite, or too large for the grid.
    """
    scaled = np.floor(np.asarray(utilities, dtype=np.float64) / grid)
    if not np.all(np.abs(scaled) <= 2.0**52):
        raise ValueError("utilities must be finite and at most 2^52 grid units")
    return scaled.astype(np.int64)


# The Gaussian mechanism on integers: a sum plus discrete Gaussian noise.


# Covers the few roundings between a scale and the multiplier that is accounted for it.
_DOWN = 1 - 2.0**-49


def add_gaussian_noise(
    sums: ArrayLike,
    sensitivity: Sensitivity,
    noise_multiplier: float,
    randomness: RandomSource = OS_RANDOMNESS,
    n_shares: int = 1,
) -> Release:
    """Add fresh noise to each coordinate of one query.

    Shapes:  sums: int64[..., n_coordinates], the last axis as the sensitivity's weights; or any shape for weight 1.
    Units:   grid units, as the sensitivity.
    Privacy: one query; the release is 1/noise_multiplier-GDP up to what accounting.py adds. Coordinate i
        has standard deviation noise_multiplier * bound / weights[i]. Every coordinate is noised, empty ones too.

    Args:
        sums: the exact query, of integers.
        sensitivity: its L2 sensitivity.
        noise_multiplier: standard deviation over sensitivity.
        randomness: source of the noise.
        n_shares: of how many such releases the noise together is what is accounted (``add_noise_share``).

    Returns:
        The noised sums with a ``DiscreteGaussianEvent``.

    Raises:
        ValueError: not an L2 sensitivity, not integers, another number of coordinates, a noise out of range.
    """
    exact = require_integers(sums, sensitivity)
    value = exact + draw_noise(exact.shape, share_scales(sensitivity, noise_multiplier, n_shares), randomness)
    return Release(value, gaussian_event(exact.size, sensitivity, noise_multiplier, n_shares))


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
        ValueError: it is not an L2 sensitivity, the multiplier is not a number above 0, or there is no noise so large.
    """
    if sensitivity.norm is not Norm.L2:
        raise ValueError("Gaussian noise needs an L2 sensitivity")
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError("noise_multiplier must be a finite number above 0")
    whole = noise_multiplier * sensitivity.bound / math.sqrt(n_shares)
    scales = tuple(whole / weight * (1 + 2.0**-50) for weight in sensitivity.weights)
    _check_draw(max(scales), 0)
    return scales


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


# The Laplace mechanism on integers: a sum plus discrete Laplace noise, for pure epsilon.


def add_laplace_noise(
    sums: ArrayLike, sensitivity: Sensitivity, epsilon: float, randomness: RandomSource = OS_RANDOMNESS
) -> Release:
    """Add fresh discrete Laplace noise to each coordinate of one query.

    Shapes:  sums: int64[..., n_coordinates], the last axis as the sensitivity's weights; or any shape for weight 1.
    Units:   grid units, as the sensitivity.
    Privacy: exactly ``epsilon``, delta 0. Coordinate i has the parameter b_i = bound / (weights[i] epsilon), so that
        the likelihood ratio of any output is at most exp(sum |difference_i| / b_i), and that sum is epsilon / bound
        times the weighted L1 norm of the difference, which the sensitivity bounds.

    Raises:
        ValueError: not an L1 sensitivity, not integers, another number of coordinates, or ``epsilon`` is out of range.
    Reference: Ghosh, Roughgarden and Sundararajan, Universally utility-maximizing privacy mechanisms.
    """
    event = LaplaceEvent(epsilon, sensitivity.relation)
    return Release(_with_laplace(sums, sensitivity, epsilon, randomness, 1), event)


def _with_laplace(
    sums: ArrayLike, sensitivity: Sensitivity, epsilon: float, randomness: RandomSource, n_shares: int
) -> NDArray[np.int64]:
    scales, exact = laplace_scales(sensitivity, epsilon), require_integers(sums, sensitivity)
    columns = [sample_laplace_share(scale, n_shares, exact.size // len(scales), randomness) for scale in scales]
    return exact + np.stack(columns, axis=-1).reshape(exact.shape)


def laplace_scales(sensitivity: Sensitivity, epsilon: float) -> tuple[float, ...]:
    """Return the parameter b of each coordinate's noise, rounded up: bound <= b weight epsilon holds exactly.

    Units: grid units.

    Raises:
        ValueError: it is not an L1 sensitivity, or there is no noise so large.
    """
    if sensitivity.norm is not Norm.L1:
        raise ValueError("Laplace noise needs an L1 sensitivity")
    scales = []
    for weight in sensitivity.weights:
        scale = sensitivity.bound / epsilon / weight
        while Fraction(sensitivity.bound) > Fraction(scale) * Fraction(epsilon) * Fraction(weight):
            scale = math.nextafter(scale, math.inf)
        _check_draw(scale, 0)
        scales.append(scale)
    return tuple(scales)


# The mechanism that a sensitivity asks for by its norm.


def add_noise(
    sums: ArrayLike,
    sensitivity: Sensitivity,
    noise_multiplier: float,
    randomness: RandomSource = OS_RANDOMNESS,
    n_shares: int = 1,
) -> Release:
    """Add fresh noise to each coordinate of one query: Gaussian for an L2 sensitivity, Laplace for an L1 one.

    Shapes:  sums: int64[..., n_coordinates], the last axis as the sensitivity's weights; or any shape for weight 1.
    Privacy: see ``add_gaussian_noise`` and ``add_laplace_noise``; the event is ``noise_event``'s.

    Args:
        noise_multiplier: parameter of the noise over the sensitivity: s of Gaussian noise, b of Laplace noise, whose
            epsilon is the reciprocal.
        n_shares: of how many such releases the noise together is what is accounted (``add_noise_share``).

    Raises:
        ValueError: as there.
    """
    if sensitivity.norm is not Norm.L1:
        return add_gaussian_noise(sums, sensitivity, noise_multiplier, randomness, n_shares)
    value = _with_laplace(sums, sensitivity, 1 / noise_multiplier, randomness, n_shares)
    return Release(value, noise_event(value.size, sensitivity, noise_multiplier, n_shares))


def noise_event(
    n_values: int, sensitivity: Sensitivity, noise_multiplier: float, n_shares: int = 1
) -> DiscreteGaussianEvent | DiscreteLaplaceEvent:
    """Return the event that ``add_noise`` will give, for a plan made before anything is drawn."""
    if sensitivity.norm is not Norm.L1:
        return gaussian_event(n_values, sensitivity, noise_multiplier, n_shares)
    scales = laplace_scales(sensitivity, 1 / noise_multiplier)
    each = tuple((scale, n_values // len(scales)) for scale in scales)
    return DiscreteLaplaceEvent(1 / noise_multiplier, sensitivity.relation, each, GRID_BITS, n_shares)


# Randomised response over the buckets of a feature: FederBoost's local differential privacy.


def randomise_buckets(
    buckets: ArrayLike,
    n_buckets: ArrayLike,
    epsilon: float,
    relation: NeighbouringRelation = NeighbouringRelation.CHANGE_VALUE,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Keep each bucket with probability e^epsilon / (e^epsilon + q - 1), else send one of the others, uniformly.

    Shapes:  buckets: int64[n_rows, n_features] in [0, n_buckets[feature]); n_buckets: int64[n_features].
    Privacy: exactly ``epsilon`` for one value of one row, n_features times that for a row. The edges must be public or
        paid for: edges that are ranks of the data make one row's output depend on the others.

    Returns:
        The randomised buckets with a ``LocalRandomisedResponseEvent``; a feature with one bucket is sent as it is.

    Raises:
        ValueError: a bucket is out of range, shapes differ, or ``epsilon`` is out of range.
    Reference: FederBoost (Tian et al.), section 4; dp_components/README.md, section 9, with q per feature.
    """
    ids, sizes = np.asarray(buckets), np.asarray(n_buckets)
    if ids.ndim != 2 or sizes.shape != ids.shape[1:] or ids.dtype.kind not in "iu" or sizes.dtype.kind not in "iu":
        raise ValueError("buckets must be an integer matrix with one number of buckets per column")
    if np.any(sizes < 1) or np.any(ids < 0) or np.any(ids >= sizes):
        raise ValueError("a bucket is out of range")
    event = LocalRandomisedResponseEvent(epsilon, ids.shape[1], relation)
    columns = [_randomise(ids[:, f].astype(np.int64), int(sizes[f]), epsilon, randomness) for f in range(len(sizes))]
    return Release(np.stack(columns, axis=1), event)


def _randomise(ids: np.ndarray, n_buckets: int, epsilon: float, randomness: RandomSource) -> np.ndarray:
    if n_buckets == 1 or ids.size == 0:
        return ids
    # Without overflow for large epsilon: 1 / (1 + (q - 1) e^-epsilon).
    keep = 1 / (1 + (n_buckets - 1) * math.exp(-epsilon))

    def exact(_: int, context: Context) -> Decimal:
        odds = context.multiply(Decimal(n_buckets - 1), context.exp(Decimal(-epsilon)))
        return context.divide(Decimal(1), context.add(Decimal(1), odds))

    is_kept = toss(np.full(ids.size, keep), exact, randomness)
    # A step of 1 .. q - 1 around the circle reaches each other bucket equally often.
    steps = 1 + random_integers_below(n_buckets - 1, ids.size, randomness)
    return np.where(is_kept, ids, (ids + steps) % n_buckets)


@dataclass(frozen=True, slots=True)
class NoiseShares:
    """How the noise is divided.

    Attributes:
        n_sites: sites that add a share; all of them must be alive in every sum.
        n_colluders: sites that may pool what they know, the observer included: at least 1, fewer than ``n_sites``.

    Raises:
        PrivacyRefusal: the numbers leave no noise, or leave none unknown to some site.
    """

    n_sites: int
    n_colluders: int = 1

    def __post_init__(self) -> None:
        if self.n_colluders < 1:
            raise PrivacyRefusal(
                "Distributed noise with no tolerated colluder is refused: every site sees the model and knows its own "
                "share of the noise. Set at least 1."
            )
        if self.n_colluders >= self.n_sites:
            raise PrivacyRefusal(
                f"Distributed noise among {self.n_sites} site(s) cannot tolerate {self.n_colluders} colluder(s): they "
                "would know all of it. Add sites or tolerate fewer."
            )

    @property
    def n_honest(self) -> int:
        """The number of shares that the accounting relies on."""
        return self.n_sites - self.n_colluders

    @property
    def total_noise_factor(self) -> float:
        """Standard deviation of the noise in the sum over that of a trusted aggregator: sqrt(W / (W - t))."""
        return math.sqrt(self.n_sites / self.n_honest)

    def check_live(self, n_live: int) -> None:
        """Refuse a sum to which fewer sites contribute than the noise was calibrated for.

        Raises:
            PrivacyRefusal: sites are missing, and their shares with them.
        """
        if n_live < self.n_sites:
            raise PrivacyRefusal(
                f"Only {n_live} of {self.n_sites} sites are alive: the shares of noise of the others are missing, so "
                "the sum would be less private than promised. Start again with the sites that remain."
            )


def add_noise_share(
    sums: ArrayLike,
    sensitivity: Sensitivity,
    noise_multiplier: float,
    shares: NoiseShares,
    randomness: RandomSource = OS_RANDOMNESS,
) -> Release:
    """Add this site's share of the noise to its own sums, before they are masked.

    Shapes:   sums: int64[..., n_coordinates], this site's.
    Units:    grid units.
    Privacy:  for an L2 sensitivity each coordinate's share has variance s^2 / (W - t), rounded up, so that the shares
        of the sites outside a coalition sum to at least s^2. The event is that of their sum, which is what is sampled:
        a sum of discrete Gaussians. For an L1 sensitivity a share is a difference of negative binomials of order
        1 / (W - t), so that those of the sites outside a coalition sum to exactly discrete Laplace noise. One share
        alone protects less: the value must leave this site under masks only.
    Security: the share must never be known to any other site; it comes from this site's operating system.

    Returns:
        The site's noised sums with the event of the honest sites' total (``noise_event``).

    Raises:
        ValueError: as ``add_noise``.
    Reference: Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism, Theorem 9.
    """
    return add_noise(sums, sensitivity, noise_multiplier, randomness, shares.n_honest)


# Who may see what before the noise is on it.


class TrustModel(Enum):
    """The trust model of a private job; it stands in the job and in the evidence.

    Attributes:
        TRUSTED_AGGREGATOR: the server sees the exact sums and adds the noise once.
        DISTRIBUTED: each site adds its share of the noise under masks: nobody ever sees an exact sum of all sites.
        LOCAL: each site noises every row by itself; the sums are never exact anywhere else.
    """

    TRUSTED_AGGREGATOR = "trusted_aggregator"
    DISTRIBUTED = "distributed"
    LOCAL = "local"

    @property
    def description(self) -> str:
        """Say what is protected against whom, for report and evidence."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    TrustModel.TRUSTED_AGGREGATOR: (
        "The server sees exact sums and adds the noise once. The guarantee holds towards everyone who sees the noised "
        "sums and the model, not towards the server."
    ),
    TrustModel.DISTRIBUTED: (
        "Each site adds its share of the noise before the sums are masked. The guarantee holds towards the server and "
        "any coalition of as many sites as the job says, who know their own shares."
    ),
    TrustModel.LOCAL: (
        "Each row is noised at its own site before anything is added up. The guarantee holds towards everyone else, "
        "for what is noised: the row's gradients, or the values of its buckets, as the mechanism says."
    ),
}
