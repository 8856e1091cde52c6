"""Known answers: (p, q, r, m) -> c, from phe's own regression test and from phe 1.5.0 with given r."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from he_processors.bignum.interface import ints_from_rows, rows_from_ints
from he_processors.bignum.registry import available_backends, open_backend
from he_processors.paillier import Encryptor, PaillierDecryptor, PaillierPrivateKey, centred
from tests.support.he_toys import signed_rows

VECTORS = json.loads((Path(__file__).parent / "vectors" / "paillier.json").read_text())


class GivenRandomisers:
    """Yields r^n for given r."""

    def __init__(self, arithmetic, n: int, rs: list[int]) -> None:
        self._arithmetic, self._n, self._rs = arithmetic, n, rs

    def draw(self, n: int):
        assert n == len(self._rs)
        bases = self._arithmetic.from_wire(rows_from_ints(self._rs, self._arithmetic.width))
        return self._arithmetic.pow_const(bases, self._n)


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("vector", VECTORS, ids=[vector["source"] for vector in VECTORS])
def test_paillier_known_answers(vector: dict, backend: str) -> None:
    p, q = int(vector["p"], 16), int(vector["q"], 16)
    key = PaillierPrivateKey(max(p, q), min(p, q))
    n = key.public_key.n
    messages, rs, expected = ([int(case[field], 16) for case in vector["cases"]] for field in "mrc")
    arithmetic = open_backend(backend, n * n)
    encryptor = Encryptor(key.public_key, arithmetic, GivenRandomisers(arithmetic, n, rs))
    rows = arithmetic.to_wire(encryptor.encrypt(signed_rows(messages, n.bit_length() // 8 + 1)))
    assert ints_from_rows(rows) == expected
    assert PaillierDecryptor(key, backend).decrypt(rows) == [centred(m % n, n) for m in messages]
