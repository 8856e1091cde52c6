"""Certificates as ``verify`` needs them: whose they are, who issued them, what they signed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors.errors import AuthenticationError
from nvflare_plugins.evidence.audit import Certified
from nvflare_plugins.site.certificates import (
    UNREADABLE,
    check_role,
    check_site_chain,
    fingerprint,
    public_key_bytes,
    verify_signature,
)


class FlareAuthority:
    """Believes site certificates that lead to the project's root; without a root, any that names the site as one.

    A certificate must have been valid when the job ran: at the times that the evidence states.

    Security: without ``root`` a forger of all logs can bring certificates of his own. A server's certificate from
        ordinary provisioning differs from a site's in nothing but its name: only ``server_names`` tells it.

    Args:
        root: the project's root, never from the evidence.
        server_names: names of the project's servers, which are never a site's.
    """

    def __init__(self, root: x509.Certificate | None, server_names: Collection[str] = ()) -> None:
        self._root = root
        self._server_names = frozenset(server_names)

    def certified(self, site: str, certificate: str, moments: Sequence[datetime]) -> Certified:
        """Check that a certificate belonged to ``site`` at these moments. Raises: AuthenticationError."""
        leaf, *others = _load(certificate)
        try:
            self._check(leaf, others, site, moments)
            return Certified(fingerprint(leaf).hex(), hashlib.sha256(public_key_bytes(leaf)).hexdigest())
        except UNREADABLE:
            raise AuthenticationError("it is malformed") from None

    def check(self, certificate: str, statement: bytes, signature: bytes) -> None:
        """Check a signature by the certificate's key. Raises: AuthenticationError."""
        verify_signature(_load(certificate)[0], statement, signature)

    def _check(
        self, leaf: x509.Certificate, others: Sequence[x509.Certificate], site: str, moments: Sequence[datetime]
    ) -> None:
        if not moments:
            raise AuthenticationError("it was not said when the job ran")
        for moment in moments:
            if not leaf.not_valid_before_utc <= moment <= leaf.not_valid_after_utc:
                raise AuthenticationError(f"it was not valid on {moment:%Y-%m-%d}, when the job ran")
        if self._root is None:
            check_role(leaf, site, self._server_names)
        else:
            chain = [c.public_bytes(Encoding.DER) for c in (leaf, *others)]
            for moment in moments:
                check_site_chain(chain, site, self._root, self._server_names, moment)


def _load(certificate: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(certificate.encode())
    except UNREADABLE:
        raise AuthenticationError("it is no certificate in PEM form") from None
