"""Certificates as ``verify`` needs them: whose they are, who issued them, what they signed."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from he_processors.errors import AuthenticationError
from nvflare_plugins.certificates import check_site_chain, fingerprint, verify_signature


class FlareAuthority:
    """Believes site certificates that lead to the project's root; without a root, any that name the site.

    Evidence outlives certificates: a chain is checked as of today or, if it has expired since, of its last day.

    Security: without ``root`` a forger of all logs can bring certificates of his own; ``verify`` says so.
    """

    def __init__(self, root: x509.Certificate | None):
        self._root = root

    def fingerprint(self, site: str, certificate: str) -> str:
        """Return the hex SHA-256 of the certificate in DER form. Raises: AuthenticationError."""
        leaf, *others = _load(certificate)
        if self._root is None:
            names = [attribute.value for attribute in leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
            if names != [site]:
                raise AuthenticationError("it names another party")
        else:
            chain = [c.public_bytes(Encoding.DER) for c in (leaf, *others)]
            check_site_chain(chain, site, self._root, (), min(datetime.now(UTC), leaf.not_valid_after_utc))
        return fingerprint(leaf).hex()

    def check(self, certificate: str, statement: bytes, signature: bytes) -> None:
        """Check a signature by the certificate's key. Raises: AuthenticationError."""
        verify_signature(_load(certificate)[0], statement, signature)


def _load(certificate: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(certificate.encode())
    except ValueError:
        raise AuthenticationError("it is no certificate in PEM form") from None
