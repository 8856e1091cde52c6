"""One site alone against another, under CKKS: does the noise of a decrypted sum tell single contributions?

Encoding rounds coefficients, and the remainders depend on one site's integers. The attack here takes the sum's noise,
subtracts its own remainders and tries all splits of the rest over the two other sites. It finds the right one in the
lattice noise alone, and must not find it in what the processor really sends.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from he_processors import ckks
from he_processors.ckks import CkksProcessor, add_ciphertexts

N = 8192
SCALE = 2.0**28  # small, so that remainders are large beside FFT errors; the attack works at any scale
ROWS = (500, 731, 482)  # the attacker's own first


def coefficients(slots: NDArray[np.complex128]) -> NDArray[np.float64]:
    """Return the polynomial that has the given values at the primitive 2N-th roots of unity, in SEAL's order."""
    powers = np.array([pow(3, j, 2 * N) for j in range(N // 2)])
    values = np.zeros(2 * N, dtype=np.complex128)
    values[powers], values[2 * N - powers] = slots, slots.conj()
    return np.fft.fft(values)[:N].real / N


def remainders(unit: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    return np.rint(unit * count) - unit * count


def units_of(site: CkksProcessor, payload: bytes, n_values: int) -> NDArray[np.float64]:
    """Return the coefficients of a one-ciphertext message as whoever has the key sees them."""
    plaintext = next(site._key.decrypt(payload, n_values))
    return coefficients(np.array(site._encoder.decode_complex(plaintext)) * ckks._SCALE)


def best_split(n_values: int) -> tuple[set[int], float]:
    """Attack one sum of row counts; return the most probable counts of the two other sites, and the score."""
    secret = CkksProcessor.generate(3)
    sites = [CkksProcessor(secret) for _ in ROWS]
    payloads = [site.encrypt(np.full(n_values, rows)) for site, rows in zip(sites, ROWS, strict=True)]
    total = add_ciphertexts(sites[0].public_parameters(), payloads)
    attacker = sites[0]
    ones = np.zeros(N)
    ones[:n_values] = 1.0
    unit = coefficients(ones.view(np.complex128) * ckks._SCALE)
    pooled = int(attacker.decrypt(total, n_values)[0])
    noise = units_of(attacker, total, n_values) - unit * pooled
    noise -= units_of(attacker, payloads[0], n_values) - unit * ROWS[0]  # its own ciphertext's share is known to it
    others = pooled - ROWS[0]
    scores = {}
    for count in range(others // 2 + 1):
        guess = remainders(unit, count) + remainders(unit, others - count)
        scores[count] = float(guess @ noise / (np.linalg.norm(guess) * noise.std() + 1e-9))
    count = max(scores, key=scores.__getitem__)
    return {count, others - count}, scores[count]


@pytest.mark.parametrize("n_values", [1, 31])
def test_the_attack_succeeds_without_noise_below_the_grid(monkeypatch, n_values):
    monkeypatch.setattr(ckks, "_SCALE", SCALE)
    monkeypatch.setattr(ckks, "_NOISE_OF_ALL_SITES", 0.0)
    found, _ = best_split(n_values)
    assert found == set(ROWS[1:])


@pytest.mark.parametrize("n_values", [1, 31])
def test_the_attack_fails_against_what_is_sent(n_values):
    _, score = best_split(n_values)
    assert score < 5.5  # the best of 600 chance scores stays below with probability 1 - 2e-5


def test_noise_below_the_grid_fills_every_slot_and_keeps_its_bound():
    processor = CkksProcessor(CkksProcessor.generate(4))
    slots = processor._with_noise(np.array([7, -3]))
    noise = slots - np.concatenate([[7, -3], np.zeros(N - 2)])
    bound = 0.05 / 4
    assert np.abs(noise).max() <= bound
    assert noise.std() == pytest.approx(bound / np.sqrt(3), rel=0.05)
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.06
