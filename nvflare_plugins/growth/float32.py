"""exp, log and their kin of float32, the same to the bit on every machine, in C and in numpy.

A gradient must be the same at every site, and the same as XGBoost's. ``numpy`` and C libraries differ from one another
in the last bit, so these are our own: ``exp`` and ``log`` do what the GNU C library on x86-64 does with fused
operations (all processors since 2013), on every finite float32; without these it rounds ``exp`` of two numbers the
other way. ``log1p``, ``tanh`` and ``lgamma`` follow that library up to its release 2.40; later ones round them
correctly, so that there XGBoost's own gradients may differ from these in the last bit, of reg:squaredlogerror and of
the smooth quantile error.

Shapes: every function takes float32[...] and returns float32[...] of the same shape.

References: the GNU C library 2.36, sysdeps/ieee754/flt-32 (e_expf.c, e_logf.c by S. Nagy; s_log1pf.c, s_expm1f.c and
s_tanhf.c and e_lgammaf_r.c of fdlibm, Copyright (C) 1993 by Sun Microsystems).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvflare_plugins.growth import _native

native = _native.float32
Floats = NDArray[np.float32]
_BLOCK = 1 << 15  # values whose doubles stay in the cache
_F = np.float32


def _exact(name: str) -> float:
    return float.fromhex(name)


_EXP_TABLE = np.array(
    # Bits of 2^(i/32), less i in the place of the exponent's last bits: adding k there gives 2^(k/32).
    [
        *(0x3FF0000000000000, 0x3FEFD9B0D3158574, 0x3FEFB5586CF9890F, 0x3FEF9301D0125B51, 0x3FEF72B83C7D517B),
        *(0x3FEF54873168B9AA, 0x3FEF387A6E756238, 0x3FEF1E9DF51FDEE1, 0x3FEF06FE0A31B715, 0x3FEEF1A7373AA9CB),
        *(0x3FEEDEA64C123422, 0x3FEECE086061892D, 0x3FEEBFDAD5362A27, 0x3FEEB42B569D4F82, 0x3FEEAB07DD485429),
        *(0x3FEEA47EB03A5585, 0x3FEEA09E667F3BCD, 0x3FEE9F75E8EC5F74, 0x3FEEA11473EB0187, 0x3FEEA589994CCE13),
        *(0x3FEEACE5422AA0DB, 0x3FEEB737B0CDC5E5, 0x3FEEC49182A3F090, 0x3FEED503B23E255D, 0x3FEEE89F995AD3AD),
        *(0x3FEEFF76F2FB5E47, 0x3FEF199BDD85529C, 0x3FEF3720DCEF9069, 0x3FEF5818DCFBA487, 0x3FEF7C97337B9B5F),
        *(0x3FEFA4AFA2A490DA, 0x3FEFD0765B6E4540),
    ],
    dtype=np.uint64,
)
_EXP_SHIFT = _exact("0x1.8p52")
_EXP_SCALE = _exact("0x1.71547652b82fep+0") * 32
_EXP_C = tuple(
    _exact(c) / 32**power
    for c, power in (("0x1.c6af84b912394p-5", 3), ("0x1.ebfce50fac4f3p-3", 2), ("0x1.62e42ff0c52d6p-1", 1))
)
_EXP_LIMITS = _F(_exact("-0x1.9fe368p6")), _F(_exact("0x1.62e42ep6"))
_EXP_FUSED = (("0x1.04845ep+5", "0x1.f93e38p+46"), ("-0x1.f8cbb2p+5", "0x1.f45326p-92"))

_LOG_TABLE = np.array(
    # 1/c and log(c) for a c near the middle of each part of [0.69, 1.39).
    [
        [_exact(inverse), _exact(log)]
        for inverse, log in (
            ("0x1.661ec79f8f3bep+0", "-0x1.57bf7808caadep-2"),
            ("0x1.571ed4aaf883dp+0", "-0x1.2bef0a7c06ddbp-2"),
            ("0x1.49539f0f010bp+0", "-0x1.01eae7f513a67p-2"),
            ("0x1.3c995b0b80385p+0", "-0x1.b31d8a68224e9p-3"),
            ("0x1.30d190c8864a5p+0", "-0x1.6574f0ac07758p-3"),
            ("0x1.25e227b0b8eap+0", "-0x1.1aa2bc79c81p-3"),
            ("0x1.1bb4a4a1a343fp+0", "-0x1.a4e76ce8c0e5ep-4"),
            ("0x1.12358f08ae5bap+0", "-0x1.1973c5a611cccp-4"),
            ("0x1.0953f419900a7p+0", "-0x1.252f438e10c1ep-5"),
            ("0x1p+0", "0x0p+0"),
            ("0x1.e608cfd9a47acp-1", "0x1.aa5aa5df25984p-5"),
            ("0x1.ca4b31f026aap-1", "0x1.c5e53aa362eb4p-4"),
            ("0x1.b2036576afce6p-1", "0x1.526e57720db08p-3"),
            ("0x1.9c2d163a1aa2dp-1", "0x1.bc2860d22477p-3"),
            ("0x1.886e6037841edp-1", "0x1.1058bc8a07ee1p-2"),
            ("0x1.767dcf5534862p-1", "0x1.4043057b6ee09p-2"),
        )
    ]
)
_LOG_C = tuple(map(_exact, ("-0x1.00ea348b88334p-2", "0x1.5575b0be00b6ap-2", "-0x1.ffffef20a4123p-2")))
_LN2 = _exact("0x1.62e42fefa39efp-1")
_LOG_LOWEST = np.int32(0x3F330000)


def exp(x: Floats) -> Floats:
    """Return e^x: infinite above 88.72, zero below -103.97."""
    return _applied("exp", exp_in_numpy, x)


def log(x: Floats) -> Floats:
    """Return the natural logarithm: minus infinity of zero, no number of less."""
    return _applied("log", log_in_numpy, x)


def logistic(x: Floats) -> Floats:
    """Return XGBoost's 1 / (1 + e^-x)."""
    return _applied("logistic", logistic_in_numpy, x)


