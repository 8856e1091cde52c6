"""Blinding of ids with a secret key, by elliptic-curve Diffie-Hellman: H(id)^k, and the same with several keys.

Blinding commutes: whoever blinds first, the result is H(id)^(k1 k2 ... km). The curve arithmetic (P-256, hashing to
the curve, checking that points lie on it) is openmined-psi's, the library behind NVFlare's own DH-PSI. Its building
blocks are used here, not NVFlare's task handler around them, because that one

* is for two parties at a time, so that one party of three learns every pairwise intersection;
* loads the full set again when an intersection was empty;
* puts ids into the text of exceptions, which FLARE sends to the server.

Nor is the library's Bloom filter used: sets of points are compared exactly, so that the rate of false positives is
that of a collision of SHA-256.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from he_processors.errors import BackendUnavailable, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

POINT_BYTES = 33
KEY_BYTES = 32
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256, a prime
_PER_CALL = 4096  # the library holds Python's lock: long calls would keep the site from giving signs of life


def psi_library() -> ModuleType:
    """Return the module of openmined-psi.

    Raises:
        BackendUnavailable: it is not installed, or does not run here.
    """
    try:
        import private_set_intersection.python as psi
    except ImportError as error:
        raise BackendUnavailable(
            'the alignment of rows needs openmined-psi: pip install "veilboost[psi]" (Linux with glibc 2.35 or later; '
            f"{type(error).__name__})"
        ) from None
    library: ModuleType = psi
    return library


class BlindingKey:
    """A fresh secret key of one party for one intersection.

    Security: under the decisional Diffie-Hellman assumption on P-256, with the hash as a random oracle, blinded ids of
        others look like random points. The key never leaves the process and is used for one intersection only.
    """

    def __init__(self, randomness: RandomSource = OS_RANDOMNESS) -> None:
        psi = psi_library()
        secret = 1 + random_below(_ORDER - 1, randomness)
        inverse = pow(secret, -1, _ORDER)
        self._request = psi.Request
        self._hashing = psi.client.CreateFromKey(secret.to_bytes(KEY_BYTES, "big"), True)
        self._blinding = psi.server.CreateFromKey(secret.to_bytes(KEY_BYTES, "big"), True)
        self._unblinding = psi.server.CreateFromKey(inverse.to_bytes(KEY_BYTES, "big"), True)

    def blind_items(self, items: Sequence[str]) -> list[bytes]:
        """Hash items to the curve and blind them, in order.

        Args:
            items: printable ASCII; hashes of ids, so that nothing the library might say about them is an id.
        """
        return _in_parts(items, lambda part: self._hashing.CreateRequest(part).encrypted_elements)

    def blind(self, points: Sequence[bytes]) -> list[bytes]:
        """Blind points further, in order. Raises: ProtocolError, if one is no point of the curve."""
        return _in_parts(points, lambda part: self._power(self._blinding, part))

    def unblind(self, points: Sequence[bytes]) -> list[bytes]:
        """Take this key's blinding off, in order. Raises: ProtocolError, if one is no point of the curve."""
        return _in_parts(points, lambda part: self._power(self._unblinding, part))

    def _power(self, key: Any, points: list[bytes]) -> Sequence[bytes]:
        result: Sequence[bytes] = key.ProcessRequest(
            self._request(reveal_intersection=True, encrypted_elements=points)
        ).encrypted_elements
        return result


def _in_parts(values: Sequence[Any], work: Callable[[list[Any]], Sequence[bytes]]) -> list[bytes]:
    results: list[bytes] = []
    for start in range(0, len(values), _PER_CALL):
        part = list(values[start : start + _PER_CALL])
        results += _quietly(work, part)
    if len(results) != len(values) or any(len(point) != POINT_BYTES for point in results):
        raise ProtocolError("the alignment's curve arithmetic gave something other than one point for each")
    return results


def _quietly(work: Callable[[list[Any]], Sequence[bytes]], part: list[Any]) -> Sequence[bytes]:
    """Call the library; what its exceptions quote is kept from every message and traceback."""
    try:
        return work(part)
    except (RuntimeError, TypeError, ValueError):
        pass
    raise ProtocolError("a party sent something that is no point of the alignment's curve")
