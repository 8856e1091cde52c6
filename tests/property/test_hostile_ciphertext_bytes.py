"""Hostile bytes at the borders of BFV and CKKS.

The cases run in a process of their own: if one could crash the C++ library, the test fails instead of the test run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

FUZZ = """
import sys
import numpy as np
from he_processors import bfv, ckks
from he_processors.errors import ProtocolError

module = {"bfv": bfv, "ckks": ckks}[sys.argv[1]]
kind = {"bfv": bfv.BfvProcessor, "ckks": ckks.CkksProcessor}[sys.argv[1]]
rng = np.random.default_rng(int(sys.argv[2]))
secret = kind.generate(3)
site = kind.from_secret(secret)
public = site.public_parameters()
good = {"payload": site.encrypt(np.arange(-50, 50)), "public": public, "secret": secret}


def damage(data):
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        header = rng.random() < 0.5  # half of the damage goes to the few bytes that steer the rest
        start = int(rng.integers(0, 40 if header else len(data) + 1))
        choice = rng.integers(4)
        if choice == 0:
            data[start : start + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(0, 9)))
        elif choice == 1:
            data[start : start + 8] = rng.choice([b"\\xff" * 8, bytes(8), b"\\0\\0\\0\\x80" * 2])
        elif choice == 2:
            del data[start:]
        else:
            data += rng.bytes(int(rng.integers(1, 2000)))
    return bytes(data)


accepted = refused = 0
for _ in range(int(sys.argv[3])):
    bad = {name: damage(data) for name, data in good.items()}
    noise = rng.bytes(int(rng.integers(0, 200)))
    attempts = [
        lambda: module.add_ciphertexts(public, [good["payload"], bad["payload"]]),
        lambda: module.add_ciphertexts(bad["public"], [good["payload"]] * 2),
        lambda: site.decrypt(bad["payload"], 100),
        lambda: site.decrypt(noise, 100),
        lambda: kind.from_secret(bad["secret"]).encrypt(np.arange(3)),
        lambda: kind.from_secret(noise),
    ]
    for attempt in attempts:
        try:
            attempt()
            accepted += 1
        except ProtocolError:
            refused += 1
print(accepted, refused)
"""


@pytest.mark.parametrize("scheme", ["bfv", "ckks"])
def test_hostile_bytes_are_refused_or_harmless(scheme):
    arguments = [sys.executable, "-c", FUZZ, scheme, "1", "150"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    _accepted, refused = map(int, result.stdout.split())
    assert refused > 400, "most damage must be noticed; the rest is damage to residues, which only noise can show"
