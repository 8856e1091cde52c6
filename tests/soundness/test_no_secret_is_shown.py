"""Run everything, break everything, and search logs, messages and representations for secrets."""

from __future__ import annotations

import copy
import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from he_processors.bignum.interface import rows_from_ints
from he_processors.bignum.registry import open_backend
from he_processors.ciphertext_wire import CiphertextHeader, Content, decode_ciphertexts, encode_ciphertexts
from he_processors.fixed_point import PackingLayout, PairFormat
from he_processors.histogram.planner import BinLayout, plan_level
from he_processors.histogram.sums import NodeTotal, decrypt_level, pack_and_hide, sum_bins
from he_processors.paillier import (
    PaillierDecryptor,
    PaillierPrivateKey,
    Rerandomiser,
    generate_paillier_key,
    owner_encryptor,
)
from tests.support.he_toys import signed_rows, toy_paillier

SECRET_PLAINTEXT = 31415926535897932384
SECRET_GRADIENT = 0.7182818284590452


def _secrets() -> list[str]:
    paillier = toy_paillier()
    numbers = [paillier.p, paillier.q, paillier.p_generator, paillier.q_generator, SECRET_PLAINTEXT]
    texts = [form for number in numbers for form in (str(number), f"{number:x}")]
    return [text.lower() for text in [*texts, str(SECRET_GRADIENT)[:10]]]


def _round(key: PaillierPrivateKey) -> tuple[PaillierDecryptor, PackingLayout, BinLayout, np.ndarray, NodeTotal]:
    layout = BinLayout((3, 2))
    pair_format = PairFormat.logistic(40, 4)
    decryptor = PaillierDecryptor(key)
    packing = PackingLayout.fit(pair_format, decryptor.plaintext_bits)
    g, h = pair_format.encode_pairs(np.array([SECRET_GRADIENT, -0.5, 0.25, 0.0]), np.full(4, 0.125))
    encryptor = owner_encryptor(key)
    arithmetic = encryptor.arithmetic
    plan = plan_level(np.array([[0, 1, 2, 3], [0, 1, 2, 0]], np.uint8), layout, [np.arange(4, dtype=np.int32)])
    bins = sum_bins(arithmetic, encryptor.encrypt(pair_format.plaintext_rows(g, h)), plan)
    hidden = pack_and_hide(bins, packing, Rerandomiser(key.public_key, arithmetic))
    return decryptor, packing, layout, arithmetic.to_wire(hidden), NodeTotal.of_rows(g, h)


def _failures() -> list[Callable[[], object]]:
    key = toy_paillier()
    encryptor = owner_encryptor(key)
    arithmetic = encryptor.arithmetic
    decryptor, packing, layout, rows, total = _round(key)
    header = CiphertextHeader(key.public_key, Content.PACKED_BINS, packing, 1)
    message = encode_ciphertexts(header, arithmetic, encryptor.encrypt(signed_rows([SECRET_PLAINTEXT])))
    out_of_bounds = np.array([1.0 + SECRET_GRADIENT])
    return [
        lambda: decrypt_level(rows, decryptor, packing, layout, [replace(total, g=total.g + 1)]),
        lambda: decrypt_level(rows, decryptor, packing, layout, [replace(total, n_rows=0)]),
        lambda: packing.unpack([SECRET_PLAINTEXT << 700], packing.pairs_per_plaintext),
        lambda: encryptor.encrypt(signed_rows([SECRET_PLAINTEXT << 800], 120)),
        lambda: packing.pair_format.encode_pairs(out_of_bounds, np.zeros(1)),
        lambda: decode_ciphertexts(message[:-1], header, arithmetic),
        lambda: decode_ciphertexts(message[:-1] + b"\xff", header, arithmetic),
        lambda: arithmetic.from_wire(np.full((1, arithmetic.width), 255, np.uint8)),
        lambda: decryptor.decrypt(rows_from_ints([key.p], arithmetic.width)),
        lambda: PaillierPrivateKey.from_primes(key.p, key.p, allow_toy_keys=True),
        lambda: PaillierPrivateKey.from_primes(key.p, key.q),
        lambda: PaillierPrivateKey(key.q, key.p),
        lambda: pickle.dumps(key),
        lambda: pickle.dumps(encryptor.randomisers),
        lambda: pickle.dumps(owner_encryptor(key, "gmpy2").randomisers._source),
        lambda: pickle.dumps(PaillierDecryptor(key, "gmpy2")),
        lambda: pickle.dumps(Rerandomiser(key.public_key, open_backend("gmpy2", key.public_key.modulus))),
        lambda: copy.deepcopy(key),
    ]


def test_logs_errors_and_representations_hold_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG):
        generate_paillier_key(512, allow_toy_keys=True)
        decryptor, packing, layout, rows, total = _round(toy_paillier())
        sums = decrypt_level(rows, decryptor, packing, layout, [total])
        for provoke in _failures():
            with pytest.raises(Exception) as caught:
                provoke()
            shown.append("".join(traceback.format_exception(caught.value)))
        objects = [toy_paillier(), decryptor, owner_encryptor(toy_paillier()), sums[0]]
        shown += [f"{thing!r} {thing}" for thing in objects]
    everything = ("\n".join(shown) + caplog.text).lower()
    for secret in _secrets():
        assert secret not in everything


def test_the_search_finds_a_secret_that_is_shown() -> None:
    assert any(secret in f"p = {toy_paillier().p}" for secret in _secrets())
