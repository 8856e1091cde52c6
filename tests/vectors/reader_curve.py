"""The reader's curve: edwards25519 with the field below 2^255 - 19, and ristretto255 on top, by RFC 9496."""

from __future__ import annotations

import hashlib

from tests.vectors.reader import require

Q = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, Q) % Q
I = pow(2, (Q - 1) // 4, Q)  # noqa: E741  # the root of -1
Point = tuple[int, int, int, int]
NEUTRAL: Point = (0, 1, 1, 0)


def _magnitude(x: int) -> int:
    x %= Q
    return Q - x if x % 2 else x


def _sqrt_ratio(u: int, v: int) -> tuple[bool, int]:
    r = u * v**3 * pow(u * v**7, (Q - 5) // 8, Q) % Q
    check = v * r * r % Q
    u %= Q
    if check in (-u % Q, -u * I % Q):
        r = r * I % Q
    return check in (u, -u % Q), _magnitude(r)


ROOT_AD_LESS_1 = Q - _sqrt_ratio(-D - 1, 1)[1]  # the odd one
INVERSE_ROOT_A_LESS_D = _sqrt_ratio(1, -1 - D)[1]


def plus(a: Point, b: Point) -> Point:
    p, q = (a[1] - a[0]) * (b[1] - b[0]), (a[1] + a[0]) * (b[1] + b[0])
    t, z = 2 * a[3] * b[3] * D, 2 * a[2] * b[2]
    e, f, g, h = q - p, z - t, z + t, q + p
    return e * f % Q, g * h % Q, f * g % Q, e * h % Q


def times(k: int, point: Point) -> Point:
    total = NEUTRAL
    for bit in bin(k)[2:]:
        total = plus(total, total)
        if bit == "1":
            total = plus(total, point)
    return total


def affine(data: bytes) -> Point:
    x, y = int.from_bytes(data[:32], "little"), int.from_bytes(data[32:], "little")
    require(x < Q and y < Q and (y * y - x * x - 1 - D * x * x * y * y) % Q == 0)
    return x, y, 1, x * y % Q


def compressed(data: bytes) -> Point:
    odd, y = divmod(int.from_bytes(data, "little"), 2**255)
    is_square, x = _sqrt_ratio(y * y - 1, D * y * y + 1)
    require(y < Q and is_square and (x > 0 or not odd))
    return affine(((Q - x) % Q if odd else x).to_bytes(32, "little") + y.to_bytes(32, "little"))


BASE = affine(bytes.fromhex("1ad5258f602d56c9b2a7259560c72c695cdcd6fd31e2a4c0fe536ecdd3366921" + "58" + "66" * 31))


def is_neutral(p: Point) -> bool:
    return p[0] % Q == 0 and (p[1] - p[2]) % Q == 0


def decoded(data: bytes) -> Point:
    s = int.from_bytes(data, "little")
    require(len(data) == 32 and s < Q and s % 2 == 0)
    u1, u2 = 1 - s * s, 1 + s * s
    v = -(D * u1 * u1) - u2 * u2
    is_square, inverse = _sqrt_ratio(1, v * u2 * u2 % Q)
    x = _magnitude(2 * s * inverse * u2)
    y = u1 * inverse * inverse * u2 * v % Q
    require(is_square and x * y % Q % 2 == 0 and y)
    return x, y, 1, x * y % Q


def encoded(p: Point) -> bytes:
    x, y, z, t = p
    u1, u2 = (z + y) * (z - y), x * y
    inverse = _sqrt_ratio(1, u1 * u2 * u2 % Q)[1]
    d1, d2 = inverse * u1 % Q, inverse * u2 % Q
    z_inverse = d1 * d2 * t % Q
    if t * z_inverse % Q % 2:
        x, y, d2 = y * I % Q, x * I % Q, d1 * INVERSE_ROOT_A_LESS_D % Q
    if x * z_inverse % Q % 2:
        y = -y
    return _magnitude(d2 * (z - y)).to_bytes(32, "little")


def _mapped(data: bytes) -> Point:
    t = int.from_bytes(data, "little") % 2**255 % Q
    r = I * t * t % Q
    u, v = (r + 1) * (1 - D * D) % Q, (-1 - r * D) * (r + D) % Q
    was_square, s = _sqrt_ratio(u, v)
    c = Q - 1
    if not was_square:
        s, c = -_magnitude(s * t), r
    n = c * (r - 1) * (D - 1) ** 2 - v
    w0, w1, w2, w3 = 2 * s * v, n * ROOT_AD_LESS_1, 1 - s * s, 1 + s * s
    return w0 * w3 % Q, w2 * w1 % Q, w1 * w3 % Q, w0 * w2 % Q


def hashed(item: bytes, tag: bytes) -> Point:
    suffix = tag + bytes([len(tag)])
    first = hashlib.sha512(bytes(128) + item + b"\0\x40\0" + suffix).digest()
    uniform = hashlib.sha512(first + b"\1" + suffix).digest()
    return plus(_mapped(uniform[:32]), _mapped(uniform[32:]))
