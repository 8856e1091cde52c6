"""The contract of additive schemes: it passes for Paillier and the example, and each fault fails where it should."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from he_processors.additive_schemes import AdditiveScheme
from he_processors.paillier import PAILLIER
from nvflare_plugins.conformance.schemes import SchemeContract

sys.path.append(str(Path(__file__).parents[1] / "support" / "scheme_package"))
from acme_numbers import damgard_jurik  # type: ignore[import-not-found]
from acme_numbers.damgard_jurik import SCHEME  # type: ignore[import-not-found]


class TestPaillier(SchemeContract):
    scheme, key_bits = PAILLIER, 512


class TestDamgardJurik(SchemeContract):
    scheme, key_bits = SCHEME, 512


@pytest.mark.slow
class TestDamgardJurikWithRealKeys(SchemeContract):
    scheme = SCHEME


Public, Private, Decryptor = (
    damgard_jurik.DamgardJurikPublicKey,
    damgard_jurik.DamgardJurikPrivateKey,
    damgard_jurik.DamgardJurikDecryptor,
)


class _Ones:
    def __init__(self, arithmetic: Any) -> None:
        self._arithmetic = arithmetic

    def draw(self, n: int) -> Any:
        return self._arithmetic.pow_const(self._arithmetic.from_wire(np.ones((n, self._arithmetic.width), np.uint8)), 0)


def _with(kind: type, **changes: Any) -> AdditiveScheme:
    """Return the scheme with one method of one of its classes replaced."""
    faulty = type(kind.__name__, (kind,), changes)
    public = faulty if kind is Public else Public
    decryptor = faulty if kind is Decryptor else Decryptor
    private = faulty if kind is Private else Private
    whole = type(
        "Faulty",
        (private,),
        {
            "public_key": property(lambda self: public(self.primes.p * self.primes.q)),
            "decryptor": lambda self, backend: decryptor(self, backend),
        },
    )

    def generate(key_bits: int, *, allow_toy_keys: bool = False) -> Any:
        return whole(damgard_jurik.generate(key_bits, allow_toy_keys=allow_toy_keys).primes)

    return dataclasses.replace(SCHEME, public_key=public, generate=generate)


def _shifted(self: Any, arithmetic: Any, plaintexts: Any) -> Any:
    return Public.embed(self, arithmetic, plaintexts + np.uint8(1))


FAULTS: dict[str, tuple[Callable[[], AdditiveScheme], str]] = {
    "no randomiser": (
        lambda: _with(Public, randomisers=lambda self, arithmetic, source=None: _Ones(arithmetic)),
        "came twice",
    ),
    "owner without randomiser": (
        lambda: _with(Private, randomisers=lambda self, arithmetic, backend, source: _Ones(arithmetic)),
        "came twice",
    ),
    "another plaintext": (lambda: _with(Public, embed=_shifted), "opens to another number"),
    "too large a capacity": (
        lambda: _with(Public, plaintext_bits=property(lambda self: 2 * self.key_bits)),
        "not decrypted to themselves",
    ),
    "capacity of the very n": (
        lambda: _with(
            Public, plaintext_bits=property(lambda self: 2 * self.key_bits - 40 - (self.n + 1).bit_count() % 99)
        ),
        "depends on more than the key's length",
    ),
    "unchecked ciphertexts": (
        lambda: _with(Decryptor, decrypt=lambda self, rows: [0] * len(rows)),
        "what is no ciphertext was read",
    ),
    "short keys": (
        lambda: dataclasses.replace(
            SCHEME, generate=lambda key_bits, allow_toy_keys=False: damgard_jurik.generate(512, allow_toy_keys=True)
        ),
        "bits was made",
    ),
    "a secret that is pickled": (lambda: _with(Private, __reduce__=lambda self: (int, ())), "was pickled"),
    "a secret that is shown": (lambda: _with(Private, __repr__=lambda self: hex(self.primes.p)), "the repr"),
    "a name that is another": (lambda: dataclasses.replace(SCHEME, assumption="two\nlines"), "printable"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    make, complaint = FAULTS[fault]
    contract = type("Faulty", (SchemeContract,), {"scheme": make(), "key_bits": 512})()
    complaints = []
    for name in [name for name in dir(contract) if name.startswith("test_")]:
        try:
            getattr(contract, name)()
        except Exception as error:
            complaints.append(str(error))
    assert any(complaint in one for one in complaints), complaints
