"""Rates of the peers on the same work: phe, a loop over gmpy2 integers, and sf-heu where it is installed.

All of them get our packed pairs, so that one ciphertext carries g and h everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import gmpy2
import numpy as np

from he_processors.paillier import PaillierPrivateKey
from tests.bench.he_ours import FORMAT, N_BINS, Rates, cpu_seconds

_N_ENCRYPT = 24
_N_ADD_ROWS = 3_000
_N_FEATURES = 6
_PACK_GROUP = 16


def measure_peers(key: PaillierPrivateKey) -> dict[str, Rates | None]:
    """Measure every peer; None for one that is not installed."""
    peers: dict[str, Callable[[PaillierPrivateKey], Rates | None]] = {
        "phe": measure_phe,
        "gmpy2_loop": _measure_gmpy2_loop,
        "sf_heu": _measure_sf_heu,
    }
    return {name: measure(key) for name, measure in peers.items()}


def _pairs(n: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(-(1 << 40), 1 << 40) * (1 << FORMAT.h_bits) + rng.randrange(1 << 38) for _ in range(n)]


def _codes() -> list[list[int]]:
    return np.random.default_rng(2).integers(0, N_BINS, (_N_FEATURES, _N_ADD_ROWS)).tolist()


def _n_additions(codes: list[list[int]]) -> int:
    """Count the additions that a histogram needs: a sum of k ciphertexts takes k - 1, as for our own figure."""
    return sum(len(feature_codes) - len(set(feature_codes)) for feature_codes in codes)


def measure_phe(key: PaillierPrivateKey) -> Rates | None:
    try:
        import phe
    except ImportError:
        return None
    public = phe.PaillierPublicKey(key.public_key.n)
    private = phe.PaillierPrivateKey(public, key.p, key.q)
    messages = _pairs(_N_ENCRYPT)
    encrypt_s, encrypted = cpu_seconds(lambda: [public.encrypt(m) for m in messages])
    zero = public.encrypt(0)
    rows = [encrypted[i % _N_ENCRYPT] for i in range(_N_ADD_ROWS)]

    def histogram() -> None:
        for feature_codes in _codes():
            bins = [zero] * N_BINS
            for row, code in zip(rows, feature_codes, strict=True):
                bins[code] = bins[code] + row

    def pack() -> None:
        accumulator = encrypted[0]
        for ciphertext in encrypted[1:_PACK_GROUP]:
            accumulator = accumulator * (1 << FORMAT.pair_bits) + ciphertext

    add_s, _ = cpu_seconds(histogram)
    pack_s, _ = cpu_seconds(pack)
    decrypt_s, _ = cpu_seconds(lambda: [private.decrypt(c) for c in encrypted])
    return _rates(encrypt_s, add_s, pack_s, decrypt_s)


def _measure_gmpy2_loop(key: PaillierPrivateKey) -> Rates | None:
    n, p, q = (gmpy2.mpz(value) for value in (key.public_key.n, key.p, key.q))
    square, p_square, q_square = n * n, p * p, q * q
    q_inverse = gmpy2.invert(q, p)
    h_p = gmpy2.invert((gmpy2.powmod(n + 1, p - 1, p_square) - 1) // p, p)
    h_q = gmpy2.invert((gmpy2.powmod(n + 1, q - 1, q_square) - 1) // q, q)
    system_random = random.SystemRandom()

    def encrypt(message: int) -> int:
        return (1 + message % n * n) * gmpy2.powmod(system_random.randrange(1, int(n)), n, square) % square

    def decrypt(ciphertext: int) -> int:
        in_p = (gmpy2.powmod(ciphertext, p - 1, p_square) - 1) // p * h_p % p
        in_q = (gmpy2.powmod(ciphertext, q - 1, q_square) - 1) // q * h_q % q
        return in_q + q * ((in_p - in_q) * q_inverse % p)

    def histogram() -> None:
        for feature_codes in _codes():
            bins = [gmpy2.mpz(1)] * N_BINS
            for row, code in zip(rows, feature_codes, strict=True):
                bins[code] = bins[code] * row % square

    def pack() -> None:
        accumulator = encrypted[0]
        for ciphertext in encrypted[1:_PACK_GROUP]:
            accumulator = gmpy2.powmod(accumulator, 1 << FORMAT.pair_bits, square) * ciphertext % square

    encrypt_s, encrypted = cpu_seconds(lambda: [encrypt(m) for m in _pairs(_N_ENCRYPT)])
    rows = [encrypted[i % _N_ENCRYPT] for i in range(_N_ADD_ROWS)]
    add_s, _ = cpu_seconds(histogram)
    pack_s, _ = cpu_seconds(pack)
    decrypt_s, _ = cpu_seconds(lambda: [decrypt(c) for c in encrypted])
    return _rates(encrypt_s, add_s, pack_s, decrypt_s)


def _measure_sf_heu(key: PaillierPrivateKey) -> Rates | None:
    """Measure HEU's Paillier (ZPaillier) with its own bucket sum; it has no packing of ciphertexts."""
    try:
        from heu import numpy as hnp
        from heu import phe as heu_phe
    except ImportError:
        return None
    schema = heu_phe.SchemaType.ZPaillier
    kit = hnp.setup(schema, key.public_key.key_bits)
    encoder = heu_phe.BigintEncoder(schema)
    n_encrypt = 400
    plain = hnp.array(np.array([[value] for value in _pairs(n_encrypt)], dtype=object), encoder)
    kit.encryptor().encrypt(plain)
    encrypt_s, encrypted = cpu_seconds(lambda: kit.encryptor().encrypt(plain))
    rows = hnp.array(np.array([[value] for value in _pairs(_N_ADD_ROWS)], dtype=object), encoder)
    encrypted_rows = kit.encryptor().encrypt(rows)
    # Its order map is int8: 128 bins are the most it takes.
    codes = [[code % 100 for code in feature_codes] for feature_codes in _codes()]
    order_map = np.ascontiguousarray(np.array(codes, dtype=np.int8).T)
    everyone = np.ones(_N_ADD_ROWS, dtype=np.int8)
    add_s, _ = cpu_seconds(
        lambda: kit.evaluator().feature_wise_bucket_sum(encrypted_rows, everyone, order_map, 100, False)
    )
    decrypt_s, _ = cpu_seconds(lambda: kit.decryptor().decrypt(encrypted))
    return {
        "encrypt_per_s": n_encrypt / encrypt_s,
        "add_per_s": _n_additions(codes) / add_s,
        "decrypt_per_s": n_encrypt / decrypt_s,
    }


def _rates(encrypt_s: float, add_s: float, pack_s: float, decrypt_s: float) -> Rates:
    return {
        "encrypt_per_s": _N_ENCRYPT / encrypt_s,
        "add_per_s": _n_additions(_codes()) / add_s,
        "pack_per_s": _PACK_GROUP / pack_s,
        "decrypt_per_s": _N_ENCRYPT / decrypt_s,
    }