def _applied(name: str, twin: Callable[[Floats], Floats], x: Floats) -> Floats:
    x = np.ascontiguousarray(x, dtype=np.float32)
    if native is None:
        return _by_blocks(twin, x)
    out = np.empty_like(x)
    getattr(native, name)(x.data, out.data)
    return out


def _by_blocks(function: Callable[[Floats], Floats], x: Floats) -> Floats:
    flat, out = x.reshape(-1), np.empty(x.size, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            out[start : start + _BLOCK] = function(flat[start : start + _BLOCK])
    return out.reshape(x.shape)


def exp_in_numpy(x: Floats) -> Floats:
    """Do what the C does, operation by operation."""
    low, high = _EXP_LIMITS
    inside = np.where((x >= low) & (x <= high), x, _F(0))
    z = _EXP_SCALE * inside.astype(np.float64)
    shifted = z + _EXP_SHIFT
    k = shifted.view(np.uint64)
    r = z - (shifted - _EXP_SHIFT)
    scale = (_EXP_TABLE[k % np.uint64(32)] + (k << np.uint64(47))).view(np.float64)
    first, second, third = _EXP_C
    result = ((((first * r + second) * (r * r)) + (third * r + 1.0)) * scale).astype(np.float32)
    for at, value in _EXP_FUSED:
        result[inside == _F(_exact(at))] = _F(_exact(value))
    result[x > high] = np.inf
    result[x < low] = 0
    return np.where(np.isnan(x), x, result)


def log_in_numpy(x: Floats) -> Floats:
    """Do what the C does, operation by operation."""
    is_usual = (x > 0) & (x < np.inf)
    inside = np.where(is_usual, x, _F(1))
    is_small = inside < _F(_exact("0x1p-126"))
    bits = np.where(is_small, inside * _F(2**23), inside).view(np.int32) - np.where(is_small, 23 << 23, 0)
    above = (bits.astype(np.int32) - _LOG_LOWEST).astype(np.int32)
    part = _LOG_TABLE[(above >> 19) & 15]
    exponent = above >> 23
    mantissa = (bits - (exponent << 23)).astype(np.int32).view(np.float32)
    r = mantissa.astype(np.float64) * part[:, 0] - 1.0
    start, square = part[:, 1] + exponent.astype(np.float64) * _LN2, r * r
    first, second, third = _LOG_C
    result = ((first * square + (second * r + third)) * square + (start + r)).astype(np.float32)
    return np.where(is_usual, result, np.where(x == 0, _F(-np.inf), np.where(x < 0, _F(np.nan), x)))


def logistic_in_numpy(x: Floats) -> Floats:
    """Do what the C does, operation by operation."""
    return _F(1) / (exp_in_numpy(np.where(_F(88.7) < -x, _F(88.7), -x)) + _F(1) + _F(1e-16))


_LN2_HIGH, _LN2_LOW = _F(6.9313812256e-01), _F(9.0580006145e-06)
_LOG1P = (
    *(6.6666668653e-01, 4.0000000596e-01, 2.8571429849e-01, 2.2222198546e-01),
    *(1.8183572590e-01, 1.5313838422e-01, 1.4798198640e-01),
)


def log1p(x: Floats) -> Floats:
    """Return log(1 + x): minus infinity of -1, no number of less."""
    return _by_blocks(_log1p, np.ascontiguousarray(x, dtype=np.float32))


def _log1p(x: Floats) -> Floats:
    is_usual = (x > -1) & (x < np.inf)
    inside = np.where(is_usual, x, _F(1))
    bits, size = inside.view(np.int32), np.abs(inside)
    is_direct = (bits < 0x3ED413D7) & ((bits > 0) | (bits <= np.uint32(0xBE95F61F).view(np.int32)))
    f, c, k, is_short = _reduced(inside)
    f, c, k = np.where(is_direct, inside, f), np.where(is_direct, _F(0), c), np.where(is_direct, 0, k)
    is_short &= ~is_direct
    half, k_float = _F(0.5) * f * f, k.astype(np.float32)
    s = f / (_F(2) + f)
    z = s * s
    total = z * _polynomial(_LOG1P, z)
    low = k_float * _LN2_LOW + c
    usual = k_float * _LN2_HIGH - ((half - (s * (half + total) + low)) - f)
    r = half * (_F(1) - _F(0.66666666666666666) * f)
    short = np.where(f == 0, k_float * _LN2_HIGH + (c + k_float * _LN2_LOW), k_float * _LN2_HIGH - ((r - low) - f))
    result = np.where(k == 0, np.where(is_short, f - r, f - (half - s * (half + total))), usual)
    result = np.where(is_short & (k != 0), short, result)
    result = np.where(size < _F(2.0**-29), inside - inside * inside * _F(0.5), result)
    result = np.where(size < _F(2.0**-54), inside, result)
    return np.where(is_usual, result, np.where(x == -1, _F(-np.inf), np.where(x < -1, _F(np.nan), x)))


def _reduced(x: Floats) -> tuple[Floats, Floats, NDArray[Any], NDArray[np.bool_]]:
    """Return f, c and k of 1 + x = 2^k (1 + f) (1 + c), and where f has no more than some 20 bits."""
    is_large = x.view(np.int32) >= 0x5A000000
    u = np.where(is_large, x, _F(1) + x)
    bits = u.view(np.int32)
    k = (bits >> 23) - 127
    c: Floats = np.divide(np.where(k > 0, _F(1) - (u - x), x - (u - _F(1))), u, dtype=np.float32)
    c[is_large] = 0
    mantissa = bits & 0x007FFFFF
    is_low = mantissa < 0x3504F7
    normal: Floats = np.where(is_low, mantissa | 0x3F800000, mantissa | 0x3F000000).astype(np.int32).view(np.float32)
    is_short: NDArray[np.bool_] = np.where(is_low, mantissa, (0x00800000 - mantissa) >> 2) == 0
    return normal - _F(1), c, np.where(is_low, k, k + 1), is_short


_EXPM1 = (-3.3333335072e-02, 1.5873016091e-03, -7.9365076090e-05, 4.0082177293e-06, -2.0109921195e-07)
_HALF_LN2 = np.uint32(0x3EB17218).view(np.float32)
_NEAR_LN2 = np.uint32(0x3F851592).view(np.float32)


def tanh(x: Floats) -> Floats:
    """Return the hyperbolic tangent: 1 or -1 from 22 on."""
    return _by_blocks(_tanh, np.ascontiguousarray(x, dtype=np.float32))


def _tanh(x: Floats) -> Floats:
    size = np.abs(x)
    inside = np.minimum(size, _F(22))
    t = _expm1(np.where(size >= 1, _F(2) * inside, _F(-2) * inside))
    result = np.where(size >= 1, _F(1) - _F(2) / (t + _F(2)), -t / (t + _F(2)))
    result = np.where(size >= 22, _F(1), np.where(size < _F(2.0**-55), size * (_F(1) + size), result))
    return np.where(np.isnan(x), x, np.copysign(result, x))


def _expm1(x: Floats) -> Floats:
    """Return e^x - 1 for x from -2 to 44, which is what tanh asks for."""
    size = np.abs(x)
    is_one = size < _NEAR_LN2
    one = np.sign(x)
    k = np.where(is_one, one, np.trunc(_F(1.4426950216) * x + one * _F(0.5))).astype(np.float32)
    is_small = size <= _HALF_LN2
    k = np.where(is_small, _F(0), k)
    high, low = x - k * _LN2_HIGH, k * _LN2_LOW
    reduced = np.where(is_small, x, high - low)
    c = np.where(is_small, _F(0), (high - reduced) - low)
    half = _F(0.5) * reduced
    square = reduced * half
    r1 = _F(1) + square * _polynomial(_EXPM1, square)
    t = _F(3) - r1 * half
    e = square * ((r1 - t) / (_F(6) - reduced * t))
    first = reduced - (reduced * e - square)
    e = (reduced * (e - c) - c) - square
    whole = k.astype(np.int32)

    def scaled(y: Floats) -> Floats:
        return (y.view(np.int32) + (whole << 23)).astype(np.int32).view(np.float32)

    shift = np.clip(whole, 0, 30)
    below = scaled((0x3F800000 - (0x1000000 >> shift)).astype(np.int32).view(np.float32) - (e - reduced))
    tiny = ((0x7F - shift) << 23).astype(np.int32).view(np.float32)
    above = scaled((reduced - (e + tiny)) + _F(1))
    far = scaled(_F(1) - (e - reduced)) - _F(1)
    result = np.where(whole < 23, below, above)
    result = np.where((whole <= -2) | (whole > 56), far, result)
    of_one = np.where(reduced < _F(-0.25), _F(-2) * (e - (reduced + _F(0.5))), _F(1) + _F(2) * (reduced - e))
    result = np.where(whole == 1, of_one, result)
    result = np.where(whole == -1, _F(0.5) * (reduced - e) - _F(0.5), result)
    return np.where(whole == 0, np.where(size < _F(2.0**-25), x, first), result)


def hypot(x: Floats, y: Floats) -> Floats:
    """Return the root of the sum of squares."""
    wide, other = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(over="ignore"):
        return np.sqrt(wide * wide + other * other).astype(np.float32)


_LGAMMA_TWO = (  # two series of 12 terms in turn, about 2
    *(7.7215664089e-02, 3.2246702909e-01, 6.7352302372e-02, 2.0580807701e-02, 7.3855509982e-03, 2.8905137442e-03),
    *(1.1927076848e-03, 5.1006977446e-04, 2.2086278477e-04, 1.0801156895e-04, 2.5214456400e-05, 4.4864096708e-05),
)
_LGAMMA_LEAST = (  # three series in turn, about the least value
    *(4.8383611441e-01, -1.4758771658e-01, 6.4624942839e-02, -3.2788541168e-02, 1.7970675603e-02, -1.0314224288e-02),
    *(6.1005386524e-03, -3.6845202558e-03, 2.2596477065e-03, -1.4034647029e-03, 8.8108185446e-04, -5.3859531181e-04),
    *(3.1563205994e-04, -3.1275415677e-04, 3.3552918467e-04),
)
_LEAST_AT, _LEAST, _LEAST_TAIL = _F(1.4616321325), _F(-1.2148628384e-01), _F(6.6971006518e-09)
_LGAMMA_ONE = (
    (-7.7215664089e-02, 6.3282704353e-01, 1.4549225569, 9.7771751881e-01, 2.2896373272e-01, 1.3381091878e-02),
    (1.0, 2.4559779167, 2.1284897327, 7.6928514242e-01, 1.0422264785e-01, 3.2170924824e-03),
)
_LGAMMA_MORE = (
    (
        *(-7.7215664089e-02, 2.1498242021e-01, 3.2577878237e-01, 1.4635047317e-01),
        *(2.6642270386e-02, 1.8402845599e-03, 3.1947532989e-05),
    ),
    (
        *(1.0, 1.3920053244, 7.2193557024e-01, 1.7193385959e-01),
        *(1.8645919859e-02, 7.7794247773e-04, 7.3266842264e-06),
    ),
)
_STIRLING = (
    8.3333335817e-02,
    -2.7777778450e-03,
    7.9365057172e-04,
    -5.9518753551e-04,
    8.3633989561e-04,
    -1.6309292987e-03,
)


def lgamma(x: Floats) -> Floats:
    """Return the logarithm of the gamma function; below 1, where no label of a count leads, rounded from a double."""
    return _by_blocks(_lgamma, np.ascontiguousarray(x, dtype=np.float32))


def _lgamma(x: Floats) -> Floats:
    from scipy.special import gammaln  # which takes long to import, and few objectives need

    inside = np.where((x >= 1) & (x < np.inf), x, _F(1))
    result = np.where(inside < 2, _lgamma_below_2(inside), _lgamma_below_8(inside))
    inverse: Floats = np.divide(_F(1), inside, dtype=np.float32)
    of_log = log_in_numpy(inside)
    correction = _F(4.1893854737e-01) + inverse * _polynomial(_STIRLING, inverse * inverse)
    result = np.where(inside >= 8, (inside - _F(0.5)) * (of_log - _F(1)) + correction, result)
    result = np.where(inside >= _F(2.0**26), inside * (of_log - _F(1)), result)
    result = np.where((inside == 1) | (inside == 2), _F(0), result)
    return np.where(x >= 1, np.where(x < np.inf, result, x), gammaln(x.astype(np.float64)).astype(np.float32))


def _lgamma_below_2(x: Floats) -> Floats:
    y = _F(2) - x
    z = y * y
    high = y * _polynomial(_LGAMMA_TWO[::2], z) + z * _polynomial(_LGAMMA_TWO[1::2], z)
    near_two = high - _F(0.5) * y
    y = x - _LEAST_AT
    z = y * y
    first, second, third = (_polynomial(_LGAMMA_LEAST[start::3], z * y) for start in range(3))
    near_least = _LEAST + (z * first - (_LEAST_TAIL - z * y * (second + y * third)))
    y = x - _F(1)
    above, below = _LGAMMA_ONE
    near_one = _F(-0.5) * y + (y * _polynomial(above, y)) / _polynomial(below, y)
    bits = x.view(np.int32)
    return np.where(bits >= 0x3FDDA618, near_two, np.where(bits >= 0x3F9DA620, near_least, near_one))


def _lgamma_below_8(x: Floats) -> Floats:
    whole = np.minimum(np.trunc(x), _F(7))
    y = x - whole
    above, below = _LGAMMA_MORE
    result = _F(0.5) * y + (y * _polynomial(above, y)) / _polynomial(below, y)
    product = np.ones_like(y)
    for step in (6, 5, 4, 3, 2):
        product = np.where(whole > step, product * (y + _F(step)), product)
    return np.where(whole >= 3, result + log_in_numpy(product), result)


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = _F(coefficient) + x * total
    return total
